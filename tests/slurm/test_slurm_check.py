"""Does `orch check` look at the nodes of its allocation, or wait for one as a job would? On a real Slurm."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.support.cluster.desk import Desk
from tests.support.cluster.host import wait_for
from tests.support.cluster.slurm import SlurmBox
from tests.support.cluster.small_torch import install

HOME = "/home/trainer/desk/home"
SCRIPT = {"train.py": "import json\n"}
END_S_MAX = 60.0


def argv(path: str) -> list[str]:
    """Return the command that checks a job."""
    return [sys.executable, "-m", "orchestrator.cli", "check", path, "--json"]


def check(slurm: SlurmBox, path: str, *salloc: str) -> list[dict[str, Any]]:
    """Check a job on login, in an allocation where one is named, and return the findings."""
    done = slurm.login.run([*salloc, *argv(path)], user="trainer", env={"ORCH_HOME": HOME}, check=False, limit_s=120)
    assert done.stdout, done.stderr
    return listed(done.stdout)


def listed(text: str) -> list[dict[str, Any]]:
    """Return the findings that a check has printed."""
    found: list[dict[str, Any]] = json.loads(text)
    for one in found:
        print(one["severity"], one["what"], one["nodes"], one["found"], "|", one["fix"])
    return found


@contextmanager
def waiting(slurm: SlurmBox, path: str, folder: Path) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """Begin a check while all nodes are taken; give it and the job that has them once it says that it waits."""
    blocker = slurm.queue.sbatch("exec sleep 600", "--nodes=4", "--exclusive", "--time=30")
    slurm.queue.wait_for_state(blocker, "RUNNING")
    out, err = folder / "out", folder / "err"
    with out.open("wb") as stdout, err.open("wb") as stderr:
        begun = slurm.login.popen(  # a shell in the background ignores SIGINT
            ["env", "--default-signal=INT", *argv(path)], user="trainer", env={"ORCH_HOME": HOME}, stdin=subprocess.DEVNULL, stdout=stdout, stderr=stderr
        )  # fmt: skip
    wait_for(
        lambda: "number 1 of 1 in partition main, expected to start at 2" in err.read_text(),
        "where it stands",
    )
    print(err.read_text())
    try:
        yield begun, blocker
    finally:
        slurm.queue.scancel(blocker)
        slurm.queue.wait_for_state(blocker, "CANCELLED")


def ctrl_c(slurm: SlurmBox, begun: subprocess.Popen[bytes]) -> int:
    """Signal what a Ctrl-C would, and return the exit code. A terminal signals all at once; here the check comes first."""
    running = slurm.login.processes()
    for word in ("orchestrator.cli check", "salloc"):
        slurm.login.signal([one.proc for one in running if word in one.command], signal.SIGINT)
    return begun.wait(END_S_MAX)


def test_check_outside_allocation_inspects_granted_nodes_without_leftovers(slurm: SlurmBox, desk: Desk) -> None:
    """A check outside of an allocation inspects the nodes that it is granted and leaves nothing."""
    path = desk.write(SCRIPT, nodes=2, env=install([slurm.login]), time_limit="2h")
    found = check(slurm, path)
    assert [one["nodes"] for one in found if one["what"] == "host"] == [["node1"], ["node2"]]
    texts = [one["found"] for one in found]
    assert "2 of 2 hosts can be used, 2 needed" in texts and not slurm.queue.entries()
    assert any(text.startswith("all-reduce over 2 nodes with gloo works") for text in texts), texts
    assert json.loads(desk.orch("status", "--all", "--json").stdout) == []
    assert not [*desk.box.login.path(HOME).glob("jobs/*")]


def test_waiting_check_continues_when_nodes_are_free(slurm: SlurmBox, desk: Desk, tmp_path: Path) -> None:
    path = desk.write(SCRIPT, nodes=2, env=install([slurm.login]))
    with waiting(slurm, path, tmp_path) as (begun, blocker):
        slurm.queue.scancel(blocker)
        assert begun.wait(END_S_MAX) == 0
    assert "2 of 2 hosts can be used, 2 needed" in [one["found"] for one in listed((tmp_path / "out").read_text())]


def test_ctrl_c_removes_waiting_check_and_shows_results(slurm: SlurmBox, desk: Desk, tmp_path: Path) -> None:
    """Ctrl-C takes a waiting check out of the queue and shows the results so far."""
    path = desk.write(SCRIPT, nodes=2)
    with waiting(slurm, path, tmp_path) as (begun, blocker):
        assert ctrl_c(slurm, begun) == 130
        assert [entry.id for entry in slurm.queue.entries()] == [blocker]
    *before, last = listed((tmp_path / "out").read_text())
    assert (last["what"], last["severity"]) == ("nodes", "note") and "interrupted" in last["found"]
    assert [one["what"] for one in before][-1] == "queue"


def test_allocation_is_checked_together_and_cut_named(slurm: SlurmBox, desk: Desk) -> None:
    """The nodes of an allocation are checked together, and a cut between two is named."""
    path = desk.write(SCRIPT, nodes=2, env=install([slurm.login]))
    found = check(slurm, path, "salloc", "--nodes=3", "--nodelist=node1,node2,node3")
    assert [one["nodes"] for one in found if one["what"] == "host"] == [["node1"], ["node2"], ["node3"]]
    texts = [one["found"] for one in found]
    assert "3 of 3 hosts can be used, 2 needed" in texts
    assert any(text.startswith("3 pairs of nodes reach each other") for text in texts), texts
    assert any(text.startswith("all-reduce over 3 nodes with gloo works") for text in texts), texts
    assert not [one for one in found if one["severity"] in ("error", "warning")]
    slurm.cut_between("node1", "node3")
    cut = check(slurm, path, "salloc", "--nodes=3", "--nodelist=node1,node2,node3")
    slurm.heal()
    (wrong,) = [one for one in cut if one["severity"] == "error" and one["what"] == "network"]
    assert wrong["nodes"] == ["node1", "node3"]


@pytest.mark.slow
def test_burn_in_has_figures_of_the_nodes_that_slurm_grants(slurm: SlurmBox, desk: Desk) -> None:
    """A burn-in runs in an allocation that lasts long enough, with real torch."""
    path = desk.write({"train.py": "import torch\n"}, nodes=2, time_limit="2h")
    done = slurm.login.run(
        [*argv(path), "--burn-in", "10s"], user="trainer", env={"ORCH_HOME": HOME}, check=False, limit_s=240
    )
    print(done.stderr)
    found = [one for one in listed(done.stdout) if one["what"] == "burn-in" and one["severity"] == "ok"]
    assert [one["nodes"] for one in found if "bfloat16" in one["figures"]] == [["node1"], ["node2"]]
    assert [one["nodes"] for one in found if "all-reduce" in one["figures"]] == [["node1", "node2"]]
    assert done.returncode == 0 and not slurm.queue.entries()
