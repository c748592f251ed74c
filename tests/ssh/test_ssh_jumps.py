"""Hosts behind bastions and proxies, and errors that name the one that failed."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path

from orchestrator.backends.ssh.connect.connection import Connection, JumpHosts
from orchestrator.backends.ssh.connect.ssh_config import resolve
from orchestrator.core.observations import Retryable
from tests.support.sshd import (
    LOOPBACK,
    WAIT_S,
    Desk,
    Sshd,
    fingerprint,
    free_port,
    is_over,
    make_key,
    needs_sshd,
    refused,
    target_of,
)

pytestmark = needs_sshd


def test_bastion_is_connected_once_for_its_hosts(desk: Desk, jumps: JumpHosts) -> None:
    """A host is reached through a bastion that is connected to once."""
    bastion, inner = desk.start(), desk.start()
    desk.know(bastion, inner)
    desk.configure(
        f"Host bastion\n  HostName {LOOPBACK}\n  Port {bastion.port}\nHost inner*\n  ProxyJump bastion\n  HostName {LOOPBACK}\n"
    )
    opened: list[Connection] = []

    def enter(host: str) -> None:
        target = resolve(host, port=inner.port)
        opened.append(Connection.open(target, host_keys="strict", jumps=jumps))

    threads = [threading.Thread(target=enter, args=(f"inner{number}",)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    assert [connection.run("echo in").line(WAIT_S) for connection in opened] == [b"in"] * 6
    assert sum("Accepted publickey" in line for line in bastion.log) == 1
    for connection in opened:
        connection.close()


def test_bastion_and_host_are_both_checked(desk: Desk, jumps: JumpHosts, tmp_path: Path) -> None:
    bastion, inner = desk.start(), desk.start(host_keys=[make_key(tmp_path / "inner")])
    target = replace(target_of(inner.port), jump=target_of(bastion.port))
    refusal = refused(target, jumps, "host key")
    assert refusal.reason.startswith(f"the bastion {LOOPBACK}: its ED25519 key {fingerprint(bastion.host_keys[0])}")
    desk.know(bastion)
    refusal = refused(target, jumps, "host key")
    assert refusal.reason.startswith(f"its ED25519 key {fingerprint(inner.host_keys[0])}")
    assert "StrictHostKeyChecking=ask" in refusal.fix
    desk.know(inner)
    Connection.open(target, host_keys="strict", jumps=jumps).close()


def test_bastion_refusing_forwards_is_named(desk: Desk, jumps: JumpHosts) -> None:
    bastion, inner = desk.start("AllowTcpForwarding no"), desk.start()
    desk.know(bastion, inner)
    refusal = refused(replace(target_of(inner.port), jump=target_of(bastion.port)), jumps, "connect")
    assert f"the bastion {LOOPBACK} refuses to forward to {LOOPBACK} port {inner.port}" in refusal.reason
    assert refusal.retryable is Retryable.PERMANENT
    refusal = refused(replace(target_of(free_port()), jump=target_of(inner.port)), jumps, "connect")
    assert "cannot reach" in refusal.reason
    assert refusal.retryable is Retryable.TRANSIENT


def test_broken_bastion_is_reconnected(desk: Desk, jumps: JumpHosts) -> None:
    """A bastion whose connection broke is connected to again."""
    bastion, inner = desk.start(), desk.start()
    desk.know(bastion, inner)
    target = replace(target_of(inner.port), jump=target_of(bastion.port))
    first = Connection.open(target, host_keys="strict", jumps=jumps)
    bastion.cut_off()
    assert is_over(first)
    Connection.open(target, host_keys="strict", jumps=jumps).close()


def test_proxy_command_connects_and_ends_with_connection(desk: Desk, jumps: JumpHosts, server: Sshd) -> None:
    """A proxy command reaches the host and is ended with the connection."""
    relay = desk.home / "relay.py"
    relay.write_text(RELAY)
    desk.configure(
        f"Host inner\n  ProxyCommand python3 {relay} {LOOPBACK} %p {desk.home}/pid\n  HostKeyAlias [{LOOPBACK}]:{server.port}\n"
    )
    connection = Connection.open(resolve("inner", port=server.port), host_keys="strict", jumps=jumps)
    assert connection.run("echo in").line(WAIT_S) == b"in"
    pid = int((desk.home / "pid").read_text())
    connection.close()
    assert not Path(f"/proc/{pid}").exists()


def test_failing_proxy_command_shows_its_last_output(desk: Desk, jumps: JumpHosts) -> None:
    desk.configure("Host inner\n  ProxyCommand echo no route to the lab >&2; exit 1\n")
    refusal = refused(resolve("inner"), jumps, "connect")
    assert "no route to the lab" in refusal.reason


RELAY = """
import os, pathlib, socket, sys, threading

line = socket.create_connection((sys.argv[1], int(sys.argv[2])))
pathlib.Path(sys.argv[3]).write_text(str(os.getpid()))


def inward():
    while data := os.read(0, 65536):
        line.sendall(data)
    line.shutdown(socket.SHUT_WR)


threading.Thread(target=inward, daemon=True).start()
while data := line.recv(65536):
    os.write(1, data)
"""
