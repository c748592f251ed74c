"""A script that saves in `out/` and resumes by itself, on hosts that share no disk: its checkpoints outlive its hosts, and nothing
that ranks wrote is deleted before it is home."""

from __future__ import annotations

import json

from tests.support.cluster import saves_in_out
from tests.support.cluster.box import Box
from tests.support.cluster.desk import Desk
from tests.support.cluster.host import TRAINER


def test_lost_host_resumes_from_previous_checkpoint(desk: Desk, box: Box) -> None:
    """A lost host costs its newest checkpoint, and the script finds the one before by itself."""
    job = desk.submit(saves_in_out.FILES, spares=1, ssh={"hosts": "node[1-3]"})
    job.until(lambda seen: (seen.get("checkpoint") or {"step": 0})["step"] >= 60, "step 60 at home")
    box.power_off("node1")
    status = job.wait()
    assert (status["state"], job.kinds()) == ("SUCCEEDED", ["node_lost", None])
    saves_in_out.assert_began_by_its_own_choice(job, job.why()[1])
    assert job.why()[1]["began_from"]["step"] >= 60
    assert status["step"] == 200


def test_clean_keeps_files_that_exist_only_there(desk: Desk, box: Box) -> None:
    """Files that ranks wrote are collected, and clean deletes no file that exists only on that host."""
    script = saves_in_out.SAVES_IN_OUT.replace("10**9 if attempt == 1 else 200", "60") + (
        "if rank == 0:\n    Path('out/a name\\nwith lines').write_text('x')\n    os.mkfifo('out/pipe')\n"
        "    Path('runs/deep').mkdir(parents=True)\n    Path('runs/deep/.hydra').write_text('y')\n"
        "    Path('train.log').write_text('z')\n    Path('out/locked').write_text('z')\n    Path('out/locked').chmod(0)\n"
    )
    job = desk.submit({**saves_in_out.FILES, "train.py": script}, nodes=1, procs_per_node=1, ssh={"hosts": "node2"})
    assert job.wait()["state"] == "SUCCEEDED"
    done = desk.orch("collect", job.id, "--to", f"{TRAINER.home}/copy-{job.id}", check=False)
    assert done.returncode == 3 and "code/out/locked could not be fetched" in done.stderr
    copy = box.login.path(f"{TRAINER.home}/copy-{job.id}/code")
    copied = {str(path.relative_to(copy)) for path in copy.rglob("*") if path.is_file()}
    assert copied >= {
        "out/net_0040.pth",
        "out/metrics.json",
        "out/a name\nwith lines",
        "runs/deep/.hydra",
        "train.log",
    }
    assert "train.py" not in copied
    kept = desk.orch("clean", job.id, check=False)
    assert kept.returncode == 3 and "code/out/locked could not be fetched" in kept.stderr
    assert job.on_host("node2").root.exists()
    desk.orch("clean", job.id, "--discard")
    assert not job.on_host("node2").root.exists()
    assert json.loads((job.folder.code / "out" / "metrics.json").read_text()) == 41
