"""What is said of hosts when an attempt starts on them: errors first, equal faults once, each with its fix."""

from __future__ import annotations

import dataclasses

from orchestrator.brain.checks import launch
from tests.support.brain_story import Story

from .facts import HEALTHY, host, program


def test_healthy_hosts_are_not_spoken_of() -> None:
    assert launch.texts({"n1": HEALTHY, "n2": HEALTHY}, {"n1": 2, "n2": 2}) == ()
    assert launch.texts({}, {}) == ()


def test_errors_come_first_and_the_same_fault_of_several_nodes_once() -> None:
    small = host(shm_bytes=64 << 20)
    facts = {"n1": small, "n2": small, "n3": program(torch="2.6.0")}
    assert launch.texts(facts, dict.fromkeys(facts, 2)) == (
        "n3: torch 2.6.0, the other 2 2.13.0; fix: install the same version on all of them",
        "n1 and n2: /dev/shm has 64 MiB: workers of a DataLoader hand batches over there; fix: enlarge it (in a container: --shm-size=8g), or use num_workers=0",
    )


def test_of_many_findings_the_gravest_are_said_and_the_rest_counted() -> None:
    facts = {f"n{number}": host(open_files_max=number) for number in range(8)}
    said = launch.texts(facts, dict.fromkeys(facts, 1))
    assert len(said) == launch.TEXTS_MAX + 1
    assert said[-1] == "and 3 more; fix: see them all with orch check"


def test_what_agents_have_gathered_is_judged_when_the_ranks_are_told_to_start_and_stays_for_later_attempts() -> (
    None
):
    story, full = Story(), host(open_files_max=10)
    story.hear(story.up(0), story.up(1))
    story.hear(dataclasses.replace(story.prepared(0), host=full))
    facts = story.brain.facts
    assert not facts.host_findings
    story.hear(dataclasses.replace(story.prepared(1), host=HEALTHY))
    said = " ".join(facts.host_findings)
    assert said.startswith("n0: a process may open only 10 files")
    story.hear(story.exited(0))
    story.stop_all(1)
    story.wait(20.0)
    story.run(2)
    assert list(facts.host_findings) == [said], "an agent gathers once"
