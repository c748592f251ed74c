"""Is what Slurm cannot be asked for refused at its line, before anything is made?"""

from __future__ import annotations

from pathlib import Path

import pytest

from orchestrator.spec.load import load
from orchestrator.spec.yaml_document import SpecError
from tests.unit.spec.test_load import HEAD, faults, folder

__all__ = ["folder"]


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("", "gpus_per_node: Slurm needs a number: write gpus_per_node: 8, or procs_per_node: 4"),
        ("procs_per_node: 2\ngpus_per_node: auto", "gpus_per_node: Slurm needs a number"),
        ("procs_per_node: 2\nslurm:\n  extra: [--nodes=3]", 'slurm.extra: "--nodes=3" is not allowed here: write `nodes`'),
        ("gpus_per_node: 2\nslurm: {extra: [--gres=gpu:4]}", "slurm: --gres=gpu:4 names 4 GPUs in place of gpus_per_node, 2"),
        ("gpus_per_node: 2\nslurm: {extra: [--gres=shard:2]}", "slurm: --gres=shard:2 names no GPUs"),
        (f"procs_per_node: 2\nslurm: {{mem: {'x' * 4001}}}", "slurm.mem: must be printable, and at most 4000 characters"),
        ("procs_per_node: 2\ntime_limit: 1m", "checkpoint: on_preempt.grace of 1m and 30s for a clean stop use up"),
        ("procs_per_node: 2\ncheckpoint: {on_preempt: {signal: KILL}}", "checkpoint.on_preempt.signal: must be TERM"),
    ],
)  # fmt: skip
def test_impossible_slurm_request_is_refused(folder: Path, text: str, fault: str) -> None:
    """A request that Slurm cannot serve is refused."""
    (found,) = faults(folder, f"{HEAD}backend: slurm\n{text}\n")
    assert fault in found


@pytest.mark.parametrize(
    ("field", "options"),
    [
        ("reservation: lab", ["--reservation=lab"]),
        ("nodelist: 'n[1-2]'", ["--nodelist=n[1-2]"]),
        ("gres: gpu:a100:8", ["--gres=gpu:a100:8"]),
        ("comment: 'run 3, #2'", ["--comment=run 3, #2"]),
        ("mail: me@lab", ["--mail-user=me@lab", "--mail-type=END,FAIL"]),
    ],
)
def test_removed_slurm_field_names_its_replacement(folder: Path, field: str, options: list[str]) -> None:
    """A Slurm field that was removed says what to write."""
    head = f"{HEAD}backend: slurm\ngpus_per_node: 8\n"
    (found,) = faults(folder, f"{head}slurm:\n  {field}\n")
    assert f"job.yaml:6: slurm.{field.partition(':')[0]}: was removed; write slurm.extra: [" in found
    (folder / "job.yaml").write_text(f"{head}slurm:\n  {found.partition('write slurm.')[2]}\n")
    assert list(load(folder / "job.yaml").spec.slurm.extra) == options


def test_requeue_at_time_limit_needs_a_queue(folder: Path) -> None:
    (found,) = faults(folder, f"{HEAD}time_limit: 1h\ntime_limit_action: requeue\n")
    assert "time_limit_action: requeue needs a queue, and backend local has none" in found


def test_misspelled_key_is_suggested_in_set_syntax(folder: Path) -> None:
    meant = "is not a field; did you mean slurm.partition?"
    assert faults(folder, HEAD, "slurm.partion=low") == [f"--set slurm.partion=low: {meant}"]
    assert faults(folder, f"{HEAD}slurm: {{partion: low}}\n")[0].endswith(f"slurm.partion: {meant}")


@pytest.mark.parametrize(
    ("text", "system"),
    [
        ("name: a\nresources: {accelerators: A100:8}\nrun: torchrun t.py\n", "SkyPilot"),
        ("type: task\nname: a\ncommands: [torchrun t.py]\n", "dstack"),
        ("apiVersion: kubeflow.org/v1\nkind: PyTorchJob\n", "Kubernetes"),
    ],
)
def test_foreign_job_file_is_refused_by_name(tmp_path: Path, text: str, system: str) -> None:
    (tmp_path / "job.yaml").write_text(text)
    with pytest.raises(SpecError, match=f"is a job file of {system}; write its command as launch"):
        load(tmp_path / "job.yaml")
