"""A save is held against the one before it: that may prove its end, and what it lacks counts while nothing else does."""

from __future__ import annotations

import dataclasses

from orchestrator.core.checkpoints.checkpoint import Checkpoint, CompletionReason, HostPart
from orchestrator.supervisor.transfers import completion
from orchestrator.supervisor.transfers.completion import Assessment
from tests.unit.supervisor.transfers.test_completion import (
    DONE,
    ENDED,
    NODES,
    OPEN,
    SHOWN,
    TORN,
    WHOLE,
    gang,
    judge,
    part,
    save,
    watch,
)


def earlier(*names: str, number: int = 1, attempt: int = 1) -> Checkpoint:
    """Return a whole save before the one that is judged."""
    return dataclasses.replace(save(part("n0", *names)), number=number, attempt=attempt, state=WHOLE)


def test_same_files_as_previous_make_checkpoint_complete() -> None:
    """A checkpoint with the same file set as the previous one is complete if each file is."""

    def of(number: int) -> HostPart:
        return part("n0", f"model_{number}.pt", f"optim_{number}.pt")

    before = [earlier("model_10.pt", "optim_10.pt")]
    assert judge(of(20), before=before) == Assessment(WHOLE, CompletionReason.SAME_FILE_SET, "")
    before = [
        earlier("model_10.pt", "optim_10.pt"),
        earlier("model_20.pt", "optim_20.pt", "ema_20.pt", number=2),
    ]
    assert judge(of(30), before=before).state is TORN
    before.insert(0, earlier("model_5.pt", "optim_5.pt", number=0))
    assert judge(of(30), before=before).closed_by is CompletionReason.SAME_FILE_SET, "two of three had no more"
    assert judge(of(20)).state is TORN
    assert judge(part("n0", "model_20.pt"), before=before).state is TORN
    unproved = part("n0", "model_20.bin", "optim_20.bin", state=dataclasses.replace(SHOWN, is_proved=False))
    assert judge(unproved, before=before).state is TORN


def test_previous_file_is_missed_only_when_unclear() -> None:
    """A file of the previous checkpoint is missed only if no step or end shows that all is written."""
    before = [earlier("model_10.pt", "buffer_10.pkl")]
    why = "it has no file like buffer_10.pkl of the previous checkpoint"
    assert judge(part("n0", "model_20.pt"), by=watch(*NODES), of=gang(), before=before).state is WHOLE
    assert judge(part("n0", "model_20.pt"), of=gang(), before=before) == Assessment(OPEN, CompletionReason.NONE, why)
    torn = Assessment(TORN, CompletionReason.NONE, why, is_damaged=True)
    assert judge(part("n0", "model_20.pt", state=DONE), before=before) == torn
    silent = save(part("n0", "model_20.pt", by=CompletionReason.NO_WRITES))
    after = [*before, dataclasses.replace(save(), number=10)]
    for of, others, state in ((gang(), before, OPEN), (ENDED, before, TORN), (gang(), after, WHOLE)):
        assert completion.assess(silent, watch(*NODES), of, others).state is state
    ended_well = dataclasses.replace(ENDED, done=frozenset(NODES))
    assert completion.assess(silent, watch(*NODES), ended_well, before).state is WHOLE


def test_only_file_of_all_previous_checkpoints_is_missed() -> None:
    both, one = ("model_10.pt", "ema_10.pt"), ("model_20.pt",)
    saves = [earlier(*one), earlier(*both, number=2)]
    assert judge(part("n0", "model_30.pt", state=DONE), before=saves).closed_by is CompletionReason.FINAL_FILE
    saves = [earlier(*both), earlier(*both, number=2)]
    why = "it has no file like ema_10.pt of the previous checkpoint"
    found = judge(part("n0", "model_30.pt", state=DONE), before=saves)
    assert found == Assessment(TORN, CompletionReason.NONE, why, is_damaged=True), "a script must not find it"
    assert judge(part("n0", "model_30.pt", state=DONE), before=saves[1:]) == found


def test_file_written_late_by_thread_is_awaited() -> None:
    """A file that a thread writes later is waited for until the next checkpoint is begun."""
    saves = [earlier("model_10.pt", "optim_10.pt"), earlier("model_20.pt", "optim_20.pt", number=2)]
    why = "it has no file like optim_20.pt of the previous checkpoint"
    half, gone_on = part("n0", "model_30.pt", state=DONE), watch(*NODES)
    assert judge(half, by=gone_on, of=gang(), before=saves) == Assessment(OPEN, CompletionReason.NONE, why)
    assert judge(half, by=gone_on, before=saves) == Assessment(TORN, CompletionReason.NONE, why, is_damaged=True)
    after = [*saves, dataclasses.replace(save(), number=10)]
    assert judge(half, by=gone_on, of=gang(), before=after).state is WHOLE, "a script may write it no more"
    assert judge(half, by=gone_on, of=gang(), before=saves[1:]).state is WHOLE
    resumed = [dataclasses.replace(one, attempt=0) for one in saves]
    assert judge(half, by=gone_on, of=gang(), before=resumed).state is WHOLE
    ended_well = dataclasses.replace(ENDED, done=frozenset(NODES))
    assert judge(half, by=gone_on, of=ended_well, before=saves).state is WHOLE


def test_file_of_fewer_ranks_than_before_is_missed() -> None:
    """A file that fewer ranks have than before is missed, although all have continued."""
    names = ("model_10.pt", "rng_10_rank0.pt", "rng_10_rank1.pt", "data_10_shard0.pt", "data_10_shard1.pt")
    before = [earlier(*names)]
    some = part("n0", "model_20.pt", "rng_20_rank0.pt", "data_20_shard0.pt")
    why = "it has no file like that of rank 1 in the previous checkpoint"
    assert judge(some, by=watch(*NODES), of=gang(), before=before) == Assessment(OPEN, CompletionReason.NONE, why)
    assert judge(part("n0", "model_20.pt"), by=watch(*NODES), of=gang(), before=before).state is WHOLE
    assert judge(some, by=watch(*NODES), of=gang(), before=[earlier(*names, attempt=0)]).state is WHOLE
