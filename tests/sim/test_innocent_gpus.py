"""A hundred histories of what nvidia-smi says of healthy hosts, and an ordinary crash in each: nobody is taken out.

The answers go through the agent's real reading of them, and what that tells through the real brain, up to the next attempt.
"""

from __future__ import annotations

import dataclasses
import random
import subprocess
import time

import pytest

from orchestrator.agent.numbers import gpu_states
from orchestrator.agent.numbers.gpu_states import GpuStates
from orchestrator.agent.numbers.gpu_use import POLL_S
from orchestrator.brain.model import decisions as d
from orchestrator.brain.model import events as e
from orchestrator.core import observations
from orchestrator.core.errors import HostError
from orchestrator.core.host import gpus
from orchestrator.core.wire import reports
from tests.support import fake_nvidia_smi as smi
from tests.support.brain_story import Story, only
from tests.support.frames import frame

HISTORIES = 100
NODES = (0, 1)
REFUSES = 2
"""What nvidia-smi ends with when it does not know a column; it is asked again without it."""
HUNG_LOOKS = 3
"""For how many looks in a row an nvidia-smi that hangs for a minute does not answer."""

Looks = list[smi.Host]
"""What a host's nvidia-smi says at each look; a second look within one is the next of them."""


def _calm(rng: random.Random, since: int) -> Looks:
    """A look or some at a host on which nothing is wrong that would end a training."""
    number = str(since * rng.randrange(1, 50))
    warning = rng.choice(
        ["WARNING: infoROM is corrupted at gpu 0000:19:00.0\n", "Warning: persistence mode is disabled, please wait\n"]
    )
    gone = rng.choice(
        [smi.UNLISTED, smi.without_handle("Unknown Error"), smi.ALL_WITHOUT_HANDLE, smi.LOST_ROW, smi.LOST_LINE_AND_ROW]
    )
    reloaded = rng.choice([smi.NO_DEVICES, smi.NO_DRIVER, smi.MISMATCH])
    return rng.choice(
        [
            [smi.Host()],
            [smi.sick({"ecc.errors.corrected.volatile.total": number})],
            [smi.sick({"ecc.errors.uncorrected.volatile.total": number})],
            [smi.sick({"remapped_rows.pending": "Yes"})],
            [smi.clocks(0x4)],
            [smi.clocks(rng.choice([0x48, 0x88, 0x20, 0x44, 0x8, 0x1]))],
            [smi.every_cell(rng.choice(["[N/A]", "N/A", "[Unknown Error]", "[Not Supported]"]))],
            [smi.HANGS] * HUNG_LOOKS,
            [gone, smi.Host()],
            [gone, smi.HANGS, smi.Host()],
            [reloaded, gone, smi.Host()],
            [smi.Host(warning=warning, code=rng.choice([0, smi.CORRUPTED_INFOROM]))],
            [smi.SPANISH],
        ]
    )


class Gang:
    """Two hosts of three, each with what its nvidia-smi will say, and the job that trains on them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, looks: dict[int, Looks]) -> None:
        self.looks, self.attempt = looks, 1
        self.states = {node: GpuStates() for node in NODES}
        for states in self.states.values():
            states.devices.update(("0", "1"))
        self.story = Story(hosts=3, spares=1)
        self.story.hear(*(self.story.up(node) for node in range(3)))
        self.story.run_on(*NODES)
        monkeypatch.setattr(gpus, "run_nvidia_smi", self._run)
        monkeypatch.setattr(time, "sleep", self._pass)

    def _pass(self, seconds: float) -> None:
        assert seconds == gpu_states.SECOND_LOOK_S

    def _run(self, tool: str, *options: str, limit_s: float) -> subprocess.CompletedProcess[str]:
        left = self.looks[int(tool)]
        hangs = left[0].hangs
        text, code = smi.answer(left[0], *options) or ("", 0)
        if code != REFUSES and len(left) > 1:
            del left[0]
        if hangs:
            raise HostError(f"`{tool}` has not answered for {limit_s:g} s")
        return subprocess.CompletedProcess([tool], code, text, "")

    def look(self) -> None:
        """Let each agent ask, and report what is news."""
        for node, states in self.states.items():
            states.ask(str(node))
            if (news := states.take_news(self.story.now_s)) is not None:
                self.story.hear(e.FromNode(0.0, f"n{node}", reports.GpusChanged(self.attempt, news)))

    def train(self, looks: int) -> None:
        """Make a step a second between looks; nobody has a reason to do anything."""
        for step in range(1, looks * int(POLL_S) + 1):
            if step % int(POLL_S) == 1:
                self.look()
            self.story.now_s += 1.0
            assert not self.story.hear(*(self.story.beat(node, step, attempt=self.attempt) for node in NODES))

    def crash(self, rank: int) -> list[d.Decision]:
        """One rank ends; its agent asks again before all are stopped. Return what is decided up to the next attempt."""
        failure = observations.Failure("ValueError", f"bad batch {self.attempt}", "Traceback", frame("train.py:42"))
        decided = self.story.hear(self.story.exited(rank, failure=failure, attempt=self.attempt, count=7))
        self.look()
        decided += self.story.hear(*(self.story.stopped(node, self.attempt) for node in NODES))
        decided += self.story.wait(20.0)
        self.attempt += 1
        return decided


def _history(seed: int, *drivers: int) -> tuple[dict[int, Looks], int, int]:
    """Return what the hosts say, after how many looks a rank crashes, and which."""
    rng = random.Random(seed)
    driver = rng.choice(drivers)
    calm = {node: [smi.Host(), *(look for since in range(12) for look in _calm(rng, since))] for node in NODES}
    looks = {node: [dataclasses.replace(look, driver=driver) for look in said] for node, said in calm.items()}
    return looks, rng.randrange(1, 12), rng.choice(NODES)


def _play(
    monkeypatch: pytest.MonkeyPatch, looks: dict[int, Looks], before: int, rank: int
) -> tuple[Gang, list[d.Decision]]:
    """Return a gang that has crashed twice, the second time with fewer steps, and all that was decided on both."""
    gang = Gang(monkeypatch, looks)
    gang.train(before + 1)
    decided = gang.crash(rank)
    gang.story.run_on(*NODES, attempt=2)
    gang.train(before)
    return gang, [*decided, *gang.crash(rank)]


@pytest.mark.parametrize("tens", range(HISTORIES // 10))
def test_nobody_is_taken_out(monkeypatch: pytest.MonkeyPatch, tens: int) -> None:
    """All is as on hosts whose nvidia-smi says at each look that they are healthy."""
    for seed in range(tens * 10, tens * 10 + 10):
        looks, before, rank = _history(seed, 390, 470, 535, smi.NEW)
        gang, decided = _play(monkeypatch, looks, before, rank)
        _, usual = _play(monkeypatch, {node: [smi.Host()] for node in NODES}, before, rank)
        assert decided == usual, seed
        assert [one.verdict.host_fault for one in decided if isinstance(one, d.Judge)] == ["", ""], seed
        assert "restart 1 of 3" in [one.why for one in decided if isinstance(one, d.BeginAttempt)][1], seed
        assert gang.story.brain.facts.restarts_spent == 1, seed
        assert not any(node.excluded for node in gang.story.brain.facts.nodes.values()), seed


@pytest.mark.parametrize("what", ["reset", "gone"])
def test_the_same_histories_with_a_sick_gpu_leave_its_host(monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    """So they would notice: at the end one host says it, and goes on saying it."""
    sick = {"reset": smi.sick({"gpu_recovery_action": "Reset"}), "gone": smi.UNLISTED}[what]
    for seed in range(20):
        looks, before, rank = _history(seed, smi.NEW)
        gang = Gang(monkeypatch, looks)
        gang.train(before)
        looks[rank][:] = [smi.Host(), sick]
        gang.look()
        gang.look()
        decided = gang.crash(rank)
        assert only(decided, d.Judge).verdict.host_fault, seed
        assert {name for name, _ in only(decided, d.Place).nodes} == {f"n{1 - rank}", "n2"}, seed
        assert gang.story.brain.facts.restarts_spent == 0, seed
