"""Targets as OpenSSH's configuration gives them."""

from __future__ import annotations

import getpass
from pathlib import Path

import pytest

from orchestrator.backends.api import LaunchError
from orchestrator.backends.ssh.connect import ssh_config
from orchestrator.backends.ssh.connect.ssh_config import resolve
from orchestrator.core.observations import Retryable
from tests.support.sshd import needs_sshd

pytestmark = needs_sshd


def _write(home: Path, text: str) -> None:
    (home / ".ssh" / "config").write_text(text)


def test_host_without_configuration_uses_its_name(home: Path) -> None:
    """Without an SSH configuration a host is reached by its name."""
    target = resolve("Node1.lab")
    assert (target.host, target.hostname, target.port) == ("Node1.lab", "node1.lab", 22)
    assert target.user == getpass.getuser()
    assert target.key_name == "node1.lab"
    assert home / ".ssh" / "id_ed25519" in target.identity_files
    assert target.user_known_hosts[0] == home / ".ssh" / "known_hosts"
    assert Path("/etc/ssh/ssh_known_hosts") in target.global_known_hosts
    assert target.jump is None
    assert target.proxy_command == ""


def test_configuration_options_are_applied(home: Path) -> None:
    _write(
        home,
        """
        Host gpu*
          HostName %h.lab
          User ml
          Port 2200
          IdentityFile ~/.ssh/%r_key
          IdentitiesOnly yes
          IdentityAgent none
          HostKeyAlias Cluster
          UserKnownHostsFile ~/.ssh/lab_hosts /etc/lab_hosts
          GlobalKnownHostsFile /etc/ssh/all
          ConnectTimeout 3
          ProxyCommand nc -X 5 %h %p
        """,
    )
    target = resolve("gpu07")
    assert (target.host, target.hostname, target.user, target.port) == ("gpu07", "gpu07.lab", "ml", 2200)
    assert target.identity_files == (home / ".ssh" / "ml_key",)
    assert target.identities_only
    assert target.agent_socket == ""
    assert target.key_name == "cluster"
    assert target.user_known_hosts == (home / ".ssh" / "lab_hosts", Path("/etc/lab_hosts"))
    assert target.global_known_hosts == (Path("/etc/ssh/all"),)
    assert target.connect_s_max == 3
    assert target.proxy_command == "nc -X 5 gpu07.lab 2200"
    assert resolve("cpu1").user == getpass.getuser()


def test_job_file_overrides_the_configuration(home: Path) -> None:
    _write(home, "Host *\n  User ml\n  Port 2200\n")
    target = resolve("gpu07", user="root", port=22)
    assert (target.user, target.port) == ("root", 22)


def test_other_port_is_part_of_known_hosts_name() -> None:
    assert resolve("gpu07", port=2200).key_name == "[gpu07]:2200"


def test_bastions_form_a_chain(home: Path) -> None:
    _write(home, "Host inner\n  ProxyJump a@first:2201,second\nHost second\n  User b\n  HostName second.lab\n")
    inner = resolve("inner")
    assert inner.jump is not None
    assert (inner.jump.hostname, inner.jump.user) == ("second.lab", "b")
    assert inner.jump.jump is not None
    assert (inner.jump.jump.hostname, inner.jump.jump.user, inner.jump.jump.port) == ("first", "a", 2201)
    assert inner.jump.jump.jump is None


def test_circular_bastions_are_refused(home: Path) -> None:
    """A circle of bastions is refused."""
    _write(home, "Host a\n  ProxyJump b\nHost b\n  ProxyJump a\n")
    with pytest.raises(LaunchError, match="in a loop") as caught:
        resolve("a")
    assert (caught.value.stage, caught.value.retryable) == ("config", Retryable.PERMANENT)


def test_broken_configuration_is_named_with_file_and_line(home: Path) -> None:
    _write(home, "Host *\n  Flavour vanilla\n")
    with pytest.raises(LaunchError, match=r"\.ssh/config.*line 2.*flavour") as caught:
        resolve("gpu07")
    assert caught.value.stage == "config"
    assert "ssh -G gpu07" in caught.value.fix


@pytest.mark.parametrize("host", ["", "-oProxyCommand=true", "two words"])
def test_invalid_host_name_is_never_passed_to_ssh(host: str) -> None:
    with pytest.raises(LaunchError, match="not a host name"):
        resolve(host)


def test_include_and_match_are_honoured(home: Path) -> None:
    (home / ".ssh" / "lab").write_text("Host gpu*\n  User ml\n")
    _write(home, f'Include {home}/.ssh/lab\nMatch host gpu07 exec "true"\n  Port 2207\n')
    assert (resolve("gpu07").user, resolve("gpu07").port) == ("ml", 2207)
    assert (resolve("gpu08").user, resolve("gpu08").port) == ("ml", 22)


def test_missing_ssh_client_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(LaunchError, match="there is no ssh client") as caught:
        resolve("gpu07")
    assert caught.value.fix == "install openssh-client"


def test_a_changed_configuration_is_read_again(home: Path) -> None:
    _write(home, "Host gpu*\n  User ml\n")
    assert resolve("gpu01").user == "ml"
    _write(home, "Host gpu*\n  User ai\n")
    assert resolve("gpu01").user == "ai"


def test_agent_is_from_environment_or_identity_agent(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The SSH agent is that of the environment, or the one that the configuration names."""
    monkeypatch.setenv("SSH_AUTH_SOCK", "/run/agent")
    monkeypatch.setenv("OTHER", "/run/other")
    assert resolve("gpu01").agent_socket == "/run/agent"
    _write(home, "Host *\n  IdentityAgent ${OTHER}/sock\n")
    assert resolve("gpu01").agent_socket == "/run/other/sock"


def test_home_folder_comes_from_environment(home: Path) -> None:
    assert ssh_config.home() == home
    assert ssh_config.overrides_home()
