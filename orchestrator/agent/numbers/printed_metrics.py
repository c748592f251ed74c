"""Metrics that a rank prints: progress bar, loss and learning rate, from the end of its log.

Rules:
1. At most `TAIL_BYTES` are read at a time, and only when the log has grown. A value is kept until a newer one is found.
2. tqdm rewrites a bar in its line after a carriage return, each time with its count:
   ` 3%|▍ | 37/1200 [00:03<01:55, 10.1it/s]`, or `37it [00:03, 10.1it/s]` where its end is not known.
3. A bar shows the progress of the job only if it covers all work: not if its description says otherwise, not if there was
   a longer one, and not if it has begun again, as one of an epoch does.
4. A count, `step 37/1200`, is a bar without a drawing; `eta: 0:01:55` and `remaining time: 0:01:55` are the time left.
5. A loss is the one that is trained on, not one of a validation: `loss 1.23`, `train_loss: 1.2e-3`, `{'loss': '1.23'}`.
6. No pattern has a loop without a bound, so that no line takes long.
"""

from __future__ import annotations

import itertools
import math
import os
import re
from dataclasses import dataclass
from pathlib import Path

from orchestrator.core.jobdir import ownership
from orchestrator.core.status_types import ReportedNumber, Training

TAIL_BYTES = 8192
LINE_BYTES_MAX = 400
"""How much of a line before a loss may say that it is another one."""

NAME_BYTES_MAX = 24
CANDIDATES_MAX = 64

_BAR = re.compile(
    rb"(?P<done>\d{1,18})/(?P<total>\d{1,18}) \[\d{1,9}:\d\d(?::\d\d)?<(?P<left>\d{1,9}(?::\d\d){1,2})?"
    rb"|(?<![\w.])(?P<count>\d{1,18})it \[\d{1,9}:\d\d"
    rb"|(?<![a-z])(?:step|iter(?:ation)?)s?[ \t:=\[(]{1,12}(?P<step>\d{1,18})[ \t]{0,4}/[ \t]{0,12}(?P<steps>\d{1,18})(?![\d.])",
    re.IGNORECASE,
)
_LEFT = re.compile(
    rb"(?:(?<![a-z])eta|remaining time)[ \t]{0,4}[:=][ \t]{0,4}"
    rb"(?:(?:(?P<days>\d{1,4}) days?, )?(?P<clock>\d{1,9}(?::\d\d){1,2})|(?P<number>\d{1,9}(?:\.\d{1,9})?) ?(?P<unit>[smhd]))(?![\w:])",
    re.IGNORECASE,
)
_PARTIAL_LABEL = re.compile(rb"epoch|eval|valid|test|sanity|load|fetch|shard|map|token", re.IGNORECASE)

_NUMBER = (
    rb"[ \t]{0,4}(?:tensor\()?[\[\"']?"
    rb"(?P<number>[-+]?(?:(?:\d{1,20}(?:\.\d{0,20})?|\.\d{1,20})(?:e[-+]?\d{1,4})?|nan|inf(?:inity)?))"
    rb"(?=[^\w.]|\.\s)"
)
_LOSS = re.compile(rb"loss(?:_step)?[\"']?[ \t]{0,4}[:=]?" + _NUMBER, re.IGNORECASE)
_RATE = re.compile(rb"(?<![a-z])(?:lr|learning[_ ]rate)[\"']?[ \t]{0,4}[:=]?" + _NUMBER, re.IGNORECASE)

_NAME = re.compile(rb"(?P<word>[a-z]{0,20})(?P<joint>[_/. -]{0,2})\Z", re.IGNORECASE)
_TRAINING_WORDS = frozenset(b"train training total avg average mean running batch step lm".split())
_OTHER_LOSS = re.compile(rb"\b(?:val|valid|validation|dev|eval|evaluation|test)\b", re.IGNORECASE)
_SUMMARY = b"train_runtime"
"""In the last line of the Trainer of Transformers, whose loss is the mean of all steps."""


@dataclass(frozen=True, slots=True)
class ProgressBar:
    """One progress bar as it was last drawn; `total` is 0 where its end is not known."""

    done: int
    total: int
    remaining_s: float | None
    # The text before it in its line
    label: bytes
    # By tqdm
    is_drawn: bool = True

    @property
    def text(self) -> str:
        """The bar in a status."""
        counted = f"{self.done}/{self.total}" if self.total else f"{self.done}"
        return f"{counted} (tqdm)" if self.is_drawn else counted


class PrintedMetrics:
    """Metrics of one log, read when it has grown."""

    def __init__(self, log: Path) -> None:
        self._log = log
        self._size_bytes = 0
        self._text = ""
        # The end of the log in which no loss was looked for yet: bars are looked for more often
        self._unread = b""
        # The bar of all work, and whether it has begun again
        self._main_bar: ProgressBar | None = None
        self._is_repeated = False
        self._remaining_s: float | None = None
        self._loss: ReportedNumber | None = None
        self.nonfinite_losses = 0
        self._learning_rate: ReportedNumber | None = None

    def progress(self, optimizer_steps: int) -> str:
        """Return the last bar of a rank without optimizer steps, such as `37/1200 (tqdm)`; empty where there is none."""
        if optimizer_steps:
            return ""
        self._read()
        return self._text

    def training(self) -> Training:
        """Return the training progress that the log shows."""
        self._read()
        losses, learning_rate = last_losses(self._unread), last_learning_rate(self._unread)
        self._unread = b""
        if losses:
            self._loss = losses[0]
            self.nonfinite_losses = sum(1 for _ in itertools.takewhile(lambda loss: not math.isfinite(loss), losses))
        self._learning_rate = self._learning_rate if learning_rate is None else learning_rate
        whole = None if self._is_repeated else self._main_bar
        return Training(
            loss=self._loss,
            learning_rate=self._learning_rate,
            percent=100.0 * min(1.0, whole.done / whole.total) if whole else None,
            eta_s=whole.remaining_s if whole and whole.remaining_s is not None else self._remaining_s,
            total_steps=whole.total if whole else None,
        )

    def _read(self) -> None:
        try:
            with ownership.open_for_reading(self._log) as file:
                size_bytes = file.seek(0, os.SEEK_END)
                if size_bytes == self._size_bytes:
                    return
                file.seek(max(0, size_bytes - TAIL_BYTES))
                tail, self._size_bytes = file.read(TAIL_BYTES), size_bytes
        except OSError:
            return  # the log may be gone; what was seen last is still true
        # Of the bars only the last: those before it may be in the tail for a second time.
        if (bar := last_bar(tail)) is not None:
            self._text = bar.text
            self._note_bar(bar)
        self._remaining_s = last_remaining_s(tail, self._remaining_s)
        self._unread = tail

    def _note_bar(self, bar: ProgressBar) -> None:
        """Note a bar that may be of all work."""
        previous = self._main_bar
        if not bar.total or _PARTIAL_LABEL.search(bar.label) or (previous and bar.total < previous.total):
            return
        if previous and bar.total == previous.total and bar.done < previous.done:
            self._is_repeated = True
        self._main_bar = bar


def last_bar(tail: bytes) -> ProgressBar | None:
    """Return the last bar in the end of a log."""
    found = next(reversed(list(_BAR.finditer(tail))), None)
    if found is None:
        return None
    label = tail[_line_begin(tail, found.start()) : found.start()]
    if found["count"]:
        return ProgressBar(int(found["count"]), 0, None, label)
    left_s = _seconds(found["left"]) if found["left"] else None
    return ProgressBar(
        int(found["done"] or found["step"]),
        int(found["total"] or found["steps"]),
        left_s,
        label,
        bool(found["done"]),
    )


def last_remaining_s(tail: bytes, default_s: float | None) -> float | None:
    """Return the last remaining time in the end of a log; the previous one where it has none."""
    found = next(reversed(list(_LEFT.finditer(tail))), None)
    if found is None:
        return default_s
    if found["number"]:
        return float(found["number"]) * {b"s": 1, b"m": 60, b"h": 3600, b"d": 86400}[found["unit"].lower()]
    return _seconds(found["clock"]) + 86400.0 * int(found["days"] or 0)


def last_losses(tail: bytes) -> list[ReportedNumber]:
    """Return the last losses of the training in the end of a log, the last one first."""
    return [
        ReportedNumber(found["number"])
        for found in reversed(list(_LOSS.finditer(tail))[-CANDIDATES_MAX:])
        if _is_training_loss(tail[_line_begin(tail, found.start()) : found.start()])
    ]


def _is_training_loss(line: bytes) -> bool:
    """Return whether the loss after this begin of a line is the one that is trained on."""
    name = _NAME.search(line[-NAME_BYTES_MAX:])
    assert name is not None, "it matches nothing as well"
    word, joint = name["word"].lower(), name["joint"]
    if _SUMMARY in line:
        return False
    if word in _TRAINING_WORDS:
        return True
    # `aux_loss` and `gloss` are others; a separate word, as in `lm loss`, is part of the line.
    is_other = bool(word) and not joint.isspace()
    return not is_other and not _OTHER_LOSS.search(line)


def last_learning_rate(tail: bytes) -> ReportedNumber | None:
    """Return the last learning rate in the end of a log."""
    found = list(_RATE.finditer(tail))
    return ReportedNumber(found[-1]["number"]) if found else None


def _line_begin(tail: bytes, at: int) -> int:
    least = max(0, at - LINE_BYTES_MAX)
    return max(tail.rfind(b"\n", least, at), tail.rfind(b"\r", least, at), least - 1) + 1


def _seconds(text: bytes) -> float:
    seconds = 0
    for part in text.split(b":"):
        seconds = seconds * 60 + int(part)
    return float(seconds)
