"""Is nvidia-smi read with and without the newer fields, and does its silence have a reason? By fakes of it."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from orchestrator.agent.host import gpu_health
from orchestrator.core.host_facts import UNKNOWN

pytestmark = pytest.mark.slow


def read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> gpu_health.GpuHealth:
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\n{text}\n")
    tool.chmod(0o755)
    (tmp_path / "dmesg").write_text("#!/bin/sh\necho '[1.0] NVRM: Xid (PCI:0000:3b:00): 79, gone'; echo other\n")
    (tmp_path / "dmesg").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    return gpu_health.read()


def test_nvidia_smi_table_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    row = "0, GPU-a, A100, 535.1, 40960, [N/A], Not Active, Active, Not Active"
    apps = f"{os.getpid()}, GPU-a, 512"
    health = read(tmp_path, monkeypatch, f"case $1 in *gpu=*) echo '{row}';; *) echo '{apps}';; esac")
    (gpu,) = health.gpus
    assert (gpu.model, gpu.driver, gpu.memory_mib, gpu.ecc_errors) == ("A100", "535.1", 40960, UNKNOWN)
    assert gpu.slowdowns == ("its power supply slows it down",)
    assert (health.users[0].pid, health.users[0].memory_mib) == (os.getpid(), 512) and health.users[0].command
    assert health.xids == ("[1.0] NVRM: Xid (PCI:0000:3b:00): 79, gone",)


def test_older_driver_is_queried_for_fewer_fields(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "case $1 in *throttle*) exit 2;; *gpu=*) echo '0, GPU-a, V100, 390.1, 16000, 0';; *) ;; esac"
    health = read(tmp_path, monkeypatch, text)
    assert [gpu.model for gpu in health.gpus] == ["V100"] and not health.fault


def test_broken_driver_is_a_fault_with_its_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    health = read(tmp_path, monkeypatch, "echo 'Failed to initialize NVML: Driver/library version mismatch'; exit 18")
    assert "version mismatch" in health.fault and not health.gpus


DIAG = {
    "DCGM Diagnostic": {"test_categories": [
        {"category": "Deployment", "tests": [
            {"name": "Denylist", "results": [{"gpu_id": "0", "status": "Pass"}]},
            {"name": "Page Retirement", "results": [{"gpu_id": "0", "status": "Pass"}, {"gpu_id": "1", "status": "Fail"}]},
        ]},
        {"category": "Hardware", "tests": [{"name": "Memory", "test_summary": {"status": "FAIL"}}]},
    ]},
    "version": "4.1.0",
}  # fmt: skip


@pytest.mark.parametrize(
    ("output", "named"),
    [
        (json.dumps(DIAG), ["Page Retirement", "Memory"]),
        (json.dumps({"DCGM Diagnostic": {"test_categories": []}}), []),
        (json.dumps({"DCGM Diagnostic": {"test_categories": [{"tests": [{"status": "Fail"}]}]}}), []),
        ("Error: unable to connect to the host engine", []),
        ("[]", []),
        ("", []),
    ],
)
def test_failed_test_of_dcgm_is_named_and_unknown_output_is_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, output: str, named: list[str]
) -> None:
    (tmp_path / "dcgmi").write_text(f"#!/bin/sh\n[ \"$*\" = 'diag -r 1 -j' ] && echo '{output}'\nexit 1\n")
    (tmp_path / "dcgmi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert gpu_health.failed_diagnoses() == tuple(f"dcgmi diag: its test {name} fails" for name in named)


def test_without_dcgm_nothing_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert gpu_health.failed_diagnoses() == ()
