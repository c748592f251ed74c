"""What does this job file say, and does it say it rightly?

Rules: `load` reports all faults at once, each at its place and in our words. What a file may say stands in
`spec_model`, what a value may be in `spec_rules`, how YAML is read in `specfile`.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, get_args

import pydantic
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from orchestrator import hosts, specfile
from orchestrator import spec_rules as rules
from orchestrator.spec_model import JobSpec, Part
from orchestrator.spec_rules import Entry, Rule, duration_text
from orchestrator.specfile import Document, Fault, Places, SpecError, did_you_mean, shown

__all__ = ["Entry", "FieldDoc", "JobSpec", "SpecError", "SpecFile", "fields", "json_schema", "load"]

# What it is called here, and what people coming from other launchers write.
_OTHER_WORDS = {
    "entrypoint": ("script", "main", "program"),
    "command": ("cmd", "run"),
    "env": ("environment", "envs"),
    "nodes": ("num_nodes", "nnodes", "num_machines"),
    "gpus_per_node": ("gpus", "num_gpus"),
    "procs_per_node": ("nproc_per_node", "ntasks_per_node", "num_processes"),
    "time_limit": ("timeout", "walltime", "time"),
    "restart.max": ("max_restarts", "retries"),
}


class FieldDoc(NamedTuple):
    """A field as the reference shows it; a section has the type `section` and no default."""

    name: str
    type: str
    default: str
    description: str


@dataclass(frozen=True, slots=True)
class SpecFile:
    """A job file that was read: `folder` is the file's, `workdir` the code's, both absolute; `hosts` are those of
    backend ssh."""

    path: Path
    text: str
    spec: JobSpec
    folder: Path
    workdir: Path
    places: Places = field(default=Places(), repr=False, compare=False)
    hosts: tuple[hosts.Host, ...] = ()

    def where(self, key: str) -> str:
        """Return where a dotted key was written, for an error: `job.yaml:14: nodes` or `--set nodes=17`."""
        return self.places.where(key)


def load(path: Path, *, overrides: Sequence[str] = (), backend: str | None = None) -> SpecFile:
    """Read a job file. `overrides` are `key.path=value`, values in YAML. Raises SpecError with all faults at once."""
    text = specfile.read(path)
    document = specfile.compose(text, str(path))
    faults = list(document.faults)
    for argument in overrides:
        try:
            document = specfile.override(document, argument)
        except SpecError as err:
            faults += err.faults
    if backend is not None:
        document = specfile.put(document, "backend", backend, f"--backend {specfile.escaped(backend)}")
    folder = path.absolute().parent
    workdir, missing = _on_disk(document, folder)
    faults += missing
    try:
        spec = JobSpec.model_validate(document.data)
    except pydantic.ValidationError as err:
        wrong = [_fault(error, document.places) for error in err.errors(include_url=False)]
        raise SpecError([*faults, *wrong]) from err
    chosen: tuple[hosts.Host, ...] = ()
    if spec.backend == "ssh" and not missing:
        chosen, wrong = hosts.listed(spec.ssh, folder, document.places.where("ssh.hosts"))
        faults += wrong
    if faults or workdir is None:
        raise SpecError(faults)
    return SpecFile(path, text, spec, folder, workdir, document.places, chosen)


def json_schema() -> dict[str, Any]:
    """Return the JSON Schema of a job file, for editors; every field has its description."""
    schema = JobSpec.model_json_schema()
    # Pydantic leaves a section's description to its class, where a form or a reference would not look.
    for name, info in JobSpec.model_fields.items():
        schema["properties"][name]["description"] = info.description
    one_entry = [{"required": ["entrypoint"]}, {"required": ["command"]}]
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema, "oneOf": one_entry}


def fields() -> list[FieldDoc]:
    """Return every field of the spec in its order, a section before what it holds."""
    return list(_all_docs())


@functools.cache
def _all_docs() -> tuple[FieldDoc, ...]:
    return tuple(_docs(JobSpec, ""))


def _docs(part: type[Part], prefix: str) -> Iterator[FieldDoc]:
    for key, info in part.model_fields.items():
        name, told = f"{prefix}{key}", info.description or ""
        section = _section(info)
        if section:
            yield FieldDoc(name, "section", "", told)
            yield from _docs(section, f"{name}.")
        else:
            yield FieldDoc(name, _type_text(info), _default_text(info), told)


def _section(info: FieldInfo | None) -> type[Part] | None:
    kind = info.annotation if info else None
    return kind if isinstance(kind, type) and issubclass(kind, Part) else None


def _rule(metadata: Sequence[object]) -> Rule | None:
    return next((one for one in metadata if isinstance(one, Rule)), None)


def _type_text(info: FieldInfo) -> str:
    """Return the words of the field's rule, or those of what its list or map holds."""
    rule = _rule(info.metadata)
    if rule:
        return rule.says
    held = [_rule(item.__metadata__) for item in get_args(info.annotation) if item is not Ellipsis]
    words = [rule.says for rule in held if rule]
    return f"a map from {words[0]} to {words[1]}" if len(words) == 2 else f"a list, each {words[0]}"


def _default_text(info: FieldInfo) -> str:
    rule = _rule(info.metadata)
    if info.is_required():
        return "required"
    if info.default in (None, (), {}) and not (rule and rule.show is duration_text and "off" in rule.says):
        return "none"
    return rule.show(info.default) if rule else shown(info.default)


def _fault(error: ErrorDetails, places: Places) -> Fault:
    """Say one of pydantic's errors in our words."""
    path = [part for part in error["loc"] if part != "[key]"]
    what = shown(error["input"])
    match error["type"]:
        case "value_error":
            said = str(error["ctx"]["error"])
        case "missing":
            said = "is missing; give the job a name, such as `name: my-job`"
        case "extra_forbidden":
            said = f"is no field{_meant(path)}"
        case "tuple_type":
            said = f"must be a list, not {what}"
        case "dict_type":
            said = f"must be a map of names to values, not {what}"
        case "model_type":
            said = f"must be a section, with its keys indented below it, not {what}"
        case _:
            said = f"cannot be {what}"
    return places.fault(specfile.dotted(path), said)


def _meant(path: Sequence[int | str]) -> str:
    """Return a guess at the field an unknown key stands for: a near name beside it, or the same one elsewhere."""
    part: type[Part] = JobSpec
    for key in path[:-1]:
        part = _section(part.model_fields.get(str(key))) or part
    word = str(path[-1])
    known = [ours for ours, theirs in _OTHER_WORDS.items() if word.lower() in theirs]
    known += [doc.name for doc in _all_docs() if doc.name.split(".")[-1] == word]
    return (
        f"; did you mean {known[0]}?"
        if known
        else did_you_mean(word, part.model_fields, specfile.dotted(path[:-1]))
    )


def _on_disk(document: Document, folder: Path) -> tuple[Path | None, list[Fault]]:
    """Find the folder of the code and check what the file names on the disk, even if other fields are at fault."""
    data, fault, faults = document.data, document.places.fault, list[Fault]()
    ssh = data.get("ssh")
    hosts_file = ssh.get("hosts_file") if isinstance(ssh, dict) else None
    if data.get("backend") == "ssh" and isinstance(hosts_file, str):
        missing = specfile.missing_file(hosts.file_path(folder, hosts_file))
        faults += [fault("ssh.hosts_file", missing)] if missing else []
    named = data.get("workdir", ".")
    if not isinstance(named, str):
        return None, faults
    try:
        workdir = (folder / Path(named.strip()).expanduser()).resolve()
        if not workdir.is_dir():
            raise NotADirectoryError("no such folder")
    except (OSError, RuntimeError, ValueError) as err:
        reason = getattr(err, "strerror", None) or str(err)
        return None, [*faults, fault("workdir", f"{shown(named)} cannot be used: {specfile.escaped(reason)}")]
    wrong = _script_fault(data.get("entrypoint"), workdir)
    return workdir, [*faults, fault("entrypoint", wrong)] if wrong else faults


def _script_fault(entrypoint: object, workdir: Path) -> str | None:
    """Return what is wrong with the script of an entrypoint; one that cannot be read is the rule's affair."""
    try:
        entry = rules.entry_of(entrypoint)
    except ValueError:
        return None
    name = entry.target
    if entry.kind == "module" and name.endswith(".py") and not specfile.missing_file(workdir / name):
        return f"-m takes a module's name: write -m {name[:-3]}, or {name} without -m"
    if entry.kind != "script":
        return None
    if name.startswith("../"):
        return "the script lies outside workdir, and only workdir is copied; set workdir to a folder above it"
    return specfile.missing_file(workdir / name)
