"""Do ranks get exactly the settings that `orch plan` shows, and does the node's log say who has set each?"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from orchestrator.client.outline.outline import Outline, make_outline
from orchestrator.core.settings.rank_settings import SetBy, is_watched
from orchestrator.spec.load import load
from tests.support.local import Desk, Sight

DUMP = "import json, os\nprint(json.dumps(dict(os.environ)), flush=True)\n"


def _planned(desk: Desk, job: Sight) -> Outline:
    return make_outline(load(desk.folder / "work-0" / "job.yaml"), desk.environ)


def _environment(job: Sight, rank: int) -> dict[str, str]:
    found: dict[str, str] = json.loads(job.log(rank).splitlines()[0])
    return found


def _expected(node: Any, root: Path, rank: int) -> dict[str, str]:
    marks = {"{job_dir}": str(root), "{job_id}": root.name, "{attempt}": "001", "{rank}": f"{rank:05d}"}
    expected = {}
    for setting in node.settings:
        if setting.value is not None:
            value = setting.value
            for mark, text in marks.items():
                value = value.replace(mark, text)
            expected[setting.name] = value
    return expected


def test_ranks_get_exactly_the_planned_settings(desk: Desk) -> None:
    desk.environ |= {"NCCL_SOCKET_NTHREADS": "2", "TORCH_FR_BUFFER_SIZE": "3000"}
    job = desk.submit(
        {"train.py": DUMP}, nodes=2, entrypoint="train.py", env={"NCCL_DEBUG": "WARN", "MINE": "1"},
        nccl={"ib_timeout": 22}, batch={"per_device": 8},
    )  # fmt: skip
    planned = _planned(desk, job)
    assert job.wait()["state"] == "SUCCEEDED"
    for node in planned.nodes:
        for rank in node.ranks:
            found = {name: value for name, value in _environment(job, rank).items() if is_watched(name)}
            assert found == _expected(node, job.root, rank)
        log = job.job.folder.node_log(1, node.name).read_text()
        for setting in node.settings:
            assert f"setting {setting.name}" in log
    assert [(one.name, one.value, one.set_by) for one in planned.variables] == [("MINE", "1", SetBy.YOU)]
    assert "setting NCCL_DEBUG=WARN (you: " in log and "job.yaml:" in log
    assert "setting NCCL_SOCKET_NTHREADS=2 (your shell: " in log
    assert "setting TORCH_NCCL_TRACE_BUFFER_SIZE=3000 (orch: as TORCH_FR_BUFFER_SIZE" in log
    assert (planned.batch_size, job.job.status()["effective_batch"]) == (32, 32)


def test_settings_of_setup_lines_win_and_are_named(desk: Desk) -> None:
    job = desk.submit(
        {"train.py": DUMP}, procs_per_node=1, entrypoint="train.py",
        setup=["export OMP_NUM_THREADS=7", "export NCCL_DEBUG_FILE=/dev/null"],
    )  # fmt: skip
    assert "setup lines" in _planned(desk, job).notes[0]
    assert job.wait()["state"] == "SUCCEEDED"
    env = _environment(job, 0)
    assert (env["OMP_NUM_THREADS"], env["NCCL_DEBUG"], env["NCCL_DEBUG_FILE"]) == ("7", "WARN", "/dev/null")
    assert "setting OMP_NUM_THREADS=7 (setup lines: " in job.job.folder.node_log(1, "node-0").read_text()
