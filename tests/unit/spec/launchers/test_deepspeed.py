"""DeepSpeed's options: hosts and GPUs are orch's, and the script is told its local rank."""

from __future__ import annotations

import shlex

import pytest

from orchestrator.spec.launchers.deepspeed import deepspeed


@pytest.mark.parametrize(
    ("text", "settings"),
    [
        ("t.py", {"ranks_per_node": "auto", "device": "gpu"}),
        ("--num_gpus 8 --num_nodes=2 t.py", {"nodes": "2", "ranks_per_node": "8", "device": "gpu"}),
        ("--num_accelerators 4 t.py", {"ranks_per_node": "4", "device": "gpu"}),
        ("--include a:0,1@b:2,3 t.py", {"nodes": "2", "ranks_per_node": "2", "device": "gpu"}),
        ("-i localhost:1 t.py", {"nodes": "1", "ranks_per_node": "1", "device": "gpu"}),
    ],
)
def test_options_are_settings(text: str, settings: dict[str, object]) -> None:
    line = deepspeed(shlex.split(text), 0)
    assert {one.key: one.value for one in line.settings} == settings
    assert line.local_rank == "--local_rank"


def test_what_is_about_reaching_hosts_is_not_needed() -> None:
    words = shlex.split(
        "-H hosts --master_port 1 --launcher slurm --no_ssh_check --no_local_rank --module pkg.t"
    )
    line = deepspeed(words, 0)
    assert [one.option for one in line.dropped] == [
        "-H hosts", "--master_port 1", "--launcher slurm", "--no_ssh_check", "--no_local_rank",
    ]  # fmt: skip
    assert (line.local_rank, line.program(words)) == ("", ["-m", "pkg.t"])


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("--include a:0@b:2,3 t.py", "equally many on each node"),
        ("--exclude a:0 t.py", "ssh.hosts"),
        ("--autotuning run t.py", "starts many jobs"),
        ("--num_gpu_s 1 t.py", "deepspeed has no option --num_gpu_s"),
    ],
)
def test_a_mistake_names_the_option(text: str, fault: str) -> None:
    with pytest.raises(ValueError) as caught:
        deepspeed(shlex.split(text), 0)
    assert fault in str(caught.value)
