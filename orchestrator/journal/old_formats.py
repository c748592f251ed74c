"""Lines of journals of earlier formats, brought into the present form before they are decoded.

Each step takes the news of a line, as plain data, from one format to the next. A class or field that is renamed, moved or
dropped gets a line here, and the journal's format number rises by one.
"""

from __future__ import annotations

from collections.abc import Callable

from orchestrator.core.codec import Json

Step = Callable[[Json], Json]

_REPORTS_3 = frozenset({
    "Prepared", "PrepareFailed", "LaunchEnded", "Probed", "Started", "Exited", "Stopped", "Inspected", "Heartbeat",
})  # fmt: skip
_ORDERS_3 = frozenset({"Prepare", "Probe", "Start", "Inspect", "Fence", "Stop", "Dismiss"})


def _from_3(news: Json) -> Json:
    """A report was an event of its own, and an order a decision of its own. `Start` named the checkpoint once more."""
    kind = news["kind"]
    if kind in _REPORTS_3:
        return _nested(news, "FromNode", "report", ("at", "node"))
    if kind in _ORDERS_3:
        order = {key: item for key, item in news.items() if (kind, key) != ("Start", "resume")}
        return _nested(order, "To", "order", ("at", "why", "node"))
    return news


def _nested(news: Json, kind: str, name: str, outer: tuple[str, ...]) -> Json:
    """Return news of this kind whose field `name` has all but the outer fields."""
    inner = {key: item for key, item in news.items() if key not in outer}
    return {"kind": kind, **{key: news[key] for key in outer}, name: inner}


_STEPS: dict[int, Step] = {3: _from_3}

OLDEST = min(_STEPS)
"""The oldest format that can still be read."""


def renewed(news: Json, written_as: int) -> Json:
    """Return the news of a line that has this format in the present one. Raises KeyError where they lack a key."""
    for number in sorted(_STEPS):
        news = _STEPS[number](news) if written_as <= number else news
    return news
