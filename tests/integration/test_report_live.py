"""Do the live pages answer only to who has their address, and do their buttons do what they say?"""

from __future__ import annotations

import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator

import pytest

from tests.support.local import FAKE_TORCH, STEPPER, Desk, wait_until

ANSWER_S_MAX = 30.0


@pytest.fixture
def address(desk: Desk) -> Iterator[str]:
    """The address of the live pages of the desk's jobs."""
    argv = [sys.executable, "-m", "orchestrator.cli", "report", "--serve"]
    with subprocess.Popen(argv, env=desk.environ, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield process.stdout.readline().split()[-1]
        finally:
            process.terminate()


def _code(url: str, method: str = "GET", **headers: str) -> int:
    request = urllib.request.Request(url, method=method, headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=ANSWER_S_MAX) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as err:
        return err.code


def test_report_button_cancels_job_but_strangers_cannot(desk: Desk, address: str) -> None:
    job = desk.submit({**FAKE_TORCH, "train.py": STEPPER + "run(100000)"}, entrypoint="train.py")
    wait_until(lambda: job.seen()["step"], "a step")
    origin = address.rsplit("/", 2)[0]
    button = f"{address}jobs/{job.job.id}/cancel"
    assert _code(address) == _code(f"{address}jobs/{job.job.id}") == _code(button) == 200  # it asks once more
    assert _code(f"{origin}/") == _code(f"{origin}/wrong/jobs/{job.job.id}/cancel", "POST", Origin=origin) == 403
    assert _code(button, "POST", Origin="http://example.org") == _code(button, "POST") == 403
    assert _code(address, Host="example.org") == 403
    assert job.seen()["state"] == "RUNNING"
    assert _code(button, "POST", Origin=origin) == 200
    assert job.wait()["state"] == "CANCELLED"
