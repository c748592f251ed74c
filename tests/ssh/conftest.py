"""Fixtures of the tests over SSH: a home folder, keys and servers of their own."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from orchestrator.backends.ssh.connect.connection import Connection, JumpHosts
from tests.support.sshd import Desk, Sshd, enter, make_key, public, start_sshd


@pytest.fixture
def jumps() -> Iterator[JumpHosts]:
    """What the connections of a test share."""
    shared = JumpHosts()
    yield shared
    shared.close()


@pytest.fixture
def server(desk: Desk) -> Sshd:
    """A server that is known and lets us in."""
    made = desk.start()
    desk.know(made)
    return made


@pytest.fixture
def connection(server: Sshd, jumps: JumpHosts) -> Iterator[Connection]:
    """A connection to it."""
    opened = enter(server, jumps)
    yield opened
    opened.close()


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home without anything but an empty ~/.ssh, and no ssh-agent."""
    folder = tmp_path / "home"
    (folder / ".ssh").mkdir(parents=True, mode=0o700)
    monkeypatch.setenv("HOME", str(folder))
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    return folder


@pytest.fixture(scope="session")
def key_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Keys that are made once: the host's, and the one that servers know."""
    folder = tmp_path_factory.mktemp("keys")
    make_key(folder / "host_ed25519")
    make_key(folder / "login")
    return folder


@pytest.fixture
def desk(home: Path, key_store: Path, tmp_path: Path) -> Iterator[Desk]:
    """A home with a key, from which servers are started that know it."""
    for name in ("login", "login.pub"):
        shutil.copy(key_store / name, home / ".ssh" / name.replace("login", "id_ed25519"))
    servers: list[Sshd] = []

    def start(settings: str = "", authorized: str | None = None, host_keys: list[Path] | None = None) -> Sshd:
        folder = tmp_path / f"sshd{len(servers)}"
        lines = public(home / ".ssh" / "id_ed25519") + "\n" if authorized is None else authorized
        servers.append(start_sshd(folder, host_keys or [key_store / "host_ed25519"], lines, settings))
        return servers[-1]

    yield Desk(home, home / ".ssh" / "id_ed25519", start)
    for server in servers:
        server.stop()
