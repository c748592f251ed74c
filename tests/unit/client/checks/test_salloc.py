"""Does a check ask for nodes as its job would, and tell what the queue says? A fake salloc stands for Slurm."""

from __future__ import annotations

from pathlib import Path

import pytest

from orchestrator.client.checks.salloc import allocation
from orchestrator.core.errors import ClusterError, UserError
from orchestrator.spec.load import SpecFile, load
from tests.support import fake_sbatch

pytestmark = pytest.mark.slow

SPEC = "name: gpt\nbackend: slurm\nnodes: 2\nprocs_per_node: 1\nentrypoint: train.py\ntime_limit: 2h\n"
OPTIONS = ("--nodes=2", "--time=02:00:00", "--signal=B:USR1@60", "--requeue", "--open-mode=append", "--qos=a")
GRANTED = """echo "salloc: Granted job allocation 7" >&2
while test "$1" != /bin/sh; do echo "$1" >>"$HOME/options"; shift; done
export SLURM_JOB_ID=7 SLURM_JOB_NODELIST='node[1-2]'
"$@"; touch "$HOME/released"
"""
PENDING = 'echo "salloc: Pending job allocation 7" >&2; exec sleep 60'


def _given(folder: Path, salloc: str, squeue: str = "true") -> tuple[SpecFile, dict[str, str]]:
    """Return a job, and an environment with these commands."""
    slurm = fake_sbatch.make(folder / "bin")
    for name, text in (("salloc", salloc), ("squeue", squeue)):
        (slurm.folder / name).write_text(f"#!/bin/sh\n{text}\n")
    (folder / "train.py").touch()
    (folder / "job.yaml").write_text(SPEC)
    return load(folder / "job.yaml"), slurm.environ


def test_allocation_is_requested_like_job_for_short_time(tmp_path: Path) -> None:
    file, environ = _given(tmp_path, GRANTED)
    with allocation(file, OPTIONS, {**environ, "SLURM_NNODES": "9", "OWN": "x"}, print) as there:
        assert (there["SLURM_JOB_ID"], there["SLURM_JOB_NODELIST"]) == ("7", "node[1-2]")
        assert not {"SLURM_NNODES", "OWN"} & set(there), "sbatch would not get them either"
    options = (tmp_path / "bin/options").read_text().split()
    assert options == ["--nodes=2", "--time=02:00:00", "--qos=a", "--job-name=check-gpt", "--time=20"]
    assert (tmp_path / "bin/released").exists()


def test_salloc_refusal_is_reported_verbatim(tmp_path: Path) -> None:
    file, environ = _given(tmp_path, 'echo "salloc: error: no, and why" >&2; exit 1')
    with (
        pytest.raises(ClusterError, match="no nodes: no, and why"),
        allocation(file, OPTIONS, environ, print),
    ):
        pass


def test_endless_allocation_wait_is_given_up(tmp_path: Path) -> None:
    """An allocation that stays pending is given up with what to change."""
    line = "7|PENDING|N/A|2||PartitionTimeLimit|(null)"
    file, environ = _given(tmp_path, PENDING, f"echo '{line}'")
    with (
        pytest.raises(UserError, match="cannot start as it is") as told,
        allocation(file, OPTIONS, environ, print),
    ):
        pass
    assert told.value.fix == "change the job file, or use --set time_limit=…"


def test_waiting_allocation_shows_its_queue_state(tmp_path: Path) -> None:
    squeue = """case "$*" in *--sort*) echo '3|other'; echo '5|main'; echo '7|main' ;;
*) echo '7|PENDING|2026-11-28T19:17:52|2||Priority|(null)' ;; esac"""
    file, environ = _given(tmp_path, PENDING, squeue)

    def say(text: str) -> None:
        raise KeyboardInterrupt(text)

    with pytest.raises(KeyboardInterrupt) as told, allocation(file, OPTIONS, environ, say):
        pass
    where = "number 2 of 2 in partition main, expected to start at 2026-11-28 19:17 UTC"
    assert str(told.value) == f"Slurm job 7 waits in the queue: Priority, {where}; Ctrl-C stops waiting"
