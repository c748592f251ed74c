"""How does a GPU of the box turn sick? Each host gets an nvidia-smi that shows two GPUs, as its file `STATE` says they are.

The program is only in the host's own view of /usr/local/bin. A training on two hosts crashes at `CRASHES`, by attempts. In the second
attempt it is rank 2, on the other host, whose GPU 1 has turned `sick` or `hot` two steps before: `GPU_TURNS` in the environment. The
second and the third attempt get no further than the first, so that only a fault of the host keeps them from being counted.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from orchestrator.brain.model import decisions as d
from orchestrator.core.wire import reports
from orchestrator.journal import journal_file

from . import gpt
from .desk import Desk, Job
from .host import Host

STATE = "/tmp/gpu-1"
TOOLS, PLACE = "/run/tools", "/usr/local/bin"
NVIDIA_SMI = f"""#!/bin/sh
if [ -e {STATE} ]; then sleep SLOW_S; fi
action=None clocks=0x0000000000000000
case "$(cat {STATE} 2>/dev/null)" in
sick) action=Reset ;;
hot) clocks=0x0000000000000040 ;;
esac
case "$*" in
*gpu_recovery_action*)
    echo "0, GPU-a, 00000000:01:00.0, None, No, No, 0, Completed, Success, 0x0000000000000000, 0x0000000000000000"
    echo "1, GPU-b, 00000000:02:00.0, $action, No, No, 0, Completed, Success, $clocks, $clocks" ;;
-L)
    echo "GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-a)"
    echo "GPU 1: NVIDIA H100 80GB HBM3 (UUID: GPU-b)" ;;
esac
"""

STEPS = 60
TURNS_AT = 32
CRASHES = {1: (1, 38), 2: (2, 34), 3: (1, 36)}
"""By attempt the rank and its step."""

FAULTS = f"""
def fails(optimizer, *_):
    attempt, turns, now = int(os.environ["ORCH_ATTEMPT"]), os.environ["GPU_TURNS"], (int(os.environ["RANK"]), step)
    if turns and (attempt, *now) == (2, 2, {TURNS_AT}):
        Path("{STATE}").write_text(turns)
    if attempt > 2 and Path("{STATE}").exists() and turns == "sick":
        raise RuntimeError("CUDA error: unspecified launch failure")
    if turns and {CRASHES}.get(attempt) == now:
        raise RuntimeError("CUDA error: unspecified launch failure" if attempt == 2 else "no fault of a GPU")


register_optimizer_step_post_hook(fails)
tiny_gpt.main()
"""


@contextmanager
def nvidia_smi_on(hosts: Sequence[Host], slow_s: float = 0.0) -> Iterator[None]:
    """Give these hosts an nvidia-smi, which needs so long once the GPU is sick, and take it from them at the end."""
    covered: list[Host] = []
    try:
        for host in hosts:
            host.write(f"{TOOLS}/nvidia-smi", NVIDIA_SMI.replace("SLOW_S", str(slow_s)), mode=0o755)
            host.run(["mount", "-t", "overlay", "-o", f"lowerdir={TOOLS}:{PLACE}", "tools", PLACE])
            covered.append(host)
        yield
    finally:
        for host in covered:
            host.run(["umount", "--lazy", PLACE])
            host.run(["rm", "-rf", TOOLS, STATE])


def train(desk: Desk, turns: str, *, restarts_max: int = 1, **spec: Any) -> Job:
    """Submit the training with two GPUs on each of two hosts; `turns` as `GPU_TURNS`, empty for nothing."""
    script = gpt.TRAIN.replace("\ntiny_gpt.main()\n", FAULTS)
    assert script != gpt.TRAIN
    return gpt.train(
        desk, STEPS, {**gpt.FILES, "train.py": script}, pace_s=0.05, env={"GPU_TURNS": turns}, nodes=2, gpus_per_node=2,
        procs_per_node=None, restart={"max": restarts_max}, **spec,
    )  # fmt: skip


def news(job: Job, kind: type) -> list[Any]:
    """Return the events or decisions of a kind, or the reports in them, that are in a job's journal."""
    entries = [entry.news for entry in journal_file.read(job.folder.journal)]
    held = (one if isinstance(one, kind) else journal_file.unwrap_message(one) for one in entries)
    return [one for one in held if isinstance(one, kind)]


def begun_because(job: Job) -> list[str]:
    """Return why each attempt but the first began."""
    return [one.why for one in news(job, d.BeginAttempt)][1:]


def gpu_news(job: Job) -> list[tuple[str, tuple[str, ...]]]:
    """Return what agents have reported of GPUs: faults and remarks."""
    return [(gpu.fault, gpu.remarks) for one in news(job, reports.GpusChanged) for gpu in one.gpus]


def assert_host_was_left(job: Job) -> None:
    """The host of the sick GPU is at fault, is not used again, and costs no restart; the crash after that counts."""
    assert job.kinds() == ["crash", "crash", "crash", None]
    verdict = job.why()[1]["verdict"]
    assert (verdict["node"], verdict["ranks"]) == ("node2", [2])
    assert "its GPU 1 wants a reset since" in verdict["evidence"][0]
    _, left, counted = begun_because(job)
    assert "not counted in restart.max; node2 is not used again: its GPU 1 wants a reset since" in left
    assert "restart 1 of 1 without progress" in counted
