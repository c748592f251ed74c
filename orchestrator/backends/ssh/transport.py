"""What of paramiko's transport is not as many connections at once need it?

Its choice of algorithms, waits without a limit, answers to global requests that get mixed up between threads, farewells
that are thrown away, ten wake-ups a second on an idle line, and words on standard error. All of it is mended here.
"""

from __future__ import annotations

import collections
import contextlib
import logging
import socket
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

import paramiko
from paramiko.common import cMSG_GLOBAL_REQUEST
from paramiko.packet import Packetizer

WINDOW_BYTES = 4 << 20
HANDSHAKE_CHECK_S = 0.1
IDLE_CHECK_S = 10.0
KEEPALIVE_IDLE_S, KEEPALIVE_EACH_S, KEEPALIVES_MAX = 60, 15, 4

Taken = Callable[[paramiko.Channel], None]
"""What gets a connection that came to a forwarded port; called in the transport's thread, so it hands it on."""

_log = logging.getLogger("paramiko")
_log.addHandler(logging.NullHandler())
_log.setLevel(logging.CRITICAL + 1)  # all that it says is said again by us, to the right person
_log.propagate = False

_FAST_CIPHERS = ("aes128-gcm@openssh.com", "aes256-gcm@openssh.com", "aes128-ctr", "aes256-ctr", "aes192-ctr")
_FAST_KEX = ("curve25519-sha256@libssh.org",)
_RSA = ("rsa-sha2-512", "rsa-sha2-256")
_THEIRS = vars(paramiko.Transport)


class Socket(socket.socket):
    """A socket whose `close` wakes up the thread that reads from it."""

    def close(self) -> None:
        """Shut the line down, then close."""
        with contextlib.suppress(OSError):
            self.shutdown(socket.SHUT_RDWR)
        super().close()


class _Packets(Packetizer):
    def start_handshake(self, timeout: float) -> None:
        """Start no timer thread, which would outlive a handshake that fails: the one who waits has a limit."""


if TYPE_CHECKING:

    class _Theirs(paramiko.Transport):
        """What paramiko's own parts use of it, but its type stubs do not tell."""

        server_extensions: dict[str, bytes]

        def _send_message(self, data: paramiko.Message) -> None: ...
        def _send_user_message(self, data: paramiko.Message) -> None: ...
        def _auth_trigger(self) -> None: ...
        def _parse_newkeys(self, m: paramiko.Message) -> None: ...
else:
    _Theirs = paramiko.Transport


class Transport(_Theirs):
    """A client's transport. `farewell` is what the other side said when it hung up, `ended` is set when it is over."""

    _preferred_ciphers = tuple(name for name in _FAST_CIPHERS if name in _THEIRS["_cipher_info"])
    _preferred_kex = (
        *(name for name in _FAST_KEX if name in _THEIRS["_kex_info"]),
        *(name for name in _THEIRS["_preferred_kex"] if name not in _FAST_KEX),
    )
    _active_check_timeout = HANDSHAKE_CHECK_S

    def __init__(self, sock: socket.socket | paramiko.Channel, known_kinds: tuple[str, ...]) -> None:
        super().__init__(sock, default_window_size=WINDOW_BYTES, packetizer_class=_Packets)
        self.farewell = ""
        self.ended = threading.Event()
        self._kinds = known_kinds
        self._sending = threading.Lock()
        self._asked: collections.deque[_Question] = collections.deque()
        self._routes: dict[int, Taken] = {}
        self._late: list[paramiko.Message] = []
        self._tcp_handler = self._route

    @property
    def preferred_keys(self) -> tuple[str, ...]:
        """The host key algorithms, those of known types first; no certificates, which are not read."""
        known = [name for kind in self._kinds for name in (_RSA if kind == "ssh-rsa" else (kind,))]
        offered: tuple[str, ...] = _THEIRS["_preferred_keys"]
        return tuple(dict.fromkeys((*(name for name in known if name in offered), *offered)))

    def settle(self) -> None:
        """Wake up rarely from now on: the handshake is over, and `close` wakes up whoever reads."""
        self.sock.settimeout(IDLE_CHECK_S)

    def run(self) -> None:
        """Read until the end; then nobody waits in vain for an answer."""
        try:
            super().run()
        finally:
            self.ended.set()
            while self._asked:
                self._answered(None)

    def ask(self, kind: str, data: tuple[str, int] | None, answer_s_max: float) -> paramiko.Message | None:
        """Make a global request; return the answer, None for a refusal. Raises TimeoutError, ConnectionError.

        The request is sent by a thread of its own, since a line that takes no more bytes would hold the caller up.
        """
        message = paramiko.Message()
        message.add_byte(cMSG_GLOBAL_REQUEST)
        message.add_string(kind)
        message.add_boolean(True)
        if data is not None:
            message.add_string(data[0])
            message.add_int(data[1])
        question = _Question()
        threading.Thread(target=self._send, args=(question, message), daemon=True, name=f"ask {kind}").start()
        if not question.done.wait(answer_s_max):
            raise TimeoutError(f"no answer within {answer_s_max:g} s")
        if question.reply is None and self.ended.is_set():
            raise ConnectionResetError("the connection ended")
        return question.reply

    def route(self, port: int, taken: Taken | None) -> None:
        """Give connections that come to a forwarded port to `taken`; None: to nobody."""
        if taken is None:
            self._routes.pop(port, None)
        else:
            self._routes[port] = taken

    def _send(self, question: _Question, message: paramiko.Message) -> None:
        with self._sending:  # answers come in the order of the questions
            self._asked.append(question)
            with contextlib.suppress(EOFError, OSError, paramiko.SSHException):
                self._send_user_message(message)
        if self.ended.is_set():
            question.answer(None)

    def _route(self, channel: paramiko.Channel, _origin: tuple[str, int], there: tuple[str, int]) -> None:
        taken = self._routes.get(there[1])
        if taken is None:
            channel.close()
        else:
            taken(channel)

    def _send_user_message(self, data: paramiko.Message) -> None:
        """Wait for the end of a key exchange, but never in the thread that has to bring it about."""
        if threading.current_thread() is self and not self.clear_to_send.is_set():
            self._late.append(data)
        else:
            super()._send_user_message(data)

    def _parse_newkeys(self, m: paramiko.Message) -> None:
        super()._parse_newkeys(m)
        late, self._late = self._late, []
        for message in late:
            self._send_message(message)

    def _parse_request_success(self, m: paramiko.Message) -> None:
        self._answered(m)

    def _parse_request_failure(self, m: paramiko.Message) -> None:
        self._answered(None)

    def _answered(self, message: paramiko.Message | None) -> None:
        if self._asked:
            self._asked.popleft().answer(message)

    def _parse_disconnect(self, m: paramiko.Message) -> None:
        m.get_int()
        self.farewell = m.get_text().strip()


class _Question:
    """A global request on its way."""

    def __init__(self) -> None:
        self.done = threading.Event()
        self.reply: paramiko.Message | None = None

    def answer(self, reply: paramiko.Message | None) -> None:
        self.reply = reply
        self.done.set()


def tuned(sock: socket.socket) -> Socket:
    """Return the same line as one that wakes its reader on close, sends at once, and notices a dead peer some day."""
    line = Socket(fileno=sock.detach())
    if line.family in (socket.AF_INET, socket.AF_INET6):
        line.setsockopt(
            socket.IPPROTO_TCP, socket.TCP_NODELAY, 1
        )  # else two stalls of 41 ms in every handshake
        line.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        line.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_IDLE_S)
        line.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, KEEPALIVE_EACH_S)
        line.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, KEEPALIVES_MAX)
    return line
