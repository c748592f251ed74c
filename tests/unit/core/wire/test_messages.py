"""Do the wire's words and the brain's words fit each other?"""

from __future__ import annotations

import dataclasses
import typing
from typing import Any, get_args

import pytest

from orchestrator.brain.model import events as e
from orchestrator.core import codec, observations
from orchestrator.core.settings.rank_settings import RankRequest
from orchestrator.core.wire import messages as m

EVENTS = codec.by_kind(e.Event)
REPORTS = codec.by_kind(m.ReliableReport)


def _fields(cls: type[Any]) -> list[str]:
    return [field.name for field in dataclasses.fields(cls)]


OF_SAVES = ("SaveSeen", "SaveHashed")
"""Reports that the ledger of saves takes: what the brain learns of them is `SaveChanged`."""


@pytest.mark.parametrize("name", [name for name in REPORTS if name not in OF_SAVES])
def test_a_kept_report_and_the_event_of_its_name_have_the_same_fields(name: str) -> None:
    """The supervisor adds when it heard it and from whom, first."""
    assert _fields(EVENTS[name]) == ["at", "node", *_fields(REPORTS[name])]
    types = {name: str(hint) for name, hint in typing.get_type_hints(REPORTS[name]).items()}
    for field, hint in typing.get_type_hints(EVENTS[name]).items():
        if field in types:
            assert str(hint) == types[field]


def test_a_beat_carries_what_the_brain_needs_and_a_rate_to_show() -> None:
    assert [name for name in _fields(m.RankHeartbeat) if name != "rate_per_s"] == [
        name for name in _fields(e.RankHeartbeat) if name != "seen"
    ]


def test_every_order_and_kept_report_names_its_attempt() -> None:
    assert all("attempt" in _fields(cls) for cls in REPORTS.values())
    without = [cls.__name__ for cls in get_args(m.Order) if "attempt" not in _fields(cls)]
    assert without == ["Ack", "Discard", "Dismiss", "ResumeOffsets", "ChunkAck"]
    assert get_args(m.AttemptOrder) == tuple(
        cls for cls in get_args(m.Order) if cls.__name__ not in without
    ), "an agent obeys these only for its latest attempt"


def test_messages_cross_the_wire() -> None:
    exited = m.Exited(1, 2, None, 9, 3, observations.Failure("E", "m", "t", "w"), False, True)
    assert codec.loads_kind(codec.by_kind(m.Report), codec.dumps_kind(exited)) == exited
    start = m.Start(1, ("a",), RankRequest(defaults={"b": "c"}), (m.RankStart(0, 0, {"RANK": "0"}),))
    assert codec.loads_kind(codec.by_kind(m.Order), codec.dumps_kind(start)) == start
