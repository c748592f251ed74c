"""Documents compared with the code: reference, links, examples and tables are read back."""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
from pathlib import Path
from types import ModuleType
from typing import get_args

import click
import pytest

from orchestrator import brain
from orchestrator.brain.brain import Brain
from orchestrator.brain.model import decisions as d
from orchestrator.brain.model.facts import News, Phase
from orchestrator.brain.model.node_facts import AgentState
from orchestrator.brain.model.rank_facts import RankState
from orchestrator.cli.group import EXIT_JOB_FAILED, EXIT_NEEDS_PERSON, EXIT_TIMEOUT, cli
from orchestrator.client import post_mortem, stacks
from orchestrator.core.checkpoints.checkpoint import CheckpointState
from orchestrator.core.errors import EXIT_INTERRUPTED, ClusterError, UserError
from orchestrator.core.jobdir import status_file
from orchestrator.core.jobdir.layout import JobDir
from orchestrator.core.jobdir.plan import Plan
from orchestrator.core.plan_types import Limits, PlannedNode
from orchestrator.core.settings.rank_env import NodePlan, rank_env
from orchestrator.core.slurm import command_output
from orchestrator.core.slurm.command_output import QueueJob
from orchestrator.journal.journal_file import JournalEntry
from orchestrator.spec import load
from orchestrator.spec.value_types import Occasion
from orchestrator.supervisor import status as status_object
from orchestrator.views import cells
from tests import versions
from tests.support import brain_story, jobs

ROOT = Path(brain.__file__).parents[2]
README = (ROOT / "README.md").read_text()
REFERENCE = (ROOT / "docs" / "reference.md").read_text()
LAUNCH = (ROOT / "docs" / "launch.md").read_text()
CHECKPOINTS = (ROOT / "docs" / "checkpoints.md").read_text()
SSH = (ROOT / "docs" / "ssh.md").read_text()
SLURM = (ROOT / "docs" / "slurm.md").read_text()
STAGES = (
    "config", "connect", "host key", "auth", "shell", "python", "folder", "copy", "lease", "agent", "forward",
)  # fmt: skip
CHOSEN_BY_USERS = ("partition", "account", "constraint", "exclude", "mem", "comment", "licenses", "nice")
"""Options of the golden batch script that come from its job file."""

FAILURES = (ROOT / "docs" / "failures.md").read_text()
HANGS = (ROOT / "docs" / "hangs.md").read_text()
ARCHITECTURE = (ROOT / "docs" / "architecture.md").read_text()
PAGES = [
    *(ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md")),
    *sorted((ROOT / "docs").glob("*.md")),
]
PAGE_NAMES = [str(page.relative_to(ROOT)) for page in PAGES]
NIGHTS = range(20)
"""Those of the nights that drew the state diagrams that are replayed."""

NOT_OURS = ("make", "pip", "eval", "kill", "git")
"""First words of shell lines in the documents that do not run orch."""


def _generate() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generate", ROOT / "docs" / "generate.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


GENERATE = _generate()


def _blocks(text: str, kind: str) -> list[str]:
    return re.findall(rf"^```{kind}\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


def _prose(text: str) -> str:
    """Return a page without its blocks of code."""
    return re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)


def _first_cells(text: str, heading: str) -> list[str]:
    """Return the first text in backticks of each row of the table with this heading."""
    rows = text.partition(f"\n| {heading} |")[2].partition("\n\n")[0].splitlines()[2:]
    return [row.split("`")[1] for row in rows]


# What is generated


@pytest.mark.parametrize("part", ["verbs", "fields", "versions"])
def test_reference_is_generated_from_code(part: str) -> None:
    """The reference is the code's own."""
    made = GENERATE.PARTS["docs/reference.md"][part]()
    assert GENERATE.replaced(REFERENCE, part, made) == REFERENCE, "stale: run `make docs`"


@pytest.mark.slow
@pytest.mark.skipif("ORCH_STRICT" not in os.environ, reason="ORCH_STRICT: only `.ci/run` has versions of its own")
def test_versions_of_this_machine_are_in_table() -> None:
    tested = {one.program: (*one.each_change, *one.in_part, *one.by_hand) for one in versions.TESTED}
    assert not {name: version for name, version in versions.here().items() if version not in tested[name]}
    assert f"torch=={versions.TESTED[1].each_change[0]}." in (ROOT / "constraints.txt").read_text()


def test_signs_of_life_match_code_with_weights() -> None:
    assert GENERATE.replaced(HANGS, "signs", GENERATE.signs()) == HANGS, "stale: run `make docs`"


def test_code_map_is_generated() -> None:
    assert GENERATE.replaced(ARCHITECTURE, "rooms", GENERATE.rooms()) == ARCHITECTURE, "stale: run `make docs`"


def test_every_event_of_notify_on_is_explained() -> None:
    rows = HANGS.partition("\n| word of `notify.on` |")[2].partition("\n\n")[0]
    assert set(re.findall(r"`(\w+)`[,|\s]", rows)) >= set(get_args(Occasion))


def test_every_verb_and_option_has_help() -> None:
    for name, command in cli.commands.items():
        assert command.help, name
        for option in command.params:
            if isinstance(option, click.Option):
                assert option.help and option.help.endswith("."), f"{name} {option.name}"


def test_every_field_of_the_spec_has_a_description() -> None:
    for field in GENERATE.job_file():
        assert field.description.endswith("."), field.name


def test_diagrams_show_every_state() -> None:
    drawn = GENERATE.drawn(ARCHITECTURE)
    for what, states in (("attempt", Phase), ("agent", AgentState), ("rank", RankState)):
        assert {step.after for step in drawn if step.what == what} == {state.value for state in states}
    seen = {step.after for step in drawn if step.what == "job"}
    assert seen == set(cells.STYLES)


@pytest.mark.slow
def test_diagrams_show_every_transition_of_nights() -> None:
    """The diagrams show every transition that simulated nights make."""
    unknown = GENERATE.steps(NIGHTS) - GENERATE.drawn(ARCHITECTURE)
    assert unknown == set(), "stale: run `make docs`"


# Links and examples


@pytest.mark.parametrize("page", PAGE_NAMES)
def test_links_have_targets(page: str) -> None:
    """Links lead to something that exists."""
    path = ROOT / page
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", _prose(path.read_text())):
        name, _, anchor = target.partition("#")
        goal = (path.parent / name).resolve() if name else path
        has_anchor = goal.exists() and (not anchor or anchor in _anchors(goal))
        if not target.startswith("https://") and not has_anchor:
            broken.append(target)
    assert broken == []


LAUNCHERS = {"torchrun", "accelerate", "deepspeed", "fabric", "python"}
FOREIGN = {"ppo.py", "train_unconditional.py", "scripts/sft.py"}
"""Files of other people's programs that docs/programs.md names."""


@pytest.mark.parametrize("page", PAGE_NAMES)
def test_files_named_in_documents_exist(page: str) -> None:
    named = re.findall(r"`((?:[a-z_]+/)*[a-z_.]+\.(?:py|j2))`", _prose((ROOT / page).read_text()))
    missing = set(named) - {"train.py"} - (FOREIGN if page == "docs/programs.md" else set())
    for folder in ("orchestrator", "templates", "tests", "jobs"):
        for path in (ROOT / folder).rglob("*.*"):
            missing -= {name for name in missing if f"/{path.relative_to(ROOT)}".endswith(f"/{name}")}
    assert missing == set()


def _anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    heads = re.findall(r"^#+ (.+)$", _prose(page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


@pytest.mark.parametrize(
    "text", [text for page in (README, REFERENCE, LAUNCH, CHECKPOINTS, HANGS, SLURM) for text in _blocks(page, "yaml")]
)
def test_job_files_in_the_documents_load(text: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    (tmp_path / "job.yaml").write_text(text)
    assert load.load(tmp_path / "job.yaml").spec.name


def _shell_lines(text: str) -> list[str]:
    """Return the commands of the page: lines of sh blocks, and those after a prompt in recorded output."""
    typed = [line for block in _blocks(text, "sh") for line in block.splitlines() if line]
    shown = [line[2:] for block in _blocks(text, "text") for line in block.splitlines() if line.startswith("$ ")]
    inline = re.findall(r"`(orch [a-z]+ [^`|…]+)`", _prose(text))
    return typed + shown + [line for line in inline if "[" not in line and ">" not in line]


@pytest.mark.parametrize("page", PAGE_NAMES)
def test_documented_commands_exist_in_orch_and_make(page: str) -> None:
    """Commands in the documents are ones that orch and make know."""
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for line in _shell_lines((ROOT / page).read_text()):
        program, *words = shlex.split(line)
        if program == "make":
            assert words[0] in targets, line
        elif program not in NOT_OURS:
            assert program == "orch", line
            _check(line, words)


def _check(line: str, words: list[str]) -> None:
    command = cli.commands.get(words[0])
    assert command is not None, line
    if words[0] == "run":  # what stands behind the script or the launcher is theirs
        begins = [index for index, word in enumerate(words) if word.endswith(".py") or word in LAUNCHERS]
        script = min(begins, default=len(words))
        words = words[:script]
    flags = {flag for option in command.params for flag in (*option.opts, *option.secondary_opts)}
    assert {word for word in words[1:] if word.startswith("-") and word != "-"} <= flags, line


def test_python_in_reference_compiles() -> None:
    """Python in the reference is valid."""
    for text in _blocks(REFERENCE, "python"):
        compile(text, "reference.md", "exec")


# Tables


def test_exit_codes_match_the_code() -> None:
    rows = REFERENCE.partition("\n| exit code |")[2].partition("\n\n")[0].splitlines()[2:]
    codes = [int(row.split("|")[1]) for row in rows]
    own = [
        EXIT_JOB_FAILED,
        UserError.exit_code,
        ClusterError.exit_code,
        EXIT_NEEDS_PERSON,
        EXIT_TIMEOUT,
        EXIT_INTERRUPTED,
    ]
    assert codes == [0, *own]


def test_states_match_the_code() -> None:
    assert _first_cells(REFERENCE, "state") == list(cells.STYLES)
    assert set(status_file.ENDED) == {end.value for end in d.JobEnd} <= set(cells.STYLES)
    assert _first_cells(REFERENCE, "state of a checkpoint") == [state.value for state in CheckpointState]


def test_every_kind_of_verdict_is_explained() -> None:
    assert sorted(_first_cells(FAILURES, "kind")) == sorted(kind.value for kind in d.VerdictKind)


def test_explained_error_messages_exist() -> None:
    """The longest piece of each message between two gaps must stand in the sources; f-strings leave the gaps."""
    sources = "\n".join(path.read_text() for path in sorted((ROOT / "orchestrator").rglob("*.py")))
    for message in _first_cells(FAILURES, "message"):
        _assert_said(message, sources)


def _assert_said(message: str, sources: str) -> None:
    piece = max(re.split(r"…|;|\(|: |\b[A-Z]+\b|[^ ]*\.(?:yaml|py)\S*", message), key=len).strip(" ,?:")
    assert len(piece) >= 6 and piece in sources, f"{message!r}: no {piece!r}"


def test_host_refusal_reasons_exist_with_stages() -> None:
    """Reasons why a host is refused exist with their stages."""
    folders = ("orchestrator/backends/ssh", "orchestrator/agent", "templates")
    paths = [
        path for folder in folders for path in sorted({*(ROOT / folder).rglob("*.py"), *(ROOT / folder).rglob("*.j2")})
    ]
    sources = "\n".join(path.read_text() for path in paths)
    rows = _first_cells(SSH, "reason")
    assert {row.partition(": ")[0] for row in rows} == set(STAGES) - {"config"}
    for row in rows:
        if "permission denied" not in row:  # what the system says
            _assert_said(row.partition(": ")[2], sources)


def test_explained_slurm_messages_exist() -> None:
    paths = [*(ROOT / "orchestrator").rglob("*.py"), *(ROOT / "templates").glob("*.j2")]
    sources = "\n".join(path.read_text() for path in sorted(paths))
    for message in _first_cells(SLURM, "message"):
        _assert_said(message, sources)


def test_explained_wait_reasons_have_a_fix() -> None:
    """Reasons why a job waits that are explained are shown with a fix."""
    for reason in _first_cells(SLURM, "reason"):
        assert command_output.describe_job(QueueJob("7", "PENDING", reason), "t-1").fix, reason


def test_documented_slurm_requests_match_the_code() -> None:
    batch = (ROOT / "tests" / "golden" / "slurm-gpus.sh").read_text()
    documented = set(re.findall(r"`(--[a-z-]+)", SLURM))
    own = [line.split()[1].partition("=")[0] for line in batch.splitlines() if line.startswith("#SBATCH --")]
    chosen = {"--job-name", "--open-mode", *(f"--{word}" for word in CHOSEN_BY_USERS)}
    assert sorted(set(own) - chosen - documented) == []


def test_launch_stages_are_documented_in_order() -> None:
    assert f"{', '.join(STAGES)}." in " ".join(SSH.split())


def _plan() -> Plan:
    limits = Limits(1, 1, 1, 1, 1, 1, 1, 1, 1, (), None, "restart")
    return Plan(
        id="a", name="a", backend="local", created_at=0.0, nodes=(PlannedNode("node-0", "h", "a", (), (0,)),),
        argv=("x",), resume_args=(), shell=False, setup=(), env={}, unbuffered=False, secrets=(), rendezvous_port=None,
        heartbeat_s=1.0, limits=limits, checkpoint_glob="*", checkpoint_keep=None, checkpoint_keep_every=None,
        total_steps=None,
    )  # fmt: skip


def test_reference_names_every_variable_of_a_rank() -> None:
    names = rank_env(NodePlan(_plan(), JobDir(ROOT), "node-0", 1, ("node-0",)), 0, ("h", 1))
    assert [name for name in names if f"`{name}`" not in REFERENCE] == []


def test_reference_names_every_key_of_json_outputs() -> None:
    made = Brain()
    made.learn(jobs.planned(_plan()))
    now = status_object.Now(0.0, 0.0)
    status = status_file.to_json(status_object.status(_plan(), made.facts, now, {}))
    why = post_mortem.why(_plan(), jobs.record(_one_crash()))
    attempt = why["attempts"][0]
    rank = stacks.rank_json(brain_story.look(0), "node-0")
    parts = (status, status["nodes"][0], status["ranks"][0], why, attempt, attempt["verdict"], rank)
    keys = [key for part in parts for key in part]
    assert [key for key in keys if f"`{key}`" not in REFERENCE] == []


def _one_crash() -> list[JournalEntry]:
    """Return the journal of a job whose only attempt got a verdict."""
    verdict = d.Verdict(
        d.VerdictKind.CRASH,
        (0,),
        "node-0",
        "s",
        (),
        d.FailureSignature(d.VerdictKind.CRASH),
        None,
        0.0,
        False,
    )
    news: tuple[News, ...] = (
        jobs.planned(_plan()),
        d.BeginAttempt(0.0, "submitted", 1, None),
        d.Judge(1.0, "s", 1, verdict),
    )
    return [JournalEntry(number, 0.0, 0.0, "", "", 0, one) for number, one in enumerate(news, 1)]


OTHERS_NAMES = {"ROOM", "test_MODULE", "set_default_dtype"}
"""Names in those pages that are placeholders or torch's."""


@pytest.mark.parametrize("page", ["CONTRIBUTING.md", "docs/architecture.md", "tests/README.md"])
def test_quoted_names_of_code_exist(page: str) -> None:
    """A renamed class, function or module is renamed where a page quotes it."""
    known = set(OTHERS_NAMES)
    for folder in ("orchestrator", "tests", "docs", "bench"):
        for path in (ROOT / folder).rglob("*.py"):
            known |= {*re.findall(r"\w+", path.read_text()), *path.with_suffix("").parts}
    quoted = re.findall(r"`([A-Za-z_][\w./]*)(?:\(\))?`", (ROOT / page).read_text())
    assert [name for name in quoted if not known.issuperset(filter(None, re.split(r"[./]", name)))] == []
