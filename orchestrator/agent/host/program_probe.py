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


def find_imports(tree: ast.Module) -> list[tuple[str, int]]:
    """Return the modules that a file always imports, dotted in full, each with its line; `from x import y` may mean
    x.y as well.

    An import inside a function, an `if`, a `try` may not run or may fail without harm, so it does not count.
    """
    imports = []
    for node in tree.body:
        if isinstance(node, ast.Import):
            imports += [(alias.name, node.lineno) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
            imports += [(name, node.lineno) for name in names]
    return imports


def find_path_change(tree: ast.Module) -> int:
    """Return the line where a file uses `sys.path`, 0 for none."""
    for node in ast.walk(tree):
        is_path = isinstance(node, ast.Attribute) and node.attr == "path"
        if is_path and getattr(node.value, "id", "") == "sys":  # type: ignore[attr-defined]
            return node.lineno  # type: ignore[attr-defined, no-any-return]
    return 0


def can_find(module: str) -> bool:
    """Return whether this Python finds a top-level module. One that is found and broken counts as there."""
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return module in sys.modules
    except Exception:
        return True  # a finder of the user's own, with an error of its own


def probe_code(sources: list[dict[str, str]], own_modules: list[str]) -> dict[str, Any]:
    """Return the first syntax error, the imports that are missing, and where `sys.path` is changed."""
    result: dict[str, Any] = {"syntax": "", "missing": [], "changes_path": ""}
    seen = set(own_modules)
    for source in sources:
        path = source["path"]
        try:
            compile(source["text"], path, "exec", dont_inherit=True)
            tree = ast.parse(source["text"], path)
        except (SyntaxError, ValueError) as err:
            line = getattr(err, "lineno", 0) or 1
            text = f"{path}:{line}: {type(err).__name__}: {getattr(err, 'msg', err)}"
            result["syntax"] = result["syntax"] or text
            continue
        line = find_path_change(tree)
        if line and not result["changes_path"]:
            result["changes_path"] = f"{path}:{line}"
        for name, line in find_imports(tree):
            module = name.partition(".")[0]
            if module not in seen and not can_find(module):
                result["missing"].append({"module": module, "file": path, "line": line})
            seen.add(module)
    return result


def probe_torch(counts_gpus: bool) -> dict[str, Any]:
    """Return torch's versions, or why it cannot be imported."""
    try:
        import torch
    except BaseException as err:
        return {"no_torch": f"{type(err).__name__}: {err}"[:300]}
    result: dict[str, Any] = {"torch": str(torch.__version__)}
    try:
        result["cuda"] = str(torch.version.cuda or torch.version.hip or "")
        if counts_gpus:
            result["gpus"] = int(torch.cuda.device_count())
        if torch.version.cuda:
            result["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    except BaseException:  # a build without these
        pass
    return result


def main() -> None:
    """Answer one question."""
    request = json.loads(sys.stdin.buffer.read().decode("utf-8", "surrogateescape"))
    sys.path = [path for path in sys.path if path]  # nothing is found in the working folder by chance
    result = {
        "python": ".".join(map(str, sys.version_info[:3])),
        **probe_code(request["sources"], request["own"]),
    }
    result.update(probe_torch(bool(request["counts_gpus"])))
    print()
    print(json.dumps(result))


if __name__ == "__main__":
    main()
