"""What a rank uses: its processes are measured, its GPU is found by process or by name, and seldom."""

from __future__ import annotations

import os
import pwd
import time
from pathlib import Path

import pytest

from orchestrator.agent.numbers import gpu_use, rank_metrics
from orchestrator.agent.numbers.gpu_use import GpuPoller, GpuUse
from orchestrator.agent.numbers.rank_metrics import REPORT_S, NodeMetrics, RankMetrics, find_device

USE = GpuUse("", {"1": (0.3, 7), "GPU-b": (0.3, 7)}, {71: [(0.9, 100)], 72: [(0.5, 20)]})


def test_gpu_is_found_by_process_or_name() -> None:
    """A GPU is found by the processes of a rank, or else by its name."""
    assert USE.rank_use([70, 71, 72], "1") == (0.9, 120)
    assert USE.rank_use([70], "1") == USE.rank_use([70], "GPU-b") == (0.3, 7)
    assert USE.rank_use([70], "") == (None, None)


def test_ranks_gpu_is_the_one_in_its_environment() -> None:
    assert find_device({"CUDA_VISIBLE_DEVICES": "4, GPU-b"}, 1) == "GPU-b"
    assert find_device({"CUDA_VISIBLE_DEVICES": "4"}, 1) == find_device({}, 0) == ""


def test_rank_is_measured_rarely_with_cpu_time_later(
    tmp_path: Path,
) -> None:
    """A rank is measured now and then, and its processor time from the second time on."""
    numbers = RankMetrics(NodeMetrics(), 0, tmp_path / "rank.log", "")
    usage, training = numbers.measure_if_due([os.getpid(), 999_999_999], 1000.0)
    assert usage is not None
    assert (usage.cpu_share, usage.gpu_share, training) == (None, None, None)
    assert usage.memory_bytes is not None
    assert usage.memory_bytes > 1 << 20
    assert numbers.measure_if_due([os.getpid()], 1000.0 + REPORT_S / 2) == (None, None)
    until_s = time.process_time() + 0.2
    while time.process_time() < until_s:
        pass
    again, _ = numbers.measure_if_due([os.getpid()], 1000.0 + REPORT_S)
    assert again is not None
    assert again.cpu_share is not None
    assert 0.15 <= again.cpu_share * REPORT_S <= 1.0


@pytest.mark.slow
def test_nvidia_smi_runs_in_thread_and_rarely(tmp_path: Path) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f"""#!/bin/sh
while ! [ -e {tmp_path}/answer ]; do sleep 0.02; done
echo "$1" >> {tmp_path}/asked
case "$1" in
*query-gpu*) echo "0, GPU-a, H100, 97 %, 3 %, 5120 MiB, 310.20 W, P0" ;;
*) echo "71, GPU-a, 5000 MiB"; echo "72, GPU-a, [N/A]" ;;
esac
""")
    tool.chmod(0o755)
    path, os.environ["PATH"] = os.environ["PATH"], f"{tmp_path}:{os.environ['PATH']}"
    try:
        watch = GpuPoller()
        assert watch.latest(1000.0).rank_use([71], "0") == (None, None)
        (tmp_path / "answer").touch()
        until_s = time.monotonic() + 20
        while not watch.latest(1001.0).text and time.monotonic() < until_s:
            time.sleep(0.02)
    finally:
        os.environ["PATH"] = path
    assert watch.latest(1002.0).rank_use([71], "0") == (0.97, 5000 << 20)
    assert watch.latest(1002.0).rank_use([72], "0") == (0.97, 5120 << 20)
    assert len((tmp_path / "asked").read_text().splitlines()) == 2, "no rank uses a GPU, so none is asked how it is"
    assert watch.latest(1000.0 + gpu_use.STALE_S).text == ""
    if watch._thread is not None:  # it asks again, beside the next test
        watch._thread.join(20)


FULL = (
    "CUDA out of memory. Tried to allocate 20.00 MiB. GPU 1 has a total capacity of 139.80 GiB of which 2 MiB is free."
)


@pytest.mark.parametrize(
    ("message", "own_pids", "namespace", "is_told"),
    [
        (FULL, [70, 71], "", True),
        (FULL, [72], "", False),  # the rank is on another GPU
        (FULL.replace("GPU 1", "GPU 0"), [71], "", False),
        ("CUDA error: out of memory", [71], "", False),
        (FULL, [71], "pid:[1]", False),  # in a container pids of nvidia-smi are others
    ],
)
def test_others_on_a_full_gpu_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, message: str, own_pids: list[int], namespace: str, is_told: bool
) -> None:
    """Processes on a full GPU are named where they are certainly on it; one that is gone and the rank's own are not."""
    table = "1, GPU-b, H100, 97 %, 3 %, 5120 MiB, 310.20 W, P0\n2, GPU-c, H100, 0 %, 0 %, 5 MiB, 90 W, P0"
    users = f"71, GPU-b, 5000 MiB\n{os.getpid()}, GPU-b, 61440 MiB\n999999999, GPU-b, 7 MiB\n72, GPU-c, 5 MiB"
    use = gpu_use.parse_tables(table, users)
    monkeypatch.setattr(GpuPoller, "latest", lambda self, now_s: use)
    monkeypatch.setattr(rank_metrics, "_FIRST_PID_NAMESPACE", namespace or str(Path("/proc/self/ns/pid").readlink()))
    numbers = RankMetrics(NodeMetrics(), 0, tmp_path / "rank.log", "1")
    told = numbers.describe_gpu_users(message, 1, own_pids, 0.0)
    name = Path("/proc/self/comm").read_text().strip()
    user = pwd.getpwuid(os.getuid()).pw_name
    assert told == ((f"GPU 1 was used by pid {os.getpid()} ({name}, user {user}, 61,440 MiB)",) if is_told else ())
