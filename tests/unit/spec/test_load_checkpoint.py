"""Are placeholders read where they have a meaning, and refused with the fix where they have none?"""

from __future__ import annotations

from pathlib import Path

import pytest

from orchestrator.spec.limits import limits_of
from orchestrator.spec.load import field_names, json_schema
from tests.unit.spec.test_load import HEAD, faults, folder, loaded

__all__ = ["folder"]

MEANT = "which orch does not fill in; did you mean"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("checkpoint: {resume_args: '--resume {paths}'}", f"checkpoint.resume_args: contains {{paths}}, {MEANT} {{path}}?"),
        ("env: {OUT: '{checkpoints_dir}/x'}", f"env.OUT: contains {{checkpoints_dir}}, {MEANT} {{checkpoint_dir}}?"),
        ("checkpoint: {keep: 3, path: '{job_dir}/code/x'}", "checkpoint.keep: has no effect with"),
        ("checkpoint: {path: '{job_dir}/x'}", "checkpoint.path: must begin with {job_dir}/code/ for files where the ranks start"),
        ("checkpoint: {path: '{job_dirs}/code/x'}", f"checkpoint.path: contains {{job_dirs}}, {MEANT}"),
    ],
)  # fmt: skip
def test_a_misspelled_placeholder_is_a_fault(folder: Path, text: str, said: str) -> None:
    (fault,) = faults(folder, f"{HEAD}{text}\n")
    assert said in fault


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        ("entrypoint: train.py --o={checkpoint_dirs}", f"entrypoint: contains {{checkpoint_dirs}}, {MEANT} {{checkpoint_dir}}?"),
        ("command: [./run, $ORCH_CHECKPOINT]", f"command: contains $ORCH_CHECKPOINT, {MEANT} $ORCH_CHECKPOINT_DIR?"),
        ("command: ./run {resume_from}", 'command: contains {resume_from}, which is not filled in within shell text; write "${ORCH_RESUME_FROM}"'),
    ],
)  # fmt: skip
def test_misspelled_placeholder_in_command_is_a_fault(folder: Path, entry: str, said: str) -> None:
    """A misspelled placeholder is also a fault in what a rank runs."""
    head = "\n".join(line for line in HEAD.splitlines() if not line.startswith("entrypoint"))
    assert said in "\n".join(faults(folder, f"{head}\n{entry}\n"))


@pytest.mark.parametrize(
    ("path", "read"),
    [
        ("'{checkpoint_dir}/step-*.pt'", "step-*.pt"),
        ("$ORCH_CHECKPOINT_DIR/a/*", "a/*"),
        ("'{job_dir}/code/snapshot.pt'", "{job_dir}/code/snapshot.pt"),
        ("'ckpt-{epoch}.pt'", "ckpt-{epoch}.pt"),
    ],
)
def test_path_may_start_with_placeholder(folder: Path, path: str, read: str) -> None:
    """A path may begin with a placeholder."""
    assert loaded(folder, f"{HEAD}checkpoint: {{path: {path}}}\n").spec.checkpoint.path == read


def test_resume_args_reach_script_not_piped_command(folder: Path) -> None:
    head = "\n".join(line for line in HEAD.splitlines() if not line.startswith("entrypoint"))
    checkpoint = 'checkpoint: {resume_args: "--resume {path}"}\n'
    (fault,) = faults(folder, f"{head}\ncommand: python train.py 2>&1 | tee log\n{checkpoint}")
    assert "would go to tee" in fault and "${ORCH_RESUME_FROM:+--resume $ORCH_RESUME_FROM}" in fault
    for command in ("cat log; python train.py", "python train.py >log 2>&1", "[tee, train.py]"):
        loaded(folder, f"{head}\ncommand: {command}\n{checkpoint}")


@pytest.mark.parametrize(
    ("written", "read"),
    [("64G", 64 * 10**9), ("64GB", 64 * 10**9), ("1.5GiB", 3 << 29), ("512 M", 512 * 10**6), ("1T", 10**12)],
)
def test_memory_is_a_size(folder: Path, written: str, read: int) -> None:
    checkpoint = loaded(folder, f"{HEAD}checkpoint: {{keep: 3, path: 'a/*', memory: {written}}}\n").spec.checkpoint
    assert (checkpoint.memory, checkpoint.memory_dir) == (read, "/dev/shm")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("memory: 64G", "memory: needs checkpoint.keep, or old checkpoints would fill the memory; write keep: 3"),
        ("memory: 64G, path: '/ckpt/*'", "memory: has no effect with checkpoint.path"),
        ("memory: 64G, path: '{job_dir}/code/x'", "memory: has no effect with checkpoint.path"),
        ("keep: 3, memory: 63M", "memory: must be at least 64M"),
        ("keep: 3, memory: 0", "memory: must be a size such as 64G, 512MB or 64GiB"),
        ("keep: 3, memory: 64", "memory: must be a size such as"),
        ("keep: 3, memory: -1G", "memory: must be a size such as"),
        ("keep: 3, memory: 64G, memory_dir: shm", "memory_dir: must be an absolute path"),
        ("keep: 3, memory_dir: /mnt/ram", "memory_dir: has no effect without checkpoint.memory; remove it, or write memory"),
    ],
)  # fmt: skip
def test_memory_that_cannot_be_used_is_a_fault(folder: Path, text: str, said: str) -> None:
    (fault,) = faults(folder, f"{HEAD}checkpoint: {{{text}}}\n")
    assert f"checkpoint.{said}" in fault


@pytest.mark.parametrize(("value", "is_async"), [("dcp", True), ("off", False)])
def test_async_saves_are_a_field_named_by_a_keyword(folder: Path, value: str, is_async: bool) -> None:
    assert limits_of(loaded(folder, f"{HEAD}checkpoint: {{async: {value}}}\n").spec).saves_async is is_async


def test_field_named_by_a_keyword_has_that_name_everywhere(folder: Path) -> None:
    (fault,) = faults(folder, f"{HEAD}checkpoint: {{async: fsdp}}\n")
    assert "checkpoint.async: " in fault and "dcp" in fault
    (fault,) = faults(folder, f"{HEAD}checkpoint: {{async_: dcp}}\n")
    assert "checkpoint.async_: " in fault and "did you mean checkpoint.async?" in fault
    (fault,) = faults(folder, f"{HEAD}async: dcp\n")
    assert "did you mean checkpoint.async?" in fault
    assert "checkpoint.async" in field_names() and "checkpoint.async_" not in field_names()
    assert json_schema()["$defs"]["CheckpointSection"]["properties"]["async"]["enum"] == ["off", "dcp"]
