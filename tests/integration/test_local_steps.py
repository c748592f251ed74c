"""Is a person told how far a job without steps is, that its ranks train alone, and what its checkpoint says of its step?"""

from __future__ import annotations

import json
from pathlib import Path

from orchestrator.brain.model import decisions as d
from orchestrator.views import cells, post_mortem, status
from tests.support.local import FAKE_TORCH, STEPPER, Desk, wait_until

ALONE = STEPPER + "run(60)\n"
SAVES = (
    STEPPER
    + """
import json
from pathlib import Path


def save(step):
    folder = Path(os.environ["ORCH_CHECKPOINT_DIR"], f"checkpoint-{step // 2}")
    if rank == 0 and step == 40:
        folder.mkdir()
        (folder / "trainer_state.json").write_text(json.dumps({"global_step": step // 2}))
        (folder / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")


run(60, at_step=save)
"""
)
INFERS = """
import time
from tqdm import tqdm
for _ in tqdm(range(1000)):
    time.sleep(0.02)
"""


def test_ranks_that_train_alone_are_reported(desk: Desk, tmp_path: Path) -> None:
    told = tmp_path / "told.jsonl"
    job = desk.submit(
        {**FAKE_TORCH, "train.py": ALONE}, nodes=2, procs_per_node=1, entrypoint="train.py",
        notify={"command": f"(cat; echo) >> {told}", "on": ["notice"]},
    )  # fmt: skip
    assert job.wait()["state"] == "SUCCEEDED"
    words = "2 ranks train alone: none has formed a process group after "
    (notice,) = job.notices(d.NoticeTopic.ALONE, d.NoticeTopic.STEPS)
    assert notice.why.startswith(words)
    shown = cells.plain_text(status.job(job.job.source.status()))
    assert f"notice      {words}" in shown and "fix: if they are to train together, torch.distributed" in shown
    assert words in cells.plain_text(post_mortem.post_mortem(job.job.why()))
    wait_until(job.job.folder.ended.exists, "the end of the supervisor's work")
    (note,) = [json.loads(line) for line in told.read_text().splitlines()]
    assert (note["event"], note["verdict"]) == ("notice", None)
    assert words in note["text"]
    assert not job.news(d.Judge) and not job.notices(d.NoticeTopic.HANG, d.NoticeTopic.DESYNC)


def test_step_stated_by_checkpoint_counts_and_is_shown(desk: Desk) -> None:
    job = desk.submit({**FAKE_TORCH, "train.py": SAVES}, nodes=1, procs_per_node=1, entrypoint="train.py")
    end = job.wait()
    assert end["state"] == "SUCCEEDED"
    assert end["checkpoint"] is not None and end["checkpoint"]["step"] == 20
    (notice,) = job.notices(d.NoticeTopic.ALONE, d.NoticeTopic.STEPS)
    assert notice.why.startswith("checkpoint-20 says step 20, orch counted ")
    assert notice.why in cells.plain_text(status.job(job.job.source.status()))


def test_progress_bar_is_progress_of_job_without_steps(desk: Desk) -> None:
    shown = "/1000 (tqdm)"
    job = desk.submit({"infer.py": INFERS}, nodes=1, procs_per_node=2, entrypoint="infer.py")
    wait_until(lambda: shown in (job.seen()["progress"] or ""), "a bar")
    seen = job.job.source.status()
    assert seen.step is None
    assert any(str(rank.progress).endswith(shown) for rank in seen.ranks)
    assert shown in cells.plain_text([status.headline(seen)])
    job.job.cancel()
    assert job.wait()["state"] == "CANCELLED"
    assert not job.news(d.Judge) and not [one for one in job.news(d.Notice) if one.topic is not d.NoticeTopic.SLOW]
