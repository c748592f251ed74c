"""A job's private files: readable by their owner alone, and each secret in one of them only."""

from __future__ import annotations

import io
import json
import stat
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from orchestrator import __main__ as entry
from orchestrator.agent.bootstrap import job_folder
from orchestrator.agent.process import agent_monitor
from orchestrator.core import codec
from orchestrator.core.errors import ClusterError
from orchestrator.core.jobdir import durable
from orchestrator.core.jobdir.layout import JobDir
from orchestrator.submission import credentials
from orchestrator.supervisor import supervisor_watchdog, translation
from tests.support import fake_host, jobs
from tests.support.fake_backend import folder_of


def test_private_files_are_private_and_secrets_separate(tmp_path: Path) -> None:
    """Private files are private, and secrets are kept apart from the environment."""
    environ = {"HF_TOKEN": "hf_0123456789abcdef", "HF_HOME": "/data/hf", "RANK": "7"}
    folder = tmp_path / "secrets"
    credentials.write_credentials(folder, jobs.plan(secrets=["HF_TOKEN"]), environ, "https://h.example/t0ken")
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o600}
    assert json.loads((folder / "secrets.json").read_text()) == {"HF_TOKEN": environ["HF_TOKEN"]}
    assert (folder / "webhook").read_text() == "https://h.example/t0ken"
    assert json.loads((folder / "environment.json").read_text()) == {"HF_HOME": "/data/hf"}


@pytest.fixture
def streams(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Give back the standard streams, which whatever may meet a full disk takes for itself."""
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, getattr(sys, name))


TORN: dict[str, Callable[[str], str]] = {
    "empty": lambda text: "",
    "torn": lambda text: text[: len(text) // 2],
    "other": lambda text: text.replace("\n", "") + "\0",
}


@pytest.mark.parametrize("damage", TORN)
@pytest.mark.parametrize("name", ["token", "certificate.pem", "key.pem", "environment.json", "secrets.json", "missing"])
def test_supervisor_refuses_damaged_secrets_in_one_line(
    tmp_path: Path, name: str, damage: str, streams: None, capfd: pytest.CaptureFixture[str]
) -> None:
    """No supervisor works with damaged secrets, and it says so in one line."""
    job, _ = folder_of(tmp_path)
    if name == "missing":
        (job.secrets / "token").unlink()
    else:
        path = job.secrets / name
        path.write_text(TORN[damage](path.read_text()))
    with pytest.raises(ClusterError) as told:
        translation.read_secrets(job)
    assert told.value.fix and told.value.where.startswith(str(job.secrets))
    assert entry.main(["supervise", str(job.root)]) == supervisor_watchdog.EXIT_UNFIT_FOLDER
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith(f"{job.secrets}/") and "submit it again" in line


@pytest.mark.parametrize("name", ["certificate.pem", "key.pem"])
def test_damaged_certificate_is_reported_in_one_line(
    tmp_path: Path, name: str, streams: None, capfd: pytest.CaptureFixture[str]
) -> None:
    """A certificate or key with another text in its frame is reported in one line."""
    job, _ = folder_of(tmp_path)
    first, *_, last = (job.secrets / name).read_text().splitlines()
    (job.secrets / name).write_text(f"{first}\nAAAA\n{last}\n")
    assert entry.main(["supervise", str(job.root)]) == supervisor_watchdog.EXIT_UNFIT_FOLDER
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith(f"{job.secrets}/certificate.pem: ") and "submit it again" in line


@pytest.mark.parametrize("token", ["", "t" * 63, "F" * 64, "f" * 64 + "\n"])
def test_agent_refuses_empty_or_torn_token(
    tmp_path: Path,
    token: str,
    streams: None,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    config = fake_host.config(root=str(tmp_path), token=token)
    line = io.TextIOWrapper(io.BytesIO(codec.dumps(config).encode() + b"\n"))
    monkeypatch.setattr(sys, "stdin", line)
    assert agent_monitor.main(lambda _, pulse: pytest.fail("an agent was started"), is_launched=True) == 1
    assert "its token is empty or incomplete" in capfd.readouterr().out
    job = JobDir(tmp_path)
    job.secrets.mkdir()
    (job.secrets / "token").write_text(token)
    assert not job_folder.is_submit_folder(job, token), "an empty folder would pass for the job's own"


def test_secrets_are_on_disk_before_job_begins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[Path] = []
    monkeypatch.setattr(durable, "sync_folder", synced.append)
    monkeypatch.setattr(credentials, "sync_folder", synced.append)
    credentials.write_credentials(tmp_path / "secrets", jobs.plan(secrets=[]), {}, None)
    assert synced == [*[tmp_path / "secrets"] * 5, tmp_path]


def test_agents_have_a_certificate_of_their_own_for_checkpoints_in_memory(tmp_path: Path) -> None:
    """The agents' own certificate is made once, at submit or by the resume that turns memory on."""
    folder, in_memory = tmp_path / "secrets", jobs.plan(checkpoint={"keep": 3, "memory": "64G"})
    credentials.write_credentials(folder, jobs.plan(), {}, None)
    assert not list(folder.glob("peer*"))
    credentials.write_peer_credentials(folder, in_memory)
    made = {path.name: path.read_bytes() for path in folder.glob("peer*")}
    assert sorted(made) == ["peer_certificate.pem", "peer_key.pem"]
    assert made["peer_key.pem"] != (folder / "key.pem").read_bytes()
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o600}
    credentials.write_peer_credentials(folder, in_memory)
    assert {path.name: path.read_bytes() for path in folder.glob("peer*")} == made
    credentials.write_credentials(tmp_path / "another", in_memory, {}, None)
    assert len(list((tmp_path / "another").glob("peer*"))) == 2
