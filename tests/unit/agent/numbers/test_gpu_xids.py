"""Is a sick GPU shown with the Xid that the kernel's log has of it since the job began?"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from orchestrator.agent.numbers import gpu_states
from orchestrator.agent.numbers.gpu_states import GpuStates
from orchestrator.core.host import gpus

OLD = b"3,100,1,-;NVRM: Xid (PCI:0000:3B:00): 31, pid=7\n"
NEW = b"3,101,2,-;NVRM: Xid (PCI:0000:3B:00): 79, pid='<unknown>', GPU has fallen off the bus.\n SUBSYSTEM=pci\n"
OTHER = b"3,102,3,-;NVRM: Xid (PCI:0000:5e:00): 48, pid=7\n"


@pytest.mark.parametrize(
    ("records", "said"),
    [([NEW, OTHER], " (Xid 79)"), ([OTHER], ""), ([b"6,7,8,-;eth0: NVRM: Xid (PCI:0000:3b:00): 1"], ""), (None, "")],
)
def test_xid_of_a_sick_gpu_is_cited(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, records: list[bytes] | None, said: str
) -> None:
    """Only an Xid of that GPU, written since the log was opened; nothing without permission."""
    log = tmp_path / "kmsg"
    if records is not None:
        log.write_bytes(OLD)
    folder = tmp_path / "gpus" / "0000:3b:00.0"
    folder.mkdir(parents=True)
    (folder / "information").write_text("Model: H100\nGPU UUID: \t GPU-a\nBus Location: 0000:3b:00.0\n")
    monkeypatch.setattr(gpu_states, "KERNEL_LOG", log)
    monkeypatch.setattr(gpu_states, "DRIVER", tmp_path / "gpus")
    action = "None"

    def answer(tool: str, query: str, *options: str, limit_s: float) -> subprocess.CompletedProcess[str]:
        row = [
            "0",
            "GPU-a",
            *(action if "action" in column else "[N/A]" for column in query.partition("=")[2].split(",")[2:]),
        ]
        return subprocess.CompletedProcess([tool], 0, ", ".join(row), "")

    monkeypatch.setattr(gpus, "run_nvidia_smi", answer)
    states = GpuStates()
    states.devices.add("0")
    states.ask("nvidia-smi")
    for record in records or ():  # a record for each reading, as the kernel gives them
        with log.open("ab") as file:
            file.write(record)
        states.ask("nvidia-smi")
    action = "Reset"
    states.ask("nvidia-smi")
    (state,) = states.take_news(0.0) or ()
    assert state.fault == "wants a reset" and state.since.endswith(f"UTC{said}")
    if (fd := states._log_fd) is not None:
        os.close(fd)
