"""The ledger has every save, and the brain knows what it has; the last whole one survives what scripts and disks do."""

from __future__ import annotations

import dataclasses
import errno
import os
import shutil
from pathlib import Path

import pytest

from orchestrator.brain.model import events as e
from orchestrator.core.checkpoints import ledger
from orchestrator.core.checkpoints.checkpoint import (
    Checkpoint,
    CheckpointState,
    CompletionReason,
    Content,
    Format,
    StepSource,
)
from tests.support.desk_world import DeskWorld
from tests.support.fake_disk import FakeDisk
from tests.support.saved_files import Model, adam, distributed, torch_save

OPEN, WHOLE, TORN, GONE = (
    CheckpointState.OPEN,
    CheckpointState.WHOLE,
    CheckpointState.TORN,
    CheckpointState.GONE,
)
DISTRUSTED, PRUNED = CheckpointState.DISTRUSTED, CheckpointState.PRUNED


@pytest.fixture
def world(tmp_path: Path) -> DeskWorld:
    return DeskWorld(tmp_path, "n0", "n1")


def state(step: int) -> bytes:
    """Return a torch.save of a whole training state, which differs from step to step."""
    return torch_save({"model": Model(), "optimizer": adam(), "step": step}, data=bytes([step % 256]) * 256)


def one(step: int) -> dict[str, bytes]:
    """Return a save of one file with its step in its name."""
    return {f"step_{step}.pt": state(step)}


def pair(step: int) -> dict[str, bytes]:
    """Return a save of two files, whose format does not show whether there are to be more."""
    return {f"model_{step}.pt": torch_save(Model()), f"optim_{step}.pt": torch_save(adam(step))}


# From the first report to the end


def test_checkpoint_is_open_then_complete_once_nodes_continued(world: DeskWorld) -> None:
    world.write(one(10))
    world.report("step_10.pt")
    assert world.told(1) == [OPEN]
    world.go_on()
    save = world.latest()
    assert world.told(1) == [OPEN, WHOLE]
    assert (save.closed_by, save.attempt, save.world_size, save.main) == (
        CompletionReason.STEPS,
        1,
        2,
        "step_10.pt",
    )
    assert (save.step, save.step_source, save.steps) == (10, StepSource.STATED, 10)
    assert (save.format, save.content, save.fits_any_size) == (Format.TORCH, Content.STATE, True)
    assert save.path == str(world.job.checkpoints / "step_10.pt")


def test_brain_gets_checkpoint_without_files_in_ledger(world: DeskWorld) -> None:
    save = world.save(one(10))
    assert world.facts.checkpoints[1] == dataclasses.replace(save, files=())
    read, faults = ledger.read(world.job.root, world.job.ledger)
    assert faults == [] and read == world.saves
    assert [len(piece.sha256) for piece in read[1].files] == [64]


def test_hash_counts_only_for_hashed_file(world: DeskWorld) -> None:
    world.write(one(10))
    early = world.seen("step_10.pt")
    world.write({"step_10.pt": state(11)})
    world.report("step_10.pt", steps=11)
    digest = world.latest().files[0].sha256
    later = dataclasses.replace(early, part=dataclasses.replace(early.part, steps=12))
    world.hash(dataclasses.replace(later, attempt=9))
    assert world.latest().files[0].sha256 == digest != ""


def test_unstated_step_counts_from_start_of_attempt(world: DeskWorld) -> None:
    """The job's step is counted from where its attempt started if the checkpoint states none."""
    world.attempt(2, base_step=100)
    save = world.save({"last.pt": torch_save({"model": Model(), "optimizer": adam()})}, steps=7)
    assert (save.step, save.step_source) == (107, StepSource.COUNTED)


def test_stale_attempts_report_is_not_entered(world: DeskWorld) -> None:
    world.write(one(10))
    seen = world.seen("step_10.pt")
    world.attempt(2)
    world.desk.enter_report(world.at, "n0", seen, world.gang)
    world.learn()
    assert world.saves == {} and world.notes == []


@pytest.mark.parametrize(
    ("names", "main"),
    [
        (["../x.pt"], "../x.pt"),
        (["/etc/x.pt"], "/etc/x.pt"),
        (["a/../../x"], "a"),
        (["a//x"], "a"),
        (["a/x"], "../a"),
        (["a/x", "a/x"], "a"),
        (["a\0b"], "a\0b"),
        ([""], ""),
        ([], "a"),
        ([".coming/1/x"], ".coming"),
        (["n" * 256], "n" * 256),
        (["a\ud800b"], "a"),
    ],
)
def test_report_with_names_outside_folder_is_refused(world: DeskWorld, names: list[str], main: str) -> None:
    """A report with names that lead out of the folder is refused with the reason."""
    world.write(one(10))
    seen = world.seen("step_10.pt")
    pieces = tuple(dataclasses.replace(seen.part.files[0], name=name) for name in names)
    bad = dataclasses.replace(seen, main=main, part=dataclasses.replace(seen.part, files=pieces))
    world.desk.enter_report(world.at, "n1", bad, world.gang)
    world.learn()
    assert world.saves == {} and world.notes[0].startswith("n1 reports a checkpoint that is refused: ")


def test_repeated_report_is_same_checkpoint_until_complete(world: DeskWorld) -> None:
    world.write(pair(10))
    world.report("model_10.pt")
    world.write({"optim_10.pt": torch_save(adam(11))})
    world.report("model_10.pt", steps=11)
    world.go_on()
    assert world.states() == [WHOLE] and len(world.latest().files) == 2


def test_overwritten_name_is_a_new_checkpoint(world: DeskWorld) -> None:
    """A name that is overwritten is a new checkpoint, and the previous one is gone."""
    world.save({"last.pt": state(10)})
    world.save({"last.pt": state(20)}, steps=20)
    assert world.states() == [GONE, WHOLE] and world.saves[1].why == "was overwritten by checkpoint 2"
    assert world.told(1) == [OPEN, WHOLE, GONE]


def test_previous_checkpoint_counts_until_overwrite_is_complete(world: DeskWorld) -> None:
    world.save({"last.pt": state(10)})
    world.write({"last.pt": state(20)})
    world.report("last.pt", steps=20)
    assert world.states() == [WHOLE, OPEN]


def test_checkpoint_lacking_previous_file_completes_and_sets_baseline(
    world: DeskWorld,
) -> None:
    """A checkpoint that lacks a file of the previous one completes late; the next is compared with it."""
    world.save({**pair(10), "buffer_10.pkl": torch_save(Model())})
    for step in (20, 30):
        assert world.save(pair(step), steps=step).state is WHOLE
    world.save({**pair(40), "buffer_40.pkl": torch_save(Model())}, steps=40)
    for step in (50, 60):  # a script without steps
        world.write(pair(step))
        world.report(f"model_{step}.pt", steps=0, closed_by=CompletionReason.NO_WRITES)
        world.go_on()
    assert world.states() == [WHOLE] * 6
    assert world.saves[5].closed_by is CompletionReason.NO_WRITES


# How ranks and nodes end


def test_node_with_failed_rank_never_continues(
    world: DeskWorld,
) -> None:
    """After a rank failed its node never continues, also for what is reported later."""
    world.exit("n1")
    world.write(pair(10))
    world.report("model_10.pt")
    world.go_on()
    world.go_on()
    assert world.states() == [OPEN]
    world.stop()
    assert world.states() == [TORN]


def test_new_supervisor_remembers_failed_ranks(world: DeskWorld) -> None:
    from orchestrator.brain.model.facts import AttemptFacts
    from orchestrator.brain.model.rank_facts import RankFacts, RankState

    world.facts.attempt = AttemptFacts(1, 0.0, 0.0, None)
    world.facts.ranks = {0: RankFacts(0, "n0"), 1: RankFacts(1, "n1", RankState.EXITED, code=1)}
    world.write(pair(10))
    world.report("model_10.pt")
    world.restart()
    world.go_on()
    assert world.states() == [OPEN]


def test_last_checkpoint_is_complete_if_ranks_succeeded(
    world: DeskWorld,
) -> None:
    """The last checkpoint is complete if all ranks ended well, although no step followed."""
    world.write(pair(10))
    world.report("model_10.pt", closed_by=CompletionReason.END)
    world.exit("n0", 0)
    world.exit("n1", 0)
    world.stop("n0")
    assert world.states() == [OPEN]
    world.stop("n1")
    assert (world.latest().state, world.latest().closed_by) == (WHOLE, CompletionReason.END)


def test_checkpoint_being_written_at_end_is_torn(world: DeskWorld) -> None:
    """A checkpoint that was being written at the end of the attempt is torn with the reason."""
    world.write({"model_10.pt": torch_save(Model())})
    world.report("model_10.pt", closed_by=CompletionReason.NONE)
    world.stop()
    assert world.told(1) == [OPEN, TORN]
    assert world.latest().why == "the attempt ended while it was written"


def test_new_supervisor_continues_open_checkpoints(world: DeskWorld) -> None:
    world.write(one(10))
    world.report("step_10.pt")
    world.restart()
    world.go_on("n1")
    assert world.states() == [WHOLE], "n0 had gone on when it reported it"


def test_new_supervisor_notifies_brain_of_missing_changes(world: DeskWorld) -> None:
    world.save(one(10))
    world.save(one(20), steps=20)
    known = world.facts.checkpoints.pop(2)
    world.facts.checkpoints[7] = dataclasses.replace(known, number=7)
    world.events.clear()
    world.restart()
    assert [
        (event.save.number, event.save.state) for event in world.events if isinstance(event, e.CheckpointChanged)
    ] == [
        (7, GONE),
        (2, WHOLE),
    ]
    assert world.facts.checkpoints[7].why == "it is no longer in the ledger"


def test_later_attempt_does_not_complete_earlier_open_ones(world: DeskWorld) -> None:
    world.write(pair(10))
    world.report("model_10.pt")
    world.attempt(2)
    world.restart()
    world.go_on()
    assert world.states() == [TORN]


def test_open_checkpoints_of_silent_attempt_are_torn(world: DeskWorld) -> None:
    """Without any report of the attempt what is open is torn before the next one."""
    world.write(pair(10))
    world.report("model_10.pt")
    world.restart()
    world.compare()
    assert world.states() == [TORN]


# Before the next attempt


def test_unchanged_checkpoint_compares_by_metadata_or_bytes(world: DeskWorld) -> None:
    """A checkpoint that is unchanged is compared by size and time, or in all bytes."""
    world.save(one(10))
    assert world.compare(1) == "" and world.latest().compared == "size and time"
    assert world.compare(1, deep=True) == "" and world.latest().compared == "sha256"


@pytest.mark.parametrize("deep", [False, True])
def test_changed_checkpoint_is_gone_and_brain_notified_first(world: DeskWorld, deep: bool) -> None:
    """A changed or deleted checkpoint is gone before the attempt, and the brain is notified first."""
    world.save(one(10))
    world.save(one(20), steps=20)
    shutil.rmtree(world.job.checkpoints / ".kept")
    path = world.job.checkpoints / "step_20.pt"
    about = path.stat()
    if deep:
        path.write_bytes(bytes(about.st_size))
        os.utime(path, ns=(about.st_atime_ns, about.st_mtime_ns))
        assert world.compare(2) == "", "only its bytes tell"
    else:
        path.unlink()
    fault = world.compare(2, deep=deep)
    assert fault and (world.saves[2].state, world.saves[2].why) == (GONE, fault)
    changed, compared = world.events[-2:]
    assert isinstance(changed, e.CheckpointChanged) and changed.save.state is GONE
    assert isinstance(compared, e.CheckpointCompared) and compared.fault == fault


def test_comparison_closes_ledger_of_attempt(world: DeskWorld) -> None:
    world.write(pair(10))
    world.report("model_10.pt")
    world.compare()
    assert world.states() == [TORN]


def test_torn_checkpoint_is_hidden_before_next_attempt(world: DeskWorld) -> None:
    """A torn checkpoint is moved out of the script's sight before the next attempt."""
    world.save(one(10))
    world.write({"step_20/model.pt": torch_save(Model()), "step_20/part.pt": b"cut off"})
    world.report("step_20", steps=20, closed_by=CompletionReason.NONE)
    world.compare(1)
    torn = world.saves[2]
    assert not (world.job.checkpoints / "step_20").exists()
    assert (world.job.checkpoints / ".step_20.torn-attempt-1/part.pt").read_bytes() == b"cut off"
    assert torn.state is TORN and torn.why.endswith("; moved step_20 to .step_20.torn-attempt-1")
    assert world.notes == [f"torn checkpoint ({torn.why.partition(';')[0]}): moved step_20 to .step_20.torn-attempt-1"]


def test_empty_checkpoint_folder_is_hidden_from_script(
    world: DeskWorld,
) -> None:
    """A folder that was made for a checkpoint and has no file yet is moved out of the script's sight."""
    whole = world.save({"step_10/model.pt": torch_save(Model())})
    os.utime(world.job.checkpoints / "step_10", ns=(0, 0))
    (world.job.checkpoints / "step_20").mkdir()
    assert world.compare(whole.number) == "" and world.states() == [WHOLE]
    assert sorted(path.name for path in world.job.checkpoints.glob("*step*")) == [
        ".step_20.torn-attempt-1",
        "step_10",
    ]
    assert world.notes == ["torn checkpoint (no file yet): moved step_20 to .step_20.torn-attempt-1"]


def sharded(step: int, ranks: int = 2) -> dict[str, bytes]:
    """Return a save of torch.distributed.checkpoint under a name that is written again and again."""
    files = distributed("latest", ranks)
    return {name: bytes([step]) * len(data) if "distcp" in name else data for name, data in files.items()}


def test_partly_overwritten_folder_is_quarantined_and_restored(
    world: DeskWorld,
) -> None:
    """A partly overwritten folder is moved apart, and the previous one is restored."""
    whole = world.save(sharded(10))
    world.write({"latest/__1_0.distcp": sharded(20)["latest/__1_0.distcp"]})
    world.report("latest", steps=20, closed_by=CompletionReason.NONE)
    assert world.compare(whole.number, deep=True) == "" and world.states() == [WHOLE, TORN]
    assert world.home() == {
        **sharded(10),
        **{
            name.replace("latest", ".latest.torn-attempt-1"): sharded(20 if "__1_0" in name else 10)[name]
            for name in sharded(10)
        },
    }
    assert Path(world.saves[whole.number].path) == world.job.checkpoints / "latest"


def test_torn_checkpoint_not_touching_previous_stays(world: DeskWorld) -> None:
    whole = world.save(sharded(10))
    world.write({"latest/__2_0.distcp": b"cut off"})
    world.report("latest", steps=20, closed_by=CompletionReason.NONE)
    assert world.compare(whole.number) == "" and world.states() == [WHOLE, TORN]
    assert world.home() == {**sharded(10), "latest/__2_0.distcp": b"cut off"}


def test_adopted_part_of_torn_checkpoint_stays(world: DeskWorld) -> None:
    """The part of a torn checkpoint that the user has adopted stays in its place."""
    world.write(pair(10))
    world.report("model_10.pt", closed_by=CompletionReason.NONE)
    world.stop()
    adopted = dataclasses.replace(world.saves[1], number=2, attempt=0, state=WHOLE)
    world.desk._ledger.put(adopted)
    assert world.compare(2) == "" and sorted(world.home()) == sorted(pair(10))


def test_checkpoint_is_changed_only_while_matching_ledger(tmp_path: Path) -> None:
    """A checkpoint is deleted, renamed or moved only while it is as in the ledger."""
    world = DeskWorld(tmp_path, checkpoint_keep=1)
    world.save(one(10))
    world.write(one(10))  # by hand
    world.save(one(20), steps=20)
    assert "step_10.pt" in world.home() and world.states() == [WHOLE, WHOLE]
    assert world.notes == [
        "step_10.pt was not deleted, though checkpoint.keep is 1: step_10.pt has changed since it was saved"
    ]
    world.write({"step_30/model.pt": torch_save(Model())})
    world.report("step_30", steps=30, closed_by=CompletionReason.NONE)
    world.write({"step_30/model.pt": torch_save(Model())})
    world.compare(2)
    assert "step_30/model.pt" in world.home()


# What is kept twice


def test_newest_complete_checkpoint_is_kept_until_next(world: DeskWorld) -> None:
    """The newest complete checkpoint is kept, whatever the script does, until the next one is."""
    world.save(one(10))
    assert world.kept() == ["1"]
    world.write(one(20))
    world.report("step_20.pt", steps=20)
    assert world.kept() == ["1"]
    world.go_on()
    world.settle()
    assert world.kept() == ["2"]


def test_numbered_checkpoint_is_linked_and_overwritten_one_copied(
    world: DeskWorld,
) -> None:
    """A numbered checkpoint is kept without extra space, and one overwritten in place as a copy."""
    world.save(one(10))
    inode = (world.job.checkpoints / "step_10.pt").stat().st_ino
    assert (world.job.checkpoints / ".kept/1/step_10.pt").stat().st_ino == inode
    for step in (20, 30):
        save = world.save({"last.pt": state(step)}, steps=step)
        kept = world.job.checkpoints / ".kept" / str(save.number) / "last.pt"
        assert kept.stat().st_ino != (world.job.checkpoints / "last.pt").stat().st_ino


def test_replaced_name_is_kept_without_extra_space(world: DeskWorld) -> None:
    for step in (10, 20):
        save = world.save({"last.pt": state(step)}, steps=step, replaces=True)
    kept = world.job.checkpoints / ".kept" / str(save.number) / "last.pt"
    assert kept.stat().st_ino == (world.job.checkpoints / "last.pt").stat().st_ino


def test_partly_replaced_folder_is_kept_as_copy(world: DeskWorld) -> None:
    """torch.distributed.checkpoint renames its .metadata into place, and writes its pieces over."""
    for step in (10, 20):
        files = {name: bytes([step]) * len(data) for name, data in distributed("latest").items() if "distcp" in name}
        meta = {name: data for name, data in distributed("latest").items() if "distcp" not in name}
        world.write(files)
        world.write(meta, replaces=True)
        world.report("latest", steps=step)
        world.go_on()
        world.settle()
    save = world.latest()
    world.write(dict.fromkeys(files, b"cut off"))
    assert world.compare(save.number, deep=True) == ""
    assert (Path(world.latest().path) / "__0_0.distcp").read_bytes() == files["latest/__0_0.distcp"]


def test_interrupted_overwrite_is_restored_and_quarantined(
    world: DeskWorld,
) -> None:
    """A checkpoint whose overwrite was interrupted is restored, and the torn files are moved apart."""
    world.save({"last.pt": state(10)})
    world.write({"last.pt": b"cut off"})
    world.report("last.pt", steps=20, closed_by=CompletionReason.NONE)
    assert world.compare(1) == ""
    assert world.states() == [WHOLE, TORN]
    assert (world.job.checkpoints / "last.pt").read_bytes() == state(10)
    assert world.saves[1].path == str(world.job.checkpoints / "last.pt")
    assert (world.job.checkpoints / ".last.pt.torn-attempt-1").read_bytes() == b"cut off"


def test_attempt_starts_from_kept_copy(world: DeskWorld) -> None:
    """Where its place is taken, the attempt starts from the kept copy."""
    world.save({"last.pt": state(10)})
    world.write({"last.pt": b"cut off"})  # by a host that was lost, and so never reported
    assert world.compare(1) == ""
    assert world.saves[1].path == str(world.job.checkpoints / ".kept/1/last.pt")
    assert (world.job.checkpoints / "last.pt").read_bytes() == b"cut off", "nothing is written over"
    assert world.compare(1) == "", "before a further attempt, too"


def test_checkpoint_deleted_by_script_is_restored(world: DeskWorld) -> None:
    """A checkpoint that its script deleted is restored from the kept copy."""
    world.save({f"step_10/{name}.pt": torch_save(Model()) for name in ("a", "b")})
    shutil.rmtree(world.job.checkpoints / "step_10")
    assert world.compare(1) == ""
    assert sorted(world.home()) == ["step_10/a.pt", "step_10/b.pt"]
    assert Path(world.saves[1].path) == world.job.checkpoints / "step_10"


def test_damaged_kept_checkpoint_is_not_resumed(world: DeskWorld) -> None:
    world.save({"last.pt": state(10)})
    world.write({"last.pt": b"cut off"})
    (world.job.checkpoints / ".kept/1/last.pt").write_bytes(b"damaged")
    assert world.compare(1) != "" and world.states() == [GONE]


def test_job_end_keeps_copy_only_of_last_complete(
    world: DeskWorld,
) -> None:
    """At the job's end nothing is kept twice unless it is the last complete one."""
    world.save({"last.pt": state(10)})
    world.desk.end_job(world.at)
    world.settle()
    assert world.kept() == []
    world.save({"last.pt": state(20)}, steps=20)
    world.write({"last.pt": b"cut off"})
    world.desk.end_job(world.at)
    world.settle()
    assert world.kept() == ["2"]


def test_kept_copies_are_removed_despite_immediate_exit(world: DeskWorld) -> None:
    """Kept copies are removed at the job's end although the supervisor exits at once."""
    world.save({"last.pt": state(10)})
    assert world.kept() == ["1"]
    world.desk.end_job(world.at)
    world.desk._thread._pool.shutdown()  # as the interpreter's end does; the loop is over
    assert world.kept() == []


# What checkpoint.keep deletes


def test_older_checkpoints_of_series_are_deleted(tmp_path: Path) -> None:
    world = DeskWorld(tmp_path, checkpoint_keep=2)
    for step in (10, 20, 30, 40):
        world.save(one(step), steps=step)
    assert sorted(world.home()) == ["step_30.pt", "step_40.pt"]
    assert world.states() == [PRUNED, PRUNED, WHOLE, WHOLE] and world.told(1)[-1] is PRUNED
    assert world.saves[1].why == "checkpoint.keep"


def test_keep_every_also_keeps_round_steps(tmp_path: Path) -> None:
    """keep_every additionally keeps one checkpoint of each so many steps."""
    world = DeskWorld(tmp_path, checkpoint_keep=1, checkpoint_keep_every=20)
    for step in (10, 20, 30, 40, 50):
        world.save(one(step), steps=step)
    assert sorted(world.home()) == ["step_20.pt", "step_40.pt", "step_50.pt"]


def test_best_referenced_open_and_unknown_are_never_deleted(tmp_path: Path) -> None:
    world = DeskWorld(tmp_path, "n0", "n1", checkpoint_keep=1)
    world.write({"mine/step_1.pt": state(1)})  # from before the job, and so never reported
    world.save({"best_10.pt": state(10)})
    world.save(one(10))
    for step in (20, 30, 40):
        cites = {"model": Model(), "optimizer": adam(), "step": step, "best_model_path": "x/step_10.pt"}
        world.save({f"step_{step}.pt": torch_save(cites)}, steps=step)
    world.write(pair(50))
    world.report("model_50.pt", steps=50)
    names = sorted(world.home())
    assert names == ["best_10.pt", "mine/step_1.pt", "model_50.pt", "optim_50.pt", "step_10.pt", "step_40.pt"]


def test_resume_source_stays_despite_newer_of_other_kind(
    tmp_path: Path,
) -> None:
    """The checkpoint that a resume would use stays although newer ones are of another kind."""
    world = DeskWorld(tmp_path, checkpoint_keep=1)
    world.save(one(10))
    for step in (20, 30):
        world.save({f"weights/model_{step}.pt": torch_save(Model())}, steps=step)
    assert sorted(world.home()) == ["step_10.pt", "weights/model_30.pt"]


# What the brain decides, and what scripts do


def test_brains_distrust_and_trust_are_entered_in_ledger(
    world: DeskWorld,
) -> None:
    """A checkpoint that the brain gave up or trusts again is entered so in the ledger."""
    world.save(one(10))
    known = world.facts.checkpoints[1]
    world.facts.checkpoints[1] = dataclasses.replace(known, state=DISTRUSTED, why="rank 0 could not load it")
    world.desk.apply_decisions(world.facts)
    world.learn()
    read, _ = ledger.read(world.job.root, world.job.ledger)
    assert (read[1].state, read[1].why) == (DISTRUSTED, "rank 0 could not load it")
    world.facts.checkpoints[1] = known
    world.restart()
    assert (world.saves[1].state, world.saves[1].why) == (WHOLE, "")


def test_outdated_brain_knowledge_does_not_change_ledger(world: DeskWorld) -> None:
    world.save(one(10))
    world.facts.checkpoints[1] = dataclasses.replace(world.facts.checkpoints[1], state=OPEN)
    world.desk.apply_decisions(world.facts)
    assert world.states() == [WHOLE]


def test_script_starting_over_is_reported(
    world: DeskWorld,
) -> None:
    """A script that started from scratch is reported, and its steps are counted from there."""
    world.save(one(50), steps=50)
    world.attempt(2, base_step=50)
    world.save({"weights.pt": torch_save(Model())}, steps=9)
    assert world.latest().step == 59
    world.save(one(10), steps=10)
    (began,) = [event for event in world.events if isinstance(event, e.ResumedElsewhere)]
    assert (began.attempt, began.step, began.main, began.steps) == (2, 0, "step_10.pt", 10)
    assert [(save.main, save.step) for save in world.saves.values()] == [
        ("step_50.pt", 50), ("weights.pt", 9), ("step_10.pt", 10),
    ]  # fmt: skip


# The disk


def test_full_disk_delays_acknowledgement_until_ledger_is_written(world: DeskWorld, disk: FakeDisk) -> None:
    """While the disk is full everything waits; nothing is acknowledged that the ledger lacks."""
    world.write(one(10))
    world.desk.enter_report(world.at, "n0", world.seen("step_10.pt"), world.gang)
    disk.room_bytes, disk.at_wait = 0, lambda: told.append(ledger.read(world.job.root, world.job.ledger)[0])
    told: list[object] = []
    (news,) = world.learn()
    assert told == [{}, {}] and isinstance(news, e.CheckpointChanged)
    assert ledger.read(world.job.root, world.job.ledger)[0] == world.saves != {}


def test_unwritable_ledger_is_written_later(world: DeskWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    """A ledger that cannot be written for another reason is written later."""

    def refuse(fd: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    world.write(one(10))
    seen = world.seen("step_10.pt")
    with monkeypatch.context() as broken:
        broken.setattr(os, "fsync", refuse)
        world.desk.enter_report(world.at, "n0", seen, world.gang)
        world.learn()
        world.learn()
        (note,) = world.notes
        assert "ledger.jsonl cannot be written: Input/output error" in note
        assert ledger.read(world.job.root, world.job.ledger)[0] == {}
    world.learn()
    assert ledger.read(world.job.root, world.job.ledger)[0] == world.saves != {}


def test_unreadable_ledger_lines_are_noted(world: DeskWorld) -> None:
    """Lines of the ledger that cannot be read are noted."""
    world.save(one(10))
    with world.job.ledger.open("a") as file:
        file.write("no line\n")
    world.restart()
    assert world.states() == [WHOLE] and world.notes == [
        f"{world.job.ledger}:{_lines(world.job.ledger)} cannot be read"
    ]


def _lines(path: Path) -> int:
    return len(path.read_text().splitlines())


def test_checkpoint_without_space_for_copy_is_still_complete(world: DeskWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint without space to be kept is still complete, and this is noted once."""

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "link", refuse)
    saves: list[Checkpoint] = [world.save(one(step), steps=step) for step in (10, 20)]
    assert [save.state for save in saves] == [WHOLE, WHOLE] and world.kept() == []
    (note,) = world.notes
    assert note.startswith("step_10.pt is not kept: the disk is too full")
    assert world.compare(2) == ""
