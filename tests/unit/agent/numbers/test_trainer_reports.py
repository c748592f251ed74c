"""The endpoint of Kubeflow's protocol: what trainers report comes in, and nothing else does."""

from __future__ import annotations

import http.client
import json
import math
import os
import socket
import stat
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from orchestrator.agent.numbers.trainer_reports import TrainerReports, parse_report
from orchestrator.agent.numbers.trainer_server import BODY_BYTES_MAX, REPORTS_PER_S_MAX
from orchestrator.core.settings.rank_env import TRAINER_TOKEN, TRAINER_URL
from orchestrator.core.settings.rank_settings import added_variables
from orchestrator.core.status_types import Training

STATUS = {
    "lastUpdatedTime": "2026-11-26T10:00:00+00:00",
    "progressPercentage": 7,
    "estimatedRemainingSeconds": 600,
    "metrics": [
        {"name": "loss", "value": "1.25"},
        {"name": "learning_rate", "value": "5e-05"},
        {"name": "total_steps", "value": "1000"},
        {"name": "current_epoch", "value": "0.1"},
    ],
}


def _opened(folder: Path) -> tuple[TrainerReports, dict[str, str]]:
    reports = TrainerReports()
    return reports, added_variables(reports.settings(folder, {}), 3)


def _post(env: Mapping[str, str], body: bytes, token: str | None = None, path: str | None = None) -> int:
    host, _, own = env[TRAINER_URL].removeprefix("http://").partition("/")
    connection = http.client.HTTPConnection(host, timeout=10)
    given = Path(env[TRAINER_TOKEN]).read_text() if token is None else token
    try:
        connection.request("POST", path or f"/{own}", body, {"Authorization": f"Bearer {given}"})
        return connection.getresponse().status
    finally:
        connection.close()


def _body(status: Any) -> bytes:
    return json.dumps({"trainerStatus": status}).encode()


def test_trainer_report_gives_progress_time_loss_and_total() -> None:
    assert parse_report({"trainerStatus": STATUS}) == Training(1.25, 5e-5, 7.0, 600.0, 1000)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "status", [{}, {"metrics": 3}, {"metrics": [1, {"name": []}, {"name": "loss", "value": "much"}]},
               {"progressPercentage": -1, "estimatedRemainingSeconds": "nan"}, {"progressPercentage": True}],
)  # fmt: skip
def test_missing_value_of_report_is_unknown(status: Any) -> None:
    assert parse_report({"trainerStatus": status}) == Training()


def test_reports_of_rank_accumulate_until_attempt_ends(tmp_path: Path) -> None:
    reports, env = _opened(tmp_path)
    assert _post(env, _body(STATUS)) == 200
    assert _post(env, _body({"progressPercentage": 8, "metrics": [{"name": "loss", "value": "nan"}]})) == 200
    told = reports.latest(3)
    assert (told.percent, told.eta_s, told.total_steps) == (8.0, 600.0, 1000)
    assert told.loss is not None
    assert math.isnan(told.loss)
    assert reports.latest(2) == Training()
    assert added_variables(reports.settings(tmp_path, {}), 3) == env
    assert reports.latest(3) == Training()


def test_only_local_user_can_report(tmp_path: Path) -> None:
    """Only this user can report, and only from this machine."""
    _, env = _opened(tmp_path)
    assert stat.S_IMODE(os.stat(env[TRAINER_TOKEN]).st_mode) == 0o600  # noqa: PTH116
    assert env[TRAINER_URL].startswith("http://127.0.0.1:")
    assert _post(env, _body(STATUS), token="") == 401
    assert _post(env, _body(STATUS), token="\xe4") == 401


@pytest.mark.slow
def test_invalid_report_is_refused_and_next_accepted(tmp_path: Path) -> None:
    reports, env = _opened(tmp_path)
    assert _post(env, _body(STATUS), path="/ranks/x") == 404
    assert _post(env, b"x" * (BODY_BYTES_MAX + 1)) == 413
    for body in (b"{", b"[]", b"{}", b"[" * 60_000, b'{"trainerStatus": NaN}', b"\xff"):
        assert _post(env, body) == 400
    host, _, _ = env[TRAINER_URL].removeprefix("http://").partition("/")
    with socket.create_connection(("127.0.0.1", int(host.partition(":")[2]))) as silent:
        silent.sendall(b"POST /ranks/3 HTTP/1.1\r\n")
        began_s = time.monotonic()
        assert _post(env, _body(STATUS)) == 200
        assert time.monotonic() - began_s < 5
    assert reports.latest(3).total_steps == 1000


def test_too_frequent_reports_are_refused(tmp_path: Path) -> None:
    """Reports that come too often are refused."""
    _, env = _opened(tmp_path)
    assert {_post(env, _body(STATUS)) for _ in range(REPORTS_PER_S_MAX)} == {200}
    assert 429 in {_post(env, _body(STATUS)) for _ in range(10 * REPORTS_PER_S_MAX)}


@pytest.mark.parametrize(
    ("given", "is_set"),
    [
        ({}, True),
        ({TRAINER_URL: "https://trainer.example.com"}, False),
        ({"http_proxy": "http://proxy:3128"}, False),
        ({"HTTP_PROXY": "http://proxy:3128", "no_proxy": "localhost, 127.0.0.1"}, True),
        ({"http_proxy": ""}, True),
    ],
)
def test_report_variables_are_set_unless_taken_or_proxied(given: dict[str, str], is_set: bool, tmp_path: Path) -> None:
    """The variables are set where nothing else has them and no proxy would be asked."""
    assert bool(TrainerReports().settings(tmp_path, given)) is is_set


def test_report_variables_need_a_place_for_token(tmp_path: Path) -> None:
    """Without a place for the token nothing is set."""
    assert TrainerReports().settings(tmp_path / "gone", {}) == ()


@pytest.mark.slow
def test_report_server_is_loaded_by_first_report() -> None:
    code = "import orchestrator.agent.process.agent, sys; sys.exit('http.server' in sys.modules)"
    assert os.spawnl(os.P_WAIT, sys.executable, sys.executable, "-c", code) == 0
