"""Files that ranks write on the disks of their nodes: no verb deletes them, and what orch says of them is true."""

from __future__ import annotations

import json

from tests.support.cluster import saves_in_out
from tests.support.cluster.desk import Desk
from tests.support.cluster.slurm import SlurmBox

OWN = "/tmp/own"
"""A folder of each node's own, that login does not see."""

SCRIPT = saves_in_out.SAVES_IN_OUT.replace('"out', f'"{OWN}').replace("10**9 if attempt == 1 else 200", "60")
SCRIPT += f'Path(f"{OWN}/rank_{{rank}}.csv").write_text("of a node")\n'


def test_files_on_node_disks_stay_and_are_named(desk: Desk, slurm: SlurmBox) -> None:
    job = desk.submit({**saves_in_out.FILES, "train.py": SCRIPT}, procs_per_node=1)
    status = job.wait()
    assert status["state"] == "SUCCEEDED", job.story()
    listed = json.loads(desk.orch("checkpoints", job.id, "--json").stdout)
    assert [(one["state"], one["step"], one["resume"]) for one in listed] == [
        ("whole", 20, False),
        ("whole", 40, True),
    ]
    assert listed[-1]["path"] == status["checkpoint"]["path"] == f"{OWN}/net_0040.pth"
    told = desk.orch("collect", job.id).stdout
    assert f"not copied: 2 checkpoints outside of its folder: {OWN}/net_0040.pth and others" in told
    for words in ([], ["--discard"], ["--older-than", "0s", "--yes"]):
        desk.orch("clean", job.id, *words)
    left = [slurm.host(node).run(["ls", OWN]).stdout.split() for node in ("node1", "node2")]
    assert left == [["metrics.json", "net_0020.pth", "net_0040.pth", "rank_0.csv"], ["rank_1.csv"]]


def test_resume_uses_own_nodes_files_and_never_others(desk: Desk, slurm: SlurmBox) -> None:
    """A resumed job starts from what its node has, and never from what another had."""
    job = desk.submit(
        {**saves_in_out.FILES, "train.py": SCRIPT},
        nodes=1,
        procs_per_node=2,
        slurm={"extra": ["--nodelist=node3"]},
    )
    assert job.wait()["state"] == "SUCCEEDED", job.story()
    desk.orch("resume", job.id, "--set", "slurm.extra=[--nodelist=node4]")
    job.until(lambda seen: seen["attempt"] == 2 and seen["state"] == "SUCCEEDED", "the end of attempt 2")
    attempt = job.why()[1]
    assert (attempt["began_from"], attempt["first_step"], attempt["last_step"]) == (None, 1, 60), attempt
    assert "begins from None" in job.log(0, 2)
