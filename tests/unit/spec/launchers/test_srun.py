"""Options of srun and sbatch as fields of a job file."""

from __future__ import annotations

import shlex

import pytest

from orchestrator.spec.launchers import recognise
from orchestrator.spec.launchers.srun import srun


def said(text: str) -> dict[str, object]:
    taken = recognise.in_words(shlex.split(f"srun {text}"), as_program=True)
    assert taken is not None
    return {one.key: one.value for one in reversed(taken.settings)} | {"words": taken.words}


SCRIPT = ("t.py",)


@pytest.mark.parametrize(
    ("text", "settings"),
    [
        ("-N 2 -n 8 python t.py", {"nodes": "2", "ranks": "8", "device": "cpu"}),
        ("-N2 --ntasks-per-node=4 --gres=gpu:4 python t.py", {"nodes": "2", "ranks_per_node": "4", "device": "gpu"}),
        ("--gpus-per-node=a100:4 -N 1-2 python t.py",
         {"nodes": "2", "ranks_per_node": "4", "device": "gpu", "slurm.gres": "gpu:a100:4"}),
        ("-G 8 -N 2 python t.py", {"nodes": "2", "ranks": "8", "device": "gpu"}),
        ("--gpus-per-task=1 -n 4 python t.py", {"ranks": "4", "device": "gpu"}),
        ("-p gpu -A me -q high -C a100 -w n1 -x n2 --mem 64G -J x --reservation r python t.py",
         {"slurm.partition": "gpu", "slurm.account": "me", "slurm.qos": "high", "slurm.constraint": "a100", "name": "x",
          "slurm.nodelist": "n1", "slurm.exclude": "n2", "slurm.mem": "64G", "slurm.reservation": "r",
          "device": "cpu", "ranks_per_node": "1"}),
        ("-t 90 -L foo --exclusive --export=ALL,A=b -n 1 python t.py",
         {"time_limit": "1h30m", "slurm.extra": ["-Lfoo"], "slurm.exclusive": "true", "env.A": "b", "ranks": "1", "device": "cpu"}),
        ("-c 96 --ntasks-per-node 1 --gres gpu:8 torchrun --nproc-per-node 8 t.py",
         {"cpus_per_node": "96", "ranks_per_node": "8", "device": "gpu"}),
        ("torchrun --nproc-per-node 8 t.py", {"ranks_per_node": "8"}),
        ("--gres gpu:8 accelerate launch t.py", {"accelerate.args": [], "ranks_per_node": "8", "device": "gpu"}),
    ],
)  # fmt: skip
def test_options_are_settings(text: str, settings: dict[str, object]) -> None:
    assert said(text) == {"backend": "slurm", "words": SCRIPT, **settings}


@pytest.mark.parametrize(
    ("time", "limit"),
    [
        ("30", "30m"),
        ("12:30", "12m30s"),
        ("1:00:00", "1h"),
        ("2-00", "48h"),
        ("1-2:03", "26h3m"),
        ("1-0:0:5", "24h5s"),
        ("0", None),
    ],
)
def test_a_time_limit_is_read_as_slurm_reads_it(time: str, limit: str | None) -> None:
    assert said(f"-J 'my job/1' -t {time} python t.py").get("time_limit") == limit
    assert said(f"-J 'my job/1' -t {time} python t.py")["name"] == "my-job-1"


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("--arrray 1 python t.py", "srun has no option --arrray"),
        ("-t soon python t.py", "write a time such as 12:00:00"),
        ("--gpus-per-task=2 python t.py", "orch starts one rank for each GPU"),
        ("-M other python t.py", "orch asks the one cluster of this machine"),
        ("-N 2", "srun names no script"),
    ],
)
def test_a_mistake_names_the_option(text: str, fault: str) -> None:
    with pytest.raises(ValueError) as caught:
        said(text)
    assert fault in str(caught.value)


def test_what_is_about_starting_tasks_is_not_needed() -> None:
    line = srun(shlex.split("--cpu-bind=cores -K1 -l --mpi pmix --overlap -o x.out --kill-on-bad-exit t"), 0)
    assert len(line.dropped) == 7
    assert line.kept == (9,)
