"""Does `orch plan` say what a submit would do, refuse what a submit refuses, and touch nothing?"""

from __future__ import annotations

from pathlib import Path

import pytest

from orchestrator.client.outline.outline import Outline, make_outline
from orchestrator.core.errors import UserError
from orchestrator.core.settings.rank_settings import SetBy, Setting
from orchestrator.spec.load import load

SPEC = """name: gpt
procs_per_node: 2
entrypoint: train.py --lr 0.1
env:
  NCCL_IB_TIMEOUT: 22
  FOO: bar
"""


def _outline(folder: Path, *overrides: str, backend: str | None = None, **environ: str) -> Outline:
    (folder / "train.py").write_text("")
    (folder / "job.yaml").write_text(SPEC)
    home = folder / "home"
    found = make_outline(
        load(folder / "job.yaml", overrides=overrides, backend=backend),
        {"PATH": "/usr/bin:/bin", "ORCH_HOME": str(home), **environ},
    )
    assert not home.exists(), "a plan touches nothing"
    return found


def _settings(found: Outline, node: int = 0) -> dict[str, Setting]:
    return {one.name: one for one in found.nodes[node].settings}


def test_nodes_ranks_and_user_variables_have_line_numbers(tmp_path: Path) -> None:
    """Nodes, ranks and the user's variables are named with their lines."""
    found = _outline(tmp_path, "nodes=2", "batch.per_device=4", GLOO_SOCKET_IFNAME="eth7", SHELL="/bin/sh")
    assert [(node.name, node.ranks, node.devices) for node in found.nodes] == [
        ("node-0", (0, 1), "CPU"), ("node-1", (2, 3), "CPU"),
    ]  # fmt: skip
    mine = _settings(found)["NCCL_IB_TIMEOUT"]
    assert (mine.value, mine.set_by) == ("22", SetBy.YOU)
    assert mine.reason.endswith("job.yaml:5: env.NCCL_IB_TIMEOUT")
    assert _settings(found)["GLOO_SOCKET_IFNAME"].set_by is SetBy.SHELL
    (foo,) = found.variables
    assert (foo.name, foo.value) == ("FOO", "bar") and foo.reason.endswith("job.yaml:6: env.FOO")
    assert (found.batch_size, found.world_size, found.exit_code) == (16, 4, 0)
    assert found.inherited == 2, "PATH and SHELL; ORCH_HOME is not passed on"


def test_override_is_named_as_source_of_variable(tmp_path: Path) -> None:
    found = _settings(_outline(tmp_path, "env.NCCL_IB_TIMEOUT=9"))["NCCL_IB_TIMEOUT"]
    assert (found.value, found.reason) == ("9", "--set env.NCCL_IB_TIMEOUT=9")


def test_facts_only_known_to_allocation_stay_open(tmp_path: Path) -> None:
    """Facts that only Slurm's allocation can give are left open."""
    found = _outline(tmp_path, "nodes=3", backend="slurm", SLURM_CPUS_ON_NODE="64", OMP_PLACES="cores")
    assert [(node.host, node.facts) for node in found.nodes] == [("", None)] * 3
    settings = _settings(found, 2)
    assert settings["OMP_NUM_THREADS"].set_by is settings["NCCL_SOCKET_IFNAME"].set_by is SetBy.LATER
    assert settings["OMP_PLACES"].set_by is SetBy.SHELL
    assert "known only in the allocation" in found.notes[0]
    assert _settings(_outline(tmp_path, backend="slurm"))["NCCL_SOCKET_IFNAME"].value == "lo"


def test_secret_stays_hidden(tmp_path: Path) -> None:
    found = _outline(tmp_path, "secrets=[TOKEN_OF_MINE, NCCL_SECRET]", TOKEN_OF_MINE="s3cret", NCCL_SECRET="s3cret")
    assert "s3cret" not in str(found.as_json())
    assert [one.name for one in found.variables] == ["FOO", "TOKEN_OF_MINE"]
    assert _settings(found)["NCCL_SECRET"].value == "(secret)"


def test_outline_refuses_what_submit_refuses(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="2 GPUs wanted"):
        _outline(tmp_path, "gpus_per_node=2", "procs_per_node=null")
    with pytest.raises(UserError, match="no interface eth77"):
        _outline(tmp_path, "rendezvous.interface=eth77")


def test_checkpoint_folder_in_memory_is_shown(tmp_path: Path) -> None:
    found = _outline(tmp_path, "checkpoint.keep=3", "checkpoint.memory=64M", f"checkpoint.memory_dir={tmp_path}")
    (_, folder) = found.variables
    assert (folder.name, folder.value) == ("ORCH_CHECKPOINT_DIR", f"{tmp_path}/orch-{{job_id}}-{{node}}/checkpoints")
    assert folder.reason == "--set checkpoint.memory=64M"
