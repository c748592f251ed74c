"""Is the snapshot the code that was there at submit, and nothing else? Real folders, real links, real git."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import tarfile
from pathlib import Path

import pytest

from orchestrator.core.errors import UserError
from orchestrator.submission import snapshot
from tests.support.unprivileged import unprivileged

pytestmark = pytest.mark.slow

NOWHERE = Path("/no/job/home")
LIMIT_MB = 10
ENV = {
    "PATH": os.environ["PATH"], "HOME": "/nonexistent", "GIT_CONFIG_NOSYSTEM": "1", "GIT_AUTHOR_NAME": "a",
    "GIT_AUTHOR_EMAIL": "a@b", "GIT_COMMITTER_NAME": "a", "GIT_COMMITTER_EMAIL": "a@b",
}  # fmt: skip


def _git(folder: Path, *words: str) -> None:
    subprocess.run(["git", "-C", folder, *words], check=True, capture_output=True, timeout=30, env=ENV)


def _write(root: Path, *names: str) -> None:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"this is {name}\n")


@pytest.fixture
def repo(tmp_path: Path) -> Path:
    """Return a repository with a tracked file, a new one, and an ignored folder."""
    root = tmp_path / "repo"
    _write(root, "train.py", "pkg/model.py", ".gitignore", "data/big.bin", "out/x.log")
    (root / ".gitignore").write_text("data/\n*.log\n")
    _git(root.parent, "init", "-q", "repo")
    _git(root, "add", "train.py", ".gitignore")
    _git(root, "commit", "-q", "-m", "first")
    return root


def _taken(root: Path, to: Path, leave_out: Path = NOWHERE) -> dict[str, str]:
    """Take a snapshot; return its files with their texts, and its links with an arrow and where they lead."""
    snapshot.copy_files(snapshot.plan_snapshot(root, LIMIT_MB, leave_out), to)
    found = {}
    for folder, folders, files in os.walk(to):
        for name in [*files, *folders]:
            path = Path(folder) / name
            if path.is_symlink():
                found[str(path.relative_to(to))] = f"→ {os.readlink(path)}"  # noqa: PTH115 -- as it is written
            elif path.is_file():
                found[str(path.relative_to(to))] = path.read_text()
    return found


def test_git_copies_tracked_files_and_links_ignored_ones(repo: Path, tmp_path: Path) -> None:
    taken = _taken(repo, tmp_path / "to")
    assert taken == {
        "train.py": "this is train.py\n", "pkg/model.py": "this is pkg/model.py\n", ".gitignore": "data/\n*.log\n",
        "data": f"→ {repo}/data", "out": f"→ {repo}/out",
    }  # fmt: skip


def test_snapshot_has_uncommitted_edits_but_not_later_ones(repo: Path, tmp_path: Path) -> None:
    (repo / "train.py").write_text("edited\n")
    taken = _taken(repo, tmp_path / "to")
    (repo / "train.py").write_text("edited again\n")
    assert taken["train.py"] == (tmp_path / "to/train.py").read_text() == "edited\n"


def test_deleted_tracked_file_is_left_out(repo: Path, tmp_path: Path) -> None:
    (repo / "train.py").unlink()
    assert "train.py" not in _taken(repo, tmp_path / "to")


def test_folder_inside_repository_is_copied_alone(repo: Path, tmp_path: Path) -> None:
    assert _taken(repo / "pkg", tmp_path / "to") == {"model.py": "this is pkg/model.py\n"}


def test_everything_is_copied_without_git(tmp_path: Path) -> None:
    root = tmp_path / "plain"
    _write(root, "train.py", "data/big.bin", ".hidden", "a/b/c/d.txt")
    assert set(_taken(root, tmp_path / "to")) == {"train.py", "data/big.bin", ".hidden", "a/b/c/d.txt"}


@pytest.mark.parametrize("by_git", [True, False])
def test_virtual_environment_is_linked_but_not_sent(repo: Path, tmp_path: Path, by_git: bool) -> None:
    root = repo if by_git else tmp_path / "plain"
    _write(root, "a/env/pyvenv.cfg", "a/env/bin/python", "a/env/lib/torch.py", "a/env.py", "b/pyvenv.cfg")
    taken = _taken(root, tmp_path / "code")
    assert taken["a/env"] == f"→ {root}/a/env" and {"a/env.py", "b/pyvenv.cfg"} <= set(taken)
    assert not any(name.startswith("a/env/") for name in _members(_packed(root, tmp_path / "code.tar.gz")))


def test_entirely_ignored_workdir_is_copied_entirely(repo: Path, tmp_path: Path) -> None:
    """A workdir that git ignores as a whole is copied as a whole."""
    _write(repo, "data/run/train.py", "data/run/x.log")
    assert set(_taken(repo / "data/run", tmp_path / "to")) == {"train.py", "x.log"}


def test_nested_repository_and_submodule_come_without_git(repo: Path, tmp_path: Path) -> None:
    """A repository inside and a submodule are included without their .git."""
    _write(repo, "nested/lib.py")
    _git(repo, "init", "-q", "nested")
    other = tmp_path / "other"
    _write(other, "sub.py")
    _git(tmp_path, "init", "-q", "other")
    _git(other, "add", ".")
    _git(other, "commit", "-q", "-m", "one")
    _git(repo, "-c", "protocol.file.allow=always", "submodule", "add", "-q", str(other), "module")
    taken = _taken(repo, tmp_path / "to")
    assert taken["nested/lib.py"] and taken["module/sub.py"]
    assert [name for name in taken if ".git/" in name or name.endswith("/.git")] == []


def test_links_keep_their_meaning(tmp_path: Path) -> None:
    root, outside = tmp_path / "code", tmp_path / "shared"
    _write(root, "pkg/a.py")
    _write(outside, "w.bin")
    links = {
        "inside": "pkg/a.py", "pkg/up": "../pkg/a.py", "folder": "pkg", "out": "../shared/w.bin",
        "absolute": str(outside), "own-absolute": str(root / "pkg"), "dangling": "nowhere", "dangling-out": "../none",
    }  # fmt: skip
    for name, goal in links.items():
        (root / name).symlink_to(goal)
    taken = _taken(root, tmp_path / "to")
    assert {name: taken[name] for name in links} == {
        "inside": "→ pkg/a.py", "pkg/up": "→ ../pkg/a.py", "folder": "→ pkg", "out": f"→ {outside}/w.bin",
        "absolute": f"→ {outside}", "own-absolute": "→ pkg", "dangling": "→ nowhere", "dangling-out": f"→ {tmp_path}/none",
    }  # fmt: skip
    assert (tmp_path / "to/inside").read_text() == "this is pkg/a.py\n"


def test_sockets_and_pipes_are_left_out(tmp_path: Path) -> None:
    root = tmp_path / "code"
    _write(root, "train.py")
    os.mkfifo(root / "pipe")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(root / "sock"))
        assert set(_taken(root, tmp_path / "to")) == {"train.py"}


def test_oversized_snapshot_copies_nothing_and_names_largest(tmp_path: Path) -> None:
    """Over the limit nothing is copied, and the largest files are named."""
    root = tmp_path / "code"
    _write(root, "train.py")
    for number in range(7):
        with (root / f"w{number}.bin").open("wb") as file:
            file.truncate((number + 1) * 1_000_000)
    with pytest.raises(UserError) as told:
        snapshot.plan_snapshot(root, LIMIT_MB, NOWHERE)
    assert "w6.bin (7 MB), w5.bin (6 MB), w4.bin (5 MB), w3.bin (4 MB), w2.bin (3 MB)" in told.value.what
    assert "28 MB, over snapshot.limit_mb 10" in told.value.what and "w1.bin" not in told.value.what
    assert ".gitignore" in told.value.fix and "snapshot.limit_mb" in told.value.fix


def test_job_home_inside_workdir_is_left_out(repo: Path, tmp_path: Path) -> None:
    _write(repo, "runs/jobs/old/checkpoint.pt")
    assert [name for name in _taken(repo, tmp_path / "1", repo / "runs") if name.startswith("runs")] == []
    shutil.rmtree(repo / ".git")
    assert [name for name in _taken(repo, tmp_path / "2", repo / "runs") if name.startswith("runs")] == []


def test_job_home_in_ignored_folder_is_not_linked(repo: Path, tmp_path: Path) -> None:
    _write(repo, "data/home/jobs/old/x", "data/set/y")
    taken = _taken(repo, tmp_path / "to", repo / "data/home")
    assert taken["data"] == f"→ {repo}/data"


def test_names_needing_quotes_are_preserved(repo: Path, tmp_path: Path) -> None:
    """Names that shells and git quote are preserved."""
    names = ['a "b" $(c)', "new\nline", "tab\there", "-rf", "ünïcode 日本", "\\back"]
    for name in names:
        (repo / name).write_text("x\n")
    raw = os.fsdecode(b"latin-\xe9.py")
    (repo / raw).write_text("x\n")
    assert {*names, raw} <= set(_taken(repo, tmp_path / "to"))


def test_file_mode_is_kept_without_setuid_bits(tmp_path: Path) -> None:
    """The mode of a file stays except for the set-user-ID and set-group-ID bits."""
    root = tmp_path / "code"
    _write(root, "run.sh")
    (root / "run.sh").chmod(0o6755)
    _taken(root, tmp_path / "to")
    assert (tmp_path / "to/run.sh").stat().st_mode & 0o7777 == 0o755


@pytest.mark.parametrize("name", ["secret.pem", "pkg"])
def test_unreadable_file_or_folder_is_named(tmp_path: Path, name: str) -> None:
    """A file or folder that cannot be read is named."""
    root = tmp_path / "code"
    _write(root, "secret.pem", "pkg/a.py")
    (root / name).chmod(0)
    with unprivileged(tmp_path), pytest.raises(UserError) as told:
        _taken(root, tmp_path / "to")
    assert told.value.where.endswith(name)


def test_file_vanishing_before_copy_is_named(tmp_path: Path) -> None:
    root = tmp_path / "code"
    _write(root, "a.py")
    survey = snapshot.plan_snapshot(root, LIMIT_MB, NOWHERE)
    (root / "a.py").unlink()
    with pytest.raises(UserError) as told:
        snapshot.copy_files(survey, tmp_path / "to")
    assert told.value.where.endswith("a.py")


def test_broken_repository_is_an_error(tmp_path: Path) -> None:
    root = tmp_path / "code"
    _write(root, "train.py")
    (root / ".git").write_text("gitdir: /no/such/place\n")
    with pytest.raises(UserError) as told:
        snapshot.plan_snapshot(root, LIMIT_MB, NOWHERE)
    assert "git cannot list this folder" in told.value.what and told.value.fix


def test_repository_without_git_program_is_an_error(repo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(UserError) as told:
        snapshot.plan_snapshot(repo, LIMIT_MB, NOWHERE)
    assert told.value.fix == "install git"


def test_snapshot_with_too_many_files_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A snapshot of a folder with a huge number of files is refused."""
    monkeypatch.setattr(snapshot, "FILES_MAX", 3)
    _write(tmp_path / "code", *(f"{number}.py" for number in range(5)))
    with pytest.raises(UserError, match="more than 3 files"):
        snapshot.plan_snapshot(tmp_path / "code", LIMIT_MB, NOWHERE)


# The archive


def _packed(root: Path, to: Path, *sync: str, limit_mb: int = 1) -> Path:
    """Pack the snapshot of `root` and what is synced into `to/code.tar.gz`."""
    taken = snapshot.add_synced(snapshot.plan_snapshot(root, limit_mb, to), sync, limit_mb, to)
    to.mkdir()
    snapshot.copy_files(taken, to / "code")
    snapshot.write_archive(taken, to / "code", to / "code.tar.gz")
    return to / "code.tar.gz"


def _members(path: Path) -> dict[str, tarfile.TarInfo]:
    with tarfile.open(path) as archive:
        return {member.name: member for member in archive.getmembers()}


def test_archive_holds_copies_and_nothing_ignored(repo: Path, tmp_path: Path) -> None:
    assert list(_members(_packed(repo, tmp_path / "to"))) == [".gitignore", "pkg/model.py", "train.py"]


def test_archive_is_private(repo: Path, tmp_path: Path) -> None:
    """An archive is private, since a file in it may be."""
    assert _packed(repo, tmp_path / "to").stat().st_mode & 0o777 == 0o600


def test_same_content_makes_same_archive(repo: Path, tmp_path: Path) -> None:
    (repo / "train.py").chmod(0o777)
    first = _packed(repo, tmp_path / "one", "data")
    for path in sorted(repo.rglob("*")):
        if ".git" not in path.parts:
            os.utime(path, (1e9, 1e9))
    (repo / "train.py").chmod(0o700)
    assert first.read_bytes() == _packed(repo, tmp_path / "two", "data").read_bytes()
    members = _members(first)
    assert (members["train.py"].mode, members["pkg/model.py"].mode) == (0o755, 0o644)
    assert {(one.uid, one.gid, one.uname, one.mtime) for one in members.values()} == {(0, 0, "", 0)}


def test_sync_includes_named_files_and_follows_outer_links(repo: Path, tmp_path: Path) -> None:
    """Files that sync names are included, and a link that leaves the folder as the file itself."""
    (tmp_path / "weights").write_text("far away")
    (repo / "data/far").symlink_to(tmp_path / "weights")
    (repo / "data/near").symlink_to("x.bin")
    _write(repo, "data/x.bin")
    (repo / "data/odd\nname \udcff").write_bytes(b"x")
    path = _packed(repo, tmp_path / "to", "./data/", "train.py")
    members = _members(path)
    assert {"data/far", "data/near", "data/x.bin", "data/odd\nname \udcff"} <= members.keys()
    assert members["data/near"].issym() and members["data/near"].linkname == "x.bin"
    with tarfile.open(path) as archive:
        far = archive.extractfile("data/far")
        assert far is not None and far.read() == b"far away"


def test_sync_of_whole_folder_excludes_only_repository(repo: Path, tmp_path: Path) -> None:
    """sync of the whole folder sends everything except the repository."""
    names = list(_members(_packed(repo, tmp_path / "to", ".")))
    assert names == [".gitignore", "data/big.bin", "out/x.log", "pkg/model.py", "train.py"]


def test_hard_links_become_two_files(repo: Path, tmp_path: Path) -> None:
    """Two names of one file are two files."""
    _write(repo, "data/a")
    (repo / "data/b").hardlink_to(repo / "data/a")
    members = _members(_packed(repo, tmp_path / "to", "data"))
    assert members["data/a"].isreg() and members["data/b"].isreg() and members["data/b"].size > 0


@pytest.mark.parametrize(
    ("path", "words"), [("nope", "there is no nope"), ("../x", "lies outside"), ("/etc", "lies outside")]
)
def test_missing_or_outside_sync_path_is_refused(repo: Path, tmp_path: Path, path: str, words: str) -> None:
    with pytest.raises(UserError, match=words):
        _packed(repo, tmp_path / "to", path)


def test_oversized_sync_is_refused_with_both_sizes(repo: Path, tmp_path: Path) -> None:
    """A sync over the limit is refused with both sizes."""
    with (repo / "data/big.bin").open("wb") as file:
        file.truncate(1_600_000)
    with pytest.raises(UserError, match=r"code \(0 MB\) and ssh\.sync \(2 MB in data\) are over snapshot\.limit_mb 1"):
        _packed(repo, tmp_path / "to", "data")
    assert _packed(repo, tmp_path / "to", "data", limit_mb=2).exists()


def test_full_disk_is_not_blamed_on_file(repo: Path, tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No space left"):
        snapshot.write_archive(snapshot.plan_snapshot(repo, 1, NOWHERE), repo, Path("/dev/full"))
