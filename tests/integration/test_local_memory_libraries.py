"""Libraries that delete their old checkpoints and find their newest by themselves, while their folder is in memory, and older ones
become links to the disk: do they end as without orch?"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

from orchestrator.core.checkpoints import disk, ledger
from orchestrator.core.checkpoints.checkpoint import CheckpointState
from orchestrator.core.checkpoints.memory import memory_folder
from orchestrator.supervisor.status import ENDED
from tests.support.framework_scripts import COMMON
from tests.support.library_scripts import EVERY, LIBRARIES, STEPS, Library
from tests.support.local import Desk, Sight, kill, wait_until
from tests.support.packages import need
from tests.support.torch_script import under_torchrun

pytestmark = pytest.mark.soak

RUN_S_MAX = 180.0


@pytest.mark.parametrize("library", LIBRARIES, ids=lambda library: library.name)
def test_library_rotates_and_resumes_through_links(desk: Desk, memory_dir: Path, library: Library) -> None:
    """A rank is killed, and later the job is cancelled and resumed: each time the library finds its newest by itself."""
    need(library.package)
    job = desk.submit(
        {"train.py": library.text},
        entrypoint="train.py",
        checkpoint={"memory": "2G", "memory_dir": str(memory_dir), "keep": 6},
        restart={"max": 1},
        env={"PACE_S": "0.15"},
    )
    folder = memory_folder(str(memory_dir), job.job.id, "node-0") / "checkpoints"
    wait_until(lambda: _links(folder, job) or job.seen()["state"] in ENDED, "links to the disk", RUN_S_MAX)
    assert _links(folder, job), (job.seen()["reason"], job.log())
    kill(job.rank_procs()[1])
    wait_until(
        lambda: len(re.findall("^made ", job.log(0, 2), re.MULTILINE)) > EVERY or job.seen()["state"] in ENDED,
        "steps of attempt 2",
        RUN_S_MAX,
    )
    assert job.seen()["state"] not in ENDED, (job.seen()["reason"], job.log(0, 2))
    job.job.cancel()
    assert job.wait()["state"] == "CANCELLED"
    wait_until(lambda: not folder.exists(), "the end of the folder in memory")
    assert job.seen()["step"] < STEPS
    job.job.resume()
    status = job.wait(RUN_S_MAX)
    assert status["state"] == "SUCCEEDED", (status["reason"], job.log(0, 3))
    for attempt in (2, 3):
        began, before = _said(job, attempt, "begins from"), max(map(int, _all(job, attempt - 1, "made")))
        first = int(_said(job, attempt, "made"))
        assert first > EVERY and before - first < 2 * EVERY, (attempt, began, before, first)
    logs = [job.log(rank, attempt) for rank in (0, 1) for attempt in (1, 2, 3)]
    assert not any(re.search(r"FileNotFoundError|FileExistsError|OSError|Errno", log) for log in logs), logs
    wait_until(lambda: not folder.exists(), "the end of the folder in memory")
    _assert_on_disk(job, desk, library)
    if library.name == "lightning":  # it does not see again those that it has deleted in memory alone
        assert {*library.left} <= {*ast.literal_eval(_said(job, 3, "left"))}
        assert _said(job, 3, "best").endswith("step=8.ckpt 8")
    else:
        assert _said(job, 3, "left") == str(sorted(library.left))
    job.job.resume(overrides=("entrypoint=train.py again",))  # there is nothing left to do, from links alone
    assert job.wait(RUN_S_MAX)["state"] == "SUCCEEDED", job.log(0, 4)
    assert {*library.left} <= {*ast.literal_eval(_said(job, 4, "left"))}
    assert not re.search("^(made|begins from None)", job.log(0, 4), re.MULTILINE), job.log(0, 4)
    if '"best"' in library.script:
        assert _said(job, 4, "best") == _said(job, 3, "best")
    calm = desk.folder / "calm"
    (calm / "saved").mkdir(parents=True)
    env = {"PACE_S": "0", "ORCH_CHECKPOINT_DIR": str(calm / "saved")}
    weights = [_all(job, 3, "weights", rank)[0] for rank in (0, 1)]
    assert weights == under_torchrun(calm, library.text, env)
    assert sorted(path.name for path in (calm / "saved" / library.inner).iterdir()) == sorted(library.left)


def _assert_on_disk(job: Sight, desk: Desk, library: Library) -> None:
    """What the library has left is on the disk, no link leads to memory, and the library can load all of it."""
    on_disk = job.job.folder.checkpoints
    assert {*library.left} <= {path.name for path in (on_disk / library.inner).iterdir()}
    links = {path: path.readlink() for path in on_disk.rglob("*") if path.is_symlink()}
    assert all(path.exists() and not target.is_absolute() for path, target in links.items()), links
    known, _ = ledger.read(job.root, job.job.folder.ledger)
    whole = [one for one in known.values() if one.state is CheckpointState.WHOLE]
    assert whole and not any(place.is_memory for one in whole for place in one.locations), whole
    assert all(disk.matches_record(on_disk, piece) for one in whole for piece in one.files), whole
    (desk.folder / "load.py").write_text(f"{COMMON}\nfolder = {str(on_disk)!r}\n{library.load}\n")
    subprocess.run([sys.executable, "load.py"], cwd=desk.folder, check=True, timeout=RUN_S_MAX)


def _links(folder: Path, job: Sight) -> list[Path]:
    """Return the files in memory that have become links to the disk."""
    on_disk = job.job.folder.checkpoints
    return [path for path in folder.rglob("*") if path.is_symlink() and path.resolve().is_relative_to(on_disk)]


def _said(job: Sight, attempt: int, words: str) -> str:
    return _all(job, attempt, words)[0]


def _all(job: Sight, attempt: int, words: str, rank: int = 0) -> list[str]:
    """Return what follows these words where they begin a line of a rank's log."""
    found = re.findall(f"^{words} (.+)$", job.log(rank, attempt), re.MULTILINE)
    assert found, (words, job.log(rank, attempt))
    return found
