"""Does the host let us in? Keys are offered one by one, as OpenSSH does, until one is taken.

Only public keys: a password or a second factor cannot be said to 64 hosts at 2 a.m. A key whose private half is here
signs at once; one that needs the agent or a person is first asked about, so that nobody is bothered in vain.
"""

from __future__ import annotations

import queue
import shlex
import time
from collections.abc import Callable
from dataclasses import dataclass

import paramiko
from paramiko.auth_handler import AuthHandler
from paramiko.common import (
    MSG_SERVICE_ACCEPT,
    MSG_USERAUTH_BANNER,
    MSG_USERAUTH_FAILURE,
    MSG_USERAUTH_SUCCESS,
    cMSG_SERVICE_REQUEST,
    cMSG_USERAUTH_REQUEST,
)

from orchestrator.backends import LaunchError, Trouble
from orchestrator.backends.ssh.config import Target
from orchestrator.backends.ssh.keys import CERTIFICATE, Ask, Identity, Keyring, KeyUnusable, string
from orchestrator.backends.ssh.transport import Transport

AUTH_S_MAX = 20.0
OFFERS_MAX = 64

_MSG_PK_OK = 60
_RSA = ("rsa-sha2-512", "rsa-sha2-256")
_TOO_MANY = "too many authentication failures"

Answer = tuple[int, paramiko.Message]


@dataclass(frozen=True, slots=True)
class _Refusal:
    """The host said no: with what it lets people in, and whether the key was right but is not enough."""

    methods: tuple[str, ...]
    partial: bool


def authenticate(transport: Transport, target: Target, keyring: Keyring, ask: Ask | None) -> str:
    """Log in; return the name of the key that was taken. Raises LaunchError("auth")."""
    identities, notes = keyring.identities(target, ask)
    exchange = _Exchange(transport, target.user, time.monotonic() + AUTH_S_MAX)
    tried: list[str] = []
    refusal: _Refusal | None = None
    try:
        exchange.begin()
        for identity in identities[:OFFERS_MAX]:
            tried.append(identity.name)
            refusal = exchange.offer(identity)
            if refusal is None:
                return identity.name
            if "publickey" not in refusal.methods:
                break
        if refusal is None:
            refusal = exchange.offer_nothing()
            if refusal is None:
                return "no key at all"
    except KeyUnusable as err:
        why = f"{_who(target)} takes it, but {err}"
        raise LaunchError("auth", why, err.fix, Trouble.LASTING) from err
    except TimeoutError as err:
        why = f"{_who(target)} did not answer within {AUTH_S_MAX:.0f} s of logging in"
        fix = f"see where it hangs (PAM, LDAP, a home folder that is gone): {_by_hand(target)}"
        raise LaunchError("auth", why, fix) from err
    except ConnectionError as err:
        raise _hung_up(transport, target, tried) from err
    raise _refused(target, refusal, tried, notes)


class _Exchange:
    """The messages of logging in, RFC 4252, with a deadline for each answer: a person at the keyboard takes longer."""

    def __init__(self, transport: Transport, user: str, deadline: float) -> None:
        self._transport = transport
        self._user = user
        self._deadline = deadline
        self._answers: queue.SimpleQueue[Answer | None] = queue.SimpleQueue()
        transport.auth_handler = _Listener(transport, self._answers)

    def begin(self) -> None:
        """Ask for the service; its answer comes before that to the first offer."""
        message = paramiko.Message()
        message.add_byte(cMSG_SERVICE_REQUEST)
        message.add_string("ssh-userauth")
        self._send(message)

    def offer(self, identity: Identity) -> _Refusal | None:
        """Offer a key; None when it let us in."""
        algorithm = self._algorithm(identity.kind)
        if not identity.ready:
            self._send(self._request(identity, algorithm, signed=False))
            kind, message = self._answer()
            if kind == MSG_USERAUTH_FAILURE:
                return _refusal(message)
            if kind == MSG_USERAUTH_SUCCESS:
                return None
        request = self._request(identity, algorithm, signed=True)
        session = self._transport.session_id
        assert session is not None
        started = time.monotonic()
        made = identity.sign(string(session) + request.asbytes(), algorithm.removesuffix(CERTIFICATE))
        self._deadline += time.monotonic() - started
        request.add_string(made)
        self._send(request)
        return self._verdict()

    def offer_nothing(self) -> _Refusal | None:
        """Ask to be let in without anything, to hear what would."""
        self._send(self._head("none"))
        return self._verdict()

    def _head(self, method: str) -> paramiko.Message:
        message = paramiko.Message()
        message.add_byte(cMSG_USERAUTH_REQUEST)
        message.add_string(self._user)
        message.add_string("ssh-connection")
        message.add_string(method)
        return message

    def _request(self, identity: Identity, algorithm: str, signed: bool) -> paramiko.Message:
        message = self._head("publickey")
        message.add_boolean(signed)
        message.add_string(algorithm)
        message.add_string(identity.blob)
        return message

    def _algorithm(self, kind: str) -> str:
        """Return the algorithm to sign with: for RSA, whose own name means SHA-1, one of SHA-2 that the host knows."""
        suffix = CERTIFICATE if kind.endswith(CERTIFICATE) else ""
        if kind.removesuffix(CERTIFICATE) != "ssh-rsa":
            return kind
        known = (
            self._transport.server_extensions.get("server-sig-algs", b"").decode(errors="replace").split(",")
        )
        return next((name for name in _RSA if name in known), _RSA[0]) + suffix

    def _send(self, message: paramiko.Message) -> None:
        try:
            self._transport._send_message(message)
        except (EOFError, OSError, paramiko.SSHException) as err:
            raise ConnectionResetError(str(err)) from err

    def _verdict(self) -> _Refusal | None:
        kind, message = self._answer()
        return None if kind == MSG_USERAUTH_SUCCESS else _refusal(message)

    def _answer(self) -> Answer:
        while True:
            try:
                answer = self._answers.get(timeout=max(0.0, self._deadline - time.monotonic()))
            except queue.Empty:
                raise TimeoutError from None
            if answer is None:
                raise ConnectionResetError("it hung up")
            if answer[0] != MSG_SERVICE_ACCEPT:
                return answer


class _Listener(AuthHandler):
    """What the transport's thread calls: passes answers on to the thread that waits for them."""

    def __init__(self, transport: Transport, answers: queue.SimpleQueue[Answer | None]) -> None:
        super().__init__(transport)
        self._answers = answers
        self._let_in = transport._auth_trigger

    @property
    def _handler_table(self) -> dict[int, Callable[[paramiko.Message], None]]:
        kinds = (
            MSG_SERVICE_ACCEPT,
            MSG_USERAUTH_FAILURE,
            MSG_USERAUTH_SUCCESS,
            _MSG_PK_OK,
            MSG_USERAUTH_BANNER,
        )
        return {kind: self._taker(kind) for kind in kinds}

    def _taker(self, kind: int) -> Callable[[paramiko.Message], None]:
        def take(message: paramiko.Message) -> None:
            if kind == MSG_USERAUTH_SUCCESS:
                self.authenticated = True
                self._let_in()
            if kind != MSG_USERAUTH_BANNER:  # words for people, before the login
                self._answers.put((kind, message))

        return take

    def abort(self) -> None:
        """The connection ended."""
        self._answers.put(None)


def _refusal(message: paramiko.Message) -> _Refusal:
    return _Refusal(tuple(message.get_list()), message.get_boolean())


def _who(target: Target) -> str:
    return f"{target.user}@{target.hostname}"


def _by_hand(target: Target) -> str:
    return f"ssh -v {target.port_option}-l {shlex.quote(target.user)} {target.host} true"


def _hung_up(transport: Transport, target: Target, tried: list[str]) -> LaunchError:
    if _TOO_MANY in transport.farewell.lower():
        return LaunchError(
            "auth",
            f"{_who(target)} got too many keys and hung up after {len(tried)} ({', '.join(tried)})",
            f"name the right one: `IdentityFile …` and `IdentitiesOnly yes` for {target.host} in ~/.ssh/config",
            Trouble.LASTING,
        )
    said = f", saying {transport.farewell!r}" if transport.farewell else ""
    return LaunchError("auth", f"{_who(target)} hung up while logging in{said}", f"try {_by_hand(target)}")


def _refused(target: Target, refusal: _Refusal, tried: list[str], notes: list[str]) -> LaunchError:
    also = "".join(f"; {note}" for note in notes)
    offers = ", ".join(refusal.methods) or "nothing"
    copy = f"ssh-copy-id {target.port_option}{shlex.quote(target.user)}@{target.host}"
    if refusal.partial:
        why = f"{_who(target)} takes the key {tried[-1]}, but wants {offers} as well"
        return LaunchError("auth", why, "allow this key alone for this user there", Trouble.LASTING)
    if "publickey" not in refusal.methods:
        why = f"{_who(target)} takes no keys, only {offers}{also}"
        return LaunchError("auth", why, "set `PubkeyAuthentication yes` in its sshd_config", Trouble.LASTING)
    if not tried:
        looked = ", ".join(str(path) for path in target.identity_files)
        why = f"there is no key for {_who(target)}: nothing in ssh-agent, nor {looked}{also}"
        fix = f"ssh-keygen -t ed25519 && {copy}"
        return LaunchError("auth", why, fix, Trouble.LASTING)
    why = f"{_who(target)} takes none of the keys {', '.join(tried)}; it lets people in by {offers}{also}"
    fix = f"put a key there: {copy}; or name the right one or the right user in ~/.ssh/config"
    return LaunchError("auth", why, fix, Trouble.LASTING)
