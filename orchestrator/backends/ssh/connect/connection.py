"""One SSH connection to a host: opened through its bastions, checked, logged in; then commands, forwards, files.

Each failure to open it is a LaunchError that names the stage. Many threads use a connection; each of their waits has a
limit, and `close` ends them all.
"""

from __future__ import annotations

import contextlib
import functools
import secrets
import socket
import threading
import time
from collections.abc import Callable
from concurrent import futures
from typing import TypeVar, cast

import paramiko

from orchestrator.backends.api import LaunchError
from orchestrator.backends.ssh.connect import known_hosts
from orchestrator.backends.ssh.connect.auth import authenticate
from orchestrator.backends.ssh.connect.dial import (
    GreetedLine,
    Proxy,
    TemporaryRefusal,
    describe_address,
    dial,
    handshake,
)
from orchestrator.backends.ssh.connect.remote_command import RemoteCommand
from orchestrator.backends.ssh.connect.ssh_config import Target, home, overrides_home
from orchestrator.core.errors import HostError
from orchestrator.core.observations import Retryable

__all__ = ["Connection", "JumpHosts", "RemoteCommand"]

CHANNEL_S_MAX = 15.0
FORWARD_S_MAX = 15.0
SFTP_S_MAX = 15.0
SFTP_STALL_S_MAX = 60.0
ALIVE_S_MAX = 5.0
NOISE_BYTES_MAX = 1 << 20

REFUSED_S = 21.0
"""How long to wait before the second and last try at a host that refuses for now: sshd counts 5 s for each failed login, and
refuses as soon as more than 15 s are left."""

IDLE_CHECK_S = 10.0
"""How often an idle connection's thread wakes up; paramiko's ten times a second is too much with hundreds of hosts."""

_LOOPBACK = "127.0.0.1"
_PROHIBITED = 1  # RFC 4254: administratively prohibited
_RSA = ("rsa-sha2-512", "rsa-sha2-256")
_FAST_CIPHERS = "aes128-gcm@openssh.com,aes256-gcm@openssh.com,chacha20-poly1305@openssh.com,aes128-ctr,aes256-ctr"
_SFTP_FOLDERS = (
    "/usr/lib/openssh /usr/libexec/openssh /usr/lib/ssh /usr/libexec/ssh /usr/libexec /usr/lib /usr/local/libexec"
)
_SFTP_COMMAND = (
    "/bin/sh -c 'echo {mark}; "
    f"for d in {_SFTP_FOLDERS}; do if [ -x $d/sftp-server ]; then exec $d/sftp-server; fi; done; exec sftp-server'"
)


T = TypeVar("T")
_Stream = socket.socket | paramiko.Channel


class Connection:
    """An open SSH connection to a host."""

    def __init__(self, target: Target, line: _Stream, transport: paramiko.Transport, proxy: Proxy | None) -> None:
        self.target = target
        self._line = line
        self._transport = transport
        self._proxy = proxy
        self._requests = threading.Lock()

    @classmethod
    def open(cls, target: Target, *, host_keys: known_hosts.Policy, jumps: JumpHosts) -> Connection:
        """Connect, check the host key, log in; once more where the host refuses for now. Raises LaunchError."""
        try:
            return cls._open(target, host_keys, jumps)
        except TemporaryRefusal:
            time.sleep(REFUSED_S)
            return cls._open(target, host_keys, jumps)

    @classmethod
    def _open(cls, target: Target, host_keys: known_hosts.Policy, jumps: JumpHosts) -> Connection:
        line, proxy = _open_stream(target, host_keys, jumps)
        greeted = GreetedLine(line)
        transport = paramiko.Transport(cast(socket.socket, greeted))
        try:
            _set_preferences(transport, known_hosts.find_known_types(target))
            handshake(transport, greeted, target, proxy)
            known_hosts.check(target, transport.get_remote_server_key(), host_keys)
            authenticate(transport, target)
            line.settimeout(IDLE_CHECK_S)
        except BaseException as err:
            transport.close()
            line.close()
            if proxy is not None:
                proxy.close()
            if isinstance(err, paramiko.SSHException | EOFError | OSError):
                raise LaunchError("connect", f"{describe_address(target)}: {str(err) or type(err).__name__}") from err
            raise
        return cls(target, line, transport, proxy)

    @property
    def is_open(self) -> bool:
        """Whether the connection is open, as far as is known."""
        return self._transport.is_active()

    def run(self, command: str) -> RemoteCommand:
        """Run a command in the user's login shell there. Raises LaunchError("shell")."""
        return RemoteCommand(self._exec(command, "shell"))

    def forward(self, taker: ChannelReceiver) -> int:
        """Forward a free port of the host's loopback to `taker`, one port at a time; return it. Raises
        LaunchError("forward")."""
        host = self.target.host

        def ask() -> int:
            return self._transport.request_port_forward(_LOOPBACK, 0, lambda channel, _origin, _there: taker(channel))

        try:
            return self._request(FORWARD_S_MAX, ask)
        except (TimeoutError, paramiko.SSHException, EOFError, OSError) as err:
            if isinstance(err, TimeoutError) or not self.is_open:
                raise LaunchError("forward", f"{host} did not answer to a request for a port: {err}") from err
            raise LaunchError(
                "forward",
                f"sshd on {host} refuses remote port forwarding",
                "in its sshd_config: `AllowTcpForwarding yes` (or `remote`), no `DisableForwarding`, and a `PermitListen` "
                "that allows localhost:*; in authorized_keys: no `restrict` or `no-port-forwarding` before the key",
                Retryable.PERMANENT,
            ) from err

    def sftp(self) -> paramiko.SFTPClient:
        """Open an SFTP channel; by a command where a shell's greeting spoils the subsystem. Raises LaunchError("copy")."""
        with contextlib.suppress(LaunchError, HostError):
            return _open_sftp(self._session("copy", lambda channel: channel.invoke_subsystem("sftp")))
        mark = f"orch-{secrets.token_hex(8)}"
        channel = self._exec(_SFTP_COMMAND.format(mark=mark), "copy")
        try:
            _skip_greeting(channel, mark.encode())
            return _open_sftp(channel)
        except HostError as err:
            channel.close()
            fix = "install rsync on both ends, or set `Subsystem sftp internal-sftp` in its sshd_config"
            raise LaunchError(
                "copy", f"{self.target.host} has no sftp-server ({err})", fix, Retryable.PERMANENT
            ) from err

    def is_alive(self, answer_s_max: float = ALIVE_S_MAX) -> bool:
        """Return whether the host answers; closes the connection when it does not answer in time."""
        if not self.is_open:
            return False
        try:
            self._request(answer_s_max, lambda: self._transport.global_request("keepalive@openssh.com"))
        except (TimeoutError, paramiko.SSHException, EOFError, OSError):
            self.close()
        return self.is_open

    def close(self) -> None:
        """End the connection and everything that goes over it; bastions stay."""
        if isinstance(self._line, socket.socket):
            with contextlib.suppress(OSError):
                self._line.shutdown(socket.SHUT_RDWR)  # wakes the thread that reads, which `close` does not
        self._transport.close()
        if self._proxy is not None:
            self._proxy.close()

    def openssh(self) -> tuple[str, ...] | None:
        """Return an OpenSSH client's argv, to be followed by `target.host`, that reaches the same host.

        None where ssh would look for the bastion's keys in another home folder.
        """
        target = self.target
        if overrides_home() and target.jump is not None:
            return None
        options = [
            "BatchMode=yes",
            "StrictHostKeyChecking=yes",
            "ClearAllForwardings=yes",
            "ControlMaster=no",
            "ControlPath=none",  # a master that has lost its network would hold up every copy
        ]
        options += [
            f"ConnectTimeout={int(target.connect_s_max)}",
            f"Ciphers={_FAST_CIPHERS}",
        ]
        argv = ["ssh", "-T", "-x", "-a", "-p", str(target.port), "-l", target.user]
        if overrides_home():  # ssh ignores HOME
            config = home() / ".ssh" / "config"
            argv += ["-F", str(config) if config.is_file() else "none"]
            files = " ".join(f'"{path}"' for path in target.user_known_hosts)
            options += [f"UserKnownHostsFile={files}"] if files else []
            options += [f'IdentityFile="{path}"' for path in target.identity_files if path.is_file()]
        return (*argv, *(word for option in options for word in ("-o", option)))

    def reach(self, hostname: str, port: int, answer_s_max: float) -> paramiko.Channel:
        """Open a channel from this host to another. Raises paramiko.SSHException."""
        origin = (_LOOPBACK, 0)
        return self._transport.open_channel("direct-tcpip", (hostname, port), origin, timeout=answer_s_max)

    def _exec(self, command: str, stage: str) -> paramiko.Channel:
        return self._session(stage, lambda channel: channel.exec_command(command))

    def _session(self, stage: str, begin: Callable[[paramiko.Channel], None]) -> paramiko.Channel:
        """Open a session, and begin what runs in it. Raises LaunchError."""
        host = self.target.host
        try:
            channel = self._transport.open_session(timeout=CHANNEL_S_MAX)
        except (paramiko.SSHException, EOFError, OSError) as err:
            why = f"{host} does not open a session: {str(err) or type(err).__name__}"
            raise LaunchError(stage, why, "check MaxSessions in its sshd_config if this persists") from err
        try:
            _call_within(CHANNEL_S_MAX, functools.partial(begin, channel))
        except (TimeoutError, paramiko.SSHException, EOFError, OSError) as err:
            channel.close()
            why = f"{host} opens a session but runs no command: {str(err) or type(err).__name__}"
            raise LaunchError(stage, why, f"check whether `ssh {host} true` returns") from err
        return channel

    def _request(self, s_max: float, ask: Callable[[], T]) -> T:
        """Make a global request: one at a time, or paramiko would mix up the answers."""

        def in_turn() -> T:
            with self._requests:
                return ask()

        return _call_within(s_max, in_turn)


def _call_within(s_max: float, call: Callable[[], T]) -> T:
    """Return what `call` returns, or raise TimeoutError: paramiko waits without a limit for some answers. After that
    the thread of `call` waits until the channel or the connection is closed."""
    answer: futures.Future[T] = futures.Future()

    def run() -> None:
        try:
            answer.set_result(call())
        except Exception as err:
            answer.set_exception(err)

    threading.Thread(target=run, name="answer", daemon=True).start()
    try:
        return answer.result(s_max)
    except futures.TimeoutError as err:  # another class than TimeoutError before Python 3.11
        raise TimeoutError(f"no answer within {s_max:g} s") from err


def _set_preferences(transport: paramiko.Transport, known_kinds: tuple[str, ...]) -> None:
    """Prefer host keys of the known types; and AES-GCM, which costs half of what other ciphers do."""
    options = transport.get_security_options()
    options.ciphers = tuple(sorted(options.ciphers, key=lambda name: "gcm" not in name))
    kinds = [name for kind in known_kinds for name in (_RSA if kind == "ssh-rsa" else (kind,))]
    order = (*(name for name in kinds if name in options.key_types), *options.key_types)
    options.key_types = tuple(dict.fromkeys(order))


class JumpHosts:
    """The bastions of one process, with one connection to each that all hosts behind it share."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._slots: dict[Target, _Slot] = {}

    def reach(self, target: Target, jump: Target, host_keys: known_hosts.Policy) -> paramiko.Channel:
        """Open a channel to `target` from the bastion `jump`. Raises LaunchError about the one that fails."""
        for again in (False, True):
            bastion = self._bastion(jump, host_keys)
            try:
                return bastion.reach(target.hostname, target.port, target.connect_s_max)
            except paramiko.ChannelException as err:
                raise _unreachable_error(target, jump, err) from err
            except (paramiko.SSHException, EOFError, OSError) as err:
                if again or bastion.is_alive():
                    why = f"from the bastion {jump.host}, {describe_address(target)} did not answer: {err}"
                    raise LaunchError("connect", why) from err
        raise AssertionError("the second try returns or raises")

    def close(self) -> None:
        """Close the bastions."""
        with self._lock:
            slots = list(self._slots.values())
            self._slots.clear()
        for slot in slots:
            if slot.connection is not None:
                slot.connection.close()

    def _bastion(self, jump: Target, host_keys: known_hosts.Policy) -> Connection:
        with self._lock:
            slot = self._slots.setdefault(jump, _Slot())
        failures = slot.failures
        with slot.lock:  # one thread opens it, the others wait for the connection or for the same failure
            if slot.connection is not None and slot.connection.is_open:
                return slot.connection
            if slot.failure is not None and slot.failures != failures:
                raise _jump_host_error(jump, slot.failure)
            try:
                slot.connection = Connection.open(jump, host_keys=host_keys, jumps=self)
            except LaunchError as err:
                slot.failures += 1
                slot.failure = err
                raise _jump_host_error(jump, err) from err
            return slot.connection


class _Slot:
    """A bastion's connection, or its last failure."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.connection: Connection | None = None
        self.failures = 0
        self.failure: LaunchError | None = None


def _open_stream(target: Target, host_keys: known_hosts.Policy, jumps: JumpHosts) -> tuple[_Stream, Proxy | None]:
    if target.jump is not None:
        return jumps.reach(target, target.jump, host_keys), None
    if target.proxy_command:
        proxy = Proxy(target.proxy_command)
        return proxy.line, proxy
    return dial(target), None


def _unreachable_error(target: Target, jump: Target, err: paramiko.ChannelException) -> LaunchError:
    if err.code == _PROHIBITED:
        why = f"the bastion {jump.host} refuses to forward to {describe_address(target)}"
        fix = f"in the sshd_config of {jump.host}: `AllowTcpForwarding yes` (or `local`), and a `PermitOpen` that allows it"
        return LaunchError("connect", why, fix, Retryable.PERMANENT)
    why = f"the bastion {jump.host} cannot reach {describe_address(target)}: {err.text}"
    return LaunchError("connect", why, f"is the host up? `ssh {jump.host} nc -zv {target.hostname} {target.port}`")


def _jump_host_error(jump: Target, err: LaunchError) -> LaunchError:
    return LaunchError(err.stage, f"the bastion {jump.host}: {err.reason}", err.fix, err.retryable)


def _open_sftp(channel: paramiko.Channel) -> paramiko.SFTPClient:
    channel.settimeout(SFTP_S_MAX)
    try:
        client = paramiko.SFTPClient(channel)
    except (paramiko.SFTPError, paramiko.SSHException, EOFError, OSError) as err:
        channel.close()
        raise HostError(str(err) or "it ended") from err
    channel.settimeout(SFTP_STALL_S_MAX)
    return client


def _skip_greeting(channel: paramiko.Channel, mark: bytes) -> None:
    """Skip a shell's greeting up to the line with the mark, after which the server waits for us."""
    channel.settimeout(SFTP_S_MAX)
    greeting = b""
    while not greeting.endswith(mark + b"\n"):
        try:
            more = channel.recv(NOISE_BYTES_MAX)
        except TimeoutError as err:
            raise HostError("its shell did not answer") from err
        greeting += more
        if not more or len(greeting) > NOISE_BYTES_MAX:
            raise HostError(f"its shell printed {greeting[-200:].decode(errors='replace').strip()!r}")


ChannelReceiver = Callable[[paramiko.Channel], None]
"""Receiver of connections to a forwarded port; called in the transport's thread, so it must hand them on."""
