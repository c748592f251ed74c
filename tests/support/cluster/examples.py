"""The example jobs of `jobs/` on the hosts of a box: submitted as their files have them, and one rank killed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import yaml

from tests.support.packages import need

from .desk import Desk, Job
from .host import inner_pid
from .verbs import REPOSITORY

JOBS = REPOSITORY / "jobs"
STEPS = 120
KILLED = 2
"""The rank that is killed: the first of the second host."""

FRAMEWORKS = {"accelerate": "accelerate", "lightning": "lightning", "trainer": "transformers"}
"""The job files, without their suffix, and the package that each needs."""

LIMIT_S = 300.0


def assert_goes_on(desk: Desk, name: str) -> None:
    """Submit an example, kill a rank behind the first checkpoint, and see the job end well from a checkpoint."""
    need(FRAMEWORKS[name])
    job = desk.submit(_files(), **_fields(name))
    seen = job.until(lambda seen: seen["step"] and seen.get("checkpoint"), "a checkpoint", LIMIT_S)
    _kill(desk, seen)
    status = job.wait(LIMIT_S)
    assert (status["state"], status["restarts"]) == ("SUCCEEDED", 1), job.story()
    assert (status["world_size"], status["step"]) == (4, STEPS)
    first, second = job.why()
    assert (first["verdict"]["kind"], first["verdict"]["ranks"]) == ("crash", [KILLED]), job.story()
    assert second["resumed_from"] is not None
    assert 1 < second["first_step"] <= first["last_step"] + 1
    _assert_saved(job)


def _assert_saved(job: Job) -> None:
    """What is at home of the last checkpoint is whole, whichever hosts its files are from."""
    *_, last = yaml.safe_load(job.desk.orch("checkpoints", job.id, "--verify", "--json").stdout)
    assert (last["step"], last["complete"]) == (STEPS, True) and last["whole"] is not False


def _files() -> dict[str, str]:
    return {path.name: path.read_text() for path in JOBS.iterdir() if path.suffix in (".py", ".json")}


def _fields(name: str) -> Mapping[str, Any]:
    """Return the example's fields, but for those that the box decides."""
    fields = yaml.safe_load((JOBS / f"{name}.yaml").read_text())
    return {key: value for key, value in fields.items() if key not in ("backend", "gpus_per_node", "monitor")}


def _kill(desk: Desk, seen: Mapping[str, Any]) -> None:
    """Kill the process of rank KILLED on its host, where pids are those of the host."""
    rank = seen["ranks"][KILLED]
    host = desk.box.hosts[next(one["host"] for one in seen["nodes"] if one["name"] == rank["node"])]
    (proc,) = [one.proc for one in host.processes() if inner_pid(one.proc.pid) == rank["pid"]]
    host.kill([proc])
