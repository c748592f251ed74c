"""A save is held against the one before it: that may prove its end, and what it lacks counts while nothing else does."""

from __future__ import annotations

import dataclasses

from orchestrator.core.checkpoints.save import Closing, Part
from orchestrator.supervisor.transfers import closing
from orchestrator.supervisor.transfers.closing import Found
from tests.unit.supervisor.transfers.test_closing import (
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


def test_likeness_to_the_save_before_makes_it_whole_if_each_file_is() -> None:
    def of(number: int) -> Part:
        return part("n0", f"model_{number}.pt", f"optim_{number}.pt")

    before = dataclasses.replace(save(of(10)), state=WHOLE)
    assert judge(of(20), before=before) == Found(WHOLE, Closing.LIKENESS, "")
    assert judge(of(20)).state is TORN
    assert judge(part("n0", "model_20.pt"), before=before).state is TORN
    unproved = part("n0", "model_20.bin", "optim_20.bin", state=dataclasses.replace(SHOWN, is_proved=False))
    assert judge(unproved, before=before).state is TORN


def test_a_file_of_the_save_before_is_missed_only_where_no_step_and_no_end_shows_that_all_is_written() -> (
    None
):
    before = dataclasses.replace(save(part("n0", "model_10.pt", "buffer_10.pkl")), state=WHOLE)
    why = "it has no file like buffer_10.pkl of the save before"
    assert judge(part("n0", "model_20.pt"), by=watch(*NODES), of=gang(), before=before).state is WHOLE
    assert judge(part("n0", "model_20.pt"), of=gang(), before=before) == Found(OPEN, Closing.NONE, why)
    torn = Found(TORN, Closing.NONE, why, is_damaged=True)
    assert judge(part("n0", "model_20.pt", state=DONE), before=before) == torn
    silent = save(part("n0", "model_20.pt", by=Closing.SILENCE))
    for of, is_followed, state in ((gang(), False, OPEN), (ENDED, False, TORN), (gang(), True, WHOLE)):
        found = closing.judge(silent, watch(*NODES), of, before, is_followed=is_followed)
        assert found.state is state
    ended_well = dataclasses.replace(ENDED, done=frozenset(NODES))
    assert closing.judge(silent, watch(*NODES), ended_well, before).state is WHOLE


def test_a_file_that_fewer_ranks_have_than_in_the_save_before_is_missed_although_all_have_gone_on() -> None:
    names = ("model_10.pt", "rng_10_rank0.pt", "rng_10_rank1.pt", "data_10_shard0.pt", "data_10_shard1.pt")
    before = dataclasses.replace(save(part("n0", *names)), state=WHOLE)
    some = part("n0", "model_20.pt", "rng_20_rank0.pt", "data_20_shard0.pt")
    why = "it has no file like that of rank 1 in the save before"
    assert judge(some, by=watch(*NODES), of=gang(), before=before) == Found(OPEN, Closing.NONE, why)
    assert judge(part("n0", "model_20.pt"), by=watch(*NODES), of=gang(), before=before).state is WHOLE
    earlier = dataclasses.replace(before, attempt=0)
    assert judge(some, by=watch(*NODES), of=gang(), before=earlier).state is WHOLE
