"""Traces of torch as they are parsed, and a rank's own work computed from them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from orchestrator.agent.ranks import flight_recorder
from orchestrator.agent.ranks.flight_recorder import FlightEntry, FlightRecord, WorkerServerClient
from orchestrator.agent.ranks.step_counter import ProcessGroup, StepEnd
from orchestrator.core import observations

STEP_NS = 1_000_000_000

# As torch 2.13 writes them, shortened.
GLOO = {
    "profiling_name": "gloo:all_reduce", "process_group": ["0", "default_pg"], "collective_seq_id": 9655,
    "input_sizes": [[1000]], "input_dtypes": ["Float"], "time_created_ns": 7_000_000_000, "is_p2p": False,
    "state": "scheduled", "retired": False, "timeout_ms": 1_800_000,
}  # fmt: skip
NCCL = {
    "profiling_name": "nccl:_all_gather_base", "process_group": ["3", "fsdp"], "collective_seq_id": 12,
    "input_sizes": [[4, 1], [2], []], "input_dtypes": ["BFloat16", "Long", "Int"], "time_created_ns": 9_000_000_000,
    "is_p2p": False, "state": "completed", "retired": True,
}  # fmt: skip


def trace(*entries: dict[str, object]) -> bytes:
    return json.dumps({"version": "2.10", "entries": entries}).encode()


def test_last_collective_of_each_group_comes_latest_first() -> None:
    found = FlightRecord(entries=flight_recorder._entries(trace({**GLOO, "collective_seq_id": 9654}, GLOO, NCCL)))
    groups = (ProcessGroup("3", "fsdp", (1, 3), 0),)
    assert found.collectives(groups, 4, 16_000_000_000) == (
        observations.Collective("3", "fsdp", (1, 3), 12, "_all_gather_base", "bfloat16[4,1] and 2 more", 7.0, True),
        observations.Collective("0", "default group", (0, 1, 2, 3), 9655, "all_reduce", "float32[1000]", 9.0, False,
                     (observations.EnteredCollective(9654, "all_reduce", "float32[1000]"),), limit_s=1800.0),
    )  # fmt: skip


def test_few_previous_collectives_are_reported() -> None:
    entered = [{**GLOO, "collective_seq_id": number} for number in range(9_600, 9_656)]
    one = FlightRecord(entries=flight_recorder._entries(trace(*entered))).collectives((), 4, 16_000_000_000)[0]
    assert [before.number for before in one.earlier] == [9_652, 9_653, 9_654]


def test_unknown_group_members_are_not_guessed() -> None:
    (one,) = FlightRecord(entries=flight_recorder._entries(trace(NCCL))).collectives((), 4, 0)
    assert (one.ranks, one.entered_s) == ((), 0.0)


@pytest.mark.parametrize("text", [b"", b"[]", b'{"entries": [{}]}', b'{"entries": [{"profiling_name": "x"}]}'])
def test_trace_of_other_format_is_a_caught_error(text: bytes) -> None:
    with pytest.raises((ValueError, KeyError, TypeError, IndexError, AttributeError)):
        flight_recorder._entries(text)


def test_missing_torch_process_is_reported(tmp_path: Path) -> None:
    found = WorkerServerClient(tmp_path).query(threads_pid=0)
    assert "no process" in found.unavailable
    assert found.gil_held is None


def test_dead_process_with_leftover_socket_is_skipped(tmp_path: Path) -> None:
    """A dead process that left its socket behind is skipped."""
    (tmp_path / "torch-999999999.socket").touch()
    assert "no process" in WorkerServerClient(tmp_path).query().unavailable


# A rank's own work: steps end at 0, 1, 2 … s, `own_s` later it enters the first of its collectives.


def ends(count: int, per_step: int | None = 2) -> list[StepEnd]:
    return [StepEnd(n, n * STEP_NS, None if per_step is None else (n * per_step,)) for n in range(count)]


def entries(count: int, own_work_s: float, *, is_p2p: bool = False, backend: str = "gloo") -> list[FlightEntry]:
    """Two collectives a step, the second one 0.1 s after the first."""
    starts = [n * STEP_NS + int((own_work_s + late_s) * 1e9) for n in range(count) for late_s in (0.0, 0.1)]
    return [FlightEntry("0", "", n, "x", "", ns, True, is_p2p, backend != "gloo") for n, ns in enumerate(starts)]


def test_own_work_is_between_step_and_next_collective() -> None:
    """A rank's own work lies between the end of a step and the next collective."""
    assert flight_recorder.local_compute_s(ends(20), entries(20, 0.3)) == pytest.approx(0.3)


def test_rank_waiting_in_collectives_has_no_more_work() -> None:
    quick, slow = entries(20, 0.05), entries(20, 0.8)
    assert flight_recorder.local_compute_s(ends(20), quick) == pytest.approx(0.05)
    assert flight_recorder.local_compute_s(ends(20), slow) == pytest.approx(0.8)


def test_few_steps_give_no_result() -> None:
    assert flight_recorder.local_compute_s(ends(5), entries(5, 0.3)) is None
    assert flight_recorder.local_compute_s([], []) is None


def test_trace_starting_mid_step_ignores_that_step() -> None:
    """A trace that begins in the middle of a step gives no result for that step."""
    assert flight_recorder.local_compute_s(ends(10), entries(10, 0.3)[-14:]) == pytest.approx(0.3)
    assert flight_recorder.local_compute_s(ends(10), entries(10, 0.3)[-9:]) is None


def test_steps_with_peer_to_peer_give_no_result() -> None:
    """gloo counts such traffic and does not list it; nccl lists it."""
    assert flight_recorder.local_compute_s(ends(20, per_step=3), entries(20, 0.3)) is None
    assert flight_recorder.local_compute_s(ends(20, per_step=None), entries(20, 0.3)) is None
    assert flight_recorder.local_compute_s(ends(20), entries(20, 0.3, is_p2p=True, backend="nccl")) is None
    assert flight_recorder.local_compute_s(ends(20, per_step=1), entries(20, 0.3, backend="nccl")) == pytest.approx(0.3)


# What is counted with the collectives, and is none: steps end at 1, 2, 3 … s, each with one collective half a second before.


@pytest.mark.parametrize("extra, is_mixed", [((), False), ((8, 9, 10, 11, 12), True), ((11,), False), ((2, 5), False)])
def test_peer_to_peer_is_recognised_by_lasting_offset(extra: tuple[int, ...], is_mixed: bool) -> None:
    """`extra`: the steps at whose end one more was counted; a thread's own collective is listed a moment later."""
    group = ProcessGroup("0", "", (0, 1, 2, 3), 0)
    listed = [
        FlightEntry("0", "", n, "all_reduce", "", n * STEP_NS - STEP_NS // 2, True, False, False) for n in range(1, 13)
    ]
    ended = [StepEnd(n, n * STEP_NS, (40 + n + (n in extra),)) for n in range(1, 13)]
    assert flight_recorder.find_groups_with_p2p(ended, (group,), listed) == ((group.key,) if is_mixed else ())


def test_steps_after_trace_are_not_compared() -> None:
    group = ProcessGroup("0", "", (0, 1, 2, 3), 0)
    listed = [
        FlightEntry("0", "", n, "all_reduce", "", n * STEP_NS - STEP_NS // 2, True, False, False) for n in range(1, 9)
    ]
    ended = [StepEnd(n, n * STEP_NS, (40 + n,)) for n in range(1, 13)]
    assert flight_recorder.find_groups_with_p2p(ended, (group,), listed) == ()


def test_backend_listing_all_it_counts_is_never_mixed() -> None:
    group = ProcessGroup("0", "", (0, 1), 0)
    listed = [FlightEntry("0", "", n, "x", "", n * STEP_NS, True, False, True) for n in range(9)]
    assert (
        flight_recorder.find_groups_with_p2p([StepEnd(n, n * STEP_NS, (3 * n,)) for n in range(9)], (group,), listed)
        == ()
    )
