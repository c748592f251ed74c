"""What if hosts, agents, ranks or the memory itself fail while checkpoints are in memory, over real sshd and without a shared disk?

Each test also sees what is left in the memory of hosts at most a minute after the job's end: nothing.
"""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from orchestrator.core.host import procfs
from orchestrator.supervisor.transfers.checkpoint_copies import INCOMING
from tests.cluster.test_ssh_memory import (
    STATES,
    assert_weights,
    expected,
    memory_left,
    resumed_step,
    safe_step,
    submit,
)
from tests.support.cluster.box import Box
from tests.support.cluster.desk import FAKE_TORCH, Desk, Job
from tests.support.cluster.host import Running

GONE_S_MAX = 60.0
"""How long anything may stay in the memory of hosts after the end of the job."""

SLOW_MBIT, LARGE = 40, str(1 << 18)
"""A wire, and blocks of 32 bytes for each rank, with which a copy to the neighbour takes seconds."""

OVERWRITING = STATES.replace(
    """        folder = checkpoints / f"step-{step - 1}"
        folder.mkdir(exist_ok=True)
""",
    """        folder = checkpoints
""",
).replace(
    """        part = folder / f".rank{rank}.pt.part"
        part.write_bytes(data)
        part.rename(folder / f"rank{rank}.pt")
""",
    """        if rank == 0:
            path = folder / "last.pt"
            target = path if os.environ["HOW"] == "in place" else folder / ".last.pt.part"
            halves = data[: len(data) // 2], data[len(data) // 2 :]
            with target.open("wb", 0) as file:
                file.write(halves[0])
                if attempt <= 2 and step - 1 == 60 * attempt:
                    os.write(1, b"in the middle of a write\\n")
                    time.sleep(0.5)
                    os.kill(os.getpid(), 9)
                file.write(halves[1])
            if target != path:
                os.replace(target, path)
""",
)
OVERWRITING = (
    OVERWRITING.replace('(Path(resume_from) / f"rank{rank}.pt").read_bytes()', "Path(resume_from).read_bytes()")
    .replace('start, state = 0, b"%d" % rank', 'start, state = 0, b"0"')
    .replace("sleep(0.03)", "sleep(0.1)")
)
"""Rank 0 saves the state of all under one name, and is killed in the middle of a write in the first two attempts."""


def wait_until_gone(job: Job, box: Box) -> None:
    job.wait_until(lambda: not memory_left(box), "memory without anything of the job", GONE_S_MAX)


def wait_for_attempt(job: Job, attempt: int) -> None:
    """Wait until an attempt runs, or has run."""
    job.until(
        lambda seen: seen["attempt"] > attempt or (seen["attempt"] == attempt and seen["state"] == "RUNNING"),
        f"attempt {attempt}",
    )


def assert_succeeded(job: Job, box: Box, steps: int, ranks: int) -> None:
    assert job.wait()["state"] == "SUCCEEDED", job.story()
    assert_weights(job, steps, ranks)
    wait_until_gone(job, box)


def allow_home(job: Job) -> None:
    (job.folder.checkpoints / INCOMING).unlink()


def forbid_home(job: Job) -> None:
    """Let nothing more arrive at home."""
    incoming = job.folder.checkpoints / INCOMING
    if incoming.exists():
        incoming.rename(incoming.with_name(".incoming-before"))
    incoming.write_text("nothing arrives")


def find(box: Box, name: str, words: str) -> list[Running]:
    """Return the processes of orch on a host that have these words in their command."""
    return [one for one in box.host(name).processes() if words in one.command]


def saved_at(job: Job) -> int:
    """Return the step of the newest complete checkpoint that the supervisor names."""
    known = job.seen().get("checkpoint")
    return int(known["step"] or 0) if known else 0


def is_coming(box: Box, name: str) -> bool:
    """Return whether a copy from another host is under way in the memory of a host."""
    text = box.host(name).run(["sh", "-c", "find /dev/shm/orch-*/.coming -type f -size +0c 2>/dev/null"], check=False)
    return bool(text.stdout.strip())


# Power


@pytest.mark.parametrize(
    "victims",
    [
        pytest.param(("node2", "node3"), id="two of the gang", marks=pytest.mark.soak),
        pytest.param(("node2", "node4"), id="one and its holder"),
    ],
)
def test_power_cut_of_two_hosts(desk: Desk, box: Box, victims: tuple[str, str]) -> None:
    """The next attempt begins from the newest checkpoint that is left, and newer ones are named with their hosts. The spare, node4,
    holds the copies."""
    job = submit(desk, 1_200, nodes=3, ssh={"hosts": "node[1-6]"}, spares=1)
    allow_home(job)
    job.wait_until(lambda: steps_at_home_so_far(job), "a checkpoint at home")
    forbid_home(job)
    home = max(steps_at_home_so_far(job))
    job.wait_until(lambda: safe_step(job) > home + 3 * 20, "newer ones that are safe")
    safe = safe_step(job)
    for name in victims:
        box.power_off(name)
    wait_for_attempt(job, 2)
    assert_succeeded(job, box, 1_200, 6)
    resumed, last = resumed_step(job, 2), job.seen()["attempt"]
    log = job.folder.supervisor_log.read_text()
    print("home", home, "safe", safe, "resumed", resumed, "attempts", last)
    print("\n".join(line for line in log.splitlines() if "only on" in line or "memory of" in line))
    if "node4" in victims:
        assert home <= resumed <= safe
        assert f"step-{safe}" in log and "only on" in log
        assert "node2" in log[log.index("only on") :].splitlines()[0]
    else:
        assert resumed >= safe


def steps_at_home_so_far(job: Job) -> list[int]:
    """Return the steps of what has arrived at home."""
    return [int(path.name[5:]) for path in job.folder.checkpoints.glob("step-*")]


@pytest.mark.soak
@pytest.mark.parametrize("spares", [0, 1], ids=["ring of two", "a spare holds"])
def test_holder_is_lost_in_the_middle_of_a_copy(desk: Desk, box: Box, spares: int) -> None:
    """Nothing that was safe before is lost, and the copies go on with another holder."""
    holder = "node3" if spares else "node2"
    fields: dict[str, Any] = {"env": {"STEPS": "600", "BLOCKS": LARGE}, "checkpoint": {"memory": "1G", "keep": 3}}
    job = submit(desk, 600, nodes=2, ssh={"hosts": "node[1-4]"}, spares=spares, **fields)
    job.wait_until(lambda: safe_step(job), "a checkpoint that is safe")
    box.slow_wire("node1", SLOW_MBIT)
    time.sleep(2.0)
    job.wait_until(lambda: is_coming(box, holder), "a copy under way")
    safe = safe_step(job)
    box.power_off(holder)
    box.heal("node1")
    if not spares:
        wait_for_attempt(job, 2)
        assert resumed_step(job, 2) >= safe
    job.wait_until(lambda: safe_step(job) > safe, "a newer checkpoint that is safe, at another holder")
    assert_succeeded(job, box, 600, 4)
    if spares:
        assert job.kinds() == [None]


@pytest.mark.soak
def test_one_node_alone_is_safe_only_at_home(desk: Desk, box: Box) -> None:
    job = submit(desk, 600, nodes=1, ssh={"hosts": "node[1-2]"})
    job.wait_until(lambda: saved_at(job) >= 60, "complete checkpoints")
    assert safe_step(job) == 0
    allow_home(job)
    job.wait_until(lambda: safe_step(job), "a checkpoint that is safe", 200.0)
    safe = safe_step(job)
    box.power_off("node1")
    job.until(lambda seen: seen["state"] == "RESTARTING", "word of the loss")
    box.power_on("node1")
    wait_for_attempt(job, 2)
    assert_succeeded(job, box, 600, 2)
    assert resumed_step(job, 2) >= safe > 0


# Processes


@pytest.mark.soak
@pytest.mark.parametrize("monitors", [False, True], ids=["agents", "agents and monitors"])
def test_agents_are_killed_while_copies_are_under_way(desk: Desk, box: Box, monitors: bool) -> None:
    """The job restarts from a checkpoint of which every file is left: at home, on disks, or in the memory of hosts."""
    fields: dict[str, Any] = {"env": {"STEPS": "600", "BLOCKS": LARGE}, "checkpoint": {"memory": "1G", "keep": 3}}
    job = submit(desk, 600, nodes=2, ssh={"hosts": "node[1-3]"}, spares=1, **fields)
    for victims in (["node1"], ["node2"], ["node1", "node2"]):
        attempt, before = job.seen()["attempt"], safe_step(job)
        job.wait_until(lambda before=before: safe_step(job) > before, "another checkpoint that is safe")
        safe = safe_step(job)
        for name in victims:
            kill_agents(box, name, monitors=monitors)
        wait_for_attempt(job, attempt + 1)
        resumed = resumed_step(job, attempt + 1)
        print("victims", victims, "safe", safe, "resumed", resumed)
        assert resumed >= safe or (len(victims) == 2 and resumed > 0), (victims, safe, resumed)
    assert_succeeded(job, box, 600, 4)


def kill_agents(box: Box, name: str, *, monitors: bool) -> None:
    """Kill a host's agent, and before it its monitor, which would start another, where that is to go, too."""
    host = box.host(name)
    found = {one.proc.pid: one.proc for one in find(box, name, "orch.pyz agent")}
    parents = {pid: about.ppid for pid in found if (about := procfs.stat(pid)) is not None}
    agents = [found[pid] for pid, parent in parents.items() if parent in found]
    assert len(agents) == 1 and len(found) == 2, found
    host.kill([*([one for one in found.values() if one not in agents] if monitors else []), *agents])


def test_supervisor_is_killed_while_copies_are_under_way(desk: Desk, box: Box) -> None:
    """The ranks go on, and so do the copies; then a rank is lost, and the attempt begins from the newest checkpoint."""
    job = submit(desk, 900, nodes=2, ssh={"hosts": "node[1-3]"}, spares=1)
    for _ in range(3):
        before = safe_step(job)
        job.wait_until(lambda before=before: safe_step(job) > before, "another checkpoint that is safe")
        job.kill_supervisor()
        job.status()
    before = safe_step(job)
    job.wait_until(lambda: safe_step(job) > before, "another checkpoint that is safe")
    assert job.seen()["attempt"] == 1
    safe = safe_step(job)
    box.host("node2").kill([one.proc for one in find(box, "node2", "train.py")][:1])
    wait_for_attempt(job, 2)
    assert resumed_step(job, 2) >= safe
    assert_succeeded(job, box, 900, 4)


# Memory that is small


def notices(job: Job) -> str:
    return job.folder.supervisor_log.read_text()


@pytest.mark.soak
def test_small_memory_of_one_host_is_said_and_its_disk_used(desk: Desk, box: Box) -> None:
    box.mount_small("node2", "/dev/shm", "64m")
    path = desk.write({"train.py": ""}, nodes=2, ssh={"hosts": "node[1-2]"}, checkpoint={"memory": "512M", "keep": 3})
    found = json.loads(desk.orch("check", path, "--json", check=False).stdout)
    assert [one["nodes"] for one in found if one["what"] == "memory" and one["severity"] == "warning"] == [["node2"]]
    job = submit(desk, 200, nodes=2, ssh={"hosts": "node[1-2]"})
    allow_home(job)
    job.wait_until(lambda: saved_at(job), "a checkpoint")
    assert "node2: checkpoints are written to disk:" in notices(job), job.story()
    assert not list(box.host("node2").path("/dev/shm").glob("orch-*/checkpoints/*"))
    box.host("node2").kill([one.proc for one in find(box, "node2", "train.py")][:1])
    wait_for_attempt(job, 2)
    assert_succeeded(job, box, 200, 4)
    assert resumed_step(job, 2) > 0


@pytest.mark.parametrize("how", ["by a checkpoint", pytest.param("by others", marks=pytest.mark.soak)])
def test_memory_that_is_full_in_the_middle_of_a_write(desk: Desk, box: Box, how: str) -> None:
    """The verdict says so, and the next attempt writes to disk."""
    steps, blocks = (60, 70 << 15) if how == "by a checkpoint" else (400, 1 << 16)
    fields: dict[str, Any] = {"env": {"STEPS": str(steps), "BLOCKS": str(blocks)}}
    box.mount_small("node2", "/dev/shm", "128m")
    job = submit(desk, steps, nodes=2, ssh={"hosts": "node[1-2]"}, checkpoint={"memory": "100M", "keep": 3}, **fields)
    if how == "by others":
        job.wait_until(lambda: safe_step(job), "a checkpoint that is safe")
        box.host("node2").run(["sh", "-c", "cat /dev/zero > /dev/shm/other"], check=False)
    wait_for_attempt(job, 2)
    verdict = job.why()[0]["verdict"]
    assert "checkpoint.memory" in json.dumps(verdict), verdict
    assert_succeeded(job, box, steps, 4)
    assert "node2: checkpoints are written to disk:" in notices(job)
    assert (resumed_step(job, 2) > 0) == (how == "by others")


# Names that are overwritten


@pytest.mark.soak
@pytest.mark.parametrize("how", ["in place", "os.replace"])
def test_overwritten_name_with_a_rank_killed_in_the_middle_of_a_write(desk: Desk, box: Box, how: str) -> None:
    """Never is a torn one used (the ranks would see it): each attempt begins from an older one, wherever it is."""
    job = desk.submit(
        {**FAKE_TORCH, "train.py": OVERWRITING}, nodes=2, ssh={"hosts": "node[1-2]"},
        checkpoint={"memory": "512M", "keep": 3}, env={"STEPS": "160", "BLOCKS": str(1 << 16), "HOW": how},
    )  # fmt: skip
    assert job.wait()["state"] == "SUCCEEDED", job.story()
    story = [(one["attempt"], one["resumed_from"]) for one in job.why()]
    print(story)
    assert len(story) == 3
    assert f"weights {expected(0, 160)}" in job.log(0, 3)
    assert story[1][1] and story[2][1]
    wait_until_gone(job, box)
