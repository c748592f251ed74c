"""Is the cluster in a box what it says? Hosts are apart, faults are real and can be undone, and no trace is left."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from orchestrator.core.host import procfs
from orchestrator.core.host.procfs import Proc
from tests.support.cluster.box import PLACE, PREFIX, Box, inside, sweep
from tests.support.cluster.host import Host, end, wait_for
from tests.support.cluster.verbs import REPOSITORY

pytestmark = pytest.mark.soak

SSH = ("ssh", "-o", "BatchMode=yes")
PATIENT = ("-o", "ConnectTimeout=20")
IMPATIENT = ("-o", "ConnectTimeout=2")
"""For what will fail; an answer within two seconds is sure on a quiet machine only."""

REACH_S_MAX = 15.0

SLEEPER = ("sleep", "4321")


def ssh(box: Box, name: str, command: str, *options: str, user: str = "trainer") -> subprocess.CompletedProcess[str]:
    """Run a command on a host, from login, over SSH."""
    return box.login.run([*SSH, *options, *IMPATIENT, name, command], user=user, check=False)


def says(box: Box, name: str, command: str, *options: str) -> str:
    """Return what a command that must succeed prints over SSH."""
    done = ssh(box, name, command, *options, *PATIENT)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def reaches(host: Host, address: str, port: int = 22) -> bool:
    """Tell whether a TCP connection from a host comes through within a second."""
    code = f"import socket; socket.create_connection(({address!r}, {port}), 1.0)"
    return host.run([sys.executable, "-ISc", code], check=False).returncode == 0


def sleepers(host: Host) -> list[Proc]:
    return [one.proc for one in host.processes() if one.command == " ".join(SLEEPER)]


@pytest.fixture
def asleep(box: Box) -> Iterator[Host]:
    """Give a host on which trainer has left a process behind, started over SSH."""
    says(box, "node4", f"setsid -f {' '.join(SLEEPER)} </dev/null >/dev/null 2>&1")
    wait_for(lambda: sleepers(box.host("node4")), "the process")
    yield box.host("node4")
    box.heal()
    box.kill_all("node4", "trainer")


# --- hosts


def test_box_host_is_reachable_by_name_and_key(box: Box) -> None:
    """A user reaches every host by its name, and host keys are checked."""
    names = [host.name for host in box.nodes]
    assert names == [f"node{number}" for number in range(1, 9)]
    assert [says(box, name, "hostname") for name in names] == names
    assert says(box, "node1", "id -un; echo ~") == "trainer\n/home/trainer"
    assert box.login.run([*SSH, "node2", "id", "-un"]).stdout == "root\n"
    assert box.host("node3").run([*SSH, "node5", "hostname"], user="trainer").stdout == "node5\n"


def test_hosts_share_neither_files_nor_processes_nor_boots(box: Box) -> None:
    for place in ("/etc", "/root", "/tmp", "/run", "/dev/shm", "/home/trainer"):
        box.host("node1").run(["touch", f"{place}/mark"])
        seen = [host.name for host in box.hosts.values() if host.path(f"{place}/mark").exists()]
        assert (place, seen) == (place, ["node1"])
    assert not Path("/etc/mark").exists()
    boots = {says(box, host.name, "cat /proc/sys/kernel/random/boot_id") for host in box.nodes}
    assert len(boots) == len(box.nodes)
    count = "ls -d /proc/[0-9]* | wc -l"
    assert all(int(says(box, host.name, count)) < 15 for host in box.nodes)


def test_box_host_sees_this_python_and_repository(box: Box) -> None:
    code = "import orchestrator, torch; print(orchestrator.__file__)"
    found = says(box, "node2", f"cd {REPOSITORY} && {sys.executable} -c '{code}'")
    assert found == str(REPOSITORY / "orchestrator/__init__.py")


def test_box_hosts_can_share_home_folder() -> None:
    with Box(2, shared_home=True) as box:
        says(box, "node1", "echo hello > ~/note")
        assert says(box, "node2", "cat ~/note") == "hello"


def test_two_boxes_are_isolated(box: Box) -> None:
    """Two boxes do not reach each other."""
    with Box(1) as other:
        other.login.write("/home/trainer/other", "")
        assert not box.login.path("/home/trainer/other").exists()
        assert says(other, "node1", "cat /etc/hostname") == "node1"
        assert ssh(other, "node2", "true").returncode == 255
        other.cut("node1")
        assert says(box, "node1", "hostname") == "node1"


def test_box_command_timeout_kills_all_its_processes(box: Box) -> None:
    """A command that exceeds its time limit is ended with all processes that it started."""
    with pytest.raises(subprocess.TimeoutExpired):
        box.login.run(["sh", "-c", f"{' '.join(SLEEPER)} & wait"], limit_s=0.3)
    wait_for(lambda: not sleepers(box.login), "the end of it")


# --- wires


def test_cut_host_is_silent_until_healed(box: Box) -> None:
    """A host that is cut off does not answer, and answers again once it is healed."""
    box.cut("node3")
    done = ssh(box, "node3", "true")
    assert done.returncode == 255 and "timed out" in done.stderr
    assert box.host("node3").is_up
    box.heal("node3")
    assert says(box, "node3", "hostname") == "node3"


def test_cutting_two_hosts_leaves_other_links_open(box: Box) -> None:
    """Two hosts can be cut off from one another only."""
    one, other, third = box.host("node1"), box.host("node2"), box.host("node3")
    box.cut_between("node1", "node2")
    assert not reaches(one, other.address) and not reaches(other, one.address)
    assert reaches(third, one.address) and reaches(third, other.address) and reaches(box.login, one.address)
    box.heal()
    assert reaches(one, other.address)


def test_bastion_is_only_way_to_its_hosts(box: Box) -> None:
    """Hosts behind a bastion can be reached only through it."""
    box.bastion("node1")
    assert ssh(box, "node2", "true").returncode == 255
    assert says(box, "node1", "hostname") == "node1"
    assert says(box, "node2", "hostname", "-J", "node1") == "node2"


def test_a_second_network_is_the_nodes_own(box: Box) -> None:
    box.second_network(only=True)
    one, other = box.host("node1"), box.host("node2")
    assert reaches(one, "10.78.0.2") and not reaches(one, other.address)
    assert reaches(box.login, one.address) and not reaches(box.login, "10.78.0.2")
    box.heal()
    assert reaches(one, other.address) and not reaches(one, "10.78.0.2")


def test_every_host_has_the_same_docker_bridge(box: Box) -> None:
    box.docker_bridges()
    code = "import socket, sys; s = socket.create_server(('', 7000)); s.accept()[0].sendall(b'me')"
    listener = box.host("node1").popen([sys.executable, "-ISc", code])
    try:
        wait_for(lambda: reaches(box.host("node1"), "127.0.0.1", 7000) or listener.poll() is not None, "it")
        assert not reaches(box.host("node2"), "172.17.0.1", 7000)  # its own bridge, where nobody listens
    finally:
        end(listener)


def test_host_name_can_resolve_to_loopback(box: Box) -> None:
    """A host may resolve its own name to a loopback address."""
    box.name_is_loopback("node6")
    code = f"{sys.executable} -c 'import socket; print(socket.gethostbyname(socket.gethostname()))'"
    assert says(box, "node6", code) == "127.0.1.1"
    box.heal("node6")
    assert says(box, "node6", code) == box.host("node6").address


# --- power and processes


def test_power_loss_keeps_only_the_disk(box: Box, asleep: Host) -> None:
    """A host that loses power loses everything but its disk."""
    boot = says(box, "node4", "echo kept > ~/kept; cat /proc/sys/kernel/random/boot_id")
    box.second_network()
    procs = inside({asleep.namespaces["pid"]})
    box.power_off("node4")
    assert procs and not any(map(procfs.is_alive, procs)) and not asleep.is_up
    assert ssh(box, "node4", "true").returncode == 255
    box.power_on("node4")
    assert says(box, "node4", "cat ~/kept") == "kept"
    assert says(box, "node4", "cat /proc/sys/kernel/random/boot_id") != boot
    assert not sleepers(asleep)
    assert reaches(box.host("node1"), "10.78.0.4")


def test_all_processes_of_a_user_can_be_killed(box: Box, asleep: Host) -> None:
    asleep.run(["sh", "-c", f"setsid -f {' '.join(SLEEPER)} </dev/null >/dev/null 2>&1"])
    box.kill_all("node4", "trainer")
    assert len(sleepers(asleep)) == 1  # root's
    assert says(box, "node4", "hostname") == "node4"
    box.kill_all("node4", "root")
    assert says(box, "node4", "hostname") == "node4"
    assert not sleepers(asleep)


def test_a_frozen_host_answers_pings_only(box: Box, asleep: Host) -> None:
    box.freeze("node4")
    assert {_state(proc) for proc in sleepers(asleep)} == {"T"}
    assert ssh(box, "node4", "true").returncode == 255
    box.thaw("node4")
    wait_for(lambda: {_state(proc) for proc in sleepers(asleep)} == {"S"}, "life")
    assert says(box, "node4", "hostname") == "node4"


def _state(proc: Proc) -> str:
    stat = procfs.stat(proc.pid)
    return stat.state if stat else ""


# --- sshd


@pytest.fixture
def session(box: Box) -> Iterator[subprocess.Popen[bytes]]:
    """Give an open SSH session to node5 that echoes what it is told."""
    pipe = subprocess.PIPE
    process = box.login.popen([*SSH, "node5", "cat"], user="trainer", stdin=pipe, stdout=pipe, stderr=pipe)
    assert process.stdin and process.stdout
    process.stdin.write(b"up\n")
    process.stdin.flush()
    assert process.stdout.readline() == b"up\n"
    yield process
    end(process)
    box.kill_all("node5", "trainer")


def test_broken_session_ends_but_its_processes_continue(box: Box, session: subprocess.Popen[bytes]) -> None:
    """Broken sessions end, and what ran in them keeps running."""
    assert len(box.host("node5").sessions()) == 2
    box.break_ssh("node5")
    assert session.wait(REACH_S_MAX) == 255
    assert says(box, "node5", "hostname") == "node5"


def test_stalled_session_stays_open_without_output(box: Box, session: subprocess.Popen[bytes]) -> None:
    """A stalled session stays open and prints nothing."""
    assert session.stdin and session.stdout
    box.stall_ssh("node5")
    session.stdin.write(b"more\n")
    session.stdin.flush()
    os.set_blocking(session.stdout.fileno(), False)
    assert says(box, "node5", "hostname") == "node5"  # by now an answer would have come
    assert session.stdout.read() is None
    box.heal("node5")
    wait_for(lambda: session.stdout is not None and session.stdout.read() == b"more\n", "the answer")


def test_stopped_sshd_keeps_sessions_but_refuses_new_ones(box: Box, session: subprocess.Popen[bytes]) -> None:
    """Without sshd, open sessions continue and new ones are refused."""
    box.stop_sshd("node5")
    assert "refused" in ssh(box, "node5", "true").stderr
    assert session.poll() is None
    box.start_sshd("node5")
    assert says(box, "node5", "hostname") == "node5"
    box.restart_sshd("node5", sessions=True)
    assert session.wait(REACH_S_MAX) == 255


def test_hanging_sshd_sends_no_banner(box: Box) -> None:
    """A hanging sshd never identifies itself."""
    box.hang_sshd("node5")
    done = ssh(box, "node5", "true")
    assert done.returncode == 255 and "banner" in done.stderr


def test_a_host_key_can_change_or_be_unknown(box: Box) -> None:
    box.change_host_key("node7")
    assert "IDENTIFICATION HAS CHANGED" in ssh(box, "node7", "true", *PATIENT).stderr
    box.heal()
    assert says(box, "node7", "hostname") == "node7"
    box.forget_host_key("node7")
    assert "Host key verification failed" in ssh(box, "node7", "true", *PATIENT).stderr
    box.heal()
    assert says(box, "node7", "hostname") == "node7"


def test_forwarding_can_be_forbidden(box: Box) -> None:
    forward = ("-o", "ExitOnForwardFailure=yes", "-R", "127.0.0.1:0:127.0.0.1:22")
    assert says(box, "node7", "hostname", *forward) == "node7"
    box.no_forwarding("node7")
    assert ssh(box, "node7", "true", *forward).returncode == 255


# --- no trace


def test_nothing_is_left_of_a_box() -> None:
    before = Path("/proc/self/mountinfo").read_text()
    with Box(2) as box:
        spaces = {inode for host in box.hosts.values() for inode in host.namespaces.values()}
        state = box.state
        box.second_network()
        box.cut("node1")
        box.freeze("node2")
        procs = inside(spaces)
    assert len(procs) >= 6 and not any(map(procfs.is_alive, procs))
    assert not state.exists()
    assert Path("/proc/self/mountinfo").read_text() == before
    assert not any(name.startswith(("br", "veth", "n1")) for _, name in socket.if_nameindex())


OWNER = """
    import json, sys, time
    from tests.support.cluster.box import Box, inside
    with Box(2) as box:
        inner = inside({inode for host in box.hosts.values() for inode in host.namespaces.values()})
        procs = [[one.pid, one.start_ticks] for one in inner]
        print(json.dumps([str(box.state), procs]), flush=True)
        time.sleep(60)
"""


def test_box_dies_with_owner_and_is_swept_later(can_have_hosts: None) -> None:
    """A box dies with its owner, and the next box removes its leftovers."""
    owner = subprocess.Popen([sys.executable, "-c", textwrap.dedent(OWNER)], cwd=REPOSITORY, stdout=subprocess.PIPE)
    try:
        assert owner.stdout
        state, procs = json.loads(owner.stdout.readline())
    finally:
        owner.send_signal(signal.SIGKILL)
        owner.wait(REACH_S_MAX)
        if owner.stdout:
            owner.stdout.close()
    assert Path(state).parent == PLACE and Path(state).name.startswith(PREFIX)
    # By name, not by namespace: the kernel may have given another box the numbers of these.
    assert len(procs) >= 6
    wait_for(lambda: not any(procfs.is_alive(Proc(*proc)) for proc in procs), "the end of its hosts")
    sweep()
    assert not Path(state).exists()
