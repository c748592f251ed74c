"""Goodput view: what ranks did with their time, by kind, and what failures cost, by cause, host or job.

Pure: the JSON objects of `orch why` and `orch goodput` in, lines out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from orchestrator.core.codec import Json
from orchestrator.core.text import format_count
from orchestrator.views.cells import Cell, Line, columns, duration, line, name_list

_UNITS = (("rank-hours", 3600.0), ("rank-minutes", 60.0), ("rank-seconds", 1.0))

UNITS_MIN = 10
"""The smallest total in units for which one decimal digit is precise enough."""

SAVED_SHARE_MIN = 0.01
"""The share of the time that another interval must save to be advised."""

MEMORY_SHARE_MIN = 0.005
"""The share of the time that checkpoints in memory must save to be advised."""

KIND_TEXTS = {
    "queued": "waiting for machines",
    "startup": "agents, setup, imports, rendezvous, up to the first new step",
    "productive": "steps that were kept",
    "wasted": "steps repeated after a restart",
    "checkpoint": "no steps while a checkpoint was saved, where that is known",
    "detecting": "from the last progress to the verdict",
    "recovering": "from the verdict to the first new step",
    "stopping": "ranks being stopped at the end",
    "idle": "spares",
}
NO_HOST = "(no single host)"
ENDED_BY_COMMAND = {"restart": "orch restart", "cancel": "orch cancel", "resume": "orch resume"}
"""Shown instead of a host where a user has ended an attempt."""


@dataclass(frozen=True, slots=True)
class _Unit:
    """The unit of all figures of a view, which follows from the largest."""

    name: str
    seconds: float
    total_s: float

    def amount(self, rank_s: float) -> str:
        return f"{rank_s / self.seconds:,.1f}"

    def cells(self, rank_s: float) -> list[Cell]:
        """Return a time and its share of all, aligned below their heads."""
        share = f"{100 * rank_s / self.total_s:.1f}%"
        return [Cell(self.amount(rank_s).rjust(len(self.name))), Cell(share.rjust(6))]

    @property
    def heads(self) -> tuple[str, str]:
        return self.name.upper(), " SHARE"


def _choose_unit(usage: Json) -> _Unit:
    whole_s = sum(usage["rank_seconds"].values()) - usage["rank_seconds"]["idle"]
    name, seconds = next(unit for unit in _UNITS if whole_s >= UNITS_MIN * unit[1] or unit is _UNITS[-1])
    return _Unit(name, seconds, whole_s)


def summary(usage: Json) -> list[Line]:
    """Return in two lines how much of the time advanced the training, and where the rest went; nothing before that."""
    if not usage["ratio"]:
        return []
    unit, spent = _choose_unit(usage), usage["rank_seconds"]
    productive = f"{unit.amount(spent['productive'])} of {unit.amount(unit.total_s)} {unit.name}"
    share = f"{100 * usage['ratio']:.1f}%"
    lines = [(), line(Cell("goodput", "bold"), f"     {share}: {productive} were useful training")]
    lost = sorted(((rank_s, kind) for kind, rank_s in spent.items() if kind != "productive"), reverse=True)
    texts = [f"{kind} {unit.amount(rank_s)}" for rank_s, kind in lost if unit.amount(rank_s) != "0.0"]
    return [*lines, *([line(f"  the rest  {', '.join(texts)}")] if texts else [])]


def table(usage: Json, by: str | None) -> list[Line]:
    """Return what `orch goodput` shows: all time by kind, or what was lost by `cause` or `host`."""
    jobs = usage["jobs"]
    unit = _choose_unit(usage)
    if not unit.total_s:
        return [line("no rank has run yet")]
    name = jobs[0]["id"] if len(jobs) == 1 else format_count(len(jobs), "job")
    total = f"{unit.amount(unit.total_s)} {unit.name}"
    share = "no goodput: no step was made in" if usage["ratio"] is None else f"goodput {100 * usage['ratio']:.1f}% of"
    head = line(Cell(name, "bold"), f"  {share} {total}")
    if by is None:
        advice = jobs[0].get("advice") if len(jobs) == 1 else None
        advice_lines = [(), *_advice_lines(advice)] if advice else []
        return [head, (), *columns(_kind_rows(usage, unit), ("TIME", *unit.heads, "WHAT IT IS")), *advice_lines]
    rows = list(_loss_rows(jobs, by, unit))
    if not rows:
        return [head, line("no failure has cost anything")]
    return [head, (), *columns(rows, (by.upper(), *unit.heads, "FAILURES"))]


def _advice_lines(advice: Json) -> Iterator[Line]:
    """Yield how often to save, and what that follows from."""
    hours = f"{advice['rank_hours']:,.1f} rank-hours"
    soonest_s, usual_s, latest_s = advice["between_failures_s"]
    if usual_s is None:
        yield line(
            f"how often to save is not known: no failure in {hours}, so at most one in {duration(soonest_s)} (95 %)"
        )
    else:
        costs = (
            f"checkpoints cost {100 * advice['checkpoint_share']:.1f} %, failures {100 * advice['failure_share']:.1f} %"
        )
        saved = advice["checkpoint_share"] + advice["failure_share"] - advice["best_share"]
        fewest, best, most = (f"{round(steps, 2 - len(str(steps))):,}" for steps in advice["best_steps"])
        if saved > SAVED_SHARE_MIN:
            yield line(
                f"{costs}: every {best} steps instead of {advice['interval_steps']:,} would cost least, {100 * advice['best_share']:.1f} % in all"
            )
        else:
            yield line(f"{costs}: every {advice['interval_steps']:,} steps is near the best interval")
        often = f"{format_count(advice['failures'], 'failure')} in {hours} of all jobs, so one in {duration(usual_s)}"
        limits = f"{duration(soonest_s)} to {duration(latest_s)}, every {fewest} to {most} steps, at 95 %"
        yield line(Cell(f"  from {often} with {format_count(advice['ranks'], 'rank')} ({limits})", "dim"))
    if advice["memory_share"] >= MEMORY_SHARE_MIN:
        yield line(f"checkpoint.memory would save about {100 * advice['memory_share']:.1f} %")
    yield line(
        Cell(
            f"  {advice['stall_s']:,.1f} s without steps at a checkpoint, the mean of {advice['checkpoints']:,}", "dim"
        )
    )


def _kind_rows(usage: Json, unit: _Unit) -> list[list[Cell]]:
    return [
        [
            Cell(kind, "green" if kind == "productive" else ""),
            *unit.cells(rank_s),
            Cell(KIND_TEXTS[kind], "dim"),
        ]
        for kind, rank_s in usage["rank_seconds"].items()
        if unit.amount(rank_s) != "0.0"
    ]


def _loss_rows(jobs: Sequence[Json], by: str, unit: _Unit) -> Iterator[list[Cell]]:
    """Yield a row for each cause or host, the most expensive first."""
    cost_s: Counter[str] = Counter()
    failures: dict[str, Counter[str]] = {}
    for loss in (loss for job in jobs for loss in job["losses"]):
        key, what = loss["cause"], loss["node"] or ENDED_BY_COMMAND.get(loss["cause"], NO_HOST)
        key, what = (key, what) if by == "cause" else (what, key)
        cost_s[key] += loss["rank_seconds"]
        failures.setdefault(key, Counter())[what] += 1
    for key, rank_s in cost_s.most_common():
        failures_text = name_list([f"{times} × {what}" for what, times in failures[key].most_common()])
        yield [Cell(key), *unit.cells(rank_s), Cell(failures_text)]
