"""The code that was copied at submit is what every attempt runs, also where imports name the folder that people go on editing."""

from __future__ import annotations

from tests.support.local import Desk

SCRIPT = """
import importlib.machinery, importlib.util, os, sys
from pathlib import Path

attempt, work = os.environ["ORCH_ATTEMPT"], Path(os.environ["ORCH_SUBMITTED_FROM"])


class Editable:
    "As that of an editable install: maps a name to the folder that it was installed from."

    @staticmethod
    def find_spec(name, path=None, target=None):
        if name == "mapped":
            place = work / "elsewhere" / "mapped"
            return importlib.util.spec_from_file_location(name, place / "__init__.py", submodule_search_locations=[str(place)])


sys.meta_path.append(Editable)
sys.path.insert(0, str(work / "lib"))
sys.path.insert(0, str(work.parent / "beside"))
import by_path, inserted, mapped, mapped.inner, outside
print(f"outside {outside.VERSION}", flush=True)
for module in (by_path, inserted, mapped, mapped.inner):
    print(f"{module.__name__} {module.VERSION}", flush=True)
if attempt == "1":
    for file in work.rglob("*.py"):
        file.write_text(file.read_text().replace("one", "two"))
    Path(outside.__file__).write_text("VERSION = 'three'")
    (work / "elsewhere" / "mapped" / "_compiled.py").write_text("VERSION = 'built later'")
    os._exit(9)
import mapped._compiled
print("compiled", mapped._compiled.VERSION, flush=True)
"""

VERSION = "VERSION = 'one'\n"


def test_edits_after_submit_reach_no_attempt(desk: Desk) -> None:
    work = desk.folder / "work-0"
    files = {
        "train.py": SCRIPT,
        "src/by_path.py": VERSION,
        "lib/inserted.py": VERSION,
        "elsewhere/mapped/__init__.py": VERSION,
        "elsewhere/mapped/inner.py": VERSION,
    }
    outside = desk.folder / "beside" / "outside.py"
    outside.parent.mkdir()
    outside.write_text(VERSION)
    job = desk.submit(
        files, entrypoint="train.py", procs_per_node=1, env={"PYTHONPATH": str(work / "src")}
    )  # fmt: skip
    assert job.wait()["state"] == "SUCCEEDED", job.log(0, 1)
    imported = [f"{name} one" for name in ("by_path", "inserted", "mapped", "mapped.inner")]
    for attempt in (1, 2):
        assert job.log(0, attempt).splitlines()[1:5] == imported
    assert "compiled built later" in job.log(0, 2), "what the copy does not have is imported all the same"
    assert [job.log(0, attempt).splitlines()[0] for attempt in (1, 2)] == ["outside one", "outside three"]
    changed = (
        f"imported {str(outside)!r}, which is not in the job's copy of the code and has changed since its first import"
    )
    assert [one["remarks"] for one in job.job.why()["attempts"]] == [[], [changed]], (
        "what was never another file is not named"
    )
    assert "two" in (work / "src" / "by_path.py").read_text()
