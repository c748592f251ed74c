"""Only the truth is resumed from, with real torch where its own files or errors are the point: after a reset, a tear, damage or a swap a job goes on from the newest
whole save, and ends with the weights of a run that nothing disturbed.
"""

from __future__ import annotations

import os
import re
import shutil
import signal

import pytest

from orchestrator.client import saves
from orchestrator.core.errors import UserError
from tests.support.local import Desk, Sight, kill, wait_until
from tests.support.sharded import SHARDED
from tests.support.torch_saves import PLAIN, REAL, STAND_IN

IN_PLACE = (
    SHARDED
    + """
from torch.distributed.checkpoint import FileSystemWriter


class Slow(FileSystemWriter):
    def write_data(self, plan, planner):
        if rank == 1 and attempt == 1 and number == 40:
            print("rank 1 has not written its piece of 40", flush=True)
            time.sleep(60)
        return super().write_data(plan, planner)


for number in range(first + 1, 51):
    step()
    if number % 10 == 0:
        dcp.save(state(number), storage_writer=Slow(folder / "latest"))
        print(f"saved {number} with {digest()}", flush=True)
        while attempt == 1 and number == 30 and f'"step": 30' not in ledger():
            step_alone()
print(f"ends with {digest()}", flush=True)
begin()
for number in range(50):
    step()
print(f"ends undisturbed with {digest()}", flush=True)
dist.barrier()
dist.destroy_process_group()
"""
).replace(
    "first = 0\n",
    '''first = 0


def ledger():
    """Return the ledger once what it has of step 30 is kept, too."""
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


''',
    1,
)


def test_a_folder_that_a_reset_left_half_rewritten_is_not_resumed_from(desk: Desk) -> None:
    job = desk.submit({"train.py": IN_PLACE}, entrypoint="train.py")
    job.wait_for_line("rank 1 has not written its piece of 40", rank=1)
    metadata = job.job.folder.checkpoints / "latest" / ".metadata"
    first = metadata.with_name("__0_0.distcp")
    wait_until(lambda: first.stat().st_mtime_ns > metadata.stat().st_mtime_ns, "rank 0's piece of 40")
    for proc in sorted(job.processes(), key=lambda proc: proc.pid):  # the host is reset
        os.kill(proc.pid, signal.SIGSTOP)
    for proc in job.processes():
        kill(proc)
    assert job.wait()["state"] == "SUCCEEDED", job.job.why()
    resumed = [attempt["resumed_from"] for attempt in job.attempts()]
    assert resumed == [None, str(job.job.folder.checkpoints / "latest")]
    for rank in (0, 1):
        (saved,) = re.findall(r"saved 30 with (\w+)", job.log(rank))
        assert f"begins at 30 with {saved}" in job.log(rank, 2)
        (end, undisturbed) = re.findall(r"ends (?:undisturbed )?with (\w+)", job.log(rank, 2))
        assert end == undisturbed
    assert [path.name for path in job.job.folder.checkpoints.glob(".*torn*")] == [".latest.torn-attempt-1"]


def _plain(desk: Desk, then: str, script: str = PLAIN, **restart: object) -> Sight:
    return desk.submit(
        _files(script), procs_per_node=1, entrypoint="train.py", env={"THEN": then}, restart=restart
    )


def _files(script: str) -> dict[str, str]:
    return {"train.py": script, **({} if script is REAL else STAND_IN)}


def _sources(job: Sight) -> list[str]:
    """Return what each attempt was given, by the first line of its log."""
    lines = [job.log(0, attempt["attempt"]).splitlines()[0] for attempt in job.attempts()]
    return [line.removeprefix("from ").rpartition("/")[2] for line in lines]


_ENDS: list[str] = []
"""The weights of the run that nothing disturbed, once it was made."""


def _calm_end(desk: Desk) -> str:
    if not _ENDS:
        job = _plain(desk, "")
        assert job.wait()["state"] == "SUCCEEDED"
        _ENDS.append(job.log().split()[-1])
    return _ENDS[0]


EMPTIED = "if attempt == 1 and number == 35: open(folder / 'step-30.pt', 'w').close(); os._exit(9)"
DELETED = "if attempt == 1 and number == 35: os.remove(folder / 'step-30.pt'); os._exit(9)"
TORN = """
if attempt == 1 and number == 35:
    torch.save(state(number), folder / 'step-35.pt')
    os.truncate(folder / 'step-35.pt', 9000)
    os._exit(9)
"""
TOUCHED = "if attempt == 1 and number == 35: os.utime(folder / 'step-30.pt'); os._exit(9)"


@pytest.mark.parametrize(
    ("then", "source", "why"),
    [
        (EMPTIED, "step-20.pt", "step-30.pt is empty"),
        (DELETED, "step-30.pt", ""),
        (TORN, "step-30.pt", "is cut off"),
        (TOUCHED, "step-30.pt", ""),
    ],
    ids=["emptied", "deleted", "torn", "touched"],
)
def test_an_attempt_begins_from_the_newest_whole_save_and_says_why_others_were_passed_over(
    desk: Desk, then: str, source: str, why: str
) -> None:
    job = _plain(desk, then)
    end = _calm_end(desk)
    assert job.wait()["state"] == "SUCCEEDED", job.job.why()
    assert _sources(job) == ["nothing", source]
    assert job.log(0, 2).split()[-1] == end
    passed = " ".join(one["why"] for one in job.attempts()[1]["passed"])
    assert why in passed
    assert why in job.job.folder.supervisor_log.read_text()
    leftovers = [path.name for path in job.job.folder.checkpoints.glob(".*torn*")]
    assert leftovers == (
        [f".{'step-35' if 'cut off' in why else 'step-30'}.pt.torn-attempt-1"] if why else []
    )


UNLOADABLE = """
if attempt == 1 and number == 35:
    os._exit(9)
if attempt == 1 and number == 30:
    class Lost: pass
    torch.save({**state(30), "lost": Lost()}, folder / 'step-31.pt')
    settle('step-31.pt')
"""


def test_a_save_that_cannot_be_loaded_is_given_up_after_one_attempt_for_the_one_before_it(desk: Desk) -> None:
    job = _plain(desk, UNLOADABLE, REAL)
    assert job.wait()["state"] == "SUCCEEDED", job.job.why()
    assert _sources(job) == ["nothing", "step-31.pt", "step-30.pt"]
    (passed,) = job.attempts()[2]["passed"]
    assert passed["why"].startswith("distrusted: rank 0 could not load it in attempt 2")
    states = {one["main"]: one["state"] for one in saves.listed(job.job.folder, job.job.plan(), verify=False)}
    assert states["step-31.pt"] == "distrusted"


def test_a_save_from_which_two_attempts_end_alike_before_a_step_is_given_up(desk: Desk) -> None:
    script = PLAIN.replace(
        "if resume:\n", "if resume.endswith('step-30.pt'):\n    sys.exit(3)\nif resume:\n", 1
    )
    job = desk.submit(
        _files(script), procs_per_node=1, entrypoint="train.py",
        env={"THEN": "if attempt == 1 and number == 35: os._exit(9)"},
    )  # fmt: skip
    assert job.wait()["state"] == "SUCCEEDED", job.job.why()
    assert _sources(job) == ["nothing", "step-30.pt", "step-30.pt", "step-20.pt"]


def _failed(desk: Desk) -> Sight:
    """Return a job that has failed with step-10.pt, step-20.pt and step-30.pt, all whole."""
    job = _plain(desk, "if attempt == 1 and number == 35: sys.exit(7)", never_on_exit_codes=[7])
    assert job.wait()["state"] == "FAILED"
    return job


@pytest.mark.parametrize("what", ["flipped", "swapped"])
def test_other_bytes_of_the_same_size_and_time_are_found_before_a_person_resumes_from_them(
    desk: Desk, what: str
) -> None:
    job = _failed(desk)
    path = job.job.folder.checkpoints / "step-30.pt"
    about = path.stat()
    data = bytearray(path.read_bytes() if what == "flipped" else path.with_name("step-20.pt").read_bytes())
    data[len(data) // 2] ^= what == "flipped"
    path.write_bytes(data)
    os.utime(path, ns=(about.st_atime_ns, about.st_mtime_ns))
    rows = saves.listed(job.job.folder, job.job.plan(), verify=True)
    assert [(one["main"], one["whole"]) for one in rows] == [
        ("step-10.pt", True), ("step-20.pt", True), ("step-30.pt", False),
    ]  # fmt: skip
    job.job.resume("step-30.pt", environ=desk.environ)
    assert job.wait()["state"] == "FAILED"
    assert "step-30.pt" in job.job.status()["reason"] and "not whole any more" in job.job.status()["reason"]
    job.job.resume(environ=desk.environ)
    assert job.wait()["state"] == "SUCCEEDED"
    assert _sources(job) == ["nothing", "step-20.pt"]


def test_a_person_goes_back_by_deleting_the_newest_or_by_naming_an_older_one(desk: Desk) -> None:
    job = _failed(desk)
    folder = job.job.folder.checkpoints
    (folder / "step-30.pt").unlink()
    job.job.resume(environ=desk.environ)
    assert job.wait()["state"] == "SUCCEEDED"
    job.job.resume("step-10.pt", environ=desk.environ)
    assert job.wait()["state"] == "SUCCEEDED"
    assert _sources(job) == ["nothing", "step-20.pt", "step-10.pt"]


def test_what_is_not_in_the_ledger_is_offered_and_only_resumed_from_when_a_person_names_it(
    desk: Desk,
) -> None:
    job = _failed(desk)
    folder, plan = job.job.folder, job.job.plan()
    foreign = folder.checkpoints / "earlier" / "step-900.pt"
    foreign.parent.mkdir()
    shutil.copyfile(folder.checkpoints / "step-20.pt", foreign)
    assert [offer.path for offer in saves.offers(folder, plan)] == [foreign]
    assert job.job.resume(environ=desk.environ).save.main == "step-30.pt"  # type: ignore[union-attr]
    assert job.wait()["state"] == "SUCCEEDED"
    torn = foreign.with_name("step-901.pt")
    torn.write_bytes(foreign.read_bytes()[:-100])
    with pytest.raises(UserError, match="is cut off"):
        job.job.resume(str(torn), environ=desk.environ)
    job.job.resume(str(foreign), environ=desk.environ)
    assert job.wait()["state"] == "SUCCEEDED"
    assert _sources(job) == ["nothing", "step-30.pt", "step-900.pt"]


def test_the_saves_of_an_earlier_run_with_higher_numbers_are_never_taken_for_this_run_s(desk: Desk) -> None:
    place = desk.folder / "output"
    place.mkdir()
    (place / "step-900.pt").write_bytes((_failed(desk).job.folder.checkpoints / "step-20.pt").read_bytes())
    script = PLAIN.replace('os.environ["ORCH_CHECKPOINT_DIR"]', repr(str(place)), 1)
    job = desk.submit(
        _files(script.replace("        settle(", "        (")), procs_per_node=1, entrypoint="train.py",
        env={"THEN": "if attempt == 1 and number == 35: os._exit(9)"}, checkpoint={"path": f"{place}/*"},
    )  # fmt: skip
    assert job.wait()["state"] == "SUCCEEDED", job.job.why()
    assert _sources(job) == ["nothing", "step-30.pt"]
    offered = saves.offers(job.job.folder, job.job.plan())
    assert [offer.path for offer in offered] == [place / "step-900.pt"]


PER_RANK = PLAIN.replace('settle(f"step-{number}.pt")', 'settle(f"step_{number}_rank_0.pt")').replace(
    'f"step-{number}.pt")', 'f"step_{number}_rank_{rank}.pt")'
)


def test_files_of_each_rank_are_one_save_and_fit_that_number_of_ranks_only(desk: Desk) -> None:
    then = "if attempt == 1 and number == 35: sys.exit(7)"
    job = desk.submit(
        _files(PER_RANK),
        entrypoint="train.py",
        env={"THEN": then},
        restart={"never_on_exit_codes": [7]},
    )
    assert job.wait()["state"] == "FAILED"
    (last,) = [one for one in saves.listed(job.job.folder, job.job.plan(), verify=False) if one["resume"]]
    assert (last["files"], last["step"], last["world_size"]) == (2, 30, 2)
    for ranks in (1, 3):
        with pytest.raises(UserError, match="each of the 2 ranks that saved it"):
            job.job.resume(overrides=[f"procs_per_node={ranks}"], environ=desk.environ)
    (job.job.folder.checkpoints / "step_30_rank_1.pt").unlink()
    job.job.resume(environ=desk.environ)
    assert job.wait()["state"] == "SUCCEEDED"
    assert _sources(job)[1] == "step_20_rank_0.pt"
