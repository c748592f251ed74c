"""Is a folder on a disk of one machine told from one that other machines may see? Lists of mounts, as Linux writes them."""

from __future__ import annotations

from pathlib import Path

import pytest

from orchestrator.slurm.disks import local_kind


@pytest.mark.parametrize(
    ("kind", "told"),
    [("ext4", "ext4"), ("tmpfs", "tmpfs"), ("overlay", "overlay"), ("nfs4", ""), ("lustre", ""), ("fuse.sshfs", "")],
)  # fmt: skip
def test_the_innermost_mount_of_a_folder_counts(tmp_path: Path, kind: str, told: str) -> None:
    home = tmp_path / "my home"
    home.mkdir()
    point = str(home).replace(" ", "\\040")
    mounts = tmp_path / "mountinfo"
    mounts.write_text(
        "22 1 8:1 / / rw,relatime shared:1 - xfs /dev/sda1 rw\n"
        f"40 22 0:30 / {point} rw,relatime shared:2 master:3 - {kind} server:/home rw\n"
        f"41 22 0:31 / {tmp_path}/my rw - nfs4 server:/other rw\n"
    )
    assert local_kind(home / "me" / ".orch", mounts) == told
    assert local_kind(tmp_path, mounts) == "xfs"


def test_where_no_mounts_are_listed_nothing_is_said(tmp_path: Path) -> None:
    assert local_kind(tmp_path, tmp_path / "nosuch") == ""
