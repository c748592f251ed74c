"""From which save an attempt began, as what its ranks had read shows."""

from __future__ import annotations

from orchestrator.core.checkpoints.checkpoint import (
    START_PREFIX,
    CheckpointFile,
    CheckpointRecord,
    CheckpointState,
    Content,
    FileLocation,
    Format,
)
from orchestrator.core.wire.reports import CheckpointsRead
from orchestrator.supervisor.transfers.completion import CheckpointGang
from orchestrator.supervisor.transfers.resume_source import DetectedSource, ResumeSourceTracker
from tests.support.saved_files import saved

GANG = CheckpointGang(2, 0, 4, ("n0", "n1"))
ALONE = CheckpointGang(2, 0, 2, ("n0",))


def _save(number: int, name: str, key: str = "", **fields: object) -> CheckpointRecord:
    return saved(number, key=key or f"#{number}", main=name, pieces=(CheckpointFile(name, 9, 1),), **fields)


SAVES = [
    _save(1, "step_1.pt"),
    _save(2, "out/s.pt", f"{START_PREFIX}out/s.pt"),
    _save(3, "run/s.pt", "/scratch/run/s.pt", places=(FileLocation("", "/scratch"),)),
]


def _read(*names: str, attempt: int = 2, is_known: bool = True) -> CheckpointsRead:
    return CheckpointsRead(attempt, names, is_known)


def _began(*names: str, saves: list[CheckpointRecord] = SAVES) -> int | None:
    """Return what one node had read that is alone."""
    began = ResumeSourceTracker().add_report("n0", _read(*names), ALONE, saves, saves[0])
    return None if began is None else began.save


def test_a_save_is_known_by_the_place_of_its_files() -> None:
    assert [_began(name) for name in ("step_1.pt", "./out/s.pt", "/scratch/run/s.pt")] == [1, 2, 3]
    assert [_began(name) for name in ("out/s.pt", "./step_1.pt", "run/s.pt", "/scratch/x.pt")] == [
        None,
        None,
        0,
        0,
    ]


def test_the_last_one_that_was_read_counts() -> None:
    assert _began("./out/s.pt", "step_1.pt", "vocab.pt") == 1


def test_of_one_name_the_newest_save_counts() -> None:
    again = _save(4, "step_1.pt")
    assert _began("step_1.pt", saves=[again, *SAVES]) == 4
    gone = _save(5, "step_1.pt", state=CheckpointState.GONE)
    assert _began("step_1.pt", saves=[*SAVES, again, gone]) == 4


def test_what_no_training_can_be_resumed_from_leaves_the_beginning_unknown() -> None:
    part = _save(6, "optimizer.pt", content=Content.PART)
    torn = _save(7, "step_7.pt", state=CheckpointState.TORN, is_damaged=True)
    own = _save(8, "step_8.pt", attempt=2)
    assert [_began(save.main, saves=[SAVES[0], save]) for save in (part, torn, own)] == [None] * 3


def test_a_torn_save_that_may_be_whole_is_a_beginning_for_a_script_that_read_it() -> None:
    assert _began("step_7.pt", saves=[SAVES[0], _save(7, "step_7.pt", state=CheckpointState.TORN)]) == 7


def test_rank_0_s_node_is_believed_before_others() -> None:
    beginnings = ResumeSourceTracker()
    assert beginnings.add_report("n1", _read("./out/s.pt"), GANG, SAVES, SAVES[0]) is None
    assert beginnings.add_report("n0", _read("step_1.pt"), GANG, SAVES, SAVES[0]) == DetectedSource(1)


def test_another_node_is_believed_once_rank_0_s_has_read_nothing() -> None:
    beginnings = ResumeSourceTracker()
    assert beginnings.add_report("n0", _read(), GANG, SAVES, SAVES[0]) is None
    assert beginnings.add_report("n1", _read("./out/s.pt"), GANG, SAVES, SAVES[0]) == DetectedSource(2)


def test_nothing_was_read_only_if_all_nodes_know_that() -> None:
    for is_known, wanted in ((True, DetectedSource(0)), (False, None)):
        beginnings = ResumeSourceTracker()
        assert beginnings.add_report("n1", _read(is_known=is_known), GANG, SAVES, SAVES[0]) is None
        assert beginnings.add_report("n0", _read(), GANG, SAVES, SAVES[0]) == wanted


def test_what_no_hook_sees_read_may_have_been_read() -> None:
    for newest in (None, _save(1, "a", format=Format.SAFETENSORS), _save(1, "a", format=Format.UNKNOWN)):
        assert ResumeSourceTracker().add_report("n0", _read(), ALONE, SAVES, newest) is None


def test_a_job_without_a_checkpoint_may_have_read_a_file_that_is_none_of_its_own() -> None:
    for is_known in (True, False):  # a script that has made no step is not known to have read nothing else
        read = _read("conf.yaml", "/elsewhere/last.ckpt", is_known=is_known)
        assert ResumeSourceTracker().add_report("n0", read, ALONE, [], None) == DetectedSource(
            0, "/elsewhere/last.ckpt"
        )
    assert ResumeSourceTracker().add_report("n0", _read("conf.yaml"), ALONE, [], None) is None


def test_what_an_earlier_attempt_had_read_is_forgotten() -> None:
    beginnings = ResumeSourceTracker()
    beginnings.add_report("n0", _read("step_1.pt"), GANG, SAVES, SAVES[0])
    later = CheckpointGang(3, 0, 4, ("n0", "n1"))
    assert beginnings.add_report("n1", _read(attempt=3), later, SAVES, SAVES[0]) is None
