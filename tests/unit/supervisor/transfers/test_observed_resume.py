"""From which save an attempt began, as what its ranks had read shows."""

from __future__ import annotations

from orchestrator.core.checkpoints.checkpoint import (
    START_PREFIX,
    Checkpoint,
    CheckpointFile,
    CheckpointState,
    Content,
    FileLocation,
    Format,
)
from orchestrator.core.wire.reports import CheckpointsRead
from orchestrator.supervisor.transfers.completion import CheckpointGang
from orchestrator.supervisor.transfers.observed_resume import ResumeSourceTracker
from tests.support.saved_files import saved

GANG = CheckpointGang(2, 0, 4, ("n0", "n1"))
ALONE = CheckpointGang(2, 0, 2, ("n0",))


def _save(number: int, name: str, key: str = "", **fields: object) -> Checkpoint:
    return saved(number, key=key or f"#{number}", main=name, files=(CheckpointFile(name, 9, 1),), **fields)


SAVES = [
    _save(1, "step_1.pt"),
    _save(2, "out/s.pt", f"{START_PREFIX}out/s.pt"),
    _save(3, "run/s.pt", "/scratch/run/s.pt", locations=(FileLocation("", "/scratch"),)),
]


def _read(*names: str, attempt: int = 2, is_known: bool = True) -> CheckpointsRead:
    return CheckpointsRead(attempt, names, is_known)


def _began(*names: str, saves: list[Checkpoint] = SAVES) -> int | None:
    """Return what one node had read that is alone."""
    began = ResumeSourceTracker().add_report("n0", _read(*names), ALONE, saves, saves[0])
    return None if began is None else began[0]


def test_start_checkpoint_is_known_by_file_location() -> None:
    assert [_began(name) for name in ("step_1.pt", "./out/s.pt", "/scratch/run/s.pt")] == [1, 2, 3]
    assert [_began(name) for name in ("out/s.pt", "./step_1.pt", "run/s.pt", "/scratch/x.pt")] == [
        None,
        None,
        0,
        0,
    ]


def test_last_checkpoint_read_counts() -> None:
    assert _began("./out/s.pt", "step_1.pt", "vocab.pt") == 1


def test_newest_checkpoint_of_a_name_counts() -> None:
    again = _save(4, "step_1.pt")
    assert _began("step_1.pt", saves=[again, *SAVES]) == 4
    gone = _save(5, "step_1.pt", state=CheckpointState.GONE)
    assert _began("step_1.pt", saves=[*SAVES, again, gone]) == 4


def test_unresumable_file_leaves_start_unknown() -> None:
    """A file that no training can be resumed from leaves the start unknown."""
    part = _save(6, "optimizer.pt", content=Content.PART)
    torn = _save(7, "step_7.pt", state=CheckpointState.TORN, is_damaged=True)
    own = _save(8, "step_8.pt", attempt=2)
    assert [_began(save.main, saves=[SAVES[0], save]) for save in (part, torn, own)] == [None] * 3


def test_torn_but_read_checkpoint_is_a_start() -> None:
    """A torn checkpoint that may be complete is the start of a script that read it."""
    assert _began("step_7.pt", saves=[SAVES[0], _save(7, "step_7.pt", state=CheckpointState.TORN)]) == 7


def test_rank_0_node_is_trusted_first() -> None:
    beginnings = ResumeSourceTracker()
    assert beginnings.add_report("n1", _read("./out/s.pt"), GANG, SAVES, SAVES[0]) is None
    assert beginnings.add_report("n0", _read("step_1.pt"), GANG, SAVES, SAVES[0]) == (1, "")


def test_other_node_is_trusted_after_rank_0() -> None:
    """Another node is trusted once rank 0's has read nothing."""
    beginnings = ResumeSourceTracker()
    assert beginnings.add_report("n0", _read(), GANG, SAVES, SAVES[0]) is None
    assert beginnings.add_report("n1", _read("./out/s.pt"), GANG, SAVES, SAVES[0]) == (2, "")


def test_nothing_was_read_only_if_all_nodes_agree() -> None:
    for is_known, wanted in ((True, (0, "")), (False, None)):
        beginnings = ResumeSourceTracker()
        assert beginnings.add_report("n1", _read(is_known=is_known), GANG, SAVES, SAVES[0]) is None
        assert beginnings.add_report("n0", _read(), GANG, SAVES, SAVES[0]) == wanted


def test_file_unseen_by_hook_may_have_been_read() -> None:
    for newest in (None, _save(1, "a", format=Format.SAFETENSORS), _save(1, "a", format=Format.UNKNOWN)):
        assert ResumeSourceTracker().add_report("n0", _read(), ALONE, SAVES, newest) is None


def test_job_without_checkpoint_may_have_read_foreign_file() -> None:
    for is_known in (True, False):  # a script that has made no step is not known to have read nothing else
        read = _read("conf.yaml", "/elsewhere/last.ckpt", is_known=is_known)
        assert ResumeSourceTracker().add_report("n0", read, ALONE, [], None) == (0, "/elsewhere/last.ckpt")
    assert ResumeSourceTracker().add_report("n0", _read("conf.yaml"), ALONE, [], None) is None


def test_reads_of_earlier_attempt_are_forgotten() -> None:
    beginnings = ResumeSourceTracker()
    beginnings.add_report("n0", _read("step_1.pt"), GANG, SAVES, SAVES[0])
    later = CheckpointGang(3, 0, 4, ("n0", "n1"))
    assert beginnings.add_report("n1", _read(attempt=3), later, SAVES, SAVES[0]) is None
