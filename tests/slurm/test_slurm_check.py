"""Does `orch check` look at the nodes of the allocation that it runs in? On a real Slurm."""

from __future__ import annotations

import json
import sys
from typing import Any

from tests.support.cluster.desk import Desk
from tests.support.cluster.slurm import SlurmBox
from tests.support.cluster.small_torch import install

HOME = "/home/trainer/desk/home"
SCRIPT = {"train.py": "import json\n"}


def check(slurm: SlurmBox, path: str, *salloc: str) -> list[dict[str, Any]]:
    """Check a job on login, in an allocation where one is named, and return the findings."""
    argv = [*salloc, sys.executable, "-m", "orchestrator.cli", "check", path, "--json"]
    done = slurm.login.run(argv, user="trainer", env={"ORCH_HOME": HOME}, check=False, limit_s=120)
    assert done.stdout, done.stderr
    found: list[dict[str, Any]] = json.loads(done.stdout)
    for one in found:
        print(one["severity"], one["what"], one["nodes"], one["found"], "|", one["fix"])
    return found


def test_the_nodes_of_an_allocation_are_checked_together_and_a_cut_between_two_is_named(
    slurm: SlurmBox, desk: Desk
) -> None:
    path = desk.write(SCRIPT, nodes=2, env=install([slurm.login]))
    before = check(slurm, path)
    (note,) = [one for one in before if one["what"] == "nodes"]
    assert "`salloc --nodes=2 orch check job.yaml` looks at some" in note["found"]
    found = check(slurm, path, "salloc", "--nodes=3", "--nodelist=node1,node2,node3")
    assert [one["nodes"] for one in found if one["what"] == "host"] == [["node1"], ["node2"], ["node3"]]
    texts = [one["found"] for one in found]
    assert "3 of 3 hosts can be used, 2 wanted" in texts
    assert any(text.startswith("3 pairs of nodes reach each other") for text in texts), texts
    assert any(text.startswith("a sum over 3 nodes by gloo is right") for text in texts), texts
    assert not [one for one in found if one["severity"] in ("error", "warning")]
    slurm.cut_between("node1", "node3")
    cut = check(slurm, path, "salloc", "--nodes=3", "--nodelist=node1,node2,node3")
    slurm.heal()
    (wrong,) = [one for one in cut if one["severity"] == "error" and one["what"] == "network"]
    assert wrong["nodes"] == ["node1", "node3"]
