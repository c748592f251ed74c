"""Which checkpoint does a restart or a resume start from? Only one that is complete, and the newest of those."""

from __future__ import annotations

import pytest

from orchestrator.brain.model import events as e
from orchestrator.core.checkpoints.checkpoint import CheckpointState
from orchestrator.core.errors import ClusterError, UserError
from tests.support.local import FAKE_TORCH, STEPPER, Desk, Sight, kill, wait_until

SAVER = (
    STEPPER
    + """
import io, json, signal, zipfile

folder = Path(os.environ["ORCH_CHECKPOINT_DIR"])


def saved(step):
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        archive.writestr("step", str(step) * 5000)
    return out.getvalue()


def save(name, step):
    (folder / name).write_bytes(saved(step))
    time.sleep(0.03)  # a file's time is known to 10 ms, and no real step is as short as these


def half(name, step):
    (folder / name).write_bytes(saved(step)[:3000])


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def known():
    # What the ledger has as whole
    try:
        lines = [json.loads(line) for line in (folder / "ledger.jsonl").read_text().splitlines()]
    except (OSError, ValueError):
        return []
    mains = {line["number"]: line["main"] for line in lines if "main" in line}
    return [mains[line["number"]] for line in lines if line.get("state") == "whole"]


def step_of_resume():
    with zipfile.ZipFile(os.environ["ORCH_RESUME_FROM"]) as archive:
        return int(archive.read("step")[:2])


source = os.environ["ORCH_RESUME_FROM"] or "nothing"
print("from", source, f"of step {step_of_resume()}" if source.endswith("last.pt") else "", flush=True)
"""
)
"""A zip is what torch.save writes."""


def _resumed_from(job: Sight, attempt: int = 2) -> str:
    line = job.log(0, attempt).splitlines()[0]
    return line.removeprefix("from ").rpartition("/")[2].strip()


def _restarted(desk: Desk, body: str, path: str = "*") -> str:
    """Run a script that dies in its first attempt; return the name of what the second resumed from."""
    script = SAVER + "if attempt == 2:\n    sys.exit()\n" + body
    job = desk.submit(
        {**FAKE_TORCH, "train.py": script}, procs_per_node=1, entrypoint="train.py", checkpoint={"path": path}
    )
    assert job.wait()["state"] == "SUCCEEDED", job.job.why()
    return _resumed_from(job)


TEMPORARY = """
run(10)
save("good.pt", 10)
run(20, start=10)
for name in ("step-20.pt.tmp", ".step-20.pt", "tmp-20.pt", "step-20.pt.incomplete", "step-20.pt~", "20.pt.part"):
    save(name, 20)
(folder / "zero.pt").touch()
(folder / "metrics.json").write_text("{}")
(folder / "plots").mkdir()
(folder / "plots" / "loss.png").write_text("png")
run(30, start=20)
die()
"""

CUT_OFF = """
run(10)
save("good.pt", 10)
run(20, start=10)
half("torn.pt", 20)
die()
"""

FOLDERS = """
for step in (10, 20, 30):
    run(step, start=step - 10)
    (folder / f"step-{step}").mkdir()
    save(f"step-{step}/model.pt", step)
    (folder / f"step-{step}" / "trainer.json").write_text("{}")
    if step == 20:
        (folder / "step-20" / "checkpoint-is-incomplete.txt").touch()
(folder / "step-40").mkdir()
save("step-40/model.pt", 40)  # and then no trainer.json
die()
"""

EXPLICIT = """
run(10)
(folder / "a-10.json").write_text("{}")
run(20, start=10)
(folder / "a-20.json").write_text("{")
save("b-20.pt", 20)
die()
"""


@pytest.mark.parametrize(
    ("body", "path", "name"),
    [
        (TEMPORARY, "*", "good.pt"),
        (CUT_OFF, "*", "good.pt"),
        (FOLDERS, "step-*", "step-30"),
        (EXPLICIT, "a-*.json", "a-10.json"),
    ],
    ids=["temporary", "cut-off", "folders", "explicit"],
)
def test_a_restart_takes_the_newest_complete_checkpoint(desk: Desk, body: str, path: str, name: str) -> None:
    assert _restarted(desk, body, path) == name


def test_overwritten_checkpoint_is_restored_after_interrupted_write(
    desk: Desk,
) -> None:
    """A checkpoint that the script overwrites in place is restored when the write was cut off."""
    body = """
run(10)
save("before.pt", 10)
run(20, start=10)
save("last.pt", 20)
while not list(folder.glob(".kept/*[0-9]/last.pt")):
    optimizer.step()
    time.sleep(0.02)
half("last.pt", 30)
die()
"""
    assert _restarted(desk, body) == "last.pt of step 20"


def test_torn_checkpoint_is_not_resumed_after_agent_death(desk: Desk) -> None:
    """A torn checkpoint is not resumed from, even if its agent died too."""
    body = """
if attempt == 1:
    run(10)
    save("before.pt", 10)
    run(20, start=10)
    save("last.pt", 20)
    while not list(folder.glob(".kept/*[0-9]/last.pt")):
        optimizer.step()
        time.sleep(0.02)
    half("last.pt", 30)
    print("torn", flush=True)
    run(1000000, start=20)
"""
    job = desk.submit({**FAKE_TORCH, "train.py": SAVER + body}, procs_per_node=1, entrypoint="train.py")
    job.wait_for_line("torn")
    for proc in (job.keeper(), job.agent()):
        kill(proc)
    assert job.wait()["state"] == "SUCCEEDED"
    assert _resumed_from(job) == "last.pt of step 20"
    torn = [path.name for path in job.job.folder.checkpoints.glob(".*torn*")]
    assert torn == [".last.pt.torn-attempt-1"]


def test_default_retention_keeps_newest_trainer_checkpoints(
    desk: Desk,
) -> None:
    """By default the newest checkpoints of a trainer are kept, and nothing else is touched."""
    body = """
for step in range(5, 20, 5) if attempt == 1 else ():  # as the HF Trainer lays out its output folder
    run(step, start=step - 5)
    (folder / f"checkpoint-{step}").mkdir()
    for name in ("optimizer.pt", "rng_state.pth", "training_args.bin"):
        save(f"checkpoint-{step}/{name}", step)
    (folder / f"checkpoint-{step}" / "trainer_state.json").write_text("{}")
    while f"checkpoint-{step}" not in known():
        optimizer.step()
        time.sleep(0.02)
save("training_args.bin", 15)
run(25, start=15)
die() if attempt == 1 else None
"""
    job = desk.submit(
        {**FAKE_TORCH, "train.py": SAVER + body},
        procs_per_node=1, entrypoint="train.py", checkpoint={"keep": 2},
    )  # fmt: skip
    assert job.wait()["state"] == "SUCCEEDED"
    left = sorted(path.name for path in job.job.folder.checkpoints.glob("*") if path.name[0] not in ".l")
    assert left == ["checkpoint-10", "checkpoint-15", "training_args.bin"]
    assert _resumed_from(job) == "checkpoint-15"


RESUMED = (
    SAVER
    + """
start = step_of_resume() if os.environ["ORCH_RESUME_FROM"] else 0
print("version 1", os.environ.get("WORD"), flush=True)
for step in range(start + 10, 50, 10):
    run(step, start=step - 10)
    save(f"step-{step}.pt", step)
    if os.environ.get("DIE_AT") == str(step):
        run(step + 3, start=step)
        sys.exit(int(os.environ["CODE"]))
"""
)


def test_failed_job_resumes_unchanged_and_attempt_numbers_continue(desk: Desk) -> None:
    job = desk.submit(
        {**FAKE_TORCH, "train.py": RESUMED}, procs_per_node=1, entrypoint="train.py",
        env={"DIE_AT": "20", "CODE": "5"}, restart={"never_on_exit_codes": [5]},
    )  # fmt: skip
    work = desk.folder / "work-0" / "train.py"
    work.write_text("raise SystemExit('the changed script')")
    assert job.wait()["state"] == "FAILED"
    job.job.resume(overrides=["env.DIE_AT=30", "env.WORD=new"], environ=desk.environ)
    assert job.wait()["state"] == "FAILED"
    job.job.resume("step-10.pt", environ=desk.environ)
    assert job.wait()["state"] == "FAILED"
    job.job.resume(overrides=["env.DIE_AT=0"], environ=desk.environ)
    status = job.wait()
    assert (status["state"], status["attempt"], status["step"]) == ("SUCCEEDED", 4, 40)
    assert [_resumed_from(job, attempt) for attempt in (1, 2, 3, 4)] == [
        "nothing", "step-20.pt", "step-10.pt", "step-30.pt",
    ]  # fmt: skip
    assert "version 1 None" in job.log(0, 1)
    assert "version 1 new" in job.log(0, 4)
    assert [attempt["attempt"] for attempt in job.attempts()] == [1, 2, 3, 4]
    with pytest.raises(UserError, match="there is no such checkpoint"):
        job.job.resume("step-99.pt", environ=desk.environ)


def test_cancelled_job_resumes_but_running_one_does_not(desk: Desk) -> None:
    script = (
        SAVER
        + """
start = step_of_resume() if os.environ["ORCH_RESUME_FROM"] else 0
run(10, start=start)
save("step-10.pt", 10) if rank == 0 and not start else None
run(1000000 if attempt == 1 else 30, start=10)
"""
    )
    job = desk.submit({**FAKE_TORCH, "train.py": script}, nodes=2, procs_per_node=1, entrypoint="train.py")
    wait_until(
        lambda: [one for one in job.news(e.CheckpointChanged) if one.save.state is CheckpointState.WHOLE],
        "the checkpoint",
    )
    with pytest.raises(UserError, match="the job is RUNNING"):
        job.job.resume(environ=desk.environ)
    job.job.cancel()
    assert job.wait()["state"] == "CANCELLED"
    job.job.resume(environ=desk.environ)
    with pytest.raises(UserError, match="the job is"):
        job.job.resume(environ=desk.environ)
    status = job.wait()
    assert (status["state"], status["attempt"], status["step"]) == ("SUCCEEDED", 2, 30)
    assert _resumed_from(job) == "step-10.pt"
    assert job.kinds() == [None, None]


@pytest.mark.parametrize("damage", ["gone", "empty", "of a later version"])
def test_resume_without_ledger_does_not_start_from_scratch(desk: Desk, damage: str) -> None:
    body = """
for step in (10, 20, 30):
    run(step, start=step - 10)
    save(f"step-{step}.pt", step)
    while step == 20 and attempt == 1 and not known():
        run(1)
die()
"""
    job = desk.submit(
        {**FAKE_TORCH, "train.py": SAVER + body}, procs_per_node=1, entrypoint="train.py",
        checkpoint={"path": "step-*"}, restart={"max": 0},
    )  # fmt: skip
    assert job.wait()["state"] == "FAILED"
    ledger = job.job.folder.ledger
    lines = ledger.read_text()
    match damage:
        case "gone":
            ledger.unlink()
        case "empty":
            ledger.write_text("")
        case _:
            ledger.write_text(lines.replace('"number": 1, ', '"number": "1", "later": true, '))
    with pytest.raises(ClusterError, match=r"lacks .*step-10\.pt") as told:
        job.job.resume()
    assert "--from PATH" in told.value.fix and "orch submit" in told.value.fix
    assert job.job.status()["state"] == "FAILED"
    ledger.unlink(missing_ok=True)
    ledger.with_name("elsewhere").write_text(lines)
    ledger.symlink_to("elsewhere")
    with pytest.raises(ClusterError, match="is a link"):
        job.job.resume()
    ledger.unlink()
    ledger.write_text(lines)
    choice = job.job.resume()
    assert choice.checkpoint is not None
    job.wait()


def test_unwritable_ledger_keeps_job_running_and_cancel_works(desk: Desk) -> None:
    """A ledger that cannot be written leaves the job running, and cancel ends it."""
    body = """
run(10)
save("step-10.pt", 10)
while not known():
    run(1)
(folder / "ledger.jsonl").rename(folder / "elsewhere")
(folder / "ledger.jsonl").symlink_to("elsewhere")
save("step-20.pt", 20)
run(100_000, each_s=0.05)
"""
    job = desk.submit(
        {**FAKE_TORCH, "train.py": SAVER + body}, procs_per_node=1, entrypoint="train.py",
        checkpoint={"path": "step-*"},
    )  # fmt: skip
    log = job.job.folder.supervisor_log
    wait_until(lambda: "ledger.jsonl cannot be written" in log.read_text(), "the word on the ledger")
    text = log.read_text()
    assert "Traceback" not in text and job.job.status()["state"] == "RUNNING"
    job.job.cancel()
    assert job.wait()["state"] == "CANCELLED"
    assert log.read_text().count("cannot be written") == 1
