"""A save is whole once every rank that may write to it has gone on, or its format says so; otherwise it is torn."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import pytest

from orchestrator.brain.model.facts import AttemptFacts, Facts
from orchestrator.brain.model.node_facts import AgentLoss, NodeFacts
from orchestrator.brain.model.rank_facts import RankFacts, RankState
from orchestrator.core.checkpoints.checkpoint import (
    Checkpoint,
    CheckpointFile,
    CheckpointState,
    CompletionReason,
    Content,
    Format,
    GroupReading,
    HostPart,
    RequiredFile,
)
from orchestrator.core.checkpoints.resume_choice import ResumePoint
from orchestrator.core.wire import reports
from orchestrator.supervisor.executor import checkpoint_gang
from orchestrator.supervisor.transfers import completion
from orchestrator.supervisor.transfers.completion import (
    SCANS_KEPT,
    Assessment,
    CheckpointGang,
    ContinuationTracker,
    HeartbeatHistory,
)
from tests.support import jobs

SHOWN = GroupReading(Format.TORCH, Content.STATE, True, is_proved=True)
"""The reading of files whose format shows that each is whole, and not whether there are to be more."""

DONE = dataclasses.replace(SHOWN, is_marked_complete=True)
NODES = ("n0", "n1")
WHOLE, OPEN, TORN = CheckpointState.WHOLE, CheckpointState.OPEN, CheckpointState.TORN


def part(
    host: str, *names: str, state: GroupReading = SHOWN, by: CompletionReason = CompletionReason.STEPS, **more: int
) -> HostPart:
    """Return what a host reports of a save; `steps` and `size` may be given."""
    pieces = tuple(CheckpointFile(name, more.get("size", 100), 1) for name in names)
    return HostPart(host, f"/far/{host}", more.get("steps", 10), pieces, state, by)


def save(*parts: HostPart, is_slot: bool = False) -> Checkpoint:
    """Return an open save, with a number in its name or under a name that is written again and again."""
    key = "last" if is_slot else "#10"
    pieces = tuple(piece for _, piece in completion.collect_files(parts).values())
    return Checkpoint(
        9, key, "last" if is_slot else "#", "last", 1, 2, 10, Format.UNKNOWN, Content.OTHER, True, OPEN,
        files=pieces, parts=parts,
    )  # fmt: skip


def gang(
    *, stopped: tuple[str, ...] = (), lost: tuple[str, ...] = (), nodes: tuple[str, ...] = NODES
) -> CheckpointGang:
    return CheckpointGang(1, 0, 2, nodes, frozenset(stopped), frozenset(lost))


ENDED = gang(stopped=NODES)


def watch(*gone_on: str) -> ContinuationTracker:
    """Return a watch by which these nodes have gone on."""
    return ContinuationTracker(continued=set(gone_on))


def beat(looks: int, *steps: int, has_unfinished: bool = False) -> reports.Heartbeat:
    ranks = tuple(reports.RankHeartbeat(rank, count, "S", 0, 0.0) for rank, count in enumerate(steps))
    return reports.Heartbeat(1, ranks, 1, looks, has_unfinished)


def judge(
    *parts: HostPart,
    by: ContinuationTracker | None = None,
    of: CheckpointGang = ENDED,
    before: Sequence[Checkpoint] = (),
) -> Assessment:
    return completion.assess(save(*parts), by or watch(), of, before)


def torn(why: str) -> Assessment:
    """Return what is found of a torn save where `checkpoint.path` says: it is put out of the way."""
    return Assessment(TORN, CompletionReason.NONE, why, is_damaged=True)


# Every rank has gone on


def test_checkpoint_is_open_until_last_node_continued() -> None:
    running = gang()
    assert judge(part("n0", "a.pt"), by=watch("n0"), of=running).state is OPEN
    assert judge(part("n0", "a.pt"), by=watch("n0", "n1"), of=running) == Assessment(WHOLE, CompletionReason.STEPS, "")


@pytest.mark.parametrize("by", [CompletionReason.STEPS, CompletionReason.END, CompletionReason.NO_WRITES])
def test_completion_records_how_host_knew_writing_ended(by: CompletionReason) -> None:
    found = judge(part("n0", "a.pt", by=by), by=watch("n0", "n1"))
    assert (found.state, found.closed_by) == (WHOLE, by)


def test_nodes_need_not_continue_again_for_another_part() -> None:
    seen = ContinuationTracker()
    seen.note_change(save(part("n0", "last/0.pt"), is_slot=True), {})
    seen.add_heartbeat("n2", beat(1, 11)), seen.add_heartbeat("n2", beat(3, 12))
    seen.note_change(save(part("n0", "last/0.pt"), part("n1", "last/1.pt", by=CompletionReason.NONE), is_slot=True), {})
    assert seen.continued == {"n0", "n2"}
    seen.note_change(save(part("n0", "last/0.pt"), part("n1", "last/1.pt", steps=20), is_slot=True), {})
    assert seen.continued == {"n1"}, "of the next writing nothing is known of them"


def test_change_counts_as_continued_only_for_own_part() -> None:
    seen = watch("n0", "n1")
    seen.note_change(save(part("n1", "a.pt")), {})
    assert seen.continued == {"n1"}
    seen.note_change(save(part("n1", "a.pt"), part("n0", "b.pt")), {})
    assert seen.continued == {"n0", "n1"}
    seen.note_change(save(part("n1", "a.pt"), part("n0", "b.pt", by=CompletionReason.NONE)), {})
    assert seen.continued == {"n1"}


@pytest.mark.parametrize(("steps", "gone_on"), [(10, {"n0", "n1"}), (20, {"n1"}), (0, {"n1"})])
def test_earlier_write_is_no_sign_of_continuing(steps: int, gone_on: set[str]) -> None:
    seen = ContinuationTracker()
    seen.note_change(
        save(part("n0", "last/0.pt", steps=min(steps, 10)), part("n1", "last/1.pt", steps=steps), is_slot=True), {}
    )
    assert seen.continued == gone_on


def test_node_continued_if_all_ranks_step_between_heartbeats() -> None:
    seen = ContinuationTracker()
    assert not seen.add_heartbeat("n1", beat(5, 10, 10)), (
        "what was made before the first beat may have been before the change"
    )
    assert not seen.add_heartbeat("n1", beat(7, 11, 10))
    assert seen.add_heartbeat("n1", beat(7, 11, 11))
    assert not seen.add_heartbeat("n1", beat(8, 12, 12)), "it is told once"


def test_heartbeat_before_change_does_not_count() -> None:
    seen = ContinuationTracker()
    seen.add_heartbeat("n1", beat(1, 10))
    seen.note_change(save(part("n0", "a.pt")), {})
    assert not seen.add_heartbeat("n1", beat(9, 20))
    assert seen.add_heartbeat("n1", beat(11, 21))


def test_late_heartbeats_with_same_steps_do_not_count() -> None:
    seen = ContinuationTracker()
    seen.note_change(save(part("n0", "a.pt", steps=1_000)), {})
    assert not seen.add_heartbeat("n1", beat(1, 997, 997))
    assert not seen.add_heartbeat("n1", beat(3, 999, 999)) and not seen.add_heartbeat("n1", beat(5, 1_000, 1_001))
    assert seen.add_heartbeat("n1", beat(7, 1_001, 1_002))
    seen = ContinuationTracker()
    seen.note_change(save(part("n0", "a.pt", steps=1_000)), {})
    assert not seen.add_heartbeat("n1", beat(1, 500))
    assert seen.add_heartbeat("n1", beat(3, 501)), "its optimizer steps every other time"


def test_agent_must_scan_twice_with_nothing_to_report() -> None:
    seen = ContinuationTracker()
    seen.add_heartbeat("n1", beat(5, 10))
    assert not seen.add_heartbeat("n1", beat(6, 20))
    assert not seen.add_heartbeat("n1", beat(7, 30, has_unfinished=True))
    assert seen.add_heartbeat("n1", beat(8, 40))


def test_steps_suffice_where_other_agent_scans_disk() -> None:
    seen = ContinuationTracker()
    seen.add_heartbeat("n1", beat(-1, 10))
    assert not seen.add_heartbeat("n1", beat(-1, 10))
    assert seen.add_heartbeat("n1", beat(-1, 11))


def beats(*told: reports.Heartbeat) -> dict[str, HeartbeatHistory]:
    """Return what is remembered of the heartbeats of n1."""
    known = HeartbeatHistory(told[0])
    for one in told:
        known.add(one)
    return {"n1": known}


def test_heartbeats_before_checkpoint_report_count() -> None:
    """So a name that is written again every few seconds is whole at times although its hosts always report the next."""
    passed = (beat(5, 999), beat(6, 1_000), beat(6, 1_001), beat(7, 1_002), beat(8, 1_003))
    for count, is_gone_on in ((2, False), (3, False), (4, False), (5, True)):
        seen = ContinuationTracker()
        seen.note_change(save(part("n0", "a.pt", steps=1_000)), beats(*passed[:count]))
        assert ("n1" in seen.continued) is is_gone_on
    seen = ContinuationTracker()
    seen.note_change(save(part("n0", "a.pt", steps=1_000)), beats(*passed[:4]))
    assert seen.add_heartbeat("n1", beat(8, 1_003))


def test_unrelated_earlier_heartbeats_do_not_count() -> None:
    for steps, told in (
        (1_000, (beat(5, 2_000), beat(7, 2_002))),
        (1_000, (beat(5, 1_001), beat(0, 1_002), beat(1, 1_003))),
        (1_000, (beat(5, 1_001), beat(9, 1_002, has_unfinished=True))),
        (0, (beat(5, 1), beat(7, 2))),
    ):
        seen = ContinuationTracker()
        seen.note_change(save(part("n0", "a.pt", steps=steps)), beats(*told))
        assert "n1" not in seen.continued


def test_only_last_scans_of_node_are_kept() -> None:
    known = beats(*(beat(looks, looks) for looks in range(1, 3 * SCANS_KEPT)))["n1"]
    assert len(known.steps) == SCANS_KEPT


def test_stepless_or_ended_ranks_continue_by_scans() -> None:
    for count in ((), (0, 0)):
        seen = ContinuationTracker()
        seen.add_heartbeat("n1", beat(5, *count))
        assert not seen.add_heartbeat("n1", beat(6, *count)) and seen.add_heartbeat("n1", beat(7, *count))


def test_node_with_successful_ranks_continued_after_full_report() -> None:
    ended = dataclasses.replace(gang(stopped=("n0",)), done=frozenset(NODES))
    assert judge(part("n0", "a.pt"), by=watch("n0"), of=ended).state is OPEN
    assert (
        judge(part("n0", "a.pt"), by=watch("n0"), of=dataclasses.replace(ended, stopped=frozenset(NODES))).state
        is WHOLE
    )


# The attempt is over


def test_checkpoint_without_continued_rank_is_finally_torn() -> None:
    assert judge(part("n0", "a.pt"), of=gang(stopped=("n0",))).state is OPEN
    assert judge(part("n0", "a.pt")) == torn("the attempt ended while it was written")


def test_lost_node_is_named_unless_it_continued() -> None:
    over = gang(stopped=("n0",), lost=("n1",))
    why = "n1 was lost before it reported whether it has a part of it"
    assert judge(part("n0", "a.pt"), by=watch("n0"), of=over) == torn(why)
    assert judge(part("n0", "a.pt"), by=watch("n0", "n1"), of=over).state is WHOLE


def test_completion_marker_completes_despite_lost_node() -> None:
    over = gang(stopped=("n0",), lost=("n1",))
    assert judge(part("n0", "a.pt", state=DONE), of=over) == Assessment(WHOLE, CompletionReason.FINAL_FILE, "")


def test_completion_marker_needs_ended_ranks_and_all_files() -> None:
    assert judge(part("n0", "a.pt", state=DONE), of=gang()).state is OPEN
    assert judge(part("n0", "s/model.pt", "s/optim_rank0.pt", "s/optim_rank1.pt", state=DONE)).state is WHOLE
    three = dataclasses.replace(ENDED, world_size=3)
    assert judge(part("n0", "s/optim_rank0.pt", "s/optim_rank1.pt", state=DONE), of=three).state is TORN


def test_unwritten_name_of_previous_checkpoint_makes_it_torn() -> None:
    stale = dataclasses.replace(part("n0", "last/a.pt", "last/b.pt", state=DONE), stale=("last/b.pt",))
    why = "the attempt ended while it was written: last/b.pt is still from the previous checkpoint"
    assert judge(stale) == torn(why)
    assert judge(stale, by=watch("n0", "n1")).state is WHOLE, "some files of a save are written once"
    config = dataclasses.replace(part("n0", "last/a.pt", "last/config.json", state=DONE), stale=("last/config.json",))
    assert judge(config).state is WHOLE


def test_nothing_is_complete_for_lack_of_nodes() -> None:
    none = gang(nodes=())
    assert judge(part("n0", "a.pt"), of=none).state is TORN
    assert judge(part("n0", "a.pt", by=CompletionReason.NONE), by=watch(), of=none).state is TORN


# What its files say


def _needs(*names: str, by: str = "s/.metadata", size: int = 100) -> GroupReading:
    needs = tuple(RequiredFile(name, size, by) for name in names)
    return dataclasses.replace(DONE, format=Format.DCP, needs=needs)


def test_named_file_may_be_on_another_host() -> None:
    first = part("n0", "s/.metadata", "s/__0_0.distcp", state=_needs("s/__0_0.distcp", "s/__1_0.distcp"))
    second = part("n1", "s/__1_0.distcp")
    alone = judge(first, by=watch(*NODES), of=gang())
    assert (alone.state, alone.why) == (OPEN, "s/__1_0.distcp is missing, but listed in s/.metadata")
    assert judge(first).state is TORN
    assert judge(first, second).closed_by is CompletionReason.FINAL_FILE
    assert (
        judge(first, part("n1", "s/__1_0.distcp", size=99)).why == "s/__1_0.distcp has 99 bytes; s/.metadata says 100"
    )


def test_fault_on_any_host_prevents_completion() -> None:
    cut = dataclasses.replace(SHOWN, faults=("s/b.pt is cut off",))
    found = judge(part("n0", "s/a.pt"), part("n1", "s/b.pt", state=cut), by=watch(*NODES))
    assert (found.state, found.why) == (TORN, "s/b.pt is cut off")


def test_new_file_naming_previous_one_waits_for_it() -> None:
    parts = part(
        "n0", "s/.metadata", "s/__0_0.distcp", "s/__1_0.distcp", state=_needs("s/__0_0.distcp", "s/__1_0.distcp")
    )
    half = dataclasses.replace(parts, stale=("s/__1_0.distcp",))
    found = judge(half, by=watch(*NODES), of=gang())
    assert (found.state, found.why) == (
        OPEN,
        "s/__1_0.distcp is still from the previous checkpoint; s/.metadata is new",
    )
    assert judge(half, by=watch(*NODES)).state is TORN
    old = dataclasses.replace(parts, stale=("s/.metadata", "s/__1_0.distcp"))
    assert judge(old, by=watch(*NODES), of=gang()).why == "s/__0_0.distcp was rewritten after s/.metadata"


def test_missing_rank_between_others_is_noticed() -> None:
    found = judge(part("n0", "optim_rank0.pt"), part("n1", "optim_rank2.pt"), by=watch(*NODES))
    assert (found.state, found.why) == (TORN, "optim_rank1.pt is missing")


# Parts of several hosts


def test_file_on_several_hosts_counts_with_most_steps() -> None:
    first, second = part("n0", "a.pt", "b.pt", steps=10), part("n1", "a.pt", steps=10)
    assert {name: host for name, (host, _) in completion.collect_files((first, second)).items()} == {
        "a.pt": "n0",
        "b.pt": "n0",
    }
    later = dataclasses.replace(second, steps=11)
    assert {name: host for name, (host, _) in completion.collect_files((first, later)).items()} == {
        "a.pt": "n1",
        "b.pt": "n0",
    }


@pytest.mark.parametrize(("steps", "is_mixed"), [((10, 10), False), ((10, 11), True), ((0, 0), True)])
def test_parts_of_rewritten_name_must_share_one_step(steps: tuple[int, int], is_mixed: bool) -> None:
    parts = [part(node, f"last/{node}.pt", steps=count) for node, count in zip(NODES, steps, strict=True)]
    found = completion.assess(save(*parts, is_slot=True), watch(*NODES), gang())
    assert (found.state is OPEN, found.why != "") == (is_mixed, is_mixed)
    assert completion.assess(save(*parts), watch(*NODES), gang()).state is WHOLE, "with a number in its name"


def test_single_file_of_every_host_is_not_mixed() -> None:
    parts = [part(node, "last.pt", steps=count) for node, count in zip(NODES, (10, 12), strict=True)]
    assert completion.assess(save(*parts, is_slot=True), watch(*NODES), gang()).state is WHOLE


# The gang


def test_ranks_killed_steps_later_have_written_checkpoint() -> None:
    over, here = gang(stopped=NODES), ContinuationTracker(continued={"n0"})
    for made, by, state in (
        (11, CompletionReason.STEPS, WHOLE),
        (10, CompletionReason.STEPS, TORN),
        (11, CompletionReason.NONE, TORN),
    ):
        watch, ended = (
            here if by is CompletionReason.STEPS else ContinuationTracker(),
            dataclasses.replace(over, fewest_steps={"n1": made}),
        )
        assert completion.assess(save(part("n0", "model.pt", by=by)), watch, ended).state is state


def test_attempt_inputs_come_from_facts() -> None:
    ended = {"rank_state": RankState.EXITED, "code": 0, "steps": 7}
    facts = Facts(jobs.plan().limits)
    facts.attempt = AttemptFacts(2, 0.0, 0.0, ResumePoint("/job/checkpoints/last.pt", 40, 1))
    facts.nodes = {
        name: NodeFacts(name, (2 * number, 2 * number + 1), may_run_attempt=2, cleared_attempt=2 if name == "n1" else 1)
        for number, name in enumerate(("n0", "n1", "n2"))
    }
    facts.nodes["n2"].agent_loss = AgentLoss("its agent has died", 9.0)
    facts.nodes["n3"] = NodeFacts("n3", (), may_run_attempt=1)
    facts.ranks = {
        rank: RankFacts(rank, f"n{rank // 2}", **(ended if rank // 2 == 1 else {}))  # type: ignore[arg-type]
        for rank in range(6)
    }
    assert checkpoint_gang(facts) == CheckpointGang(
        2, 40, 6, ("n0", "n1", "n2"), frozenset({"n1"}), frozenset({"n2"}), frozenset({"n1"}), {"n1": 7}
    )
    facts.ranks[3].stop_ordered = True
    assert checkpoint_gang(facts).done == frozenset(), "a rank that was stopped has not ended its work"
    facts.attempt = AttemptFacts(3, 0.0, 0.0, None)
    assert checkpoint_gang(facts).nodes == (), "of ranks that were never started nothing is known"
    assert checkpoint_gang(Facts()) == CheckpointGang(0, 0, 0, ())
