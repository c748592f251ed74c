"""Is a verb of another tool answered, are values completed, does an editor learn what a job file may hold, and is a library that is missing named?"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import click
import pytest

from orchestrator import programs, report
from orchestrator.cli import app, group, params
from orchestrator.programs.json_schemas import OUTPUTS
from orchestrator.spec import load


@pytest.mark.parametrize("verb", params.VERB_HINTS)
def test_verb_of_other_tool_suggests_orch_verb(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert app.run([verb, "gpt"]) == 2
    assert params.VERB_HINTS[verb] in capsys.readouterr().err
    assert verb not in params.VERBS


def test_every_json_output_has_a_schema() -> None:
    verbs = group.cli.commands.items()
    have_json = {name for name, verb in verbs if any("--json" in param.opts for param in verb.params)}
    assert have_json == OUTPUTS.keys(), "add its type to OUTPUTS of programs/json_schemas.py"


def test_option_values_are_completed() -> None:
    context, option = click.Context(group.cli), group.cli.params[0]
    assert params.complete_backend(context, option, "s") == ["ssh", "slurm"]
    assert params.complete_field(context, option, "restart.m") == ["restart.max="]


def test_starter_file_names_schema_beside_it(tmp_path: Path) -> None:
    assert app.run(["init", str(tmp_path / "job.yaml")]) == 0
    first = (tmp_path / "job.yaml").read_text().partition("\n")[0]
    assert first == "# yaml-language-server: $schema=./orch.schema.json"
    assert json.loads((tmp_path / "orch.schema.json").read_text()) == load.json_schema()


@pytest.mark.parametrize(
    ("words", "library", "module"),
    [("mcp", "mcp.server.mcpserver", "mcp_server"), ("report --serve", "uvicorn", "live")],
)
def test_verb_without_library_names_package(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, words: str, library: str, module: str
) -> None:
    for room in (programs, report):
        monkeypatch.delitem(sys.modules, f"{room.__name__}.{module}", raising=False)
        monkeypatch.delattr(room, module, raising=False)
    monkeypatch.setitem(sys.modules, library, None)
    monkeypatch.setenv("ORCH_HOME", "/nonexistent")
    assert app.run(words.split()) == 2
    said = capsys.readouterr().err
    assert "is not installed" in said and "pip install 'torch-orch[" in said
