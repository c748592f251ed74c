"""Login to a host by public keys, offered one by one as OpenSSH does, until the host accepts one.

Keys only: a supervisor has no terminal to ask for a password or a second factor.
"""

from __future__ import annotations

import functools
import shlex
import time
from collections.abc import Callable

import paramiko

from orchestrator.backends.api import LaunchError
from orchestrator.backends.ssh.connect.keys import AgentKey, OfferedKeys, find, ssh_add
from orchestrator.backends.ssh.connect.ssh_config import Target
from orchestrator.core.observations import Retryable

AUTH_S_MAX = 30.0
OFFERS_MAX = 64


def authenticate(transport: paramiko.Transport, target: Target) -> None:
    """Log in. Raises LaunchError("auth")."""
    keys = find(target)
    login = _Login(transport, target)
    # The answer to "none" names the methods that the host allows.
    if login.offer(functools.partial(transport.auth_none, target.user)):
        return
    for identity in keys.offers[:OFFERS_MAX]:
        if "publickey" not in login.methods:
            break
        login.tried.append(identity.name)
        if login.offer(functools.partial(transport.auth_publickey, target.user, identity.key)):
            return
    agent_keys = [identity.key for identity in keys.offers if isinstance(identity.key, AgentKey)]
    notes = [*keys.notes]
    notes += [key.refusal for key in agent_keys if key.refusal]
    raise _refused(target, login, keys, "".join(f"; {note}" for note in notes))


class _Login:
    """A login under way."""

    def __init__(self, transport: paramiko.Transport, target: Target) -> None:
        self.tried: list[str] = []  # names of the offered keys
        self.methods: list[str] = ["publickey"]  # that the host allows
        self.is_partial = False  # the last key was accepted, but is not enough
        self._transport = transport
        self._target = target
        self._deadline_s = time.monotonic() + AUTH_S_MAX

    def offer(self, attempt: Callable[[], list[str]]) -> bool:
        """Make an offer, and tell whether the login succeeded. Raises LaunchError when no other offer can follow."""
        self._transport.auth_timeout = max(0.1, self._deadline_s - time.monotonic())
        self.is_partial = False
        try:
            further = attempt()
            if further:
                self.methods, self.is_partial = further, True
        except paramiko.BadAuthenticationType as err:
            self.methods = err.allowed_types
        except (paramiko.SSHException, EOFError, OSError) as err:
            self._require_active(err)
        return self._transport.is_authenticated()

    def _require_active(self, err: Exception) -> None:
        """Return after a refusal, which allows the next offer. Raises LaunchError when the login has ended."""
        who, by_hand = _who(self._target), _by_hand(self._target)
        if time.monotonic() >= self._deadline_s:
            why = f"{who} did not answer within {AUTH_S_MAX:.0f} s of logging in"
            fix = f"see where it hangs (PAM, LDAP, a lost home folder, a key to be touched): {by_hand}"
            raise LaunchError("auth", why, fix) from err
        if self._transport.is_active():
            return
        if len(self.tried) < 2:
            raise LaunchError("auth", f"{who} hung up while logging in: {err}", f"try {by_hand}") from err
        raise LaunchError(
            "auth",
            f"{who} got too many keys and hung up after {len(self.tried)} ({', '.join(self.tried)})",
            f"name the right one: `IdentityFile …` and `IdentitiesOnly yes` for {self._target.host} in ~/.ssh/config",
            Retryable.PERMANENT,
        ) from err


def _who(target: Target) -> str:
    return f"{target.user}@{target.hostname}"


def _by_hand(target: Target) -> str:
    return f"ssh -v {target.port_option}-l {shlex.quote(target.user)} {target.host} true"


def _refused(target: Target, login: _Login, keys: OfferedKeys, also: str) -> LaunchError:
    who, tried = _who(target), login.tried
    offers = ", ".join(login.methods) or "nothing"
    copy = f"ssh-copy-id {target.port_option}{shlex.quote(target.user)}@{target.host}"
    if login.is_partial:
        why = f"{who} takes the key {tried[-1]}, but wants {offers} as well"
        return LaunchError("auth", why, "allow this key alone for this user there", Retryable.PERMANENT)
    if "publickey" not in login.methods:
        why = f"{who} takes no keys, only {offers}{also}"
        return LaunchError(
            "auth", why, "set `PubkeyAuthentication yes` in its sshd_config", Retryable.PERMANENT
        )
    if keys.locked:
        also = f"; the key {keys.locked[0]} is encrypted and not in ssh-agent{also}"
    if tried:
        why = f"{who} takes none of the keys {', '.join(tried)}; it lets people in by {offers}{also}"
        fix = f"put a key there: {copy}; or name the right one or the right user in ~/.ssh/config"
    else:
        files = ", ".join(str(path) for path in target.identity_files)
        why = f"there is no key for {who}: nothing in ssh-agent, nor {files}{also}"
        fix = f"ssh-keygen -t ed25519 && {copy}"
    if keys.locked:
        fix = ssh_add(target, keys.locked[0])
    return LaunchError("auth", why, fix, Retryable.PERMANENT)
