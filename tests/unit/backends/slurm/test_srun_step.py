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
        self.step = SrunStep(
            "1.0-001", ("a1", "a2", "a3"), self.log, 0.0, lambda: self.code, self.signals.append
        )

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


def test_an_agent_is_up_when_it_says_so_and_lines_may_come_in_pieces(srun: Srun) -> None:
    srun.prints("srun: cluster configuration lacks support for cpu binding\n1: orch agent on a2\n0: orch ag")
    assert srun.fates() == [TaskState.COMING, TaskState.UP, TaskState.COMING]
    srun.prints("ent on a1\n")
    assert srun.fates() == [TaskState.UP, TaskState.UP, TaskState.COMING]


def test_a_task_that_ends_is_certain_and_the_others_go_on(srun: Srun) -> None:
    srun.prints("0: orch agent on a1\n1: orch agent on a2\n2: orch agent on a3\n")
    srun.prints("srun: error: a[2-3]: tasks 1-2: Killed\n")
    assert srun.fates() == [TaskState.UP, TaskState.ENDED, TaskState.ENDED]
    assert srun.step.reason("a2") == "Killed"


def test_a_node_that_cannot_start_its_agent_says_why_itself(srun: Srun) -> None:
    step = srun.prints("1: a2: there is no Python\nsrun: error: a2: task 1: Exited with exit code 127\n")
    assert srun.fates() == [TaskState.COMING, TaskState.FAILED, TaskState.COMING]
    assert step.reason(
        "a2"
    ) == "a2: there is no Python (Exited with exit code 127)" and step.faulty_nodes == ["a2"]


def test_a_task_that_could_not_be_executed_is_told_in_words(srun: Srun) -> None:
    step = srun.prints("srun: error: a2: task 1: Exited with exit code 11\n")
    assert step.reason("a2").startswith("no program could be started there: Resource temporarily unavailable")
    srun.prints("srun: error: a3: task 2: Exited with exit code 1\n")
    assert step.reason("a3") == "Exited with exit code 1"


def test_a_node_that_slurm_gives_up_is_lost_and_not_known_to_be_silent(srun: Srun) -> None:
    srun.prints("1: orch agent on a2\nsrun: error: Node failure on a2\n")
    srun.code = 0
    srun.prints("")
    assert srun.step.tasks["a2"].state is TaskState.LOST


def test_the_node_that_a_launch_failed_on_is_accused_and_those_it_took_along_are_not(srun: Srun) -> None:
    srun.prints("2: orch agent on a3\n")
    srun.prints(
        "srun: error: Task launch for StepId=1.4 failed on node a2: Communication connection failure\n"
    )
    srun.prints(
        "srun: error: Application launch failed: Communication connection failure\nsrun: Job step aborted: Waiting\n"
    )
    srun.prints("srun: error: a1: task 0: Killed\nsrun: error: a3: task 2: Killed\n")
    srun.code = 1
    step = srun.prints("")
    assert srun.fates() == [TaskState.FAILED, TaskState.FAILED, TaskState.ENDED] and step.faulty_nodes == [
        "a2"
    ]


def test_a_step_that_is_not_made_accuses_nobody(srun: Srun) -> None:
    srun.code = 1
    step = srun.prints(
        "srun: error: Unable to create step for job 1: Requested node configuration is not available"
    )
    assert set(srun.fates()) == {TaskState.FAILED} and step.faulty_nodes == []
    assert step.reason("a1").endswith("configuration is not available")


def test_an_srun_that_is_killed_proves_nothing_of_its_agents(srun: Srun) -> None:
    srun.prints("0: orch agent on a1\n")
    srun.code = -9
    srun.prints("")
    assert srun.step.tasks["a1"].state is TaskState.LOST


def test_an_srun_that_ends_by_itself_has_no_agents_left(srun: Srun) -> None:
    srun.prints("0: orch agent on a1\n1: orch agent on a2\n2: orch agent on a3\n")
    srun.code = 0
    srun.prints("")
    assert set(srun.fates()) == {TaskState.ENDED}


def test_what_an_agent_of_another_name_says_is_heard_as_nothing(srun: Srun) -> None:
    srun.prints("7: orch agent on a1\n0: orch agent on b9\n\xff\xfe\nsrun: error: [[: task 0: Killed\n")
    assert srun.fates() == [TaskState.COMING] * 3
