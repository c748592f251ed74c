"""Does the command line do what it says, with real processes, as a person or a program types it?"""

from __future__ import annotations

import json
import os
import pty
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import orchestrator
from orchestrator.core.host import procfs
from tests.support.local import Desk, Sight, wait_until

RUN_S_MAX = 120.0
SECRET = "hf_S3cr3t-$(x)-'q'"
COUNT = "import time\nfor n in range(1000):\n    print('line', n, flush=True)\n    time.sleep(0.05)\n"
Type = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def orch(desk: Desk) -> Type:
    """Return the command line as a function; the jobs it submits are cleared up with the desk's."""

    def typed(*words: str, **environ: str) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            _argv(*words), cwd=desk.folder, env={**desk.environ, **environ}, capture_output=True, text=True,
            timeout=RUN_S_MAX, check=False,
        )  # fmt: skip
        _adopt(desk)
        return done

    return typed


def _argv(*words: str) -> list[str]:
    return [sys.executable, "-m", "orchestrator.cli", *words]


def _adopt(desk: Desk) -> None:
    """Put the jobs of the home that the desk does not know yet on it."""
    jobs = Path(desk.environ["ORCH_HOME"]) / "jobs"
    known = {sight.job.id for sight in desk.jobs}
    for path in sorted(jobs.iterdir()) if jobs.is_dir() else []:
        if path.name not in known and not path.name.startswith("."):
            desk.jobs.append(Sight(orchestrator.find(path.name, desk.environ), desk.environ))


def _spec(desk: Desk, script: str, **fields: Any) -> str:
    (desk.folder / "train.py").write_text(script)
    spec = {"name": "t", "procs_per_node": 2, "entrypoint": "train.py", "restart": {"max": 0}, **fields}
    (desk.folder / "job.yaml").write_text(json.dumps(spec))  # JSON is YAML
    return "job.yaml"


def test_submit_json_is_one_object(desk: Desk, orch: Type) -> None:
    """Submit with --json prints one object, and status with --json shows the end."""
    done = orch("submit", _spec(desk, "print('hi')"), "--json")
    told = json.loads(done.stdout)
    assert (list(told), done.returncode) == (["id", "name", "dir", "state", "new"], 0)
    assert (told["name"], Path(told["dir"]).is_dir()) == ("t", True)
    desk.jobs[0].wait()
    (status,) = json.loads(orch("status", "--json").stdout)
    assert (status["id"], status["state"], status["world_size"]) == (told["id"], "SUCCEEDED", 2)


def test_follow_exits_when_the_job_ends(desk: Desk, orch: Type) -> None:
    good = orch("submit", _spec(desk, "import os; print('rank', os.environ['RANK'])"), "--follow")
    assert good.returncode == 0
    assert "[rank 0] rank 0" in good.stdout and "SUCCEEDED  attempt 1" in good.stdout
    bad = orch("submit", _spec(desk, "raise RuntimeError('no luck')"), "--follow")
    assert bad.returncode == 1
    assert "FAILED  attempt 1" in bad.stdout and "see why: orch why t" in bad.stderr
    why = orch("why")
    assert "RuntimeError: no luck at train.py:1" in why.stdout and "orch resume t-" in why.stdout


def test_follow_json_prints_one_line_per_change(desk: Desk, orch: Type) -> None:
    done = orch("submit", _spec(desk, "print('hi')"), "--follow", "--json")
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert done.returncode == 0
    assert list(lines[0]) == ["id", "name", "dir", "state", "new"]
    assert lines[-1]["state"] == "SUCCEEDED" and {line["id"] for line in lines} == {lines[0]["id"]}


def test_follow_ctrl_c_keeps_job_with_reattach_hint(desk: Desk) -> None:
    """Ctrl-C while following keeps the job running and shows how to reattach."""
    argv = _argv("submit", _spec(desk, COUNT), "--follow")
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(desk.folder)
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # whoever runs the tests in the background has it ignored
        os.execve(argv[0], argv, {**desk.environ, "TERM": "xterm"})
    seen = _read_until(terminal, b"line 5")
    os.write(terminal, b"\x03")
    seen += _read_until(terminal, b"orch cancel t\r\n")
    _, status = os.waitpid(pid, 0)
    os.close(terminal)
    _adopt(desk)
    assert os.waitstatus_to_exitcode(status) == 130
    assert b"keeps running" in seen and b"orch logs -f t\r\n" in seen and b"Traceback" not in seen
    sight = desk.jobs[0]
    ranks = sight.rank_procs()
    assert len(ranks) == 2 and all(procfs.is_alive(proc) for proc in ranks.values())
    assert os.getsid(sight.supervisor().pid) != os.getsid(0)
    sight.job.cancel()
    assert sight.wait()["state"] == "CANCELLED"


def _read_until(terminal: int, word: bytes) -> bytes:
    seen = b""
    deadline_s = time.monotonic() + RUN_S_MAX
    while word not in seen and time.monotonic() < deadline_s:
        try:
            seen += os.read(terminal, 65536)
        except OSError:
            break
    assert word in seen, seen.decode(errors="replace")[-2000:]
    return seen


def test_closed_pipe_of_follow_is_not_success(desk: Desk) -> None:
    """A reader that closes the pipe of a followed job does not count as having seen its success."""
    follow = subprocess.Popen(
        _argv("submit", _spec(desk, COUNT), "--follow"), cwd=desk.folder, env=desk.environ,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert follow.stdout is not None and follow.stdout.readline().startswith("submitted t-")
    follow.stdout.close()
    assert follow.stderr is not None and "Traceback" not in follow.stderr.read()
    assert follow.wait(RUN_S_MAX) == 130
    _adopt(desk)
    assert desk.jobs[0].job.status()["state"] in ("STARTING", "RUNNING")
    desk.jobs[0].job.cancel()
    assert desk.jobs[0].wait()["state"] == "CANCELLED"


def test_closed_pipe_of_output_is_no_error(desk: Desk, orch: Type) -> None:
    """A reader that closes the pipe early is not an error."""
    orch("submit", _spec(desk, "for n in range(50000): print('a line of a long log', n)"))
    desk.jobs[0].wait()
    done = subprocess.run(
        f"{sys.executable} -m orchestrator.cli logs | head -1", shell=True, cwd=desk.folder, env=desk.environ,
        capture_output=True, text=True, timeout=RUN_S_MAX, check=False,
    )  # fmt: skip
    assert (done.stderr, done.stdout.count("\n")) == ("", 1)


def test_secrets_are_private_from_the_first_byte(desk: Desk, orch: Type) -> None:
    """Secrets are private from the first byte and are stored nowhere else."""
    script = "import os, time\nprint('token is', os.environ['HF_TOKEN'], flush=True)\ntime.sleep(600)\n"
    done = orch("submit", _spec(desk, script, secrets=["HF_TOKEN"]), HF_TOKEN=SECRET)
    assert done.returncode == 0, done.stderr
    sight = desk.jobs[0]
    sight.wait_for_line("token is " + SECRET)
    folder = sight.job.folder.secrets
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o600}
    assert all(SECRET.encode() not in command for command in sight.commands())
    sight.job.cancel()
    sight.wait()
    wait_until(sight.job.folder.ended.exists, "the supervisor's last word: files come and go before it")
    allowed = {folder / "secrets.json", *sight.job.folder.attempt_logs(1).glob("rank-*.log")}
    holders = [path for path in sight.root.rglob("*") if path.is_file() and SECRET.encode() in path.read_bytes()]
    assert set(holders) <= allowed
    for words in (["logs"], ["why", "--json"], ["status", "--json"]):
        assert SECRET not in orch(*words).stdout
    assert "token is ***" in orch("logs").stdout


def test_resume_applies_set_on_top_of_submit_options(desk: Desk, orch: Type) -> None:
    """An ended job resumes with what --set changes and with what the submit had set."""
    script = "import sys, os; print('args', sys.argv[1:], os.environ.get('MODE'), os.environ['HF_TOKEN'])"
    spec = _spec(desk, script, secrets=["HF_TOKEN"])
    first = orch("submit", spec, "--set", "env.MODE=fast", "--follow", HF_TOKEN="12")
    assert first.returncode == 0, first.stderr
    (desk.folder / "train.py").write_text("print('edited after submit')")
    again = orch("resume", "--set", "entrypoint=train.py --more", "--follow")
    assert again.returncode == 0, again.stderr
    assert "args ['--more'] fast 12" in desk.jobs[0].log(0, 2)


def test_failed_setup_shows_output_of_its_nodes(desk: Desk, orch: Type) -> None:
    """A job that fails in setup shows what its nodes printed."""
    spec = _spec(desk, "print('never')", setup=["echo getting ready", "cat /no/such/file"])
    assert orch("submit", spec, "--follow").returncode == 1
    logs = orch("logs")
    assert "no rank has printed anything" in logs.stderr
    assert "getting ready" in logs.stdout and "/no/such/file" in logs.stdout
    assert "/no/such/file" in orch("logs", "--node", "node-0").stdout
    assert "--node node-0 --attempt 1" in orch("why").stdout


def test_any_command_revives_supervisor_and_second_cancel_fails(desk: Desk, orch: Type) -> None:
    """Any command replaces a dead supervisor, and a second cancel is a mistake."""
    orch("submit", _spec(desk, COUNT))
    sight = desk.jobs[0]
    sight.wait_for_line("line 3")
    sight.wait_for_state("RUNNING")
    sight.kill_supervisor()
    seen = orch("status", "--json")
    assert "a new one has taken over" in seen.stderr
    assert json.loads(seen.stdout)[0]["state"] == "RUNNING"
    done = orch("cancel")
    assert (done.returncode, done.stdout) == (0, f"{sight.job.id} CANCELLED\n")
    assert orch("cancel").returncode == 2
    assert "stopped by orch cancel" in orch("why").stdout


def test_jobs_and_verbs_are_completed_by_the_shell(desk: Desk, orch: Type) -> None:
    orch("submit", _spec(desk, "print('hi')", name="gpt-2"))
    sight = desk.jobs[0]
    sight.wait()
    ask = {"_ORCH_COMPLETE": "bash_complete"}
    assert "plain,status" in orch(**ask, COMP_WORDS="orch st", COMP_CWORD="1").stdout
    offered = orch(**ask, COMP_WORDS="orch logs gp", COMP_CWORD="2").stdout.split()
    assert offered == ["plain,gpt-2", f"plain,{sight.job.id}"]
    assert "complete" in orch(_ORCH_COMPLETE="bash_source").stdout


@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("mount"), reason="making a tiny disk needs root")
def test_full_disk_is_reported_without_half_a_job(desk: Desk, orch: Type) -> None:
    """A full disk is reported, and no half-made job is left."""
    home = Path(desk.environ["ORCH_HOME"])
    home.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", home],
        capture_output=True,
        timeout=30,
        check=False,
    )
    if made.returncode:
        pytest.skip("no tmpfs can be mounted here")
    try:
        done = orch("submit", _spec(desk, "print('hi')" + "#" * 300_000))
        assert done.returncode == 3 and "the job folder cannot be made" in done.stderr
        assert "No space left" in done.stderr and "Traceback" not in done.stderr
        assert list((home / "jobs").iterdir()) == []
    finally:
        subprocess.run(["umount", home], timeout=30, check=True)
