"""What is said of checkpoints that a script saved outside of `checkpoint.path`."""

from __future__ import annotations

from orchestrator.brain.model import events as e
from orchestrator.brain.model.facts import News
from orchestrator.core import observations
from orchestrator.views import cells, post_mortem
from orchestrator.views import status as status_view
from tests.support import jobs


def _saved(attempt: int, at: float, steps: int) -> News:
    file = observations.SavedFile("code/snapshot.pt", "{job_dir}/code/snapshot.pt")
    return e.SavedOutside(at, "node-0", attempt, file, steps, 2.0, False)


def test_what_is_saved_outside_is_said_with_the_line_that_makes_orch_start_from_it() -> None:
    news = [*jobs.submitted(), *jobs.running(1, 1.0, 20), _saved(1, 5.0, 18)]
    found = jobs.status(news, at=12.0)
    assert found["saved_outside"][0]["checkpoint_path"] == "{job_dir}/code/snapshot.pt"
    text = cells.plain(status_view.job(found))
    assert (
        "saved       outside checkpoint.path: code/snapshot.pt (step 18, 9.0s ago); orch does not start"
        in text
    )
    assert (
        "fix: to make it do so, add checkpoint: {path: '{job_dir}/code/snapshot.pt'} to the job file, or --set"
        in text
    )
    assert "or --set 'checkpoint.path={job_dir}/code/snapshot.pt' to orch run or resume" in text
    with_one = [*news, e.CheckpointFound(6.0, "node-0", 1, jobs.CKPT, 20)]
    assert "outside" not in cells.plain(status_view.job(jobs.status(with_one))), "there is one to start from"


def test_an_attempt_that_may_have_gone_on_by_itself_did_not_begin_at_the_beginning() -> None:
    first = [*jobs.submitted(), *jobs.running(1, 1.0, 20), _saved(1, 5.0, 18), *jobs.crash(1, 6.0, 20, 20)]
    why = jobs.told([*first, jobs.again(2, 7.0, None), *jobs.running(2, 7.1, 1)])
    attempts = why["attempts"]
    assert attempts[0]["may_go_on_from"] is None
    assert attempts[0]["repeated_steps"] is None, "it may have repeated two or twenty"
    assert attempts[1]["may_go_on_from"] == {
        "path": "code/snapshot.pt",
        "node": "node-0",
        "written_at": "2026-11-18T11:06:43.000Z",
    }
    text = cells.plain(post_mortem.post_mortem(why))
    came_from = "the script may have gone on from code/snapshot.pt, written at 11:06:43 UTC;"
    assert f"  no checkpoint of checkpoint.path; {came_from} since 2026-11-18" in text
    assert "attempt 2  goes on, step 1 of its own" in text
    assert "loss in the log" not in text
    attempts[0]["losses"], attempts[1]["losses"] = ["10.98", "2.29"], ["2.31", "1.9"]
    told = "loss in the log of rank 0: from 2.31 to 1.9; in attempt 1 from 10.98 to 2.29"
    assert told in cells.plain(post_mortem.post_mortem(why))
    assert (
        "fix: to let orch start from it, add checkpoint: {path: '{job_dir}/code/snapshot.pt'} to the job file, or --set"
        in text
    )
    assert "may have gone on from code/snapshot.pt" in post_mortem.transition(why, 2)
