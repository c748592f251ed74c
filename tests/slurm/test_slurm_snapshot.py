"""In Slurm's queue, too, what is edited after the submit reaches no attempt."""

from __future__ import annotations

from tests.support.cluster.desk import Desk

OWN_CODE = """
import os, sys
from pathlib import Path

work = Path(os.environ["ORCH_SUBMITTED_FROM"])
sys.path.insert(0, str(work / "lib"))
import inserted
print("inserted", inserted.VERSION, flush=True)
if os.environ["ORCH_ATTEMPT"] == "1":
    (work / "lib" / "inserted.py").write_text("VERSION = 'two'")
    os._exit(9)
"""


def test_edits_after_submit_reach_no_attempt(desk: Desk) -> None:
    files = {"train.py": OWN_CODE, "lib/inserted.py": "VERSION = 'one'\n"}
    job = desk.submit(files, entrypoint="train.py", nodes=1, procs_per_node=1, restart={"max": 1})
    assert job.wait()["state"] == "SUCCEEDED", job.story()
    assert [job.log(0, attempt).strip() for attempt in (1, 2)] == ["inserted one"] * 2
