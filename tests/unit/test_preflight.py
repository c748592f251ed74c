"""Does the preflight find what would stop a job, say how to mend it, and start nothing? Fakes stand for interpreters."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from orchestrator.preflight import Finding, check
from orchestrator.slurm import disks
from orchestrator.specfile import SpecError
from tests.unit import slurm_commands

SPEC = "name: gpt\nprocs_per_node: 2\nentrypoint: train.py\npython: ./python\n"
ANSWER = '{"python": "3.11.7", "torch": "2.13.0", "gpus": 0}'


PARTITIONS = """PartitionName=main Default=YES MaxNodes=UNLIMITED MaxTime=1-00:00:00 MinNodes=0 State=UP TotalNodes=4
PartitionName=small Default=NO MaxNodes=1 MaxTime=00:10:00 MinNodes=1 State=UP TotalNodes=4
"""


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
    assert not any(one.exit_code for one in found if one.ok), "a warning does not change the exit code"
    return {one.what: one for one in found}


def test_a_job_that_can_run_has_no_fault(tmp_path: Path) -> None:
    found = _found(tmp_path)
    assert list(found) == ["spec", "plan", "code", "space", "python", "script", "network"]
    assert all(one.ok for one in found.values())
    assert found["plan"].found == "2 ranks on 1 node, on CPUs"
    assert found["python"].found.endswith("python 3.11.7, torch 2.13.0")


def test_a_spec_that_cannot_be_read_ends_the_preflight(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="no_such_field"):
        _found(tmp_path, "no_such_field=1")


def test_a_job_that_cannot_be_planned_is_looked_at_no_further(tmp_path: Path) -> None:
    found = _found(tmp_path, "gpus_per_node=2")
    assert list(found) == ["spec", "plan"]
    assert (found["plan"].ok, found["plan"].exit_code) == (False, 2)
    assert "2 GPUs wanted" in found["plan"].found


def test_a_snapshot_over_its_limit_is_a_fault(tmp_path: Path) -> None:
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
def test_an_interpreter_that_does_not_run_is_a_fault_with_its_last_words(
    tmp_path: Path, python: str, words: str
) -> None:
    fault = _found(tmp_path, python=python)["python"]
    assert (fault.ok, fault.exit_code) == (False, 3)
    assert words in fault.found


def test_an_interpreter_that_is_nowhere_is_a_fault(tmp_path: Path) -> None:
    fault = _found(tmp_path, "python=/no/such/python3")["python"]
    assert not fault.ok and "/no/such/python3" in fault.found


def test_no_torch_is_told_and_is_no_fault(tmp_path: Path) -> None:
    answer = '{"python": "3.11.7", "no_torch": "ModuleNotFoundError: No module named torch"}'
    found = _found(tmp_path, python=f"#!/bin/sh\necho '{answer}'\n")
    assert found["python"].ok and "no torch (ModuleNotFoundError" in found["python"].found


def test_a_script_with_a_syntax_error_is_found_without_running_it(tmp_path: Path) -> None:
    script = f"open({str(tmp_path / 'ran')!r}, 'w')\nx = (\n"
    fault = _found(tmp_path, f"python={sys.executable}", script=script)["script"]
    assert not fault.ok and "train.py:2: SyntaxError" in fault.found
    assert not (tmp_path / "ran").exists()


def test_a_command_is_not_looked_into(tmp_path: Path) -> None:
    found = _found(tmp_path, "entrypoint=null", "command=make train")
    assert found["python"].found == "bash (not looked into)" and "script" not in found


def test_a_home_that_cannot_be_written_is_a_fault(tmp_path: Path) -> None:
    work = tmp_path / "job.yaml"
    work.write_text("name: gpt\ncommand: 'true'\n")
    found = check(work, None, (), {"PATH": "/usr/bin:/bin", "ORCH_HOME": "/proc/sys/orch"})
    fault = next(one for one in found if one.what == "space")
    assert (fault.ok, fault.exit_code) == (False, 3) and "ORCH_HOME" in fault.fix


def test_a_torch_that_sees_too_few_gpus_is_a_fault(tmp_path: Path) -> None:
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


def _on_slurm(tmp_path: Path, *overrides: str, home: Path | None = None) -> dict[str, Finding]:
    """Run a preflight of two nodes where sbatch takes every job."""
    slurm = slurm_commands.make(tmp_path / "bin")
    (tmp_path / "partitions").write_text(PARTITIONS)
    (slurm.folder / "scontrol").write_text(f"#!/bin/sh\ncat '{tmp_path / 'partitions'}'\n")
    (slurm.folder / "scontrol").chmod(0o755)
    return _found(tmp_path, "backend=slurm", "nodes=2", *overrides, path=slurm.environ["PATH"], home=home)


def test_on_slurm_the_limits_of_the_partition_are_told(tmp_path: Path) -> None:
    found = _on_slurm(tmp_path, "time_limit=24h")
    assert found["queue"].ok and found["limits"] == Finding("limits", True, "main: 4 nodes, at most 1d")


def test_a_job_folder_in_the_memory_of_one_machine_is_warned_of_and_refuses_nothing(tmp_path: Path) -> None:
    home = Path("/dev/shm/orch-that-nobody-makes")
    if disks.local_kind(home) != "tmpfs":
        pytest.skip("/dev/shm is no tmpfs here")
    shared = _on_slurm(tmp_path, home=home)["shared"]
    assert shared.ok and not shared.exit_code and f"{home} is on tmpfs" in shared.found
    assert shared.fix == "set ORCH_HOME to a folder that all nodes share"


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("back\\slash", "a backslash"), ("a%jb", "%j"), ("a%04n", "%04n"), ("100%%", "%%"), ("a\nb", "a character"),
        ("per%cent 100% %", ""),
    ],
)  # fmt: skip
def test_a_job_folder_that_slurm_takes_for_another_is_refused(tmp_path: Path, name: str, said: str) -> None:
    queue = _on_slurm(tmp_path, home=tmp_path / name)["queue"]
    assert (queue.ok, queue.exit_code) == ((True, 0) if not said else (False, 2))
    assert not said or (f"the job folder has {said}" in queue.found and "ORCH_HOME" in queue.fix)
    commands = slurm_commands.Commands(tmp_path / "bin")
    assert commands.calls == (not said)


@pytest.mark.parametrize(
    ("overrides", "where", "said"),
    [
        (("spares=3",), "nodes", "5 nodes asked, and a job in partition main gets 4 at most"),
        (("time_limit=25h",), "time_limit", "1d1h asked, and partition main allows 1d at most"),
        (("slurm.partition=small",), "nodes", "2 nodes asked, and a job in partition small gets 1 at most"),
    ],
)
def test_a_job_that_slurm_would_take_and_never_start_is_a_fault(
    tmp_path: Path, overrides: tuple[str, ...], where: str, said: str
) -> None:
    found = _on_slurm(tmp_path, *overrides)
    assert found["queue"].ok
    assert not found["limits"].ok and found["limits"].exit_code == 2
    assert where in found["limits"].found and found["limits"].found.endswith(said)
    assert re.search(r"with: scontrol show partition (main|small)$", found["limits"].fix)


def test_a_partition_that_fits_is_enough_and_one_that_nobody_knows_is_left_to_sbatch(tmp_path: Path) -> None:
    assert _on_slurm(tmp_path, "slurm.partition='small,main'")["limits"].ok
    (tmp_path / "other").mkdir()
    assert "limits" not in _on_slurm(tmp_path / "other", "slurm.partition=elsewhere")
