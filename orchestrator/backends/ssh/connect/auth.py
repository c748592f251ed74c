"""Login to a host by public keys, offered one by one as OpenSSH does, until one is taken.

Keys alone: a password or a second factor cannot be typed for 64 hosts at 2 a.m.
"""

from __future__ import annotations

import functools
import shlex
import time
from collections.abc import Callable

import paramiko

from orchestrator.backends.api import LaunchError
from orchestrator.backends.ssh.connect.keys import AgentKey, Found, find, ssh_add
from orchestrator.backends.ssh.connect.ssh_config import Target
from orchestrator.core.observations import Retryable

AUTH_S_MAX = 30.0
OFFERS_MAX = 64


def authenticate(transport: paramiko.Transport, target: Target) -> None:
    """Log in. Raises LaunchError("auth")."""
    found = find(target)
    login = _Login(transport, target)
    if login.is_in_by(functools.partial(transport.auth_none, target.user)):  # tells what would let us in
        return
    for identity in found.offers[:OFFERS_MAX]:
        if "publickey" not in login.methods:
            break
        login.tried.append(identity.name)
        if login.is_in_by(functools.partial(transport.auth_publickey, target.user, identity.key)):
            return
    notes = [*found.notes]
    notes += [one.key.refusal for one in found.offers if isinstance(one.key, AgentKey) and one.key.refusal]
    raise _refused(target, login, found, "".join(f"; {note}" for note in notes))


class _Login:
    """A login under way: the keys that were offered, the methods that the host lets people in by, and whether the last
    key was right but is not enough."""

    def __init__(self, transport: paramiko.Transport, target: Target) -> None:
        self.tried: list[str] = []
        self.methods: list[str] = ["publickey"]
        self.is_partial = False
        self._transport = transport
        self._target = target
        self._deadline_s = time.monotonic() + AUTH_S_MAX

    def is_in_by(self, offer: Callable[[], list[str]]) -> bool:
        """Make an offer, and tell whether it let us in. Raises LaunchError when there is to be no other."""
        self._transport.auth_timeout = max(0.1, self._deadline_s - time.monotonic())
        self.is_partial = False
        try:
            further = offer()
            if further:
                self.methods, self.is_partial = further, True
        except paramiko.BadAuthenticationType as err:
            self.methods = err.allowed_types
        except (paramiko.SSHException, EOFError, OSError) as err:
            self._see_that_it_goes_on(err)
        return self._transport.is_authenticated()

    def _see_that_it_goes_on(self, err: Exception) -> None:
        """Tell a refusal, after which the next key may be offered, from the end of the login."""
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


def _refused(target: Target, login: _Login, found: Found, also: str) -> LaunchError:
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
    if found.locked:
        also = f"; the key {found.locked[0]} is encrypted and not in ssh-agent{also}"
    if tried:
        why = f"{who} takes none of the keys {', '.join(tried)}; it lets people in by {offers}{also}"
        fix = f"put a key there: {copy}; or name the right one or the right user in ~/.ssh/config"
    else:
        looked = ", ".join(str(path) for path in target.identity_files)
        why = f"there is no key for {who}: nothing in ssh-agent, nor {looked}{also}"
        fix = f"ssh-keygen -t ed25519 && {copy}"
    if found.locked:
        fix = ssh_add(target, found.locked[0])
    return LaunchError("auth", why, fix, Retryable.PERMANENT)
