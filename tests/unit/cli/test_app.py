"""Does every verb end with the right exit code and one clear word, whatever is typed and whatever the folders hold?

The command line runs in this process on job folders that a supervisor left behind; no supervisor is started.
"""

from __future__ import annotations

import errno
import fcntl
import io
import json
import random
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from orchestrator.cli import app, group
from orchestrator.client.job import Job
from orchestrator.core.jobdir.home import list_jobs as jobs_of
from orchestrator.core.jobdir.layout import JobDir
from tests.support import folders, jobs, verbs
from tests.support.cluster import small_torch
from tests.support.unprivileged import unprivileged

FUZZ_RUNS = 300
OUTPUT_CHARS_MAX = 200_000


@dataclass(frozen=True, slots=True)
class Said:
    """What a command ended with and said."""

    code: int
    out: str
    err: str


Type = Callable[..., Said]


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a job home with an old job that succeeded and a newer one that failed; the workdir has a job file."""
    place, work = tmp_path / "home", tmp_path / "work"
    work.mkdir()
    (work / "train.py").write_text("print('hi')\n")
    env = json.dumps(small_torch.write(tmp_path / "small"))
    (work / "good.yaml").write_text(f"name: gpt\nprocs_per_node: 2\nentrypoint: train.py\nenv: {env}\n")
    (work / "bad.yaml").write_text("name: gpt\nnodes: 0\ngpus: 3\nentrypoint: nope.py\n")
    folders.succeeded(place, "done", jobs.BEGAN_S)
    folders.failed(place, "broken", jobs.BEGAN_S + 60)
    monkeypatch.setenv("ORCH_HOME", str(place))
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.chdir(work)
    return place


@pytest.fixture
def orch(home: Path, capsys: pytest.CaptureFixture[str]) -> Type:
    """Return the command line as a function."""

    def typed(*words: str) -> Said:
        code = app.run(list(words))
        said = capsys.readouterr()
        return Said(code, said.out, said.err)

    return typed


TABLE: list[tuple[str, int, str]] = [
    ("", 2, "Run one PyTorch training job"),
    ("--help", 0, "submit"),
    ("--version", 0, "orch, version"),
    ("nosuch", 2, "No such command 'nosuch'"),
    ("--nosuch", 2, "No such option"),
    ("submit", 2, "Missing argument 'SPEC'"),
    ("submit nosuch.yaml", 2, "no file nosuch.yaml in"),
    ("submit good.yml", 2, "did you mean good.yaml?"),
    ("submit .", 2, "is a folder"),
    ("submit bad.yaml", 2, "bad.yaml:2: nodes: must be"),
    ("submit bad.yaml --json", 2, "bad.yaml:3: gpus: is not a field; did you mean gpus_per_node?"),
    ("submit good.yaml --backend nfs", 2, "--backend nfs: must be local, ssh or slurm"),
    ("submit good.yaml --backend slurm", 3, "sbatch"),
    ("submit good.yaml --set nodes", 2, "must be key.path=value"),
    ("submit good.yaml --set nodes=0", 2, "--set nodes=0: must be a whole number"),
    ("submit good.yaml --set gpus_per_node=99 --set procs_per_node=null", 2, "99 GPUs wanted"),
    ("submit good.yaml --set secrets=[NO_SUCH]", 2, "NO_SUCH listed in secrets"),
    ("status", 0, "FAILED"),
    ("status done", 0, "SUCCEEDED"),
    ("status --all", 0, "done-"),
    ("status --all done", 2, "--all"),
    ("status --watch done", 0, "SUCCEEDED"),
    ("status nosuch", 2, "no job has the id or name 'nosuch'"),
    ("logs", 0, "loss is NaN"),
    ("logs -f", 0, "loss is NaN"),
    ("logs broken --rank 1", 0, "RuntimeError"),
    ("logs --rank 9", 2, "has no rank 9"),
    ("logs --rank -1", 2, "-1 is not in the range"),
    ("logs --tail 99999999999999999999", 2, "is not in the range"),
    ("logs --node node-0", 0, "loss is NaN"),
    ("logs --node nosuch", 2, "it has: node-0, node-1"),
    ("logs --attempt 9", 2, "has no logs of attempt 9"),
    ("logs --since yesterday", 2, "is not a time"),
    ("logs --grep (", 2, "is not a regular expression"),
    ("logs done", 0, "no rank has printed anything"),
    ("why", 0, "attempt 1"),
    ("why done", 0, "ended without a fault"),
    ("cancel", 2, "has ended already (FAILED): there is nothing to cancel"),
    ("resume done", 2, "nothing is left to do"),
    ("resume broken --from nonsense", 2, "no such checkpoint"),
    ("resume broken --set nodes=0", 2, "must be a whole number"),
    ("resume broken --set name=other", 2, "cannot change"),
    ("checkpoints", 0, "no checkpoints yet"),
    ("collect", 0, "are in"),
    ("collect --to .", 2, "is not an empty folder"),
    ("collect --to ../copy", 0, "are in"),
    ("report -o .", 2, ". is not a regular file"),
    ("report -o nosuch/a.html", 3, "nosuch/a.html: cannot be written"),
    (f"report -o {'a' * 300}", 3, "cannot be written: File name too long"),
    ("report --serve --port 65536", 2, "is not in the range"),
    ("check good.yaml", 0, "ok    plan"), ("metrics --listen ²", 2, "'²' is not an address"),
    ("check bad.yaml", 2, "nodes"), ("check good.yaml --burn-in 5s", 2, "--burn-in: is not between 10s and 24h"),
    ("check good.yaml --backend ssh", 2, "ssh.hosts"),
    ("check good.yaml --backend slurm", 3, "fault queue"),
    ("render good.yaml", 0, "exec \"$python\""),
    ("render bad.yaml", 2, "nodes"),
    ("init new.yaml", 0, "wrote new.yaml"),
    ("init good.yaml", 2, "the file exists already"),
    ("init nosuch/job.yaml", 2, "create it: mkdir -p "),
    ("init - --from-command train.py", 0, "entrypoint: train.py"),
    ("init ../up.yaml --from-command train.py", 0, "wrote ../up.yaml"),
    ("init line.yaml --from-command ls", 2, "starts neither a launcher"),
    ("schema", 0, '"entrypoint"'),
    ("clean", 0, "nothing to clean up"),
    ("clean --older-than 1000d", 0, "no job ended that long ago"),
    ("clean --older-than never", 2, "is not a time"),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("words", "code", "text"), TABLE, ids=[words or "(nothing)" for words, _, _ in TABLE])
def test_every_verb_exits_with_documented_code_and_message(orch: Type, words: str, code: int, text: str) -> None:
    said = orch(*words.split())
    assert text in said.out + said.err
    assert said.code == code
    assert "Traceback" not in said.err
    if code:
        assert said.out == "" or words == "check good.yaml --backend slurm"


@pytest.mark.parametrize("words", ["status", "status --all", "why", "checkpoints"])
def test_json_output_is_one_value(orch: Type, words: str) -> None:
    assert isinstance(json.loads(orch(*words.split(), "--json").out), (list, dict))


def test_every_verb_and_option_has_full_sentence_help() -> None:
    for name, verb in group.cli.commands.items():
        assert verb.help and verb.help.splitlines()[0].endswith("."), name
        for param in verb.params:
            text = getattr(param, "help", None)
            assert param.param_type_name == "argument" or (text and text.endswith(".") and text[0].isupper()), param


def test_secrets_appear_in_no_output(orch: Type) -> None:
    shown = ("logs", "logs -f", "logs -n 5", "why", "why --json", "status --json", "render good.yaml")
    for words in shown:
        said = orch(*words.split())
        assert folders.SECRET not in said.out + said.err
    assert "rank 0 logs in with ***" in orch("logs").out


@pytest.mark.slow
def test_starter_file_is_valid_once_script_exists(orch: Type) -> None:
    """A starter file is a valid job file as soon as its script exists."""
    assert orch("init").code == 0
    said = orch("check", "job.yaml")
    assert (said.code, said.out[:15]) == (0, "ok    spec     ")
    Path("train.py").unlink()
    assert "job.yaml:12: entrypoint: no file train.py" in orch("check", "job.yaml").err


@pytest.mark.parametrize(
    "words", ["clean W --older-than 0s --yes", "clean W", "status W", "cancel W", "resume broken --from W"]
)
def test_empty_argument_names_no_job_or_checkpoint(orch: Type, home: Path, words: str) -> None:
    before = sorted(home.rglob("*"))
    said = orch(*(word.replace("W", "") for word in words.split()))
    assert said.code == 2 and "fix: " in said.err
    assert sorted(home.rglob("*")) == before


def test_clean_deletes_only_named_job(orch: Type, home: Path) -> None:
    said = orch("clean", "done", "--older-than", "0s", "--yes")
    assert "deleted 1 job (done)" in said.out
    assert [name.split("-")[0] for name in sorted(path.name for path in (home / "jobs").iterdir())] == ["broken"]


@pytest.mark.parametrize(("answer", "code"), [("n\n", 0), ("", 130)])
def test_clean_asks_before_deleting(
    orch: Type, home: Path, monkeypatch: pytest.MonkeyPatch, answer: str, code: int
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(answer))
    before = sorted(home.rglob("*"))
    said = orch("clean", "--older-than", "0s")
    assert (said.code, "broken-" in said.out) == (code, True)
    assert sorted(home.rglob("*")) == before


def test_job_with_uncleaned_hosts_is_kept(orch: Type, home: Path) -> None:
    job = _broken(home)
    job.archive.touch()  # so it was on hosts
    job.plan.write_text("{")  # and on which is not known
    said = orch("clean", "--older-than", "0s", "--yes")
    assert (said.code, job.root.exists()) == (group.EXIT_CLUSTER_FAULT, True)
    assert f"not deleted, because their leftovers could not be removed: {job.id}" in said.err


@pytest.mark.parametrize("words", ["clean", "clean --older-than 0s --yes"])
def test_failed_clean_reports_leftovers_and_reason(orch: Type, home: Path, tmp_path: Path, words: str) -> None:
    job = _broken(home)
    (job.root / "nodes" / "node-0").mkdir(parents=True)
    with unprivileged(tmp_path):
        job.root.chmod(0o555)
        said = orch(*words.split())
        job.root.chmod(0o755)
    assert said.code == group.EXIT_CLUSTER_FAULT
    assert f"cannot be deleted: {job.root / 'nodes'}: Permission denied" in said.err and "fix: " in said.err
    assert job.root.exists()


def test_unfinished_job_is_not_cleaned(orch: Type, home: Path) -> None:
    _broken(home).ended.unlink()
    assert orch("clean", "broken").code == 2


def test_follow_exits_with_code_of_job_end(home: Path) -> None:
    done, broken = (Job(folder) for folder in jobs_of(home))
    assert (group.follow_job(done), group.follow_job(broken)) == (0, group.EXIT_JOB_FAILED)


def _broken(home: Path) -> JobDir:
    return next(JobDir(path) for path in (home / "jobs").iterdir() if path.name.startswith("broken"))


def _gone(path: Path) -> Path:
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    return path


DAMAGES: dict[str, Callable[[JobDir], object]] = {
    "no state": lambda job: job.state.unlink(),
    "torn state": lambda job: job.state.write_text(job.state.read_text()[:40]),
    "no plan": lambda job: job.plan.unlink(),
    "torn plan": lambda job: job.plan.write_text(job.plan.read_text()[:40]),
    "garbage in the journal": lambda job: job.journal.write_text("{}\ngarbage\n"),
    "no journal": lambda job: job.journal.unlink(),
    "binary journal": lambda job: job.journal.write_bytes(b"\xff\xfe\0\n" * 10),
    "damaged secrets": lambda job: (job.secrets / "secrets.json").write_text("{"),
    "no secrets": lambda job: shutil.rmtree(job.secrets),
    "empty folder": lambda job: _gone(job.root).mkdir(),
    "logs are a file": lambda job: _gone(job.logs).write_text(""),
    "the ledger is a folder": lambda job: job.ledger.mkdir(),
    "checkpoints are a file": lambda job: _gone(job.checkpoints).write_text(""),
    "requests are a file": lambda job: _gone(job.requests).write_text(""),
    "state is a folder": lambda job: _gone(job.state).mkdir(),
    "damaged overrides": lambda job: job.overrides.write_text("{"),
    "damaged spec": lambda job: job.spec.write_bytes(b"\xff"),
}


@pytest.mark.slow
@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_job_folder_is_reported_without_traceback(orch: Type, home: Path, damage: str) -> None:
    DAMAGES[damage](_broken(home))
    for words in (
        "status broken", "logs broken", "why broken", "goodput broken", "checkpoints broken", "collect broken --to ../c", "clean",
        "folder broken", "cancel broken", "resume broken --set restart.max=1 --from nonsense",
    ):  # fmt: skip
        said = orch(*words.split())
        assert said.code in (0, 2, 3) and "Traceback" not in said.err, words
        assert said.code == 0 or said.err.strip(), words
    said = orch("status", "--all")
    assert (said.code, "done-" in said.out) == (0, True), "the other jobs are shown"


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["file", "missing", "proc"])
def test_invalid_home_is_reported(orch: Type, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    places = {"file": tmp_path / "file", "missing": tmp_path / "none", "proc": Path("/proc/nothing/here")}
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("ORCH_HOME", str(places[kind]))
    for words in ("status", "status --all", "logs", "submit good.yaml", "clean"):
        said = orch(*words.split())
        if kind == "missing" and words == "submit good.yaml":
            continue  # that one would be made
        assert said.code in ((0, 2) if kind != "file" and words != "submit good.yaml" else (3,)), words
        assert "Traceback" not in said.err


VOCABULARY = ["run", "submit", "status", "logs", "why", "goodput", "--by", "cause", "cancel", "resume", "folder", "checkpoints", "collect", "check", "render", "init", "schema", "clean", "nodes", "--from-command", "--from-command", "--json", "--all", "--watch", "--ranks", "--rank", "--node", "--attempt", "--tail", "--since", "--grep", "--follow", "-f", "--set", "--backend", "--from", "--to", "--wait", "--no-wait", "--verify", "--discard", "--older-than", "--yes", "--help", "-h", "--", "-", "=", "0", "1", "-1", "99999999999999999999", "1e9", "nan", "10m", "node-0", "done", "broken", "good.yaml", "bad.yaml", "train.py", "nodes=2", "nodes=0", "name=x", "a=b", "..", ".", "/", "~", "*", "(", "[", "é", "\x1b[2J", "\n", "None", "local", "ssh", "slurm", "/dev/null", "/no/such"]  # fmt: skip


@pytest.mark.slow
def test_no_arguments_cause_a_traceback(orch: Type) -> None:
    rng = random.Random(8)
    for _ in range(FUZZ_RUNS):
        verb = rng.choice(list(group.cli.commands)) if rng.random() < 0.8 else rng.choice(VOCABULARY)
        words = [verb, *rng.choices(VOCABULARY, k=rng.randint(0, 4))]
        if _starts_something(words):
            continue
        said = orch(*words)
        assert said.code in (0, 1, 2, 3, 130), words
        assert "Traceback" not in said.err and len(said.out) < OUTPUT_CHARS_MAX, words


def _starts_something(words: list[str]) -> bool:
    """Tell whether these words might start a process or copy files: that is tested with real processes."""
    return words[0] in ("run", "submit", "resume", "collect", "check", "mcp")


@pytest.mark.slow
@pytest.mark.parametrize(
    "words", ["status W", "submit W", "W", "--W", "status --W", "logs --tail W", "logs --grep (W", "collect --to W/W",
              "resume --from W", "init W", "submit good.yaml --backend W", "submit good.yaml --set W"],
)  # fmt: skip
def test_user_text_cannot_control_terminal(orch: Type, words: str) -> None:
    said = orch(*words.replace("W", "\x1b[2J\u202etxt").split())
    assert not set("\x1b\u202e") & set(said.out + said.err), words
    assert "\\u202etxt" in said.out + said.err


def test_rendered_script_is_visible_and_exact_in_pipe(orch: Type, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rendered script hides nothing from a person and is exact in a pipe."""
    words = ("render", "good.yaml", "--set", "setup=echo \u202etxt")
    assert "echo \u202etxt" in orch(*words).out
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    said = orch(*words)
    assert "echo \\u202etxt" in said.out and "\u202e" not in said.out


def test_job_on_disk_without_locks_is_explained(orch: Type, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job on a disk without locks is reported in plain words."""
    job = folders.make(home, [*jobs.submitted(), *jobs.running(1, 1.0, 7)])
    job.lock.touch()

    def refuse(fd: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    said = orch("status", "broken")
    assert (
        f"{job.id}: the state of its supervisor is unknown: {job.lock}: this file system does not support file locks"
        in said.err
    )
    assert "Errno" not in said.err and "dead" not in said.err


def test_dangling_link_is_not_suggested_for_itself(orch: Type) -> None:
    """A link that leads nowhere is not suggested in its own place."""
    Path("circle.yaml").symlink_to("circle.yaml")
    Path("dangling.yaml").symlink_to("nosuch.yaml")
    for name in ("circle.yaml", "dangling.yaml"):
        said = orch("submit", name)
        assert said.code == 2 and f"{name} is a broken link" in said.err


STREAMS = [
    ("schema >&-", 3), ("status >/dev/full", 3), ("status --json >&-", 3), ("logs -f >/dev/full", 3), ("--help >&-", 3),
    ("status --nosuch >&-", 2), ("status nosuch 2>/dev/full", 2), ("why 2>&-", 0), ("why >&- 2>&-", 3), ("logs <&-", 0),
    ("clean --older-than 0s <&-", 130), ("schema | true", 0),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("words", "code"), STREAMS, ids=[words for words, _ in STREAMS])
def test_closed_or_full_stream_is_reported(home: Path, words: str, code: int) -> None:
    orch = f"set -o pipefail; {sys.executable} -m orchestrator.cli {words}"
    done = subprocess.run(["bash", "-c", orch], capture_output=True, text=True, timeout=verbs.VERB_S_MAX)
    assert done.returncode == code
    assert "Traceback" not in done.stderr and "Exception ignored" not in done.stderr
    assert code != 3 or "2>&-" in words or done.stderr.startswith("standard output: cannot be written: ")
