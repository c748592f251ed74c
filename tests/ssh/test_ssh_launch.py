"""Launch through real sshd, whatever its shell prints and wherever it is cut. Real servers, real agents."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from orchestrator.backends.api import LaunchError
from orchestrator.backends.ssh.connect.connection import Connection, JumpHosts, RemoteCommand
from orchestrator.backends.ssh.launch import CodeArchive, clean_up, launch_agent, redirect_agent
from orchestrator.core.jobdir import locks
from orchestrator.core.jobdir.layout import JobDir
from tests.support import fake_host, jobs
from tests.support.sshd import Desk, Sshd, enter

NOISY = 'ForceCommand /bin/sh -c \'echo Welcome; echo warning >&2; printf "no end"; eval "$SSH_ORIGINAL_COMMAND"\''


@pytest.fixture
def code(tmp_path: Path) -> CodeArchive:
    return fake_host.archive(tmp_path / "code.tar.gz", {**fake_host.FILES, "large": os.urandom(3_000_000)})


@pytest.fixture
def there(tmp_path: Path) -> Iterator[JobDir]:
    """The job's folder on the host; its agents are ended after the test."""
    yield JobDir(tmp_path / "sshd0" / "home" / ".orch" / "jobs" / jobs.ID)
    fake_host.end_all(tmp_path)


def test_agent_starts_through_noisy_shell_and_outlives_connection(
    desk: Desk, jumps: JumpHosts, code: CodeArchive, there: JobDir
) -> None:
    server = desk.start(NOISY)
    desk.know(server)
    connection = enter(server, jumps)
    landed = launch_agent(connection, fake_host.launch(code))
    assert landed.root == str(there.root) and "Welcome" in landed.notes[0]
    assert (there.code / "large").stat().st_size == 3_000_000
    connection.close()
    again = enter(server, jumps)
    assert redirect_agent(again, fake_host.launcher(), fake_host.config()).alive
    assert clean_up(again, fake_host.launcher(), fake_host.config().root, jobs.ID).kept_reason == ""
    assert not there.root.exists()


class Cut:
    """A connection whose session is killed on the host when so many words were heard."""

    def __init__(self, connection: Connection, server: Sshd, words: int) -> None:
        self._connection = connection
        self._server = server
        self._left = words

    def run(self, command: str) -> RemoteCommand:
        remote = self._connection.run(command)
        line = remote.line

        def cut(wait_s: float) -> bytes | None:
            if not self._left:
                for pid in self._server.family()[1:]:
                    if "sshd" in Path(f"/proc/{pid}/comm").read_text():
                        os.kill(pid, signal.SIGKILL)
            heard = line(wait_s)
            self._left -= bool(heard)
            return heard

        remote.line = cut  # type: ignore[method-assign]
        return remote


@pytest.mark.parametrize("words", [0, 2, 4, 6])
def test_interrupted_launch_leaves_no_agent(
    words: int, server: Sshd, jumps: JumpHosts, code: CodeArchive, there: JobDir
) -> None:
    """A launch that is interrupted before its agent was released leaves none."""
    with pytest.raises(LaunchError, match=r"broke|ended|session"):
        launch_agent(Cut(enter(server, jumps), server, words), fake_host.launch(code))
    fake_host.wait_gone(fake_host.keepers(there.root))
    assert not locks.is_held(there.node("node-0") / "agent.lock")
    assert not launch_agent(enter(server, jumps), fake_host.launch(code)).was_up
