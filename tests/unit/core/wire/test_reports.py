"""Does every message of an attempt name it, and cross the wire?"""

from __future__ import annotations

import dataclasses
from typing import Any, get_args

from orchestrator.brain.model import events as e
from orchestrator.core import codec, observations
from orchestrator.core.checkpoints.resume_choice import ResumePoint
from orchestrator.core.wire import orders, reports
from tests.support import jobs
from tests.support.frames import frame

EVENTS = codec.classes_by_kind(e.Event)
REPORTS = codec.classes_by_kind(reports.ReliableReport)


def _fields(cls: type[Any]) -> list[str]:
    return [field.name for field in dataclasses.fields(cls)]


def test_every_order_and_kept_report_names_its_attempt() -> None:
    assert [name for name, cls in REPORTS.items() if "attempt" not in _fields(cls)] == ["CheckpointCopied"]
    without = [cls.__name__ for cls in get_args(orders.Order) if "attempt" not in _fields(cls)]
    assert without == ["Ack", "Discard", "CopyCheckpoint", "ResumeOffsets", "ChunkAck"]
    assert all("attempt" in _fields(cls) for cls in get_args(orders.NodeOrder))


def test_messages_round_trip_over_the_wire() -> None:
    """Messages are the same after they crossed the wire."""
    exited = reports.Exited(1, 2, None, 9, 3, observations.Failure("E", "m", "t", frame("w:1 f")), False, True)
    assert codec.loads_kind(codec.classes_by_kind(reports.Report), codec.dumps_kind(exited)) == exited
    prepare = orders.PrepareNode(
        1, ResumePoint("/a", 3, 1), jobs.plan(env={"A": "b"}), ("node-0", "node-1"), {"HOME": "/h"}
    )
    assert codec.loads_kind(codec.classes_by_kind(orders.Order), codec.dumps_kind(prepare)) == prepare
