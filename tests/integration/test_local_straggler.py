"""Is a rank whose own work holds up the others named while the job runs, with its factor and its host?"""

from __future__ import annotations

import json

from click.testing import CliRunner

from orchestrator.brain.model import decisions as d
from orchestrator.cli.group import cli
from tests.support.local import Desk, Sight, wait_until
from tests.support.torch_script import WITHOUT_DYNAMO

SLOW_RANK = 1
SLOW_S = 0.3
"""Far more than a busy machine takes from a rank, so that nobody else can be the slow one."""

NAMED_S_MAX = 90.0
"""From the first step on: three reports, ten seconds apart, and the noise of a busy machine."""

READY_S_MAX = 240.0  # two imports of torch on a busy machine

TRAINS = f"""
{WITHOUT_DYNAMO}
import os, time
import torch.distributed as dist
rank = int(os.environ["RANK"])
dist.init_process_group("gloo")
class Net(torch.nn.Linear):
    def forward(self, x):
        time.sleep(0.02 + ({SLOW_S} if rank == {SLOW_RANK} else 0))
        return super().forward(x)
model = Net(8, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
while True:
    optimizer.zero_grad()
    model(torch.ones(4, 8)).sum().backward()
    dist.all_reduce(model.weight.grad)
    optimizer.step()
"""


def _stragglers(job: Sight) -> list[dict[str, object]]:
    """Return what `orch status --json` says of slow ranks."""
    shown = CliRunner().invoke(cli, ["status", job.job.id, "--json"], env=dict(job.environ))
    assert shown.exit_code == 0, shown.output
    found: list[dict[str, object]] = json.loads(shown.stdout)[0]["stragglers"]
    return found


def test_straggler_is_named_but_waiting_ranks_are_not(desk: Desk) -> None:
    """A rank that is slow by itself is named, and those that wait for it are not."""
    job = desk.submit({"train.py": TRAINS}, nodes=2, procs_per_node=1, entrypoint="train.py")
    wait_until(lambda: job.seen()["step"], "a step", READY_S_MAX)
    found = wait_until(lambda: _stragglers(job), "a straggler", NAMED_S_MAX)
    assert [(one["rank"], one["node"]) for one in found] == [(SLOW_RANK, "node-1")]
    assert float(str(found[0]["factor"])) >= 1.5
    assert float(str(found[0]["own_s"])) >= SLOW_S
    remark = wait_until(lambda: job.notices(d.NoticeTopic.SLOW), "the remark")[0]
    assert (remark.attempt, remark.key) == (1, str(SLOW_RANK))
    assert [one["remarks"] for one in job.attempts()] == [[remark.why]]
    text = CliRunner().invoke(cli, ["status", job.job.id], env=dict(job.environ)).stdout
    assert f"slow        rank {SLOW_RANK} on node-1, " in text
    job.job.cancel()
    assert job.wait()["state"] == "CANCELLED"
