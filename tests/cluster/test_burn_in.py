"""Does a burn-in of hosts name the one that computes wrongly, with real sshd and real torch, and no innocent one?

The hosts share the processors of this machine, so their speeds are measured, and not judged.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.cluster.box import Box
from tests.support.cluster.desk import FAKE_TORCH, STEPPER, Desk
from tests.support.cluster.host import wait_for
from tests.support.cluster.small_torch import EXTRA, install

SICK = "/home/trainer/sick"
WRONG = """
import torch
right = torch.matmul

def matmul(left, right_one, out=None):
    product = right(left, right_one, out=out)
    if product.dtype == torch.{kind}:
        product[3, 5] = product[3, 5] * 2 + 64
    return product

torch.matmul = matmul
"""


@pytest.fixture
def sick(desk: Desk, box: Box) -> Iterator[Desk]:
    """Give a desk with hosts of which node2 computes wrongly in one type, and node3 in another one."""
    for name, kind in (("node2", "float32"), ("node3", "bfloat16")):
        box.host(name).write(f"{SICK}/sitecustomize.py", WRONG.format(kind=kind), user="trainer")
    yield desk
    for name in ("node2", "node3"):
        box.host(name).path(f"{SICK}/sitecustomize.py").unlink()


@pytest.mark.slow
def test_burn_in_names_wrong_hosts_and_nodes_remembers_them(sick: Desk) -> None:
    spec = sick.write({"train.py": "import torch\n"}, nodes=2, ssh={"hosts": "node[1-5]"}, env={"PYTHONPATH": SICK})
    done = sick.orch("check", spec, "--burn-in", "10s", "--json", check=False)
    assert done.stdout, done.stderr
    found = json.loads(done.stdout)
    for one in found:
        print(one["severity"], one["what"], one["nodes"], one["found"], "|", one["fix"])
    wait_for(lambda: not sick.at_work(), "the end of what a check has started")
    assert [(one["nodes"], one["found"]) for one in found if one["severity"] == "error"] == [
        (["node2"], "node2: a float32 product is not the exact one: its results cannot be trusted"),
        (["node3"], "node3: its bfloat16 product of the same matrices has another checksum than the other 3: its results cannot be trusted"),
    ]  # fmt: skip
    assert done.returncode == 0, "three hosts are enough"
    assert not [one for one in found if one["severity"] == "warning"], "other processes use the processors here"
    burned = [one for one in found if one["what"] == "burn-in" and one["severity"] == "ok"]
    assert [one["nodes"][0] for one in burned if "float32" in one["figures"]] == [f"node{at}" for at in range(1, 6)]
    pair, ring = (one for one in burned if "all-reduce" in one["figures"])
    assert ", the slowest of 5 pairs: " in pair["found"] and "all-reduce of all 5 hosts: " in ring["found"]
    assert "burn-in: 0 of 10 s" in done.stderr

    def hosts() -> dict[str, dict[str, Any]]:
        return {one["host"]: one for one in json.loads(sick.orch("nodes", "--json").stdout)}

    before = hosts()
    sick.orch("check", spec, "--json")  # a check without a burn-in does not clear it
    print(sick.orch("nodes").stdout)
    assert [hosts()[name]["why"].partition(" product")[0] for name in ("node2", "node3")] == ["burn-in: a float32", "burn-in: its bfloat16"]  # fmt: skip
    assert before["node3"]["failed_at"] >= hosts()["node3"]["failed_at"], "the time of its burn-in"
    assert before["node1"]["why"] is None


def test_host_of_a_job_is_left_alone_and_torch_that_cannot_is_no_wrong_host(desk: Desk, box: Box) -> None:
    """A burn-in takes no slots that a job has, and no host is called wrong for a torch that has no matrices."""
    install(box.nodes[:3])
    job = desk.submit({**FAKE_TORCH, "train.py": STEPPER + "run(100_000)\n"}, nodes=1, ssh={"hosts": "node1"})
    job.wait_for_step(1)
    spec = desk.write({"train.py": "import torch\n"}, nodes=2, ssh={"hosts": "node[1-2]"}, env={"PYTHONPATH": EXTRA})
    done = desk.orch("check", spec, "--burn-in", "10s", check=False)
    print(done.stdout)
    lines = [line for line in done.stdout.splitlines() if "burn-in" in line]
    assert done.returncode == 0 and len(lines) == 3
    assert lines[0].startswith("warn  burn-in  node1: no burn-in: 2 slots wanted, 0 of 2 free; ") and job.id in lines[0]
    assert lines[1].startswith("warn  burn-in  node2: no burn-in: AttributeError: module 'torch' has no attribute ")
    assert lines[2] == "note  burn-in  no all-reduce was measured: it takes two hosts that have passed the check"
