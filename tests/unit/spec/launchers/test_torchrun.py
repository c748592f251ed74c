"""Torchrun's options: which become settings, which are not needed, and that none of the installed release is missing."""

from __future__ import annotations

import shlex

import pytest

from orchestrator.spec.launchers import torchrun
from orchestrator.spec.launchers.launch_line import LaunchLine


def line(text: str) -> LaunchLine:
    return torchrun.torchrun(shlex.split(text), 0)


def said(one: LaunchLine) -> dict[str, object]:
    return {setting.key: setting.value for setting in one.settings}


@pytest.mark.parametrize(
    ("text", "settings"),
    [
        ("--nnodes 2 --nproc-per-node 8 t.py", {"nodes": "2", "ranks_per_node": "8"}),
        ("--nnodes=2 --nproc_per_node=8 t.py", {"nodes": "2", "ranks_per_node": "8"}),
        ("--nproc 8 --nnode 2 t.py", {"nodes": "2", "ranks_per_node": "8"}),
        ("--nproc-per-node gpu t.py", {"ranks_per_node": "auto"}),
        ("--nproc-per-node auto t.py", {"ranks_per_node": "auto"}),
        ("--nnodes 1:4 --nproc-per-node 1 t.py", {"nodes": "4", "ranks_per_node": "1"}),
        ("--nnodes $SLURM_NNODES --nproc-per-node 4 t.py", {"ranks_per_node": "4"}),
        ("t.py --nnodes 3", {"ranks_per_node": "1"}),
        ("--max-restarts 5 --shutdown-timeout 30 --nproc-per-node 1 t.py",
         {"restart.max": "5", "monitor.stop_grace": "30", "ranks_per_node": "1"}),
    ],
)  # fmt: skip
def test_options_are_settings(text: str, settings: dict[str, object]) -> None:
    assert said(line(text)) == settings


def test_two_dashes_directly_behind_the_script_are_taken_away_as_torchrun_does() -> None:
    def program(text: str) -> list[str]:
        return line(text).program(shlex.split(text))

    assert program("t.py -- --lr 0.1") == ["t.py", "--lr", "0.1"]
    assert program("-m pkg.t -- --lr 0.1 -- x") == ["-m", "pkg.t", "--lr", "0.1", "--", "x"]
    assert program("t.py --lr 0.1 -- x") == ["t.py", "--lr", "0.1", "--", "x"]


@pytest.mark.parametrize(
    ("text", "program"),
    [
        ("--nproc-per-node 2 t.py --lr 0.1", ["t.py", "--lr", "0.1"]),
        ("--nproc-per-node 2 -m pkg.train --lr 0.1", ["-m", "pkg.train", "--lr", "0.1"]),
        ("--nproc-per-node 2 --module pkg.train", ["-m", "pkg.train"]),
        ("--nproc-per-node 2 --no-python ./bench 1", ["./bench", "1"]),
        ("--nproc-per-node 2 -- t.py -m", ["t.py", "-m"]),
    ],
)
def test_the_program_is_what_stands_behind_the_options(text: str, program: list[str]) -> None:
    assert line(text).program(shlex.split(text)) == program


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("--rdzv-backend c10d", "orch makes the rendezvous"),
        ("--rdzv_endpoint=h:1", "orch makes the rendezvous"),
        ("--standalone", "orch makes the rendezvous"),
        ("--master_port 29501", "rendezvous.port fixes it"),
        ("--node-rank 1", "orch numbers the nodes"),
        ("--log-dir logs", "orch logs"),
        ("-r 3", "orch logs"),
        ("-t3", "orch logs"),
        ("--nnodes 1:4", "a job keeps its number of nodes: 4"),
    ],
)
def test_an_option_that_is_not_needed_says_why(text: str, why: str) -> None:
    (dropped,) = line(f"{text} t.py").dropped
    assert dropped.option == text
    assert why in dropped.why


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("--nproc-per-nod 2 t.py", ""),
        ("--foo t.py", "torchrun has no option --foo"),
        ("--nproc-per-knot 2 t.py", "torchrun has no option --nproc-per-knot; did you mean --nproc-per-node?"),
        ("--nproc-per-node x t.py", "--nproc-per-node x: must be a whole number of at least 1"),
        ("--nproc-per-node 0 t.py", "must be a whole number of at least 1"),
        ("--nproc-per-node $N t.py", "is not known before the job runs; write the number"),
        ("--nproc-per-node cpu t.py", "write procs_per_node: 4"),
        ("--nproc-per-node xpu t.py", "NVIDIA GPUs and CPU ranks only"),
        ("--nproc-per-node", "needs a value behind it"),
        ("--nproc-per-node 2", "torchrun names no script behind its options"),
        ("-m --no-python x", "cannot have --module and --no-python together"),
    ],
)  # fmt: skip
def test_a_mistake_names_the_option(text: str, fault: str) -> None:
    if not fault:
        assert said(line(text)) == {"ranks_per_node": "2"}
        return
    with pytest.raises(ValueError) as caught:
        line(text)
    assert fault in str(caught.value)


def test_the_older_launcher_tells_the_script_its_local_rank_unless_use_env_is_given() -> None:
    assert torchrun.distributed_launch(["--nproc_per_node=2", "t.py"], 0).local_rank == "--local-rank"
    assert torchrun.distributed_launch(["--use_env", "t.py"], 0).local_rank == ""


@pytest.mark.slow  # it imports torch
def test_every_option_of_the_installed_release_is_known() -> None:
    run = pytest.importorskip("torch.distributed.run")
    names = {name for action in run.get_args_parser()._actions for name in action.option_strings}
    for name in names - {"-h", "--help"}:
        assert torchrun._RUN.find(name), name
