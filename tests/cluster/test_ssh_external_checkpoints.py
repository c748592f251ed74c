"""A script that saves outside of the job's folder, on a disk of its host's own that is lost with it."""

from __future__ import annotations

import json

from tests.support.cluster.box import Box
from tests.support.cluster.desk import Desk
from tests.support.cluster.saves_in_out import FILES, SAVES_IN_OUT

LOST = "/tmp/lost"
"""A folder of each host's own."""

SAVES_ON_ITS_HOST = (
    SAVES_IN_OUT.replace('Path("out")', f'Path("{LOST}")')
    .replace('f"out/', f'f"{LOST}/')
    .replace('Path("out/metrics.json").write_text(str(step))', "pass")
    .replace("meet()\n", """meet()
if rank == 0:
    peers[0].sendall(b"%6d" % start)
else:
    start = int(peers[0].recv(6))
""")
)  # fmt: skip
"""Rank 0 reads, and tells the other where they begin."""


def test_lost_hosts_local_checkpoints_are_never_resumed(desk: Desk, box: Box) -> None:
    """Checkpoints on a lost host's own disk are reported as lost, and no attempt resumes from them."""
    job = desk.submit(
        {**FILES, "train.py": SAVES_ON_ITS_HOST}, procs_per_node=1, spares=1, ssh={"hosts": "node[1-3]"}, restart={"max": 1}
    )  # fmt: skip
    job.until(lambda seen: (seen.get("checkpoint") or {"step": 0})["step"] >= 60, "step 60 saved")
    box.power_off("node1")
    status = job.wait()
    assert status["state"] == "SUCCEEDED", job.story()
    first, *_, last = job.why()
    assert (first["verdict"]["kind"], last["began_from"], last["first_step"]) == ("node_lost", None, 1)
    assert "begins from None" in job.log(0, last["attempt"])
    listed = json.loads(desk.orch("checkpoints", job.id, "--json").stdout)
    lost = [one for one in listed if one["attempt"] == 1]
    assert {(one["state"], one["why"]) for one in lost} == {("distrusted", "it is on node1, and node3 cannot see it")}
    assert [one["places"][-1]["host"] for one in listed if one["attempt"] > 1] == ["node3"] * 9
    assert (status["step"], status["checkpoint"]["step"]) == (200, 180)
    done = desk.orch("collect", job.id, check=False)
    assert done.returncode == 3 and "node1: connect: " in done.stderr  # it may have files where its ranks started
    assert "outside of its folder: node3:/tmp/lost/net_0180.pth and others" in done.stdout
