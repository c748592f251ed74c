"""Charts of a job: what its ranks measured over time, as lines and bands for SVG. Pure: samples in, geometry out.

Rules:
1. Every chart is 1,000 wide and 100 high, and all share one scale of time. The page stretches them; labels are outside.
2. Up to `LINES_MAX` ranks have a line each. With more, there are a line for the middle rank, a band for all, and
   lines for the ranks farthest from the middle.
3. A line has at most `POINTS_MAX` points: of each stretch of time its lowest and its highest value are kept. It is broken
   where an attempt ends.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter, itemgetter
from typing import TypeAlias

from markupsafe import Markup

from orchestrator.core.jobdir.series import Measurement, RankMeasurement
from orchestrator.core.jobdir.status_file import iso
from orchestrator.core.text import ranks_label
from orchestrator.views.cells import duration, size

WIDTH, HEIGHT = 1000.0, 100.0
LINES_MAX = 8
OUTLIERS_MAX = 3
OUTLIER_SHARE = 0.1
"""How far from the middle rank, as a share of its value, a rank must be to have its own line in a large job."""

POINTS_MAX = 600
TICKS_MAX = 6
_HOUR_S, _DAY_S = 3600, 86_400
_TICK_S = (
    *(1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800),
    *(_HOUR_S * hours for hours in (1, 2, 3, 6, 12)),
    *(_DAY_S * days for days in (1, 2, 7, 14, 30)),
)

Points: TypeAlias = "list[tuple[float, float]]"
"""Time in seconds since 1970, and value."""

_value = itemgetter(1)


@dataclass(frozen=True, slots=True)
class Tick:
    """A label of an axis, and its position in percent from the start."""

    percent: float
    text: str


@dataclass(frozen=True, slots=True)
class TimeScale:
    """The time that a page shows, in seconds since 1970."""

    begin_s: float
    end_s: float

    def x(self, wall_s: float) -> float:
        """Return the x position of a time, from 0 to `WIDTH`."""
        share = (wall_s - self.begin_s) / max(1e-3, self.end_s - self.begin_s)
        return round(WIDTH * min(1.0, max(0.0, share)), 2)

    @property
    def ticks(self) -> list[Tick]:
        """The labels of the axis, in UTC; the date is shown where it changes."""
        span_s = self.end_s - self.begin_s
        step_s = next((step_s for step_s in _TICK_S if span_s / step_s <= TICKS_MAX), span_s)
        ticks, day = [], ""
        at_s = math.ceil(self.begin_s / step_s) * step_s if step_s else self.end_s
        while at_s < self.end_s:
            text = iso(at_s)
            clock = text[11:16] if step_s >= 60 else text[11:19]
            ticks.append(Tick(self.x(at_s) / 10, clock if text[:10] == day else f"{text[5:10]} {clock}"))
            day, at_s = text[:10], at_s + step_s
        return ticks


@dataclass(frozen=True, slots=True)
class Curve:
    """A line of a chart: what it shows, its SVG path, and the number of its colour."""

    name: str
    path: Markup
    colour: int


@dataclass(frozen=True, slots=True)
class Chart:
    """One quantity over time. `band`: the path of the area between the lowest and the highest rank, or empty. `summary`: the
    chart as text."""

    title: str
    curves: tuple[Curve, ...]
    band: Markup
    ticks: tuple[Tick, ...]
    summary: str


@dataclass(frozen=True, slots=True)
class Quantity:
    """A quantity that a chart shows. `is_from_zero`: the axis starts at zero."""

    title: str
    read: Callable[[RankMeasurement], float | None]
    text: Callable[[float], str]
    is_from_zero: bool = True


def _plain(value: float) -> str:
    return f"{value:.3g}"


TRAINING = (
    Quantity("Loss", attrgetter("loss"), _plain, is_from_zero=False),
    Quantity("Learning rate", attrgetter("learning_rate"), _plain),
    Quantity("Steps per second", attrgetter("steps_per_s"), _plain),
    Quantity(
        "Time of a step",
        attrgetter("step_s"),
        lambda value: f"{value:.3g} s" if value < 10 else duration(value),
    ),
)
USAGE = (
    Quantity("Processors in use", attrgetter("usage.cpu_share"), _plain),
    Quantity("Memory", attrgetter("usage.memory_bytes"), size),
    Quantity("GPU use", attrgetter("usage.gpu_share"), lambda share: f"{100 * share:.0f}%"),
    Quantity("GPU memory", attrgetter("usage.gpu_memory_bytes"), size),
)  # fmt: skip


def charts(samples: Sequence[Measurement], quantities: Sequence[Quantity], scale: TimeScale) -> list[Chart]:
    """Return a chart of each quantity that was measured."""
    return [chart for quantity in quantities if (chart := _chart(samples, quantity, scale)) is not None]


def _chart(samples: Sequence[Measurement], quantity: Quantity, scale: TimeScale) -> Chart | None:
    points_by_rank, nonfinite_ranks = _points_by_rank(samples, quantity)
    if not points_by_rank:
        return None
    low = min(min(map(_value, points)) for points in points_by_rank.values())
    high = max(max(map(_value, points)) for points in points_by_rank.values())
    axis = _axis(0.0 if quantity.is_from_zero else low, high)
    pen = _Pen(scale, axis[0], axis[-1], _breaks(samples))
    ticks = tuple(Tick(pen.y(value), quantity.text(value)) for value in axis)
    summary = (
        f"{quantity.title} of {ranks_label(tuple(points_by_rank))}, from {quantity.text(low)} to {quantity.text(high)}"
    )
    if nonfinite_ranks:
        summary += f"; not finite on {ranks_label(nonfinite_ranks)}"
    if len(points_by_rank) <= LINES_MAX:
        curves = [
            Curve(f"rank {rank}", pen.line(points), number)
            for number, (rank, points) in enumerate(points_by_rank.items())
        ]
        return Chart(quantity.title, tuple(curves), Markup(""), ticks, summary)
    middle, lowest, highest = _spread(points_by_rank)
    outliers = _outliers(points_by_rank, middle)
    curves = [Curve("middle rank", pen.line(middle), 0)]
    curves += [Curve(f"rank {rank}", pen.line(points_by_rank[rank]), number) for number, rank in enumerate(outliers, 1)]
    return Chart(quantity.title, tuple(curves), pen.band(lowest, highest), ticks, summary)


def _points_by_rank(samples: Sequence[Measurement], quantity: Quantity) -> tuple[dict[int, Points], list[int]]:
    """Return the finite values of each rank, and the ranks that have non-finite ones."""
    points_by_rank: dict[int, Points] = {}
    nonfinite_ranks: set[int] = set()
    read = quantity.read
    for sample in samples:
        wall_s = sample.wall_s
        for rank in sample.ranks:
            if (value := read(rank)) is None:
                continue
            if math.isfinite(value):
                points_by_rank.setdefault(rank.rank, []).append((wall_s, value))
            else:
                nonfinite_ranks.add(rank.rank)
    return dict(sorted(points_by_rank.items())), sorted(nonfinite_ranks)


def _breaks(samples: Sequence[Measurement]) -> list[float]:
    """Return when each attempt but the first was first sampled."""
    firsts: dict[int, float] = {}
    for sample in samples:
        firsts.setdefault(sample.attempt, sample.wall_s)
    return list(firsts.values())[1:]


def _spread(points_by_rank: Mapping[int, Points]) -> tuple[Points, Points, Points]:
    """Return the middle rank, the lowest and the highest over time."""
    values_by_time: dict[float, list[float]] = {}
    for points in points_by_rank.values():
        for wall_s, value in points:
            values_by_time.setdefault(wall_s, []).append(value)
    ordered = [(wall_s, sorted(values)) for wall_s, values in sorted(values_by_time.items())]
    return (
        [(wall_s, values[(len(values) - 1) // 2]) for wall_s, values in ordered],
        [(wall_s, values[0]) for wall_s, values in ordered],
        [(wall_s, values[-1]) for wall_s, values in ordered],
    )


def _outliers(points_by_rank: Mapping[int, Points], middle: Points) -> list[int]:
    """Return the ranks that are farthest from the middle one, on average over time."""
    usual = _mean(middle)
    far = []
    for rank, points in points_by_rank.items():
        distance = abs(_mean(points) - usual)
        if distance > OUTLIER_SHARE * abs(usual):
            far.append((distance, rank))
    return [rank for _, rank in sorted(far, reverse=True)[:OUTLIERS_MAX]]


def _mean(points: Points) -> float:
    return sum(value for _, value in points) / len(points)


def _axis(low: float, high: float) -> list[float]:
    """Return the labelled values of an axis: multiples of 1, 2 or 5 that enclose all."""
    span = high - low or abs(high) or 1.0
    unit = 10 ** math.floor(math.log10(span / 2))
    step = next(unit * times for times in (1, 2, 5, 10) if span / (unit * times) <= 3)
    first, last = math.floor(low / step), math.ceil(high / step)
    return [number * step for number in range(first, max(last, first + 1) + 1)]


@dataclass(frozen=True, slots=True)
class _Pen:
    """Drawing of lines and bands at the scale of time and between the ends of the axis of values."""

    scale: TimeScale
    low: float
    high: float
    breaks: Sequence[float]

    def y(self, value: float) -> float:
        """Return the y position of a value, from 0 at the top to `HEIGHT`."""
        return round(HEIGHT * (1 - (value - self.low) / (self.high - self.low)), 2)

    def line(self, points: Points) -> Markup:
        parts = []
        for piece in self._pieces(points):
            texts = [f"{self.scale.x(at)} {self.y(value)}" for at, value in piece]
            parts.append("M" + "L".join([*texts, *(texts if len(texts) == 1 else [])]))
        return Markup("".join(parts))

    def band(self, lowest: Points, highest: Points) -> Markup:
        parts = []
        for below, above in zip(self._pieces(lowest), self._pieces(highest), strict=True):
            around = [*above, *reversed(below)]
            parts.append("M" + "L".join(f"{self.scale.x(at)} {self.y(value)}" for at, value in around) + "Z")
        return Markup("".join(parts))

    def _pieces(self, points: Points) -> Iterator[Points]:
        """Yield the points of each attempt, thinned."""
        pieces: list[Points] = [[] for _ in range(len(self.breaks) + 1)]
        for point in points:
            pieces[bisect.bisect(self.breaks, point[0])].append(point)
        whole = max(1, sum(map(len, pieces)))
        yield from (thin(piece, POINTS_MAX * len(piece) // whole) for piece in pieces if piece)


def thin(points: Points, points_max: int) -> Points:
    """Return at most `points_max` points, at least two: of each stretch the lowest and the highest."""
    if len(points) <= max(2, points_max):
        return points
    kept: Points = []
    stretches = max(1, points_max // 2)
    for number in range(stretches):
        stretch = points[len(points) * number // stretches : len(points) * (number + 1) // stretches]
        ends = {stretch.index(min(stretch, key=_value)), stretch.index(max(stretch, key=_value))}
        kept += [stretch[at] for at in sorted(ends)]
    return kept
