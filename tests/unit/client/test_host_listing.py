"""What a host lists of a job's files: a name that leads elsewhere is named, and not followed."""

from __future__ import annotations

import stat
from typing import cast

import paramiko
import pytest

from orchestrator.client import host_listing


class Host:
    """An SFTP client of a host that has these files in `code`."""

    def __init__(self, *names: str) -> None:
        self._names = names

    def listdir_attr(self, path: str) -> list[paramiko.SFTPAttributes]:
        if path != "jobs/a/code":
            raise FileNotFoundError(path)
        entries = []
        for name in self._names:
            entry = paramiko.SFTPAttributes()
            entry.filename, entry.st_mode, entry.st_size, entry.st_mtime = name, stat.S_IFREG | 0o644, 5, 7
            entries.append(entry)
        return entries


@pytest.mark.parametrize("name", ["..", "../a", "a/../../b", "/etc/a", "a\0b", "n" * 256])
def test_unusable_local_name_is_named_and_not_fetched(name: str) -> None:
    """A name that is impossible on this machine is named and not fetched."""
    missing, odd = list[str](), list[str]()
    client = cast(paramiko.SFTPClient, Host(name, "out.csv"))
    files = list(host_listing.list_files(client, "jobs/a", {}, missing, odd))
    assert [(file.name, file.size_bytes, file.mtime_ns) for file in files] == [("code/out.csv", 5, 7 * 10**9)]
    assert odd == [] and [text.partition(";")[0] for text in missing] == [
        f"{f'code/{name}'!r} is not a valid file name here"
    ]
