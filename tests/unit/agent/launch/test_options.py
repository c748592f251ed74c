"""What do launcher lines ask for, as a stand-in takes them?"""

from __future__ import annotations

import shlex

import pytest

from orchestrator.agent.launch import options
from orchestrator.agent.launch.options import PassThrough, RunOnce
from orchestrator.agent.ranks.rank_start import LauncherCall
from orchestrator.core.errors import UserError

CALLS = {
    "torchrun train.py --lr 0.1": (("train.py", "--lr", "0.1"), True, ""),
    "torchrun --nnodes 1:4 --nproc_per_node=gpu -m pkg.train x": (("-m", "pkg.train", "x"), True, ""),
    "torchrun --no-python ./run.sh --nnodes": (("./run.sh", "--nnodes"), False, ""),
    "torchrun --rdzv_back c10d train.py -- a": (("train.py", "a"), True, ""),
    "torch.distributed.launch --nproc_per_node 2 train.py": (("train.py",), True, "--local-rank"),
    "torch.distributed.launch --use_env train.py": (("train.py",), True, ""),
    "deepspeed --num_gpus=2 --hostfile h train.py --deepspeed ds.json": (
        ("train.py", "--deepspeed", "ds.json"), True, "--local_rank",
    ),
    "deepspeed --include worker-0:0,1@worker-1:0,1 --no_local_rank train.py": (("train.py",), True, ""),
    "fabric run --devices=2 train.py --lr 1 --strategy ddp --help": (("train.py", "--lr", "1", "--help"), True, ""),
    "lightning.fabric.cli --devices 2 --strategy ddp train.py": (("train.py",), True, ""),
    "srun -n 4 --cpu-bind=none -luN2 -K1 -vv python -u train.py": (("python", "-u", "train.py"), False, ""),
    "srun -N 2 -n 4 --ntasks-per-node=2 bash -c 'python $SLURM_PROCID'": (("bash", "-c", "python $SLURM_PROCID"), False, ""),
    "srun conda run -n deepspeed python t.py torchrun": (
        ("conda", "run", "-n", "deepspeed", "python", "t.py", "torchrun"), False, "",
    ),
    "srun uv run -m pkg --strategy deepspeed": (("uv", "run", "-m", "pkg", "--strategy", "deepspeed"), False, ""),
    "mpirun -np 4 -x A=b --mca btl tcp,self python train.py": (("python", "train.py"), False, ""),
}  # fmt: skip


@pytest.mark.parametrize("line", CALLS)
def test_rank_arguments_follow_launcher_options(line: str) -> None:
    launcher, *words = shlex.split(line)
    found = options.parse_line(launcher, words, ranks_here=2, ranks=4)
    assert isinstance(found, LauncherCall)
    assert (found.words, found.is_python, found.local_rank) == CALLS[line]
    options.check_counts(found, nodes=2, ranks_here=2, ranks=4)


def test_overridden_options_are_named_and_variables_kept() -> None:
    """Options that orch decides are named, and variables of the line are kept."""
    found = options.parse_line("torchrun", ["--max-restarts", "3", "--rdzv-id=a", "--standalone", "t.py"], 2, 4)
    assert isinstance(found, LauncherCall) and found.unused == [
        "--max-restarts 3",
        "--rdzv-id=a",
        "--standalone",
    ]
    for launcher, *words in (
        ["srun", "--export=ALL,A=1", "--chdir=d", "t.py"],
        ["mpirun", "-wdir", "d", "-x", "A=1", "t.py"],
    ):
        found = options.parse_line(launcher, words, 2, 4)
        assert isinstance(found, LauncherCall) and (found.env, found.cwd) == ({"A": "1"}, "d")
    found = options.parse_line("fabric", ["run", "--precision=16", "--devices", "auto", "t.py"], 2, 4)
    counts = {"LT_CLI_USED": "1", "LT_DEVICES": "2", "LT_NUM_NODES": "2"}
    assert isinstance(found, LauncherCall) and found.env == {**counts, "LT_PRECISION": "16"}


PASSED = {
    "torchrun --help": PassThrough(),
    "torchrun --version": PassThrough(),
    "fabric consolidate x": PassThrough(),
    "srun -N 1 -n 1 hostname -f": PassThrough(("hostname", "-f")),
    "mpirun -np 1 hostname": RunOnce(("hostname",)),
    "srun --ntasks-per-node=1 python fetch.py": RunOnce(("python", "fetch.py")),
    "srun bash run.sh": RunOnce(("bash", "run.sh")),
    "srun -u torchrun train.py": RunOnce(("torchrun", "train.py")),
    "srun python -m torch.distributed.run t.py": RunOnce(("python", "-m", "torch.distributed.run", "t.py")),
    "srun -n 2 bash run.sh": RunOnce(("bash", "run.sh")),
    "srun env A=1 /opt/bin/torchrun t.py": RunOnce(("env", "A=1", "/opt/bin/torchrun", "t.py")),
    "srun --export=ALL,A=1 -D d torchrun t.py": RunOnce(("env", "-C", "d", "A=1", "torchrun", "t.py")),
    "mpirun -x A=1 -x B torchrun t.py": RunOnce(("env", "A=1", "torchrun", "t.py")),
    "srun numactl -m 0 torchrun t.py": RunOnce(("numactl", "-m", "0", "torchrun", "t.py")),
    "mpirun -H a,b uv run torchrun t.py": RunOnce(("uv", "run", "torchrun", "t.py")),
}


@pytest.mark.parametrize("line", PASSED)
def test_line_starting_no_ranks_is_passed_on(line: str) -> None:
    launcher, *words = shlex.split(line)
    assert options.parse_line(launcher, words, ranks_here=2, ranks=4) == PASSED[line]


def test_single_task_of_one_rank_job_is_training() -> None:
    for launcher in ("srun", "mpirun"):
        assert not isinstance(options.parse_line(launcher, ["-n", "1", "hostname", "-f"], 1, 1), LauncherCall)
        for words in ("env A=1 /opt/bin/python3 -c x", "uv run -m pkg", "./train.sh"):
            assert isinstance(options.parse_line(launcher, ["-n", "1", *words.split()], 1, 1), LauncherCall)


REFUSED = {
    "torchrun --nproc-per-node 8 train.py": "--nproc-per-node 8 asks for 8 ranks on each node, but the job has 2",
    "torchrun --nnodes=3 train.py": "--nnodes=3 asks for 3 nodes, but the job has 2",
    "srun -n 6 python train.py": "-n 6 asks for 6 ranks, but the job has 4; either set gpus_per_node: 3",
    "srun --container-image=x torchrun train.py": "--container-image=x: for ranks in a container write",
    "srun -lYN2 python train.py": "srun has no option -YN2",
    "mpirun -n 2 python r.py a : -n 2 python r.py b": "starts several programs",
    "torchrun --nnodes=x train.py": "must be a whole number",
    "torchrun --node-ranks 1 train.py": "has no option --node-ranks",
    "torchrun --nnodes 2": "names no program",
    "torchrun --nnodes": "needs a value",
    "torchrun -m --no-python a": "cannot be used together",
}


@pytest.mark.parametrize("line", REFUSED)
def test_unsupported_option_is_refused_with_reason(line: str) -> None:
    """An option that the launcher or the job does not support is refused with the reason."""
    launcher, *words = line.split()
    with pytest.raises(UserError) as caught:
        found = options.parse_line(launcher, words, ranks_here=2, ranks=4)
        assert isinstance(found, LauncherCall)
        options.check_counts(found, nodes=2, ranks_here=2, ranks=4)
    assert REFUSED[line] in caught.value.what
