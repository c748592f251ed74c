"""Are paths those of each host, and is what scripts save where they start seen there, and brought to other hosts?"""

from __future__ import annotations

from tests.support.cluster.desk import Desk
from tests.support.cluster.own_resume import FILES


def test_each_host_has_its_own_working_folder_paths(desk: Desk) -> None:
    job = desk.submit(
        FILES, entrypoint="train.py --dies {checkpoint_dir} $ORCH_CHECKPOINT_DIR", nodes=2, procs_per_node=1,
        ssh={"hosts": "node[1-2]"},
    )  # fmt: skip
    status = job.wait()
    assert status["state"] == "SUCCEEDED", job.story()
    for rank in (0, 1):
        folder = job.on_host(f"node{rank + 1}").root.name
        assert f"/.orch/jobs/{folder}/checkpoints'" in job.log(rank)
        assert "begins at 20 with" in job.log(rank, 2)
    assert job.why()[1]["began_from"]["path"].endswith("snapshot.pt")


def test_named_working_folder_file_resumes_on_new_host(desk: Desk) -> None:
    job = desk.submit(
        FILES, entrypoint="train.py --one", nodes=2, procs_per_node=1, ssh={"hosts": "node[1-2]"}, env={"STEPS": "200"},
        checkpoint={"path": "{job_dir}/code/snapshot.pt", "resume_args": "--from={path}"},
    )  # fmt: skip
    job.until(lambda seen: (seen["checkpoint"] or {"step": 0})["step"] >= 19, "the second checkpoint at home")
    assert not (job.on_host("node2").code / "snapshot.pt").exists()
    desk.orch("restart", job.id)
    status = job.wait()
    assert (status["state"], status["attempt"]) == ("SUCCEEDED", 2), job.story()
    for rank in (0, 1):
        at = job.log(rank, 2).partition("begins at ")[2].partition(" ")[0]
        assert int(at) >= 20 and int(at) % 10 == 0, job.log(rank, 2)
        assert f"begins at {at} with ['--one', '--from=" in job.log(0, 2), "all begin at the same step"
        assert "/code/snapshot.pt']" in job.log(rank, 2)
