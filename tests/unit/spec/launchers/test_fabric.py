"""Lightning's launcher: its options reach the script's Fabric object as variables."""

from __future__ import annotations

import shlex

import pytest

from orchestrator.spec.launchers import fabric


@pytest.mark.parametrize(
    ("text", "settings"),
    [
        ("t.py", {"ranks_per_node": "1"}),
        ("--devices 2 t.py", {"ranks_per_node": "2"}),
        ("--devices=0,3 t.py", {"ranks_per_node": "2"}),
        ("--devices auto t.py", {"ranks_per_node": "auto"}),
        ("--accelerator cpu --devices 2 t.py", {"ranks_per_node": "2", "device": "cpu", "env.LT_ACCELERATOR": "cpu"}),
        ("--num-nodes 2 --strategy fsdp --precision bf16-mixed t.py",
         {"nodes": "2", "ranks_per_node": "1", "env.LT_STRATEGY": "fsdp", "env.LT_PRECISION": "bf16-mixed"}),
    ],
)  # fmt: skip
def test_options_are_settings_and_variables(text: str, settings: dict[str, object]) -> None:
    found = {one.key: one.value for one in fabric.fabric(shlex.split(text), 0).settings}
    always = {"env.LT_CLI_USED": "1", "env.LT_DEVICES": "{ranks_per_node}", "env.LT_NUM_NODES": "{nodes}"}
    assert found == {**always, **settings}


def test_options_behind_the_script_are_the_launcher_s_too() -> None:
    words = shlex.split("t.py --lr 0.1 --devices=2 --main-port 1 last")
    line = fabric.fabric(words, 0)
    assert line.program(words) == ["t.py", "--lr", "0.1", "last"]
    assert [one.option for one in line.dropped] == ["--main-port 1"]


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("--device 2 t.py", "fabric run has no option --device; did you mean --devices?"),
        ("--accelerator tpu t.py", "NVIDIA GPUs and CPU ranks only"),
        ("--devices x t.py", "must be a whole number"),
    ],
)
def test_a_mistake_names_the_option(text: str, fault: str) -> None:
    with pytest.raises(ValueError) as caught:
        fabric.fabric(shlex.split(text), 0)
    assert fault in str(caught.value)


@pytest.mark.slow
def test_every_option_of_the_installed_release_is_known() -> None:
    cli = pytest.importorskip("lightning.fabric.cli")
    for parameter in cli._main.commands["run"].params:
        for name in parameter.opts if parameter.param_type_name == "option" else ():
            assert fabric._OPTIONS.find(name), name
