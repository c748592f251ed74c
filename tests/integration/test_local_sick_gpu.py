"""Is a GPU that turns sick seen, and named where its rank crashes? nvidia-smi is a fake."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from orchestrator.brain.model import decisions as d
from orchestrator.core.wire import reports
from tests.support import fake_nvidia_smi as smi
from tests.support.local import FAKE_TORCH, STEPPER, Desk

SCRIPT = (
    STEPPER
    + """
import signal


def at_step(step):
    if attempt == 1 and step == 5 and rank == 1:
        os.rename(os.environ["SICK"], os.environ["HOST"])
        raise RuntimeError("CUDA error: unspecified launch failure")


if attempt == 1 and rank == 0:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # so that the attempt takes its time to end
run(10 if attempt > 1 or rank else 100000, at_step=at_step)
"""
)


def test_gpu_that_turns_sick_at_a_step_is_named_in_verdict(
    desk: Desk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tools, later = tmp_path / "tools", tmp_path / "later"
    smi.install(tools, smi.Host())
    smi.install(later, smi.sick({"gpu_recovery_action": "Reset"}))
    monkeypatch.setenv("PATH", f"{tools}:{os.environ['PATH']}")
    job = desk.submit(
        {**FAKE_TORCH, "train.py": SCRIPT}, entrypoint="train.py", procs_per_node=2,
        env={"CUDA_VISIBLE_DEVICES": "0,1", "SICK": str(smi.host_file(later)), "HOST": str(smi.host_file(tools))},
    )  # fmt: skip
    assert job.wait()["state"] == "SUCCEEDED", job.job.why()
    changed = job.news(reports.GpusChanged)
    assert [(gpu.gpu, gpu.fault) for gpu in changed[0].gpus] == [("1", "wants a reset")]
    verdict = job.verdict()
    assert verdict["kind"] == "crash" and verdict["ranks"] == [1]
    assert any("its GPU 1 wants a reset since" in line for line in verdict["evidence"]), verdict
    begun = job.news(d.BeginAttempt)[1]
    assert "is not used again" not in begun.why, "there is no other host"


SLOW = """#!/bin/sh
if [ -e {sick} ]; then sleep 0.7; exec {later} "$@"; fi
exec {well} "$@"
"""
"""A real one takes as long, and longer where a GPU is sick."""

CRASHES_TWICE = (
    STEPPER
    + """
import signal


def at_step(step):
    if (attempt, rank) == (1, 1) and step == 5:
        Path(os.environ["SICK"]).touch()
    if rank == 1 and (attempt, step) in ((1, 5), (2, 300)):
        raise RuntimeError("CUDA error: unspecified launch failure")


def end(*_):
    time.sleep(0.3)  # so that nvidia-smi runs when the attempt ends
    os._exit(143)


signal.signal(signal.SIGTERM, end)
run(600, at_step=at_step)
"""
)


def test_slow_nvidia_smi_is_not_killed_with_the_attempt(
    desk: Desk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is asked when the rank crashes, and answers when the next attempt has long begun."""
    sick, tool = tmp_path / "sick", tmp_path / "tools/nvidia-smi"
    well = smi.install(tmp_path / "well", smi.Host())
    later = smi.install(tmp_path / "later", smi.sick({"gpu_recovery_action": "Reset"}))
    tool.parent.mkdir()
    tool.write_text(SLOW.format(sick=sick, well=well, later=later))
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tool.parent}:{os.environ['PATH']}")
    job = desk.submit(
        {**FAKE_TORCH, "train.py": CRASHES_TWICE}, entrypoint="train.py", procs_per_node=2,
        env={"CUDA_VISIBLE_DEVICES": "0,1", "SICK": str(sick)},
    )  # fmt: skip
    assert job.wait()["state"] == "SUCCEEDED", job.job.why()
    assert job.kinds() == ["crash", "crash", None]
    assert any("its GPU 1 wants a reset since" in line for line in job.verdict(2)["evidence"]), job.verdict(2)
