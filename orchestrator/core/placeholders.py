"""Placeholders in a job file: `{checkpoint_dir}` or `$ORCH_CHECKPOINT_DIR`, filled in for each attempt as its
node sees the paths. Pure.

Rules: only the names below are filled in, each once: nothing is filled in within a value. `${checkpoint_dir}` and
`{{checkpoint_dir}}` belong to other programs (OmegaConf, templates) and stay, as every other brace or dollar does.
"""

from __future__ import annotations

import difflib
import re
import shlex
from collections.abc import Mapping, Sequence

VARIABLES = (
    "ORCH_JOB_ID", "ORCH_JOB_NAME", "ORCH_ATTEMPT", "ORCH_CHECKPOINT_DIR", "ORCH_RESUME_FROM", "ORCH_RESUME_STEP",
)  # fmt: skip
"""The variables of a rank that a command may refer to, as `$NAME` or `${NAME}`."""

NAMES = ("checkpoint_dir", "job_dir", "resume_from", "resume_step", "attempt")
"""Names that may be written in braces."""

PATH = "path"
"""The same as `resume_from`, in resume arguments alone."""

ATTEMPT_NAMES = frozenset(
    ("resume_from", "resume_step", "attempt", "ORCH_RESUME_FROM", "ORCH_RESUME_STEP", "ORCH_ATTEMPT")
)
"""Those that differ between the attempts of a job."""

FOLDER_NAMES = frozenset(("checkpoint_dir", "ORCH_CHECKPOINT_DIR"))
"""Those that may differ between them where checkpoints are written to memory."""

NEARNESS = 0.85
"""How much a name must be like one of ours to be taken for a mistake (`difflib`): `{checkpoint}` is not, and may be
another program's."""

_PLACEHOLDER = re.compile(r"(?<![${])\{(?P<brace>[a-z_]+)\}|\$\{(?P<wrapped>ORCH_\w+)\}|\$(?P<bare>ORCH_\w+)", re.ASCII)

_PROGRAM_TEXT = re.compile(r"[\s(;]")


def fill(text: str, values: Mapping[str, str]) -> str:
    """Return a text with the placeholders filled in of which `values` has the name."""
    return _PLACEHOLDER.sub(lambda match: values.get(_name(match), match[0]), text)


def values_from_environment(env: Mapping[str, str], job_dir: str) -> dict[str, str]:
    """Return the values of placeholders in an environment that has the variables of a rank of the job with this folder."""
    values = {name: env[name] for name in VARIABLES if name in env}
    pairs = [(name, f"ORCH_{name.upper()}") for name in NAMES if name != "job_dir"]
    values |= {name: env[variable] for name, variable in pairs if variable in env}
    if "checkpoint_dir" in values:
        values["job_dir"] = job_dir
    return values


def quote_command(argv: Sequence[str]) -> str:
    """Return a command for a person, quoted for a shell where needed. What orch fills in is shown in braces: a variable in
    single quotes would look as if it were not filled in."""
    return " ".join(map(_quote_word, argv))


def _quote_word(word: str) -> str:
    braced = _PLACEHOLDER.sub(_brace_variable, word)
    is_plain = shlex.quote(_PLACEHOLDER.sub("x", braced)) == _PLACEHOLDER.sub("x", braced)
    return braced if is_plain else shlex.quote(braced)


def _brace_variable(match: re.Match[str]) -> str:
    name = _name(match).removeprefix("ORCH_").lower()
    return f"{{{name}}}" if _name(match) in VARIABLES and name in NAMES else match[0]


def find_names(text: str) -> frozenset[str]:
    """Return the names of the placeholders in a text, ours and others'."""
    return frozenset(map(_name, _PLACEHOLDER.finditer(text)))


def find_misspelled(text: str, extra_names: tuple[str, ...] = ()) -> str:
    """Return the fault of a text with a name that is nearly one of orch's, as the rest of a sentence; else empty.

    `{attempts}` is an ordinary word of other programs, so of names in braces only those with an underscore are compared.
    """
    names = (*NAMES, *VARIABLES, *extra_names)
    for match in _PLACEHOLDER.finditer(text):
        name = _name(match)
        alike = [one for one in names if "_" in one or one in extra_names]
        near = [] if name in names else difflib.get_close_matches(name, alike, 1, NEARNESS)
        if near:
            meant = match[0].replace(name, near[0])
            return f"contains {match[0]}, which orch does not fill in; did you mean {meant}?"
    return ""


def find_misplaced(word: str) -> str:
    """Return the same for a word of shell text, in which the shell fills in variables, and nothing can quote a value safely.

    A word with blanks or brackets is a program in another language, such as awk's or Python's: its braces are its own.
    """
    if _PROGRAM_TEXT.search(word):
        return ""
    for match in _PLACEHOLDER.finditer(word):
        if match["brace"] in NAMES:
            name = match["brace"]
            inner = f"${{ORCH_{name.upper()}}}" if name != "job_dir" else "${ORCH_CHECKPOINT_DIR%/*}"
            return f'contains {match[0]}, which is not filled in within shell text; write "{inner}"'
    return find_misspelled(word)


def _name(match: re.Match[str]) -> str:
    return match["brace"] or match["wrapped"] or match["bare"]
