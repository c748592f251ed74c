"""Is the outline of a job the text that was looked at?"""

from __future__ import annotations

import dataclasses
from pathlib import Path

from orchestrator.client.outline.outline import NodeOutline, Outline
from orchestrator.core.settings.rank_env import NodePlan
from orchestrator.core.settings.rank_settings import EnvLayers, SetBy, Setting, decide_settings
from orchestrator.views import cells
from orchestrator.views import outline as outline_view
from tests.support import golden
from tests.unit.core.settings.test_rank_settings import DGX, EIGHT, FOUR_CPU, LAPTOP, node, with_plan

EVIDENCE = Path("{job_dir}/evidence/attempt-{attempt}")


def _node(name: str, first: int, at: NodePlan, given: EnvLayers) -> NodeOutline:
    ranks, decided = tuple(range(first, first + 8)), decide_settings(DGX, at, given, None, EVIDENCE)
    return NodeOutline(name, name, ranks, "8 GPUs", facts=DGX, settings=decided)


def _outline() -> Outline:
    origins = {"NCCL_DEBUG": "job.yaml:12: env.NCCL_DEBUG"}
    at = with_plan(EIGHT, id="{job_id}", unbuffered=True, origins=origins)
    added = {"NCCL_DEBUG": "INFO"}
    given = EnvLayers({}, added, added)
    other = EnvLayers({"OMP_NUM_THREADS": "4"}, added, {"OMP_NUM_THREADS": "4", **added})
    fault = NodeOutline("gpu3", "gpu3", (), "", "connect: no answer within 15 s", "check the host, or try again")
    return Outline(
        "gpt", "ssh", "16 ranks on 2 nodes, out of 3 hosts, on 16 GPUs", "python3 train.py --lr 0.1", 16, 256,
        "256 = 16 per device × 1 accumulated × 16 ranks",
        (_node("gpu1", 0, at, given), _node("gpu2", 8, at, other), fault),
        (Setting("FOO", "bar", SetBy.YOU, "job.yaml:13: env.FOO"), Setting("TOKEN", "(secret)", SetBy.YOU, "job.yaml:14: secrets")),
        0, ("the setup lines run on each node",), 0,
    )  # fmt: skip


def test_ssh_outline_matches_golden_file() -> None:
    """The outline over SSH is the one that was reviewed."""
    golden.check("plan-ssh.txt", cells.plain_text(outline_view.outline(_outline().as_json())))


def test_slurm_outline_names_nodes_once() -> None:
    at = with_plan(node("slurm", 8, 8), id="{job_id}")
    decided = decide_settings(None, at, EnvLayers({}, {}, {}), None, EVIDENCE)
    nodes = tuple(
        NodeOutline(f"node {index}", "", tuple(range(8 * index, 8 * index + 8)), "8 GPUs", settings=decided)
        for index in range(64)
    )
    whole = dataclasses.replace(_outline(), backend="slurm", nodes=nodes, inherited=30, batch="", variables=())
    golden.check("plan-slurm.txt", cells.plain_text(outline_view.outline(whole.as_json())))


def test_local_outline_prints_environment_once() -> None:
    decided = decide_settings(LAPTOP, FOUR_CPU, EnvLayers({}, {}, {}), "lo", EVIDENCE)
    nodes = tuple(
        NodeOutline(f"node-{index}", "laptop", (index,), "CPU", facts=LAPTOP, settings=decided) for index in range(2)
    )
    whole = dataclasses.replace(_outline(), backend="local", nodes=nodes, notes=())
    text = cells.plain_text(outline_view.outline(whole.as_json()))
    assert text.count("environment of the ranks") == 1
    assert "node-1  laptop  1      CPU      4 cores, wlan0\n" in text


def test_launch_shows_only_what_is_run() -> None:
    """A line that calls a launcher shows only the command that is run."""
    one = dataclasses.replace(_outline(), command="bash dist_train.sh cfg.py 8", launches=True)
    assert "  runs   what bash dist_train.sh cfg.py 8 calls, once on each node\n" in cells.plain_text(
        outline_view.outline(one.as_json())
    )
