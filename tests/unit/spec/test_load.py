"""The spec: what each field takes, and how each mistake is answered."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pydantic
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.spec import value_types
from orchestrator.spec.load import Entry, SpecError, SpecFile, json_schema, load

ROOT = Path(__file__).resolve().parents[3]
HEAD = "name: demo\nentrypoint: train.py\n"
EXAMPLES_MAX = 150

GOOD = """\
name: demo
backend: ssh
nodes: 2
spares: 1
gpus_per_node: auto
procs_per_node: 2
entrypoint: "train.py --lr 0.1 --name 'a b'"
workdir: .
python: /usr/bin/python3
setup: |
  module load cuda
  ulimit -n 65536
env:
  A: yes
  B: 010
  C: 1.0
  D: ""
secrets: [HF_TOKEN]
time_limit: 1d2h
total_steps: 1000
rendezvous: {port: 29500, interface: eth0}
nccl: {debug: INFO, NCCL_SOCKET_IFNAME: eth0, ib_disable: true}
monitor:
  heartbeat_s: 0.5
  start_timeout: 5m
  hang_timeout: off
  node_timeout: 30s
  on_hang: notify
  stop_grace: 0
notify: {command: "mail me", url: "https://x.example/y", on: [hang, failed]}
restart: {max: 0, backoff: 500ms, backoff_max: 1h30m, never_on_exit_codes: [2, 77]}
checkpoint: {path: "step-*.pt", keep: 3, resume_args: "--resume {path}"}
logs: {unbuffered: no}
snapshot: {limit_mb: 10}
ssh: {hosts: "gpu[01-08].lab, b[1,3]", user: me, port: 2222, host_keys: accept-new, sync: data/}
slurm: {partition: gpu, mem: 64G, exclusive: on, extra: ["--licenses=foo"]}
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with a script in it, whose job file the tests write."""
    (tmp_path / "train.py").touch()
    (tmp_path / "pkg").mkdir()
    return tmp_path


def loaded(folder: Path, text: str, *overrides: str, backend: str | None = None) -> SpecFile:
    """Load `text` as the folder's job file."""
    path = folder / "job.yaml"
    path.write_text(text)
    return load(path, overrides=overrides, backend=backend)


def faults(folder: Path, text: str, *overrides: str, backend: str | None = None) -> list[str]:
    """Return the faults of `text` as lines, the folder's own path left out."""
    with pytest.raises(SpecError) as caught:
        loaded(folder, text, *overrides, backend=backend)
    return str(caught.value).replace(f"{folder}/", "").replace(str(folder), "DIR").splitlines()


def fault(folder: Path, text: str) -> str:
    """Return the only fault of `text`."""
    (line,) = faults(folder, text)
    return line


def test_minimal_file_has_defaults(folder: Path) -> None:
    file = loaded(folder, HEAD)
    spec = file.spec
    assert (spec.backend, spec.nodes, spec.spares) == ("local", 1, 0)
    assert (spec.gpus_per_node, spec.procs_per_node) == ("auto", None)
    assert (spec.monitor.hang_timeout, spec.restart.max, spec.checkpoint.path) == ("auto", 3, "*")
    assert (file.folder, file.workdir, file.text) == (folder, folder, HEAD)


def test_every_field_gets_its_final_type(folder: Path) -> None:
    spec = loaded(folder, GOOD).spec
    assert spec.entry == Entry("script", "train.py", ("--lr", "0.1", "--name", "a b"))
    assert spec.setup == ("module load cuda", "ulimit -n 65536")
    assert spec.env == {"A": "yes", "B": "010", "C": "1.0", "D": ""}
    assert spec.time_limit == 26 * 3600.0
    assert spec.nccl == {"debug": "INFO", "socket_ifname": "eth0", "ib_disable": "1"}
    assert (spec.monitor.hang_timeout, spec.monitor.stop_grace, spec.monitor.on_hang) == (None, 0.0, "notify")
    assert (spec.restart.backoff, spec.restart.backoff_max) == (0.5, 5400.0)
    assert spec.restart.never_on_exit_codes == (2, 77)
    assert spec.ssh.hosts == ("gpu[01-08].lab", "b[1,3]")
    assert spec.ssh.sync == ("data/",)
    assert (spec.logs.unbuffered, spec.slurm.exclusive, spec.slurm.mem) == (False, True, "64G")


def test_spec_is_immutable(folder: Path) -> None:
    spec = loaded(folder, HEAD).spec
    with pytest.raises(pydantic.ValidationError):
        spec.nodes = 2


def test_empty_sections_and_lists_have_defaults(folder: Path) -> None:
    spec = loaded(folder, HEAD + "monitor:\nenv:\nsecrets:\nsetup:\nslurm:\nnccl:\ntime_limit:\n").spec
    assert (spec.monitor.heartbeat_s, spec.env, spec.secrets, spec.setup) == (1.0, {}, (), ())


@pytest.mark.parametrize(
    ("text", "entry"),
    [
        ("entrypoint: train.py", Entry("script", "train.py")),
        ("entrypoint: [train.py, --n, 3, a b]", Entry("script", "train.py", ("--n", "3", "a b"))),
        ("entrypoint: -m pkg.train --x", Entry("module", "pkg.train", ("--x",))),
        ("entrypoint: {command: bash run.sh | tee x}", Entry("command", "bash run.sh | tee x")),
        ("command: python train.py", Entry("command", "python train.py")),
        ("command: [python, train.py]", Entry("command", "", ("python", "train.py"))),
    ],
)
def test_entry_is_script_module_or_command(folder: Path, text: str, entry: Entry) -> None:
    assert loaded(folder, f"name: a\n{text}\n").spec.entry == entry


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("nodes: 1", "job.yaml: entrypoint: is missing; name the script, such as `entrypoint: train.py`"),
        ("entrypoint:", "job.yaml:2: entrypoint: is missing"),
        ("entrypoint: train.py\ncommand: x", "entrypoint: excludes command; keep one of the two"),
        ("entrypoint: ''", "entrypoint: must be a script with arguments"),
        ("entrypoint: {cmd: x}", "whose only key is `command`"),
        ("entrypoint: [train.py, [a]]", "or a list of words, not a list"),
        ("entrypoint: train.py 'a", "has a quote or backslash that is not closed"),
        ("entrypoint: -m", "-m must be followed by a module's dotted name"),
        ("entrypoint: -m pkg/train", "-m must be followed by a module's dotted name"),
        ("entrypoint: -m train.py", "-m takes a module's name: write -m train, or train.py without -m"),
        (
            "entrypoint: -u train.py",
            "starts with -u, not with a Python script: options must follow the script, only -m may come first",
        ),
        ("entrypoint: train.py | tee log", "contains |, which only a shell reads: write `command:"),
        ("entrypoint: tran.py", "job.yaml:2: entrypoint: no file tran.py in DIR; did you mean train.py?"),
        ("entrypoint: pkg", "entrypoint: pkg is a folder"),
        ("entrypoint: ../x.py", "lies outside workdir"),
        (f"entrypoint: {'x' * 300}.py", "entrypoint: no file xxx"),
        ("command: ' '", "command: must be a shell command"),
        ("command: []", "command: must be a shell command"),
    ],
)
def test_unrunnable_entry_gives_reason(folder: Path, text: str, said: str) -> None:
    """An entry that cannot run says why."""
    assert said in fault(folder, f"name: a\n{text}\n")


def test_a_script_may_be_absolute(folder: Path) -> None:
    assert loaded(folder, f"name: a\nworkdir: pkg\nentrypoint: {folder}/train.py\n").workdir == folder / "pkg"


def test_workdir_is_relative_to_job_file(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """workdir is relative to the job file, wherever orch was called."""
    (folder / "job.yaml").write_text(HEAD)
    monkeypatch.chdir(folder / "pkg")
    file = load(Path("../job.yaml"))
    assert file.workdir == folder
    assert file.where("name") == "../job.yaml:1: name"


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        *[("90s", 90.0), ("10m", 600.0), ("2h", 7200.0), ("1d", 86400.0), ("500ms", 0.5), ("1h30m", 5400.0)],
        *[("42", 42.0), ("0.5", 0.5), ("1.5h", 5400.0), ("1e2", 100.0), ("'7'", 7.0)],
    ],
)
def test_duration_is_parsed_to_seconds(folder: Path, text: str, seconds: float) -> None:
    """A duration is read to seconds."""
    assert loaded(folder, f"{HEAD}time_limit: {text}\n").spec.time_limit == seconds


@pytest.mark.parametrize(
    "text",
    [
        "-5",
        "-5m",
        "0",
        "0s",
        "nan",
        ".nan",
        "inf",
        ".inf",
        "1e999",
        "9999d",
        "10 minutes",
        "m",
        "1m1h",
        "yes",
        "[]",
    ],
)
def test_senseless_duration_is_refused(folder: Path, text: str) -> None:
    """A duration that makes no sense is refused."""
    assert fault(folder, f"{HEAD}time_limit: {text}\n").startswith("job.yaml:3: time_limit: must be a duration")


@given(st.integers(1, 366 * 86_400_000))
@settings(max_examples=EXAMPLES_MAX, deadline=None, database=None)
def test_duration_round_trips(milliseconds: int) -> None:
    """A duration that is written out is read again."""
    seconds = milliseconds / 1000
    read = pydantic.TypeAdapter(value_types.Seconds).validate_python
    assert read(value_types.duration_text(seconds)) == pytest.approx(seconds, abs=1e-6)


@pytest.mark.parametrize("off", ["off", "OFF", "'off'"])
def test_hang_timeout_can_be_off(folder: Path, off: str) -> None:
    assert loaded(folder, f"{HEAD}monitor: {{hang_timeout: {off}}}\n").spec.monitor.hang_timeout is None


def test_empty_hang_timeout_is_not_off(folder: Path) -> None:
    said = fault(folder, f"{HEAD}monitor:\n  hang_timeout:\n")
    assert said.startswith("job.yaml:4: monitor.hang_timeout: must be a duration such as 90s, 10m or 1h30m, or auto")
    assert said.endswith("or off, not empty")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("name: a/b", "name: must be 1 to 63 letters, digits, dots, dashes or underscores, a letter or digit first, not a/b"),
        ('name: "a\\nb"', 'not "a\\nb"'),
        ("name: ''", 'not ""'),
        ("name: [a]", "name: must be text (an empty one is \"\"), not a list"),
        (f"name: {'a' * 64}", "…"),
        ("nodes: 0", "nodes: must be a whole number of at least 1, not 0"),
        ("nodes: 4097", "nodes: must be a whole number of at most 4096, not 4097"),
        ("nodes: 2.5", "not 2.5"),
        ("nodes: true", "not true"),
        ("nodes: 010", "without a leading zero, which may mean octal, not 010"),
        (f"nodes: {'9' * 5000}", "must be a whole number"),
        ("nodes:", "nodes: must be a whole number, not empty"),
        ("nodes: {a: 1}", "not a map"),
        ("nodes: \u0663", "not \u0663"),
        ("spares: -1", "spares: must be a whole number of at least 0, not -1"),
        ("backend: slrum", "backend: must be local, ssh or slurm, not slrum; did you mean slurm?"),
        ("gpus_per_node: none", "gpus_per_node: must be a whole number from 1 to 1024, or auto, not none"),
        ("gpus_per_node: 1025", "gpus_per_node: must be a whole number from 1 to 1024, or auto, not 1025"),
        ("procs_per_node: 1000000000000000", "procs_per_node: must be a whole number of at most 4096"),
        ("gpus_per_node: 2\nprocs_per_node: 4", "procs_per_node: must be equal to gpus_per_node, 2, since one rank drives one GPU, not 4"),
        ("workdir: nowhere", "workdir: must be an existing folder, not nowhere"),
        ("workdir: train.py", "workdir: must be an existing folder, not train.py"),
        ("workdir: ~nobody-of-this-name", "must be an existing folder"),
        ("workdir:", "workdir: must be text (an empty one is \"\"), not empty"),
        ("time_limit: 1:30", "must be a duration such as 90s, 10m or 1h30m, not 1:30"),
        ("env: {A: ~}", 'env.A: must be text (an empty one is ""), not empty'),
        ("env: {A: {b: c}}", 'env.A: must be text (an empty one is ""), not a map'),
        ('env: {A: "a\\0b"}', "env.A: has more than 130000 characters, or one that cannot be passed to a process"),
        ("env: {A-B: 1}", "env.A-B: must be a name of letters, digits and underscores"),
        ("env: {RANK: 0}", "env.RANK: cannot be set: orch gives RANK its value on every rank"),
        ("env: {MASTER_PORT: 1}", "set rendezvous.port"),
        ("env: {ORCH_X: 1}", "env.ORCH_X: cannot be set: names that start with ORCH_ are orch's own"),
        ("env: {A: 1}\nsecrets: [B, A]", "secrets: A is also in env"),
        ("secrets: [A, B C]", "secrets[1]: must be a name of letters"),
        ("secrets: [WORLD_SIZE]", "secrets[0]: cannot be set"),
        ("secrets: {A: b}", "secrets: must be a list, not a map"),
        (f"env: {{A: {'x' * 140_000}}}", "env.A: has more than 130000 characters"),
        ("nccl: {debug: a, NCCL_DEBUG: b}", "nccl: names one setting twice"),
        ("nccl: {a b: 1}", "nccl.a b: must be a name of letters"),
        ("monitor: 5", "monitor: must be a section, with its keys indented below it, not 5"),
        ("monitor: {heartbeat_s: 0.01}", "monitor.heartbeat_s: must be a duration"),
        ("monitor: {heartbeat_s: 20, node_timeout: 1m}", "job.yaml:3: monitor.node_timeout: must be at least 5 heartbeats, 1m40s, not 1m"),
        ("monitor: {node_timeout: 4s}", "from 5s to 366d, or auto, not 4s"),
        ("monitor: {on_hang: on}", "monitor.on_hang: must be restart, notify or fail, not on"),
        ("restart: {backoff: 2m}", "restart.backoff_max: must be at least restart.backoff, 2m, not 1m"),
        ("restart: {never_on_exit_codes: [1, 256]}", "restart.never_on_exit_codes[1]: must be a whole number of at most 255, not 256"),
        ("restart:\n  never_on_exit_codes:\n    - 1\n    - x", "job.yaml:6: restart.never_on_exit_codes[1]"),
        ("checkpoint: {path: ../x}", 'checkpoint.path: must not contain ".."'),
        ("checkpoint: {keep: 3, path: '/data/*.pt'}", "checkpoint.keep: has no effect with checkpoint.path \"/data/*.pt\": orch deletes only in"),
        ("checkpoint: {keep: 0}", "checkpoint.keep: must be a whole number of at least 1, not 0"),
        ("checkpoint: {resume_args: ' '}", "checkpoint.resume_args: must be arguments, such as"),
        ("logs: {unbuffered: maybe}", "logs.unbuffered: must be true or false, not maybe"),
        ("backend: ssh", "job.yaml: ssh: backend ssh needs ssh.hosts or ssh.hosts_file"),
        ("backend: ssh\nssh: {hosts_file: hosts}", "ssh.hosts_file: no file hosts in DIR"),
        ("ssh: {hosts: [a, '-oProxyCommand=x']}", "ssh.hosts[1]: must be a host"),
        ("ssh: {hosts: 'a[1-'}", "ssh.hosts[0]: must be a host"),
        ("ssh: {user: -oX}", "ssh.user: must be a user name"),
        ('slurm: {partition: "a\\n#SBATCH -x"}', "slurm.partition: must be one line of text"),
        ("slurm: {extra: [licenses=foo]}", "slurm.extra[0]: must be an sbatch option"),
        ("nodes: 2\nnodes: 3", "job.yaml:4: nodes: is written twice, first at"),
        ('"a\\x1b[31m": 1', "a\\x1b[31m: is not a field"),
    ],
)  # fmt: skip
def test_every_mistake_gets_one_clear_line(folder: Path, text: str, said: str) -> None:
    head = "entrypoint: train.py\n" if text.startswith("name") else HEAD
    line = fault(folder, f"{head}{text}\n")
    assert said in line
    assert line.startswith("job.yaml")
    assert line.isprintable()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("proc_per_node: 2", "proc_per_node: is not a field; did you mean procs_per_node?"),
        ("hang_timeout: 2", "hang_timeout: is not a field; did you mean monitor.hang_timeout?"),
        (
            "monitor: {hang_timout: 2}",
            "monitor.hang_timout: is not a field; did you mean monitor.hang_timeout?",
        ),
        ("script: a.py", "did you mean entrypoint?"),
        ("gpus: 8", "did you mean gpus_per_node?"),
        ("nnodes: 8", "did you mean nodes?"),
        ("xyzzy: 8", "xyzzy: is not a field"),
    ],
)
def test_unknown_key_gets_a_suggestion(folder: Path, text: str, said: str) -> None:
    assert fault(folder, f"{HEAD}{text}\n").endswith(said)


def test_all_faults_are_reported_together_by_line(folder: Path) -> None:
    text = "nmae: a\nnodes: 0\nentrypoint: tran.py\nnodes: 1\nenv: {RANK: 1}\nworkdir: .\n"
    lines = faults(folder, text, "spares=x", backend="cloud")
    assert [line.split(": ")[0] for line in lines] == [
        *[f"job.yaml:{number}" for number in (1, 2, 3, 4, 5)],
        *["job.yaml", "--backend cloud", "--set spares=x"],
    ]
    assert "job.yaml: name: is missing; give the job a name, such as `name: my-job`" in lines


def test_overrides_win_and_are_named(folder: Path) -> None:
    changes = ("nodes=17", "monitor.hang_timeout=off", "env.A=x")
    file = loaded(folder, f"{HEAD}procs_per_node: 2\nnodes: 2\n", *changes, backend="slurm")
    assert (file.spec.nodes, file.spec.monitor.hang_timeout, file.spec.env) == (17, None, {"A": "x"})
    assert file.spec.backend == "slurm"
    assert file.where("nodes") == "--set nodes=17"
    assert file.where("backend") == "--backend slurm"
    assert file.where("name").endswith("job.yaml:1: name")


def test_faulty_override_is_named_by_argument(folder: Path) -> None:
    assert faults(folder, HEAD, "nodes=0") == ["--set nodes=0: must be a whole number of at least 1, not 0"]
    assert len(faults(folder, HEAD, "nodes", "spares=[", "nodes=0")) == 3
    assert faults(folder, HEAD, "nodse=1") == ["--set nodse=1: is not a field; did you mean nodes?"]
    assert faults(folder, HEAD, "monitr.x=1") == ["--set monitr.x=1: monitr: is not a field; did you mean monitor?"]


def test_the_schema_describes_every_field() -> None:
    schema = json_schema()
    parts: list[dict[str, Any]] = [schema, *schema["$defs"].values()]
    for part in parts:
        for name, value in part["properties"].items():
            assert value.get("description", "").endswith("."), name


def test_schema_accepts_what_an_editor_sees() -> None:
    schema = json_schema()
    monitor, top = schema["$defs"]["Monitor"]["properties"], schema["properties"]
    assert top["nodes"] | {"description": ""} == {
        "default": 1, "description": "", "maximum": 4096, "minimum": 1, "title": "Nodes", "type": "integer",
    }  # fmt: skip
    number, text, words = monitor["hang_timeout"]["anyOf"]
    assert (number["type"], text["type"], words["enum"]) == ("number", "string", ["auto", "off", False])
    assert re.fullmatch(text["pattern"], "1h30m") and not re.fullmatch(text["pattern"], "1m1h")
    assert monitor["hang_timeout"]["default"] == "auto"
    assert top["env"]["patternProperties"] == {"^[A-Za-z_][A-Za-z0-9_]*$": {"type": ["string", "number", "boolean"]}}
    assert schema["required"] == ["name"]


def test_the_starter_loads_once_its_script_exists(folder: Path) -> None:
    starter = (ROOT / "templates" / "job.yaml.j2").read_text()
    assert loaded(folder, starter).spec.entry == Entry("script", "train.py")


def test_starter_comments_are_valid(folder: Path) -> None:
    """The comments of the starter file are valid when uncommented."""
    starter = (ROOT / "templates" / "job.yaml.j2").read_text()
    written = re.sub(r"(?m)^( *)# ( *(?:- |[a-z_]+:))", r"\1\2", starter)
    spec = loaded(folder, written).spec
    assert (spec.slurm.partition, spec.setup, spec.checkpoint.keep) == ("gpu", ("ulimit -n 65536",), 3)
