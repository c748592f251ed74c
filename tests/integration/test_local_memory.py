"""Do ranks write checkpoints to memory, and is all of it on disk, and nothing left in memory, once the job is over?"""

from __future__ import annotations

import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

from orchestrator.core.checkpoints import ledger
from orchestrator.core.checkpoints.checkpoint import Checkpoint, CheckpointState
from orchestrator.core.checkpoints.memory import memory_folder
from tests.support.local import FAKE_TORCH, STEPPER, Desk, Sight, kill, wait_until

SAVER = (
    STEPPER
    + """
import io, json, random, zipfile

folder, resume_from = Path(os.environ["ORCH_CHECKPOINT_DIR"]), os.environ["ORCH_RESUME_FROM"]


def save(name, step):
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:  # what torch.save writes
        archive.writestr("step", str(step))
        archive.writestr("data", random.Random(step).randbytes(20_000))
    path = folder / name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(out.getvalue())
    time.sleep(0.03)


def step_of(path):
    with zipfile.ZipFile(path) as archive:
        return int(archive.read("step"))


print("folder", folder, oct(folder.parent.stat().st_mode & 0o777), os.environ["OUT"], flush=True)
"""
)


def _submit(desk: Desk, memory_dir: Path, body: str, **spec: Any) -> Sight:
    fields: dict[str, Any] = {
        "procs_per_node": 1,
        "checkpoint": {"memory": "64M", "memory_dir": str(memory_dir), "keep": 5},
        "env": {"OUT": "{checkpoint_dir}/out"},
        "restart": {"backoff": 0},
        **spec,
    }
    return desk.submit({**FAKE_TORCH, "train.py": SAVER + body}, entrypoint="train.py", **fields)


def _folder(job: Sight, memory_dir: Path, node: str = "node-0") -> Path:
    return memory_folder(str(memory_dir), job.job.id, node) / "checkpoints"


def _whole(job: Sight) -> list[Checkpoint]:
    known, _ = ledger.read(job.root, job.job.folder.ledger)
    return [one for one in known.values() if one.state is CheckpointState.WHOLE]


def _on_disk(job: Sight) -> list[str]:
    """Return the complete checkpoints that the ledger has on the disk."""
    return sorted({one.main for one in _whole(job) if any(not place.is_memory for place in one.locations)})


THREE = """
if rank == 0:
    for step in (10, 20, 30):
        run(step, start=step - 10)
        save(f"step-{step}/model.pt", step)
    save("last.pt", 30)
run(40, start=30)
"""


def test_checkpoints_go_to_memory_and_are_on_disk_at_the_end(desk: Desk, memory_dir: Path) -> None:
    """The unchanged script finds its folder in ORCH_CHECKPOINT_DIR; nobody else can enter it."""
    job = _submit(desk, memory_dir, THREE)
    assert job.wait()["state"] == "SUCCEEDED", job.job.why()
    folder = _folder(job, memory_dir)
    assert job.log().splitlines()[0] == f"folder {folder} 0o700 {folder}/out"
    wait_until(lambda: not folder.exists(), "the end of the folder in memory")
    on_disk = job.job.folder.checkpoints
    names = [f"step-{step}/model.pt" for step in (10, 20, 30)] + ["last.pt"]
    assert all((on_disk / name).is_file() and not (on_disk / name).is_symlink() for name in names)
    assert _on_disk(job) == ["last.pt", "step-10", "step-20", "step-30"]
    assert f'"host": "node-0", "root": "{folder}"' in job.job.folder.ledger.read_text(), "where it was reported"


AGAIN = """
if resume_from:
    inner = Path(resume_from, "model.pt")
    print("resumed", resume_from, step_of(inner), sorted(path.name for path in folder.iterdir()), flush=True)
    run(40, start=20)
    sys.exit()
for step in (10, 20):
    run(step, start=step - 10)
    save(f"step-{step}/model.pt", step)
run(1000000, start=20)
"""


def test_killed_agent_leaves_nothing_in_memory(desk: Desk, memory_dir: Path) -> None:
    """What was in it is on the disk before, and there the next attempt finds it, by links in a new folder."""
    job = _submit(desk, memory_dir, AGAIN)
    folder = _folder(job, memory_dir)
    wait_until(lambda: _on_disk(job) == ["step-10", "step-20"], "copies on the disk")
    agent = job.agent()
    (folder / "of-the-first-agent").touch()
    kill(agent)
    assert job.wait()["state"] == "SUCCEEDED", job.job.why()
    line = job.log(0, 2).splitlines()[1]
    assert line.startswith(f"resumed {folder}/step-20 20 ['step-10', 'step-20']"), line


def test_agent_ended_by_signal_stores_what_is_in_memory(desk: Desk, memory_dir: Path) -> None:
    """It reports what it has not reported, and stores what no checkpoint is, too."""
    job = _submit(desk, memory_dir, AGAIN.replace("run(1000000", "save('step-20/late.bin', 20)\nrun(1000000"))
    folder = _folder(job, memory_dir)
    wait_until((folder / "step-20/late.bin").exists, "the last file")
    (folder / "by-a-person.bin").write_text("x")
    job.wait_for_step(25)
    kill(job.agent(), signal.SIGTERM)
    assert job.wait()["state"] == "SUCCEEDED", job.job.why()
    assert (job.job.folder.checkpoints / "by-a-person.bin").read_text() == "x"
    line = job.log(0, 2).splitlines()[1]
    assert line.startswith(f"resumed {folder}/step-20 20 "), line


SHARED = """
mine = f"rank{rank}.pt"
if resume_from:
    found = {path.name: step_of(path) for path in Path(resume_from).iterdir()}
    print("resumed", resume_from, sorted(found.items()), flush=True)
    run(40, start=20)
    sys.exit()
for step in (10, 20):
    run(step, start=step - 10)
    save(f"step-{step}/{mine}", step)
run(1000000, start=20)
"""


@pytest.mark.parametrize("stored", [True, False])
def test_each_node_resumes_from_files_of_both(desk: Desk, memory_dir: Path, stored: bool) -> None:
    """Each node has a part of a checkpoint; what the disk does not have yet comes from the other's memory."""
    job = _submit(desk, memory_dir, SHARED, nodes=2)
    folders = [_folder(job, memory_dir, node) for node in ("node-0", "node-1")]
    if stored:
        wait_until(lambda: _on_disk(job) == ["step-10", "step-20"], "copies on the disk")
    else:
        wait_until(lambda: "step-20" in [one.main for one in _whole(job)], "a complete checkpoint")
    kill(job.rank_procs()[0])
    assert job.wait()["state"] == "SUCCEEDED", job.job.why()
    for rank, folder in enumerate(folders):
        line = job.log(rank, 2).splitlines()[1]
        assert line == f"resumed {folder}/step-20 [('rank0.pt', 20), ('rank1.pt', 20)]"


def test_checkpoint_of_a_person_elsewhere_is_resumed_there(desk: Desk, memory_dir: Path, tmp_path: Path) -> None:
    job = _submit(
        desk, memory_dir, "run(10)\nsave('step-10/model.pt', 10)\nrun(20, start=10)\nprint('from', resume_from)\n"
    )
    assert job.wait()["state"] == "SUCCEEDED", job.job.why()
    wait_until(lambda: _on_disk(job) == ["step-10"], "a copy on the disk")
    elsewhere = shutil.copytree(job.job.folder.checkpoints / "step-10", tmp_path / "base/step-30")
    job.job.resume(str(elsewhere), environ=desk.environ)
    assert job.wait()["state"] == "SUCCEEDED", job.job.why()
    assert f"from {elsewhere}\n" in job.log(0, 2)
