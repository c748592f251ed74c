"""Sbatch scripts as jobs: directives, preparation, variables, and the one line that trains."""

from __future__ import annotations

import pytest

from orchestrator.spec.launchers.sbatch_script import items, taken

HEAD = "#!/bin/bash\n#SBATCH -N 4 --ntasks-per-node=1\n#SBATCH --gres=gpu:8   # all\n#SBATCH --cpus-per-task=96\n"


def said(text: str, *arguments: str) -> dict[str, object]:
    found = taken(text, arguments, on_slurm="#SBATCH" in text)
    return {one.key: one.value for one in reversed(found.settings)} | {"program": found.words or found.shell}


def test_a_whole_script_is_read() -> None:
    found = taken(
        f"""{HEAD}
set -e
module load cuda   # the driver's
source env/bin/activate
export NCCL_DEBUG=INFO
export MASTER_ADDR=$(scontrol show hostnames $SLURM_JOB_NODELIST | head -n 1) MASTER_PORT=29500
nodes=( $(scontrol show hostnames) )
GPUS=8
cp -r data /tmp
srun torchrun \\
  --nnodes $SLURM_NNODES --nproc-per-node $GPUS \\
  --rdzv-endpoint $MASTER_ADDR:$MASTER_PORT train.py --lr 0.1
python evaluate.py
""",
        (),
        on_slurm=True,
    )
    assert found.words == ("train.py", "--lr", "0.1")
    settings = {one.key: one.value for one in reversed(found.settings)}
    assert settings == {
        "backend": "slurm", "nodes": "4", "ranks_per_node": "8", "cpus_per_node": "96", "device": "gpu",
        "env.NCCL_DEBUG": "INFO",
        "setup": ["module load cuda   # the driver's", "source env/bin/activate", "cp -r data /tmp"],
        "python": "python3",
    }  # fmt: skip
    dropped = {one.option.partition("=")[0].partition(" ")[0]: one.why for one in found.dropped}
    assert set(dropped) == {"set", "export", "MASTER_PORT", "nodes", "--ntasks-per-node", "--rdzv-endpoint"}


def test_slurm_s_tasks_are_the_ranks_where_srun_starts_python() -> None:
    text = "#SBATCH -N 2\n#SBATCH --ntasks-per-node=4\n#SBATCH --gres=gpu:4\nsrun python train.py\n"
    assert said(text) == {
        "backend": "slurm", "nodes": "2", "ranks_per_node": "4", "device": "gpu", "program": ("train.py",),
    }  # fmt: skip


def test_options_of_srun_win_over_the_directives() -> None:
    text = "#SBATCH -N 4 -n 4\nsrun -N 2 --ntasks-per-node 3 python train.py\n"
    assert said(text)["nodes"] == "2"
    assert said(text)["ranks_per_node"] == "3"
    assert "ranks" not in said(text)


@pytest.mark.parametrize(
    ("line", "python"),
    [
        ("conda activate train", "python3"),
        ("module load PyTorch/2.4", "python3"),
        ("module load cuda/12.1", None),
        ("ulimit -n 65536", None),
    ],
)
def test_a_line_that_chooses_a_python_chooses_that_of_the_ranks(line: str, python: str | None) -> None:
    assert said(f"{line}\ntorchrun --nproc-per-node 2 train.py\n").get("python") == python


def test_variables_that_hold_the_line_are_filled_in() -> None:
    text = (
        '#SBATCH --nodes=4\nexport GPUS=4\nexport RUN="accelerate launch --num_processes $((SLURM_NNODES * GPUS)) '
        '--num_machines $SLURM_NNODES"\nexport CMD="$RUN ${DIR:-/x}/train.py"\nsrun $CMD\n'
    )
    assert said(text) == {
        "backend": "slurm", "nodes": "4", "ranks": "16", "accelerate.args": [], "device": "cpu", "env.GPUS": "4",
        "program": "python3 ${DIR:-/x}/train.py",
    }  # fmt: skip


def test_a_script_without_directives_runs_here_and_is_given_its_arguments() -> None:
    text = '#!/bin/bash\nN=$1\nshift\ntorchrun --nproc_per_node=$N train.py "$@"\n'
    assert said(text, "4", "--lr", "0.1") == {"ranks_per_node": "4", "program": ("train.py", "--lr", "0.1")}


def test_what_only_a_node_knows_is_exported_there() -> None:
    text = "#SBATCH -n 1\nexport OUT=$(date +%s)\nX=$HOME/x\nexport Y=$HOME/y\ncd /code\nsrun python t.py --out $OUT $X\n"
    assert said(text)["setup"] == ['export OUT="$(date +%s)"', 'export Y="$HOME/y"']
    assert said(text)["workdir"] == "/code"
    assert said(text)["program"] == "python3 t.py --out $OUT $HOME/x"


RUN = "torchrun --nproc-per-node 2 t.py"


@pytest.mark.parametrize(
    ("text", "program"),
    [
        ('A=""\nA+=" --lr 1"\nA+=" --bs 8"\n' + RUN + " $A", ("t.py", "--lr", "1", "--bs", "8")),
        ('A="\n --x 1 \\\n --y\n"\n' + RUN + " $A --z", ("t.py", "--x", "1", "--y", "--z")),
        ('A=(--lr 1 # its rate\n --name "a b")\nA+=(--z)\n' + RUN + ' "${A[@]}"', ("t.py", "--lr", "1", "--name", "a b", "--z")),
        ("A=(--nproc-per-node 2\n  --nnodes 1)\ntorchrun ${A[@]} t.py", ("t.py",)),
        ("S=${1:-42}\nB=${3:-8}\n" + RUN + " $S $B", ("t.py", "7", "8")),
        ("if true; then L=1; fi\nL=2\n" + RUN + " $L", ("t.py", "2")),
        ("if true; then export L=1; fi\n" + RUN + " $L", "python3 t.py $L"),
        ('if [ -z "$P" ]; then P=29500; fi\ntorchrun --nproc-per-node 2 --master_port $P t.py', ("t.py",)),
        ('L=1\nsed -i "s/L=.*/L=$L/" cfg\n' + RUN + " $L", ("t.py", "1")),
        (f"cd src && {RUN}", "cd src && python3 t.py"),
        (f"echo start; {RUN}", "echo start; python3 t.py"),
        ("A=1 python t.py", ("t.py",)),
        ("time python t.py", "time python t.py"),
        ("uv run python t.py", "uv run python t.py"),
        ("cd src && python t.py", "cd src && python t.py"),
        ("python t.py | tee log", "set -o pipefail; python t.py | tee log"),
    ],
)  # fmt: skip
def test_the_program_gets_what_the_shell_would_give_it(text: str, program: object) -> None:
    assert said(text + "\n", "7", "6")["program"] == program


@pytest.mark.parametrize(
    "sets",
    [
        "if x; then L=2; fi",
        "for L in 1 2; do y; done",
        "read -r L < file",
        "case $M in\n  a) L=1 ;;\n  (b) L=2 ;;\nesac",
        "while getopts l: o; do case $o in l) L=$OPTARG ;; esac; done",
        "if x; then export L=2; fi",
        "if x; then L+=(2); fi",
    ],
)
def test_a_value_that_the_text_does_not_tell_is_asked_for(sets: str) -> None:
    with pytest.raises(ValueError, match=r"\$L is set in line 2, and not by L=… alone"):
        said(f"L=1\n{sets}\nA=$L\n{RUN} --lr $A\n")


def test_what_is_exported_stays_exported_and_before_what_needs_it() -> None:
    text = f'export H=$SCRATCH/h\nmkdir -p $H\nexport PATH=/x:$PATH\nP+=":$PWD"\n{RUN} $H\n'
    assert said(text)["setup"] == [
        'export H="$SCRATCH/h"', "mkdir -p $SCRATCH/h", 'export PATH="/x:$PATH"', 'export P="${P}:$PWD"',
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("torchrun $A t.py\n", "line 1: $A stands where options of torchrun may stand"),
        ("torchrun ${A[@]} t.py\n", "line 1: ${A[@]} is no list that the script writes out"),
        ("python t.py &\nwait\n", "line 1: starts its program in the background"),
        ("case $H in g*) torchrun t.py;; esac\n", "line 1: starts a launcher in a loop"),
        ("echo hello\n", "no line of the script starts a training"),
        ("torchrun a.py\ntorchrun b.py\n", "lines 1 and 2 each start a training"),
        ("for x in 1 2; do\n  torchrun t.py\ndone\n", "line 1: starts a launcher in a loop"),
        ("#SBATCH --nodess=2\ntorchrun t.py\n", "sbatch has no option --nodess; did you mean --nodes?"),
        ("#SBATCH -N 2 train.py\ntorchrun t.py\n", "line 1: train.py is no option of sbatch"),
        ("#SBATCH --array=1-4\ntorchrun t.py\n", "a job is one job"),
        ("if true\ntorchrun t.py\n", "line 1: a quote, loop or condition is not closed"),
        ("torchrun --foo t.py\n", "line 1: torchrun has no option --foo"),
    ],
)
def test_a_script_that_is_not_one_training_says_why(text: str, fault: str) -> None:
    with pytest.raises(ValueError) as caught:
        taken(text, (), on_slurm=True)
    assert fault in str(caught.value)


def test_a_loop_or_a_continued_line_is_one_item() -> None:
    text = "a \\\n b\nfor x in 1; do\n c\ndone\n\n# no\nd\n"
    assert [number for number, _ in items(text)] == [1, 3, 8]
