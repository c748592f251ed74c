"""Do the imports point one way, is the brain pure, is what travels standard library only, and is it readable?

Everything is read from the sources by AST, so that an import inside a function counts like one at the top, and one
for type checkers like any other.
"""

from __future__ import annotations

import ast
import enum
import functools
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from orchestrator.cli.params import VERBS
from orchestrator.submission import bundle

PACKAGE = bundle.PACKAGE
ROOT = PACKAGE.parent
FILE_LINES_MAX = 400
FUNCTION_LINES_MAX = 60

LAYERS = (
    "core",
    *("core.jobdir", "core.checkpoints", "core.wire", "core.slurm", "core.settings", "core.host"),
    *(
        "agent.ranks.hook",
        "agent.numbers",
        "agent.ranks",
        "agent.outputs",
        "agent.hang",
        "agent.host",
        "agent.launch",
        "agent.process",
        "agent",
        "agent.bootstrap",
    ),
    *("backends", "backends.slurm", "backends.ssh.connect", "backends.ssh.copy", "backends.ssh"),
    *("brain.checks", "brain.model", "brain.scheduling", "brain.diagnosis", "brain"),
    "journal",
    *("supervisor.transfers", "supervisor"),
    *(
        "spec.foreign",
        "spec",
        "submission",
        "client.checks",
        "client.logs",
        "client",
        "client.outline",
        "views",
        "report",
        "programs",
        "cli",
    ),
    "",
)
"""The rooms; a room imports its own files and rooms that stand earlier here. The last one is the package's own files."""

ISLANDS = {
    "core": {"core"},
    "agent": {"agent", "core"},
    "backends": {"backends", "core"},
    "brain": {"brain", "core"},
    "journal": {"journal", "brain", "core"},
    "spec": {"spec", "core"},
}
"""The outer rooms that import no other but these."""

CLOSED = {"agent", "supervisor", "brain"}
"""The outer rooms of which rooms `ABOVE` import only the modules that they export by `__all__`."""

ABOVE = {"submission", "client", "views", "report", "programs", "cli"}

BRAIN_NEEDS = {
    f"orchestrator.core.{name}"
    for name in (
        "backoff",
        "errors",
        "host_facts",
        "observations",
        "plan_types",
        "status_types",
        "text",
        "checkpoints.resume_choice",
        "checkpoints.checkpoint",
        "checkpoints.steps",
        "wire.orders",
        "wire.reports",
    )
}
"""All that the brain imports of core, as pure as itself; of the wire the types of orders and reports."""

ROOM_FILES_MAX = 13

IMPURE = {
    "asyncio", "concurrent", "ctypes", "datetime", "glob", "importlib", "inspect", "io", "locale", "logging",
    "multiprocessing", "os", "pathlib", "platform", "random", "secrets", "select", "selectors", "shutil", "signal",
    "socket", "ssl", "subprocess", "sys", "tempfile", "threading", "time", "uuid", "warnings",
}  # fmt: skip
"""Modules of the standard library that read a clock, a disk, a network, an environment, a process or chance."""

IMPURE_CALLS = {"open", "print", "input", "eval", "exec", "__import__", "breakpoint", "id", "hash"}
"""Built-in functions that do input or output, or whose result differs from process to process."""

LONG_FILES = {
    "tests/integration/test_agent_transfers.py": "one way home, from an agent to the job folder",
    "tests/ssh/test_ssh_copying.py": "one way to the hosts and back",
    "tests/support/sim/ledger.py": "the books and oracles of one night",
    "tests/support/sim/agent.py": "one agent as it is seen from outside",
    "tests/support/sim/boss.py": "the supervisor of one night",
    "tests/unit/brain/scheduling/test_checkpoint_trust.py": "the rules of one module",
    "tests/unit/supervisor/transfers/test_checkpoint_tracker.py": "the rules of one module",
    "tests/unit/test_architecture.py": "one list of all rules of the house",
    "tests/support/sim/night.py": "one list of all that may happen in a night",
    "tests/support/sim/mutations.py": "one list of all mutations, each with its night",
    "tests/hangs/gallery.py": "the gallery: one case after the other, and nothing else",
}
"""Files of more than `FILE_LINES_MAX` lines, and why."""

LONG_FUNCTIONS: dict[str, str] = {}
"""Functions of more than `FUNCTION_LINES_MAX` lines, and why."""


NAMES_SAY_ALL = (
    "orchestrator.brain.model.decisions.BeginAttempt",
    "orchestrator.brain.model.decisions.EndJob",
)
"""Public classes without a docstring."""


class When(enum.Enum):
    """When an import runs."""

    AT_IMPORT = "at import"
    IN_CALL = "in a call"
    NEVER = "for type checkers only"


@dataclass(frozen=True, slots=True)
class Import:
    """One imported name, dotted in full, such as `orchestrator.brain.model.facts.Link`."""

    name: str
    when: When
    line: int


def _modules() -> dict[str, Path]:
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts).removesuffix(".__init__")] = path
    return found


MODULES = _modules()


@functools.cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@functools.cache
def _imports(module: str) -> list[Import]:
    path = MODULES[module]
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    return list(_imports_in(_tree(path), package, When.AT_IMPORT))


def _imports_in(node: ast.AST, package: str, when: When) -> Iterator[Import]:
    if isinstance(node, ast.Import):
        yield from (Import(alias.name, when, node.lineno) for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        base = ".".join(_base(node, package))
        yield from (Import(f"{base}.{alias.name}", when, node.lineno) for alias in node.names)
    elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
        for typed in node.body:
            yield from _imports_in(typed, package, When.NEVER)
        for other in node.orelse:
            yield from _imports_in(other, package, when)
    else:
        is_call = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
        inner = When.IN_CALL if is_call and when is When.AT_IMPORT else when
        for child in ast.iter_child_nodes(node):
            yield from _imports_in(child, package, inner)


def _base(node: ast.ImportFrom, package: str) -> list[str]:
    parents = package.split(".")
    start = parents[: len(parents) - (node.level - 1)] if node.level else []
    return [*start, *(node.module.split(".") if node.module else [])]


def _module_of(name: str) -> str | None:
    """Return which of our modules an imported name is, or lies in; None for everybody else's."""
    outer = name.rpartition(".")[0]
    return name if name in MODULES else outer if outer in MODULES else None


def _ours(module: str, *, typed: bool = False) -> list[tuple[str, Import]]:
    """Return our modules that `module` imports when it runs; with `typed` also those for type checkers."""
    seen = [one for one in _imports(module) if typed or one.when is not When.NEVER]
    return [(ours, one) for one in seen if (ours := _module_of(one.name)) is not None and ours != module]


def _room(module: str) -> str:
    """Return the longest entry of LAYERS that a module lies in."""
    is_package = MODULES[module].name == "__init__.py"
    inner = f"{module}.x" if is_package and module != "orchestrator" else module
    inner = inner.removeprefix("orchestrator").removeprefix(".").rpartition(".")[0]
    return max((room for room in LAYERS if inner == room or inner.startswith(f"{room}.")), key=len, default="")


def _outer(module: str) -> str:
    """Return the outermost room of a module."""
    return _room(module).partition(".")[0]


def _at(module: str, one: Import) -> str:
    return f"{MODULES[module].relative_to(ROOT)}:{one.line} imports {one.name}"


def _closure(starts: list[str]) -> list[str]:
    """Return everything of ours that runs when `starts` do: what they import, and the packages around it."""
    found: dict[str, None] = {}
    todo = list(starts)
    while todo:
        module = todo.pop()
        if module in found:
            continue
        found[module] = None
        todo += [ours for ours, _ in _ours(module)]
        todo += [module.rpartition(".")[0]] if "." in module else []
    return sorted(found)


TRAVELLERS = [m for m in MODULES if _outer(m) in bundle.BUNDLED_ROOMS] + ["orchestrator.__main__"]


def test_every_module_is_in_a_room() -> None:
    assert [module for module in MODULES if not _room(module)] == ["orchestrator", "orchestrator.__main__"]


def test_rooms_import_only_rooms_below() -> None:
    depth = {room: number for number, room in enumerate(LAYERS)}
    wrong = [
        _at(module, one)
        for module in MODULES
        for ours, one in _ours(module, typed=True)
        if ours != "orchestrator" and depth[_room(ours)] > depth[_room(module)]
    ]
    assert wrong == []


def test_modules_have_no_circular_imports() -> None:
    """No modules import each other in a circle."""
    left = {module: {ours for ours, _ in _ours(module, typed=True)} for module in MODULES}
    while free := [module for module, wants in left.items() if not wants & left.keys()]:
        for module in free:
            del left[module]
    assert left == {}, "these import each other, or what does"


def test_room_has_few_files() -> None:
    """A room has no more files than one sees at a glance."""
    files = Counter(path.parent for path in MODULES.values() if path.name not in ("__init__.py", "__main__.py"))
    assert {str(room.relative_to(ROOT)): count for room, count in files.items() if count > ROOM_FILES_MAX} == {}, (
        f"of more than {ROOM_FILES_MAX} files: join two, or make a room in it"
    )


def test_room_init_describes_contents_and_loads_nothing() -> None:
    """Only `__all__` may follow: the modules that rooms above it import, where it is closed to them otherwise."""
    faces = {
        m: _tree(path).body[: -1 if _opened(m) else None]
        for m, path in MODULES.items()
        if path.name == "__init__.py" and m not in ("orchestrator", "orchestrator.cli")
    }
    assert [m for m, body in faces.items() if len(body) != 1 or not ast.get_docstring(_tree(MODULES[m]))] == []


def test_users_import_only_exports_of_agent_supervisor_brain() -> None:
    used = {
        _at(module, one): ours.split(".")
        for module in MODULES
        if _outer(module) in ABOVE
        for ours, one in _ours(module, typed=True)
        if _outer(ours) in CLOSED
    }
    wrong = [
        where
        for where, parts in used.items()
        if not all(parts[n] in _opened(".".join(parts[:n])) for n in range(2, len(parts)))
    ]
    assert wrong == []
    exported = {
        f"{room}.{name}"
        for room, path in MODULES.items()
        if _outer(room) in CLOSED and path.name == "__init__.py"
        for name in _opened(room)
    }
    assert exported == {".".join(parts[: n + 1]) for parts in used.values() for n in range(2, len(parts))}


def _opened(room: str) -> list[str]:
    """Return what the `__all__` of a module names, if it has one."""
    lists = [
        node.value
        for node in _tree(MODULES[room]).body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
    ]
    return [name for found in lists for name in ast.literal_eval(found)]


def test_core_modules_are_shared_by_two_rooms() -> None:
    users: dict[str, set[str]] = {module: set() for module in MODULES if _outer(module) == "core"}
    for module in [*MODULES, *reversed(MODULES)]:
        for ours, _ in _ours(module, typed=True):
            if ours in users:  # a part of a file of the same room is used where that is
                users[ours] |= users[module] if _room(module) == _room(ours) != "core" else {_outer(module)}
    lonely = {m for m, rooms in users.items() if len(rooms) < 2 and MODULES[m].name != "__init__.py"}
    assert lonely == set()


@pytest.mark.parametrize("island", ISLANDS)
def test_island_imports_only_its_own(island: str) -> None:
    wrong = [
        _at(module, one)
        for module in MODULES
        if _outer(module) == island
        for ours, one in _ours(module, typed=True)
        if _outer(ours) not in ISLANDS[island]
    ]
    assert wrong == []


def test_no_module_imports_the_command_line() -> None:
    """The package's own face does, for type checkers: `orchestrator.run` shows a job as the command line does."""
    assert [
        _at(module, one)
        for module in MODULES
        if _outer(module) != "cli" and module != "orchestrator"
        for ours, one in _ours(module, typed=True)
        if _outer(ours) == "cli"
    ] == []


def test_bundled_code_imports_standard_library_only() -> None:
    wrong = [
        _at(module, one)
        for module in _closure(TRAVELLERS)
        for one in _imports(module)
        if one.when is not When.NEVER
        and one.name.split(".")[0] not in {*sys.stdlib_module_names, "orchestrator"}
        and not _is_of_the_rank(module, one)
        and not _reaches_hosts(module, one)
    ]
    assert wrong == []


HOST_LIBRARIES = ("paramiko", "cryptography")


def _reaches_hosts(module: str, one: Import) -> bool:
    """The way to hosts runs in a supervisor on the submit machine only, and is loaded there when it is needed."""
    return module.startswith("orchestrator.backends.ssh.") and one.name.split(".")[0] in HOST_LIBRARIES


def test_ssh_code_is_not_loaded_before_needed() -> None:
    """No module loads the code for SSH hosts before it is needed."""
    wrong = [
        _at(module, one)
        for module in _closure(TRAVELLERS)
        for ours, one in _ours(module)
        if ours.startswith("orchestrator.backends.ssh")
        and not module.startswith("orchestrator.backends.ssh")
        and one.when is not When.IN_CALL
    ]
    assert wrong == []


def test_quick_verb_loads_only_click_and_no_brain() -> None:
    """A quick verb loads no brain, no supervisor and no library except click."""
    loaded: dict[str, None] = {}
    todo = ["orchestrator.cli.app", *(f"orchestrator.cli.{module}" for module in VERBS.values())]
    while todo:
        module = todo.pop()
        if module not in loaded:
            loaded[module] = None
            todo += [ours for ours, one in _ours(module) if one.when is When.AT_IMPORT]
    heavy = {"brain", "supervisor", "backends", "agent", "spec"}
    assert [module for module in loaded if _outer(module) in heavy] == []


IN_THE_RANKS_PYTHON = tuple(
    f"orchestrator.agent.{name}"
    for name in ("ranks.hook.sitecustomize", "ranks.template", "host.program_probe", "host.reduce_rank", "host.burn_in")
)


def _is_of_the_rank(module: str, one: Import) -> bool:
    """The hook is a package of its own in a rank, and calls the sitecustomize that would run without it; a template imports
    it, too. A check's programs run in the ranks' Python, which may have torch."""
    top = one.name.split(".")[0]
    return module in IN_THE_RANKS_PYTHON and (
        top in ("sitecustomize", "_orch_hook") or (top == "torch" and one.when is When.IN_CALL)
    )


def test_bundle_holds_exactly_the_bundled_rooms() -> None:
    """The bundle holds the rooms that are bundled and nothing else."""
    held = {name for name in bundle.bundled_files() if name != "__main__.py"}
    whole = {str(MODULES[module].relative_to(ROOT)) for module in ("orchestrator", *TRAVELLERS)}
    assert held == whole
    assert {str(MODULES[module].relative_to(ROOT)) for module in _closure(TRAVELLERS)} <= held


def test_brain_needs_only_listed_core_modules() -> None:
    needed = {ours for m in MODULES if _outer(m) == "brain" for ours, _ in _ours(m, typed=True)}
    assert {m for m in needed if _outer(m) == "core"} == BRAIN_NEEDS


def test_brain_has_no_clock_io_chance_or_environment() -> None:
    """The brain has no clock, no disk, no network, no chance and no environment."""
    wrong = [
        _at(module, one)
        for module in MODULES
        if _outer(module) == "brain" or module in BRAIN_NEEDS
        for one in _imports(module)
        if one.name.split(".")[0] in IMPURE
    ]
    assert wrong == []


def test_brain_calls_no_reading_or_writing_function() -> None:
    wrong = [
        f"{MODULES[module].relative_to(ROOT)}:{node.lineno} calls {node.func.id}"
        for module in MODULES
        if _outer(module) == "brain" or module in BRAIN_NEEDS
        for node in ast.walk(_tree(MODULES[module]))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in IMPURE_CALLS
    ]
    assert wrong == []


def _undocumented(module: str) -> Iterator[str]:
    for node in _tree(MODULES[module]).body:
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            continue
        if not node.name.startswith("_") and not ast.get_docstring(node):
            yield node.name


def test_every_module_docstring_names_its_question() -> None:
    """Every module says what question it answers."""
    bare = [m for m, path in MODULES.items() if len(_tree(path).body) > 1 and not ast.get_docstring(_tree(path))]
    assert bare == []


def test_public_functions_and_classes_have_a_docstring() -> None:
    wrong = [
        f"{module}.{name}"
        for module in MODULES
        for name in _undocumented(module)
        if f"{module}.{name}" not in NAMES_SAY_ALL
    ]
    assert wrong == []


def _sources() -> list[Path]:
    return sorted(
        path for folder in ("orchestrator", "tests", "jobs", "docs", "bench") for path in (ROOT / folder).rglob("*.py")
    )


def test_long_file_is_listed_with_reason() -> None:
    lines = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in _sources()}
    long = {name for name, count in lines.items() if count > FILE_LINES_MAX}
    assert long - LONG_FILES.keys() == set(), (
        f"of more than {FILE_LINES_MAX} lines: split it, or add it to LONG_FILES with the reason"
    )
    assert LONG_FILES.keys() <= long, "no longer long: take it out of LONG_FILES"


@pytest.mark.slow
def test_long_function_is_listed_with_reason() -> None:
    long = {
        f"{path.relative_to(ROOT)}:{node.name}"
        for path in _sources()
        for node in ast.walk(_tree(path))
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        and (node.end_lineno or node.lineno) - node.lineno + 1 > FUNCTION_LINES_MAX
    }
    assert long - LONG_FUNCTIONS.keys() == set()
