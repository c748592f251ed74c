"""Accelerate's options: the size of the job is orch's, what shapes the ranks' environment stays Accelerate's own."""

from __future__ import annotations

import shlex

import pytest

from orchestrator.spec.launchers import accelerate


def said(text: str) -> dict[str, object]:
    return {one.key: one.value for one in accelerate.accelerate(shlex.split(text), 0).settings}


@pytest.mark.parametrize(
    ("text", "settings"),
    [
        ("t.py", {"accelerate.args": [], "ranks_per_node": "auto"}),
        ("--num_processes 8 t.py", {"accelerate.args": [], "ranks": "8"}),
        ("--num-processes=8 --num-machines 2 t.py", {"accelerate.args": [], "ranks": "8", "nodes": "2"}),
        ("--cpu --num_processes 2 t.py", {"accelerate.args": ["--cpu"], "ranks": "2", "device": "cpu"}),
        ("--multi_gpu --gpu_ids 0,3 t.py", {"accelerate.args": ["--multi_gpu"], "ranks_per_node": "2", "device": "gpu"}),
        ("--config_file a.yaml --mixed_precision=bf16 --use_fsdp --fsdp_version 2 t.py",
         {"accelerate.config_file": "a.yaml", "ranks_per_node": "auto",
          "accelerate.args": ["--mixed_precision=bf16", "--use_fsdp", "--fsdp_version", "2"]}),
        ("--max_restarts 2 --num_processes 1 t.py", {"restart.max": "2", "accelerate.args": [], "ranks": "1"}),
    ],
)  # fmt: skip
def test_options_are_settings_or_stay_accelerate_s(text: str, settings: dict[str, object]) -> None:
    assert said(text) == settings


def test_what_is_about_the_rendezvous_is_not_needed() -> None:
    words = shlex.split(
        "--machine_rank 1 --main_process_ip h --main_process_port 1 --rdzv_backend c10d -q -m pkg.t --x"
    )
    line = accelerate.accelerate(words, 0)
    assert len(line.dropped) == 5
    assert line.program(words) == ["-m", "pkg.t", "--x"]


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        (
            "--num_process 2 t.py",
            "accelerate launch has no option --num_process; did you mean --num-processes?",
        ),
        ("--tpu t.py", "orch starts ranks on NVIDIA GPUs and CPUs"),
        ("--mpirun_hostfile h t.py", "without MPI"),
        ("--deepspeed_inclusion_filter a t.py", "name the hosts in ssh.hosts"),
        ("--num_processes 2", "names no script"),
    ],
)
def test_a_mistake_names_the_option(text: str, fault: str) -> None:
    with pytest.raises(ValueError) as caught:
        said(text)
    assert fault in str(caught.value)


def test_a_configuration_counts_machines_processes_and_device() -> None:
    config = {"num_machines": "2", "num_processes": "16", "use_cpu": "false", "distributed_type": "MULTI_GPU"}
    found = {one.key: one.value for one in accelerate.of_config(config, "a.yaml", yields=False)}
    assert found == {"nodes": "2", "ranks": "16", "device": "gpu"}
    assert accelerate.of_config({"num_processes": "-1", "num_machines": []}, "a.yaml", yields=True) == []


@pytest.mark.slow  # it imports accelerate
def test_every_option_of_the_installed_release_is_known() -> None:
    launch = pytest.importorskip("accelerate.commands.launch")
    for action in launch.launch_command_parser()._actions:
        for name in set(action.option_strings) - {"-h", "--help"}:
            option = accelerate._OPTIONS.find(name)
            assert option, name
            assert (option.takes == "nothing") == (action.nargs == 0), name
