"""Random orders of what may happen to a job whose checkpoints are in memory, and what must be so at its end."""

from __future__ import annotations

import tempfile
from pathlib import Path

from orchestrator.core.checkpoints import disk
from orchestrator.supervisor.transfers.checkpoint_copies import shares_files
from tests.support.copy_state import RUN, WHOLE
from tests.support.copy_story import Story
from tests.support.copy_world import Host, patched

EVENTS = range(60, 200)
ROUNDS_MAX = 80
PAUSE_S = 40.0


def play(seed: int) -> Story:
    """Play one story in a folder of its own. Raises AssertionError if something is so that must not be."""
    trouble, hosts = dict[str, int](), dict[str, Host]()
    with tempfile.TemporaryDirectory(prefix="orch-copies-", dir="/dev/shm") as folder, patched(hosts, trouble):
        story = Story(Path(folder), seed, trouble, hosts)
        try:
            for _ in range(story.random.choice(EVENTS)):
                act(story)
                story.check()
            finish(story)
        finally:
            story.desk.close()
            for host in hosts.values():
                host.die()
        return story


def act(story: Story) -> None:
    """One thing happens. Most often work goes on; now and then something breaks."""
    chance, rng = story.random.random(), story.random
    alive = [name for name, host in story.hosts.items() if host.is_alive]
    name = rng.choice(alive) if alive else ""
    host = story.hosts.get(name)
    if chance < 0.006 and name:
        story.note("kill", name)
        story.kill(name)
    elif chance < 0.012 and name:
        story.note("lose", name)
        story.lose_host(name)
    elif chance < 0.02 and name:
        story.note("cut", name)
        story.cut(name)
    elif chance < 0.025:
        story.note("restart")
        story.restart()
    elif chance < 0.031 and host is not None:
        story.note("low", name)
        host.is_low = not host.is_low
    elif chance < 0.037 and story.phase == RUN:
        story.note("ranks fail")
        story.end_attempt()
    elif chance < 0.047 and host is not None:
        story.note("script deletes", name)
        story.delete_old(name)
    elif chance < 0.07:
        story.at += PAUSE_S
    elif chance < 0.12:
        lost = [name for name, host in story.hosts.items() if not host.is_alive]
        if lost and rng.random() < 0.5:
            story.note("return", lost[0])
            story.hosts[lost[0]].is_alive = True
            story.hosts[lost[0]].boot()
        away = [name for name, host in story.hosts.items() if host.is_alive and name not in story.up]
        if away:
            story.note("connect", away[0])
            story.connect(rng.choice(away))
    elif chance < 0.2 and story.copier is not None and story.copier.begun:
        copy = story.copier.begun[rng.choice(sorted(story.copier.begun))]
        is_there = story.hosts[copy.node].is_alive and rng.random() < 0.85
        story.note("arrive", copy.key)
        story.arrive(copy.key, "" if is_there else "the connection has ended")
    elif chance < 0.32:
        story.chores()
    elif chance < 0.5:
        train(story)
    else:
        tend(story, name)


def train(story: Story) -> None:
    """Ranks write, or make a step."""
    if story.phase != RUN or not all(story.hosts[name].is_alive for name in story.nodes):
        return
    while story.saving is not None:
        story.write_part(story.random.choice(story.saving.todo))
        if story.random.random() < 0.2:
            return
    if story.random.random() < 0.35:
        story.note("save", str(story.gang.base_step + story.step))
        story.begin_save()
    else:
        for _ in range(2):
            story.step += 1
            for name in story.nodes:
                story.hosts[name].scan()
                story.tell_steps(name)


def tend(story: Story, name: str) -> None:
    """An agent, or the line from it, goes on."""
    for name in story.random.sample(sorted(story.hosts), len(story.hosts)):
        host = story.hosts[name]
        if not host.is_alive:
            continue
        if host.unseen and story.random.random() < 0.8:
            host.scan()
        while host.unhashed and story.random.random() < 0.8:
            host.hash()
        while host.is_alive and host.inbox and story.random.random() < 0.6:
            story.note("work", name, repr(host.inbox[0])[:160])
            story.work(name)
        for _ in range(story.random.choice((3, 40, 40))):
            if name in story.up and host.outbox:
                story.note("deliver", name, repr(host.outbox[0])[:200])
                story.deliver(name)


def finish(story: Story) -> None:
    """The job ends: all agents that live leave once all is on disks, and what is there comes home."""
    story.ends = True
    story.end_attempt()
    story.chosen = None
    for name, host in story.hosts.items():
        host.is_low = False
        if host.is_alive and name not in story.up:
            story.connect(name)
    is_drained = False
    for count in range(ROUNDS_MAX):
        before = repr(sorted(story.saves.items()))
        for name, host in story.hosts.items():
            while host.is_alive and (host.inbox or (host.outbox and name in story.up)):
                if name not in story.up:
                    story.connect(name)
                story.work(name) if host.inbox else story.deliver(name)
            if host.is_alive and name not in story.up:
                story.connect(name)
        story.at += PAUSE_S
        story.chores()
        while story.copier is not None and story.copier.begun:
            key = min(story.copier.begun)
            node = story.copier.begun[key].node
            story.arrive(key, "" if story.hosts[node].is_alive else "it is lost")
        story.settle()
        story.check()
        if before == repr(sorted(story.saves.items())) and count > 3:
            if is_drained:
                break
            is_drained = True
            for host in story.hosts.values():
                if host.is_alive and host.memory is not None:
                    assert host.memory.drain()
    else:
        raise AssertionError("copies never end")
    expect_all_stored(story)


def expect_all_stored(story: Story) -> None:
    """Each complete checkpoint is on a disk: here, or on those of hosts, some of which are lost."""
    for checkpoint in story.saves.values():
        newer = [one for one in story.saves.values() if one.number > checkpoint.number and one.state is WHOLE]
        if checkpoint.state is not WHOLE or any(shares_files(checkpoint, one) for one in newer):
            continue  # a newer one has its names
        held = [story.holders(checkpoint, piece) for piece in checkpoint.files]
        if not all(held):
            continue  # only lost hosts have it all, or its script has overwritten it
        on_disk = [place for place in checkpoint.locations if not place.is_memory]
        for piece in checkpoint.files:
            there = [one for one in on_disk if not one.names or piece.name in one.names]
            if not any(disk.matches_record(Path(one.root), piece) for one in there):
                story.fail(f"{checkpoint.number}, {checkpoint.main}, is not on a disk at the end: {checkpoint}")
        is_here = any(disk.matches_record(Path(one.root), checkpoint.files[0]) for one in on_disk if not one.host)
        if not is_here and all(not one.host or story.hosts[one.host].is_alive for one in on_disk):
            story.fail(f"{checkpoint.number}, {checkpoint.main}, was not fetched at the end: {checkpoint}")
