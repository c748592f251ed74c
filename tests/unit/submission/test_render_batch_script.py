"""Does the batch script keep the job's supervisor going, and does no text of a spec run in it? Real shells, and a small
script in the place of Python, that plays the supervisor."""

from __future__ import annotations

import dataclasses
import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from orchestrator.core.jobdir.layout import JobDir
from orchestrator.core.jobdir.plan import Plan
from orchestrator.core.slurm.sbatch_options import EXPEDITED
from orchestrator.submission.render import render
from orchestrator.supervisor.supervisor_watchdog import EXIT_UNFIT_FOLDER
from tests.support import jobs

pytestmark = pytest.mark.slow

WAIT_S_MAX = 20.0
PLAN = jobs.plan(backend="slurm")
FAKE = """#!/bin/sh
case "$*" in *version_info*) exit 0 ;; *--version*) exit 0 ;; esac
printf '%s\\0' "$0" "$@" >>"$SAW"; printf '%s;' "${{ORCH_ENDING-}}" >>"$SAW.ending"
echo x >>"$SAW.count"
{play}
"""
SHELLS = [shell for shell in ("dash", "bash") if shutil.which(shell)]


class Stage:
    """A job folder, and whoever plays the supervisor in it."""

    def __init__(self, place: Path, play: str = "exit 0", plan: Plan = PLAN) -> None:
        self.place = place
        self.job = JobDir(place / "a job's folder")
        self.job.root.mkdir()
        self.job.bundle.touch()
        self.job.slurm.write_text('["3", "12"]')
        self.python = place / "python"
        self.python.write_text(FAKE.format(play=play))
        self.python.chmod(0o755)
        self.batch, self.agent = render(plan, self.job, str(self.python))

    def start(self, text: str, shell: str = "sh", **environ: str) -> subprocess.Popen[str]:
        """Run a script as Slurm does: a copy of it, somewhere else."""
        script = self.place / "spool"
        script.write_text(text, newline="")
        saw = {"SAW": str(self.place / "saw"), "ENDED": str(self.job.ended)}
        env = {"PATH": os.environ["PATH"], "SLURM_JOB_ID": "12", "SLURMD_NODENAME": "n1", **saw, **environ}
        return subprocess.Popen(
            [shell, script], cwd=self.place, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True, errors="replace", start_new_session=True,
        )  # fmt: skip

    def run(self, shell: str = "sh", **environ: str) -> tuple[int, str]:
        """Run the batch script to its end; return its exit code and what it said."""
        process = self.start(self.batch.text, shell, **environ)
        said, _ = process.communicate(timeout=WAIT_S_MAX)
        return process.returncode, said

    @property
    def starts(self) -> int:
        """How often the supervisor was started."""
        count = self.place / "saw.count"
        return len(count.read_text().splitlines()) if count.exists() else 0

    def told(self) -> list[str]:
        """Return what each supervisor was told at its start."""
        return (self.place / "saw.ending").read_text().split(";")[:-1]


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Callable[[str], Stage]]:
    """Make the stage of one play."""
    yield lambda play: Stage(tmp_path, play)


@pytest.mark.parametrize("shell", SHELLS)
@pytest.mark.parametrize("code", [0, 1])
def test_batch_script_exits_like_the_job(stage: Callable[[str], Stage], shell: str, code: int) -> None:
    on = stage(f'touch "$ENDED"; exit {code}')
    assert on.run(shell) == (code, "")
    assert (on.place / "saw").read_bytes().split(b"\0")[:-1] == [
        os.fsencode(word) for word in (on.python, "-I", "-S", on.job.bundle, "supervise", on.job.root)
    ]


ENDS = 'touch "$ENDED"; exit {}'
RESUMED = 'echo \'["12", "13"]\' >"$(dirname "$ENDED")/slurm.json"; exit {}'


@pytest.mark.parametrize("shell", SHELLS)
@pytest.mark.parametrize("options", [(), (EXPEDITED,)])
@pytest.mark.parametrize(
    ("play", "ends"),
    [(ENDS, 0), (ENDS, 1), (RESUMED, 1), ("exit {}", EXIT_UNFIT_FOLDER), ("exit {}", 75)],
)
def test_slurm_holds_no_job_that_is_over(
    tmp_path: Path, shell: str, options: tuple[str, ...], play: str, ends: int
) -> None:
    """Slurm would hold an expedited one that ends with another code than 0; one that is to run again is left as it is."""
    assert PLAN.slurm is not None
    slurm = dataclasses.replace(PLAN.slurm, options=(*PLAN.slurm.options, *options))
    on = Stage(tmp_path, play.format(ends), dataclasses.replace(PLAN, slurm=slurm))
    text = on.batch.text.replace("REQUEUE_S_MAX=300", "REQUEUE_S_MAX=0").replace("PAUSE_S_MAX=15", "PAUSE_S_MAX=0")
    on.batch = dataclasses.replace(on.batch, text=text)
    (tmp_path / "scontrol").write_text('#!/bin/sh\necho "scontrol $*"; exit 1\n')
    (tmp_path / "scontrol").chmod(0o755)
    code, said = on.run(shell, PATH=f"{tmp_path}:{os.environ['PATH']}")
    is_over = code != 0 and ends != 75
    assert code == (ends if ends <= 1 and play != "exit {}" else 1)
    assert ("scontrol update JobId=12 Requeue=0\n" in said) is (is_over and bool(options)) and said.count(
        "scontrol"
    ) <= 1


@pytest.mark.parametrize("shell", SHELLS)
def test_dead_supervisor_is_restarted(stage: Callable[[str], Stage], shell: str) -> None:
    """A supervisor that dies is started again."""
    play = 'test "$(grep -c . "$SAW.count")" -gt 2 && { touch "$ENDED"; exit 0; }; '
    on = stage(play + 'test "$(grep -c . "$SAW.count")" -gt 1 && exit 1; kill -KILL $$')
    code, said = on.run(shell)
    assert (code, on.starts) == (0, 3)
    assert "the supervisor ended with code 137, see supervisor.log; start 1 of 20" in said
    assert "ended with code 1, see" in said, "a traceback is no end of the job"


def test_nodes_are_released_if_job_folder_stays_unusable(stage: Callable[[str], Stage]) -> None:
    on = stage(f'echo "the journal is gone; fix: restore it" >&2; exit {EXIT_UNFIT_FOLDER}')
    code, said = on.run()
    assert (code, on.starts) == (1, 1) and said.endswith("cannot work: the journal is gone; fix: restore it\n")


def test_constantly_dying_supervisor_is_given_up(stage: Callable[[str], Stage]) -> None:
    """A supervisor that always dies is given up."""
    on = stage("exit 9")
    on.batch = dataclasses.replace(on.batch, text=on.batch.text.replace("PAUSE_S_MAX=15", "PAUSE_S_MAX=0"))
    code, said = on.run()
    assert (code, on.starts) == (1, 20) and "the supervisor ended 20 times" in said


def test_requested_requeue_is_waited_for_within_limit(stage: Callable[[str], Stage]) -> None:
    on = stage("exit 75")
    on.batch = dataclasses.replace(on.batch, text=on.batch.text.replace("REQUEUE_S_MAX=300", "REQUEUE_S_MAX=0"))
    code, said = on.run()
    assert (code, on.starts) == (1, 1) and "Slurm has not taken the nodes back" in said


@pytest.mark.parametrize("shell", SHELLS)
@pytest.mark.parametrize("name", ["USR1", "TERM"])
def test_signals_are_passed_on_to_awaited_supervisor(stage: Callable[[str], Stage], shell: str, name: str) -> None:
    play = f'trap \'touch "$ENDED"; sleep 0.1; exit 1\' {name}; touch "$SAW.up"; while :; do sleep 0.02; done'
    on = stage(play)
    process = on.start(on.batch.text, shell)
    _await(on.place / "saw.up")
    process.send_signal(getattr(signal, f"SIG{name}"))
    process.communicate(timeout=WAIT_S_MAX)
    assert (process.returncode, on.starts) == (1, 1)


@pytest.mark.parametrize("shell", SHELLS)
def test_supervisor_ended_by_signal_gets_notified_successor(stage: Callable[[str], Stage], shell: str) -> None:
    play = 'test "$ORCH_ENDING" = "USR1 TERM" && { touch "$ENDED"; exit 1; }; touch "$SAW.up"; exec sleep 20'
    on = stage(play)
    process = on.start(on.batch.text, shell)
    for number, signum in enumerate((signal.SIGUSR1, signal.SIGTERM), 1):
        _await(on.place / "saw.up")
        (on.place / "saw.up").unlink()
        process.send_signal(signum)
        _until(lambda number=number: on.starts > number, "the next supervisor")  # type: ignore[misc]
    process.communicate(timeout=WAIT_S_MAX)
    assert process.returncode == 1 and on.told() == ["", "USR1", "USR1 TERM"]


def test_nothing_starts_before_folder_knows_job(stage: Callable[[str], Stage]) -> None:
    on = stage('touch "$ENDED"; exit 0')
    on.job.slurm.write_text('["3"]')
    process = on.start(on.batch.text)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.5)
    assert on.starts == 0
    on.job.slurm.write_text('["3", "12"]\n')
    assert process.wait(WAIT_S_MAX) == 0 and on.starts == 1
    process.communicate()


def test_job_unknown_to_folder_gives_up(stage: Callable[[str], Stage]) -> None:
    on = stage("exit 0")
    on.job.slurm.write_text('["12", "13"]')
    short = on.batch.text.replace("HAND_OVER_TICKS_MAX=600", "HAND_OVER_TICKS_MAX=1")
    on.batch = dataclasses.replace(on.batch, text=short)
    code, said = on.run()
    assert (code, on.starts) == (1, 0) and "nothing was started" in said


def test_old_job_starts_no_supervisor_after_resume(stage: Callable[[str], Stage]) -> None:
    """After a resume the old Slurm job does not start the supervisor again."""
    on = stage('echo \'["12", "13"]\' >"$(dirname "$ENDED")/slurm.json"; exit 0')
    assert on.run() == (0, "") and on.starts == 1


def test_missing_node_requirement_is_reported_in_one_line(stage: Callable[[str], Stage]) -> None:
    on = stage("exit 0")
    on.job.bundle.unlink()
    code, said = on.run()
    assert code == 66 and "set ORCH_HOME to a folder that all nodes share" in said and said.count("\n") == 1
    process = on.start(on.agent.text)
    assert process.communicate(timeout=WAIT_S_MAX)[0].startswith("n1: bundle: ") and process.returncode == 66


def test_agent_starts_in_folder_of_its_node(
    stage: Callable[[str], Stage],
) -> None:
    """An agent is started in a folder of its node, and its output goes to srun."""
    on = stage("echo up; exit 3")
    process = on.start(on.agent.text, SLURMD_NODENAME="gpu-7")
    assert (process.communicate(timeout=WAIT_S_MAX)[0], process.returncode) == ("up\n", 3)
    assert on.job.node("gpu-7").is_dir()


def _await(path: Path) -> None:
    _until(path.exists, f"{path.name} to be there")


def _until(holds: Callable[[], bool], what: str) -> None:
    deadline_s = time.monotonic() + WAIT_S_MAX
    while not holds():
        assert time.monotonic() < deadline_s, f"waited {WAIT_S_MAX:g} s for {what}"
        time.sleep(0.01)


texts = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=40)
lines = st.text(st.characters(exclude_categories=["C", "Z"], include_characters=" "), max_size=40)
folders = lines.map(lambda text: re.sub(r"[/\\%]", "_", text)).filter(lambda text: text not in ("", ".", ".."))
"""Names of folders that sbatch can be told."""

EVIL = "x'y\"z $(touch EVIL) `touch EVIL` \\ ; touch EVIL # & | > EVIL \t é 日本 ${HOME} -e"


@settings(max_examples=30, deadline=None)
@given(texts, st.lists(texts, max_size=2), st.lists(texts, min_size=1, max_size=2), lines, folders)
@example(
    EVIL + "\r\n#SBATCH --wrap=ls\n",
    [EVIL, "a\nexec false"],
    [EVIL],
    EVIL.replace("\t", ""),
    "$(touch EVIL)'",
)
def test_spec_text_does_not_run_in_scripts(
    text: str, setup: list[str], argv: list[str], option: str, folder: str
) -> None:
    assert PLAN.slurm is not None
    slurm = dataclasses.replace(PLAN.slurm, options=(f"--comment={option}", f"--job-name={option}"))
    plan = dataclasses.replace(PLAN, id=text, setup=tuple(setup), argv=tuple(argv), env={"A": text}, slurm=slurm)
    with tempfile.TemporaryDirectory() as place:
        on = Stage(Path(place), 'touch "$ENDED"; exit 0', plan)
        moved = JobDir(on.job.root.rename(Path(place) / f"f{folder}"))
        on.job = moved
        on.batch, on.agent = render(plan, moved, str(on.python))
        directives = [line for line in on.batch.text.splitlines() if line.startswith("#SBATCH")]
        assert len(directives) == 4 and "\r" not in on.batch.text, "sbatch takes no carriage returns"
        assert on.run() == (0, "")
        process = on.start(on.agent.text)
        assert (process.communicate(timeout=WAIT_S_MAX)[0], process.returncode) == ("", 0)
        seen = (Path(place) / "saw").read_bytes().split(b"\0")[:-1]
        words = (moved.bundle, "supervise", moved.root), (moved.bundle, "agent")
        assert seen == [os.fsencode(word) for some in words for word in (on.python, "-I", "-S", *some)]
        there = {f"f{folder}", "python", "spool", "saw", "saw.ending", "saw.count"}
        assert {path.name for path in Path(place).iterdir()} == there
