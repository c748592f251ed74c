"""Source files that a job certainly imports: the entry point, and the modules of the job's own code that it imports.

This machine's Python parses them; what it cannot parse is left to the ranks' Python.
"""

from __future__ import annotations

import ast
import os
import traceback
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from orchestrator.agent.host import program_probe
from orchestrator.core.errors import HostError, UserError
from orchestrator.core.host_facts import SourceFile
from orchestrator.spec.load import SpecFile

FILES_MAX = 100
FILE_BYTES_MAX = 256 << 10
TOTAL_BYTES_MAX = 1 << 20
OWN_MODULES_MAX = 2000


def find_sources(file: SpecFile) -> tuple[tuple[SourceFile, ...], tuple[str, ...]]:
    """Return the sources, the entry point first, and the top-level modules of the job's own code."""
    entry = file.spec.entry
    if not entry.is_python:
        return (), ()
    script = file.workdir / entry.target
    roots = [
        script.parent if entry.kind == "script" else file.workdir,
        *_python_path(file.spec.env, file.workdir),
    ]
    entry_file = script if entry.kind == "script" else _find_module(entry.target, roots)
    if entry_file is None:
        return (), ()
    return tuple(_read_sources(entry_file, roots, file.workdir)), tuple(_own_modules(roots))


def refuse_uncompiled(file: SpecFile, environ: Mapping[str, str]) -> None:
    """Raise UserError with line and caret for a file that this Python cannot compile, and the ranks' Python neither.

    Over SSH, and where setup lines may provide the ranks' Python, it is not available here: there `orch check` asks it.
    """
    spec = file.spec
    if spec.backend == "ssh" or (spec.python and spec.setup):
        return
    code, _ = find_sources(file)
    fault = next(filter(None, map(_syntax_fault, code)), None)
    if fault is None or (spec.python and _compiles(spec.python, code, file.workdir, environ)):
        return
    drawn = "".join(traceback.format_exception_only(fault)[1:-1]).rstrip()
    what = f"{type(fault).__name__}: {fault.msg}\n{drawn}".rstrip()
    raise UserError(what, f"{fault.filename}:{fault.lineno or 1}", "fix it and run again")


def _syntax_fault(source: SourceFile) -> SyntaxError | None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            compile(source.text, source.path, "exec", dont_inherit=True)
    except SyntaxError as err:
        return err
    except ValueError as err:  # a null byte, before Python 3.12
        return SyntaxError(str(err), (source.path, 1, 0, ""))
    return None


def _compiles(python: str, code: Sequence[SourceFile], workdir: Path, environ: Mapping[str, str]) -> bool:
    """Return whether the ranks' Python, of another version perhaps, compiles the code, or cannot be asked."""
    from orchestrator.agent.host import program, setup_script
    from orchestrator.core.wire.bootstrap import GatherFacts

    try:
        program_path = setup_script.find_program(python, environ, workdir)
    except HostError:
        return True  # the submit itself reports it
    request = GatherFacts(program_path, {}, tuple(code), (), (), (), counts_gpus=False)
    return not program.probe_program(request, environ).syntax


def _python_path(env: Mapping[str, str], workdir: Path) -> list[Path]:
    entries = env.get("PYTHONPATH", "").split(os.pathsep)
    return [workdir / word for word in entries if word and "$" not in word]


def _read_sources(first: Path, roots: list[Path], workdir: Path) -> Iterator[SourceFile]:
    seen, pending, left_bytes = {first}, [first], TOTAL_BYTES_MAX
    while pending and len(seen) <= FILES_MAX:
        path = pending.pop(0)
        try:
            text = path.read_bytes()[: FILE_BYTES_MAX + 1].decode()
        except (OSError, UnicodeDecodeError):
            continue
        left_bytes -= len(text)
        if len(text) > FILE_BYTES_MAX or left_bytes < 0:
            return
        yield SourceFile(str(path.relative_to(workdir)) if path.is_relative_to(workdir) else str(path), text)
        for module in _imported_modules(text):
            for module_file in _module_files(module, roots):
                if module_file not in seen:
                    seen.add(module_file)
                    pending.append(module_file)


def _imported_modules(text: str) -> list[str]:
    """Return the modules that a file imports unconditionally, by full dotted name; none if it cannot be parsed."""
    try:
        return [module for module, _ in program_probe.find_imports(ast.parse(text))]
    except (SyntaxError, ValueError, RecursionError):
        return []


def _module_files(module: str, roots: list[Path]) -> Iterator[Path]:
    """Yield the files of the job's own code that run when a module is imported: its packages, and itself."""
    parts = module.split(".")
    for count in range(1, len(parts) + 1):
        if module_file := _find_module(".".join(parts[:count]), roots, package="__init__.py"):
            yield module_file


def _find_module(module: str, roots: list[Path], package: str = "__main__.py") -> Path | None:
    for root in roots:
        base = root.joinpath(*module.split("."))
        for path in (base / package, base.with_suffix(".py")):
            if path.is_file():
                return path
    return None


def _own_modules(roots: list[Path]) -> Iterator[str]:
    """Yield what can be imported from the folders on the path: modules, compiled ones, and folders."""
    for root in roots:
        try:
            entries = sorted(os.listdir(root))[:OWN_MODULES_MAX]  # noqa: PTH208 -- names alone
        except OSError:
            continue
        yield from (name.partition(".")[0] for name in entries if not name.startswith("."))
