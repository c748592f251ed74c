"""Does `orch run` read a line as people type it, and does what is wrong with it name the option?"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from orchestrator.cli import app

Type = Callable[..., tuple[int, str, str]]


@pytest.fixture
def orch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Type:
    """Return the command line as a function: exit code, standard output, standard error. The workdir has a script."""
    work = tmp_path / "work"
    work.mkdir()
    (work / "train.py").write_text("print('hi')\n")
    (work / "good.yaml").write_text("name: gpt\nprocs_per_node: 2\nentrypoint: train.py\n")
    monkeypatch.setenv("ORCH_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.chdir(work)

    def typed(*words: str) -> tuple[int, str, str]:
        code = app.run(list(words))
        said = capsys.readouterr()
        return code, said.out, said.err

    return typed


TABLE: list[tuple[str, int, str]] = [
    ("run", 2, "Missing argument 'SCRIPT ARGS...'"),
    ("run --prosc 2 train.py", 2, "Did you mean '--procs'?"),
    (
        "run -x train.py",
        2,
        "No such option '-x'. Options of your script come after it: orch run train.py -x",
    ),
    ("run --nproc_per_node 2 train.py", 2, "It is torchrun's: orch run torchrun --nproc_per_node … train.py"),
    ("run --save - uv run python train.py", 0, "entrypoint: uv run python train.py"),
    ("run -m", 2, "SCRIPT: -m must be followed by a module's dotted name"),
    ("run tain.py --nodes 2", 2, "SCRIPT: no file tain.py in"),
    ("run --nodes 0 --gpus x train.py", 2, "--gpus x: must be a whole number"),
    ("run --env A train.py", 2, "write --env A=VALUE"),
    ("run --gpus 99 train.py", 2, "99 GPUs wanted"),
    ("run --save - train.py", 0, "entrypoint: train.py"),
    ("run --save nosuch/x.yaml train.py", 2, "there is no folder "),
    ("run --save good.yaml train.py", 2, "the file exists already"),
    ("run --save new.yaml --procs 2 python -m json.tool --x", 0, "orch submit new.yaml"),
]
"""What is typed, the exit code, and words of the answer."""


@pytest.mark.parametrize(("line", "code", "words"), TABLE)
def test_run_arguments_end_with_code_and_message(orch: Type, line: str, code: int, words: str) -> None:
    """Any arguments of orch run end with an exit code and a clear message."""
    ended, out, err = orch(*line.split())
    assert ended == code, out + err
    assert words in out + err
    assert "Traceback" not in err
    assert not list(Path("../home").glob("jobs/*")), "nothing is submitted"


def test_saved_run_line_is_its_job_file(orch: Type) -> None:
    said = orch("run", "--save", "new.yaml", "--procs", "2", "train.py", "--save", "x", "--lr", "0.1")
    assert said == (0, "wrote new.yaml; start it with: orch submit new.yaml --follow\n", "")
    assert Path("new.yaml").read_text() == (
        "# Written by: orch run --save new.yaml --procs 2 train.py --save x --lr 0.1\n"
        "name: train\nprocs_per_node: 2\nentrypoint: train.py --save x --lr 0.1\n"
    )
    orch("run", "--save", "../new.yaml", "train.py")
    assert "workdir: work\n" in Path("../new.yaml").read_text()
    assert orch("render", "../new.yaml")[0] == 0
