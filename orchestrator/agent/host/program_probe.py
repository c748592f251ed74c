"""Probe that the ranks' own Python runs (3.8 or newer): its torch, and whether the job's code compiles and finds its imports.

It is started with this file's text, reads one JSON object from standard input, and prints one as its last line. The job's
code is compiled and parsed, never run; a name is only looked for (`importlib.util.find_spec` of a top-level name runs
nothing). Names of the job's own code are known to the asking side.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import sys
from typing import Any


def imports_of(tree: ast.Module) -> list[tuple[str, int]]:
    """Return the modules that a file always imports, dotted in full, each with its line; `from x import y` may mean
    x.y as well.

    An import inside a function, an `if`, a `try` may not run or may fail without harm, so it does not count.
    """
    found = []
    for node in tree.body:
        if isinstance(node, ast.Import):
            found += [(alias.name, node.lineno) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
            found += [(name, node.lineno) for name in names]
    return found


def change_of_path(tree: ast.Module) -> int:
    """Return the line where a file uses `sys.path`, 0 for none."""
    for node in ast.walk(tree):
        is_path = isinstance(node, ast.Attribute) and node.attr == "path"
        if is_path and getattr(node.value, "id", "") == "sys":  # type: ignore[attr-defined]
            return node.lineno  # type: ignore[attr-defined, no-any-return]
    return 0


def is_there(module: str) -> bool:
    """Return whether this Python finds a top-level module. One that is found and broken counts as there."""
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return module in sys.modules
    except Exception:
        return True  # a finder of the user's own, with an error of its own


def code(sources: list[dict[str, str]], own: list[str]) -> dict[str, Any]:
    """Return the first syntax error, the imports that are missing, and where `sys.path` is changed."""
    said: dict[str, Any] = {"syntax": "", "missing": [], "changes_path": ""}
    seen = set(own)
    for source in sources:
        path = source["path"]
        try:
            compile(source["text"], path, "exec", dont_inherit=True)
            tree = ast.parse(source["text"], path)
        except (SyntaxError, ValueError) as err:
            line = getattr(err, "lineno", 0) or 1
            text = f"{path}:{line}: {type(err).__name__}: {getattr(err, 'msg', err)}"
            said["syntax"] = said["syntax"] or text
            continue
        line = change_of_path(tree)
        if line and not said["changes_path"]:
            said["changes_path"] = f"{path}:{line}"
        for name, line in imports_of(tree):
            module = name.partition(".")[0]
            if module not in seen and not is_there(module):
                said["missing"].append({"module": module, "file": path, "line": line})
            seen.add(module)
    return said


def of_torch(counts_gpus: bool) -> dict[str, Any]:
    """Return torch's versions, or why it cannot be imported."""
    try:
        import torch
    except BaseException as err:
        return {"no_torch": f"{type(err).__name__}: {err}"[:300]}
    said: dict[str, Any] = {"torch": str(torch.__version__)}
    try:
        said["cuda"] = str(torch.version.cuda or torch.version.hip or "")
        if counts_gpus:
            said["gpus"] = int(torch.cuda.device_count())
        if torch.version.cuda:
            said["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    except BaseException:  # a build without these
        pass
    return said


def main() -> None:
    """Answer one question."""
    asked = json.loads(sys.stdin.buffer.read().decode("utf-8", "surrogateescape"))
    sys.path = [path for path in sys.path if path]  # nothing is found in the working folder by chance
    said = {"python": ".".join(map(str, sys.version_info[:3])), **code(asked["sources"], asked["own"])}
    said.update(of_torch(bool(asked["counts_gpus"])))
    print()
    print(json.dumps(said))


if __name__ == "__main__":
    main()
