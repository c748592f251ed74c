"""Is this machine burned in by `orch check`, named when it computes wrongly, and remembered? With real torch."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.support import packages
from tests.support.local import Desk

packages.need("torch")
RUN_S_MAX = 120.0
WRONG = """
import torch
right = torch.matmul

def matmul(left, right_one, out=None):
    product = right(left, right_one, out=out)
    product[3, 5] += 1
    return product

torch.matmul = matmul
"""


@pytest.mark.slow
def test_machine_that_computes_wrongly_is_named_and_then_right(desk: Desk) -> None:
    """A wrong product fails the check and stays in the list of hosts, until a burn-in finds right ones."""

    def orch(*words: str) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            [sys.executable, "-m", "orchestrator.cli", *words], cwd=desk.folder, env=desk.environ, capture_output=True,
            text=True, timeout=RUN_S_MAX, check=False,
        )  # fmt: skip
        print(done.stdout, done.stderr)
        return done

    (desk.folder / "train.py").write_text("import torch\n")
    (desk.folder / "sick").mkdir()
    (desk.folder / "sick" / "sitecustomize.py").write_text(WRONG)
    text = f"name: burn\nentrypoint: train.py\nprocs_per_node: 1\npython: {sys.executable}\n"
    (desk.folder / "job.yaml").write_text(text)
    sick = f"env.PYTHONPATH={desk.folder}/sick"
    done = orch("check", "job.yaml", "--burn-in", "10s", "--set", sick)
    assert done.returncode == 3 and "burn-in: 0 of 10 s" in done.stderr
    assert "a float32 product is not the exact one: its results cannot be trusted" in done.stdout
    (host,) = json.loads(orch("nodes", "--json").stdout)
    assert host["why"].startswith("burn-in: ") and host["failed_at"]

    done = orch("check", "job.yaml", "--burn-in", "10s", "--json")
    (good,) = [one for one in json.loads(done.stdout) if one["what"] == "burn-in" and one["severity"] == "ok"]
    assert done.returncode == 0 and set(good["figures"]) <= {"float32", "bfloat16", "memory", "disk"}
    (host,) = json.loads(orch("nodes", "--json").stdout)
    assert host["why"] is None and host["state"] == "passed its check"
