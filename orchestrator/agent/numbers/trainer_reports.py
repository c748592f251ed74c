"""Progress that trainers report, as Kubeflow's Trainer takes it (KEP-2779): the Trainer of Transformers from 5.24 on, and any
script with Kubeflow's SDK, send share, remaining time and metrics to the address in `KUBEFLOW_TRAINER_SERVER_URL`.

Rules:
1. orch sets the variables only where nothing else sets them, and where no proxy would be asked for this machine.
2. The endpoint is on 127.0.0.1 and takes nothing without the token, which a file of mode 0600 holds.
3. A job that reports nothing costs a socket and a thread that sleeps: `http.server` is loaded by the first report.
"""

from __future__ import annotations

import contextlib
import math
import secrets
import select
import socket
import threading
from collections.abc import Mapping
from pathlib import Path

from orchestrator.core import codec
from orchestrator.core.jobdir.durable import replace_text
from orchestrator.core.settings.rank_env import TRAINER_TOKEN, TRAINER_URL
from orchestrator.core.settings.rank_settings import RANK_MARK, SetBy, Setting
from orchestrator.core.status_types import NOT_REPORTED, ReportedNumber, Training

LOOPBACK = "127.0.0.1"
TOKEN_FILE = "trainer-token"

REASON = "trainers report their progress there (Kubeflow's protocol)"

_PROXIES = ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY")


class TrainerReports:
    """The endpoint of one node and what was reported there, by rank."""

    def __init__(self) -> None:
        self._latest: dict[int, Training] = {}
        self._nonfinite: dict[int, int] = {}
        self._settings: tuple[Setting, ...] = ()

    def settings(self, folder: Path, given: Mapping[str, str]) -> tuple[Setting, ...]:
        """Forget earlier attempts, and return the settings that name the endpoint, which is opened at the first call; `folder`
        is the node's, `given` what else is set. None where the user has another endpoint, or this one cannot be had."""
        self._latest, self._nonfinite = {}, {}
        if TRAINER_URL in given or _uses_proxy(given):
            return ()
        if not self._settings:
            with contextlib.suppress(OSError):
                self._settings = self._open(folder)
        return self._settings

    def latest(self, rank: int) -> Training:
        """Return what a rank has reported in this attempt."""
        return self._latest.get(rank, NOT_REPORTED)

    def nonfinite_losses(self, rank: int) -> int:
        """Return how many losses in a row, up to the last, a rank has reported that are not finite."""
        return self._nonfinite.get(rank, 0)

    def accept(self, rank: int, body: bytes) -> None:
        """Take a report of a rank. Raises ValueError when it cannot be read."""
        report = parse_report(codec.loads_plain(body))
        if report.loss is not None:
            self._nonfinite[rank] = 0 if math.isfinite(report.loss) else self.nonfinite_losses(rank) + 1
        self._latest[rank] = report.fill_from(self.latest(rank))

    def _open(self, folder: Path) -> tuple[Setting, ...]:
        token, path = secrets.token_hex(32), folder / TOKEN_FILE
        replace_text(path, token, mode=0o600, durable=False)
        listener = socket.create_server((LOOPBACK, 0), backlog=64)
        threading.Thread(target=self._serve, args=(listener, token), name="reports", daemon=True).start()
        url = f"http://{LOOPBACK}:{listener.getsockname()[1]}/ranks/{RANK_MARK}"
        return (
            Setting(TRAINER_URL, url, SetBy.ORCH, REASON),
            Setting(TRAINER_TOKEN, str(path), SetBy.ORCH, REASON),
        )

    def _serve(self, listener: socket.socket, token: str) -> None:
        select.select([listener], [], [])
        from orchestrator.agent.numbers import trainer_server

        trainer_server.serve(listener, token, self.accept)


def parse_report(data: codec.Json) -> Training:
    """Return what a report says. Raises ValueError when it is none."""
    status = data.get("trainerStatus")
    if not isinstance(status, dict):
        raise ValueError("no trainerStatus")
    listed = status.get("metrics")
    metrics = {
        metric["name"]: metric.get("value")
        for metric in (listed if isinstance(listed, list) else ())
        if isinstance(metric, dict) and isinstance(metric.get("name"), str)
    }
    percent, total = _number(status.get("progressPercentage")), _number(metrics.get("total_steps"))
    eta_s = _number(status.get("estimatedRemainingSeconds"))
    return Training(
        loss=_number(metrics.get("loss", metrics.get("train_loss"))),
        learning_rate=_number(metrics.get("learning_rate")),
        percent=float(percent) if percent is not None and 0 <= percent <= 100 else None,
        eta_s=float(eta_s) if eta_s is not None and 0 <= eta_s < 1e9 else None,
        total_steps=int(total) if total is not None and 1 <= total < 1e15 else None,
    )


def _number(value: object) -> ReportedNumber | None:
    """Return a number that a report has, as one or as a text."""
    if isinstance(value, (str, int, float)) and not isinstance(value, bool):
        with contextlib.suppress(ValueError, OverflowError):
            return ReportedNumber(value)
    return None


def _uses_proxy(given: Mapping[str, str]) -> bool:
    """Return whether a rank would ask a proxy for the endpoint, which is no business of others."""
    spared = f"{given.get('no_proxy', '')},{given.get('NO_PROXY', '')}".split(",")
    return any(map(given.get, _PROXIES)) and not {LOOPBACK, "*"} & {name.strip() for name in spared}
