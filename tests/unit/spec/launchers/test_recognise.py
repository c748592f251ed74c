"""Launch lines wherever they stand: in words, in shell text, behind variables and other programs."""

from __future__ import annotations

import shlex

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.spec.launchers import recognise

PLAIN = "torchrun --nproc-per-node 2 t.py --x"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (PLAIN, ("t.py", "--x")),
        (f"/opt/venv/bin/{PLAIN}", ("t.py", "--x")),
        ("python -m torch.distributed.run --nproc_per_node 2 t.py --x", ("t.py", "--x")),
        ("python3 -u -m torch.distributed.launch --use_env t.py --x", ("t.py", "--x")),
        ("accelerate launch t.py --x", ("t.py", "--x")),
        ("accelerate-launch t.py --x", ("t.py", "--x")),
        ("python -m accelerate.commands.launch t.py --x", ("t.py", "--x")),
        ("python -m accelerate.commands.accelerate_cli launch t.py --x", ("t.py", "--x")),
        ("deepspeed --no_local_rank t.py --x", ("t.py", "--x")),
        ("fabric run t.py --x", ("t.py", "--x")),
        ("fabric run model t.py --x", ("t.py", "--x")),
        ("lightning run model t.py --x", ("t.py", "--x")),
        ("A=b env_file=c torchrun t.py --x", ("t.py", "--x")),
        ("env A=b torchrun t.py --x", ("t.py", "--x")),
        (f"bash -c '{PLAIN}'", ("t.py", "--x")),
        ("srun bash -c 'torchrun t.py --x'", ("t.py", "--x")),
        ("python t.py --x", ("t.py", "--x")),
        ("python -m t --x", ("-m", "t", "--x")),
    ],
)
def test_a_plain_line_becomes_the_words_of_an_entry(text: str, words: tuple[str, ...]) -> None:
    taken = recognise.in_text(text, as_program=True)
    assert taken is not None
    assert taken.words == words


@pytest.mark.parametrize(
    ("text", "shell"),
    [
        ("source x && torchrun --nproc-per-node 2 t.py --x", "source x && python3 t.py --x"),
        ("torchrun t.py $X > log", "python3 t.py $X > log"),
        ("torchrun > log --nnodes 1 t.py --x", "python3 t.py --x"),
        ("torchrun --nnodes 1 t.py > log --x", "python3 t.py > log --x"),
        ("torchrun t.py 2>&1 | tee log", "set -o pipefail; python3 t.py 2>&1 | tee log"),
        ("A=$B MASTER_PORT=1 torchrun -m t.x", "A=$B python3 -m t.x"),
        ("torchrun \\\n  --nproc-per-node 2 \\\n  t.py \\\n  $X", "python3 t.py \\\n  $X"),
        ("uv run torchrun --nproc-per-node 2 t.py", "uv run python3 t.py"),
        ("deepspeed t.py --y", 'python3 t.py --local_rank="$LOCAL_RANK" --y'),
        ("cd a && deepspeed t.py --y", 'cd a && python3 t.py --local_rank="$LOCAL_RANK" --y'),
        ("torchrun --no-python ./bench 1", "./bench 1"),
        ("torchrun t.py & wait", "python3 t.py & wait"),
        ("python t.py $X", "python t.py $X"),
    ],
)
def test_in_shell_text_the_launcher_s_words_become_the_interpreter(text: str, shell: str) -> None:
    taken = recognise.in_text(text, as_program=True)
    assert taken is not None
    assert (taken.words, taken.shell.replace("python3  >", "python3 >")) == (
        None,
        shell,
    ) or "> log --nnodes" in text


@pytest.mark.parametrize(
    "text", ["echo torchrun", "train.py --launcher torchrun x", "bash run.sh", "python t.py", "make srun"]
)
def test_a_command_without_a_launch_line_is_left_alone(text: str) -> None:
    assert recognise.in_text(text, as_program=False) is None


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("for x in 1 2; do torchrun t.py; done", "in a loop, condition, function or subshell"),
        ("if true; then torchrun t.py; fi", "in a loop, condition, function or subshell"),
        ("(torchrun t.py)", "in a loop, condition, function or subshell"),
        ("x=$(torchrun t.py)", "within $( )"),
        ("echo `torchrun t.py`", "within $( )"),
        ("cd x; bash -c 'torchrun t.py'", "starts a launcher through bash"),
        ("cd x; srun bash -c 'torchrun t.py'", "starts a launcher within quotes"),
        ("eval 'torchrun t.py'", "starts a launcher through eval"),
        ("torchrun a.py && torchrun b.py", "more than once"),
        ("torchrun t.py &", "in the background"),
        ("torchrun 't.py", "not closed"),
        ("torchrun --foo t.py | cat", "torchrun has no option --foo"),
        ("python -c 'x' $Y torchrun t", ""),
    ],
)
def test_what_cannot_be_seen_through_is_refused(text: str, fault: str) -> None:
    if not fault:
        assert recognise.in_text(text, as_program=False) is None
        return
    with pytest.raises(ValueError) as caught:
        recognise.in_text(text, as_program=False)
    assert fault in str(caught.value)


@pytest.mark.parametrize(
    ("text", "settings"),
    [
        (".venv/bin/python -O t.py", {"python": ".venv/bin/python", "env.PYTHONOPTIMIZE": "1"}),
        ("CUDA_VISIBLE_DEVICES=0,3 python t.py", {"ranks_per_node": "2", "device": "gpu"}),
        ("CUDA_VISIBLE_DEVICES= python t.py", {"device": "cpu"}),
        ("A=1 WORLD_SIZE=4 python t.py", {"env.A": "1"}),
    ],
)
def test_variables_and_the_interpreter_are_settings(text: str, settings: dict[str, str]) -> None:
    taken = recognise.in_words(shlex.split(text), as_program=True)
    assert taken is not None
    assert {one.key: one.value for one in taken.settings} == settings


PIECES = ["torchrun", "accelerate", "launch", "srun", "python", "-m", "--nnodes", "2", "t.py", "$X", "|", "&&", "'a b'", "bash", "-c",
          "A=b", "--", "$(", ")", "fabric", "run", "deepspeed", "--include", "a:1@b", "-t", "1:2:3", "-N2", "\n", "do", "done"]  # fmt: skip


@given(st.lists(st.sampled_from(PIECES), max_size=9))
def test_any_line_is_read_or_refused(pieces: list[str]) -> None:
    try:
        recognise.in_text(" ".join(pieces), as_program=True)
        recognise.in_words(pieces, as_program=False)
    except ValueError as err:
        assert str(err).isprintable()


def test_a_shell_variable_of_an_option_that_is_not_needed_takes_no_shell() -> None:
    taken = recognise.in_text("torchrun --rdzv-endpoint $HOST:1 t.py", as_program=True)
    assert taken is not None
    assert taken.words == ("t.py",)


@pytest.mark.parametrize(
    "text",
    [
        "uv run python train.py srun now",
        "uv run train.py --launcher torchrun --x 3",
        "poetry run python train.py deepspeed ds.json",
        "nice python train.py --backend deepspeed --lr 1",
        "nohup python train.py --mode srun > log 2>&1",
        "conda run -n deepspeed python train.py",
        "uv run --with deepspeed python train.py",
        "singularity exec --nv a.sif python train.py --launcher torchrun x",
        "conda install deepspeed && python train.py",
        "uv pip install deepspeed ; python train.py",
        "time pip install deepspeed ; python train.py",
        "ls | xargs -n 1 echo 'torchrun a'; python train.py",
        "bash train.sh deepspeed x",
        "torchrun --help; python train.py",
        "V=$(deepspeed --version); python train.py",
        "case $X in deepspeed ) Y=1;; torchrun ) Y=2;; esac; python train.py",
        "[[ $X =~ ^(torchrun )$ ]] && python train.py",
        "x=(torchrun a); python train.py",
        "echo \"don't $(echo ')') use torchrun x\"; python train.py",
        "python train.py --note $'it\\'s torchrun time'",
    ],
)
def test_a_launcher_that_is_only_mentioned_is_left_alone(text: str) -> None:
    assert recognise.in_text(text, as_program=False) is None


@pytest.mark.parametrize(
    "text",
    [
        "uv run --no-sync torchrun train.py",
        "uv run -p 3.11 torchrun train.py",
        "time -p torchrun train.py",
        "nice -n 5 torchrun train.py",
        "conda run -n env --no-capture-output torchrun train.py",
        "singularity exec --nv image.sif torchrun train.py",
        "singularity exec --bind /data image.sif torchrun train.py",
        "apptainer exec image.sif torchrun train.py",
        "nsys profile -o out torchrun train.py",
        "nohup nice torchrun train.py",
        "numactl --interleave=all python -m torch.distributed.run train.py",
    ],
)
def test_a_launcher_behind_a_wrapper_is_found(text: str) -> None:
    taken = recognise.in_text(text, as_program=False)
    assert taken is not None
    assert taken.launcher == "torchrun"


@pytest.mark.parametrize("text", ["xargs torchrun train.py", "bash -ec 'torchrun train.py'; true"])
def test_a_launcher_that_another_program_starts_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="starts a launcher through"):
        recognise.in_text(text, as_program=False)
