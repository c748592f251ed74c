"""Does a job come to a host, whatever that host is like, and is nothing left where it does not? Real scripts, real processes."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from orchestrator.backends.api import LaunchError
from orchestrator.backends.ssh.bootstrap_session import Clocks
from orchestrator.backends.ssh.launch import (
    CodeArchive,
    LaunchedAgent,
    Launcher,
    launch_agent,
    redirect_agent,
)
from orchestrator.core.host import procfs
from orchestrator.core.jobdir import locks
from orchestrator.core.observations import Retryable
from orchestrator.core.wire import bootstrap as w
from orchestrator.core.wire.agent_config import LeaseNeeds
from tests.support import fake_host, jobs
from tests.support.fake_host import FakeHost

pytestmark = pytest.mark.slow

OLD_PYTHON = '#!/bin/sh\necho "Python 3.8.10"\n'


# It lands


def test_agent_starts_with_code_and_outlives_connection(host: FakeHost, code: CodeArchive) -> None:
    launched = launch_agent(host, fake_host.launch(code))
    assert host.processes[0].wait(fake_host.GONE_S_MAX) == 0
    assert (launched.root, launched.ships, launched.was_up) == (str(host.job.root), True, False)
    assert {name: (host.job.code / name).read_bytes() for name in fake_host.FILES} == fake_host.FILES
    assert fake_host.sha256(host.job.bundle) == fake_host.launcher().blob.sha256
    assert launched.pid in fake_host.keepers(host.home)
    stat = procfs.stat(launched.pid)
    assert stat is not None and stat.session == launched.pid
    words = Path(f"/proc/{launched.pid}/cmdline").read_text().rstrip("\0").split("\0")
    assert words[1:] == ["-I", "-S", "-X", "utf8", str(host.job.bundle), "agent", "launched"]


def test_only_own_folder_is_modified(host: FakeHost, code: CodeArchive) -> None:
    launch_agent(host, fake_host.launch(code))
    assert [str(path.relative_to(host.home)) for path in host.home.rglob("*") if host.job.root not in path.parents] == [
        ".orch", ".orch/jobs", f".orch/jobs/{jobs.ID}",
    ]  # fmt: skip
    left = {path.name for path in host.job.root.iterdir()}
    assert left <= {
        "orch.pyz", "code", "code.tar.gz", "launch.lock", "nodes", "logs", "checkpoints", "evidence", "checkpoints.lock",
    }  # fmt: skip


def test_folder_is_not_writable_under_any_umask(host: FakeHost, code: CodeArchive) -> None:
    """No other user can write into the folder, whatever the umask is."""
    before = os.umask(0)
    try:
        launch_agent(host, fake_host.launch(code))
    finally:
        os.umask(before)
    assert host.job.root.stat().st_mode & 0o777 == 0o700, "what others' programs copy into it has any mode"
    made = []
    for path in (host.home / ".orch").rglob("*"):
        with contextlib.suppress(FileNotFoundError):  # the agent writes
            made += [path] if path.lstat().st_mode & 0o022 else []
    assert made == [] and (host.job.code / "train.py").exists()


def test_second_launch_finds_living_agent(host: FakeHost, code: CodeArchive) -> None:
    """A second launch finds the agent alive and starts none."""
    first, second = launch_agent(host, fake_host.launch(code)), launch_agent(host, fake_host.launch(code))
    assert (second.was_up, second.pid) == (True, first.pid)


def test_files_already_present_are_not_sent(host: FakeHost, code: CodeArchive) -> None:
    launch_agent(host, fake_host.launch(code))
    assert _sent_bytes(host) > len(fake_host.BUNDLE) + code.blob.size_bytes
    launch_agent(host, fake_host.launch(code))
    assert _sent_bytes(host) < 20_000
    launch_agent(host, fake_host.launch(code, fake_host.config(root="~/.orch/jobs/another")))
    assert _sent_bytes(host) < 20_000, "another job's folder has the same bundle and the same code"
    assert (host.jobs / "another" / "code.tar.gz").stat().st_nlink == 2


def _sent_bytes(host: FakeHost) -> int:
    """Return how much was sent since the last look."""
    sent_bytes = sum(map(len, host.sent))
    host.sent.clear()
    return sent_bytes


def test_damaged_bundle_on_disk_is_replaced(host: FakeHost, code: CodeArchive) -> None:
    host.job.root.mkdir(parents=True)
    data = bytearray(fake_host.BUNDLE)
    data[1000] ^= 1
    host.job.bundle.write_bytes(data)
    launch_agent(host, fake_host.launch(code))
    assert fake_host.sha256(host.job.bundle) == fake_host.launcher().blob.sha256


def test_leftovers_of_killed_launch_are_harmless(host: FakeHost, code: CodeArchive) -> None:
    (host.job.root / ".code.part" / "junk").mkdir(parents=True)
    (host.job.root / ".code.tar.gz.part").write_bytes(b"half")
    (host.job.root / "code.tar.gz").write_bytes(b"torn")
    launch_agent(host, fake_host.launch(code))
    assert sorted(path.name for path in host.job.code.iterdir()) == ["pkg", "train.py"]


def test_jobs_own_folder_is_recognised_and_nothing_copied(host: FakeHost, code: CodeArchive) -> None:
    host.job.secrets.mkdir(parents=True)
    (host.job.secrets / "token").write_text(fake_host.config().token)
    host.job.bundle.write_bytes(fake_host.BUNDLE)
    host.job.code.mkdir()
    launched = launch_agent(host, fake_host.launch(code))
    assert not launched.ships and "nothing is copied" in launched.notes[0]
    assert not (host.job.root / "code.tar.gz").exists() and list(host.job.code.iterdir()) == []


def test_folder_of_job_with_secrets_is_not_own(host: FakeHost, code: CodeArchive) -> None:
    host.job.secrets.mkdir(parents=True)
    (host.job.secrets / "token").write_text("f" * 64)
    assert launch_agent(host, fake_host.launch(code)).ships


def test_hosts_sharing_home_launch_concurrently(host: FakeHost, code: CodeArchive) -> None:
    """Several hosts that share one home folder launch at once."""
    launched = _at_once(
        [partial(launch_agent, host, fake_host.launch(code, fake_host.config(f"host-{n}"))) for n in range(3)]
    )
    assert len({one.pid for one in launched}) == 3 and not any(one.was_up for one in launched)
    assert (host.job.code / "pkg/deep/mod.py").read_bytes() == fake_host.FILES["pkg/deep/mod.py"]


def test_two_concurrent_launches_of_node_leave_one_agent(host: FakeHost, code: CodeArchive) -> None:
    launched = _at_once([lambda: launch_agent(host, fake_host.launch(code))] * 2)
    assert sorted(one.was_up for one in launched) == [False, True]
    alone = next(one for one in launched if not one.was_up)
    assert alone.pid in fake_host.keepers(host.home)


def _at_once(deeds: list[Callable[[], LaunchedAgent]]) -> list[LaunchedAgent]:
    launched: list[LaunchedAgent] = []
    threads = [threading.Thread(target=lambda one: launched.append(one()), args=(deed,)) for deed in deeds]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(launched) == len(deeds)
    return launched


# Shells and Pythons of all kinds


@pytest.mark.parametrize(
    "rc", ["echo Welcome to the lab; echo warning >&2", "printf 'no newline at the end'", "echo; echo '{}'"]
)
def test_noisy_shell_is_tolerated_and_noted(rc: str, host: FakeHost, code: CodeArchive) -> None:
    host.rc = rc
    launched = launch_agent(host, fake_host.launch(code))
    assert "its login shell prints on its own" in launched.notes[0]


def test_shell_ending_early_is_reported_with_its_output(host: FakeHost, code: CodeArchive) -> None:
    host.rc = "echo 'This account is closed'; exit 7"
    failure = fake_host.failure(host, code)
    assert (failure.stage, failure.retryable) == ("shell", Retryable.PERMANENT)
    assert "code 7" in failure.reason and "This account is closed" in failure.reason
    assert "~/.bashrc" in failure.fix


def test_old_python_first_in_path_is_skipped(host: FakeHost, code: CodeArchive, tmp_path: Path) -> None:
    fake_host.program(tmp_path / "old", "python3", OLD_PYTHON)
    host.env["PATH"] = f"{tmp_path / 'old'}:{os.environ['PATH']}"
    assert launch_agent(host, fake_host.launch(code)).pid


def test_submitters_python_is_tried_first(host: FakeHost, code: CodeArchive, tmp_path: Path) -> None:
    mine = tmp_path / 'it\'s "my" $(python)'
    mine.symlink_to(Path(sys.executable).resolve())
    launched = launch_agent(host, fake_host.launch(code, of=fake_host.launcher(str(mine))))
    assert Path(f"/proc/{launched.pid}/cmdline").read_text().startswith(f"{mine}\0")


def test_host_without_suitable_python_lists_its_versions(host: FakeHost, code: CodeArchive, tmp_path: Path) -> None:
    """A host without a suitable Python reports which ones it has."""
    old = fake_host.program(tmp_path / "o \"l' d", "python3", OLD_PYTHON)
    failure = fake_host.failure(host, code, of=_without_pythons(host, tmp_path, old.parent))
    assert (failure.stage, failure.retryable) == ("python", Retryable.PERMANENT)
    assert f"{old} (Python 3.8.10)" in failure.reason and "3.10" in failure.reason
    assert "install" in failure.fix


def test_host_without_python_is_reported(host: FakeHost, code: CodeArchive, tmp_path: Path) -> None:
    assert fake_host.failure(host, code, of=_without_pythons(host, tmp_path)).reason == "there is no Python"


def _without_pythons(host: FakeHost, folder: Path, *more: Path) -> Launcher:
    """Hide this machine's Pythons from the host."""
    tools = folder / "tools"
    tools.mkdir()
    for name in ("sh", "dd", "tr", "sed", "cut"):
        found = next(Path(place, name) for place in ("/usr/bin", "/bin") if Path(place, name).exists())
        (tools / name).symlink_to(found)
    host.env["PATH"] = ":".join(map(str, (*more, tools)))
    return Launcher(
        fake_host.launcher().script.replace("/usr/", "/nowhere/").replace("/opt/", "/nowhere/"),
        fake_host.BUNDLE,
    )


def test_clock_skew_is_noted(host: FakeHost, code: CodeArchive) -> None:
    """A clock that is far off is noted."""
    clocks = Clocks(wall=lambda: time.time() - 3600)
    launched = launch_agent(host, fake_host.launch(code), clocks=clocks)
    assert "its clock is 3600 s ahead" in launched.notes


# Leases


def test_host_with_busy_gpus_names_holder_then_leases(host: FakeHost, code: CodeArchive, tmp_path: Path) -> None:
    _gpus(host, tmp_path, 2)
    both, one = LeaseNeeds(2, 0, 0), LeaseNeeds(1, 0, 0)
    first = launch_agent(host, fake_host.launch(code, fake_host.config(needs=both)))
    assert first.gpus == ("0", "1")
    other = fake_host.config(needs=one, job="other", root="~/.orch/jobs/other")
    failure = fake_host.failure(host, code, other)
    assert (failure.stage, failure.retryable) == ("lease", Retryable.BUSY)
    assert f"GPUs 0, 1 held by job {jobs.ID}" in failure.reason and f"pid {first.pid}" in failure.reason
    assert launch_agent(host, fake_host.launch(code, fake_host.config(needs=both))).gpus == ("0", "1"), (
        "its own agent is up"
    )
    fake_host.end_all(host.home)
    assert launch_agent(host, fake_host.launch(code, other)).gpus == ("0",)


def test_host_with_too_few_gpus_is_refused(host: FakeHost, code: CodeArchive, tmp_path: Path) -> None:
    told = fake_host.config(needs=LeaseNeeds(8, 0, 0))
    _gpus(host, tmp_path, 2)
    failure = fake_host.failure(host, code, told)
    assert (failure.stage, failure.retryable) == ("lease", Retryable.PERMANENT)
    assert "8 GPUs wanted, the host has 2" in failure.reason
    fake_host.program(
        tmp_path / "gpu", "nvidia-smi", "#!/bin/sh\necho 'NVML: Driver/library version mismatch'; exit 18\n"
    )
    assert "Driver/library version mismatch" in fake_host.failure(host, code, told).reason
    fake_host.wait_gone(fake_host.keepers(host.home))


def _gpus(host: FakeHost, folder: Path, count: int) -> None:
    lines = [f"GPU {n}: NVIDIA H200 (UUID: GPU-{folder.name}-{os.getpid()}-{n})" for n in range(count)]
    fake_host.program(folder / "gpu", "nvidia-smi", "#!/bin/sh\ncat <<END\n" + "\n".join(lines) + "\nEND\n")
    host.env["PATH"] = f"{folder / 'gpu'}:{os.environ['PATH']}"


# No half-started job


def test_dying_agent_monitor_is_reported_with_last_output(host: FakeHost, code: CodeArchive) -> None:
    """An agent monitor that dies at once is reported with its last output."""
    (host.job.node("node-0") / "agent.lock").mkdir(parents=True)
    failure = fake_host.failure(host, code)
    assert failure.stage == "agent" and "Is a directory" in failure.reason


@pytest.mark.parametrize("words_heard", range(10))
def test_launcher_vanishing_anywhere_leaves_no_half_started_job(
    words_heard: int, host: FakeHost, code: CodeArchive
) -> None:
    """The line breaks after so many lines: an agent is there only if it was told to go."""
    host.breaks_after = words_heard
    try:
        launch_agent(host, fake_host.launch(code))
        went = True
    except LaunchError as err:
        assert "broke" in err.reason
        went = w.GO + b"\n" in host.sent
    assert host.processes[0].wait(fake_host.GONE_S_MAX) is not None
    host.breaks_after = None
    if went:
        assert redirect_agent(host, fake_host.launcher(), fake_host.config()).alive
    else:
        fake_host.wait_gone(fake_host.keepers(host.home))
        assert not locks.is_held(host.job.node("node-0") / "agent.lock")
    assert launch_agent(host, fake_host.launch(code)).was_up is went, "and the next launch finds all in order"
