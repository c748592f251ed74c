"""Does every verb say of a damaged job folder what is damaged, whatever file of it holds whatever?

A corrupter changes one file of one job in a home of three, and every verb is run in this process; no supervisor is started.
Any exception that escapes fails the test. `ORCH_FUZZ` multiplies how much is tried.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from orchestrator.core.checkpoints.checkpoint import (
    START_PREFIX,
    CheckpointFile,
    CheckpointState,
    CompletionReason,
    Content,
    FileLocation,
    Format,
    GroupReading,
    HostPart,
    RequiredFile,
)
from orchestrator.core.checkpoints.ledger import Ledger
from orchestrator.core.jobdir import home, start_folder
from orchestrator.core.jobdir.layout import JobDir
from tests.support import fake_slurm, folders, jobs, verbs
from tests.support.fake_slurm import FakeSlurm
from tests.support.saved_files import saved

EXAMPLES_MAX = verbs.examples(80)

PENDING = "7|PENDING|2026-11-21T06:26:01|2||Resources"
VERBS = (
    "status JOB", "status JOB --json", "status --all", "status --all --json", "logs JOB", "logs JOB --tail 2", "logs JOB --since 1h",
    "logs JOB --rank 1 --attempt 1", "logs JOB --node node-0", "why JOB", "why JOB --json", "checkpoints JOB --verify",
    "checkpoints JOB --verify --json", "folder JOB", "folder JOB --json", "collect JOB --to COPY", "stacks JOB", "restart JOB", "cancel JOB --no-wait", "resume JOB --from nonsense",
    "resume JOB --set restart.max=1 --from nonsense", "clean JOB",
)  # fmt: skip

ODD: tuple[Any, ...] = (
    None, True, [], {}, "", "\u202e\x1b[2J", "x" * 5000, -1, 0.5, 1e300, 10**400, "2026", [[]], {"kind": "Judge"}, ["a", 1],
    {"": {"": None}},
)  # fmt: skip
"""Values that stand where others should."""

RAW = (
    b"", b"{", b"\xff\xfe\0\n", b"[" * 100_000, b'{"a":' * 100_000, b"null\n", b"[]\n", b"{}\n", b"NaN", b"9" * 10_000, b'"text"\n',
    b"\n\n\n", b"{}\ngarbage\n", b"1e999", b'["\\ud800"]',
)  # fmt: skip
"""What a whole file may hold."""


@dataclass(frozen=True, slots=True)
class Damage:
    """One change of one file: by `kind`, at about the place `at` of it, with an odd value."""

    kind: str
    at: int
    odd: int


KINDS = (
    "missing", "folder", "pipe", "loop", "dangling", "raw", "cut", "byte", "line gone", "line twice", "value", "key gone",
)  # fmt: skip
DAMAGES = st.builds(Damage, st.sampled_from(KINDS), st.integers(0, 10**6), st.integers(0, 100))


def harm(path: Path, damage: Damage) -> None:
    """Do a damage to a file."""
    data = path.read_bytes()
    at = damage.at % (len(data) + 1)
    lines = data.splitlines(keepends=True)
    match damage.kind:
        case "missing" | "folder" | "pipe" | "loop" | "dangling":
            path.unlink()
            if damage.kind == "folder":
                path.mkdir()
            elif damage.kind == "pipe":
                os.mkfifo(path)
            elif damage.kind != "missing":
                path.symlink_to(path.name if damage.kind == "loop" else "/no/such/file")
        case "raw":
            path.write_bytes(RAW[damage.odd % len(RAW)])
        case "cut":
            path.write_bytes(data[:at])
        case "byte":
            path.write_bytes(data[:at] + bytes([damage.odd]) + data[at + 1 :])
        case "line gone" | "line twice" if lines:
            number = damage.at % len(lines)
            lines[number : number + 1] = [] if damage.kind == "line gone" else [lines[number]] * 2
            path.write_bytes(b"".join(lines))
        case "value" | "key gone" if lines:
            number = damage.at % len(lines)
            with contextlib.suppress(ValueError):
                known = json.loads(lines[number])
                lines[number] = json.dumps(_spoilt(known, damage)).encode() + b"\n"
            path.write_bytes(b"".join(lines))
        case _:
            pass


def _spoilt(known: Any, damage: Damage) -> Any:
    """Return JSON in which one value somewhere is another, or is gone."""
    places = list(_places(known))
    if not places:
        return ODD[damage.odd % len(ODD)]
    inside, key = places[damage.at % len(places)]
    if damage.kind == "key gone":
        del inside[key]
    else:
        inside[key] = ODD[damage.odd % len(ODD)]
    return known


def _places(known: Any) -> Iterator[tuple[Any, Any]]:
    keys = list(known) if isinstance(known, dict) else range(len(known)) if isinstance(known, list) else ()
    for key in keys:
        yield known, key
        yield from _places(known[key])


def ended(place: Path) -> JobDir:
    """Make a local job that has failed."""
    return _furnished(folders.failed(place, "broken", jobs.BEGAN_S + 60))


def running(place: Path) -> JobDir:
    """Make a local job that runs; the test holds its lock, so that its supervisor counts as alive."""
    job = _furnished(folders.make(place, [*jobs.submitted(), *jobs.running(1, 1.0, 7)], "broken"))
    job.lock.write_text(f"{os.getpid()} {os.uname().nodename}\n")
    return job


def queued(place: Path) -> JobDir:
    """Make a job that waits in Slurm's queue."""
    job = fake_slurm.job(place, "7", name="broken")
    fake_slurm.tell(job, "QUEUED")
    job.queue.write_text('{"cluster": "lab"}')
    job.allocation.write_text("7.0\n")
    (job.scripts / "slurm.sh").write_text("#!/bin/sh\n")
    return _furnished(job)


def _furnished(job: JobDir) -> JobDir:
    """Add the files that a job has beside those that a tale makes."""
    for path, text in {
        job.spec: "name: gpt\nnodes: 2\nprocs_per_node: 2\nentrypoint: train.py\n",
        job.provenance: "{}", job.cleaned_hosts: '["gpu1"]', job.endpoint: "127.0.0.1:4000\n", job.supervisor_log: "it began\n", job.given_up: "it died",
        job.requests / "000001.json": '{"ask": "cancel"}', job.node("node-0") / "agent.json": '{"pid": 1, "gpus": []}',
        job.rank_log(1, 1): "RuntimeError: loss is NaN\n", job.node_log(1, "node-0"): "setup\n",
        job.rank_index(1, 1): "0123456789abcdef" * 4, job.evidence(1) / "rank-00001-stacks.txt": "File \"train.py\", line 1\n",
        job.checkpoints / "step-5.pt": "PK", job.code / "train.py": "print()\n", job.code / "out" / "last.pt": "PK", job.checkpoints / "step-9" / ".metadata": "\x80",
        job.checkpoints / "step-9" / "model.safetensors.index.json": '{"weight_map": {"a": "b.safetensors"}}',
        job.secrets / "token": "0" * 64, job.secrets / "environment.json": "{}", job.secrets / "secrets.json": "{}",
    }.items():  # fmt: skip
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    start_folder.record_snapshot_files(job, [Path("train.py")])
    _enter_saves(job)
    os.utime(job.plan, (jobs.BEGAN_S, jobs.BEGAN_S))  # its submit is long over
    return job


def _enter_saves(job: JobDir) -> None:
    """Enter what a job has saved: one that is whole, one that is torn, and one that is being written."""
    place, about = FileLocation("", str(job.checkpoints)), (job.checkpoints / "step-5.pt").stat()
    piece = CheckpointFile("step-5.pt", about.st_size, about.st_mtime_ns, "0" * 64)
    state = GroupReading(
        Format.DCP,
        Content.STATE,
        True,
        ("step-9/.metadata is cut off",),
        needs=(RequiredFile("step-9/a", 5, "b"),),
    )
    part = HostPart(
        "node-0",
        str(job.checkpoints),
        9,
        (CheckpointFile("step-9/.metadata", 1, 1),),
        state,
        CompletionReason.STEPS,
    )
    there = CheckpointFile("out/last.pt", 2, (job.code / "out" / "last.pt").stat().st_mtime_ns)
    book = Ledger(job.root, job.ledger)
    for save in (
        saved(1, main="step-5.pt", files=(piece,), locations=(place,), step=5),
        saved(2, main="step-8", state=CheckpointState.TORN, why="step-8/a.pt is cut off", locations=(place,)),
        saved(
            4,
            main="out/last.pt",
            key=f"{START_PREFIX}out/last.pt",
            files=(there,),
            locations=(FileLocation("", str(job.code)),),
        ),
        saved(3, main="step-9", state=CheckpointState.OPEN, step=None, parts=(part,)),
    ):
        book.put(save)
    book.flush()


MAKERS: dict[str, Callable[[Path], JobDir]] = {"ended": ended, "running": running, "queued": queued}


@pytest.fixture
def template(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Path:
    """Return a home with a job that is whole and one to be harmed, which Slurm knows."""
    there: FakeSlurm = fake_slurm.installed(tmp_path, monkeypatch)
    there.queue(PENDING)
    place = tmp_path / "template"
    folders.succeeded(place, "done", jobs.BEGAN_S)
    MAKERS[request.param](place)
    return place


@contextlib.contextmanager
def _held(lock: Path) -> Iterator[None]:
    with contextlib.suppress(OSError), lock.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
        return
    yield


def _try_every_verb(template: Path, name: str, damage: Damage) -> None:
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        place = Path(folder) / "home"
        shutil.copytree(template, place)
        patch.setenv("ORCH_HOME", str(place))
        job = next(one for one in home.list_jobs(place) if one.id.startswith("broken-"))
        with _held(job.lock):
            is_asked = not (job.root / "slurm.json").exists() and job.lock.exists()
            harm(job.root / name, damage)
            for words in VERBS:
                if is_asked and "stacks" in words:
                    continue  # of a supervisor that is alive, the test, which does not answer
                code, out = verbs.checked(words.replace("JOB", job.id).replace("COPY", f"{folder}/copy").split())
                assert "status --all" not in words or "done-" in out, "the other job is shown"
                assert code == 0 or not Path(folder, "copy").exists(), words
                shutil.rmtree(Path(folder, "copy"), ignore_errors=True)


def _names(template: Path) -> list[str]:
    root = next(one for one in home.list_jobs(template) if one.id.startswith("broken-")).root
    return sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_file())


def _is_waited_for(template: Path, name: str, damage: Damage) -> bool:
    """Tell whether a verb would wait for the file: a first status of a job that has begun may still come."""
    is_first = name == "state.json" and not {"ended", "slurm.json"} & set(_names(template))
    return is_first and damage.kind in ("missing", "dangling")


@pytest.mark.soak
@pytest.mark.parametrize("template", ["ended"], indirect=True)
def test_wrong_file_kind_is_damage_to_every_verb(template: Path) -> None:
    """A file that is another thing or holds one is damage to every verb."""
    others = [Damage(kind, 0, 0) for kind in ("missing", "folder", "pipe", "loop", "dangling")]
    for name in _names(template):
        for damage in (*others, *(Damage("raw", 0, odd) for odd in range(len(RAW)))):
            _try_every_verb(template, name, damage)


@pytest.mark.slow
@pytest.mark.parametrize("template", MAKERS, indirect=True)
def test_any_file_content_ends_every_verb_with_sentence(template: Path) -> None:
    """Every verb ends with a sentence, whatever a file of a job holds."""

    @given(st.sampled_from(_names(template)), DAMAGES)
    @settings(max_examples=EXAMPLES_MAX, database=None, deadline=None, suppress_health_check=list(HealthCheck))
    def tried(name: str, damage: Damage) -> None:
        if not _is_waited_for(template, name, damage):
            _try_every_verb(template, name, damage)

    tried()


@pytest.mark.parametrize("template", ["running"], indirect=True)
def test_damaged_status_does_not_hide_post_mortem(template: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ORCH_HOME", str(template))
    job = next(one for one in home.list_jobs(template) if one.id.startswith("broken-"))
    with _held(job.lock):
        job.state.write_text("{}")
        code, out = verbs.checked(["why", job.id])
    assert code == 0 and "attempt 1" in out
