"""One SSH connection to a host: opened through its bastions, checked, logged in; then commands, forwards, files.

Whatever can go wrong while it is opened is a LaunchError that says at which stage. A connection is used by many
threads; none of them waits without a limit, and `close` ends all of their waits.
"""

from __future__ import annotations

import contextlib
import secrets
import shutil
import socket
import threading

import paramiko
from paramiko.common import cMSG_CHANNEL_REQUEST

from orchestrator.backends import LaunchError, Trouble
from orchestrator.backends.ssh import hostkeys
from orchestrator.backends.ssh.auth import authenticate
from orchestrator.backends.ssh.config import Target, has_own_home, home
from orchestrator.backends.ssh.dial import CONNECT_S_MAX, Proxy, dial, shake_hands, where
from orchestrator.backends.ssh.hostkeys import HostKey, Policy
from orchestrator.backends.ssh.keys import Ask, Keyring
from orchestrator.backends.ssh.remote import Remote
from orchestrator.backends.ssh.transport import Taken, Transport

__all__ = ["Connection", "Jumps", "Remote"]

CHANNEL_S_MAX = 15.0
FORWARD_S_MAX = 15.0
SFTP_S_MAX = 15.0
SFTP_STALL_S_MAX = 60.0
ALIVE_S_MAX = 5.0
NOISE_BYTES_MAX = 1 << 20

_LOOPBACK = "127.0.0.1"
_PROHIBITED = 1  # RFC 4254: administratively prohibited
_FAST_CIPHERS = (
    "aes128-gcm@openssh.com,aes256-gcm@openssh.com,chacha20-poly1305@openssh.com,aes128-ctr,aes256-ctr"
)
_SFTP_PLACES = "/usr/lib/openssh /usr/libexec/openssh /usr/lib/ssh /usr/libexec/ssh /usr/libexec /usr/lib /usr/local/libexec"
_SFTP_COMMAND = (
    "/bin/sh -c 'echo {mark}; "
    f"for d in {_SFTP_PLACES}; do if [ -x $d/sftp-server ]; then exec $d/sftp-server; fi; done; exec sftp-server'"
)


class Connection:
    """An open SSH connection to a host. `ended` is set when it is gone, whoever ended it."""

    def __init__(
        self, target: Target, transport: Transport, proxy: Proxy | None, key: str, key_is_ours: bool
    ) -> None:
        self.target = target
        self.ended = transport.ended
        self._transport = transport
        self._proxy = proxy
        self._key = key
        self._key_is_ours = key_is_ours

    @classmethod
    def open(cls, target: Target, *, host_keys: Policy, ask: Ask | None = None, jumps: Jumps) -> Connection:
        """Connect, check who it is, log in. Raises LaunchError."""
        line, proxy = _line(target, host_keys, ask, jumps)
        transport = Transport(line, hostkeys.known_kinds(target))
        try:
            shake_hands(transport, target, proxy)
            key = transport.get_remote_server_key()
            hostkeys.check(target, HostKey(key.get_name(), key.asbytes()), host_keys)
            name = authenticate(transport, target, jumps.keyring, ask)
            transport.settle()
        except BaseException as err:
            transport.close()
            line.close()
            if proxy is not None:
                proxy.close()
            if isinstance(err, paramiko.SSHException | EOFError | OSError):
                raise LaunchError("connect", f"{where(target)}: {err or type(err).__name__}") from err
            raise
        return cls(target, transport, proxy, name, jumps.keyring.was_opened(name))

    @property
    def is_open(self) -> bool:
        """Whether it is not known to be gone; `ended` may be set a moment later."""
        return self._transport.is_active()

    def run(self, command: str) -> Remote:
        """Run a command in the user's login shell there. Raises LaunchError("shell")."""
        return Remote(self._exec(command, "shell"))

    def forward(self, taken: Taken) -> int:
        """Forward a free port of the host's loopback to here; return it. Raises LaunchError("forward").

        `taken` gets each connection to it, in the transport's thread: it must hand it on.
        """
        host = self.target.host
        try:
            reply = self._transport.ask("tcpip-forward", (_LOOPBACK, 0), FORWARD_S_MAX)
        except (TimeoutError, ConnectionError) as err:
            raise LaunchError(
                "forward", f"{host} did not answer to a request for a port forward: {err}"
            ) from err
        if reply is None:
            raise LaunchError(
                "forward",
                f"sshd on {host} refuses remote port forwarding",
                "in its sshd_config: `AllowTcpForwarding yes` (or `remote`), no `DisableForwarding`, and a `PermitListen` "
                "that allows localhost:*; in authorized_keys: no `restrict` or `no-port-forwarding` before the key",
                Trouble.LASTING,
            )
        port = reply.get_int()
        self._transport.route(port, taken)
        return port

    def unforward(self, port: int) -> None:
        """Give a forwarded port back; connections over it stay."""
        self._transport.route(port, None)
        with contextlib.suppress(TimeoutError, ConnectionError):
            self._transport.ask("cancel-tcpip-forward", (_LOOPBACK, port), FORWARD_S_MAX)

    def sftp(self) -> paramiko.SFTPClient:
        """Open a file channel; where a shell's greeting spoils the usual one, by a command. Raises LaunchError("copy")."""
        try:
            return _sftp(self._request("subsystem", "sftp", "copy"))
        except _NoSftp:
            pass
        mark = f"orch-{secrets.token_hex(8)}"
        channel = self._exec(_SFTP_COMMAND.format(mark=mark), "copy")
        try:
            _skip_to(channel, mark.encode())
            return _sftp(channel)
        except _NoSftp as err:
            channel.close()
            fix = "install rsync on both ends, or set `Subsystem sftp internal-sftp` in its sshd_config"
            raise LaunchError(
                "copy", f"{self.target.host} has no sftp-server ({err})", fix, Trouble.LASTING
            ) from err

    def is_alive(self, answer_s_max: float = ALIVE_S_MAX) -> bool:
        """Ask the host for a sign of life; a connection that gives none in time is closed."""
        if not self.is_open:
            return False
        try:
            self._transport.ask("keepalive@openssh.com", None, answer_s_max)
        except (TimeoutError, ConnectionError):
            self.close()
            return False
        return True

    def close(self) -> None:
        """End the connection and all that goes over it; bastions stay."""
        self._transport.close()
        if self._proxy is not None:
            self._proxy.close()

    def openssh(self) -> tuple[str, ...] | None:
        """Return an OpenSSH client's argv (the host's name `target.host` is to follow) that leads to the same place.

        None where there is no ssh, or where it could not log in: with a key that only our passphrase opened.
        """
        target = self.target
        if shutil.which("ssh") is None or self._key_is_ours or (has_own_home() and target.jump is not None):
            return None
        options = [
            "BatchMode=yes",
            "StrictHostKeyChecking=yes",
            "ClearAllForwardings=yes",
            "ControlMaster=no",
        ]
        options += [
            f"ConnectTimeout={int(target.connect_s_max or CONNECT_S_MAX)}",
            f"Ciphers={_FAST_CIPHERS}",
        ]
        argv = ["ssh", "-T", "-x", "-a", "-p", str(target.port), "-l", target.user]
        if has_own_home():  # which ssh does not ask about
            config = home() / ".ssh" / "config"
            argv += ["-F", str(config) if config.is_file() else "none"]
            known = " ".join(f'"{path}"' for path in target.user_known_hosts)
            options += [f"UserKnownHostsFile={known}"] if known else []
            options += [f'IdentityFile="{path}"' for path in target.identity_files if path.is_file()]
        return (*argv, *(word for option in options for word in ("-o", option)))

    def reach(self, hostname: str, port: int, answer_s_max: float) -> paramiko.Channel:
        """Open a line from this host to another. Raises paramiko.SSHException."""
        origin = (_LOOPBACK, 0)
        return self._transport.open_channel("direct-tcpip", (hostname, port), origin, timeout=answer_s_max)

    def _exec(self, command: str, stage: str) -> paramiko.Channel:
        return self._request("exec", command, stage)

    def _request(self, kind: str, what: str, stage: str) -> paramiko.Channel:
        """Open a session for a command or subsystem, not waiting for a yes: a no closes the channel."""
        try:
            channel = self._transport.open_session(timeout=CHANNEL_S_MAX)
            message = paramiko.Message()
            message.add_byte(cMSG_CHANNEL_REQUEST)
            message.add_int(channel.remote_chanid)
            message.add_string(kind)
            message.add_boolean(True)
            message.add_string(what)
            self._transport._send_user_message(message)
        except (paramiko.SSHException, EOFError, OSError) as err:
            why = f"{self.target.host} opens no session: {err or type(err).__name__}"
            raise LaunchError(stage, why, "look at MaxSessions in its sshd_config if this stays") from err
        return channel


class Jumps:
    """What the connections of one process share: bastions, one connection to each, and the keys."""

    def __init__(self) -> None:
        self.keyring = Keyring()
        self._lock = threading.Lock()
        self._slots: dict[Target, _Slot] = {}

    def reach(self, target: Target, jump: Target, host_keys: Policy, ask: Ask | None) -> paramiko.Channel:
        """Open a line to `target` from the bastion `jump`. Raises LaunchError about whichever of them fails."""
        s_max = target.connect_s_max or CONNECT_S_MAX
        for again in (False, True):
            bastion = self._bastion(jump, host_keys, ask)
            try:
                return bastion.reach(target.hostname, target.port, s_max)
            except paramiko.ChannelException as err:
                raise _not_reached(target, jump, err) from err
            except (paramiko.SSHException, EOFError, OSError) as err:
                if again or bastion.is_alive():
                    why = f"from the bastion {jump.host}, {where(target)} did not answer: {err}"
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

    def _bastion(self, jump: Target, host_keys: Policy, ask: Ask | None) -> Connection:
        with self._lock:
            slot = self._slots.setdefault(jump, _Slot())
        failures = slot.failures
        with (
            slot.lock
        ):  # one thread opens it, the others wait: for the connection, or for the very same failure
            if slot.connection is not None and slot.connection.is_open:
                return slot.connection
            if slot.failure is not None and slot.failures != failures:
                raise _on_bastion(jump, slot.failure)
            try:
                slot.connection = Connection.open(jump, host_keys=host_keys, ask=ask, jumps=self)
            except LaunchError as err:
                slot.failures += 1
                slot.failure = err
                raise _on_bastion(jump, err) from err
            return slot.connection


class _Slot:
    """A bastion's connection, or how it failed last."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.connection: Connection | None = None
        self.failures = 0
        self.failure: LaunchError | None = None


class _NoSftp(Exception):
    """What came was not an SFTP server's answer."""


def _line(
    target: Target, host_keys: Policy, ask: Ask | None, jumps: Jumps
) -> tuple[socket.socket | paramiko.Channel, Proxy | None]:
    if target.jump is not None:
        return jumps.reach(target, target.jump, host_keys, ask), None
    if target.proxy_command:
        proxy = Proxy(target.proxy_command)
        return proxy.line, proxy
    return dial(target), None


def _not_reached(target: Target, jump: Target, err: paramiko.ChannelException) -> LaunchError:
    if err.code == _PROHIBITED:
        why = f"the bastion {jump.host} refuses to forward to {where(target)}"
        fix = f"in the sshd_config of {jump.host}: `AllowTcpForwarding yes` (or `local`), and a `PermitOpen` that allows it"
        return LaunchError("connect", why, fix, Trouble.LASTING)
    why = f"the bastion {jump.host} cannot reach {where(target)}: {err.text}"
    return LaunchError(
        "connect", why, f"is the host up? `ssh {jump.host} nc -zv {target.hostname} {target.port}`"
    )


def _on_bastion(jump: Target, err: LaunchError) -> LaunchError:
    return LaunchError(err.stage, f"the bastion {jump.host}: {err.reason}", err.fix, err.trouble)


class _Files(paramiko.SFTPClient):
    """Files on a host. Reading ahead ends quietly when the line is closed under it: paramiko's own thread would say so
    with a traceback on stderr, and whoever reads is told anyway."""

    def open(self, filename: str | bytes, mode: str = "r", bufsize: int = -1) -> paramiko.SFTPFile:
        """Open a file, as paramiko does."""
        file = super().open(filename, mode, bufsize)
        ahead = file._prefetch_thread  # type: ignore[attr-defined]

        def quietly(*given: object) -> None:
            with contextlib.suppress(OSError, EOFError, paramiko.SSHException):
                ahead(*given)

        file._prefetch_thread = quietly  # type: ignore[attr-defined]
        return file


def _sftp(channel: paramiko.Channel) -> paramiko.SFTPClient:
    channel.settimeout(SFTP_S_MAX)
    try:
        client = _Files(channel)
    except (paramiko.SFTPError, paramiko.SSHException, EOFError, OSError) as err:
        channel.close()
        raise _NoSftp(str(err) or "it ended") from err
    channel.settimeout(SFTP_STALL_S_MAX)
    return client


def _skip_to(channel: paramiko.Channel, mark: bytes) -> None:
    """Read what a shell's greeting says, up to the line that is the mark; after it the server waits for us."""
    channel.settimeout(SFTP_S_MAX)
    seen = b""
    while not seen.endswith(mark + b"\n"):
        try:
            more = channel.recv(NOISE_BYTES_MAX)
        except TimeoutError as err:
            raise _NoSftp("its shell did not answer") from err
        seen += more
        if not more or len(seen) > NOISE_BYTES_MAX:
            raise _NoSftp(f"its shell said {seen[-200:].decode(errors='replace').strip()!r}")
