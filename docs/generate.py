"""Generator of the parts of the documents that the code itself defines, written between their markers.

    python docs/generate.py            write all parts (`make docs`)

`<!-- begin generated: NAME -->` and `<!-- end generated: NAME -->` enclose a part. The reference of the verbs comes
from the command line, that of the job file from the spec, the map of the code from the docstrings of its rooms, and the
state diagrams from simulated nights: each arrow is a step that some night has made.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import click

from orchestrator.brain.brain import Brain
from orchestrator.brain.diagnosis.suspicion import SIGNS
from orchestrator.brain.model.facts import Facts
from orchestrator.cli.group import cli
from orchestrator.journal.journal_file import unwrap_message
from orchestrator.spec import load
from orchestrator.spec.value_types import DURATION, LINE, PATTERNS, WHOLE_MAX
from orchestrator.spec.yaml_document import quote_value
from orchestrator.supervisor import status
from tests import versions
from tests.support.sim.night import random_night
from tests.support.sim.world import World

ROOT = Path(__file__).parents[1]
NIGHTS = range(300)
"""Seeds of the nights that draw the diagrams; a test replays some of them."""

Json: TypeAlias = Mapping[str, Any]
STATES = ("job", "attempt", "agent", "rank")


class Step(NamedTuple):
    """One change of state in a night: of what, from which state (empty: none yet) to which, and by which event or decision."""

    what: str
    before: str
    after: str
    news: str


# The verbs


def verbs() -> str:
    """Return a table of the options that several verbs take alike, and one of every verb with its own options."""
    takes = {name: list(_options(name, command)) for name, command in cli.commands.items()}
    count = Counter(option for options in takes.values() for option in options)
    common = [option for option in count if count[option] > 1]
    shared = [_row(_code(option.usage), option.help) for option in common]
    lines = ["| option of several verbs | what it does |", "|---|---|", *shared, ""]
    lines += ["| verb, option of its own | what it does |", "|---|---|"]
    for name, command in cli.commands.items():
        context = click.Context(command, info_name=f"orch {name}", help_option_names=["-h", "--help"])
        words = [piece for piece in command.collect_usage_pieces(context) if piece != "[OPTIONS]"]
        also = ", ".join(_code(option.usage.split()[0]) for option in takes[name] if option in common)
        text = f"**{_sentence(command.help)}**" + (f" Also: {also}." if also else "")
        lines.append(_row(_code(" ".join(("orch", name, *words))), text))
        lines += [_row(_code(option.usage), option.help) for option in takes[name] if option not in common]
    return "\n".join(lines)


class Option(NamedTuple):
    """An option of a verb, as its help shows it."""

    usage: str
    help: str


def _options(name: str, command: click.Command) -> Iterator[Option]:
    """Yield the options of a verb that have help."""
    context = click.Context(command, info_name=f"orch {name}", help_option_names=["-h", "--help"])
    for option in command.params:
        record = option.get_help_record(context)
        if isinstance(option, click.Option) and record is not None:
            yield Option(record[0], option.help or "")


def _sentence(text: str | None) -> str:
    return " ".join((text or "").split())


def _code(text: str) -> str:
    return f"`{text}`"


def _row(*cells: str) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"


# The map of the code

ROOMS = (
    "cli",
    "report",
    "programs",
    "views",
    "client",
    "submission",
    "spec",
    "supervisor",
    "journal",
    "brain",
    "backends",
    "agent",
    "core",
)
"""In the order of a job's way."""


def rooms() -> str:
    """Return every room of the code with the first line of its docstring."""
    lines = []
    for room in ROOMS:
        for path in sorted((ROOT / "orchestrator" / room).rglob("__init__.py")):
            depth = len(path.relative_to(ROOT / "orchestrator").parts) - 2
            doc = (ast.get_docstring(ast.parse(path.read_text())) or "").partition("\n")[0]
            lines.append(f"{'  ' * depth + path.parent.name + '/':<18}{doc}".rstrip())
    return "\n".join(("```text", *lines, "```"))


# The job file


class Field(NamedTuple):
    """A field of the job file; a section has the value `section`."""

    name: str
    description: str
    value: str
    default: str


def job_file() -> Iterator[Field]:
    """Yield every field of the job file in its order, a section before what it holds."""
    schema = load.json_schema()
    yield from _fields(schema, schema["$defs"], "")


def _fields(part: Json, sections: Json, prefix: str) -> Iterator[Field]:
    for key, info in part["properties"].items():
        name, description = f"{prefix}{key}", info["description"]
        kinds = [kind["$ref"] for kind in (info, *info.get("anyOf", ())) if "$ref" in kind]
        if kinds:
            yield Field(name, description, "section", "")
            yield from _fields(sections[kinds[0].rpartition("/")[2]], sections, f"{name}.")
        else:
            default = "required" if key in part.get("required", ()) else _default(info["default"])
            yield Field(name, description, _value(info), default)


SHORT_WORDS = {DURATION: "a duration", LINE: "text"}
"""Words for kinds of values that many fields have; the page explains them above the table."""


def _value(info: Json) -> str:
    """Return in words what a field takes."""
    match info:
        case {"anyOf": kinds}:
            return ", or ".join(dict.fromkeys(text for kind in kinds if (text := _value(kind))))
        case {"enum": [*words, _]}:
            last = info["enum"][-1]
            return f"{', '.join(words)} or {last}" if isinstance(last, str) else " or ".join(words)
        case {"const": word}:
            return str(word)
        case {"pattern": pattern}:
            return SHORT_WORDS.get(pattern) or PATTERNS[pattern]
        case {"type": "integer", "minimum": low}:
            high = info.get("maximum", WHOLE_MAX)
            return f"{low} to {high}" if high < WHOLE_MAX else f"{low} or more"
        case {"type": "array", "items": items}:
            return "a list of texts" if _value(items) == "text" else f"a list, each {_value(items)}"
        case {"type": "boolean"}:
            return "true or false"
        case {"type": "object"}:
            return "a map of names to values"
        case {"type": "null" | "number"}:  # a number is a duration in seconds, next to its pattern
            return ""
    return "text"


def _default(default: object) -> str:
    if default in (None, [], {}):
        return "none"
    return _code(", ".join(default) if isinstance(default, list) else quote_value(default))


def fields() -> str:
    """Return every field of the job file: those at the top, then a table for each section."""
    sections = [field for field in job_file() if field.value == "section"]
    plain = [field for field in job_file() if field.value != "section"]
    parts = [_table(field for field in plain if "." not in field.name)]
    for section in sections:
        inner = [field for field in plain if field.name.rpartition(".")[0] == section.name]
        parts.append(f"**`{section.name}`**: {section.description}\n\n{_table(inner)}")
    return "\n\n".join(parts)


def _table(rows: Iterable[Field]) -> str:
    lines = ["| field | what it is | value | default |", "|---|---|---|---|"]
    return "\n".join([*lines, *(_row(_code(field.name), *field[1:]) for field in rows)])


# The signs of life


def signs() -> str:
    """Return the table of the signs of life and their weights, as the brain has it."""
    lines = ["| sign | what it is | what it is worth |", "|---|---|---|"]
    return "\n".join([*lines, *(_row(one.name, one.meaning, one.weight.value) for one in SIGNS)])


# The states


def steps(seeds: Iterable[int]) -> set[Step]:
    """Play the nights of `seeds` and return every change of state in their journals."""
    made: set[Step] = set()
    for seed in seeds:
        world = World(random_night(seed))
        world.play()
        brain, plans = Brain(), 0
        before: dict[tuple[object, ...], str] = {}
        for news in world.journal.replay():
            name = type(unwrap_message(news)).__name__
            # An attempt that continues on other nodes keeps its ranks.
            continues = brain.facts.attempt is not None and brain.facts.end is None
            plans += name == "Planned" and not continues
            brain.learn(news)
            now = _states(brain.facts, plans)
            made |= {
                Step(str(key[0]), before.get(key, ""), state, name)
                for key, state in now.items()
                if before.get(key) != state
            }
            before = now
    return made


def _states(facts: Facts, plans: int) -> dict[tuple[object, ...], str]:
    """Return the state of everything that has one. A new attempt has a state of its own; so have the ranks of a new plan."""
    states: dict[tuple[object, ...], str] = {("job",): status.state(facts)}
    number = 0
    if facts.attempt is not None:
        number = facts.attempt.number
        states["attempt", number] = facts.attempt.phase.value
    states |= {("agent", node.name): node.agent_state.value for node in facts.every_node()}
    states |= {("rank", plans, number, rank.rank): rank.rank_state.value for rank in facts.ranks.values()}
    return states


def diagrams() -> str:
    """Return a state diagram of the job, an attempt, an agent and a rank, in Mermaid."""
    made = steps(NIGHTS)
    return "\n\n".join(f"{_TITLES[what]}\n\n{_diagram(made, what)}" for what in STATES)


_TITLES = {
    "job": "The job, as `orch status` shows it (`supervisor.status.state`):",
    "attempt": "An attempt (`brain.model.facts.Phase`):",
    "agent": "A node's agent, as the supervisor sees it (`brain.model.facts.AgentState`):",
    "rank": "A rank in one attempt (`brain.model.facts.RankState`):",
}


def _diagram(made: set[Step], what: str) -> str:
    arrows: dict[tuple[str, str], list[str]] = {}
    for step in sorted(made):
        if step.what == what:
            arrows.setdefault((step.before or "[*]", step.after), []).append(step.news)
    lines = [f"    {before} --> {after}: {', '.join(news)}" for (before, after), news in arrows.items()]
    return "\n".join(("```mermaid", "stateDiagram-v2", *lines, "```"))


def drawn(text: str) -> set[Step]:
    """Return the steps that the diagrams in a document show."""
    shown_steps: set[Step] = set()
    blocks = re.findall(r"```mermaid\nstateDiagram-v2\n(.*?)```", text, re.DOTALL)
    for what, block in zip(STATES, blocks, strict=True):
        for before, after, news in re.findall(r"(\S+) --> (\S+): (.+)", block):
            shown_steps |= {Step(what, before.replace("[*]", ""), after, name) for name in news.split(", ")}
    return shown_steps


# The documents

PARTS: dict[str, dict[str, Callable[[], str]]] = {
    "docs/reference.md": {"fields": fields, "verbs": verbs, "versions": versions.table},
    "docs/hangs.md": {"signs": signs},
    "docs/architecture.md": {"rooms": rooms, "states": diagrams},
}


def replaced(text: str, name: str, part: str) -> str:
    """Return a document with the part `name` replaced. Raises ValueError when it lacks the markers."""
    begin, end = f"<!-- begin generated: {name} -->", f"<!-- end generated: {name} -->"
    head, begin_marker, rest = text.partition(begin)
    _, end_marker, tail = rest.partition(end)
    if not begin_marker or not end_marker:
        raise ValueError(f"the markers of {name} are missing")
    return f"{head}{begin}\n\n{part}\n\n{end}{tail}"


def main() -> int:
    """Write every part that has changed, and print which documents changed."""
    for document, parts in PARTS.items():
        path = ROOT / document
        old = text = path.read_text()
        for name, make in parts.items():
            text = replaced(text, name, make())
        if text != old:
            path.write_text(text)
            print(f"wrote {document}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
