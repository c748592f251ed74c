"""Files that the ledger does not know: which are offered, which a person may adopt, and which are refused."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from orchestrator.client import adoption, job_checkpoints
from orchestrator.core.checkpoints.checkpoint import (
    Checkpoint,
    CheckpointState,
    CompletionReason,
    Content,
    FileLocation,
    Format,
    StepSource,
)
from orchestrator.core.errors import UserError
from orchestrator.core.jobdir import locks
from orchestrator.core.jobdir.plan import PlannedSsh
from tests.support.saved_files import Model, adam, distributed, safetensors, torch_save, write, write_all
from tests.unit.client.shelf import Shelf, flip, state


@pytest.fixture
def shelf(tmp_path: Path) -> Shelf:
    """Return a job with step 10 in its ledger."""
    shelf = Shelf(tmp_path)
    shelf.add(10)
    return shelf


def _adopt(shelf: Shelf, path: Path | str) -> Checkpoint:
    return adoption.adopt(shelf.job, shelf.plan, shelf.folder / path)


# Adoption


def test_complete_file_is_adopted_with_its_contents(shelf: Shelf) -> None:
    """A complete file is entered with all that it says of itself."""
    write(shelf.folder / "mine" / "step-900.pt", state(900))
    save = _adopt(shelf, "mine/step-900.pt")
    assert (save.number, save.main, save.attempt, save.step) == (2, "mine/step-900.pt", 0, 900)
    assert (save.format, save.content, save.closed_by) == (
        Format.TORCH,
        Content.STATE,
        CompletionReason.ADOPTED,
    )
    assert save.step_source is StepSource.STATED and save.fits_any_size and save.is_hashed
    assert job_checkpoints.load_checkpoints(shelf.job)[2] == save, "it is on disk"
    assert (
        job_checkpoints.find_checkpoint(
            shelf.job, shelf.plan, job_checkpoints.load_checkpoints(shelf.job), "mine/step-900.pt"
        )
        == save
    ), "once"


def test_other_named_folder_is_one_checkpoint(shelf: Shelf, tmp_path: Path) -> None:
    """A folder of another name is one checkpoint with all that is below it."""
    there = tmp_path / "from_a_colleague"
    write_all(there, {"weights.safetensors": safetensors(), "more/optimizer.pt": torch_save(adam())})
    save = _adopt(shelf, there)
    assert (save.main, save.path, len(save.files)) == ("from_a_colleague", str(there), 2)


def test_external_file_is_adopted_with_its_step(shelf: Shelf, tmp_path: Path) -> None:
    """A file outside the job is adopted with the files of its step beside it."""
    files = {
        "model_7.pt": torch_save(Model()),
        "optim_7.pt": torch_save(adam()),
        "model_8.pt": torch_save(Model()),
    }
    write_all(tmp_path / "old", files)
    save = _adopt(shelf, tmp_path / "old" / "model_7.pt")
    assert (save.main, save.locations[0].root, len(save.files)) == ("model_7.pt", str(tmp_path / "old"), 2)


def test_file_in_external_checkpoint_folder_adopts_all(shelf: Shelf, tmp_path: Path) -> None:
    write_all(tmp_path / "old", distributed("step-7"))
    save = _adopt(shelf, tmp_path / "old" / "step-7" / "__0_0.distcp")
    assert (save.main, save.path, save.format) == ("step-7", str(tmp_path / "old" / "step-7"), Format.DCP)
    assert len(save.files) == 3 and save.fits_any_size


def test_rank_files_fit_their_number_of_ranks(shelf: Shelf) -> None:
    """Files of ranks fit as many ranks as have some."""
    write_all(shelf.folder, {f"model_5_rank_{rank}.pt": torch_save(Model()) for rank in range(3)})
    save = _adopt(shelf, "model_5_rank_1.pt")
    assert (len(save.files), save.world_size, save.fits_any_size) == (3, 3, False)


REFUSED = {
    ".": "folder of the job's checkpoints", "..": "folder of the job's checkpoints", "/": "folder of the job's checkpoints", "empty.pt": "is empty",
    "folder": "with an extension of checkpoints", "/dev/null": "with an extension of checkpoints",
    "notes.txt": "with an extension of checkpoints", sys.executable: "with an extension of checkpoints",
    "torn.pt": "is cut off: its zip has no end", "flipped.pt": "CRC-32", "shards": "__1_0.distcp is missing",
    "several": "contains 2 checkpoints, such as several/step-2.pt",
}  # fmt: skip


@pytest.mark.parametrize("named", REFUSED)
def test_incomplete_checkpoint_is_refused_without_change(shelf: Shelf, named: str) -> None:
    """An incomplete checkpoint is refused and changes nothing."""
    whole = torch_save({"model": Model(), "optimizer": adam()}, data=bytes(5000))
    for name, data in (
        ("empty.pt", b""),
        ("notes.txt", b"x"),
        ("torn.pt", whole[:4000]),
        ("flipped.pt", whole),
    ):
        write(shelf.folder / name, data)
    flip(shelf.folder / "flipped.pt")
    (shelf.folder / "folder").mkdir()
    write_all(shelf.folder, {"several/step-1.pt": state(1), "several/step-2.pt": state(2), **distributed("shards")})
    (shelf.folder / "shards" / "__1_0.distcp").unlink()
    before = sorted(shelf.job.root.rglob("*")), shelf.job.ledger.read_bytes()
    with pytest.raises(UserError, match=REFUSED[named]) as refused:
        _adopt(shelf, named)
    assert refused.value.fix
    assert (sorted(shelf.job.root.rglob("*")), shelf.job.ledger.read_bytes()) == before


def test_checkpoint_unreachable_for_hosts_must_be_copied_first(shelf: Shelf, tmp_path: Path) -> None:
    beside = write(shelf.job.from_hosts / "one" / "checkpoints" / "step-10.pt", state(10))
    shelf.replan(ssh=PlannedSsh(None, None, "known", "~/.orch", (), None))
    with pytest.raises(UserError, match="it is not copied to the hosts from there") as refused:
        _adopt(shelf, beside)
    assert refused.value.fix == f"copy it into {shelf.folder}"
    assert _adopt(shelf, write(tmp_path / "shared" / "mine.pt", state(5))).number == 2, "hosts may see that"


@pytest.mark.slow
def test_no_adoption_while_supervisor_writes_ledger(shelf: Shelf) -> None:
    """Nothing is adopted while a supervisor writes the ledger."""
    write(shelf.folder / "foreign.pt", state(5))
    with (
        locks.hold(shelf.job.lock) as is_mine,
        pytest.raises(UserError, match="its supervisor is still running") as refused,
    ):
        assert is_mine
        _adopt(shelf, "foreign.pt")
    assert refused.value.fix == "resume from it after the job has ended"
    assert list(job_checkpoints.load_checkpoints(shelf.job)) == [1]


# Offers


def _offered(shelf: Shelf) -> dict[str, str]:
    """Return what is offered, each with why it is not whole."""
    found = adoption.find_adoptable(shelf.job, shelf.plan, job_checkpoints.load_checkpoints(shelf.job))
    return {str(offer.path.relative_to(shelf.job.root)): offer.fault for offer in found}


def test_only_checkpoint_like_files_outside_ledger_are_offered(shelf: Shelf) -> None:
    for name, data in (
        ("foreign.pt", state(5)), ("torn.pt", state(6)[:200]), ("notes.txt", b"x"), ("train.log", b"x"), (".hidden.pt", state(7)),
        ("tokenizer.json", b"{}"), ("tmp_8.pt", state(8)),
    ):  # fmt: skip
        write(shelf.folder / name, data)
    shelf.add(20, state=CheckpointState.TORN, why="the attempt ended while it was written")
    assert _offered(shelf) == {
        "checkpoints/foreign.pt": "",
        "checkpoints/torn.pt": "torn.pt is cut off: its zip has no end",
    }


def test_damaged_checkpoint_is_shown_in_row_not_offered(shelf: Shelf) -> None:
    """A checkpoint that was damaged is reported beside its row and not offered again."""
    write(shelf.folder / "step-10.pt", b"")
    assert _offered(shelf) == {}
    torn = shelf.add(
        20,
        {"step-20.pt": state(20)[:200]},
        state=CheckpointState.TORN,
        locations=(FileLocation("one", "/there"),),
    )
    assert _offered(shelf) == {}, "it has come from its host"
    write(shelf.folder / torn.main, state(20))
    assert _offered(shelf) == {"checkpoints/step-20.pt": ""}, "all of it"
    (shelf.folder / torn.main).unlink()
    write(shelf.folder / "step-10.pt", state(10))
    shelf.job.ledger.unlink()
    assert _offered(shelf) == {"checkpoints/step-10.pt": ""}


@pytest.mark.parametrize("glob", ["*", "{job_dir}/code/out/*"])
def test_nothing_in_start_folder_is_offered(shelf: Shelf, glob: str) -> None:
    """The snapshot may have brought it."""
    shelf.replan(checkpoint_glob=glob)
    write(shelf.job.code / "out" / "pretrained.pt", state(1))
    assert _offered(shelf) == {}


def test_nothing_is_offered_while_job_runs(shelf: Shelf) -> None:
    shelf.job.ended.unlink()
    shelf.job.state.write_text(shelf.job.state.read_text().replace("FAILED", "RUNNING"))
    write(shelf.folder / "step-20.pt", state(20))
    assert _offered(shelf) == {}, "its supervisor enters it"
    shelf.job.state.write_text(shelf.job.state.read_text().replace("RUNNING", "FAILED"))
    assert _offered(shelf) == {"checkpoints/step-20.pt": ""}, "its supervisor is only leaving"
