"""Norms of gradients on a device: a copy that is under way is not waited for."""

from __future__ import annotations

import math
import sys
from types import SimpleNamespace

import pytest

from orchestrator.agent.ranks.hook import layout
from orchestrator.agent.ranks.hook.tensors import GradientNorms, watch_norms


class Tensor:
    """A norm; on a device it is copied, and its event ends when it is told to."""

    def __init__(self, norm: float) -> None:
        self.device = SimpleNamespace(type="cuda")
        self.norm, self.reads, self.copies = norm, 0, 0

    def __float__(self) -> float:
        self.reads += 1
        return self.norm

    def to(self, device: str, *, non_blocking: bool) -> Tensor:
        assert (device, non_blocking) == ("cpu", True)
        self.copies += 1
        return self


class Loop:
    """A training with one optimizer."""

    def __init__(self) -> None:
        self.words = memoryview(bytearray(layout.STEP_FILE_BYTES)).cast("Q")
        self.norms = GradientNorms()
        utils = SimpleNamespace(clip_grad_norm_=lambda norm: norm, clip_grad=SimpleNamespace())
        sys.modules["torch.nn.utils"] = utils  # type: ignore[assignment]
        watch_norms(self, lambda: False)
        self.clip = utils.clip_grad_norm_
        self.step = 0

    def train(self, norm: Tensor, *, steps: bool = True) -> None:
        self.step += 1
        assert self.clip(norm) is norm
        if steps:
            self.norms.count(self.words, self.step * layout.OPTIMIZERS_MAX, self.step, object(), lambda: 1)

    def told(self) -> list[int]:
        """Return how many are not finite, and the first step of these."""
        return list(self.words[layout.NORMS_WORD :])[:2]


@pytest.fixture
def ready(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """What a look at an event finds."""
    answers = [False]
    event = SimpleNamespace(query=lambda: answers[0], record=lambda stream: None)
    cuda = SimpleNamespace(Event=lambda: event, current_stream=lambda device: None)
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(Tensor=Tensor, cuda=cuda))
    monkeypatch.setitem(sys.modules, "torch.nn.utils", SimpleNamespace())
    return answers


def test_norm_is_read_at_later_step_once_it_is_there(ready: list[bool]) -> None:
    loop, odd, passed_over, last = Loop(), Tensor(math.inf), Tensor(math.nan), Tensor(1.5)
    loop.train(odd)
    loop.train(passed_over)
    assert (odd.copies, odd.reads, passed_over.copies, loop.told()) == (1, 0, 0, [0, 0])
    ready[0] = True
    loop.train(last)
    assert (odd.reads, passed_over.reads, last.copies, last.reads, loop.told()) == (1, 0, 1, 0, [1, 1])
    loop.train(odd)
    assert list(loop.words[layout.NORMS_WORD :])[::3] == [0, 3]


def test_skipped_step_behind_late_norm_is_none(ready: list[bool]) -> None:
    loop = Loop()
    loop.train(Tensor(1.5))
    loop.train(Tensor(math.inf), steps=False)
    ready[0] = True
    loop.train(Tensor(math.inf), steps=False)
    assert loop.told() == [0, 0]
    loop.train(Tensor(math.inf))
    loop.train(Tensor(1.5), steps=False)
    loop.train(Tensor(math.inf))
    assert loop.told() == [1, 4]


def test_norms_that_are_not_finite_are_counted_in_a_row(ready: list[bool]) -> None:
    loop = Loop()
    ready[0] = True
    for norm in (1.5, math.inf, math.nan, 1.5):
        loop.train(Tensor(norm))
    assert loop.told() == [2, 2]
    assert loop.words[layout.NORMS_WORD + 2 :].cast("B").cast("d")[0] == math.inf


def test_norm_of_another_device_is_not_read(ready: list[bool]) -> None:
    loop, other = Loop(), Tensor(math.inf)
    other.device = SimpleNamespace(type="xla")
    loop.train(other)
    loop.train(other)
    assert (other.reads, other.copies, loop.told()) == (0, 0, [0, 0])
