"""A script that goes on by itself from `snapshot.pt` in its working folder; with `--dies` rank 1 is killed once.

Only the first attempt takes its time; it saves at steps 10 and 20.
"""

from __future__ import annotations

from .desk import FAKE_TORCH, TOGETHER

OWN_RESUME = (
    TOGETHER
    + """
snapshot = Path("snapshot.pt")
start = int(snapshot.read_text()) if snapshot.exists() else 0
print("begins at", start, "with", sys.argv[1:], flush=True)
meet()
def save(step):
    if step % 10 == 0 and (attempt > 1 or step <= 20) and (rank if "--one" in sys.argv else int(os.environ["LOCAL_RANK"])) == 0:
        coming = Path(f"coming-{rank}.tmp")
        coming.write_text(str(step))
        coming.replace(snapshot)
    together(True)
    if attempt == 1 and step == 25 and rank == 1 and "--dies" in sys.argv:
        os.kill(os.getpid(), 9)
each_s = float(os.environ.get("EACH_S", "0.2")) if attempt == 1 else 0.02
run(int(os.environ.get("STEPS", "40")), each_s, save, start)
"""
)
FILES = {**FAKE_TORCH, "train.py": OWN_RESUME}
