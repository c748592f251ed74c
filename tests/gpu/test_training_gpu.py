"""Does a training whose loss becomes nan on the GPU resume where a run without the bad batch would be?"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.gpu.machine import BEGIN, ONE_RANK
from tests.support.local import Desk

pytestmark = pytest.mark.gpu

BAD_BATCH = 60
RUN_S_MAX = 120.0

SCRIPT = f"""{BEGIN}
import hashlib, re
folder, resume = os.environ["ORCH_CHECKPOINT_DIR"], os.environ.get("ORCH_RESUME_FROM")
torch.manual_seed(1)
model = torch.nn.Linear(32, 32).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
step = 0
if resume:
    state = torch.load(resume, map_location=device)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    step = state["step"]
print("begins at", step, flush=True)
skips = attempt > 1 or "--without" in sys.argv
while step < 150:
    step += 1
    if skips and step == {BAD_BATCH}:
        continue
    batch = torch.full((4, 32), float("nan") if step == {BAD_BATCH} else 0.1 * (step % 7), device=device)
    loss = model(batch).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print("step", step, "loss", loss.item(), flush=True)
    if attempt == 1 and "--without" not in sys.argv:
        time.sleep(0.2)
    if step % 10 == 0:
        state = {{"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}}
        torch.save(state, os.path.join(folder, f"step_{{step}}.pt"))
held = b"".join(one.detach().cpu().numpy().tobytes() for one in model.parameters())
print("weights", hashlib.sha256(held).hexdigest(), flush=True)
"""


def test_rollback_ends_as_a_run_without_the_bad_batch(desk: Desk, tmp_path: Path, say: Callable[[str], None]) -> None:
    job = desk.submit(
        {"train.py": SCRIPT}, entrypoint="train.py", checkpoint={"path": "step_*.pt", "keep": 20},
        monitor={"on_nan": "rollback"}, **ONE_RANK,
    )  # fmt: skip
    assert job.wait(RUN_S_MAX)["state"] == "SUCCEEDED", job.job.why()
    (tmp_path / "alone.py").write_text(SCRIPT)
    env = {**os.environ, "RANK": "0", "ORCH_CHECKPOINT_DIR": str(tmp_path)}
    alone = subprocess.run(
        [sys.executable, "alone.py", "--without"], cwd=tmp_path, env=env, capture_output=True, text=True, check=True,
        timeout=RUN_S_MAX,
    )  # fmt: skip
    verdict = job.verdict()
    assert verdict["kind"] == "diverged", verdict
    began = int(job.log(attempt=2).partition("begins at ")[2].split()[0])
    say(f"nan at step {BAD_BATCH}: resumed from step {began}: {verdict['summary']}")
    assert 0 < began < BAD_BATCH
    weights = [re.findall("^weights (.+)$", text, re.MULTILINE) for text in (job.log(attempt=2), alone.stdout)]
    assert weights[0] == weights[1] != []
