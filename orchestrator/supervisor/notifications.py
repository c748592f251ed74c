"""Notifications of what happens to a job: a command of the user's, and a webhook.

Rules: nothing here can hold up, fail or end the supervisor or the job. Each target has its own thread and a short
queue, each delivery a limit; a failure is one line in supervisor.log. A decision is sent at most once: it is on disk
before, so a supervisor that dies in between leaves it unsent.

A notification is one JSON object:

    {event, time, text, why, attempt, job: {id, name, backend, state, step, dir}, verdict: {...} or null}

`event` is a word of `notify.on`; `text` says all of it in one line, as chat systems want it under that name; `verdict`
is that of `orch why --json`. The values of the job's secrets are masked. A command also gets ORCH_NOTIFY_EVENT,
ORCH_NOTIFY_TEXT, ORCH_JOB_ID, ORCH_JOB_NAME and ORCH_ATTEMPT in its environment.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import select
import signal
import subprocess
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, TypeAlias

from orchestrator.brain.model import decisions as d
from orchestrator.brain.model.facts import Facts
from orchestrator.core.codec import Json
from orchestrator.core.jobdir.plan import Plan
from orchestrator.core.mask import Mask
from orchestrator.core.version import VERSION
from orchestrator.supervisor import status

Deliver: TypeAlias = Callable[[Json], str]

COMMAND_S_MAX = 30.0
"""How long the command may run; then it is killed, with all processes that it started."""

POST_S_MAX = 10.0
"""How long one try to reach the webhook may take, from the lookup of its name to the end of its answer."""

POST_PAUSES_S = (1.0, 4.0)
"""The pauses between the tries."""

WAITING_MAX = 64
"""How many notifications may wait for their delivery; more are dropped, with a line in the log."""

CLOSE_S_MAX = 5.0
"""How long a supervisor that must exit waits for deliveries that are under way."""

OUTPUT_BYTES_MAX = 4000
TEXT_CHARS_MAX = 1000


# Content


def occasions(decision: d.Decision) -> tuple[str, ...]:
    """Return the values of `notify.on` that match a decision, the closest first; none for most decisions."""
    match decision:
        case d.Judge(verdict=verdict):
            hangs = verdict.kind in (d.Kind.HANG, d.Kind.DESYNC) or verdict.culprit
            return ("hang", "verdict") if hangs else ("verdict",)
        case d.Alert():
            return ("notice",)
        case d.ResolveAlert():
            return ("withdrawn",)
        case d.Notice(withdrawn=withdrawn):
            return ("withdrawn",) if withdrawn else ("notice",)
        case d.Suspect():
            return ("suspect",)
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
        "text": _text(event, decision, plan),
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
    """Return the verdict that a decision contains or follows from."""
    match decision:
        case d.Judge(verdict=verdict) | d.Alert(verdict=verdict):
            return verdict
        case d.EndJob(end=d.JobEnd.FAILED):
            return facts.attempt.verdict if facts.attempt else None
        case d.BeginAttempt():
            return facts.past[-1].verdict if facts.past else None
        case _:
            return None


def _text(event: str, decision: d.Decision, plan: Plan) -> str:
    match decision:
        case d.Judge(verdict=verdict) | d.Alert(verdict=verdict):
            what = verdict.culprit or verdict.summary
            lets_be = "; nothing is done about it" if event == "notice" else ""
            return f"{plan.id}: {verdict.kind.value} in attempt {decision.attempt}: {what}{lets_be}"
        case d.ResolveAlert():
            return f"{plan.id}: goes on after all: {decision.why}"
        case d.Suspect():
            return f"{plan.id}: may hang in attempt {decision.attempt}: {decision.why}; nothing is done about it yet"
        case d.Notice():
            return f"{plan.id}: {decision.why}"
        case d.BeginAttempt():
            return f"{plan.id}: attempt {decision.attempt} begins: {decision.why}"
        case _:
            return f"{plan.id}: {event}: {decision.why}"


# Delivery


class Notifier:
    """Sends notifications to the targets that the plan names. `faults` hands out what went wrong, for
    supervisor.log."""

    def __init__(
        self, plan: Plan, folder: Path, env: Mapping[str, str], mask: Mask, webhook: str = ""
    ) -> None:
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

    def tell(self, decision: d.Decision, facts: Facts, at: str) -> None:
        """Send the notification of a decision, if the plan wants it; returns at once."""
        event = next((event for event in occasions(decision) if event in self._occasions), None)
        if event is not None:
            note = self._mask.of_data(message(event, decision, self._plan, facts, at, str(self._folder)))
            note["text"] = note["text"][:TEXT_CHARS_MAX]
            for thread in self._threads:
                thread.take(note)

    def faults(self) -> list[str]:
        """Return what went wrong with deliveries since the last call."""
        faults = []
        while not self._faults.empty():
            faults.append(self._faults.get())
        return faults

    @property
    def is_busy(self) -> bool:
        """Tell whether something is still to be delivered; each delivery ends by itself."""
        return any(thread.is_busy for thread in self._threads)

    def close(self) -> None:
        """Wait for deliveries under way, at most `CLOSE_S_MAX`."""
        deadline_s = time.monotonic() + CLOSE_S_MAX
        while self.is_busy and time.monotonic() < deadline_s:
            time.sleep(0.02)

    def _report(self, fault: str) -> None:
        self._faults.put(self._mask.apply(fault))


class DeliveryThread:
    """One target of notifications: a thread that delivers them one after the other, in order."""

    def __init__(self, target: str, deliver: Deliver, report: Callable[[str], None]) -> None:
        """`target`: `command` or `url`. `deliver` returns what went wrong, or an empty text."""
        self._target = target
        self._deliver = deliver
        self._report = report
        self._notes: queue.Queue[Json] = queue.Queue(WAITING_MAX)
        self._thread: threading.Thread | None = None

    @property
    def is_busy(self) -> bool:
        """Tell whether a note waits or is being delivered."""
        return self._notes.unfinished_tasks > 0

    def take(self, note: Json) -> None:
        """Queue a note; returns at once."""
        try:
            self._notes.put_nowait(note)
        except queue.Full:
            self._report(f"notify.{self._target} is too slow: {note['event']} was not told")
            return
        if self._thread is None:
            # A daemon: whatever a delivery does, it must not keep this process from ending.
            self._thread = threading.Thread(target=self._work, name=f"notify-{self._target}", daemon=True)
            self._thread.start()

    def _work(self) -> None:
        while True:
            note = self._notes.get()
            try:
                fault = self._deliver(note)
            except Exception as err:  # the job goes on, whatever a notification runs into
                fault = f"{type(err).__name__}: {err}"
            if fault:
                self._report(f"notify.{self._target} was not told of {note['event']}: {fault}")
            self._notes.task_done()


def run_command(
    argv: tuple[str, ...],
    note: Json,
    env: Mapping[str, str],
    folder: Path,
    mask: Mask,
    limit_s: float = COMMAND_S_MAX,
) -> str:
    """Run the user's command with a note on its standard input; return what went wrong, with the end of its output."""
    variables = {
        "ORCH_NOTIFY_EVENT": note["event"],
        "ORCH_NOTIFY_TEXT": note["text"],
        "ORCH_JOB_ID": note["job"]["id"],
        "ORCH_JOB_NAME": note["job"]["name"],
        "ORCH_ATTEMPT": str(note["attempt"]),
    }
    with tempfile.TemporaryFile() as stdin:  # a pipe would wait for a command that does not read it
        stdin.write(json.dumps(note).encode())
        stdin.seek(0)
        try:
            process = subprocess.Popen(
                argv, stdin=stdin, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, bufsize=0,
                cwd=folder if folder.is_dir() else None, env={**env, **variables}, start_new_session=True,
            )  # fmt: skip
        except OSError as err:
            return f"{argv[0]} cannot be run: {err.strerror}"
    assert process.stdout is not None
    with process.stdout as out:
        text = mask.apply(_output(process, out, time.monotonic() + limit_s))
        if process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return _with(f"it ran for more than {limit_s:g} s and was killed", text)
    if process.returncode:
        how = f"signal {-process.returncode}" if process.returncode < 0 else f"code {process.returncode}"
        return _with(f"it ended with {how}", text)
    return ""


def _output(process: subprocess.Popen[bytes], out: IO[bytes], deadline_s: float) -> str:
    """Return the end of what a process prints until it has ended, or the time is over."""
    kept = b""
    is_open = True
    while time.monotonic() < deadline_s:
        has_ended = process.poll() is not None
        ready = select.select([out], [], [], 0.0 if has_ended else 0.05)[0] if is_open else []
        if ready:
            piece = os.read(out.fileno(), 65_536)
            is_open = bool(piece)
            kept = (kept + piece)[-OUTPUT_BYTES_MAX:]
        elif has_ended:
            break
        elif not is_open:
            time.sleep(0.02)
    return kept.decode(errors="replace").strip()


def _with(fault: str, output: str) -> str:
    return f"{fault}; it said: {' | '.join(output.splitlines())}" if output else fault


def post(
    url: str, note: Json, limit_s: float = POST_S_MAX, pauses_s: tuple[float, ...] = POST_PAUSES_S
) -> str:
    """POST a note to a webhook, with a few tries; return what went wrong."""
    fault = ""
    for pause_s in (0.0, *pauses_s):
        time.sleep(pause_s)
        fault, is_final = _try_in_time(url, note, limit_s)
        if not fault or is_final:
            return fault
    return f"{fault} ({len(pauses_s) + 1} tries)"


def _try_in_time(url: str, note: Json, limit_s: float) -> tuple[str, bool]:
    """Try once, within `limit_s` in all; return what went wrong, and whether another try is useless.

    The timeout of a socket holds for each of its steps, and that of a name lookup cannot be set: a thread that takes
    longer is left to itself.
    """
    answer: queue.SimpleQueue[tuple[str, bool]] = queue.SimpleQueue()
    threading.Thread(target=lambda: answer.put(_try(url, note, limit_s)), daemon=True).start()
    try:
        return answer.get(timeout=limit_s)
    except queue.Empty:
        return f"no answer within {limit_s:g} s", False


def _try(url: str, note: Json, limit_s: float) -> tuple[str, bool]:
    head = {"Content-Type": "application/json", "User-Agent": f"orch/{VERSION}"}
    try:
        request = urllib.request.Request(url, json.dumps(note).encode(), head, method="POST")
        with urllib.request.urlopen(request, timeout=limit_s) as answer:
            answer.read(OUTPUT_BYTES_MAX)
        return "", True
    except urllib.error.HTTPError as err:
        with err:
            is_final = 400 <= err.code < 500 and err.code not in (408, 429)
            return f"HTTP {err.code} {err.reason}", is_final
    except urllib.error.URLError as err:
        return str(err.reason), False
    except Exception as err:  # a server may answer anything
        return f"{type(err).__name__}: {err}", False
