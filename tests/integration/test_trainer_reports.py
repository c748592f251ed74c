"""Do the numbers that real ranks report and print reach status and series?"""

from __future__ import annotations

from orchestrator.core.jobdir import series
from tests.support.local import FAKE_TORCH, STEPPER, Desk

TALKS = (
    "import urllib.request\n"
    + STEPPER
    + """
import json


def report(step):
    if step in (20, 60):
        token = open(os.environ["KUBEFLOW_TRAINER_SERVER_TOKEN"]).read()
        body = {"trainerStatus": {"progressPercentage": step * 100 // 60, "metrics": [{"name": "total_steps", "value": "60"}]}}
        urllib.request.urlopen(urllib.request.Request(
            os.environ["KUBEFLOW_TRAINER_SERVER_URL"], json.dumps(body).encode(), {"Authorization": f"Bearer {token}"}))
    print(f"step {step} loss {1 / step:.3f}" if step < 60 else "{'loss': nan}", flush=True)


run(60, at_step=report)
"""
)


def test_numbers_of_real_job_reach_status_and_series(desk: Desk) -> None:
    job = desk.submit({**FAKE_TORCH, "train.py": TALKS}, nodes=2, procs_per_node=1, entrypoint="train.py")
    status = job.wait()
    assert (status["state"], status["loss"], status["total_steps"], status["percent"]) == (
        "SUCCEEDED",
        "nan",
        60,
        100.0,
    )
    samples = list(series.read(job.job.folder.series))
    assert samples
    assert [rank.rank for rank in samples[0].ranks] == [0, 1]
