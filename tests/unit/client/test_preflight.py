"""Does the preflight find what would stop a job, say how to mend it, and start nothing? Fakes stand for interpreters."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from orchestrator.brain.checks.finding import Finding
from orchestrator.client.preflight import check
from orchestrator.spec.yaml_document import SpecError
from tests.support import fake_sbatch
from tests.support.cluster import small_torch

pytestmark = pytest.mark.slow

SPEC = "name: gpt\nprocs_per_node: 2\nentrypoint: train.py\npython: ./python\n"
ANSWER = '{"python": "3.11.7", "torch": "2.13.0", "gpus": 0}'


def _found(
    tmp_path: Path,
    *overrides: str,
    python: str = "",
    script: str = "print(1)\n",
    path: str = "/usr/bin:/bin",
    home: Path | None = None,
) -> dict[str, Finding]:
    """Run a preflight of a small job; `python` is the text of its interpreter, `path` where commands are."""
    work = tmp_path / "work"
    work.mkdir(exist_ok=True)
    (work / "train.py").write_text(script)
    (work / "job.yaml").write_text(SPEC)
    interpreter = work / "python"
    interpreter.write_text(python or f"#!/bin/sh\necho a banner\necho '{ANSWER}'\n")
    interpreter.chmod(0o755)
    home = home or tmp_path / "home"
    found = check(work / "job.yaml", None, overrides, {"PATH": path, "ORCH_HOME": str(home)})
    assert not home.exists(), "a preflight starts nothing"
    assert all(one.ok or (one.fix and one.exit_code) for one in found), "each fault has its fix"
    return {one.what: one for one in found}


def test_runnable_job_has_no_fault(tmp_path: Path) -> None:
    """A job that can run has no fault."""
    found = _found(tmp_path)
    assert list(found) == ["spec", "plan", "code", "space", "python", "script", "network"]
    assert all(one.ok for one in found.values())
    assert found["plan"].found == "2 ranks on 1 node, on CPUs"
    assert found["python"].found.endswith("python 3.11.7, torch 2.13.0")


def test_unreadable_job_file_ends_preflight(tmp_path: Path) -> None:
    """A job file that cannot be read ends the preflight."""
    with pytest.raises(SpecError, match="no_such_field"):
        _found(tmp_path, "no_such_field=1")


def test_unplannable_job_is_checked_no_further(tmp_path: Path) -> None:
    """A job that cannot be planned is checked no further."""
    found = _found(tmp_path, "gpus_per_node=2")
    assert list(found) == ["spec", "plan"]
    assert (found["plan"].ok, found["plan"].exit_code) == (False, 2)
    assert "2 GPUs wanted" in found["plan"].found


def test_oversized_snapshot_is_a_fault(tmp_path: Path) -> None:
    """A snapshot over its limit is a fault."""
    work = tmp_path / "work"
    work.mkdir()
    with (work / "data.bin").open("wb") as file:
        file.truncate(2_000_000)
    found = _found(tmp_path, "snapshot.limit_mb=1")
    assert not found["code"].ok and "data.bin" in found["code"].found


@pytest.mark.parametrize(
    ("python", "words"),
    [
        ("#!/bin/sh\necho 'libpython is missing' >&2\nexit 127\n", "libpython is missing"),
        ("#!/bin/sh\nexit 3\n", "it ended with code 3"),
        ("#!/no/such/interpreter\n", "No such file"),
        ("#!/bin/sh\necho no json\n", "it ended with code 0"),
    ],
)
def test_broken_interpreter_is_a_fault_with_its_output(tmp_path: Path, python: str, words: str) -> None:
    """An interpreter that does not run is a fault with its last output."""
    fault = _found(tmp_path, python=python)["python"]
    assert (fault.ok, fault.exit_code) == (False, 3)
    assert words in fault.found


def test_missing_interpreter_is_a_fault(tmp_path: Path) -> None:
    """An interpreter that does not exist is a fault."""
    fault = _found(tmp_path, "python=/no/such/python3")["python"]
    assert not fault.ok and "/no/such/python3" in fault.found


def test_missing_torch_is_reported_but_no_fault(tmp_path: Path) -> None:
    answer = '{"python": "3.11.7", "no_torch": "ModuleNotFoundError: No module named torch"}'
    found = _found(tmp_path, python=f"#!/bin/sh\necho '{answer}'\n")
    assert found["python"].ok and "no torch (ModuleNotFoundError" in found["python"].found


def test_syntax_error_is_found_without_running_script(tmp_path: Path) -> None:
    script = f"open({str(tmp_path / 'ran')!r}, 'w')\nx = (\n"
    env = f"env.PYTHONPATH={small_torch.write(tmp_path / 'small')['PYTHONPATH']}"
    fault = _found(tmp_path, f"python={sys.executable}", env, script=script)["script"]
    assert not fault.ok and "train.py:2: SyntaxError" in fault.found
    assert not (tmp_path / "ran").exists()


def test_command_entry_is_not_checked(tmp_path: Path) -> None:
    """A command is not inspected."""
    found = _found(tmp_path, "entrypoint=null", "command=make train")
    assert found["python"].found == "not checked: the job runs bash" and "script" not in found


def test_unwritable_home_is_a_fault(tmp_path: Path) -> None:
    """A home folder that cannot be written is a fault."""
    work = tmp_path / "job.yaml"
    work.write_text("name: gpt\ncommand: 'true'\n")
    found = check(work, None, (), {"PATH": "/usr/bin:/bin", "ORCH_HOME": "/proc/sys/orch"})
    fault = next(one for one in found if one.what == "space")
    assert (fault.ok, fault.exit_code) == (False, 3) and "ORCH_HOME" in fault.fix


def test_torch_with_too_few_gpus_is_a_fault(tmp_path: Path) -> None:
    tools = tmp_path / "bin"
    tools.mkdir()
    (tools / "nvidia-smi").write_text("#!/bin/sh\nprintf '0, GPU-a\\n1, GPU-b\\n'\n")
    (tools / "python3").write_text(f"#!/bin/sh\necho '{ANSWER}'\n")
    for tool in tools.iterdir():
        tool.chmod(0o755)
    (tmp_path / "train.py").write_text("")
    (tmp_path / "job.yaml").write_text("name: gpt\ngpus_per_node: 2\nentrypoint: train.py\npython: python3\n")
    environ = {"PATH": f"{tools}:/usr/bin:/bin", "ORCH_HOME": str(tmp_path / "home")}
    fault = next(one for one in check(tmp_path / "job.yaml", None, (), environ) if one.what == "gpus")
    assert (fault.ok, fault.found) == (False, "torch 2.13.0 sees 0 of 2 GPUs")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("back\\slash", "a backslash"), ("a%jb", "%j"), ("a%04n", "%04n"), ("100%%", "%%"), ("a\nb", "a character"),
        ("per%cent 100% %", ""),
    ],
)  # fmt: skip
def test_job_folder_misread_by_slurm_is_refused(tmp_path: Path, name: str, said: str) -> None:
    slurm = fake_sbatch.make(tmp_path / "bin")
    on_slurm = ("backend=slurm", "nodes=2")
    queue = _found(tmp_path, *on_slurm, path=slurm.environ["PATH"], home=tmp_path / name)["queue"]
    assert (queue.ok, queue.exit_code) == ((True, 0) if not said else (False, 2))
    assert not said or (f"the job folder has {said}" in queue.found and "ORCH_HOME" in queue.fix)
    assert slurm.calls == (not said)


@pytest.mark.parametrize(
    ("python", "severity", "words"),
    [
        ("#!/bin/sh\nexit 3\n", "note", "fix the faults above first"),
        ("", "warning", "salloc allocated no nodes"),
    ],
)
def test_slurm_preflight_requests_no_nodes_after_fault(tmp_path: Path, python: str, severity: str, words: str) -> None:
    slurm = fake_sbatch.make(tmp_path / "bin")
    asked = tmp_path / "bin/salloc.told"
    found = _found(tmp_path, "backend=slurm", "nodes=2", python=python, path=slurm.environ["PATH"])
    assert (found["nodes"].severity.value, found["nodes"].exit_code) == (severity, 0)
    assert words in found["nodes"].found and asked.exists() == (severity == "warning")
