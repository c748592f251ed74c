"""A certificate made ahead by another process, and what becomes of it when that process cannot."""

from __future__ import annotations

import os
import signal
import ssl
import subprocess
import sys
import time
from pathlib import Path

import pytest

from orchestrator import certificate


def loads(made: tuple[bytes, bytes], folder: Path) -> bool:
    """Tell whether TLS takes the pair: the key is that of the certificate."""
    (folder / "both.pem").write_bytes(b"".join(made))
    ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(folder / "both.pem")
    return True


def test_another_process_makes_it_ahead_and_is_gone_afterwards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forked: list[int] = []
    fork = os.fork
    monkeypatch.setattr(os, "fork", lambda: forked.append(fork()) or forked[-1])  # type: ignore[func-returns-value]
    with certificate.ahead():
        monkeypatch.setattr(certificate, "_made", lambda: pytest.fail("made here"))
        assert loads(certificate.new(), tmp_path)
    (pid,) = forked
    with pytest.raises(ChildProcessError):
        os.waitpid(pid, os.WNOHANG)


def test_nobody_waits_where_children_are_nobodys(tmp_path: Path) -> None:
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        with certificate.ahead():
            assert loads(certificate.new(), tmp_path)
            time.sleep(0.2)  # it is gone by itself
    finally:
        signal.signal(signal.SIGCHLD, before)


def test_a_second_one_is_another(tmp_path: Path) -> None:
    with certificate.ahead():
        first, second = certificate.new(), certificate.new()
    assert loads(first, tmp_path) and loads(second, tmp_path) and first != second


@pytest.mark.parametrize("broken", ["dies", "is silent", "says half"])
def test_a_process_that_makes_none_costs_only_time(
    broken: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = os.getpid()
    made = certificate._made

    def fails() -> tuple[bytes, bytes]:
        if os.getpid() == ours:
            return made()
        if broken == "is silent":
            time.sleep(60)
        if broken == "dies":
            raise RuntimeError
        return (b"-----BEGIN", b"\0")

    monkeypatch.setattr(certificate, "AHEAD_S_MAX", 0.5)
    monkeypatch.setattr(certificate, "_made", fails)
    with certificate.ahead():
        assert loads(certificate.new(), tmp_path)


def test_without_a_second_process_it_is_made_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused() -> int:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(os, "fork", refused)
    with certificate.ahead():
        assert loads(certificate.new(), tmp_path)


def test_a_refused_job_file_says_only_that(tmp_path: Path) -> None:
    argv = [sys.executable, "-m", "orchestrator.cli", "submit", str(tmp_path / "none.yaml")]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert "none.yaml: no such file" in done.stderr and done.stderr.count("\n") == 1
