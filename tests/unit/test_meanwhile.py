"""What a second process makes meanwhile, and what becomes of it when that process cannot."""

from __future__ import annotations

import os
import pickle
import signal
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from orchestrator import bundle, certificate, meanwhile, render
from orchestrator.errors import UserError
from orchestrator.wire.paths import JobDir
from tests.support import jobs

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")]


def where() -> int:
    """Tell which process does it."""
    return os.getpid()


def counts(counted: Path) -> int:
    """Return how often this was done."""
    with counted.open("a") as file:
        file.write("x")
    return counted.stat().st_size


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The processes that were forked."""
    pids: list[int] = []
    fork = os.fork
    monkeypatch.setattr(os, "fork", lambda: pids.append(fork()) or pids[-1])  # type: ignore[func-returns-value]
    yield pids


def test_a_second_process_does_what_it_is_asked_and_is_gone_afterwards(forked: list[int]) -> None:
    with meanwhile.process():
        assert [meanwhile.call(where), meanwhile.call(where)] == forked * 2
    with pytest.raises(ChildProcessError):
        os.waitpid(forked[0], os.WNOHANG)
    assert meanwhile.call(where) == os.getpid()


def test_what_was_done_ahead_is_given_out_once(tmp_path: Path, forked: list[int]) -> None:
    counted = tmp_path / "counted"
    with meanwhile.process((counts, counted)):
        while not counted.exists():
            time.sleep(0.005)
        assert [meanwhile.call(counts, counted) for _ in range(3)] == [1, 2, 3]
        assert meanwhile.call(where) == forked[0]


def test_it_makes_what_a_submit_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan, job = jobs.plan(backend="slurm"), JobDir.at(jobs.ROOT)
    zipped, scripts = bundle.build(tmp_path), render.render(plan, job, "python3")
    with meanwhile.process((certificate.new,), (bundle.build, tmp_path), (render.load,)):
        for module, name in (
            (certificate, "CERTIFICATE_YEARS"),
            (bundle, "contents"),
            (render, "environment"),
        ):
            monkeypatch.delattr(module, name)  # nothing of it can be made here any more
        pairs = [meanwhile.call(certificate.new), meanwhile.call(certificate.new)]
        assert meanwhile.call(bundle.build, tmp_path) == zipped
        assert meanwhile.call(render.render, plan, job, "python3") == scripts
    assert pairs[0] != pairs[1]
    for public, key in pairs:
        (tmp_path / "both.pem").write_bytes(public + key)
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(tmp_path / "both.pem")


def refuses() -> None:
    """Refuse, as a render does."""
    raise UserError("no", "here", "leave it")


def test_what_it_refuses_is_refused_here_and_it_goes_on(forked: list[int]) -> None:
    with meanwhile.process((refuses,)):
        for _ in range(2):
            with pytest.raises(UserError, match="no"):
                meanwhile.call(refuses)
        assert meanwhile.call(where) == forked[0]


def test_what_cannot_be_told_is_done_here(forked: list[int]) -> None:
    with meanwhile.process():
        assert meanwhile.call(lambda: where()) == os.getpid()
        assert meanwhile.call(where) == os.getpid()  # it may have half an answer on the line


OURS = os.getpid()


def is_silent() -> int:
    """Say nothing, where this is the second process."""
    if os.getpid() != OURS:
        time.sleep(60)
    return os.getpid()


def dies() -> int:
    """Be killed, where this is the second process."""
    if os.getpid() != OURS:
        os.kill(os.getpid(), signal.SIGKILL)
    return os.getpid()


@pytest.mark.parametrize("broken", [is_silent, dies])
@pytest.mark.parametrize("is_ahead", [True, False])
def test_a_process_that_does_not_answer_costs_only_time(
    broken: object, is_ahead: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert callable(broken)
    monkeypatch.setattr(meanwhile, "ANSWER_S_MAX", 0.5)
    start_s = time.monotonic()
    with meanwhile.process(*[(broken,)] * is_ahead):
        assert meanwhile.call(broken) == meanwhile.call(where) == os.getpid()
    assert time.monotonic() - start_s < 30


def test_half_an_answer_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meanwhile, "ANSWER_S_MAX", 0.5)
    whole = pickle.dumps

    def half(told: object) -> bytes:
        data = whole(told)
        return data if os.getpid() == OURS else data[: len(data) // 2]

    monkeypatch.setattr(pickle, "dumps", half)
    with meanwhile.process((where,)):
        assert [meanwhile.call(where), meanwhile.call(where)] == [os.getpid()] * 2


def test_nobody_waits_where_children_are_nobodys() -> None:
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        with meanwhile.process((where,)):
            assert meanwhile.call(where) != os.getpid()
    finally:
        signal.signal(signal.SIGCHLD, before)


def test_without_a_second_process_all_is_done_here(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused() -> int:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(os, "fork", refused)
    with meanwhile.process((where,)):
        assert meanwhile.call(where) == os.getpid()


def test_what_goes_wrong_beside_it_is_raised_and_ends_it(forked: list[int]) -> None:
    with pytest.raises(OSError, match="full"), meanwhile.process((time.sleep, 60)):
        raise OSError("full")
    with pytest.raises(ChildProcessError):
        os.waitpid(forked[0], os.WNOHANG)


def test_a_file_that_it_writes_is_not_left_half_done(tmp_path: Path, forked: list[int]) -> None:
    with meanwhile.process((writes, tmp_path)):
        while not list(tmp_path.iterdir()):
            time.sleep(0.005)
    assert not list(tmp_path.iterdir())


def writes(folder: Path) -> None:
    """Take a minute for a file, and take it away when it is not done."""
    part = folder / "part"
    try:
        part.write_text("x")
        time.sleep(60)
    finally:
        part.unlink()


def test_it_ends_when_the_first_process_is_killed(tmp_path: Path) -> None:
    code = (
        "import os, time\n"
        "from orchestrator import meanwhile\n"
        "with meanwhile.process():\n"
        "    print(meanwhile.call(os.getpid), flush=True)\n"
        "    os.kill(os.getpid(), 9)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    second, until_s = Path(f"/proc/{int(done.stdout)}"), time.monotonic() + 30
    while second.exists() and time.monotonic() < until_s:
        time.sleep(0.01)
    assert not second.exists() or "Z" in (second / "stat").read_text().rpartition(")")[2]


def test_a_refused_job_file_says_only_that(tmp_path: Path) -> None:
    argv = [sys.executable, "-m", "orchestrator.cli", "submit", str(tmp_path / "none.yaml")]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert "none.yaml: no such file" in done.stderr and done.stderr.count("\n") == 1
