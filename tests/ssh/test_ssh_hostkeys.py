"""Host key check: accepts a host exactly when OpenSSH would, and each refusal names its fix."""

from __future__ import annotations

import base64
import socket
import subprocess
import threading
from dataclasses import replace
from pathlib import Path

import paramiko
import pytest

from orchestrator.backends.api import LaunchError
from orchestrator.backends.ssh.connect import known_hosts
from orchestrator.backends.ssh.connect.known_hosts import Policy, check, find_known_types
from orchestrator.backends.ssh.connect.ssh_config import Target, resolve
from orchestrator.core.observations import Retryable
from tests.support.sshd import fingerprint, make_key, needs_sshd, public

pytestmark = needs_sshd


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two ed25519 keys and an ECDSA one."""
    folder = tmp_path_factory.mktemp("made")
    keys = {name: make_key(folder / name) for name in ("one", "other")}
    return {**keys, "ecdsa": make_key(folder / "ecdsa", "ecdsa")}


@pytest.fixture
def known(home: Path) -> Path:
    """The user's known_hosts, not yet there."""
    return home / ".ssh" / "known_hosts"


def _key(path: Path) -> paramiko.PKey:
    kind, text = public(path).split()
    return paramiko.PKey.from_type_string(kind, base64.b64decode(text))


def _refusal(target: Target, path: Path, policy: Policy = "strict") -> LaunchError:
    with pytest.raises(LaunchError) as caught:
        check(target, _key(path), policy)
    assert (caught.value.stage, caught.value.retryable) == ("host key", Retryable.PERMANENT)
    return caught.value


@pytest.mark.parametrize(
    ("names", "port"),
    [
        ("gpu07", None),
        ("gpu01,gpu07,10.0.0.7", None),
        ("gpu*,!gpu08", None),
        ("[gpu07]:2200", 2200),
        ("gpu07", 2200),  # OpenSSH takes the bare name for any port
    ],
)
def test_known_key_is_accepted(made: dict[str, Path], known: Path, names: str, port: int | None) -> None:
    known.write_text(f"# mine\n\nnonsense\n{names} {public(made['one'])} a comment\n")
    check(resolve("gpu07", port=port), _key(made["one"]), "strict")


def test_a_hashed_name_is_found(made: dict[str, Path], known: Path) -> None:
    known.write_text(f"gpu07 {public(made['one'])}\n[gpu08]:2200 {public(made['other'])}\n")
    subprocess.run(["ssh-keygen", "-q", "-H", "-f", known], check=True, capture_output=True, timeout=10)
    assert "gpu07" not in known.read_text()
    check(resolve("gpu07"), _key(made["one"]), "strict")
    check(resolve("gpu08", port=2200), _key(made["other"]), "strict")


def test_unknown_key_is_refused_with_adding_command(made: dict[str, Path], known: Path) -> None:
    refusal = _refusal(resolve("gpu07", port=2200), made["one"])
    assert refusal.reason == f"its ED25519 key {fingerprint(made['one'])} is not in known_hosts"
    assert "-p 2200 -t ed25519 gpu07 >> ~/.ssh/known_hosts" in refusal.fix
    assert "ssh-keyscan " in refusal.fix
    assert not known.exists()


def test_unknown_key_behind_bastion_is_fixed_with_ssh(made: dict[str, Path]) -> None:
    target = replace(resolve("gpu07", user="ml"), jump=resolve("bastion"))
    assert "ssh -o StrictHostKeyChecking=ask -l ml gpu07 true" in _refusal(target, made["one"]).fix


@pytest.mark.parametrize("policy", ["strict", "accept-new"])
def test_changed_key_is_refused_with_its_line(made: dict[str, Path], known: Path, policy: Policy) -> None:
    """A changed key is refused, and its line in known_hosts is named."""
    known.write_text(f"other {public(made['one'])}\ngpu07 {public(made['one'])}\n")
    before = known.read_text()
    refusal = _refusal(resolve("gpu07"), made["other"], policy)
    assert "is not the one in ~/.ssh/known_hosts:2: " in refusal.reason
    assert fingerprint(made["other"]) in refusal.reason
    assert "ssh-keygen -f ~/.ssh/known_hosts -R gpu07 && ssh-keyscan" in refusal.fix
    assert known.read_text() == before


def test_changed_key_fix_removes_the_old_key(made: dict[str, Path], known: Path, home: Path) -> None:
    known.write_text(f"[gpu07]:2200 {public(made['one'])}\n")
    fix = _refusal(resolve("gpu07", port=2200), made["other"]).fix
    command = fix.partition(": ")[2].partition(" && ")[0]
    subprocess.run(["/bin/sh", "-c", command], check=True, capture_output=True, timeout=10)
    assert "is not in known_hosts" in _refusal(resolve("gpu07", port=2200), made["other"]).reason


@pytest.mark.parametrize("policy", ["strict", "accept-new"])
def test_key_of_another_type_is_not_new(made: dict[str, Path], known: Path, policy: Policy) -> None:
    """A key of another type than the known one is not treated as new."""
    known.write_text(f"gpu07 {public(made['ecdsa'])}\n")
    assert find_known_types(resolve("gpu07")) == ("ecdsa-sha2-nistp256",)
    assert "another type" in _refusal(resolve("gpu07"), made["one"], policy).reason


@pytest.mark.parametrize("policy", ["strict", "accept-new"])
def test_unrequestable_known_key_type_is_not_another_host(made: dict[str, Path], known: Path, policy: Policy) -> None:
    """A known key of a type that cannot be requested is not a sign of another host."""
    known.write_text("gpu07 ssh-mldsa44-ed25519 AAAA\n")
    refusal = _refusal(resolve("gpu07"), made["one"], policy)
    assert "reinstalled" not in f"{refusal.reason} {refusal.fix}"
    assert "known_hosts:1 is of the type ssh-mldsa44-ed25519, which orch cannot read" in refusal.reason
    assert "-t ed25519 gpu07 >> ~/.ssh/known_hosts" in refusal.fix
    known.write_text(f"gpu07 ssh-mldsa44-ed25519 AAAA\ngpu07 {public(made['one'])}\n")
    check(resolve("gpu07"), _key(made["one"]), policy)


def test_requestable_key_types_are_those_of_paramiko() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        offered = paramiko.Transport(ours).get_security_options().key_types
    wanted = {kind for name in offered for kind in (["ssh-rsa"] if name.startswith("rsa-") else [name])}
    assert wanted - {"ssh-dss"} == set(known_hosts.KEY_TYPES)


def test_revoked_key_is_refused_even_if_known(made: dict[str, Path], known: Path) -> None:
    known.write_text(f"gpu07 {public(made['one'])}\n@revoked * {public(made['one'])}\n")
    assert "revoked by ~/.ssh/known_hosts:2" in _refusal(resolve("gpu07"), made["one"], "accept-new").reason


def test_certificate_authority_is_mentioned_but_not_trusted(made: dict[str, Path], known: Path) -> None:
    """A certificate authority makes no key known and is mentioned."""
    known.write_text(f"@cert-authority gpu* {public(made['one'])}\n")
    assert find_known_types(resolve("gpu07")) == ()
    assert "@cert-authority" in _refusal(resolve("gpu07"), made["one"]).reason


def test_all_known_hosts_files_are_read(made: dict[str, Path], home: Path) -> None:
    (home / "all").write_text(f"gpu07 {public(made['one'])}\n")
    (home / ".ssh" / "config").write_text(f"Host *\n  GlobalKnownHostsFile /nowhere {home}/all\n")
    check(resolve("gpu07"), _key(made["one"]), "strict")


def test_an_alias_is_the_only_name_that_counts(made: dict[str, Path], known: Path, home: Path) -> None:
    (home / ".ssh" / "config").write_text("Host *\n  HostKeyAlias cluster\n")
    known.write_text(f"gpu07 {public(made['other'])}\ncluster {public(made['one'])}\n")
    check(resolve("gpu07", port=2200), _key(made["one"]), "strict")


def test_accept_new_keeps_key_for_next_time(made: dict[str, Path], known: Path) -> None:
    known.write_text("last line without an end")
    check(resolve("gpu07", port=2200), _key(made["one"]), "accept-new")
    check(resolve("gpu07", port=2200), _key(made["one"]), "strict")
    _refusal(resolve("gpu07", port=2200), made["other"], "accept-new")


def test_accept_new_writes_private_hashed_entries(made: dict[str, Path], known: Path, home: Path) -> None:
    (home / ".ssh").rmdir()
    target = replace(resolve("gpu07"), hash_known_hosts=True)
    check(target, _key(made["one"]), "accept-new")
    assert known.stat().st_mode & 0o777 == 0o600
    assert known.parent.stat().st_mode & 0o777 == 0o700
    assert known.read_text().startswith("|1|")
    found = subprocess.run(["ssh-keygen", "-F", "gpu07", "-f", known], capture_output=True, text=True, timeout=10)
    assert public(made["one"]).split()[1] in found.stdout


def test_many_threads_add_each_key_once(made: dict[str, Path], known: Path) -> None:
    targets = [replace(resolve(f"gpu{number % 8}"), hash_known_hosts=False) for number in range(32)]
    threads = [threading.Thread(target=check, args=(target, _key(made["one"]), "accept-new")) for target in targets]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert sorted(line.split()[0] for line in known.read_text().splitlines()) == [f"gpu{n}" for n in range(8)]


def test_accept_new_without_known_hosts_file_is_refused(made: dict[str, Path], home: Path) -> None:
    (home / ".ssh" / "config").write_text("Host *\n  UserKnownHostsFile /dev/null\n")
    assert "no file to store it in" in _refusal(resolve("gpu07"), made["one"], "accept-new").reason
