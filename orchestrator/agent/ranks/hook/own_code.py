"""Imports of the code that was copied at submit: imports from the folder that a job was submitted from are redirected to the copy.

Editable installs, absolute entries of PYTHONPATH and `sys.path.insert` name that folder, where people keep editing. What the copy
does not have, such as a compiled extension, is imported from there all the same; so is what another loader than Python's own finds.
`imports.txt` has a line for each such file, and each of another folder that is neither Python's nor an installed package's: the
time of its last change in ns, and its path as a Python text in ASCII.
"""

# No pathlib: it would cost every interpreter start 5 ms.
# ruff: noqa: PTH110, PTH116, PTH118, PTH120, PTH123

import os
import sys

TYPE_CHECKING = False  # typing's own costs 3 ms
if TYPE_CHECKING:
    from typing import Any

_PLAIN = ("SourceFileLoader", "SourcelessFileLoader", "ExtensionFileLoader")


class CopyFinder:
    """A finder on `sys.meta_path` that asks those behind it, and answers with the copy of what they have found."""

    def __init__(self, submitted_from: str, code: str, rank_dir: str) -> None:
        self._roots = sorted({submitted_from, os.path.realpath(submitted_from)})
        self._code, self._real = code, os.path.realpath(code)
        self._others = (os.path.dirname(os.__file__) + os.sep, os.path.dirname(code) + os.sep)
        self._notes, self._noted = os.path.join(rank_dir, "imports.txt"), {None}
        sys.path[:] = [place for entry in sys.path for place in self._places(entry)]
        sys.meta_path.insert(0, self)

    def find_spec(self, name: str, path: "Any" = None, target: "Any" = None) -> "Any":
        """Return the spec of a module, of its copy where there is one."""
        finders = sys.meta_path
        for finder in finders[finders.index(self) + 1 :] if self in finders else ():
            spec = finder.find_spec(name, path, target) if hasattr(finder, "find_spec") else None
            if spec is not None:
                return self._copy_spec(spec)
        return None

    def _copy_spec(self, spec: "Any") -> "Any":
        twin = self._find_copy(spec.origin) if spec.has_location and type(spec.loader).__name__ in _PLAIN else ""
        if not twin:
            self._note(spec.origin)
            return spec
        from importlib.util import spec_from_file_location

        inner = spec.submodule_search_locations
        places = None if inner is None else [place for entry in inner for place in self._places(entry)]
        return spec_from_file_location(spec.name, twin, submodule_search_locations=places) or spec

    def _note(self, path: "Any") -> None:
        """Note a file of the submitter's that is not copied, as it is now."""
        if (
            path not in self._noted
            and path.startswith("/")
            and "-packages/" not in path
            and not path.startswith(self._others)
        ):
            self._noted.add(path)
            try:
                with open(self._notes, "a") as file:
                    file.write(f"{os.stat(path).st_mtime_ns} {path!a}\n")
            except OSError:
                pass  # without it, orch why shows less

    def _places(self, entry: str) -> "list[str]":
        """Return the copy of a folder, and the folder."""
        twin = self._find_copy(entry)
        return [twin, entry] if twin else [entry]

    def _find_copy(self, path: "Any") -> str:
        """Return the copy of a file or folder, empty where there is none of its own: links may lead back."""
        for root in self._roots:
            if isinstance(path, str) and (path == root or path.startswith(f"{root}/")):
                twin = self._code + path[len(root) :]
                real = os.path.realpath(twin)
                is_own = real == self._real or real.startswith(f"{self._real}/")
                return twin if is_own and os.path.exists(twin) else ""
        return ""


def import_from_copy(submitted_from: str, rank_dir: str) -> None:
    """Let imports lead to the copy, `code` in the job's folder, of which `rank_dir` is `nodes/NODE/ATTEMPT/RANK`."""
    job = rank_dir
    for _ in range(4):
        job = os.path.dirname(job)
    CopyFinder(submitted_from, os.path.join(job, "code"), rank_dir)
