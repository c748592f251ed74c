"""Sources of a job that are certain to be imported: the entry point, and the modules of the job's own code behind it.

Parsed by this machine's Python where it can; what it cannot parse goes to the ranks' Python all the same, which judges.
"""

from __future__ import annotations

import ast
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from orchestrator.agent.checks import program_probe
from orchestrator.core.host_facts import Source
from orchestrator.spec.load import SpecFile

FILES_MAX = 100
FILE_BYTES_MAX = 256 << 10
TOTAL_BYTES_MAX = 1 << 20
OWN_MAX = 2000


def of(file: SpecFile) -> tuple[tuple[Source, ...], tuple[str, ...]]:
    """Return the sources, the entry point first, and the top-level modules of the job's own code."""
    entry = file.spec.entry
    if entry.kind == "command":
        return (), ()
    script = file.workdir / entry.target
    roots = [
        script.parent if entry.kind == "script" else file.workdir,
        *_python_path(file.spec.env, file.workdir),
    ]
    first = script if entry.kind == "script" else _module(entry.target, roots)
    if first is None:
        return (), ()
    return tuple(_sources(first, roots, file.workdir)), tuple(_own(roots))


def _python_path(env: Mapping[str, str], workdir: Path) -> list[Path]:
    words = env.get("PYTHONPATH", "").split(os.pathsep)
    return [workdir / word for word in words if word and "$" not in word]


def _sources(first: Path, roots: list[Path], workdir: Path) -> Iterator[Source]:
    seen, todo, left_bytes = {first}, [first], TOTAL_BYTES_MAX
    while todo and len(seen) <= FILES_MAX:
        path = todo.pop(0)
        try:
            text = path.read_bytes()[: FILE_BYTES_MAX + 1].decode()
        except (OSError, UnicodeDecodeError):
            continue
        left_bytes -= len(text)
        if len(text) > FILE_BYTES_MAX or left_bytes < 0:
            return
        yield Source(str(path.relative_to(workdir)) if path.is_relative_to(workdir) else str(path), text)
        for module in _imported(text):
            for found in _files(module, roots):
                if found not in seen:
                    seen.add(found)
                    todo.append(found)


def _imported(text: str) -> list[str]:
    """Return the modules that a file imports at its top whatever happens, dotted in full; none of one with a fault."""
    try:
        return [module for module, _ in program_probe.imports_of(ast.parse(text))]
    except (SyntaxError, ValueError, RecursionError):
        return []


def _files(module: str, roots: list[Path]) -> Iterator[Path]:
    """Yield the files of the job's own code that run when a module is imported: its packages, and itself."""
    words = module.split(".")
    for count in range(1, len(words) + 1):
        if found := _module(".".join(words[:count]), roots, package="__init__.py"):
            yield found


def _module(module: str, roots: list[Path], package: str = "__main__.py") -> Path | None:
    for root in roots:
        place = root.joinpath(*module.split("."))
        for path in (place / package, place.with_suffix(".py")):
            if path.is_file():
                return path
    return None


def _own(roots: list[Path]) -> Iterator[str]:
    """Yield what can be imported from the folders on the path: modules, compiled ones, and folders."""
    for root in roots:
        try:
            entries = sorted(os.listdir(root))[:OWN_MAX]  # noqa: PTH208 -- names alone
        except OSError:
            continue
        yield from (name.partition(".")[0] for name in entries if not name.startswith("."))
