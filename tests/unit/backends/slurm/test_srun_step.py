"""Fates of agents, from the output of srun 22.05."""

from __future__ import annotations

from pathlib import Path

import pytest

from orchestrator.backends.slurm.srun_step import SrunStep, TaskState


class Srun:
    """An srun of three nodes that prints what a test lets it."""

    def __init__(self, folder: Path) -> None:
        self.log = folder / "step.log"
        self.code: int | None = None
        self.signals: list[int] = []
        self.step = SrunStep("1.0-001", ("a1", "a2", "a3"), self.log, 0.0, lambda: self.code, self.signals.append)

    def prints(self, text: str) -> SrunStep:
        with self.log.open("a") as file:
            file.write(text)
        self.step.poll()
        return self.step

    def fates(self) -> list[TaskState]:
        return [seen.state for seen in self.step.tasks.values()]


@pytest.fixture
def srun(tmp_path: Path) -> Srun:
    return Srun(tmp_path)


def test_agent_is_up_from_its_partial_lines(srun: Srun) -> None:
    """An agent is up when it says so, and its lines may arrive in parts."""
    srun.prints("srun: cluster configuration lacks support for cpu binding\n1: orch agent on a2\n0: orch ag")
    assert srun.fates() == [TaskState.COMING, TaskState.UP, TaskState.COMING]
    srun.prints("ent on a1\n")
    assert srun.fates() == [TaskState.UP, TaskState.UP, TaskState.COMING]


def test_ended_task_is_certain_and_others_continue(srun: Srun) -> None:
    srun.prints("0: orch agent on a1\n1: orch agent on a2\n2: orch agent on a3\n")
    srun.prints("srun: error: a[2-3]: tasks 1-2: Killed\n")
    assert srun.fates() == [TaskState.UP, TaskState.ENDED, TaskState.ENDED]
    assert srun.step.reason("a2") == "Killed"


def test_node_that_cannot_start_agent_gives_reason(srun: Srun) -> None:
    step = srun.prints("1: a2: there is no Python\nsrun: error: a2: task 1: Exited with exit code 127\n")
    assert srun.fates() == [TaskState.COMING, TaskState.FAILED, TaskState.COMING]
    assert step.reason("a2") == "a2: there is no Python (Exited with exit code 127)" and step.faulty_nodes == ["a2"]


def test_unexecutable_task_is_described(srun: Srun) -> None:
    """A task that could not be executed is described."""
    step = srun.prints("srun: error: a2: task 1: Exited with exit code 11\n")
    assert step.reason("a2").startswith("no program could be started there: Resource temporarily unavailable")
    srun.prints("srun: error: a3: task 2: Exited with exit code 1\n")
    assert step.reason("a3") == "Exited with exit code 1"


def test_node_given_up_by_slurm_is_lost(srun: Srun) -> None:
    """A node that Slurm gives up is lost and not known to have no processes."""
    srun.prints("1: orch agent on a2\nsrun: error: Node failure on a2\n")
    srun.code = 0
    srun.prints("")
    assert srun.step.tasks["a2"].state is TaskState.LOST


def test_only_node_causing_launch_failure_is_accused(srun: Srun) -> None:
    """The node that a launch failed on is accused, and those that it took along are not."""
    srun.prints("2: orch agent on a3\n")
    srun.prints("srun: error: Task launch for StepId=1.4 failed on node a2: Communication connection failure\n")
    srun.prints(
        "srun: error: Application launch failed: Communication connection failure\nsrun: Job step aborted: Waiting\n"
    )
    srun.prints("srun: error: a1: task 0: Killed\nsrun: error: a3: task 2: Killed\n")
    srun.code = 1
    step = srun.prints("")
    assert srun.fates() == [TaskState.FAILED, TaskState.FAILED, TaskState.ENDED] and step.faulty_nodes == ["a2"]


def test_step_not_created_accuses_no_node(srun: Srun) -> None:
    srun.code = 1
    step = srun.prints("srun: error: Unable to create step for job 1: Requested node configuration is not available")
    assert set(srun.fates()) == {TaskState.FAILED} and step.faulty_nodes == []
    assert step.reason("a1").endswith("configuration is not available")


def test_killed_srun_proves_nothing_about_agents(srun: Srun) -> None:
    srun.prints("0: orch agent on a1\n")
    srun.code = -9
    srun.prints("")
    assert srun.step.tasks["a1"].state is TaskState.LOST


def test_srun_ending_by_itself_has_no_agents_left(srun: Srun) -> None:
    srun.prints("0: orch agent on a1\n1: orch agent on a2\n2: orch agent on a3\n")
    srun.code = 0
    srun.prints("")
    assert set(srun.fates()) == {TaskState.ENDED}


def test_output_of_agent_of_other_name_is_ignored(srun: Srun) -> None:
    srun.prints("7: orch agent on a1\n0: orch agent on b9\n\xff\xfe\nsrun: error: [[: task 0: Killed\n")
    assert srun.fates() == [TaskState.COMING] * 3
