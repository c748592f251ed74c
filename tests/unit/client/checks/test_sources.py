"""Are the entry point and the modules of the job's own code behind it found, and nothing else?"""

from __future__ import annotations

from pathlib import Path

import pytest

from orchestrator.client.checks import sources
from orchestrator.core.errors import UserError
from orchestrator.spec.load import load


def found(tmp_path: Path, spec: str, files: dict[str, str]) -> tuple[list[str], tuple[str, ...]]:
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (tmp_path / "job.yaml").write_text(f"name: a\nprocs_per_node: 1\n{spec}\n")
    code, own = sources.find_sources(load(tmp_path / "job.yaml"))
    return [one.path for one in code], own


def test_own_modules_are_followed(tmp_path: Path) -> None:
    files = {
        "src/train.py": "import torch\nimport model\nfrom pkg.data import load\nfrom lib import x\n",
        "src/model.py": "import pkg\n", "src/pkg/__init__.py": "", "src/pkg/data.py": "import numpy\n",
        "src/unused.py": "import nothing\n", "lib/lib.py": "",
    }  # fmt: skip
    code, own = found(tmp_path, "entrypoint: src/train.py\nenv: {PYTHONPATH: lib}", files)
    assert code == ["src/train.py", "src/model.py", "src/pkg/__init__.py", "src/pkg/data.py", "lib/lib.py"]
    assert {"model", "pkg", "unused", "lib"} <= set(own)


def test_module_starts_with_its_main(tmp_path: Path) -> None:
    files = {"app/__init__.py": "", "app/__main__.py": "import app.run\n", "app/run.py": ""}
    code, _ = found(tmp_path, "entrypoint: -m app", files)
    assert code == ["app/__main__.py", "app/__init__.py", "app/run.py"]


def test_code_unparsable_by_this_python_is_included(tmp_path: Path) -> None:
    """Code that this Python cannot parse is still included."""
    assert found(tmp_path, "entrypoint: train.py", {"train.py": "x = (\n"})[0] == ["train.py"]


@pytest.mark.parametrize("backend", ["local", "slurm", "ssh"])
def test_uncompilable_file_is_refused_with_caret(tmp_path: Path, backend: str) -> None:
    (tmp_path / "job.yaml").write_text(
        f"name: a\nbackend: {backend}\nprocs_per_node: 1\nentrypoint: train.py\nssh: {{hosts: a}}\n"
    )
    (tmp_path / "train.py").write_text("import model\n")
    (tmp_path / "model.py").write_text("def f():\n    return 1 +\n")
    file = load(tmp_path / "job.yaml")
    if backend == "ssh":  # the hosts' Python judges
        sources.refuse_uncompiled(file, {})
        return
    with pytest.raises(UserError) as caught:
        sources.refuse_uncompiled(file, {})
    assert caught.value.where == "model.py:2"
    assert caught.value.what == "SyntaxError: invalid syntax\n    return 1 +\n              ^"


@pytest.mark.slow
def test_rank_python_judges_code_this_one_cannot_compile(tmp_path: Path) -> None:
    newer = tmp_path / "python3"
    newer.write_text("#!/bin/sh\nprintf '%s' '{}'\n")
    newer.chmod(0o755)
    (tmp_path / "job.yaml").write_text(f"name: a\nprocs_per_node: 1\npython: {newer}\nentrypoint: train.py\n")
    (tmp_path / "train.py").write_text("x = (\n")
    sources.refuse_uncompiled(load(tmp_path / "job.yaml"), {})


def test_command_has_no_sources(tmp_path: Path) -> None:
    assert found(tmp_path, "command: make train", {}) == ([], ())
