"""Norms of gradients on a device: a copy that is under way is not waited for."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from orchestrator.agent.ranks.hook import layout
from orchestrator.agent.ranks.hook.errors import HookNotes
from orchestrator.agent.ranks.hook.tensors import GradientNorms


class Tensor:
    """A norm; on a device it is copied, and its event ends when it is told to."""

    device = SimpleNamespace(type="cuda")

    def __init__(self, norm: float) -> None:
        self.norm, self.reads, self.copies = norm, 0, 0

    def __float__(self) -> float:
        self.reads += 1
        return self.norm

    def to(self, device: str, *, non_blocking: bool) -> Tensor:
        assert (device, non_blocking) == ("cpu", True)
        self.copies += 1
        return self


class Loop:
    """A training with one optimizer on a device that is `behind` by some steps."""

    def __init__(self, folder: Path) -> None:
        self.words = memoryview(bytearray(layout.STEP_FILE_BYTES)).cast("Q")
        self.norms = GradientNorms(HookNotes(str(folder)))
        module = SimpleNamespace(clip_grad_norm_=lambda norm: norm)
        sys.modules["torch.nn.utils"] = sys.modules["torch.nn.utils.clip_grad"] = module  # type: ignore[assignment]
        self.norms.watch(module.clip_grad_norm_, lambda: False)
        self.clip = module.clip_grad_norm_
        self.step = 0

    def train(self, norm: Tensor, *, steps: bool = True) -> None:
        self.step += 1
        assert self.clip(norm) is norm
        if steps:
            self.norms.count(self.words, self.step * layout.OPTIMIZERS_MAX, self.step, object(), lambda: 1)

    def told(self) -> list[int]:
        return list(self.words[layout.NORMS_WORD :])[:2]


@pytest.fixture
def ready(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """What the next look at an event finds, the last one for ever."""
    answers = [False]
    event = SimpleNamespace(query=lambda: answers[0], record=lambda stream: None)
    cuda = SimpleNamespace(Event=lambda: event, current_stream=lambda device: None)
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(Tensor=Tensor, cuda=cuda))
    for name in ("torch.nn.utils", "torch.nn.utils.clip_grad"):
        monkeypatch.setitem(sys.modules, name, SimpleNamespace())
    return answers


def test_norm_is_read_at_later_step_once_it_is_there(tmp_path: Path, ready: list[bool]) -> None:
    loop, odd, passed_over, last = Loop(tmp_path), Tensor(math.inf), Tensor(math.nan), Tensor(1.5)
    loop.train(odd)
    loop.train(passed_over)
    assert (odd.copies, odd.reads, passed_over.copies, loop.told()) == (1, 0, 0, [0, 0])
    ready[0] = True
    loop.train(last)
    assert (odd.reads, passed_over.reads, last.reads) == (1, 0, 1)
    assert list(loop.words[layout.NORMS_WORD :])[::3] == [0, 3]
    assert not loop.norms.awaited


def test_skipped_step_behind_late_norm_is_none(tmp_path: Path, ready: list[bool]) -> None:
    loop = Loop(tmp_path)
    loop.train(Tensor(1.5))
    loop.train(Tensor(math.inf), steps=False)
    ready[0] = True
    loop.train(Tensor(math.inf), steps=False)
    loop.train(Tensor(math.inf))
    assert loop.told() == [1, 4]


def test_norms_that_are_not_finite_are_counted_in_a_row(tmp_path: Path, ready: list[bool]) -> None:
    loop = Loop(tmp_path)
    ready[0] = True
    for norm in (1.5, math.inf, math.nan):
        loop.train(Tensor(norm))
    assert loop.told() == [2, 2]
    assert memoryview(loop.words)[layout.NORMS_WORD + 2 :].cast("B").cast("d")[0] == math.inf


def test_failure_is_noted_once_and_ends_nothing(tmp_path: Path, ready: list[bool]) -> None:
    loop, odd = Loop(tmp_path), Tensor(math.inf)
    odd.device = None  # type: ignore[assignment]
    loop.train(odd)
    loop.train(odd)
    assert (tmp_path / layout.NOTES_FILE).read_text().count("gradient norms") == 1
    ready[0] = True
    loop.train(Tensor(math.inf))
    assert loop.told() == [1, 3]
