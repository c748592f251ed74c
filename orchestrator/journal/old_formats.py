"""Lines of journals of earlier formats, brought into the present form before they are decoded.

Each step takes the news of a line, as plain data, from one format to the next. Where a class or a field of the journal is
renamed, moved or dropped, the format number rises by one, and a step here says what became of it.
"""

from __future__ import annotations

from orchestrator.core.codec import Json

_REPORTS_3 = frozenset({
    "Prepared", "PrepareFailed", "LaunchEnded", "Probed", "Started", "Exited", "Stopped", "Inspected", "Heartbeat",
})  # fmt: skip
_ORDERS_3 = frozenset({"Prepare", "Probe", "Start", "Inspect", "Fence", "Stop", "Dismiss"})

CHANGED_3 = _REPORTS_3 | _ORDERS_3
"""The kinds that format 4 has nested in `FromNode` and `To`."""


_RENAMED_3 = {
    "CompareSave": "CompareCheckpoint", "DistrustSave": "DistrustCheckpoint", "SaveChanged": "CheckpointChanged",
    "SaveCompared": "CheckpointCompared", "BeganElsewhere": "ResumedElsewhere",
}  # fmt: skip


def _from_3(news: Json) -> Json:
    """A report was an event of its own, an order a decision of its own, and `Start` named the checkpoint once more. Five kinds
    have other names now; renamed fields are in the `FORMER` of their classes."""
    kind = news["kind"]
    if kind in _RENAMED_3:
        return {**news, "kind": _RENAMED_3[kind]}
    if kind in _REPORTS_3:
        return _nested("FromNode", news, ("at", "node"), "report")
    if kind in _ORDERS_3:
        order = {key: item for key, item in news.items() if (kind, key) != ("Start", "resume")}
        return _nested("To", order, ("at", "why", "node"), "order")
    return news


def _nested(kind: str, news: Json, outer: tuple[str, ...], name: str) -> Json:
    """Return news of this kind with the outer fields, and with all others in the field `name`."""
    inner = {key: item for key, item in news.items() if key not in outer}
    return {"kind": kind, **{key: news[key] for key in outer}, name: inner}


_STEPS = {3: _from_3}

OLDEST = min(_STEPS)
"""The oldest format that can still be read."""


def upgrade(news: Json, found: int) -> Json:
    """Return the news of a line of format `found` in the present one. Raises KeyError where a key is missing."""
    for number in range(found, max(_STEPS) + 1):
        news = _STEPS[number](news)
    return news
