"""Evidence files: they only grow, stay within their room, and hold torch's trace and GPU use of each inspection."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from orchestrator.agent.hang import open_files
from orchestrator.agent.numbers import gpu_use
from tests.support.torch_window import trace
from tests.support.watch import LOOKS_S_MAX, SAY_READY, Watch, watching

pytestmark = pytest.mark.slow

TRACE = "trace.json"

WAITS = f"import time\n{SAY_READY}time.sleep(3600)\n"


def flight_page(watch: Watch, lines: int) -> list[dict[str, Any]]:
    """Return the lines of the page, once there are so many; a look on a busy machine may have been given up."""
    page = watch.job.evidence(1) / "rank-00000-flight.jsonl"
    for _ in range(int(LOOKS_S_MAX)):
        if page.exists() and page.read_bytes().count(b"\n") >= lines:
            break
        watch.look()
    return [json.loads(line) for line in page.read_bytes().splitlines()]


def test_inspection_records_torch_trace_or_unchanged(tmp_path: Path) -> None:
    """Each inspection adds a line with torch's trace, or that it is unchanged."""
    path = tmp_path / TRACE
    path.write_bytes(trace(3))
    with watching(tmp_path, WAITS, FAKE_TRACE=str(path)) as watch:
        (one,) = flight_page(watch, 1)
        assert one["trace"] == json.loads(trace(3)) and "train.py" in watch.page()
        again = flight_page(watch, 2)[-1]
        assert again == {"looked_at": again["looked_at"], "unchanged": True}
        path.write_bytes(trace(4))
        known = len(flight_page(watch, 2))
        assert flight_page(watch, known + 1)[-1]["trace"] == json.loads(trace(4))
        assert flight_page(watch, 1)[0] == one, "what was written stays"


USE = """index, uuid, name, utilization.gpu [%], utilization.memory [%], memory.used [MiB], power.draw [W], pstate
0, GPU-a, NVIDIA H100 80GB HBM3, 97 %, 3 %, 5120 MiB, 310.20 W, P0
1, GPU-b, NVIDIA H100 80GB HBM3, 0 %, 0 %, 4 MiB, 70.10 W, P0
2, GPU-c, NVIDIA H100 80GB HBM3, [N/A], [N/A], 4 MiB, 70.10 W, P0
"""
USERS = """pid, gpu_uuid, used_gpu_memory [MiB]
71, GPU-a, 5000 MiB
72, GPU-b, 500 MiB
73, GPU-b, 500 MiB
73, GPU-a, 500 MiB
74, GPU-c, 500 MiB
"""


def test_gpu_use_is_reported_by_process() -> None:
    failed = gpu_use.parse_tables("NVIDIA-SMI has failed\n", "No devices were found\n\n")
    assert not failed.devices and not failed.processes
    known = gpu_use.parse_tables(USE, USERS)
    assert [known.process_share(pid) for pid in (71, 72, 73)] == [(0.97, ""), (0.0, ""), (0.97, "")]
    assert known.process_share(74) == (None, "nvidia-smi does not say which GPU the process uses")
    assert gpu_use.NO_USE.process_share(71) == (
        None,
        "nvidia-smi is not installed, so GPU use is not known",
    )


def test_gpu_rank_is_inspected_with_its_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "bin/nvidia-smi"
    tool.parent.mkdir()
    pids = tmp_path / "pids"
    pids.write_text("")
    tool.write_text(f"#!/bin/sh\ncase $1 in *gpu_uuid*) cat {pids};; *) echo '0, GPU-a, H100, 97 %';; esac\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tool.parent}:/usr/bin:/bin")
    monkeypatch.setattr(open_files, "uses_gpu", lambda pid: True)
    with watching(tmp_path, f"import time\n{SAY_READY}time.sleep(3600)\n") as watch:
        found = watch.look()[0]
        assert (found.gpu_use, found.unavailable[-1:]) == (
            None,
            ("nvidia-smi does not say which GPU the process uses",),
        )
        pids.write_text(f"{found.pid}, GPU-a, 5 MiB\n")
        assert watch.look()[0].gpu_use == 0.97


def test_gpu_activity_is_added_at_every_inspection(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "bin/nvidia-smi"
    tool.parent.mkdir()
    tool.write_text("#!/bin/sh\necho 0, 97 %\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tool.parent}:/usr/bin:/bin")
    with watching(tmp_path, f"import time\n{SAY_READY}time.sleep(3600)\n") as watch:
        page = watch.job.evidence(1) / "node-node-0-gpus.txt"
        for _ in range(int(LOOKS_S_MAX)):
            watch.look()
            if page.exists() and page.read_text().count("0, 97 %") >= 4:
                break
        assert page.read_text().count("0, 97 %") >= 4, "two looks, each with the use and the users"
