"""Saves as people ask for them: named, chosen for a resume, listed as files are now, explained in a post-mortem."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import pytest

from orchestrator.brain.model import decisions as d
from orchestrator.brain.model import events as e
from orchestrator.client import adoption, job_checkpoints, job_folders, post_mortem
from orchestrator.client.job import Job
from orchestrator.core.checkpoints.checkpoint import CheckpointState, CompletionReason, Content, FileLocation
from orchestrator.core.checkpoints.resume_choice import ResumePoint
from orchestrator.core.errors import UserError
from orchestrator.core.jobdir.plan import PlannedSsh
from orchestrator.journal import facts_file
from orchestrator.journal.journal_file import Journal
from tests.support import jobs
from tests.support.saved_files import write
from tests.unit.client.shelf import Shelf, flip, state

ROOT = Path(__file__).parents[3]
RANKS = {f"step-30/rank_{rank}.pt": b"x" for rank in range(4)}


@pytest.fixture
def shelf(tmp_path: Path) -> Shelf:
    """Return a job with steps 10 and 20, both whole."""
    shelf = Shelf(tmp_path)
    shelf.add(10)
    shelf.add(20)
    return shelf


def _find(shelf: Shelf, wanted: str) -> int:
    return job_checkpoints.find_checkpoint(
        shelf.job, shelf.plan, job_checkpoints.load_checkpoints(shelf.job), wanted
    ).number


# A name


@pytest.mark.parametrize(
    "wanted", ["1", "step-10.pt", "checkpoints/step-10.pt", "./step-10.pt", "{}/step-10.pt", "{}/link"]
)
def test_checkpoint_is_selected_by_number_name_or_path(shelf: Shelf, wanted: str) -> None:
    (shelf.folder / "link").symlink_to("step-10.pt")
    assert _find(shelf, wanted.format(shelf.folder)) == 1


@pytest.mark.parametrize("wanted", ["step-30", "step-30/", "step-30/rank_2.pt"])
def test_checkpoint_folder_is_selected_by_folder_or_file(shelf: Shelf, wanted: str) -> None:
    """A folder is named by itself or by one of its files."""
    shelf.add(30, RANKS, main="step-30")
    assert _find(shelf, wanted) == 3


@pytest.mark.parametrize("wanted", ["out/net_30.pth", "code/out/net_30.pth"])
def test_start_folder_checkpoint_has_name_shown_in_status(shelf: Shelf, wanted: str) -> None:
    """A checkpoint where ranks start is named as status and the post-mortem name it."""
    shelf.add_at_start(30, {"out/net_30.pth": state(30)})
    assert _find(shelf, wanted) == 3


@pytest.mark.parametrize("name", ["1", "step-50.pt"])
def test_ambiguous_checkpoint_name_is_refused(
    shelf: Shelf, name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The number of a save and the name of another; a name in the checkpoints and where the person is."""
    monkeypatch.chdir(tmp_path)
    for place in (shelf.folder, tmp_path):
        (place / name).write_bytes(b"x")
    with pytest.raises(UserError, match="matches several checkpoints") as told:
        _find(shelf, name)
    assert str(tmp_path / name) in told.value.fix and str(shelf.folder) in told.value.fix


def test_rewritten_name_means_last_checkpoint(shelf: Shelf) -> None:
    """A name that is written again and again means its last checkpoint."""
    first = shelf.add(30, {"last.pt": state(30)})
    shelf.change(dataclasses.replace(first, state=CheckpointState.GONE, why="was overwritten by checkpoint 4"))
    shelf.add(40, {"last.pt": state(40)})
    assert _find(shelf, "last.pt") == 4


def test_checkpoint_with_changed_files_is_not_resumed(shelf: Shelf) -> None:
    """A checkpoint is not resumed from once its files are not as recorded."""
    (shelf.folder / "step-10.pt").unlink()
    (shelf.folder / "step-20.pt").write_bytes(b"")
    torn = shelf.add(30, state=CheckpointState.TORN, why="the attempt ended while it was written")
    for wanted, why in (("1", r"step-10\.pt is gone"), ("step-10.pt", r"step-10\.pt is gone"), ("2", "is empty"),
                        (str(torn.number), "torn: the attempt ended while it was written")):  # fmt: skip
        with pytest.raises(UserError, match=f"is not a checkpoint to resume from: .*{why}") as refused:
            _find(shelf, wanted)
        assert refused.value.fix


def test_missing_checkpoint_error_lists_usable_ones(shelf: Shelf) -> None:
    (shelf.folder / "step-10.pt").unlink()
    with pytest.raises(UserError, match="there is no such checkpoint") as refused:
        _find(shelf, "nonsense")
    assert refused.value.fix == "choose one of: 2 (step-20.pt, step 20)"


def test_file_replacing_checkpoint_is_its_own(shelf: Shelf) -> None:
    """A file that the user put in the place of a checkpoint is a checkpoint of its own."""
    write(shelf.folder / "step-10.pt", state(11))
    save = job_checkpoints.find_checkpoint(
        shelf.job, shelf.plan, job_checkpoints.load_checkpoints(shelf.job), "step-10.pt"
    )
    assert (save.number, save.closed_by, save.stated) == (3, CompletionReason.ADOPTED, 10)


# A resume


def _start(shelf: Shelf, wanted: str = "", ranks: int = 4) -> job_checkpoints.ResumeSource:
    start = job_checkpoints.ResumeSource(shelf.job, shelf.plan, wanted)
    start.choose_for(ranks)
    return start


def test_resume_uses_newest_checkpoint_with_its_files(shelf: Shelf) -> None:
    """A resume starts from the newest checkpoint whose files exist."""
    shelf.add(30, content=Content.WEIGHTS)
    (shelf.folder / "step-20.pt").unlink()
    start = _start(shelf)
    assert start.number == 0, "the supervisor chooses"
    assert start.choice.checkpoint is not None and start.choice.checkpoint.main == "step-10.pt"
    assert [(one.main, one.why) for one in start.choice.skipped] == [
        ("step-30.pt", "weights alone"), ("step-20.pt", "gone: step-20.pt is gone"),
    ]  # fmt: skip


def test_overwritten_checkpoint_is_resumed_from_kept_copy(shelf: Shelf) -> None:
    """A checkpoint that its script has overwritten is resumed from as orch has kept it."""
    last = shelf.add(30, {"last.pt": state(30)})
    shelf.keep(last)
    write(shelf.folder / "last.pt", b"half of the next one")
    choice = _start(shelf).choice
    assert (
        choice.checkpoint is not None
        and choice.checkpoint.number == last.number
        and "kept a copy in .kept/3" in choice.checkpoint.why
    )


def test_named_checkpoint_is_resumed_despite_newer_ones(shelf: Shelf) -> None:
    """A named checkpoint is resumed from although newer ones are complete."""
    start = _start(shelf, "1")
    assert start.number == 1 and start.choice.checkpoint is not None and start.choice.checkpoint.step == 10


def test_checkpoints_abandoned_by_resume_are_not_offered_later(shelf: Shelf) -> None:
    """Attempt 2 was resumed from step 10 of 20, and has saved step 15."""
    went_on = shelf.add(15, attempt=2)
    older, newest = (
        job_checkpoints.load_checkpoints(shelf.job)[1],
        job_checkpoints.load_checkpoints(shelf.job)[2],
    )
    at_s = 20.0
    journal = Journal(shelf.job.journal, "boot", facts_file.load_record(shelf.job).last_n)
    for news in (
        *(e.CheckpointChanged(at_s, save) for save in (older, newest)), e.ResumeRequested(at_s, 1, older.number),
        d.BeginAttempt(at_s, "resumed", 2, ResumePoint(older.path, 10, older.number)), e.CheckpointChanged(at_s, went_on),
        jobs.end(2, at_s, d.JobEnd.FAILED, "crash"),
    ):  # fmt: skip
        journal.write(news)
    journal.close()
    assert _start(shelf).choice.checkpoint == went_on
    assert Job(shelf.job).why()["checkpoint"]["save"] == went_on.number
    assert [one["resume"] for one in job_checkpoints.list_checkpoints(shelf.job, shelf.plan, verify=False)] == [
        False,
        False,
        True,
    ]
    (shelf.folder / "step-15.pt").unlink()
    assert _start(shelf).choice.checkpoint == older
    (shelf.folder / "step-10.pt").unlink()
    with pytest.raises(UserError, match=r"is not a checkpoint to resume from: step-10\.pt is gone"):
        _start(shelf)


def test_named_given_up_checkpoint_is_resumed(shelf: Shelf) -> None:
    given_up = shelf.add(30, state=CheckpointState.DISTRUSTED, why="rank 0 could not load it")
    assert _start(shelf, "3").choice.checkpoint == given_up


def test_world_size_mismatch_lists_checkpoints_that_fit(shelf: Shelf) -> None:
    """Another number of ranks is refused with the checkpoints that fit it."""
    shelf.add(30, RANKS, main="step-30", fits_any_size=False)
    with pytest.raises(
        UserError, match="has files of each of the 4 ranks that saved it, and there would be 2"
    ) as refused:
        _start(shelf, ranks=2)
    assert refused.value.where == "step-30"
    assert refused.value.fix == (
        "resume with 4 ranks; for 2 ranks use --from with one of: 1 (step-10.pt, step 10), 2 (step-20.pt, step 20)"
    )
    assert _start(shelf).choice.checkpoint is not None
    assert _start(shelf, "2", ranks=2).choice.checkpoint is not None


# The list


def _rows(shelf: Shelf, *, verify: bool = False) -> dict[str, tuple[str, bool | None, bool]]:
    """Return each save's state, what a comparison has found, and whether a resume begins from it."""
    listed = job_checkpoints.list_checkpoints(shelf.job, shelf.plan, verify=verify)
    return {one["main"]: (one["state"], one["whole"], one["resume"]) for one in listed if one["save"]}


def test_without_verify_only_missing_files_are_found(shelf: Shelf) -> None:
    """Without verify no byte is read, and what is gone or emptied is found."""
    for step in (30, 40):
        shelf.add(step)
    flip(shelf.folder / "step-20.pt")
    (shelf.folder / "step-30.pt").write_bytes(b"")
    (shelf.folder / "step-40.pt").unlink()
    assert _rows(shelf) == {
        "step-10.pt": ("whole", None, False), "step-20.pt": ("whole", None, True),
        "step-30.pt": ("gone", False, False), "step-40.pt": ("gone", False, False),
    }  # fmt: skip


def test_verify_finds_flipped_bit_and_uses_previous_checkpoint(shelf: Shelf) -> None:
    """With verify a flipped bit is found, and the checkpoint before it counts."""
    flip(shelf.folder / "step-20.pt")
    assert _rows(shelf, verify=True) == {
        "step-10.pt": ("whole", True, True),
        "step-20.pt": ("gone", False, False),
    }
    last = job_checkpoints.list_checkpoints(shelf.job, shelf.plan, verify=True)[-1]
    assert last["why"] == "step-20.pt differs from what was saved (sha256)" and last["exists"]


def test_touched_file_is_still_complete(shelf: Shelf) -> None:
    os.utime(shelf.folder / "step-20.pt")
    assert _rows(shelf)["step-20.pt"] == ("whole", None, True)


def test_checkpoint_list_explains_each_row(shelf: Shelf) -> None:
    shelf.add(30, state=CheckpointState.OPEN)
    shelf.add(40, state=CheckpointState.OPEN, is_in_transit=True)
    shelf.add(50, {"best.pt": state(50)}, content=Content.BEST)
    shelf.add(60, RANKS, main="step-30", fits_any_size=False, world_size=8)
    shelf.add(70, state=CheckpointState.OPEN)
    said = {one["main"]: one["why"] for one in job_checkpoints.list_checkpoints(shelf.job, shelf.plan, verify=False)}
    assert said == {
        "step-10.pt": "", "step-20.pt": "", "step-30.pt": "not every rank has made a step since",
        "step-40.pt": "is being copied from its hosts", "best.pt": "",
        "step-70.pt": "not every rank has made a step since", "step-30": "has files of each of the 8 ranks that saved it, and there would be 4",
    }  # fmt: skip


def test_files_only_hosts_see_are_trusted_as_recorded(shelf: Shelf, tmp_path: Path) -> None:
    ssh = Shelf(tmp_path / "ssh")
    ssh.add(10, locations=(FileLocation("", "/no/such/disk"),))
    assert _rows(ssh)["step-10.pt"][0] == "gone"
    over_ssh = PlannedSsh(None, None, "known", "~/.orch", (), None)
    ssh.replan(backend="ssh", ssh=over_ssh, checkpoint_glob="/no/such/disk/*")
    assert _rows(ssh)["step-10.pt"] == ("whole", None, True)
    assert _rows(ssh, verify=True)["step-10.pt"] == ("whole", None, True), "and nothing of it was compared"
    ssh.change(dataclasses.replace(job_checkpoints.load_checkpoints(ssh.job)[1], key="/no/such/disk/step-10.pt"))
    ssh.replan(checkpoint_glob="*")
    assert _rows(ssh)["step-10.pt"] == ("whole", None, True), "also where no setting names it"


def test_moved_checkpoint_is_listed_by_original_path(shelf: Shelf) -> None:
    shelf.add_at_start(30, {"out/s.pt": state(30)}, state=CheckpointState.TORN, locations=())
    shelf.add(40, state=CheckpointState.TORN, locations=())
    listed = job_checkpoints.list_checkpoints(shelf.job, shelf.plan, verify=False)
    paths = [one["path"] for one in listed if one["save"]]
    assert paths[2:] == [f"{shelf.job.code}/out/s.pt", f"{shelf.folder}/step-40.pt"]


def test_reference_documents_every_key_of_checkpoint(shelf: Shelf) -> None:
    write(shelf.folder / "foreign.pt", state(5))
    listed = job_checkpoints.list_checkpoints(shelf.job, shelf.plan, verify=False)
    assert [one["save"] for one in listed] == [1, 2, None] and listed[0].keys() == listed[2].keys()
    page = (ROOT / "docs" / "reference.md").read_text().partition("### A checkpoint")[2]
    assert [key for key in listed[0] if f"`{key}`" not in page] == []


def test_damaged_ledger_line_is_named_and_others_count(shelf: Shelf) -> None:
    lines = shelf.job.ledger.read_text().splitlines(keepends=True)
    shelf.job.ledger.write_text(lines[0][:40] + "\n" + lines[1])
    assert list(job_checkpoints.load_checkpoints(shelf.job)) == [2]
    assert job_checkpoints.ledger_damage(shelf.job) == [f"{shelf.job.ledger}:1 cannot be read"]
    (offer,) = adoption.find_adoptable(shelf.job, shelf.plan, job_checkpoints.load_checkpoints(shelf.job))
    assert offer.path.name == "step-10.pt"


# A post-mortem


def test_ended_jobs_post_mortem_shows_current_resume_checkpoint(shelf: Shelf) -> None:
    """A post-mortem of an ended job shows what a resume would start from now."""
    (shelf.folder / "step-20.pt").unlink()
    why = Job(shelf.job).why()
    assert (why["checkpoint"]["save"], why["checkpoint"]["step"], why["misfit"]) == (1, 10, None)
    assert why["passed"] == [{"save": 2, "path": "step-20.pt", "step": 20, "why": "gone: step-20.pt is gone"}]
    (shelf.folder / "step-10.pt").rename(shelf.folder / "renamed.pt")
    why = Job(shelf.job).why()
    assert why["checkpoint"] is None and why["offered"] == [str(shelf.folder / "renamed.pt")]


@pytest.mark.parametrize(
    ("given", "read", "told"),
    [
        (1, 1, (1, "orch")), (1, 2, (2, "script")), (None, 3, (3, "script")),
        (1, 0, (None, "script")), (None, 0, None), (1, None, None),
    ],
)  # fmt: skip
def test_attempt_began_from_what_script_read(
    shelf: Shelf, given: int | None, read: int | None, told: tuple[int | None, str] | None
) -> None:
    shelf.add_at_start(30, {"out/s.pt": state(30)})
    known = job_checkpoints.load_checkpoints(shelf.job)
    resume = ResumePoint(known[given].path, known[given].step, given) if given else None
    news = [*jobs.submitted(), jobs.again(2, 7.0, resume)]
    seen = [e.CheckpointRead(8.0, 2, read)] if read is not None else []
    began = Job(shelf.job).why(jobs.record(jobs.entries([*news, *seen])))["attempts"][1]["began_from"]
    save = known.get((told or (None, ""))[0] or 0)
    wanted = {"save": None, "path": None, "step": None} if save is None else {
        "save": save.number, "path": save.path, "step": save.step,
    }  # fmt: skip
    assert began == (None if told is None else {**wanted, "chosen_by": told[1]})


def test_attempt_began_from_what_was_overwritten_in_memory_since(shelf: Shelf) -> None:
    """A checkpoint without locations keeps its name."""
    known = job_checkpoints.load_checkpoints(shelf.job)
    shelf.change(dataclasses.replace(known[1], locations=(), state=CheckpointState.GONE))
    news = [*jobs.submitted(), jobs.again(2, 7.0, None), e.CheckpointRead(8.0, 2, 1)]
    began = Job(shelf.job).why(jobs.record(jobs.entries(news)))["attempts"][1]["began_from"]
    assert began["path"] == known[1].main


def test_post_mortem_without_readable_ledger_omits_checkpoints(shelf: Shelf) -> None:
    """A post-mortem without a readable ledger says nothing of checkpoints."""
    shelf.job.ledger.unlink()
    shelf.job.ledger.mkdir()
    record = facts_file.load_record(shelf.job)
    why, plain = Job(shelf.job).why(record), post_mortem.why(shelf.plan, record)
    assert why == {**plain, "suspicion": None, "dir": str(shelf.job.root)}


# Where files are


def test_reference_documents_every_key_of_folders(shelf: Shelf) -> None:
    """The reference names every key of the folders of a job."""
    (shelf.job.code / "runs").symlink_to(shelf.job.root.parent)
    where = job_folders.job_folders(shelf.job)
    page = (ROOT / "docs" / "reference.md").read_text().partition("### Where files are")[2]
    keys = [*where, *where["links"][0], *where["checkpoints"][0]]
    assert [key for key in keys if f"`{key}`" not in page.partition("\n### ")[0]] == []


def test_complete_checkpoints_are_counted_by_folder(shelf: Shelf, tmp_path: Path) -> None:
    shelf.add_at_start(30, {"out/ckpt.pt": state(30)})
    shelf.add(40, {"run/a.pt": state(40)}, root=tmp_path / "scratch", prefix=f"{tmp_path}/scratch/")
    shelf.add(50, state=CheckpointState.TORN)
    shelf.add(60, locations=(FileLocation("gpu3", "/there"),))
    assert {one["dir"]: one["whole"] for one in job_folders.job_folders(shelf.job)["checkpoints"]} == {
        str(shelf.folder): 2, f"{shelf.job.code}/out": 1, f"{tmp_path}/scratch/run": 1, "gpu3:/there": 1,
    }  # fmt: skip


def test_part_in_memory_of_one_host_is_not_safe(shelf: Shelf) -> None:
    """What is in the memory of one host alone is listed as such, and is not safe."""
    in_memory = FileLocation("node-0", "/dev/shm/orch-x/checkpoints", is_memory=True)
    shelf.add(30, locations=(in_memory,))
    shelf.add(40, locations=(in_memory, FileLocation("node-1", "/dev/shm/orch-y/neighbours/4", is_memory=True)))
    shelf.add(50, state=CheckpointState.OPEN)
    shelf.add(60, state=CheckpointState.PRUNED)
    listed = job_checkpoints.list_checkpoints(shelf.job, shelf.plan, verify=False)
    rows = {one["step"]: one for one in listed if one["save"]}
    assert [(row["step"], row["safe"]) for row in rows.values()] == [
        (10, True), (20, True), (30, False), (40, True), (50, False), (60, False),
    ]  # fmt: skip
    assert rows[30]["places"] == [{"host": "node-0", "path": "/dev/shm/orch-x/checkpoints", "memory": True}]
    assert [rows[step]["safe_bytes"] for step in (30, 40, 60)] == [0, rows[40]["bytes"], 0], "the last one was deleted"


def test_stall_in_memory_follows_from_size(shelf: Shelf) -> None:
    """It is known where the checkpoints could be in memory, and are not."""
    assert job_checkpoints.memory_stall_s(shelf.job, shelf.plan) is None, "no stall is known"
    saved = shelf.add(30, stall_s=2.0)
    assert job_checkpoints.memory_stall_s(shelf.job, shelf.plan) == saved.size_bytes / 1e9
    for fields in ({"memory_bytes": 1 << 30}, {"checkpoint_glob": "/ckpt/*"}):
        plan = dataclasses.replace(shelf.plan, **fields)
        assert job_checkpoints.memory_stall_s(shelf.job, plan) is None
    shelf.add_at_start(40, {"out/net.pth": state(40)}, stall_s=2.0)
    assert job_checkpoints.memory_stall_s(shelf.job, shelf.plan) is None
