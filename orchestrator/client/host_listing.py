"""Listing of a job's files on an SSH host: the files to fetch, and a text for each that cannot be fetched.

Rules: if something cannot be listed, the rest is fetched anyway; it is named, and its host is not cleaned up.
"""

from __future__ import annotations

import contextlib
import stat
import tarfile
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from orchestrator.client.collect import is_hidden, is_rank_file
from orchestrator.core.checkpoints.checkpoint import CheckpointFile
from orchestrator.core.jobdir.layout import JobDir
from orchestrator.supervisor.transfers.checkpoint_copies import is_safe_name

if TYPE_CHECKING:
    import paramiko

FILES_MAX = 100_000
DEPTH_MAX = 20
COPY_HINT = "copy it by hand: scp -r; then orch clean --discard"


def list_files(
    sftp: paramiko.SFTPClient,
    root: str,
    sizes_in_archive: Mapping[str, int],
    missing: list[str],
    skipped: list[str],
) -> Iterator[CheckpointFile]:
    """Yield the files of a job on a host that may have to be fetched, without those of the snapshot, with times in whole seconds; append to `missing` a text for
    what cannot be listed, to `skipped` one for what is not a file."""
    count = 0
    pending = [(name, 1) for name in ("logs", "evidence", "nodes", "checkpoints", "code")]
    while pending:
        folder, depth = pending.pop()
        try:
            entries = sorted(sftp.listdir_attr(f"{root}/{folder}"), key=lambda entry: entry.filename)
        except FileNotFoundError:
            continue
        except (OSError, UnicodeDecodeError) as err:
            why = "an entry has a name that is not UTF-8" if isinstance(err, ValueError) else err.strerror or str(err)
            missing.append(f"{folder} of the job cannot be listed: {why}; {COPY_HINT}")
            continue
        for entry in entries:
            name, mode = f"{folder}/{entry.filename}", entry.st_mode or 0
            if is_hidden(name):
                continue
            if not is_safe_name(name):
                missing.append(f"{name!r} is not a valid file name here; {COPY_HINT}")
                continue
            count += 1
            if count > FILES_MAX:
                missing.append(f"more than {FILES_MAX:,} files of the job, from {name} on; {COPY_HINT}")
                return
            if stat.S_ISDIR(mode) and depth >= DEPTH_MAX:
                missing.append(f"{name} is more than {DEPTH_MAX} folders deep; {COPY_HINT}")
            elif stat.S_ISDIR(mode):
                pending.append((name, depth + 1))
            elif stat.S_ISREG(mode):
                if entry.st_mtime or sizes_in_archive.get(name) != entry.st_size:
                    yield CheckpointFile(name, entry.st_size or 0, int(entry.st_mtime or 0) * 10**9)
            elif is_rank_file(name) and name not in sizes_in_archive:
                skipped.append(f"{name} is a link, a pipe or another special file, and was not copied")


def sizes_in_archive(job: JobDir) -> dict[str, int]:
    """Return the files of the snapshot's archive, by names in the job's folder, with sizes: it gives files no
    time, and neither do other archives that ranks may unpack. Nothing if it cannot be read: then all come."""
    with contextlib.suppress(OSError, EOFError, tarfile.TarError), tarfile.open(job.archive) as archive:
        return {f"code/{file.name}": file.size for file in archive}
    return {}
