"""Login with the keys that OpenSSH would use, and the advice where it fails."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import paramiko
import pytest
from paramiko.pkey import PublicBlob

from orchestrator.backends.api import LaunchError
from orchestrator.backends.ssh.connect import auth
from orchestrator.backends.ssh.connect.connection import Connection, JumpHosts
from orchestrator.backends.ssh.connect.ssh_config import Target, resolve
from orchestrator.core.observations import Retryable
from tests.support.sshd import LOOPBACK, WAIT_S, Desk, Sshd, make_key, needs_sshd, public

pytestmark = needs_sshd

PASSPHRASE = "open sesame"


@pytest.fixture
def agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A running ssh-agent without keys."""
    sock = tmp_path / "agent"
    said = subprocess.run(["ssh-agent", "-s", "-a", sock], capture_output=True, text=True, check=True, timeout=10)
    pid = int(said.stdout.partition("SSH_AGENT_PID=")[2].partition(";")[0])
    monkeypatch.setenv("SSH_AUTH_SOCK", str(sock))
    yield sock
    os.kill(pid, signal.SIGTERM)


def _target(server: Sshd, **changes: object) -> Target:
    return replace(resolve(LOOPBACK, port=server.port), **changes)  # type: ignore[arg-type]


def _enter(target: Target, jumps: JumpHosts) -> None:
    """Log in and see that commands run."""
    connection = Connection.open(target, host_keys="strict", jumps=jumps)
    try:
        assert connection.run("echo in").line(WAIT_S) == b"in"
    finally:
        connection.close()


def _refusal(target: Target, jumps: JumpHosts) -> LaunchError:
    with pytest.raises(LaunchError) as caught:
        Connection.open(target, host_keys="strict", jumps=jumps)
    assert caught.value.stage == "auth"
    return caught.value


def _add(key: Path) -> None:
    """Give a key to the agent; it is encrypted, and ssh-add asks a program for the passphrase."""
    asker = key.with_name("asker")
    asker.write_text(f"#!/bin/sh\necho '{PASSPHRASE}'\n")
    asker.chmod(0o700)
    env = {**os.environ, "SSH_ASKPASS": str(asker), "SSH_ASKPASS_REQUIRE": "force", "DISPLAY": ":0"}
    subprocess.run(["ssh-add", "-q", key], env=env, check=True, capture_output=True, timeout=10)


@pytest.mark.parametrize(("kind", "bits"), [("ed25519", None), ("rsa", 2048), ("ecdsa", 256), ("ecdsa", 521)])
@pytest.mark.parametrize("form", ["OpenSSH", "PEM"])
def test_each_kind_of_key_file_opens(desk: Desk, jumps: JumpHosts, kind: str, bits: int | None, form: str) -> None:
    key = make_key(desk.home / "key", kind, bits=bits)
    if form == "PEM" and kind != "ed25519":
        subprocess.run(
            ["ssh-keygen", "-q", "-p", "-N", "", "-m", "PEM", "-f", key],
            check=True,
            capture_output=True,
            timeout=10,
        )
        assert "OPENSSH" not in key.read_text()
    server = desk.start(authorized=public(key) + "\n")
    desk.know(server)
    _enter(_target(server, identity_files=(key,)), jumps)


@pytest.mark.parametrize(("kind", "bits"), [("ed25519", None), ("rsa", 2048), ("ecdsa", 384)])
def test_encrypted_key_is_used_through_agent(
    desk: Desk, jumps: JumpHosts, agent: Path, monkeypatch: pytest.MonkeyPatch, kind: str, bits: int | None
) -> None:
    key = make_key(desk.home / "key", kind, PASSPHRASE, bits)
    _add(key)
    server = desk.start(authorized=public(key) + "\n")
    desk.know(server)
    _enter(_target(server, identity_files=(key,)), jumps)
    _enter(_target(server, identity_files=()), jumps)
    monkeypatch.delenv("SSH_AUTH_SOCK")
    _enter(_target(server, identity_files=(), agent_socket=str(agent)), jumps)  # as `IdentityAgent` says


def test_encrypted_key_without_agent_suggests_ssh_add(desk: Desk, jumps: JumpHosts) -> None:
    """An encrypted key without an SSH agent gets ssh-add as its fix."""
    key = make_key(desk.home / "key", "ed25519", PASSPHRASE)
    server = desk.start(authorized=public(key) + "\n")
    desk.know(server)
    refusal = _refusal(_target(server, identity_files=(key,)), jumps)
    assert f"the key {key} is encrypted and not in ssh-agent" in refusal.reason
    assert refusal.fix == f'eval "$(ssh-agent)" && ssh-add {key}'
    assert refusal.retryable is Retryable.PERMANENT


def test_encrypted_key_without_agent_does_not_block_others(desk: Desk, jumps: JumpHosts) -> None:
    """An encrypted key without an SSH agent does not keep other keys from being tried."""
    locked = make_key(desk.home / "locked", "ed25519", PASSPHRASE)
    server = desk.start()
    desk.know(server)
    _enter(_target(server, identity_files=(locked, desk.key)), jumps)
    wrong = make_key(desk.home / "wrong")
    refusal = _refusal(_target(server, identity_files=(locked, wrong)), jumps)
    assert f"accepts none of the keys {wrong}; its login methods" in refusal.reason
    assert f"the key {locked} is encrypted and not in ssh-agent" in refusal.reason
    assert refusal.fix.endswith(f"ssh-add {locked}")


@pytest.mark.parametrize("harm", ["hangs", "refuses"])
def test_agent_refusing_to_sign_does_not_block_keys(
    desk: Desk, jumps: JumpHosts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, harm: str
) -> None:
    """An SSH agent that does not sign does not keep other keys from being tried."""
    monkeypatch.setattr(auth, "AGENT_S_MAX", 0.3)
    held = PublicBlob.from_file(f"{make_key(tmp_path / 'held')}.pub").key_blob
    server = desk.start(authorized=f"{public(desk.key)}\n{public(tmp_path / 'held')}\n")
    desk.know(server)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "odd"))
        listener.listen()
        threading.Thread(target=_be_an_odd_agent, args=(listener, held, harm == "hangs"), daemon=True).start()
        target = _target(server, identity_files=(desk.key,), agent_socket=str(tmp_path / "odd"))
        _enter(target, jumps)
        refusal = _refusal(replace(target, identity_files=()), jumps)
        listener.shutdown(socket.SHUT_RDWR)
    words = "does not answer" if harm == "hangs" else "refused to sign with held"
    assert words in refusal.reason
    assert "ssh-add the key again, without -h and -c" in refusal.fix and "ssh-copy-id" not in refusal.fix


def _be_an_odd_agent(listener: socket.socket, key: bytes, hangs: bool) -> None:
    """List one key, but do not sign with it."""
    silent = []
    with contextlib.suppress(OSError):
        while True:
            line, _ = listener.accept()
            silent.append(line)
            asked = line.recv(65536)[4:5]
            answer = paramiko.Message()
            answer.add_byte(b"\x0c" if asked == b"\x0b" else b"\x05")
            if asked == b"\x0b":
                answer.add_int(1)
                answer.add_string(key)
                answer.add_string("held")
            elif hangs:
                continue
            line.sendall(len(answer.asbytes()).to_bytes(4, "big") + answer.asbytes())


def test_wrong_key_error_names_user_keys_and_methods(desk: Desk, jumps: JumpHosts) -> None:
    """The error for a wrong key names the user, the keys and what the host offers."""
    key = make_key(desk.home / "key")
    server = desk.start()
    desk.know(server)
    refusal = _refusal(_target(server, identity_files=(key,)), jumps)
    assert f"{server.user}@{LOOPBACK} accepts none of the keys {key}" in refusal.reason
    assert "publickey" in refusal.reason
    assert f"ssh-copy-id -p {server.port} {server.user}@{LOOPBACK}" in refusal.fix
    assert refusal.retryable is Retryable.PERMANENT


def test_missing_key_is_reported(desk: Desk, jumps: JumpHosts) -> None:
    """Having no key at all is reported."""
    server = desk.start()
    desk.know(server)
    refusal = _refusal(_target(server, identity_files=(desk.home / "none",)), jumps)
    assert f"there is no key for {server.user}@{LOOPBACK}" in refusal.reason
    assert str(desk.home / "none") in refusal.reason


def test_too_many_keys_are_reported_with_a_fix(desk: Desk, jumps: JumpHosts) -> None:
    keys = tuple(make_key(desk.home / f"key{number}") for number in range(3))
    server = desk.start("MaxAuthTries 2")
    desk.know(server)
    refusal = _refusal(_target(server, identity_files=(*keys, desk.key)), jumps)
    assert "too many keys" in refusal.reason
    assert "IdentitiesOnly yes" in refusal.fix
    assert refusal.retryable is Retryable.PERMANENT


def test_agent_key_named_by_file_goes_first(desk: Desk, jumps: JumpHosts, agent: Path) -> None:
    """The agent's key that a file names is tried first, and with IdentitiesOnly it is the only one."""
    for number in range(3):
        _add(make_key(desk.home / f"key{number}", passphrase=PASSPHRASE))
    _add(desk.key)
    server = desk.start("MaxAuthTries 2")
    desk.know(server)
    _enter(_target(server, identity_files=(desk.key,)), jumps)
    desk.key.unlink()  # its public half is enough to name it
    _enter(_target(server, identity_files=(desk.key,), identities_only=True), jumps)
    refusal = _refusal(_target(server, identity_files=(desk.home / "key0",), identities_only=True), jumps)
    assert "key0" in refusal.reason
    assert "key1" not in refusal.reason


def test_dead_agent_is_mentioned_and_key_files_work(desk: Desk, jumps: JumpHosts) -> None:
    """A dead SSH agent is mentioned, and key files still work."""
    server = desk.start()
    desk.know(server)
    _enter(_target(server, agent_socket="/nowhere/agent"), jumps)
    refusal = _refusal(_target(server, agent_socket="/nowhere/agent", identity_files=()), jumps)
    assert "ssh-agent at /nowhere/agent does not answer" in refusal.reason


@pytest.mark.parametrize(("kind", "bits"), [("ed25519", None), ("rsa", 2048), ("ecdsa", 256)])
def test_certificate_works_beside_key_and_in_agent(
    desk: Desk, jumps: JumpHosts, agent: Path, kind: str, bits: int | None
) -> None:
    authority = make_key(desk.home / "authority")
    key = make_key(desk.home / "key", kind, bits=bits)
    server = desk.start(f"TrustedUserCAKeys {authority}.pub", authorized="")
    desk.know(server)
    sign = ["ssh-keygen", "-q", "-s", str(authority), "-I", "me", "-n", server.user, f"{key}.pub"]
    subprocess.run(sign, check=True, capture_output=True, timeout=10)
    _enter(_target(server, identity_files=(key,)), jumps)
    _add(key)
    _enter(_target(server, identity_files=()), jumps)
    _enter(_target(server, identity_files=(key,)), jumps)


def test_host_without_public_key_login_is_named(desk: Desk, jumps: JumpHosts) -> None:
    server = desk.start("PubkeyAuthentication no\nKbdInteractiveAuthentication no\nPasswordAuthentication yes")
    desk.know(server)
    refusal = _refusal(_target(server), jumps)
    assert "accepts no keys, only password" in refusal.reason


def test_second_factor_is_reported(desk: Desk, jumps: JumpHosts) -> None:
    server = desk.start("PasswordAuthentication yes\nAuthenticationMethods publickey,password")
    desk.know(server)
    refusal = _refusal(_target(server), jumps)
    assert f"accepts the key {desk.key}, but requires password as well" in refusal.reason


def test_unreadable_key_is_skipped(desk: Desk, jumps: JumpHosts) -> None:
    """A key that cannot be read is skipped."""
    (desk.home / "broken").write_text("-----BEGIN OPENSSH PRIVATE KEY-----\nAAAA\n-----END OPENSSH PRIVATE KEY-----\n")
    (desk.home / "binary").write_bytes(os.urandom(512))
    shutil.copy(desk.key, desk.home / "good")
    server = desk.start()
    desk.know(server)
    files = tuple(desk.home / name for name in ("broken", "binary", "missing", "good"))
    _enter(_target(server, identity_files=files), jumps)
