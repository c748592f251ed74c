"""On nodes that share the job folder, is what scripts save where they start seen once, and gone on from when named?"""

from __future__ import annotations

from tests.support.cluster.desk import Desk
from tests.support.cluster.own_resume import FILES


def test_all_nodes_share_one_working_folder(desk: Desk) -> None:
    job = desk.submit(FILES, entrypoint="train.py --dies {checkpoint_dir}", nodes=2, procs_per_node=1)
    status = job.wait()
    assert status["state"] == "SUCCEEDED", job.story()
    assert "/checkpoints'" in job.log()
    assert "begins at 20 with" in job.log(1, 2)
    assert job.why()[1]["began_from"]["path"].endswith("snapshot.pt")


def test_named_file_of_working_folder_is_resumed(desk: Desk) -> None:
    job = desk.submit(
        FILES, entrypoint="train.py --dies", nodes=2, procs_per_node=1, env={"EACH_S": "0.5"},
        checkpoint={"path": "{job_dir}/code/snapshot.pt", "resume_args": "--from={path}"},
    )  # fmt: skip
    assert job.wait()["state"] == "SUCCEEDED", job.story()
    assert job.why()[1]["resumed_from"].endswith("/code/snapshot.pt")
    assert "/code/snapshot.pt']" in job.log(0, 2)
