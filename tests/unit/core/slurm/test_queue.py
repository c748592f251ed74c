"""Is Slurm understood, asked once for all jobs, and never taken for saying what it does not say?"""

from __future__ import annotations

from pathlib import Path

import pytest

from orchestrator.core.errors import Fault
from orchestrator.core.slurm import command, command_output, queue
from orchestrator.core.slurm.command_output import QueueJob
from orchestrator.core.slurm.job_states import Stage
from orchestrator.core.slurm.queue import SlurmQueue
from tests.support.fake_slurm import FakeSlurm
from tests.support.slurm_states import STATES

PENDING = "2|PENDING|2026-11-21T06:26:01|2||Priority"
HELD = "3|PENDING|N/A|1||JobHeldUser"
RUNNING = "1|RUNNING|2026-11-21T06:21:01|2|node[1-2]|None"
CANCELLED = "1|CANCELLED|2026-11-21T06:20:45|2||BeginTime"
SACCT = """1|REQUEUED|0:0|node[1-2]
2|RUNNING|0:0|node[1-2]
3|CANCELLED by 0|0:0|None assigned
1|NODE_FAIL|0:0|node[1-2]
1|TIMEOUT|0:15|node[1-2]
4|PENDING|0:0|None assigned
"""
SHOWN = (
    "JobId=2 JobName=sbatch UserId=trainer(2000) Priority=4294901758 JobState=FAILED "
    "Reason=NonZeroExitCode Dependency=(null) Requeue=1 Restarts=3 BatchFlag=1 ExitCode=7:0 StartTime=2026-11-21T06:21:03 "
    "ReqNodeList=(null) ExcNodeList=(null) NodeList=node[1-2] BatchHost=node1 SchedNodeList=node1\n"
)


class Time:
    """A clock that only a test moves."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def clock_s(self) -> float:
        """Return the time."""
        return self.now_s


@pytest.fixture
def slurm(tmp_path: Path) -> FakeSlurm:
    """Return a Slurm without accounting."""
    return FakeSlurm(tmp_path / "slurm")


@pytest.fixture
def clock() -> Time:
    """Return a clock."""
    return Time()


def _queue(slurm: FakeSlurm, clock: Time, **environ: str) -> SlurmQueue:
    return SlurmQueue(lambda: {"PATH": slurm.path, **environ}, clock.clock_s)


# Words


def test_squeue_gives_state_reason_start_and_nodes() -> None:
    found = command_output.parse_squeue("\n".join((PENDING, HELD, RUNNING, "")))
    assert found["2"] == QueueJob("2", "PENDING", "Priority", "2026-11-21T06:26:01Z", count=2)
    assert found["1"] == QueueJob("1", "RUNNING", nodes="node[1-2]", count=2)
    assert (found["3"].expected_start, found["3"].is_held) == (None, True)


def test_reason_may_contain_anything() -> None:
    said = "5|PENDING|N/A|2||ReqNodeNotAvail, UnavailableNodes:node[1-2] | call 555"
    assert command_output.parse_squeue(said)["5"].reason == "ReqNodeNotAvail, UnavailableNodes:node[1-2] | call 555"


@pytest.mark.parametrize(
    ("rest", "reason", "folder"),
    [
        ("Priority|/home/ada/.orch/jobs/gpt-1", "Priority", "/home/ada/.orch/jobs/gpt-1"),
        ("call 5|5, or | 6|/nfs/a|/b c", "call 5|5, or | 6", "/nfs/a|/b c"),
        ("None|/", "", "/"),
        ("None|(null)", "", ""),
        ("None|", "", ""),
        ("None", "", ""),
    ],
)
def test_folder_follows_the_reason(rest: str, reason: str, folder: str) -> None:
    found = command_output.parse_squeue(f"5|PENDING|N/A|2||{rest}")["5"]
    assert (found.reason, found.folder) == (reason, folder)


def test_scontrol_gives_folder() -> None:
    shown = "JobId=7 JobState=RUNNING Command=/a b/slurm.sh WorkDir=/a b/gpt-1 StdErr=/a b/gpt-1/logs/slurm.log Power="
    for text in (shown, shown.partition(" StdErr")[0], shown.replace(" StdErr", "\n   StdErr")):
        found = command_output.parse_scontrol_job(text)
        assert found is not None and found.folder == "/a b/gpt-1"


@pytest.mark.parametrize("text", ["", "\n", "squeue: warning: odd\n", "|||||", "7|PENDING", "\x00|\xff"])
def test_invalid_line_is_no_job(text: str) -> None:
    assert all(not job_id for job_id in command_output.parse_squeue(text))
    assert command_output.parse_sacct(text, str) == {}
    assert command_output.parse_scontrol_job(text) is None


def test_accounting_gives_last_requeue_and_only_ended_jobs() -> None:
    """Accounting gives the last run of a requeued job, and nothing of one that is not over."""
    found = command_output.parse_sacct(SACCT, lambda uid: f"user{uid}")
    assert found == {
        "1": QueueJob("1", "TIMEOUT", nodes="node[1-2]", exit="0:15"),
        "3": QueueJob("3", "CANCELLED", by="user0", exit="0:0"),
    }


def test_scontrol_gives_exit_restarts_and_batch_node() -> None:
    """scontrol gives the exit code, restarts and the node of the batch script."""
    found = command_output.parse_scontrol_job(SHOWN)
    assert found == QueueJob(
        "2", "FAILED", "NonZeroExitCode", nodes="node[1-2]", exit="7:0", restarts=3, batch_host="node1"
    )


@pytest.mark.parametrize("state", [*STATES, "FORGOTTEN", "UNKNOWN", "TELEPORTING"])
def test_every_state_has_a_description(state: str) -> None:
    assert "7" in command_output.describe_job(QueueJob("7", state), "t-1").what


def test_unknown_state_is_not_the_end_of_job() -> None:
    """No job is over because of a state that is unknown."""
    assert QueueJob("7", "TELEPORTING").stage is Stage.UNKNOWN
    assert not queue.is_over(QueueJob("7", "TELEPORTING"))


def test_held_job_is_shown_with_release_command() -> None:
    for job in (QueueJob("7", "PENDING", "JobHeldUser"), QueueJob("7", "REQUEUE_HOLD")):
        assert command_output.describe_job(job, "t-1").fix == "scontrol release 7"
    assert command_output.describe_job(QueueJob("7", "PENDING"), "t-1") == Fault("", "Slurm job 7 waits in the queue")


def test_suspended_job_is_shown_with_resume_command() -> None:
    """A suspended job is shown with what lets it continue."""
    said = command_output.describe_job(QueueJob("7", "SUSPENDED", nodes="node1"), "t-1")
    assert said == Fault("", "Slurm has suspended its job 7 on node1", "scontrol resume 7")


@pytest.mark.parametrize(
    ("reason", "change"),
    [
        ("PartitionNodeLimit", "nodes=…"),
        ("PartitionTimeLimit", "time_limit=…"),
        ("DependencyNeverSatisfied", "slurm.extra=[]"),
        ("InvalidAccount", "slurm.account=…"),
        ("QOSNotAllowed", "slurm.qos=…"),
        *((word, "KEY=VALUE; sinfo -o ") for word in ("PartitionConfig", "BadConstraints", "MaxMemPerLimit")),
        *((word, "KEY=VALUE; sacctmgr") for word in ("QOSMaxNodePerJobLimit", "AssocMaxWallDurationPerJobLimit")),
    ],
)  # fmt: skip
def test_unstartable_job_is_shown_with_what_to_change(reason: str, change: str) -> None:
    """A job that can never start as it is, is shown with what to change."""
    said = command_output.describe_job(QueueJob("7", "PENDING", reason), "t-1")
    fix = f"orch cancel t-1, then orch resume t-1 --set {change}"
    assert said.what == f"Slurm job 7 cannot start as it is: {reason}"
    assert said.fix.startswith(fix)


@pytest.mark.parametrize("reason", ["QOSMaxJobsPerUserLimit", "AssocGrpGRES", "ReqNodeNotAvail, Unavail", "New99"])
def test_job_whose_turn_may_come_waits(reason: str) -> None:
    said = command_output.describe_job(QueueJob("7", "PENDING", reason), "t-1")
    assert said == Fault("", f"Slurm job 7 waits in the queue: {reason}")


def test_administrator_hold_is_not_users_to_release() -> None:
    said = command_output.describe_job(QueueJob("7", "PENDING", "JobHeldAdmin"), "t-1")
    assert "by an administrator" in said.what and "scontrol release" not in said.fix


def test_job_folder_unseen_by_nodes_gets_a_fix() -> None:
    """A job whose folder no node sees is reported with what to do."""
    for code, how in (("0:53", "open the log in"), ("66:0", "read")):
        said = command_output.describe_end(QueueJob("7", "FAILED", exit=code))
        assert said.what.endswith(f"could not {how} the job's folder") and "ORCH_HOME" in said.fix
    assert said.fix.startswith("submit it again with ORCH_HOME")


def test_unexecutable_batch_script_is_described() -> None:
    said = command_output.describe_end(QueueJob("7", "FAILED", exit="11:0", batch_host="node1")).what
    assert said.startswith(
        "Slurm job 7 has ended with exit code 11: no program could be started on its first node (node1): "
    )
    assert said.endswith("Resource temporarily unavailable, see ulimit -u there")
    for code, how in (("1:0", "exit code 1"), ("0:11", "signal 11")):
        for host, where in (("", ""), ("node1", " on node1")):
            ended = command_output.describe_end(QueueJob("7", "FAILED", exit=code, batch_host=host)).what
            assert ended == f"Slurm job 7 has ended with {how}{where}: FAILED"


# Looks


@pytest.mark.slow
def test_one_squeue_serves_all_jobs(slurm: FakeSlurm, clock: Time) -> None:
    """One squeue call serves any number of jobs."""
    slurm.queue(PENDING, HELD, RUNNING)
    found = _queue(slurm, clock).query(["1", "2", "3"])
    assert [found[one].state for one in "123"] == ["RUNNING", "PENDING", "PENDING"]
    assert slurm.calls("squeue") == [f"squeue -h --states=all -o {command_output.SQUEUE_FORMAT} -j 1,2,3"]


@pytest.mark.slow
def test_answer_is_cached_for_unfinished_jobs(slurm: FakeSlurm, clock: Time) -> None:
    """An answer serves for two seconds, and the next query is for all jobs that are not over."""
    slurm.queue(PENDING, RUNNING.replace("1|", "4|", 1), CANCELLED)
    there = _queue(slurm, clock)
    there.query(["1", "2", "4"])
    clock.now_s += queue.AGE_S_MAX
    assert there.query(["2"])["2"].state == "PENDING"
    assert len(slurm.calls("squeue")) == 1
    clock.now_s += 0.1
    there.query(["2"])
    assert there.query(["4"])["4"].state == "RUNNING"
    there.invalidate()
    there.query(["4"])
    assert [call.rpartition(" ")[2] for call in slurm.calls("squeue")] == ["1,2,4", "2,4", "4,2"]


@pytest.mark.slow
@pytest.mark.parametrize("accounts", [True, False])
def test_unlisted_job_is_lost_only_if_scontrol_agrees(tmp_path: Path, clock: Time, accounts: bool) -> None:
    """A job that squeue does not list is lost only when scontrol agrees."""
    slurm = FakeSlurm(tmp_path / "slurm", accounts=accounts)
    slurm.says("sacct.out", SACCT if accounts else "")
    slurm.queue(PENDING)
    there = _queue(slurm, clock)
    missed = there.query(["3", "2"])["3"]
    assert (missed.stage, missed.unanswered) == (Stage.NOT_FOUND, "")
    found = there.confirm(missed)
    assert (found.state, found.by) == (("CANCELLED", "root") if accounts else ("FORGOTTEN", ""))
    slurm.says("scontrol.job", SHOWN.replace("=2 ", "=3 ").replace("=FAILED", "=PENDING"))
    assert there.confirm(missed).stage is Stage.WAITING
    slurm.down()
    assert "Unable to contact slurm controller" in there.confirm(missed).unanswered


@pytest.mark.slow
def test_unresponsive_slurm_changes_nothing(slurm: FakeSlurm, clock: Time) -> None:
    slurm.queue(RUNNING)
    there = _queue(slurm, clock)
    there.query(["1"])
    slurm.down()
    clock.now_s += 5.0
    told = there.query(["1", "9"])
    assert (told["1"].state, told["1"].age_s) == ("RUNNING", 5.0)
    assert told["1"].unanswered.endswith("Unable to contact slurm controller (connect failure)")
    assert told["9"].stage is Stage.NO_ANSWER
    slurm.queue(RUNNING)
    clock.now_s += 5.0
    assert there.query(["1"])["1"].unanswered == ""


@pytest.mark.slow
def test_machine_without_slurm_says_so(tmp_path: Path, clock: Time) -> None:
    told = SlurmQueue(lambda: {"PATH": str(tmp_path)}, clock.clock_s).query(["1"])["1"]
    assert (told.state, told.unanswered) == ("UNKNOWN", "there is no squeue on this machine")


@pytest.mark.slow
def test_hanging_command_times_out(slurm: FakeSlurm) -> None:
    """A command that hangs is given up."""
    (slurm.folder / "squeue").write_text("#!/bin/sh\nexec tail -f /dev/null\n")
    said = command.run_command(["squeue"], {"PATH": slurm.path}, 0.2)
    assert said.silent == "squeue gave no answer within 0.2 s"


@pytest.mark.slow
def test_user_formats_do_not_affect_slurm_commands(slurm: FakeSlurm, clock: Time) -> None:
    """The user's formats and an outer job do not reach Slurm's commands."""
    slurm.queue(RUNNING)
    outer = {
        "SLURM_TIME_FORMAT": "relative",
        "SQUEUE_STATES": "PD",
        "SLURM_JOB_ID": "5",
        "SLURM_CLUSTERS": "b",
    }
    _queue(slurm, clock, SLURM_CONF="/etc/s.conf", TZ="Asia/Tokyo", **outer).query(["1"])
    environ = slurm.environ("squeue")
    assert {"SLURM_CONF=/etc/s.conf", "TZ=UTC"} <= set(environ)
    assert not [one for one in environ if one.startswith(tuple(outer))]


@pytest.mark.slow
def test_end_of_job_has_exit_and_actor(tmp_path: Path, clock: Time) -> None:
    """The end of a job is reported with its exit code and who ended it."""
    slurm = FakeSlurm(tmp_path / "slurm", accounts=True)
    slurm.says("sacct.out", SACCT)
    there = _queue(slurm, clock)
    assert there.confirm(QueueJob("3", "CANCELLED")) == QueueJob("3", "CANCELLED", by="root", exit="0:0")
    slurm.says("scontrol.job", SHOWN)
    found = there.confirm(QueueJob("2", "FAILED"))
    assert (found.state, found.exit, found.restarts) == ("FAILED", "7:0", 3)
