"""Does the callback of Transformers itself get through to the endpoint, and do real ranks' numbers reach status and series?"""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from orchestrator.agent.numbers.trainer_reports import TrainerReports
from orchestrator.core.jobdir import series
from orchestrator.core.settings.rank_settings import to_set
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


def test_numbers_of_a_real_job_reach_its_status_and_its_series(desk: Desk) -> None:
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


def test_the_trainer_s_own_callback_reports_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed")
    integrations = pytest.importorskip("transformers.integrations.integration_utils")
    if not hasattr(integrations, "KubeflowCallback"):
        pytest.skip("this transformers reports to nobody")
    reports = TrainerReports()
    for name, value in to_set(reports.settings(tmp_path, {}), 5).items():
        monkeypatch.setenv(name, value)
    callback, state = integrations.KubeflowCallback(), importlib.import_module("transformers").TrainerState()
    state.max_steps, state.global_step, state.is_world_process_zero = 200, 50, True
    callback.on_train_begin(None, state, None)
    callback.on_log(None, state, None, logs={"loss": 0.5, "learning_rate": 1e-4, "name": "x"})
    callback._last_update_time = 0.0
    callback.on_step_end(None, state, None)
    told = reports.of_rank(5)
    assert (told.loss, told.learning_rate, told.percent, told.total_steps) == (0.5, 1e-4, 25.0, 200)
    assert told.eta_s is not None
    callback.on_train_end(None, state, None)
    assert reports.of_rank(5).percent == 100.0
