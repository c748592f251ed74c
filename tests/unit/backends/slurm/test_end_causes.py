"""Causes of an allocation's end, from the output of Slurm's daemons and of scontrol in the words of 22.05."""

from __future__ import annotations

import pytest

from orchestrator.backends.api import AllocationEnd
from orchestrator.backends.slurm import end_causes
from orchestrator.core.slurm import command_output
from orchestrator.core.slurm.command_output import QueueJob
from orchestrator.core.slurm.job_states import Stage
from orchestrator.core.slurm.queue import is_over
from orchestrator.core.status_types import AllocationEndCause
from tests.support.slurm_states import STATES

WORD = "slurmstepd-node1: error: *** JOB 8 ON node1 CANCELLED AT 2026-11-21T06:22:58{} ***"
JOB = (
    "JobId=8 JobName=a JobState=RUNNING x UserId=t(1) JobState={state} Reason=None Restarts={restarts} RunTime=00:01:30"
    " TimeLimit=1-00:02:00 EndTime=2026-12-01T00:00:10{preempted} ExcNodeList=(null) NodeList=node[1-2]"
)


def job(state: str = "RUNNING", restarts: int = 0, preempted: str = "") -> end_causes.SlurmJobInfo:
    text = JOB.replace("JobState=RUNNING x ", "").format(state=state, restarts=restarts, preempted=preempted)
    shown = end_causes.parse_job(command_output.parse_fields(text))
    assert shown is not None
    return shown


@pytest.mark.parametrize(
    ("end", "cause"),
    [
        ("", AllocationEndCause.CANCELLED),
        (" DUE TO TIME LIMIT", AllocationEndCause.TIME_LIMIT),
        (" DUE TO PREEMPTION", AllocationEndCause.PREEMPTED),
        (" DUE TO JOB REQUEUE", AllocationEndCause.REQUEUED),
        (" DUE TO NODE FAILURE, SEE SLURMCTLD LOG FOR DETAILS", AllocationEndCause.NODE_LOST),
        (" DUE to SIGNAL Terminated", AllocationEndCause.CANCELLED),
    ],
)
def test_daemon_message_gives_the_cause(end: str, cause: AllocationEndCause) -> None:
    ending = end_causes.find_printed_end("8", ["something else", WORD.format(end)], 30.0)
    assert ending is not None and (ending.cause, ending.left_s) == (cause, 30.0)


def test_message_of_other_job_or_step_is_ignored() -> None:
    """A message about another job or one step says nothing of this one."""
    step = "slurmstepd: error: *** STEP 8.0 ON node1 CANCELLED AT 2026-11-21T06:22:58 ***"
    assert end_causes.find_printed_end("8", [WORD.replace("JOB 8", "JOB 88").format(""), step], 30.0) is None


def test_step_ending_for_job_reason_names_it() -> None:
    step = "0: slurmstepd: error: *** STEP 8.0 ON n CANCELLED AT 2026-11-21T06:22:58 DUE TO PREEMPTION ***"
    ending = end_causes.find_printed_end("8", [WORD.format(""), step], 5.0)
    assert ending is not None and ending.cause is AllocationEndCause.PREEMPTED


def test_running_job_is_not_ending() -> None:
    assert job().is_running and end_causes.find_job_end(job(), 0, 30.0) is None
    assert end_causes.explain_term(job(), 30.0) is None


def test_preemption_grace_is_known_with_length() -> None:
    preempted = job(preempted=" PreemptTime=2026-11-30T23:59:30")
    ending = end_causes.find_job_end(preempted, 0, 30.0)
    assert ending is not None and (ending.cause, ending.left_s) == (AllocationEndCause.PREEMPTED, 40.0)
    assert not preempted.is_running


def test_requeued_job_is_recognised_by_restart_count() -> None:
    ending = end_causes.find_job_end(job("COMPLETING", restarts=2), 1, 30.0)
    assert ending is not None and ending.cause is AllocationEndCause.REQUEUED
    assert end_causes.find_job_end(job("COMPLETING", restarts=1), 1, 30.0) is None


@pytest.mark.parametrize("state", STATES)
def test_slurm_states_agree_in_queue_and_allocation(state: str) -> None:
    """Every state of Slurm means the same in the queue and in the allocation."""
    stage, cause = STATES[state]
    there, inside = QueueJob("8", state), job(state)
    assert (there.stage, inside.stage, inside.is_running) == (stage, stage, stage is Stage.RUNNING)
    assert there.cause is cause if stage is Stage.OVER else not is_over(there)
    ending, unsaid = end_causes.find_job_end(inside, 0, 30.0), end_causes.explain_term(inside, 30.0)
    match stage:
        case Stage.OVER:
            assert ending is not None and ending.cause is cause
        case Stage.WAITING:
            assert ending is not None and ending.cause is AllocationEndCause.REQUEUED
        case Stage.RUNNING:
            assert (ending, unsaid) == (None, None)
        case Stage.LEAVING:
            assert ending is None and unsaid is not None and unsaid.cause is AllocationEndCause.CANCELLED
        case _:  # as when Slurm is silent
            assert (ending, unsaid) == (None, end_causes.explain_term(None, 30.0))


def test_unknown_slurm_state_says_nothing() -> None:
    new = job("TELEPORTING")
    assert (new.stage, end_causes.find_job_end(new, 0, 30.0)) == (Stage.UNKNOWN, None)
    assert end_causes.explain_term(new, 30.0) == end_causes.explain_term(None, 30.0)


NEVER = float("inf")


def test_time_limit_signal_gives_time_left() -> None:
    """The signal before the time limit says how much time is left."""
    ending = end_causes.find_limit_end(job(), NEVER)
    assert ending is not None and ending.left_s == 86_400 + 120 - 90
    assert end_causes.find_limit_end(None, 90.0) == AllocationEnd(
        AllocationEndCause.TIME_LIMIT, "Slurm has sent the signal that announces it", None
    )


def test_signal_long_before_time_limit_is_from_others() -> None:
    """A signal long before the time limit was sent by somebody else."""
    left_s = 86_400 + 120 - 90
    assert end_causes.find_limit_end(job(), left_s) is not None
    assert end_causes.find_limit_end(job(), left_s - 1.0) is None
    endless = end_causes.parse_job({"JobState": "RUNNING", "TimeLimit": "UNLIMITED", "RunTime": "00:01:30"})
    assert end_causes.find_limit_end(endless, NEVER) is None


def test_due_time_of_signal_comes_from_sbatch_options() -> None:
    options = ("--nodes=2", "--signal=B:USR1@90", "--requeue")
    assert end_causes.read_notice_s(options) == 90.0 + end_causes.EARLY_S_MAX
    assert end_causes.read_notice_s(("--nodes=2",)) == NEVER


def test_unexplained_end_is_cancel_unless_slurm_is_silent() -> None:
    """An unexplained end is a cancel; where Slurm does not answer, the job continues."""
    silent, ends = end_causes.explain_term(None, 30.0), end_causes.explain_term(job("COMPLETING"), 30.0)
    assert silent is not None and silent.cause is AllocationEndCause.REQUEUED
    assert ends is not None and ends.cause is AllocationEndCause.CANCELLED


def test_invalid_answer_gives_nothing() -> None:
    """Nothing is read from an answer that is not one."""
    assert end_causes.parse_job(command_output.parse_fields("slurm_load_jobs error: Invalid job id specified")) is None
