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


def test_the_last_collective_of_each_group_is_told_the_latest_first() -> None:
    found = FlightRecord(
        entries=flight_recorder._entries(trace({**GLOO, "collective_seq_id": 9654}, GLOO, NCCL))
    )
    groups = (ProcessGroup("3", "fsdp", (1, 3), 0),)
    assert found.collectives(groups, 4, 16_000_000_000) == (
        observations.Collective("3", "fsdp", (1, 3), 12, "_all_gather_base", "bfloat16[4,1] and 2 more", 7.0, True),
        observations.Collective("0", "default group", (0, 1, 2, 3), 9655, "all_reduce", "float32[1000]", 9.0, False,
                     (observations.EnteredCollective(9654, "all_reduce", "float32[1000]"),), limit_s=1800.0),
    )  # fmt: skip


def test_few_of_the_collectives_before_are_told_of() -> None:
    entered = [{**GLOO, "collective_seq_id": number} for number in range(9_600, 9_656)]
    one = FlightRecord(entries=flight_recorder._entries(trace(*entered))).collectives((), 4, 16_000_000_000)[
        0
    ]
    assert [before.number for before in one.earlier] == [9_652, 9_653, 9_654]


def test_members_of_a_group_that_was_not_heard_of_are_not_guessed() -> None:
    (one,) = FlightRecord(entries=flight_recorder._entries(trace(NCCL))).collectives((), 4, 0)
    assert (one.ranks, one.entered_s) == ((), 0.0)


@pytest.mark.parametrize(
    "text", [b"", b"[]", b'{"entries": [{}]}', b'{"entries": [{"profiling_name": "x"}]}']
)
def test_a_trace_of_another_make_is_an_error_that_is_caught(text: bytes) -> None:
    with pytest.raises((ValueError, KeyError, TypeError, IndexError, AttributeError)):
        flight_recorder._entries(text)


def test_where_no_process_has_torch_that_is_said(tmp_path: Path) -> None:
    found = WorkerServerClient(tmp_path).query(threads_pid=0)
    assert "no process" in found.unavailable
    assert found.gil_held is None


def test_a_dead_process_that_left_its_socket_behind_is_passed_over(tmp_path: Path) -> None:
    (tmp_path / "torch-999999999.socket").touch()
    assert "no process" in WorkerServerClient(tmp_path).query().unavailable


# A rank's own work: steps end at 0, 1, 2 … s, `own_s` later it enters the first of its collectives.


def ends(count: int, per_step: int | None = 2) -> list[StepEnd]:
    return [StepEnd(n, n * STEP_NS, None if per_step is None else (n * per_step,)) for n in range(count)]


def entries(
    count: int, own_work_s: float, *, is_p2p: bool = False, backend: str = "gloo"
) -> list[FlightEntry]:
    """Two collectives a step, the second one 0.1 s after the first."""
    starts = [n * STEP_NS + int((own_work_s + late_s) * 1e9) for n in range(count) for late_s in (0.0, 0.1)]
    return [
        FlightEntry("0", "", n, "x", "", ns, True, is_p2p, backend != "gloo") for n, ns in enumerate(starts)
    ]


def test_own_work_is_what_lies_between_a_steps_end_and_the_next_collective() -> None:
    assert flight_recorder.local_compute_s(ends(20), entries(20, 0.3)) == pytest.approx(0.3)


def test_a_rank_that_waits_in_its_collectives_has_no_more_work_of_its_own() -> None:
    quick, slow = entries(20, 0.05), entries(20, 0.8)
    assert flight_recorder.local_compute_s(ends(20), quick) == pytest.approx(0.05)
    assert flight_recorder.local_compute_s(ends(20), slow) == pytest.approx(0.8)


def test_few_steps_say_nothing() -> None:
    assert flight_recorder.local_compute_s(ends(5), entries(5, 0.3)) is None
    assert flight_recorder.local_compute_s([], []) is None


def test_a_trace_that_begins_in_the_middle_of_a_step_says_nothing_of_that_step() -> None:
    assert flight_recorder.local_compute_s(ends(10), entries(10, 0.3)[-14:]) == pytest.approx(0.3)
    assert flight_recorder.local_compute_s(ends(10), entries(10, 0.3)[-9:]) is None


def test_steps_in_which_ranks_send_to_one_another_say_nothing() -> None:
    """gloo counts such traffic and does not list it; nccl lists it."""
    assert flight_recorder.local_compute_s(ends(20, per_step=3), entries(20, 0.3)) is None
    assert flight_recorder.local_compute_s(ends(20, per_step=None), entries(20, 0.3)) is None
    assert flight_recorder.local_compute_s(ends(20), entries(20, 0.3, is_p2p=True, backend="nccl")) is None
    assert flight_recorder.local_compute_s(
        ends(20, per_step=1), entries(20, 0.3, backend="nccl")
    ) == pytest.approx(0.3)


# What is counted with the collectives, and is none: steps end at 1, 2, 3 … s, each with one collective half a second before.


@pytest.mark.parametrize(
    "extra, is_mixed", [((), False), ((8, 9, 10, 11, 12), True), ((11,), False), ((2, 5), False)]
)
def test_what_goes_from_one_rank_to_one_other_is_known_by_a_count_that_stays_ahead(
    extra: tuple[int, ...], is_mixed: bool
) -> None:
    """`extra`: the steps at whose end one more was counted; a thread's own collective is listed a moment later."""
    group = ProcessGroup("0", "", (0, 1, 2, 3), 0)
    listed = [
        FlightEntry("0", "", n, "all_reduce", "", n * STEP_NS - STEP_NS // 2, True, False, False)
        for n in range(1, 13)
    ]
    ended = [StepEnd(n, n * STEP_NS, (40 + n + (n in extra),)) for n in range(1, 13)]
    assert flight_recorder.find_groups_with_p2p(ended, (group,), listed) == ((group.key,) if is_mixed else ())


def test_steps_after_the_trace_was_taken_are_not_compared_with_it() -> None:
    group = ProcessGroup("0", "", (0, 1, 2, 3), 0)
    listed = [
        FlightEntry("0", "", n, "all_reduce", "", n * STEP_NS - STEP_NS // 2, True, False, False)
        for n in range(1, 9)
    ]
    ended = [StepEnd(n, n * STEP_NS, (40 + n,)) for n in range(1, 13)]
    assert flight_recorder.find_groups_with_p2p(ended, (group,), listed) == ()


def test_a_backend_that_lists_all_it_counts_is_never_mixed() -> None:
    group = ProcessGroup("0", "", (0, 1), 0)
    listed = [FlightEntry("0", "", n, "x", "", n * STEP_NS, True, False, True) for n in range(9)]
    assert (
        flight_recorder.find_groups_with_p2p(
            [StepEnd(n, n * STEP_NS, (3 * n,)) for n in range(9)], (group,), listed
        )
        == ()
    )
