"""Notifications of what happens to a job: a command of the user's, and a webhook.

Rules: nothing here can hold up, fail or end the supervisor or the job. Each target has its own thread and a short
queue, each delivery a limit; a failure is one line in supervisor.log. The end of the job goes before what waits, and a
supervisor whose job has ended waits `DELIVERY_S_MAX` for its deliveries; what is not delivered by then is a line, too. A
decision is sent at most once: it is on disk before, so a supervisor that is killed in between leaves it unsent.

A notification is one JSON object:

    {event, time, text, why, attempt, job: {id, name, backend, state, step, dir}, verdict: {...} or null}

`event` is a word of `notify.on`; `text` says all of it in one line, as chat systems want it under that name; `verdict`
is that of `orch why --json`. The values of the job's secrets are masked. A command also gets ORCH_NOTIFY_EVENT,
ORCH_NOTIFY_TEXT, ORCH_JOB_ID, ORCH_JOB_NAME and ORCH_ATTEMPT in its environment.
"""

from __future__ import annotations

import itertools
import json
import os
import queue
import signal
import subprocess
import tempfile
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

from orchestrator.brain.diagnosis import suspects
from orchestrator.brain.model import decisions as d
from orchestrator.brain.model.facts import Facts
from orchestrator.core.codec import Json
from orchestrator.core.jobdir.plan import Plan
from orchestrator.core.jobdir.status_file import parse_iso, time_of_day
from orchestrator.core.secret_mask import Mask, redact_url
from orchestrator.core.text import next_action_text, one_line_fault
from orchestrator.core.version import VERSION
from orchestrator.supervisor import status

Deliver: TypeAlias = Callable[[Json], str]

COMMAND_S_MAX = 30.0
"""How long the command may run; then it is killed, with all processes that it started."""

POST_S_MAX = 10.0
"""How long one try to reach the webhook may wait for each step: its connection, its answer."""

POST_PAUSES_S = (1.0, 4.0)
"""The pauses between the tries."""

PENDING_MAX = 64
"""How many notifications may wait for their delivery; more are dropped, with a line in the log."""

DELIVERY_S_MAX = 60.0
"""How long after the job's end the supervisor waits for deliveries: longer than all tries to reach a webhook take."""

CLOSE_S_MAX = 5.0
"""How long a supervisor that must exit waits for deliveries that are under way."""

JOB_END_EVENTS = tuple(end.value.lower() for end in d.JobEnd)
"""The occasions that go before all others."""

OUTPUT_BYTES_MAX = 4000
TEXT_CHARS_MAX = 1000


# Content


def occasions(decision: d.Decision) -> tuple[str, ...]:
    """Return the values of `notify.on` that match a decision, the closest first; none for most decisions."""
    match decision:
        case d.Judge(verdict=verdict):
            hangs = verdict.kind in (d.VerdictKind.HANG, d.VerdictKind.DESYNC) or verdict.culprit
            return ("hang", "verdict") if hangs else ("verdict",)
        case d.Notice(topic=d.NoticeTopic.SLOW):
            return ()
        case d.Notice(topic=d.NoticeTopic.SUSPECT):
            return ("suspect",)
        case d.Notice(withdrawn=withdrawn):
            return ("withdrawn",) if withdrawn else ("notice",)
        case d.BeginAttempt(attempt=number) if number > 1:
            return ("restart",)
        case d.EndJob(end=end):
            return (end.value.lower(),)
        case _:
            return ()


def message(event: str, decision: d.Decision, plan: Plan, facts: Facts, at: str, folder: str) -> Json:
    """Return the notification of a decision, with all secrets still in it and not cut yet; `at`: the time of day."""
    verdict = _verdict(decision, facts)
    return {
        "event": event,
        "time": at,
        "text": _text(event, decision, plan, facts, at),
        "why": decision.why,
        "attempt": decision.attempt,
        "job": {
            "id": plan.id,
            "name": plan.name,
            "backend": plan.backend,
            "state": status.state(facts),
            "step": facts.step,
            "dir": folder,
        },
        "verdict": None if verdict is None else status.verdict(verdict, decision.at),
    }


def _verdict(decision: d.Decision, facts: Facts) -> d.Verdict | None:
    match decision:
        case d.Judge(verdict=verdict) | d.Notice(verdict=verdict):
            return verdict
        case d.EndJob(end=d.JobEnd.FAILED):
            return facts.attempt.verdict if facts.attempt else None
        case d.BeginAttempt():
            return facts.past_attempts[-1].verdict if facts.past_attempts else None
        case _:
            return None


def _next_action_text(decision: d.Decision, plan: Plan, facts: Facts, at: str) -> str:
    """Return what orch will do about a suspected hang, and when."""
    current = suspects.current_suspicion(facts, decision.at)
    if current is None:
        return ""
    due = status.iso(parse_iso(at) + (current.in_s or 0.0))
    return next_action_text(current, time_of_day(due), plan.id)


def _text(event: str, decision: d.Decision, plan: Plan, facts: Facts, at: str) -> str:
    match decision:
        case d.Judge(verdict=d.Verdict() as verdict) | d.Notice(verdict=d.Verdict() as verdict):
            what = verdict.culprit or verdict.summary
            no_action_text = "; no action is taken" if event == "notice" else ""
            return f"{plan.id}: {verdict.kind.value} in attempt {decision.attempt}: {what}{no_action_text}"
        case d.Notice(topic=d.NoticeTopic.HANG):
            return f"{plan.id}: running again: {decision.why}"
        case d.Notice(topic=d.NoticeTopic.SUSPECT):
            then = _next_action_text(decision, plan, facts, at)
            return f"{plan.id}: may hang in attempt {decision.attempt}: {decision.why}{f'; {then}' if then else ''}"
        case d.Notice(why=why, fix=fix):
            return f"{plan.id}: {one_line_fault(why, fix=fix)}"
        case d.BeginAttempt():
            return f"{plan.id}: attempt {decision.attempt} begins: {decision.why}"
        case _:
            return f"{plan.id}: {event}: {decision.why}"


# Delivery


class Notifier:
    """Sends notifications to the targets that the plan names. `take_faults` hands out what went wrong, for
    supervisor.log."""

    def __init__(self, plan: Plan, folder: Path, env: Mapping[str, str], mask: Mask, webhook: str = "") -> None:
        """`env`: the command's environment; it runs in the job's copy of the code, below `folder`. `webhook`: its
        full address, of which the plan has only the host."""
        notify = plan.notify
        self._plan = plan
        self._folder = folder
        self._mask = mask
        self._occasions = notify.occasions if notify else ()
        self._faults: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._threads: list[DeliveryThread] = []
        if notify is not None and notify.command:
            where = folder / "code"
            self._threads.append(
                DeliveryThread(
                    "command", lambda note: run_command(notify.command, note, env, where, mask), self._report
                )
            )
        if notify is not None and notify.url is not None:
            self._threads.append(DeliveryThread("url", lambda note: post(webhook, note), self._report))

    def notify(self, decision: d.Decision, facts: Facts, at: str) -> None:
        """Send the notification of a decision, if the plan wants it; returns at once."""
        event = next((event for event in occasions(decision) if event in self._occasions), None)
        if event is not None:
            note = self._mask.mask_json(message(event, decision, self._plan, facts, at, str(self._folder)))
            note["text"] = note["text"][:TEXT_CHARS_MAX]
            for thread in self._threads:
                thread.enqueue(note)

    def take_faults(self) -> list[str]:
        """Return what went wrong with deliveries since the last call."""
        return [self._faults.get() for _ in range(self._faults.qsize())]

    @property
    def is_busy(self) -> bool:
        """Whether something is still to be delivered; each delivery ends by itself."""
        return any(thread.is_busy for thread in self._threads)

    def close(self) -> None:
        """Wait for deliveries under way, at most `CLOSE_S_MAX`; then report what is not delivered."""
        deadline_s = time.monotonic() + CLOSE_S_MAX
        while self.is_busy and time.monotonic() < deadline_s:
            time.sleep(0.02)
        for thread in self._threads:
            thread.give_up()

    def _report(self, fault: str) -> None:
        self._faults.put(" ".join(self._mask.apply(fault).split()))


class DeliveryThread:
    """One target of notifications: a thread that delivers them one after the other, in order; the end of the job next."""

    def __init__(self, target: str, deliver: Deliver, report: Callable[[str], None]) -> None:
        """`target`: `command` or `url`. `deliver` returns what went wrong, or an empty text."""
        self._target = target
        self._deliver = deliver
        self._report = report
        self._notes: queue.PriorityQueue[tuple[bool, int, Json]] = queue.PriorityQueue()
        self._pending: dict[int, str] = {}  # by its number, the event of each note that waits or is being delivered
        self._numbers = itertools.count()
        self._thread: threading.Thread | None = None

    @property
    def is_busy(self) -> bool:
        """Whether a note waits or is being delivered."""
        return bool(self._pending)

    def give_up(self) -> None:
        """Report what is not delivered."""
        for number in list(self._pending):
            self._report(f"notify.{self._target} did not get {self._pending.pop(number, '')}: the supervisor exits")

    def enqueue(self, notification: Json) -> None:
        """Queue a note; returns at once."""
        event, number = notification["event"], next(self._numbers)
        if len(self._pending) >= PENDING_MAX and event not in JOB_END_EVENTS:
            self._report(f"notify.{self._target} is too slow: {event} was dropped")
            return
        self._pending[number] = event
        self._notes.put((event not in JOB_END_EVENTS, number, notification))
        if self._thread is None:
            # A daemon: whatever a delivery does, it must not keep this process from ending.
            self._thread = threading.Thread(target=self._work, name=f"notify-{self._target}", daemon=True)
            self._thread.start()

    def _work(self) -> None:
        while True:
            _, number, notification = self._notes.get()
            try:
                fault = self._deliver(notification) if number in self._pending else ""
            except Exception as err:  # no error of a notification may affect the job
                fault = f"{type(err).__name__}: {err}"
            if fault:
                self._report(f"notify.{self._target} did not get {notification['event']}: {fault}")
            self._pending.pop(number, None)


def run_command(
    argv: tuple[str, ...],
    notification: Json,
    env: Mapping[str, str],
    folder: Path,
    mask: Mask,
    limit_s: float = COMMAND_S_MAX,
) -> str:
    """Run the user's command with a note on its standard input; return what went wrong, with the end of its output. `timeout` ends
    it with all that it started, even where this process has ended before."""
    variables = {
        "ORCH_NOTIFY_EVENT": notification["event"],
        "ORCH_NOTIFY_TEXT": notification["text"],
        "ORCH_JOB_ID": notification["job"]["id"],
        "ORCH_JOB_NAME": notification["job"]["name"],
        "ORCH_ATTEMPT": str(notification["attempt"]),
    }
    with (
        tempfile.TemporaryFile() as stdin,
        tempfile.TemporaryFile() as out,
    ):  # a pipe would wait for its reader
        stdin.write(json.dumps(notification).encode())
        stdin.seek(0)
        process = subprocess.Popen(
            ("timeout", "-s", "KILL", f"{limit_s}", *argv), stdin=stdin, stdout=out, stderr=subprocess.STDOUT,
            cwd=folder if folder.is_dir() else None, env={**env, **variables}, start_new_session=True,
        )  # fmt: skip
        code = process.wait(limit_s + CLOSE_S_MAX)
        killed = f"it ran for more than {limit_s:g} s and was killed" if code == -signal.SIGKILL else ""
        fault = killed or (
            f"it ended with signal {-code}" if code < 0 else f"it ended with code {code}" if code else ""
        )
        out.seek(max(0, out.seek(0, os.SEEK_END) - OUTPUT_BYTES_MAX))
        output = " | ".join(mask.apply(out.read().decode(errors="replace").strip()).splitlines())
        return f"{fault}; output: {output}" if fault and output else fault


def post(url: str, notification: Json, limit_s: float = POST_S_MAX, pauses_s: tuple[float, ...] = POST_PAUSES_S) -> str:
    """POST a note to a webhook, with a few tries; return what went wrong."""
    fault = ""
    for pause_s in (0.0, *pauses_s):
        time.sleep(pause_s)
        fault, is_final = _post_once(url, notification, limit_s)
        if not fault or is_final:
            return fault
    return f"{fault} ({len(pauses_s) + 1} tries)"


def _is_local(request: urllib.request.Request) -> bool:
    """Return whether a webhook is on this machine, which a proxy could not reach."""
    host = urllib.parse.urlsplit(request.full_url).hostname or ""
    return host in ("localhost", "::1") or host.startswith("127.")


class Redirects(urllib.request.HTTPRedirectHandler):
    """Follows only redirects that keep the POST: after any other one urllib would send a GET without the body."""

    http_error_308 = urllib.request.HTTPRedirectHandler.http_error_302  # Python 3.10 does not know it

    def redirect_request(
        self, req: urllib.request.Request, fp: Any, code: int, msg: str, headers: Any, newurl: str
    ) -> urllib.request.Request:
        """Return the request to follow with. Raises HTTPError."""
        if code not in (307, 308) or not newurl.startswith(("http://", "https://")):
            raise urllib.error.HTTPError(
                req.full_url, code, f"{msg}: it redirects to {redact_url(newurl)}; set notify.url to that address", headers, fp
            )  # fmt: skip
        return urllib.request.Request(newurl, req.data, dict(req.header_items()), method="POST")


def _post_once(url: str, notification: Json, limit_s: float) -> tuple[str, bool]:
    head = {"Content-Type": "application/json", "User-Agent": f"orch/{VERSION}"}
    try:
        request = urllib.request.Request(url, json.dumps(notification).encode(), head, method="POST")
        proxy = urllib.request.ProxyHandler({} if _is_local(request) else None)
        with urllib.request.build_opener(proxy, Redirects()).open(request, timeout=limit_s) as answer:
            answer.read(OUTPUT_BYTES_MAX)
        return "", True
    except urllib.error.HTTPError as err:
        with err:
            is_final = 300 <= err.code < 500 and err.code not in (408, 429)
            return f"HTTP {err.code} {err.reason}", is_final
    except urllib.error.URLError as err:
        through = "" if _is_local(request) else urllib.request.getproxies().get(request.type, "")
        return f"{err.reason}{f' (by the proxy {redact_url(through)})' if through else ''}", False
    except Exception as err:  # a server may answer anything
        return f"{type(err).__name__}: {err}", False
