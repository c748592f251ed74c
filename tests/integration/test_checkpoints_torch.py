"""Only the truth is resumed from, with real torch where its own files or errors are the point: after a reset, a tear, damage or a swap a job goes on from the newest
whole save, and ends with the weights of a run that nothing disturbed.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from orchestrator.client import adoption, job_checkpoints
from orchestrator.core.errors import UserError
from tests.support.local import WAIT_S_MAX, Desk, Sight, desk_at, kill, wait_until
from tests.support.sharded import SHARDED
from tests.support.torch_saves import PLAIN, STAND_IN, end_of_plain

FOLDERS = (
    SHARDED
    + """
from torch.distributed.checkpoint import FileSystemWriter


class Slow(FileSystemWriter):
    def write_data(self, plan, planner):
        if rank == 1 and attempt == 2 and number == 41:
            print("rank 1 has not written its piece of 41", flush=True)
            time.sleep(60)
        return super().write_data(plan, planner)


def ledger():
    \"""Return the ledger once what it has of step 31 is kept, too.\"""
    kept = list(folder.glob(".kept/*[0-9]/latest/.metadata"))
    return (folder / "ledger.jsonl").read_text() if kept else ""


def step_alone():  # the step counter goes on, the weights do not
    time.sleep(0.05)
    for one in model.parameters():
        one.grad = torch.zeros_like(one)
    before = [one.detach().clone() for one in model.parameters()]
    moments = {key: {name: value.clone() for name, value in own.items()} for key, own in optimizer.state.items()}
    optimizer.step()
    optimizer.zero_grad()
    with torch.no_grad():
        for one, old in zip(model.parameters(), before):
            one.copy_(old)
    for key, own in moments.items():
        optimizer.state[key].update(own)


for number in range(first + 1, 52):
    step()
    if number == 10:
        dcp.save(state(number), checkpoint_id=folder / "step-10")
    if number == 20:
        saving = dcp.async_save(
            state(number), checkpoint_id=folder / "step-20", process_group=in_background
        )
        print(f"saved 20 with {digest()}", flush=True)
    if number == 25 and attempt == 1:
        saving.result()
    if number == 30 and attempt == 1:  # what a kill in the middle of a save leaves
        dcp.save(state(number), checkpoint_id=folder / "step-30")
        dist.barrier()
        (folder / "step-30" / ".metadata").unlink(missing_ok=True)
    if number == 35 and attempt == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if number in (31, 41, 51) and attempt > 1:
        dcp.save(state(number), storage_writer=Slow(folder / "latest"))
        print(f"saved {number} with {digest()}", flush=True)
        while attempt == 2 and '"step": 31' not in ledger():
            step_alone()
print(f"ends with {digest()}", flush=True)
begin()
for number in range(51):
    step()
print(f"ends undisturbed with {digest()}", flush=True)
if rank == 0:
    dcp.save({"step": 60}, checkpoint_id=folder / "step-60", no_dist=True)
dist.barrier()
dist.destroy_process_group()
"""
)


def test_dcp_job_never_resumes_from_half_rewritten_folder(
    desk: Desk,
) -> None:
    """Attempt 1 dies after a save without its metadata, attempt 2 by a reset of its host while it rewrites a folder."""
    job = desk.submit({"train.py": FOLDERS}, entrypoint="train.py")
    job.wait_for_line("rank 1 has not written its piece of 41", 1, attempt=2)
    checkpoints = job.job.folder.checkpoints
    metadata = checkpoints / "latest" / ".metadata"
    first = metadata.with_name("__0_0.distcp")
    wait_until(lambda: first.stat().st_mtime_ns > metadata.stat().st_mtime_ns, "rank 0's piece of 41")
    for proc in sorted(job.processes(), key=lambda proc: proc.pid):  # the host is reset
        os.kill(proc.pid, signal.SIGSTOP)
    for proc in job.processes():
        kill(proc)
    assert job.wait()["state"] == "SUCCEEDED", job.job.why()
    resumed = [attempt["resumed_from"] for attempt in job.attempts()]
    assert resumed == [None, str(checkpoints / "step-20"), str(checkpoints / "latest")]
    for rank in (0, 1):
        for attempt, number in ((1, 20), (2, 31)):
            (saved,) = re.findall(rf"saved {number} with (\w+)", job.log(rank, attempt))
            assert f"begins at {number} with {saved}" in job.log(rank, attempt + 1)
        (end, undisturbed) = re.findall(r"ends (?:undisturbed )?with (\w+)", job.log(rank, 3))
        assert end == undisturbed
    known = {
        one["main"]: (one["step"], one["complete"], one["whole"], one["resume"])
        for one in job_checkpoints.list_checkpoints(job.job.folder, job.job.plan(), verify=True)
    }
    assert [known[f"step-{number}"] for number in (10, 20, 30, 60)] == [
        (10, True, True, False), (20, True, True, False), (30, False, False, False), (60, True, True, True),
    ]  # fmt: skip
    torn = sorted(path.name for path in checkpoints.glob(".*torn*"))
    assert torn == [".latest.torn-attempt-2", ".step-30.torn-attempt-1"], "no script finds them by itself"


def _plain(desk: Desk, then: str, **restart: object) -> Sight:
    return desk.submit(_files(PLAIN), procs_per_node=1, entrypoint="train.py", env={"THEN": then}, restart=restart)


def _files(script: str) -> dict[str, str]:
    return {"train.py": script, **STAND_IN}


def _sources(job: Sight) -> list[str]:
    """Return what each attempt was given, by the first line of its log."""
    lines = [job.log(0, attempt["attempt"]).splitlines()[0] for attempt in job.attempts()]
    return [line.removeprefix("from ").rpartition("/")[2] for line in lines]


HARMS = """
if attempt < 5 and number == 34 + attempt:
    newest = folder / "step-30.pt"
    if attempt == 1:
        newest.unlink()
    elif attempt == 2:
        os.utime(newest)
    elif attempt == 3:
        torch.save(state(number), folder / "step-37.pt")
        os.truncate(folder / "step-37.pt", 9000)
    else:
        open(newest, "w").close()
    os._exit(9)
"""


def test_newest_complete_checkpoint_is_chosen_with_reasons(
    desk: Desk,
) -> None:
    """The newest save is deleted, touched, beside one that is torn, and emptied."""
    job = _plain(desk, HARMS, max=5)
    assert job.wait()["state"] == "SUCCEEDED", job.job.why()
    assert _sources(job) == ["nothing", *["step-30.pt"] * 3, "step-20.pt"]
    assert job.log(0, 5).split()[-1] == end_of_plain()
    passed = [" ".join(one["why"] for one in attempt["passed"]) for attempt in job.attempts()]
    supervisor = job.job.folder.supervisor_log.read_text()
    for attempt, why in ((4, "is cut off"), (5, "step-30.pt is empty")):
        assert why in passed[attempt - 1] and why in supervisor
    leftovers = sorted(path.name for path in job.job.folder.checkpoints.glob(".*torn*"))
    assert leftovers == [".step-30.pt.torn-attempt-4", ".step-37.pt.torn-attempt-3"]


def test_checkpoint_with_two_identical_failures_is_given_up(desk: Desk) -> None:
    """A checkpoint from which two attempts end alike before a step is given up."""
    script = PLAIN.replace("if resume:\n", "if resume.endswith('step-30.pt'):\n    sys.exit(3)\nif resume:\n", 1)
    job = desk.submit(
        _files(script), procs_per_node=1, entrypoint="train.py",
        env={"THEN": "if attempt == 1 and number == 35: os._exit(9)"},
    )  # fmt: skip
    assert job.wait()["state"] == "SUCCEEDED", job.job.why()
    assert _sources(job) == ["nothing", "step-30.pt", "step-30.pt", "step-20.pt"]


@pytest.fixture(scope="module")
def failed_once(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Desk, Path]]:
    """Give the desk of a job that has failed with step-10.pt, step-20.pt and step-30.pt, all whole, and a copy of its folder."""
    folder = tmp_path_factory.mktemp("failed")
    with desk_at(folder, "a home") as desk:
        job = _plain(desk, "if attempt == 1 and number == 35: sys.exit(7)", never_on_exit_codes=[7])
        assert job.wait()["state"] == "FAILED"
        _wait_for_rest(job)
        _copy(job.root, folder / "kept")
        yield desk, folder / "kept"


@pytest.fixture
def failed(failed_once: tuple[Desk, Path]) -> Sight:
    """Give that job as it was when it had failed."""
    desk, kept = failed_once
    (job,) = desk.jobs
    _wait_for_rest(job)
    shutil.rmtree(job.root)
    _copy(kept, job.root)
    return job


def _wait_for_rest(job: Sight) -> None:
    """Wait until nobody writes into the job's folder: after its last state the supervisor still does."""
    wait_until(lambda: not job.processes(), "the end of all its processes")


def _copy(one: Path, other: Path) -> None:
    """Copy a folder with its times and hard links."""
    subprocess.run(["cp", "-a", one, other], check=True, timeout=WAIT_S_MAX)


def test_changed_bytes_are_found_before_resume(
    failed: Sight,
) -> None:
    """One bit of the newest is flipped; the one before has the bytes of the first."""
    ten, twenty, thirty = (failed.job.folder.checkpoints / f"step-{number}.pt" for number in (10, 20, 30))
    flipped = bytearray(thirty.read_bytes())
    flipped[len(flipped) // 2] ^= 1
    for path, data in ((thirty, flipped), (twenty, ten.read_bytes())):
        about = path.stat()
        assert len(data) == about.st_size
        path.write_bytes(data)
        os.utime(path, ns=(about.st_atime_ns, about.st_mtime_ns))
    rows = job_checkpoints.list_checkpoints(failed.job.folder, failed.job.plan(), verify=True)
    assert [(one["main"], one["whole"]) for one in rows] == [
        ("step-10.pt", True), ("step-20.pt", False), ("step-30.pt", False),
    ]  # fmt: skip
    failed.job.resume("step-30.pt", environ=failed.environ)
    assert failed.wait()["state"] == "FAILED"
    reason = failed.job.status()["reason"]
    assert "step-30.pt" in reason and "no longer complete" in reason
    failed.job.resume(environ=failed.environ)
    assert failed.wait()["state"] == "SUCCEEDED"
    assert _sources(failed) == ["nothing", "step-10.pt"]


def test_user_resumes_older_by_deletion_or_name(failed: Sight) -> None:
    """A user goes back by deleting the newest checkpoint or by naming an older one."""
    (failed.job.folder.checkpoints / "step-30.pt").unlink()
    failed.job.resume(environ=failed.environ)
    assert failed.wait()["state"] == "SUCCEEDED"
    failed.job.resume("step-10.pt", environ=failed.environ)
    assert failed.wait()["state"] == "SUCCEEDED"
    assert _sources(failed) == ["nothing", "step-20.pt", "step-10.pt"]


def test_checkpoint_outside_ledger_is_resumed_only_by_name(
    failed: Sight,
) -> None:
    """A checkpoint that is not in the ledger is offered, and resumed from only if the user names it."""
    folder, plan = failed.job.folder, failed.job.plan()
    foreign = folder.checkpoints / "earlier" / "step-900.pt"
    foreign.parent.mkdir()
    shutil.copyfile(folder.checkpoints / "step-20.pt", foreign)
    assert [
        offer.path for offer in adoption.find_adoptable(folder, plan, job_checkpoints.load_checkpoints(folder))
    ] == [foreign]
    assert failed.job.resume(environ=failed.environ).checkpoint.main == "step-30.pt"  # type: ignore[union-attr]
    assert failed.wait()["state"] == "SUCCEEDED"
    torn = foreign.with_name("step-901.pt")
    torn.write_bytes(foreign.read_bytes()[:-100])
    with pytest.raises(UserError, match="is cut off"):
        failed.job.resume(str(torn), environ=failed.environ)
    failed.job.resume(str(foreign), environ=failed.environ)
    assert failed.wait()["state"] == "SUCCEEDED"
    assert _sources(failed) == ["nothing", "step-30.pt", "step-900.pt"]


def test_higher_numbered_checkpoints_of_earlier_run_are_ignored(desk: Desk, failed: Sight) -> None:
    """Checkpoints of an earlier run with higher numbers are never taken for this run's."""
    place = desk.folder / "output"
    place.mkdir()
    shutil.copyfile(failed.job.folder.checkpoints / "step-20.pt", place / "step-900.pt")
    script = PLAIN.replace('os.environ["ORCH_CHECKPOINT_DIR"]', repr(str(place)), 1)
    job = desk.submit(
        _files(script.replace("        settle(", "        (")), procs_per_node=1, entrypoint="train.py",
        env={"THEN": "if attempt == 1 and number == 35: os._exit(9)"}, checkpoint={"path": f"{place}/*"},
    )  # fmt: skip
    assert job.wait()["state"] == "SUCCEEDED", job.job.why()
    assert _sources(job) == ["nothing", "step-30.pt"]
    offered = adoption.find_adoptable(job.job.folder, job.job.plan(), job_checkpoints.load_checkpoints(job.job.folder))
    assert [offer.path for offer in offered] == [place / "step-900.pt"]


PER_RANK = PLAIN.replace('settle(f"step-{number}.pt")', 'settle(f"step_{number}_rank_0.pt")').replace(
    'f"step-{number}.pt")', 'f"step_{number}_rank_{rank}.pt")'
)


def test_per_rank_files_are_one_checkpoint(desk: Desk) -> None:
    """Files of each rank are one checkpoint and fit only that number of ranks."""
    then = "if attempt == 1 and number == 35: sys.exit(7)"
    job = desk.submit(
        _files(PER_RANK),
        entrypoint="train.py",
        env={"THEN": then},
        restart={"never_on_exit_codes": [7]},
    )
    assert job.wait()["state"] == "FAILED"
    (last,) = [
        one for one in job_checkpoints.list_checkpoints(job.job.folder, job.job.plan(), verify=False) if one["resume"]
    ]
    assert (last["files"], last["step"], last["world_size"]) == (2, 30, 2)
    for ranks in (1, 3):
        with pytest.raises(UserError, match="each of the 2 ranks that saved it"):
            job.job.resume(overrides=[f"procs_per_node={ranks}"], environ=desk.environ)
    (job.job.folder.checkpoints / "step_30_rank_1.pt").unlink()
    job.job.resume(environ=desk.environ)
    assert job.wait()["state"] == "SUCCEEDED"
    assert _sources(job)[1] == "step_20_rank_0.pt"
