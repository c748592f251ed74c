"""Does a notebook show a job as it is, and does an interrupt leave the job alone?

The job folders are those that a supervisor left behind; no kernel and no supervisor is started.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from rich.console import Console, RenderableType

import orchestrator
from orchestrator.cli import notebook
from orchestrator.client.job import Job
from orchestrator.core.errors import UserError
from tests.support import folders, jobs


def _shown(panel: RenderableType) -> str:
    console = Console(width=100, force_jupyter=False)
    with console.capture() as caught:
        console.print(panel)
    return caught.get()


def test_panel_shows_end_and_last_output(tmp_path: Path) -> None:
    """The panel shows how a job ended and what rank 0 printed last."""
    shown: list[RenderableType] = []
    notebook.follow_in_notebook(Job(folders.failed(tmp_path, "broken", jobs.BEGAN_S)), shown.append)
    text = _shown(shown[-1])
    assert "─ broken-" in text
    assert "FAILED  attempt" in text
    assert "rank 0 logs in with ***" in text
    assert "see why: !orch why broken" in text


def test_stop_button_keeps_job_running(tmp_path: Path) -> None:
    """A running job is left running by the notebook's stop button."""
    job = Job(folders.make(tmp_path, [*jobs.submitted(), *jobs.running(1, 1.0, 7)]))
    shown: list[RenderableType] = []

    def display(panel: RenderableType) -> None:
        shown.append(panel)
        if len(shown) == 1:
            raise KeyboardInterrupt

    notebook.follow_in_notebook(job, display)
    assert "the stop button leaves it running" in _shown(shown[0])
    assert "it keeps running; watch it: orchestrator.follow(job), cancel it: job.cancel()" in _shown(shown[1])
    assert not list(job.folder.requests.iterdir())


def test_panel_is_displayable_by_jupyter(tmp_path: Path) -> None:
    status = Job(folders.succeeded(tmp_path, "done", jobs.BEGAN_S)).source.status()
    panel = notebook.panel(status, ["\x1b[31mred\x1b[0m line", "x" * 999], "")
    bundle = panel._repr_mimebundle_((), ())  # type: ignore[union-attr]
    assert "SUCCEEDED" in bundle["text/html"] and "red" in bundle["text/html"]
    assert "x" * 999 not in bundle["text/html"]


def test_mistake_names_argument_without_notebook_traceback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    with pytest.raises(UserError) as told:
        orchestrator.run("train.py", nodes=0, gpus="x", env={"1": 1}, set={"restart.max": -1, "b.c": {}})
    for start in (
        "nodes=0: must",
        "gpus=x: must",
        "env['1']: env.1: must",
        "set['restart.max']: must",
        "set['b.c']: ",
    ):
        assert any(line.startswith(start) for line in told.value._render_traceback_()), str(told.value)
    with pytest.raises(UserError, match=r"SCRIPT: no file train\.by in .*; did you mean train\.py"):
        orchestrator.run("train.by --lr 1")
    with pytest.raises(UserError, match="cannot be read: No closing quotation"):
        orchestrator.run("train.py 'a")
    with pytest.raises(TypeError, match="not function"):
        orchestrator.run(folders.succeeded)  # type: ignore[arg-type]
