"""Which lines start a launcher, and which counts do they give literally?"""

from __future__ import annotations

import shlex

import pytest
from hypothesis import given
from hypothesis import strategies as some

from orchestrator.spec.foreign import launchers
from orchestrator.spec.foreign.launchers import ProgramKind

STARTS = {
    ProgramKind.LAUNCHER: """torchrun t.py | A=1 B=2 torchrun t.py | env A=1 .venv/bin/torchrun t.py | accelerate launch t.py
    python -m torch.distributed.run t.py | python3.11 -u -W ignore -m torch.distributed.launch t.py | deepspeed t.py
    accelerate-launch t.py | fabric run t.py | lightning run model t.py | srun -N 2 python t.py | mpirun -np 2 python t.py
    uv run torchrun t.py | uv run --python /x/python torchrun t.py | uv run --interp /x/python3.11 torchrun t.py | uv run --with accelerate -q accelerate launch t.py | conda run -n torchrun python -m deepspeed t.py
    poetry run python -m accelerate.commands.launch t.py | time numactl --cpunodebind=0 torchrun t.py
    apptainer exec img.sif torchrun t.py""",
    ProgramKind.SHELL: "bash tools/dist_train.sh cfg.py 8 | A=1 bash x.sh | ./x.sh | x.sh 1 | sh -c x | uv run bash x.sh",
    ProgramKind.PYTHON: "python t.py | A=1 python -u t.py | python -m pkg.t | python -m torch.utils.x t.py | .venv/bin/python t.py",
    ProgramKind.RUNNER: """uv run t.py | uv run --python /x/python python t.py | uv run --with deepspeed t.py | uv run --with torch python t.py --launcher torchrun
    conda run -n torchrun python t.py | nohup python t.py""",
    ProgramKind.SBATCH: "sbatch run.sh | ./run.sbatch 1",
    ProgramKind.REMOTE: "ssh host torchrun t.py | pdsh -w a,b torchrun t.py",
    ProgramKind.OTHER: "t.py torchrun | uv pip install deepspeed | accelerate config | env | ./prog bash x.sh | ls",
}  # fmt: skip


@pytest.mark.parametrize("starter", list(STARTS))
def test_started_program_is_known_by_first_words(starter: ProgramKind) -> None:
    for line in STARTS[starter].replace("\n", "|").split("|"):
        assert launchers.find_start(line.split()).starter is starter, line


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            "cd src && A=1 torchrun --x 'a && b' t.py 2>&1 | tee log",
            ["A=1", "torchrun", "--x", "a && b", "t.py", "2"],
        ),
        ("torchrun \\\n  t.py # torchrun u.py", ["torchrun", "t.py"]),
        ("torchrun a.py; torchrun b.py", []),
        ("x=$(date)\ntorchrun a.py", []),
        ("echo 'torchrun a.py'", []),
        ("torchrun 'a.py", []),
    ],
)
def test_launcher_of_single_plain_line_is_found(text: str, words: list[str]) -> None:
    assert launchers.find_launch_command(text) == words


def test_commands_are_split_up_to_end_of_line() -> None:
    """Commands are split as far as a line reaches."""
    assert launchers.is_launch("# it's\nif true; then torchrun a.py; fi")
    assert not launchers.is_launch("cat <<EOF\ntorchrun a.py\nEOF")
    assert launchers.split_commands("! a >x b; { c; }") == [["a", "b"], ["c"], ["}"]]


COUNTS: list[tuple[str, tuple[str | None, str | None, str | None, bool]]] = [
    ("torchrun --nnodes 2 --nproc-per-node=4 t.py --nnodes 3", ("2", "4", None, False)),
    ("torchrun --nnodes=1:4 --nproc_per_node gpu -m pkg --nproc_per_node 3", ("4", "auto", None, False)),
    ("torchrun --nnodes=$N --nproc_per_node $((A*2)) t.py", ("$N", "$", None, False)),
    ("accelerate launch --cpu --num_processes 8 --num-machines 2 t.py", ("2", None, "8", True)),
    ("accelerate launch --gpu_ids 0,3 t.py", (None, "2", None, False)),
    ("deepspeed --num_nodes 2 --num_gpus 8 t.py --num_gpus 1", ("2", "8", None, False)),
    ("fabric run --devices 0,1 --accelerator cpu t.py", (None, "2", None, True)),
    ("mpirun -np 4 python t.py -n 3", (None, None, "4", False)),
    ("srun torchrun --nproc_per_node 8 t.py", (None, "8", None, False)),
    ("bash dist_train.sh --nnodes 2", (None, None, None, False)),
]


@pytest.mark.parametrize(("line", "found"), COUNTS)
def test_counts_are_between_launcher_and_script(line: str, found: object) -> None:
    counts = launchers.read_counts(launchers.find_launch_command(line))
    values = [one.value if one else None for one in (counts.nodes, counts.per_node, counts.total)]
    assert (*values, counts.is_cpu) == found


@pytest.mark.parametrize(
    ("line", "default"),
    [
        ("torchrun t.py", "1"),
        ("python -m torch.distributed.launch t.py", "1"),
        ("CUDA_VISIBLE_DEVICES=0,2 accelerate launch t.py", "2"),
        ("accelerate launch t.py", None),
        ("srun python t.py", "1"),
    ],
)
def test_launcher_without_count_has_its_default(line: str, default: str | None) -> None:
    found = launchers.read_counts(line.split()).default
    assert (found.value if found else None) == default


@given(some.lists(some.text(some.characters(exclude_characters="\0", exclude_categories=["Cs"])), min_size=1))
def test_arguments_reach_the_shell_unchanged(words: list[str]) -> None:
    assert shlex.split(launchers.join_command(["A_1=x y", *words])) == ["A_1=x y", *words]


@given(some.text("torchrun pyth-m'\"$\\\n;|&<>()#{}=1 "))
def test_no_text_breaks_the_search(text: str) -> None:
    launchers.read_counts(launchers.find_launch_command(text))
    for words in launchers.split_commands(text):
        launchers.find_start(words)
