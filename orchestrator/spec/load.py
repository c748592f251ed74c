"""Reader of a job file: returns its `JobSpec`, or all its faults at once, each with its place.

`model` has the fields of a job file, `value_types` the kinds of their values, `yaml_document` reads the YAML.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

import pydantic
from pydantic_core import ErrorDetails

from orchestrator.core.errors import Fault
from orchestrator.spec import hosts, launch_lines, yaml_document
from orchestrator.spec.model import JobSpec
from orchestrator.spec.value_types import PATTERNS, Entry, Section
from orchestrator.spec.yaml_document import Document, SpecError, WrongValue, did_you_mean, escape, quote_value

__all__ = ["Entry", "JobSpec", "SpecError", "SpecFile", "json_schema", "load", "validate"]

MUST_BE = {
    "int": "a whole number",
    "greater": "a whole number of at least {ge}",
    "less": "a whole number of at most {le}",
    "literal": "{expected}",
    "bool": "true or false",
    "string": 'text (an empty one is "")',
    "tuple": "a list",
    "dict": "a map of names to values",
    "model": "a section, with its keys indented below it",
}
"""The expected value for each of pydantic's errors, by the first word of its type."""

FIELD_ALIASES = {
    **dict.fromkeys(("script", "main", "program"), "entrypoint"),
    **dict.fromkeys(("cmd", "run"), "command"),
    **dict.fromkeys(("environment", "envs"), "env"),
    **dict.fromkeys(("num_nodes", "nnodes", "num_machines"), "nodes"),
    **dict.fromkeys(("gpus", "num_gpus"), "gpus_per_node"),
    **dict.fromkeys(("nproc_per_node", "ntasks_per_node", "num_processes"), "procs_per_node"),
    **dict.fromkeys(("timeout", "walltime", "time"), "time_limit"),
    **dict.fromkeys(("max_restarts", "retries"), "restart.max"),
}
"""Names of fields in other launchers, and the name of the same field here."""


@dataclass(frozen=True, slots=True)
class SpecFile:
    """A job file that was read."""

    path: Path
    text: str
    spec: JobSpec
    # The folder of the file, and that of the code; both absolute
    folder: Path
    workdir: Path
    # Those of backend ssh
    hosts: tuple[hosts.HostSpec, ...] = ()
    document: Document = field(default_factory=Document, repr=False, compare=False)

    def where(self, key: str) -> str:
        """Return the place of a dotted key for an error: `job.yaml:14: nodes` or `--set nodes=17`."""
        return self.document.where(key)


def load(path: Path, *, overrides: Sequence[str] = (), backend: str | None = None) -> SpecFile:
    """Read a job file. `overrides` are `key.path=value`, values in YAML. Raises SpecError with all faults at once."""
    text = yaml_document.read_text(path)
    if text.startswith("#!"):
        what = f"is a script, not a job file; convert it: orch init --from-command {shlex.quote(str(path))}"
        raise SpecError([Fault(escape(str(path)), what)])
    document = yaml_document.parse(text, escape(str(path)))
    if system := _other_system(document.data):
        what = f"is a job file of {system}; write its command as launch in one of orch's: orch init"
        raise SpecError([Fault(document.origin, what)])
    for argument in overrides:
        document.override(argument)
    if backend is not None:
        document.put("backend", backend, f"--backend {escape(backend)}")
    return validate(path, text, document)


def _other_system(data: Mapping[str, object]) -> str:
    """Return the system whose job file this is by its keys; empty for none that is known."""
    if {"entrypoint", "command", "launch"} & data.keys():
        return ""
    if "apiVersion" in data:
        return "Kubernetes"
    if data.get("type") in ("task", "service", "dev-environment"):
        return "dstack"
    return "SkyPilot" if "run" in data and data.keys() & {"resources", "num_nodes", "file_mounts"} else ""


def validate(path: Path, text: str, document: Document) -> SpecFile:
    """Return the job file that a document holds, as if read from `path`. Raises SpecError with all faults at once."""
    folder, faults = path.absolute().parent, document.faults
    launch_lines.parse_launch_line(document, folder)
    try:
        spec = JobSpec.model_validate(document.data, context=folder)
    except pydantic.ValidationError as err:
        wrong = [_fault(error, document) for error in err.errors(include_url=False)]
        raise SpecError([*faults, *wrong]) from err
    chosen: tuple[hosts.HostSpec, ...] = ()
    if spec.backend == "ssh":
        chosen, wrong = hosts.list_hosts(spec.ssh, folder, document.where)
        faults += wrong
    if faults:
        raise SpecError(faults)
    workdir = yaml_document.resolve_path(folder, spec.workdir).resolve()
    return SpecFile(path, text, spec, folder, workdir, chosen, document)


REMOVED_FIELDS = {
    "monitor.hang_patience": "write monitor.hang_timeout: {}, or monitor.on_hang: notify to end nothing",
    "monitor.hang_ceiling": "write monitor.hang_timeout: {} to end a job that stalls for this long",
    "monitor.hang_floor": "remove it: a stall of 5 s, or of three usual steps, is inspected and reported",
    "slurm.mail": 'write slurm.extra: ["--mail-user={}", "--mail-type=END,FAIL"]',
    **{
        f"slurm.{name}": f'write slurm.extra: ["--{name}={{}}"]'
        for name in ("reservation", "nodelist", "gres", "comment")
    },
}
"""Fields that earlier versions had, and what to write in their place; `{}` is their value."""


def _fault(error: ErrorDetails, document: Document) -> Fault:
    path = [part for part in error["loc"] if part != "[key]"]
    kind, context = error["type"], error.get("ctx", {})
    if kind == "missing":
        what = "is missing; give the job a name, such as `name: my-job`"
    elif kind == "extra_forbidden":
        instead = REMOVED_FIELDS.get(_join_path(path), "").format(escape(str(error["input"])))
        what = f"was removed; {instead}" if instead else f"is not a field{_suggest_field(path)}"
    elif kind == "value_error" and not isinstance(context["error"], WrongValue):
        what = str(context["error"])
    else:
        words = re.findall("'(.*?)'", context.get("expected", ""))
        likely = did_you_mean(str(error["input"]), words)
        what = f"{_expected_value(kind, context)}, not {quote_value(error['input'])}{likely}"
    return document.fault(_join_path(path), what)


def _expected_value(kind: str, context: dict[str, Any]) -> str:
    """Return what a value must be, for one of pydantic's errors or for a `WrongValue`."""
    if kind == "value_error":
        return str(context["error"])
    if kind == "string_pattern_mismatch":
        return f"must be {PATTERNS[context['pattern']]}"
    return f"must be {MUST_BE[kind.partition('_')[0]].format(**context)}".replace("'", "")


def _join_path(path: Sequence[str | int]) -> str:
    """Return `ssh.hosts[0]` for a path of keys and list positions."""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).removeprefix(".")


def _suggest_field(path: Sequence[str | int]) -> str:
    """Return the likely field for an unknown key: one of the same name in another section, or one of a similar name."""
    word, names = str(path[-1]), list(_dotted_names(JobSpec))
    section = "".join(f"{part}." for part in path[:-1])
    elsewhere = [name for name in names if name.rpartition(".")[2] == word]
    if name := FIELD_ALIASES.get(word.lower()) or (elsewhere[0] if elsewhere else ""):
        return f"; did you mean {name}?"
    near = [name.removeprefix(section) for name in names if name.startswith(section)]
    return did_you_mean(word, [name for name in near if "." not in name], section)


def _dotted_names(part: type[Section], prefix: str = "") -> Iterator[str]:
    """Yield the dotted names of all fields."""
    for key, info in part.model_fields.items():
        yield f"{prefix}{info.alias or key}"
        for kind in (info.annotation, *get_args(info.annotation)):
            if isinstance(kind, type) and issubclass(kind, Section):
                yield from _dotted_names(kind, f"{prefix}{key}.")


def field_names() -> list[str]:
    """Return the dotted names of all fields of a job file."""
    names = []
    for name, info in JobSpec.model_fields.items():
        kind = info.annotation
        if isinstance(kind, type) and issubclass(kind, Section):
            names += [f"{name}.{inner.alias or key}" for key, inner in kind.model_fields.items()]
        else:
            names.append(name)
    return names


def json_schema() -> dict[str, Any]:
    """Return the JSON Schema of a job file, for editors; every field has its description."""
    schema = JobSpec.model_json_schema()
    # Pydantic puts a section's description into its class, where forms and references do not look.
    for name, info in JobSpec.model_fields.items():
        schema["properties"][name]["description"] = info.description
    one_entry = [{"required": [name]} for name in ("entrypoint", "command", "launch")]
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema, "oneOf": one_entry}
