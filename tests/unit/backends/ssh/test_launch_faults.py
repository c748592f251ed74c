"""Launch faults: whatever fails, hangs or dies, the launch ends in time, names the stage, leaves nothing half done.

The host is a model at the border, driven by hypothesis: it keeps to the protocol, as bootstrap and keeper do, until its
fault comes. It has a clock of its own, so that a hang takes no time.
"""

from __future__ import annotations

import enum
import json
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from orchestrator.backends.api import LaunchError
from orchestrator.backends.ssh import bootstrap_session
from orchestrator.backends.ssh.bootstrap_session import Clocks
from orchestrator.backends.ssh.launch import AgentLaunch, CodeArchive, LaunchedAgent, Launcher, launch_agent
from orchestrator.core import codec
from orchestrator.core.errors import Cancelled
from orchestrator.core.observations import Retryable
from orchestrator.core.wire import bootstrap as w
from tests.support import fake_host

BUNDLE = b"B" * 700_000
CODE = b"C" * 900_000
BEGAN_S = 1_000_000.0


class Kind(enum.Enum):
    """How a host goes wrong."""

    FAILS = "says what failed"
    EXITS = "ends with a code"
    DIES = "ends without a code"
    HANGS = "says nothing any more"
    BREAKS = "the connection is gone"
    TALKS = "prints without end"
    GARBLES = "says what nobody understands"
    TAKES_NOTHING = "takes no more bytes"
    HANGS_UP = "reads no more"


class KeeperState(enum.Enum):
    """What became of the keeper on the host."""

    NONE = "none"
    LEASED = "holds its leases"
    UP = "up"
    ENDED = "ended"


@dataclass
class Step:
    """A word that the host says, at a stage; a fault may come in its place, or while what it wants is sent."""

    stage: str
    word: w.Reply


def steps(has_bundle: bool, has_code: bool, was_up: bool) -> list[Step]:
    """Return what a host says that goes right."""
    return [
        Step("shell", w.InShell()),
        Step("python", w.PythonFound("/usr/bin/python3", "3.11.2", BEGAN_S)),
        *([] if has_bundle else [Step("folder", w.SendBlob("bundle"))]),
        Step("folder", w.Working("waiting for another launch")),
        Step("folder", w.FolderReady("/home/me/.orch/jobs/x", True, True, "boot", ())),
        *([] if has_code else [Step("copy", w.SendBlob("code")), Step("copy", w.Working("unpacking"))]),
        Step("copy", w.FilesVerified()),
        *(
            [Step("lease", w.AlreadyUp(7, ("0",)))]
            if was_up
            else [Step("lease", w.Leased(("0",))), Step("agent", w.AgentMonitorUp(7))]
        ),
    ]


@dataclass
class Fault:
    """At which step what goes wrong."""

    at: int
    kind: Kind


@dataclass
class FakeHost:
    """A model of a host, and of the one conversation with it."""

    steps: list[Step]
    fault: Fault | None
    noise: list[bytes]
    now_s: float = BEGAN_S
    keeper: KeeperState = KeeperState.NONE
    closed: bool = False
    heard: bytearray = field(default_factory=bytearray)
    errors: str = "some warning"
    mark: bytes = b""
    _said: int = 0
    _wanted: int = 0
    _queue: deque[bytes] = field(default_factory=deque)

    def run(self, command: str) -> FakeHost:
        self.mark = command.rpartition(" ")[2].encode()
        return self

    # What land() does with it

    def send(self, data: bytes) -> None:
        assert not self.closed
        fault = self._fault_now()
        if fault is Kind.TAKES_NOTHING and self._said:
            self.now_s += bootstrap_session.STALL_S_MAX
            raise TimeoutError
        if fault is Kind.HANGS_UP and self._said:
            raise BrokenPipeError
        self.heard += data
        if data == w.GO + b"\n" and self.keeper is KeeperState.LEASED:
            self.keeper = KeeperState.UP

    def line(self, wait_s: float) -> bytes | None:
        assert not self.closed and wait_s > 0
        self.now_s += 0.01
        if self.noise:
            return self.noise.pop()
        match self._fault_now():
            case None:
                return self._say(self.steps[self._said])
            case Kind.FAILS:
                return self._word(w.Failed(self.steps[self._said].stage, "so it is", "mend it", "permanent"))
            case Kind.EXITS | Kind.DIES | Kind.HANGS_UP:
                return None
            case Kind.HANGS | Kind.TAKES_NOTHING:
                self.now_s += wait_s
                raise TimeoutError
            case Kind.BREAKS:
                raise EOFError
            case Kind.TALKS:
                return b"y" * 100_000
            case Kind.GARBLES:
                return self.mark + b' {"kind": "Leased", "gpus": 7}'

    def exit_code(self, wait_s: float) -> int | None:
        if self._fault_now() is Kind.EXITS:
            return 3
        if self._fault_now() is Kind.HANGS_UP:
            self.now_s += wait_s
            raise TimeoutError
        return None

    def close(self) -> None:
        """The pipes end: a keeper that was not told to go ends itself."""
        self.closed = True
        if self.keeper is KeeperState.LEASED:
            self.keeper = KeeperState.ENDED

    # What the host does

    def _fault_now(self) -> Kind | None:
        if self._said >= len(self.steps):
            return Kind.DIES
        return self.fault.kind if self.fault is not None and self._said >= self.fault.at else None

    def _say(self, step: Step) -> bytes:
        self._said += 1
        if isinstance(step.word, w.Leased):
            self.keeper = KeeperState.LEASED
        return self._word(step.word)

    def _word(self, word: w.Reply) -> bytes:
        return b"noise before it " + self.mark + b" " + codec.dumps_kind(word).encode()


def _land(host: FakeHost, code: CodeArchive) -> LaunchedAgent | LaunchError:
    told = AgentLaunch(Launcher("exit 0", BUNDLE), code, fake_host.config())
    clocks = Clocks(monotonic=lambda: host.now_s, wall=lambda: host.now_s)
    try:
        return launch_agent(host, told, clocks=clocks)
    except LaunchError as err:
        return err


def test_cancelled_agent_is_not_started(code: CodeArchive) -> None:
    """An agent that is not wanted any more is not started."""
    host = FakeHost(steps(True, True, was_up=False), None, [])
    with pytest.raises(Cancelled):
        launch_agent(host, AgentLaunch(Launcher("exit 0", BUNDLE), code, fake_host.config()), lambda: False)
    assert host.closed and host.keeper is KeeperState.ENDED


@pytest.fixture(scope="module")
def code(tmp_path_factory: pytest.TempPathFactory) -> CodeArchive:
    path = tmp_path_factory.mktemp("home") / "code.tar.gz"
    path.write_bytes(CODE)
    return CodeArchive.read(path)


faults = st.none() | st.builds(Fault, st.integers(0, 11), st.sampled_from(Kind))
noises = st.lists(st.sampled_from([b"", b"Welcome!", b"\xff\xfe", b"orch-", b'{"kind": "Leased"}']), max_size=5)


@pytest.mark.slow
@settings(max_examples=400, deadline=None)
@given(faults, noises, st.booleans(), st.booleans(), st.booleans())
@example(Fault(7, Kind.HANGS), [], False, False, False)
@example(Fault(8, Kind.TAKES_NOTHING), [], True, True, False)
def test_launch_times_out_naming_stage_without_leftovers(
    code: CodeArchive, fault: Fault | None, noise: list[bytes], has_bundle: bool, has_code: bool, was_up: bool
) -> None:
    """A launch ends in time, names its stage and leaves nothing half done."""
    host = FakeHost(steps(has_bundle, has_code, was_up), fault, list(noise))
    result = _land(host, code)
    assert host.closed
    assert host.now_s - BEGAN_S < sum(bootstrap_session.LIMITS_S.values())
    if isinstance(result, LaunchedAgent):
        assert fault is None or fault.at >= len(host.steps) or fault.kind in (Kind.TAKES_NOTHING, Kind.HANGS_UP)
        assert host.keeper is (KeeperState.NONE if was_up else KeeperState.UP)
        return
    assert fault is not None
    assert result.stage in _stages(host, fault), result
    assert result.reason and isinstance(result.retryable, Retryable)
    was_told = bytes(host.heard).endswith(w.GO + b"\n")
    assert host.keeper is (KeeperState.UP if was_told else host.keeper)
    assert was_told or host.keeper in (KeeperState.NONE, KeeperState.ENDED)


def _stages(host: FakeHost, fault: Fault) -> set[str]:
    """Return the stages that may be named: that of the step, and the copy while something is being sent before it."""
    stage = host.steps[fault.at].stage
    before = host.steps[fault.at - 1].word if fault.at else None
    return {stage, "copy"} if isinstance(before, w.SendBlob) else {stage}


def test_requested_files_are_sent_once_and_completely(code: CodeArchive) -> None:
    host = FakeHost(steps(False, False, False), None, [])
    assert isinstance(_land(host, code), LaunchedAgent)
    lines, script, request, rest = bytes(host.heard).split(b"\n", 3)
    assert (lines, script) == (b"1", b"exit 0") and json.loads(request)["config"]["token"] == "c" * 64
    assert rest == BUNDLE + CODE + w.GO + b"\n"


@pytest.mark.parametrize("kind", list(Kind))
def test_answer_lost_after_release_is_agent_error(kind: Kind, code: CodeArchive) -> None:
    """The agent is up all the same: the next launch finds it so."""
    plan = steps(True, True, False)
    host = FakeHost(plan, Fault(len(plan) - 1, kind), [])
    result = _land(host, code)
    assert isinstance(result, LaunchError) and result.stage == "agent"
    again = _land(FakeHost(steps(True, True, was_up=host.keeper is KeeperState.UP), None, []), code)
    assert isinstance(again, LaunchedAgent) and again.was_up is (host.keeper is KeeperState.UP)


WORDS: dict[str, tuple[Kind, int, str]] = {
    "hangs in its shell": (Kind.HANGS, 0, "its login shell has not run the command for 20 s"),
    "ends in its shell": (Kind.EXITS, 0, "its login shell ended with code 3 before it ran the command"),
    "is cut": (Kind.BREAKS, 2, "the connection broke"),
    "talks": (Kind.TALKS, 1, "its login shell prints without end"),
    "fails": (Kind.FAILS, 3, "so it is"),
}


@pytest.mark.parametrize("name", WORDS)
def test_failure_reports_what_was_seen(name: str, code: CodeArchive) -> None:
    kind, at, words = WORDS[name]
    result = _land(FakeHost(steps(False, False, False), Fault(at, kind), [b"Welcome!"]), code)
    assert isinstance(result, LaunchError) and words in result.reason
    assert kind is Kind.FAILS or "it printed: " in result.reason


def test_host_output_before_hangup_is_the_reason(code: CodeArchive) -> None:
    """Its disk is full amid a copy: it says so and reads no more, while we still send."""

    @dataclass
    class Full(FakeHost):
        def send(self, data: bytes) -> None:
            if data[:1] == b"C":
                self.steps[self._said :] = [Step("copy", w.Failed("copy", "no space left", "free some", "permanent"))]
                raise BrokenPipeError
            super().send(data)

    result = _land(Full(steps(True, False, False), None, []), code)
    assert isinstance(result, LaunchError)
    assert (result.stage, result.reason, result.fix, result.retryable) == (
        "copy", "no space left", "free some", Retryable.PERMANENT,
    )  # fmt: skip


def test_missing_local_code_is_named(tmp_path: Path) -> None:
    path = tmp_path / "code.tar.gz"
    path.write_bytes(CODE)
    code = CodeArchive.read(path)
    path.unlink()
    result = _land(FakeHost(steps(True, False, False), None, []), code)
    assert isinstance(result, LaunchError) and result.stage == "copy" and str(path) in result.reason


def test_command_without_channel_is_a_connection_error(code: CodeArchive) -> None:
    """A command that gets no channel is the connection's own error."""

    class Refusing:
        run: Callable[[str], FakeHost]

        def __init__(self) -> None:
            def run(command: str) -> FakeHost:
                raise LaunchError("shell", "does not open a session")

            self.run = run

    with pytest.raises(LaunchError, match="does not open a session"):
        launch_agent(Refusing(), AgentLaunch(Launcher("", b""), code, fake_host.config()))
