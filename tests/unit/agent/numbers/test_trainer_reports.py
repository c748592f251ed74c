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


def test_a_report_tells_share_time_loss_and_total() -> None:
    assert parse_report({"trainerStatus": STATUS}) == Training(1.25, 5e-5, 7.0, 600.0, 1000)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "status", [{}, {"metrics": 3}, {"metrics": [1, {"name": []}, {"name": "loss", "value": "much"}]},
               {"progressPercentage": -1, "estimatedRemainingSeconds": "nan"}, {"progressPercentage": True}],
)  # fmt: skip
def test_what_a_report_lacks_is_not_known(status: Any) -> None:
    assert parse_report({"trainerStatus": status}) == Training()


def test_reports_of_a_rank_add_up_and_end_with_the_attempt(tmp_path: Path) -> None:
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


def test_only_this_user_can_report_and_only_from_this_machine(tmp_path: Path) -> None:
    _, env = _opened(tmp_path)
    assert stat.S_IMODE(os.stat(env[TRAINER_TOKEN]).st_mode) == 0o600  # noqa: PTH116
    assert env[TRAINER_URL].startswith("http://127.0.0.1:")
    assert _post(env, _body(STATUS), token="") == 401
    assert _post(env, _body(STATUS), token="\xe4") == 401


@pytest.mark.slow
def test_what_is_no_report_is_refused_and_the_next_one_is_taken(tmp_path: Path) -> None:
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


def test_reports_that_come_too_often_are_refused(tmp_path: Path) -> None:
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
def test_the_variables_are_set_where_nothing_else_has_them_and_no_proxy_would_be_asked(
    given: dict[str, str], is_set: bool, tmp_path: Path
) -> None:
    assert bool(TrainerReports().settings(tmp_path, given)) is is_set


def test_without_a_place_for_the_token_nothing_is_set(tmp_path: Path) -> None:
    assert TrainerReports().settings(tmp_path / "gone", {}) == ()


@pytest.mark.slow
def test_the_server_is_loaded_by_the_first_report_alone() -> None:
    code = "import orchestrator.agent.process.agent, sys; sys.exit('http.server' in sys.modules)"
    assert os.spawnl(os.P_WAIT, sys.executable, sys.executable, "-c", code) == 0
