"""Do statuses, post-mortems and tables look as they were looked at? Golden texts, and the limits of a screen."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from orchestrator.brain.fold_events import fold
from orchestrator.brain.model import decisions as d
from orchestrator.brain.model import events as e
from orchestrator.brain.model.facts import Facts, News
from orchestrator.client.post_mortem import add_live_status
from orchestrator.core import observations
from orchestrator.core.checkpoints.resume_choice import ResumePoint
from orchestrator.core.jobdir.locks import LockHolder
from orchestrator.core.jobdir.status_file import Status, StragglerStatus
from orchestrator.core.status_types import NextAction, Suspicion
from orchestrator.core.wire import reports
from orchestrator.core.wire.reports import RankHeartbeat
from orchestrator.supervisor.status import status
from orchestrator.views import cells, post_mortem, tables
from orchestrator.views import status as status_view
from tests.support import golden, jobs
from tests.support.frames import frame

SCREEN_COLUMNS, SCREEN_LINES = 80, 40
LONG_TRACEBACK = "Traceback (most recent call last):\n" + "".join(
    f'  File "/opt/venv/lib/python3.11/site-packages/torch/part_{n}.py", line {n}, in call\n    return inner(x)\n'
    for n in range(40)
)
HANG = d.Verdict(
    d.VerdictKind.HANG, (2,), "node-1", "no sign of progress from any rank for 61 s; ranks 2 are behind",
    (d.Evidence("rank 0: main thread in all_reduce, train.py:31"), d.Evidence("rank 2: main thread in load, data.py:7")), d.FailureSignature(d.VerdictKind.HANG), 23, 5.0, True,
)  # fmt: skip
FOUND = d.Verdict(
    d.VerdictKind.HANG, (2,), "gpu03", "no sign of progress for 9 s: rank 2 on gpu03: in read() of data/shard-17.bin",
    (
        d.Evidence("stacks of 8 ranks, twice, 3 s apart, unchanged · collective sequence numbers · /proc state · GPU use", d.EvidenceKind.WAYS),
        d.Evidence("rank 2 (state S; blocked, in read() of data/shard-17.bin): train.py:88 load_batch < train.py:120 main", d.EvidenceKind.RANKS),
        d.Evidence("ranks 0-1,3-7 (state S; waits, in all_reduce #9,655): train.py:97 train_step < train.py:120 main", d.EvidenceKind.RANKS),
        d.Evidence("not inspected (ranks 0-7): py-spy is not installed: no native frames"),
    ),
    d.FailureSignature(d.VerdictKind.HANG), 1204, 57.0, True,
    culprit="rank 2 on gpu03: in read() of data/shard-17.bin, train.py:88 load_batch (DataLoader of the main thread)",
    waiting="ranks 0-1,3-7 in all_reduce #9,655 (default group), entered 9 s ago; rank 2 never entered it",
)  # fmt: skip
BEFORE = replace(FOUND, since_s=20.0)
GONE_ON = d.Notice(40.0, "step 1,201 was made", 1, d.NoticeTopic.HANG, withdrawn=True)
AFTER = [*jobs.stopped(1, 66.1), jobs.again(2, 67.0, ResumePoint(jobs.CKPT, 20)), *jobs.running(2, 67.1, 1)]
DESYNC = d.Verdict(
    d.VerdictKind.DESYNC, (2,), "node-1", "rank 2 on node-1 entered 1 collective fewer than its peers from step 41 on",
    (d.Evidence("collectives of the default group by now: rank 0: 90, rank 1: 90, rank 2: 89, rank 3: 90; equal up to step 40"),),
    d.FailureSignature(d.VerdictKind.DESYNC), 41, 63.0, False,
    culprit="rank 2 on node-1 entered 1 collective fewer than ranks 0,1,3 in the default group, from step 41 on",
)  # fmt: skip
SETUP = d.Verdict(
    d.VerdictKind.LAUNCH, (), "node-1", "node-1: the setup lines ended with code 1",
    (d.Evidence("preparing\ncat: /no/such/file: No such file or directory\n", d.EvidenceKind.OUTPUT),), d.FailureSignature(d.VerdictKind.LAUNCH), None, 1.0, True,
)  # fmt: skip


def _status(news: list[News], at: float = 12.0, **more: Any) -> Status:
    facts = Facts()
    for one in news:
        fold(facts, one)
    for rank in facts.ranks.values():
        rank.beat = replace(rank.beat, rate_per_s=2.51 if rank.rank == 2 else 2.5)
    known = status(jobs.plan(total_steps=1000), facts, jobs.moment(at))
    return replace(known, dir=jobs.ROOT, **more)


def _crashes(number: int) -> list[News]:
    """That many attempts, each of which dies at step 23 after a restart from step 20."""
    news = jobs.crashed_once()
    for attempt in range(2, number + 1):
        at = 10.0 * attempt
        news += [*jobs.crash(attempt, at + 1, 3, 23), jobs.again(attempt + 1, at + 2, ResumePoint(jobs.CKPT, 20))]
        news += jobs.running(attempt + 1, at + 2.1, 1)
    return news


RUNNING = [*jobs.submitted(), *jobs.running(1, 1.0, 20), jobs.saved(4.5)]
OVER = [*jobs.crashed_once(), *jobs.crash(2, 12.0, 3, 23, LONG_TRACEBACK)]
REASON = (
    f"crash: rank 1 on node-0: RuntimeError: loss is NaN at {jobs.ROOT}/code/train.py:10 inner; the budget is spent"
)
WHY: dict[str, list[News]] = {
    "just-submitted": jobs.submitted(),
    "running": RUNNING,
    "restarted": jobs.crashed_once(),
    "failed": [*OVER, jobs.end(2, 13.0, d.JobEnd.FAILED, REASON)],
    "failed-often": [*_crashes(30), jobs.end(31, 500.0, d.JobEnd.FAILED, REASON)],
    "hang": [*RUNNING, d.Judge(66.0, HANG.summary, 1, HANG), *jobs.stopped(1, 66.1)],
    "hang-found": [
        *RUNNING,
        d.Notice(30.0, BEFORE.summary, 1, d.NoticeTopic.HANG, verdict=BEFORE),
        GONE_ON,
        d.Judge(66.0, FOUND.summary, 1, FOUND),
        *AFTER,
    ],
    "desync": [*RUNNING, d.Judge(66.0, DESYNC.summary, 1, DESYNC), jobs.end(1, 67.0, d.JobEnd.FAILED, f"desync: {DESYNC.summary}")],
    "setup-failed": [
        *jobs.submitted(),
        d.Judge(2.0, SETUP.summary, 1, SETUP),
        jobs.end(1, 2.1, d.JobEnd.FAILED, f"launch: {SETUP.summary}"),
    ],
    "cancelled": [*RUNNING, e.CancelRequested(6.0, 1), jobs.end(1, 7.0, d.JobEnd.CANCELLED, "cancelled by the user")],
    "succeeded": [*RUNNING, jobs.end(1, 9.0, d.JobEnd.SUCCEEDED, "every rank exited with code 0")],
}  # fmt: skip


@pytest.mark.parametrize("name", WHY)
def test_post_mortem_matches_golden_file(name: str) -> None:
    golden.check(f"why-{name}.txt", cells.plain_text(post_mortem.post_mortem(jobs.told(WHY[name]))))


def test_preempted_attempt_ended_at_its_last_step() -> None:
    why = jobs.told(WHY["failed"])
    last = why["attempts"][-1]
    last["verdict"] |= {"kind": "preempted", "step": 21, "culprit": "", "waiting": ""}
    assert last["last_step"] == 25
    assert "attempt 2  preempted at step 25" in cells.plain_text(post_mortem.post_mortem(why))


def test_restart_line_shows_cause_and_next_start() -> None:
    why = jobs.told(WHY["restarted"])
    end = "crash: rank 1 on node-0: RuntimeError: loss is NaN at train.py:10 inner"
    assert post_mortem.transition(why, 2) == f"from step-20.pt; attempt 1 ended: {end}"
    assert post_mortem.transition(why, 1) == ""
    cancelled = jobs.told([*WHY["cancelled"], jobs.again(2, 67.0, None)])
    assert post_mortem.transition(cancelled, 2) == "from the beginning; attempt 1 stopped by orch cancel"


@pytest.mark.parametrize("name", WHY)
def test_the_post_mortem_fits_one_screen(name: str) -> None:
    text = cells.plain_text(post_mortem.post_mortem(jobs.told(WHY[name])))
    rows = sum(-(-len(line) // SCREEN_COLUMNS) or 1 for line in text.splitlines())
    assert rows <= SCREEN_LINES - 1  # the prompt needs a line too


def test_many_failures_show_first_and_latest() -> None:
    told = jobs.told(_crashes(30))
    for attempt in told["attempts"][:-1]:
        attempt["verdict"]["summary"] += f" {attempt['attempt']}"
    text = cells.plain_text(post_mortem.post_mortem(told))
    assert "attempt 1  " in text and "… 23 more, all in --json …" in text and "attempt 29  " in text
    assert "attempt 12  " not in text


def test_equal_evidence_of_hosts_appears_once_with_fix() -> None:
    said = "lease: 2 GPUs wanted, the host has 1"
    proof = tuple(d.Evidence(said, d.EvidenceKind.HOST, host, "lower gpus_per_node") for host in ("n0", "n1"))
    head = "2 hosts are needed, and 0 of 2 can be used"
    verdict = d.Verdict(
        d.VerdictKind.LAUNCH,
        (),
        "",
        head,
        proof,
        d.FailureSignature(d.VerdictKind.LAUNCH),
        None,
        1.0,
        False,
        end=f"; {proof[0]}",
    )
    summary = f"{head}; n0: {said}; fix: lower gpus_per_node"
    assert verdict.summary == summary
    news = [
        *jobs.submitted(),
        d.Judge(2.0, summary, 1, verdict),
        jobs.end(1, 2.1, d.JobEnd.FAILED, f"launch: {summary}"),
    ]
    lines = cells.plain_text(post_mortem.post_mortem(jobs.told(news))).splitlines()
    assert "  2 hosts are needed, and 0 of 2 can be used" in lines
    at = lines.index("  n0, n1: lease: 2 GPUs wanted, the host has 1")
    assert lines[at + 1] == "    fix: lower gpus_per_node"
    assert lines[-2].strip().startswith("status  orch status")


def test_reason_of_lost_allocation_is_shown_once() -> None:
    why, what = "it was put back into the queue", "allocation 69.0 was requeued, not by orch"
    verdict = d.Verdict(
        d.VerdictKind.PREEMPTED, (), "", what, (d.Evidence(why),), d.FailureSignature(d.VerdictKind.PREEMPTED), None, 1.0, True,
        end=f": {why}",
    )  # fmt: skip
    text = cells.plain_text(
        post_mortem.post_mortem(jobs.told([*jobs.submitted(), d.Judge(2.0, verdict.summary, 1, verdict)]))
    )
    assert f"  {what}\n" in text and f"  {why}" in text and f"{what}: {why}" not in text


def test_rank_failing_during_grace_is_named_with_exception() -> None:
    failure = observations.Failure("RuntimeError", "no worker\nany more", "", frame("train.py:10 inner"))
    exited = reports.Exited(1, 1, 1, None, 20, failure, oom=False, ordered=True)
    late = e.FromNode(7.0, "node-0", exited)
    other = e.FromNode(7.0, "node-0", replace(exited, rank=0, code=None, signal=15))
    limit = d.Verdict(
        d.VerdictKind.TIME_LIMIT,
        (),
        "",
        "it is over",
        (),
        d.FailureSignature(d.VerdictKind.TIME_LIMIT),
        None,
        1.0,
        False,
    )
    said = "rank 1 on node-0, asked to stop, exited with code 1: RuntimeError: no worker at train.py:10 inner"
    for ending in (d.Judge(6.5, "over", 1, limit), e.CancelRequested(6.5, 1)):
        why = jobs.told([*RUNNING, ending, late, other])
        assert cells.plain_text(post_mortem.post_mortem(why)).count("asked to stop") == 1
        assert f"  {said}\n" in cells.plain_text(post_mortem.post_mortem(why))
    assert why["attempts"][0]["remarks"] == [said]


def test_cancelled_attempt_stays_so_after_resume() -> None:
    ended = jobs.end(1, 7.0, d.JobEnd.CANCELLED, "cancelled by the user")
    news = [*RUNNING, e.CancelRequested(6.0, 1), ended]
    news += [e.ResumeRequested(8.0, 2), jobs.again(2, 9.0, ResumePoint(jobs.CKPT, 20))]
    text = cells.plain_text(post_mortem.post_mortem(jobs.told(news)))
    assert "attempt 1  stopped by orch cancel" in text and "attempt 2  starting" in text


def test_end_of_long_traceback_is_kept() -> None:
    text = cells.plain_text(post_mortem.post_mortem(jobs.told(WHY["failed"])))
    assert "part_39.py" in text and "part_20.py" not in text and "lines, all in --json" in text


def test_suspicion_line_replaces_reason() -> None:
    said = "rank 2 on node-1 is stopped (state T) for 3 s"
    seen = Suspicion(said, [2], "node-1", 3.0, NextAction.ENDS, 2.0)
    more: dict[str, Any] = {
        "suspicion": said,
        "suspected": seen,
        "reason": "rank 2 is stopped or a zombie (state T or Z)",
    }
    text = cells.plain_text(status_view.job(_status(RUNNING, 6.0, **more), reference="gpt"))
    then = "the attempt ends at 11:06:48 UTC unless a rank moves; to end it now: orch restart gpt"
    assert f"\nsuspicion   {said}\n            {then}\n" in text
    assert "stands still" not in text
    assert [line.split()[3:5] for line in text.splitlines() if line.startswith("2 ")] == [["stuck", "3.0s"]]


@pytest.mark.parametrize("follows", NextAction)
def test_next_action_of_suspicion_is_shown(follows: NextAction) -> None:
    lost = Suspicion("node-1 is silent", [2, 3], "node-1", 3.0, follows, 2.0, "node-2")
    said = status_view.next_action_line(lost, "2026-11-18T11:06:46.500Z", "gpt")
    assert (said == "") is (follows is NextAction.UNKNOWN)
    assert ("11:06:48 UTC" in said) is (follows in (NextAction.ENDS, NextAction.LOST))
    assert ("node-2 takes over" in said) is (follows is NextAction.LOST)


def test_rank_without_steps_has_no_speed() -> None:
    beats = e.FromNode(
        14.0, "node-0", reports.Heartbeat(1, (RankHeartbeat(0, 20, "S", 1, 1.0), RankHeartbeat(1, 20, "S", 1, 1.0)))
    )
    shown = _status([*RUNNING, beats], 14.5)
    assert shown.steps_per_s == 0.0 and "steps/s" not in cells.plain_text([status_view.headline(shown)])


def test_slow_rank_line_has_factor_and_host() -> None:
    slow = StragglerStatus(5, "gpu02", 1.8, 0.18, 0.1, 1300)
    hot = replace(slow, gpu_remarks="GPU 3: lower clocks")
    text = cells.plain_text(status_view.job(_status(RUNNING, 6.0, stragglers=(slow, slow, hot, *(slow,) * 3))))
    assert "\nslow        rank 5 on gpu02, 1.8 x its peers since step 1,300\n            rank 5 on gpu02" in text
    assert "; GPU 3: lower clocks\n" in text and "\n            and 2 more: --json shows all\n" in text


def test_notice_and_fix_have_lines_until_withdrawn() -> None:
    said = "4 ranks train alone: none has formed a process group after 30 steps"
    notice = d.Notice(5.0, said, 1, d.NoticeTopic.ALONE, fix="form one")
    text = cells.plain_text(status_view.job(_status([*RUNNING, notice], 6.0)))
    assert (
        "\nnotice      4 ranks train alone: none has formed a process group after 30 steps\n            fix: form one\n"
        in text
    )
    told = cells.plain_text(post_mortem.post_mortem(jobs.told([*RUNNING, notice])))
    assert "UTC: 4 ranks train alone: none has formed a process group after 30 steps\n    fix: form one" in told
    gone = d.Notice(6.0, "the ranks no longer train alone", 1, d.NoticeTopic.ALONE, withdrawn=True)
    assert "notice" not in cells.plain_text(status_view.job(_status([*RUNNING, notice, gone], 6.0)))
    told = cells.plain_text(post_mortem.post_mortem(jobs.told([*RUNNING, notice, gone])))
    assert "withdrawn at " in told and "the ranks no longer train alone" in told


def test_job_without_steps_shows_bar_of_log() -> None:
    beat = e.FromNode(
        3.0, "node-0", reports.Heartbeat(1, (RankHeartbeat(0, 0, "S", 9, 1.0, progress="37/1200 (tqdm)"),))
    )
    shown = _status([*jobs.submitted(), *jobs.running(1, 1.0, 0), beat], 4.0)
    assert shown.step is None and shown.progress == "37/1200 (tqdm)"
    lines = cells.plain_text(status_view.job(shown)).splitlines()
    assert lines[1].startswith("RUNNING  attempt 1  37/1200 (tqdm)")
    assert [line for line in lines if line.startswith("0 ") and "37/1200 (tqdm)" in line]


def test_remarks_are_shown_in_their_attempt() -> None:
    said = "slow: rank 1 on node-0, 1.8 x its peers (180 ms a step) since step 12"
    told = jobs.told([*RUNNING, d.Notice(5.0, said, 1, d.NoticeTopic.SLOW, "1"), *jobs.crash(1, 6.0, 23, 23)])
    assert told["attempts"][0]["remarks"] == [said]
    lines = cells.plain_text(post_mortem.post_mortem(told)).splitlines()
    assert f"  {said}" in lines
    many = [{**told["attempts"][0], "remarks": [said] * 6}]
    text = cells.plain_text(post_mortem.post_mortem({**told, "attempts": many}))
    assert text.count("slow: ") == 4 and "\n  … 2 more, all in --json …\n" in text


def test_earlier_hangs_are_summarised_by_culprit() -> None:
    lines = cells.plain_text(
        post_mortem.post_mortem(jobs.told([*WHY["hang-found"], *jobs.crash(2, 80.0, 3, 23)]))
    ).splitlines()
    assert lines[2] == f"attempt 1  hang at step 1,204, restarted in 4.1 s: {FOUND.culprit}"


STATUS = {
    "starting": _status(jobs.submitted(), 1.0),
    "running": _status(RUNNING, 6.0),
    "restarting": _status([*RUNNING, *jobs.crash(1, 5.5, 23, 23)], 6.0),
    "succeeded": _status(WHY["succeeded"], 10.0),
    "failed": _status(WHY["failed"], 14.0),
    "unheard": _status(RUNNING, 6.0, written_s=11_100.0, supervisor=LockHolder(4000, "gpu-03")),
    "full-disk": _status(
        RUNNING, 6.0, written_s=61.0, supervisor=LockHolder(4000, "gpu-03"), full_disk="/home/me/.orch/jobs/g"
    ),
}


@pytest.mark.parametrize("name", STATUS)
def test_status_matches_golden_file(name: str) -> None:
    golden.check(f"status-{name}.txt", cells.plain_text(status_view.job(STATUS[name])))


def test_job_table_matches_golden_file() -> None:
    golden.check("jobs.txt", cells.plain_text(tables.jobs(list(STATUS.values()))))
    golden.check("jobs-100-columns.txt", cells.plain_text(tables.jobs(list(STATUS.values()), 100)))


@pytest.mark.parametrize("chars", [80, 100, 200])
def test_job_table_line_fits_terminal(chars: int) -> None:
    lines = cells.plain_text(tables.jobs(list(STATUS.values()), chars)).splitlines()
    assert max(map(len, lines)) <= chars
    assert ("SUBMITTED" in lines[0]) is (chars > 80)


def test_findings_match_golden_files() -> None:
    found = [
        {"what": "plan", "found": "4 ranks on 2 nodes, on CPUs", "fix": "", "severity": "ok"},
        {"what": "space", "found": "0.1 GB free at /home", "fix": "free some space", "severity": "error"},
        {"what": "clock", "found": "n1: its clock is 9 s behind", "fix": "use chrony", "severity": "warning"},
        {"what": "clock", "found": "n2: its clock is 9 s behind", "fix": "use chrony", "severity": "warning"},
        {"what": "aside", "found": "n3 is set aside", "fix": "", "severity": "note"},
    ]
    golden.check("findings.txt", cells.plain_text(tables.findings(found)))


def test_equal_faults_of_hosts_are_one_finding() -> None:
    fault = {"what": "host", "severity": "error", "fix": "lower gpus_per_node"}
    found = [
        {**fault, "found": "n0: it has 0 GPUs"},
        {**fault, "found": "n1: it has 2 GPUs", "severity": "ok", "fix": ""},
        {**fault, "found": "n2: it has 0 GPUs"},
    ]
    lines = cells.plain_text(tables.findings(found)).splitlines()
    assert lines == [
        "fault host     n0, n2: it has 0 GPUs",
        "               fix: lower gpus_per_node",
        "ok    host     n1: it has 2 GPUs",
    ]


def test_remote_text_cannot_control_terminal() -> None:
    evil = "\x1b]0;owned\x07\x1b[2J\x9b31m\rX\n"
    one = replace(STATUS["running"], reason=evil)
    text = cells.plain_text(status_view.job(one)) + cells.plain_text(tables.jobs([one]))
    assert not any(char in text for char in "\x1b\x07\x9b\r")
    told = jobs.told(WHY["restarted"])
    told["attempts"][0]["verdict"]["head"] = told["attempts"][0]["verdict"]["proof"][0]["text"] = evil
    assert not any(char in cells.plain_text(post_mortem.post_mortem(told)) for char in "\x1b\x07\x9b\r")


def test_suspicion_of_running_job_is_part_of_why() -> None:
    told = jobs.told(RUNNING) | {"suspicion": "no step for 12 s (usual: 0.3 s): rank 2 is blocked at train.py:88 load"}
    text = cells.plain_text(post_mortem.post_mortem(told))
    assert "suspicion   no step for 12 s" in text and f"orch stacks {told['id']}" in text


def test_running_jobs_post_mortem_agrees_with_status() -> None:
    told, seen = jobs.told(RUNNING[:-1]), Suspicion("rank 2 stands", [2], "node-1", 3.0, NextAction.ENDS, 2.0)
    now = _status(RUNNING, 6.0, step=33, suspicion=seen.what, suspected=seen)
    add_live_status(told, now)
    text = cells.plain_text(post_mortem.post_mortem(told, "gpt"))
    assert "running, steps 1 to 33" in text and "at step 20 (step-20.pt) and repeat 13 steps" in text
    assert (
        "suspicion   rank 2 stands\n            the attempt ends at 11:06:48 UTC" in text
        and "orch restart gpt\n" in text
    )
    add_live_status(told, _status(RUNNING, 6.0, written_s=61.0, full_disk="/jobs/g"))
    lines = cells.plain_text(post_mortem.post_mortem(told, "gpt")).splitlines()
    assert lines[1] == "the disk of /jobs/g is full: the job continues once there is space"
