"""Notifications: the user gets those that the job file asks for, and no failure there reaches the job."""

from __future__ import annotations

import json
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from orchestrator.brain.brain import Brain
from orchestrator.brain.model import decisions as d
from orchestrator.brain.model.facts import Facts
from orchestrator.core.secret_mask import Mask
from orchestrator.supervisor import notifications
from orchestrator.supervisor.notifications import DeliveryThread, Notifier, post, run_command
from tests.support import jobs

SECRET = "hf_0123456789abcdef"
AT = "2026-11-20T22:46:05.123Z"
NO_SECRETS = Mask(())
ENV = {"PATH": os.environ["PATH"]}
WAIT_S_MAX = 20.0
POLL_S = 0.02
HANG = d.Verdict(
    d.VerdictKind.HANG, (2,), "node-1", "rank 2 on node-1 stands still", (d.Evidence(f"the token is {SECRET}"),), d.FailureSignature(d.VerdictKind.HANG), 23, 4.0, True,
    "rank 2 on node-1: in read() of data/shard-17.bin, train.py:88 load_batch", "ranks 0-1,3 in all_reduce #12",
)  # fmt: skip
NOTE: dict[str, Any] = {
    "event": "hang",
    "text": "gpt: hang",
    "attempt": 1,
    "job": {"id": "gpt-1", "name": "gpt"},
}


class Hook(BaseHTTPRequestHandler):
    """A webhook that answers with the codes it is given, in turn, and keeps what it was told."""

    codes: list[int]
    told: list[dict[str, Any]]
    leads_to = ""

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.told.append(json.loads(body))
        code = self.codes.pop(0) if self.codes else 200
        self.send_response(code)
        if 300 <= code < 400:
            self.send_header("Location", self.leads_to or f"http://{self.headers['Host']}/moved")
        self.end_headers()
        self.wfile.write(b"ok")

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def hook() -> Iterator[tuple[str, type[Hook]]]:
    """Serve a webhook on this machine; yield its URL and what it was told."""
    kind = type("OneHook", (Hook,), {"codes": [], "told": []})
    server = HTTPServer(("127.0.0.1", 0), kind)
    thread = threading.Thread(target=server.serve_forever, args=(POLL_S,))
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/hook?room=7", kind
    server.shutdown()
    thread.join()
    server.server_close()


def _until(condition: Callable[[], object], what: str) -> None:
    deadline_s = time.monotonic() + WAIT_S_MAX
    while not condition():
        assert time.monotonic() < deadline_s, f"waited {WAIT_S_MAX:g} s for {what}"
        time.sleep(0.01)


def _facts() -> Facts:
    brain = Brain()
    for one in [*jobs.submitted(), *jobs.running(1, 1.0, 23)]:
        brain.learn(one)
    return brain.facts


def _notifier(folder: Path, **told: Any) -> Notifier:
    env = {**ENV, "HF_TOKEN": SECRET}
    return Notifier(jobs.plan(notify=told), folder, env, Mask([SECRET]), told.get("url", ""))


def _judge() -> d.Judge:
    return d.Judge(13.0, HANG.summary, 1, HANG)


# What is told


@pytest.mark.parametrize(
    ("decision", "words"),
    [
        (_judge(), ("hang", "verdict")),
        (d.Notice(13.0, "why", 1, d.NoticeTopic.HANG, verdict=HANG), ("notice",)),
        (d.Notice(13.0, "it moves", 1, d.NoticeTopic.HANG, withdrawn=True), ("withdrawn",)),
        (d.BeginAttempt(0.0, "submitted", 1, None), ()),
        (d.BeginAttempt(0.0, "restart after crash", 2, None), ("restart",)),
        (d.EndJob(0.0, "why", 1, d.JobEnd.FAILED), ("failed",)),
        (d.EndJob(0.0, "why", 1, d.JobEnd.SUCCEEDED), ("succeeded",)),
        (d.EndJob(0.0, "why", 1, d.JobEnd.CANCELLED), ("cancelled",)),
        (d.Launch(0.0, "why", 1, "node-0"), ()),
    ],
)
def test_decision_maps_to_events_of_job_file(decision: d.Decision, words: tuple[str, ...]) -> None:
    assert notifications.occasions(decision) == words


def test_hang_message_names_job_attempt_culprit_and_verdict() -> None:
    told = notifications.message("hang", _judge(), jobs.plan(), _facts(), AT, jobs.ROOT)
    assert told["text"] == f"{jobs.ID}: hang in attempt 1: {HANG.culprit}"
    assert told["job"] == {
        "id": jobs.ID, "name": "gpt", "backend": "local", "state": "RUNNING", "step": 23, "dir": jobs.ROOT,
    }  # fmt: skip
    assert (told["event"], told["time"], told["attempt"]) == ("hang", AT, 1)
    assert told["verdict"]["culprit"] == HANG.culprit
    assert told["verdict"]["waiting"] == HANG.waiting
    assert told["verdict"]["detected_s"] == 9.0


def test_secrets_are_masked_in_all_messages(tmp_path: Path, hook: tuple[str, type[Hook]]) -> None:
    url, served = hook
    _notifier(tmp_path, url=url).notify(_judge(), _facts(), AT)
    _until(lambda: served.told, "the webhook")
    assert served.told[0]["verdict"]["evidence"] == ["the token is ***"]
    assert SECRET not in json.dumps(served.told)


# The command


@pytest.mark.slow
def test_command_gets_json_stdin_and_event_variable(tmp_path: Path) -> None:
    """A command gets JSON on standard input and the event in its environment."""
    out = tmp_path / "told"
    line = f'cat > {out}.json; echo "$ORCH_NOTIFY_EVENT $ORCH_JOB_NAME $ORCH_ATTEMPT $HF_TOKEN" > {out}.env'
    notifier = _notifier(tmp_path, command=line)
    notifier.notify(_judge(), _facts(), AT)
    _until(lambda: not notifier.is_busy, "the command")
    assert json.loads((tmp_path / "told.json").read_text())["event"] == "hang"
    assert (tmp_path / "told.env").read_text() == f"hang gpt 1 {SECRET}\n"
    assert notifier.take_faults() == []


@pytest.mark.slow
def test_command_list_runs_without_shell(tmp_path: Path) -> None:
    notifier = _notifier(tmp_path, command=["touch", str(tmp_path / "a $HOME b")])
    notifier.notify(_judge(), _facts(), AT)
    _until((tmp_path / "a $HOME b").exists, "the file")


@pytest.mark.slow
def test_only_requested_events_are_notified(tmp_path: Path) -> None:
    out = tmp_path / "told"
    notifier = _notifier(tmp_path, command=f"echo $ORCH_NOTIFY_EVENT >> {out}", on=["failed", "verdict"])
    for decision in (
        _judge(), d.Notice(13.0, "why", 1, d.NoticeTopic.HANG, verdict=HANG), d.EndJob(14.0, "hang", 1, d.JobEnd.FAILED),
    ):  # fmt: skip
        notifier.notify(decision, _facts(), AT)
    _until(lambda: not notifier.is_busy, "the command")
    assert out.read_text().split() == ["verdict", "failed"]


@pytest.mark.slow
def test_failing_command_is_reported_with_output_without_secrets(tmp_path: Path) -> None:
    notifier = _notifier(tmp_path, command='echo "no route for $HF_TOKEN" >&2; exit 7')
    notifier.notify(_judge(), _facts(), AT)
    _until(lambda: not notifier.is_busy, "the command")
    assert notifier.take_faults() == ["notify.command did not get hang: it ended with code 7; output: no route for ***"]


@pytest.mark.slow
def test_missing_command_is_reported(tmp_path: Path) -> None:
    """A command that does not exist is reported."""
    fault = run_command(("no-such-program",), NOTE, ENV, tmp_path, NO_SECRETS)
    assert re.fullmatch("it ended with code 127; output: .*no-such-program.*: No such file or directory", fault)


@pytest.mark.slow
def test_hanging_command_is_killed_with_children(tmp_path: Path) -> None:
    began_s = time.monotonic()
    fault = run_command(
        ("sh", "-c", f"sleep 1000 & echo $! > {tmp_path}/pid; echo started; wait"),
        NOTE,
        ENV,
        tmp_path,
        NO_SECRETS,
        1.0,
    )
    assert fault == "it ran for more than 1 s and was killed; output: started"
    assert time.monotonic() - began_s < 10
    pid = int((tmp_path / "pid").read_text())
    _until(lambda: not _runs(pid), "the end of what the command had started")


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.slow
def test_endless_command_output_keeps_only_its_end(tmp_path: Path) -> None:
    """A command that prints without end is read, and only the end of its output is kept."""
    fault = run_command(("sh", "-c", "yes | head -c 20000000; exit 3"), NOTE, ENV, tmp_path, NO_SECRETS)
    assert fault.startswith("it ended with code 3; output: y | y")
    assert len(fault) < 3 * notifications.OUTPUT_BYTES_MAX


@pytest.mark.slow
def test_secret_cut_by_truncation_is_not_shown(tmp_path: Path) -> None:
    """A secret that is cut in the output of a command is not shown in half."""
    size = notifications.OUTPUT_BYTES_MAX - len(SECRET) // 2
    script = f"printf %s {SECRET}; head -c {size} /dev/zero | tr '\\0' x; exit 3"
    fault = run_command(("sh", "-c", script), NOTE, ENV, tmp_path, Mask([SECRET]))
    assert fault.startswith("it ended with code 3; output: ***xxx")


@pytest.mark.slow
def test_process_left_by_command_is_not_waited_for(tmp_path: Path) -> None:
    """A command that leaves a process behind is not waited for."""
    began_s = time.monotonic()
    assert run_command(("sh", "-c", "sleep 5 & exit 0"), NOTE, ENV, tmp_path, NO_SECRETS, 20.0) == ""
    assert time.monotonic() - began_s < 4


# The webhook


def test_failing_webhook_is_retried(hook: tuple[str, type[Hook]]) -> None:
    """A webhook that fails is tried again."""
    url, served = hook
    served.codes[:] = [503, 500]
    assert post(url, NOTE, pauses_s=(0.01, 0.01)) == ""
    assert served.told == [NOTE, NOTE, NOTE]


def test_refusing_webhook_is_not_retried(hook: tuple[str, type[Hook]]) -> None:
    """A webhook that refuses is not asked again."""
    url, served = hook
    served.codes[:] = [404]
    assert post(url, NOTE, pauses_s=(0.01,)) == "HTTP 404 Not Found"
    assert len(served.told) == 1


@pytest.mark.parametrize("code", [307, 308])
def test_redirect_keeping_post_is_followed(code: int, hook: tuple[str, type[Hook]]) -> None:
    url, served = hook
    served.codes[:] = [code]
    assert post(url, NOTE, pauses_s=()) == "" and served.told == [NOTE, NOTE]


@pytest.mark.parametrize(("code", "to"), [(301, ""), (302, ""), (303, ""), (308, "ftp://127.0.0.1/x")])
def test_redirect_losing_post_is_refused_with_message(code: int, to: str, hook: tuple[str, type[Hook]]) -> None:
    """A redirect that would lose the notification is refused with a message."""
    url, served = hook
    served.codes[:], served.leads_to = [code], to
    fault = post(url, NOTE, pauses_s=(0.01,))
    where = to.replace("/x", "/***") or f"{url.partition('/hook')[0]}/***"
    assert re.fullmatch(
        rf"HTTP {code} [\w ]+: it redirects to {re.escape(where)}; set notify.url to that address", fault
    )
    assert served.told == [NOTE]


def test_unreachable_webhook_is_reported() -> None:
    """A webhook without a listener is reported."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    fault = post(f"http://127.0.0.1:{port}/", NOTE, pauses_s=(0.01,))
    assert "Connection refused" in fault
    assert fault.endswith("(2 tries)")


@pytest.mark.slow
def test_silent_webhook_times_out() -> None:
    """A webhook that never answers is given up."""
    with socket.create_server(("127.0.0.1", 0)) as server:  # the kernel takes the connections
        began_s = time.monotonic()
        fault = post(f"http://127.0.0.1:{server.getsockname()[1]}/", NOTE, 0.2, (0.01,))
        took_s = time.monotonic() - began_s
    assert fault.endswith("(2 tries)")
    assert 0.4 <= took_s < 5


# Neither holds anybody up


def test_notify_returns_at_once_and_drops_excess() -> None:
    """Notifying returns at once, and too many notifications are dropped with a message."""
    go, said = threading.Event(), list[str]()

    def deliver(note: dict[str, Any]) -> str:
        go.wait(WAIT_S_MAX)
        return ""

    courier = DeliveryThread("url", deliver, said.append)
    began_s = time.monotonic()
    for _ in range(notifications.PENDING_MAX + 5):
        courier.enqueue(NOTE)
    assert time.monotonic() - began_s < 2
    assert set(said) == {"notify.url is too slow: hang was dropped"}
    assert courier.is_busy
    go.set()
    _until(lambda: not courier.is_busy, "the deliveries")


def test_end_notification_goes_first_and_is_never_dropped() -> None:
    """The end of the job is sent before what waits and is never dropped."""
    go, told = threading.Event(), list[str]()

    def deliver(note: dict[str, Any]) -> str:
        go.wait(WAIT_S_MAX)
        told.append(note["event"])
        return ""

    courier = DeliveryThread("url", deliver, lambda fault: None)
    for _ in range(notifications.PENDING_MAX + 5):
        courier.enqueue(NOTE)
    courier.enqueue({**NOTE, "event": "failed"})
    go.set()
    _until(lambda: not courier.is_busy, "the deliveries")
    assert told.index("failed") <= 1 and len(told) == notifications.PENDING_MAX + 1


@pytest.mark.slow
def test_undelivered_at_exit_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Undelivered notifications at the supervisor's exit are reported."""
    monkeypatch.setattr(notifications, "CLOSE_S_MAX", 0.5)
    notifier = _notifier(tmp_path, command=f"touch {tmp_path}/began; sleep 5", on=["verdict", "failed"])
    notifier.notify(_judge(), _facts(), AT)
    notifier.notify(d.EndJob(14.0, "hang", 1, d.JobEnd.FAILED), _facts(), AT)
    _until((tmp_path / "began").exists, "the command")
    notifier.close()
    said = "notify.command did not get {}: the supervisor exits"
    assert notifier.take_faults() == [said.format("verdict"), said.format("failed")]


def test_a_fault_is_one_line_of_the_log(tmp_path: Path) -> None:
    notifier = _notifier(tmp_path, command="true")
    notifier._report("one\ntwo\r\n three")
    assert notifier.take_faults() == ["one two three"]


def test_any_delivery_error_is_logged_and_next_tried() -> None:
    said, tried = list[str](), list[str]()

    def deliver(note: dict[str, Any]) -> str:
        tried.append(note["event"])
        raise ZeroDivisionError("oops")

    courier = DeliveryThread("url", deliver, said.append)
    courier.enqueue(NOTE)
    courier.enqueue(NOTE)
    _until(lambda: not courier.is_busy, "the deliveries")
    assert tried == ["hang", "hang"]
    assert said == ["notify.url did not get hang: ZeroDivisionError: oops"] * 2


def test_nothing_is_sent_without_a_target(tmp_path: Path) -> None:
    assert jobs.plan().notify is None
    notifier = Notifier(jobs.plan(), tmp_path, ENV, NO_SECRETS)
    notifier.notify(_judge(), _facts(), AT)
    assert not notifier.is_busy
    notifier.close()


def test_local_webhook_bypasses_proxy_and_others_name_it(
    hook: tuple[str, type[Hook]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A webhook on this machine is reached without a proxy; elsewhere the proxy is named."""
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    assert post(hook[0], {"event": "failed"}, pauses_s=()) == "" and len(hook[1].told) == 1
    assert "(by the proxy http://127.0.0.1:9)" in post("http://192.0.2.1/x", {}, pauses_s=())
