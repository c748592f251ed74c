"""What the tests on a real Slurm run, without torch, and which allocations a job has had."""

from __future__ import annotations

import json

from .desk import FAKE_TORCH, TOGETHER, Job

SAVES = (
    TOGETHER
    + """
import signal

ended = []
signal.signal(signal.SIGTERM, lambda signum, frame: ended.append(signum))
steps, slow_attempts = int(sys.argv[1]), int(sys.argv[2])
folder = Path(os.environ["ORCH_CHECKPOINT_DIR"])
resumed = os.environ["ORCH_RESUME_FROM"]
start = int(Path(resumed).name[5:-3]) if resumed else 0


def save(step):
    part = folder / f".step-{step}"
    part.write_bytes(b"PK\\x03\\x04" + b"PK\\x05\\x06" + bytes(18))
    part.rename(folder / f"step-{step}.pt")


def at_step(step):
    ends = together(bool(ended))
    if ends:
        if rank == 0:
            save(step - 1)
        os.write(1, f"saved step {step - 1}\\n".encode())
        sys.exit(0 if step > steps else 143)


meet()
run(steps, 0.05 if attempt <= slow_attempts else 0.01, at_step, start)
"""
)
"""Makes so many steps together, slowly in so many attempts; at TERM all save and leave."""


TRAINS = {
    "train.py": TOGETHER + "meet()\nrun(100000, 0.05, lambda step: together(True))",
    **FAKE_TORCH,
}
"""Ranks that step together until they are stopped."""


def allocations(job: Job) -> list[str]:
    """Return the allocations that the job has had, in order."""
    lines = job.folder.journal.read_text().splitlines()
    news = [json.loads(line)["news"] for line in lines]
    return [one["allocation"] for one in news if one["kind"] == "AllocationBegan"]
