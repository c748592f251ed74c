"""Transport connection to a host, by TCP or by a ProxyCommand, and the SSH handshake over it."""

from __future__ import annotations

import logging
import socket
import subprocess
import tempfile
import threading
from typing import Any

import paramiko
from paramiko.ssh_exception import IncompatiblePeer

from orchestrator.backends.api import LaunchError
from orchestrator.backends.ssh.connect.ssh_config import Target
from orchestrator.core.observations import LINE_CHARS_MAX, Retryable

HANDSHAKE_S_MAX = 15.0
PROXY_END_S_MAX = 2.0
OUTPUT_BYTES_MAX = 4096

_log = logging.getLogger("paramiko")
_log.addHandler(logging.NullHandler())
_log.setLevel(logging.CRITICAL + 1)  # the errors raised here say the same, with a fix
_log.propagate = False


class TemporaryRefusal(LaunchError):
    """An sshd that turns the connection away before the login: others use it, or it penalizes this address."""


class GreetedLine:
    """A line that keeps the first bytes it brings: paramiko drops what a host sends in place of its greeting."""

    def __init__(self, line: socket.socket | paramiko.Channel) -> None:
        self._line = line
        self.first = b""

    def recv(self, bytes_max: int) -> bytes:
        """Return the next bytes."""
        block = self._line.recv(bytes_max)
        if len(self.first) < OUTPUT_BYTES_MAX:
            self.first += block
        return block

    def __getattr__(self, name: str) -> Any:
        return getattr(self._line, name)


def describe_address(target: Target) -> str:
    """Return the address of a target, for messages."""
    return f"{target.hostname} port {target.port}"


def dial(target: Target) -> socket.socket:
    """Connect by TCP. Raises LaunchError("connect")."""
    try:
        line = socket.create_connection((target.hostname, target.port), target.connect_s_max)
    except (socket.gaierror, UnicodeError) as err:
        fix = f"check the name: `getent hosts {target.hostname}`; `HostName` for {target.host} in ~/.ssh/config gives it one"
        why_not = getattr(err, "strerror", None) or str(err)
        raise LaunchError("connect", f"no address is known for {target.hostname}: {why_not}", fix) from err
    except OSError as err:
        fix = f"check that the host is up and that sshd listens there: `ssh -v {target.port_option}{target.host} true`"
        if isinstance(err, TimeoutError):
            why = f"{describe_address(target)} did not answer within {target.connect_s_max:g} s"
            raise LaunchError("connect", why, fix) from err
        raise LaunchError("connect", f"{describe_address(target)}: {err.strerror or err}", fix) from err
    line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return line


class Proxy:
    """A ProxyCommand, run by a shell as OpenSSH runs it, and connected by a socket.

    Replaces paramiko's, which does not notice that the program has ended, and uses no shell.
    """

    def __init__(self, command: str) -> None:
        self.line, theirs = socket.socketpair()
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 -- it lives as long as the program
        with theirs:
            self._process = subprocess.Popen(
                ["/bin/sh", "-c", f"exec {command}"],
                stdin=theirs.fileno(),
                stdout=theirs.fileno(),
                stderr=self._errors,
                start_new_session=True,  # Ctrl-C must reach this process alone
            )

    def last_error(self) -> str:
        """Return the last line that the program wrote to standard error."""
        self._errors.seek(0)
        text = self._errors.read(OUTPUT_BYTES_MAX).decode(errors="replace").strip()
        return text.splitlines()[-1] if text else ""

    def close(self) -> None:
        """End the program."""
        self.line.close()
        self._errors.close()
        self._process.terminate()
        try:
            self._process.wait(PROXY_END_S_MAX)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def handshake(transport: paramiko.Transport, line: GreetedLine, target: Target, proxy: Proxy | None) -> None:
    """Wait until the connection is encrypted; the host key is not checked yet. Raises LaunchError("connect")."""
    done = threading.Event()
    transport.banner_timeout = 2 * HANDSHAKE_S_MAX  # the limit is counted here
    transport.start_client(event=done)
    if not done.wait(HANDSHAKE_S_MAX):
        why = f"{describe_address(target)} takes connections, but did not greet as sshd within {HANDSHAKE_S_MAX:.0f} s"
        fix = "its sshd hangs or is overloaded, another program listens there, or big packets get lost (MTU)"
        raise LaunchError("connect", why, fix)
    if transport.is_active():
        return
    failure = transport.get_exception()
    if isinstance(failure, IncompatiblePeer):
        fix = (
            "its sshd must offer one of each: curve25519 or ecdh, aes-gcm or aes-ctr, and a host key of ed25519, ecdsa or "
            "rsa-sha2"
        )
        raise LaunchError("connect", f"{describe_address(target)}: {failure}", fix, Retryable.PERMANENT)
    greeting = line.first.decode(errors="replace").splitlines()
    if len(greeting) == 1 and not greeting[0].startswith("SSH-"):
        why = f"{describe_address(target)} turned the connection away: {greeting[0][:LINE_CHARS_MAX]}"
        fix = (
            "in its sshd_config: `PerSourcePenalties` (failed logins from this address, from any user, count for some time) "
            "and `MaxStartups`"
        )
        raise TemporaryRefusal("connect", why, fix)
    if proxy is not None:
        why = f"the ProxyCommand `{target.proxy_command}` ended: {proxy.last_error() or 'no output'}"
        raise LaunchError("connect", why, f"try it by hand; `ssh -G {target.host}` shows where it comes from")
    why = f"{describe_address(target)} hung up before the login: {str(failure or '') or 'no reason given'}"
    raise LaunchError("connect", why, "check MaxStartups in its sshd_config, and firewalls that ban addresses")
