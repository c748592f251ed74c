"""Does every way to say what runs work: scripts, modules, shell commands, setup lines, another interpreter?"""

from __future__ import annotations

import os
import sys
from typing import Any

import pytest

from tests.support.local import FAKE_TORCH, STEPPER, Desk, wait_until

ENTRIES: dict[str, dict[str, Any]] = {
    "script": {"entrypoint": "train.py --lr 0.1 'two words'"},
    "module": {"entrypoint": "-m pack.train --lr 0.1 'two words'"},
    "command": {"command": f"bash run.sh {sys.executable}"},
}

TRAIN = (
    STEPPER
    + """
run(12)
print("arguments", sys.argv[1:], flush=True)
"""
)


@pytest.mark.parametrize("entry", list(ENTRIES))
def test_every_entry_kind_runs_and_counts_steps(desk: Desk, entry: str) -> None:
    files = {
        **FAKE_TORCH, "train.py": TRAIN, "pack/__init__.py": "", "pack/train.py": TRAIN,
        "run.sh": "set -eu\necho wrapped in $PWD\n\"$1\" train.py --lr 0.1 'two words'\necho after\n",
    }  # fmt: skip
    job = desk.submit(files, **ENTRIES[entry])
    status = job.wait()
    assert (status["state"], status["step"]) == ("SUCCEEDED", 12)
    assert [rank["step"] for rank in status["ranks"]] == [12, 12]
    assert "arguments ['--lr', '0.1', 'two words']" in job.log(1)
    if entry == "command":
        assert f"wrapped in {job.job.folder.code}" in job.log()


def test_isolated_interpreter_without_hook_reports_traceback_from_log(
    desk: Desk,
) -> None:
    """An isolated interpreter runs without the hook, and its traceback is found in the log."""
    script = (
        "import os\nprint('hello', os.environ['RANK'])\nif os.environ['RANK'] == '1':\n    raise OSError('no data')\n"
    )
    job = desk.submit({"train.py": script}, command=f"{sys.executable} -I train.py", restart={"max": 0})
    assert job.wait()["state"] == "FAILED"
    assert "hello 1" in job.log(1)
    verdict = job.verdict()
    assert verdict["ranks"] == [1]
    assert "OSError: no data at" in verdict["summary"]
    assert "train.py:4" in verdict["summary"]


def test_resume_arguments_are_appended_only_with_a_checkpoint(desk: Desk) -> None:
    script = (
        STEPPER
        + """
print("arguments", sys.argv[1:], flush=True)
def die(step):
    if attempt == 1 and step == 15:
        os.kill(os.getpid(), 9)
    if step == 10 and rank == 0 and attempt == 1:
        (Path(os.environ["ORCH_CHECKPOINT_DIR"]) / "a b.txt").write_text("x")
run(20, each_s=0.03, at_step=die)
"""
    )
    for number, entry in enumerate(({"entrypoint": "train.py"}, {"command": f"{sys.executable} train.py"})):
        spec: dict[str, Any] = {**entry, "checkpoint": {"path": "*.txt", "resume_args": "--resume {path}"}}
        job = desk.submit({**FAKE_TORCH, "train.py": script}, procs_per_node=1, **spec)
        assert job.wait()["state"] == "SUCCEEDED", number
        assert "arguments []" in job.log()
        assert f"arguments ['--resume', '{job.job.folder.checkpoints / 'a b.txt'}']" in job.log(0, 2)


def test_placeholders_are_filled_in_for_each_attempt(desk: Desk) -> None:
    script = (
        STEPPER
        + """
print("arguments", sys.argv[1:], os.environ["RUN"], flush=True)
out = Path(sys.argv[1].partition("=")[2])
def die(step):
    if step == 10 and rank == 0 and attempt == 1:
        (out / "ckpt.pt").write_text("x")
    if attempt == 1 and step == 15:
        os.kill(os.getpid(), 9)
run(20, each_s=0.03, at_step=die)
"""
    )
    job = desk.submit(
        {**FAKE_TORCH, "train.py": script}, procs_per_node=1, env={"RUN": "run-{attempt}"},
        entrypoint="train.py --out=$ORCH_CHECKPOINT_DIR from={resume_from} 'a={b:1}'",
        checkpoint={"path": "ckpt.pt", "resume_args": "--init_from=resume"},
    )  # fmt: skip
    assert job.wait()["state"] == "SUCCEEDED"
    folder = job.job.folder.checkpoints
    assert f"arguments ['--out={folder}', 'from=', 'a={{b:1}}'] run-1" in job.log()
    resumed = f"['--out={folder}', 'from={folder}/ckpt.pt', 'a={{b:1}}', '--init_from=resume'] run-2"
    assert f"arguments {resumed}" in job.log(0, 2)


def test_programs_beside_job_python_come_first_in_path(desk: Desk) -> None:
    tool = "#!/bin/sh\necho the tool of the environment\n"
    python = f'#!/bin/sh\nexec {sys.executable} "$@"\n'
    make = "mkdir -p env/bin; cp tool python env/bin/; chmod +x env/bin/*"
    files = {"train.py": "import os; os.system('tool')", "tool": tool, "python": python}
    entries: list[dict[str, Any]] = [{"entrypoint": "train.py"}, {"command": "tool"}]
    for entry in entries:
        job = desk.submit(files, procs_per_node=1, **entry, python="env/bin/python", setup=[make])
        assert job.wait()["state"] == "SUCCEEDED"
        assert "the tool of the environment" in job.log()
    path = {"PATH": os.environ["PATH"]}
    job = desk.submit(files, procs_per_node=1, command="tool", python="env/bin/python", setup=[make], env=path)
    assert job.wait()["state"] == "FAILED"
    assert "env/bin is not put first" in job.job.folder.node_log(1, "node-0").read_text()


def test_setup_runs_once_per_node_with_exports(desk: Desk) -> None:
    """Setup lines run once per node, and what they export reaches the ranks."""
    script = """
import os, sys
print("from setup:", os.environ["GREETING"], os.environ["PATH"].split(":")[0], flush=True)
print("still mounted:", os.path.exists(f"/proc/{os.environ['MOUNTED']}"), flush=True)
print("left out:", [name for name in os.environ if name.startswith("ORCH_SETUP")])
sys.exit(3 if os.environ["ORCH_ATTEMPT"] == "1" else 0)
"""
    job = desk.submit(
        {"train.py": script}, nodes=2, procs_per_node=1, entrypoint="train.py", env={"WHO": "wörld"},
        setup=["echo setting up", "export GREETING=\"hello $WHO\n2\"", "PATH=/added:$PATH", "setsid sleep 3600 & export MOUNTED=$!"],
    )  # fmt: skip
    assert job.wait()["state"] == "SUCCEEDED"
    assert "still mounted: True" in job.log(1, 2), "what the lines left running is there for all attempts"
    wait_until(lambda: not job.processes(), "the end of what the setup lines left running")
    assert "from setup: hello wörld\n2 /added" in job.log(1, 2)
    assert "left out: []" in job.log(1, 2)
    for node in ("node-0", "node-1"):
        logs = [job.job.folder.node_log(attempt, node).read_text() for attempt in (1, 2)]
        assert [log.count("setting up\n") for log in logs] == [1, 0]


def test_failing_setup_ends_job_with_its_last_output(desk: Desk) -> None:
    job = desk.submit(
        {"train.py": "print('never')"},
        entrypoint="train.py",
        setup=["echo one", "ls /no/such/folder", "echo three"],
    )
    assert job.wait()["state"] == "FAILED"
    assert job.kinds()[0] == "launch"
    verdict = job.verdict()
    assert verdict["node"] == "node-0"
    assert "the setup lines ended with code 2" in verdict["summary"]
    assert "/no/such/folder" in verdict["evidence"][-1]
    assert "three" not in verdict["evidence"][-1]


def test_interpreter_is_found_relative_to_code_or_named(desk: Desk) -> None:
    files = {
        "train.py": "print('hello')",
        "bin/python": f'#!/bin/sh\necho wrapped\nexec {sys.executable} "$@"\n',
    }
    job = desk.submit(files, procs_per_node=1, entrypoint="train.py", python="bin/python",
                      setup=["chmod +x bin/python"])  # fmt: skip
    assert job.wait()["state"] == "SUCCEEDED", job.job.why()
    assert job.log() == "wrapped\nhello\n"
    missing = desk.submit(files, entrypoint="train.py", python="/no/such/python", setup=["true"])
    assert missing.wait()["state"] == "FAILED"
    assert missing.kinds()[0] == "launch"
    assert "there is no /no/such/python on this node" in missing.verdict()["summary"]
