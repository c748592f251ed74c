"""Do setup lines leave their environment to the ranks, and is a free port free?"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from orchestrator.agent.host import setup_script
from orchestrator.agent.host.setup_script import SetupRun
from orchestrator.core.errors import HostError

ENV = {"PATH": os.environ["PATH"], "WHO": "world"}


def _run(tmp_path: Path, *lines: str) -> dict[str, str]:
    one = SetupRun(lines, ENV, tmp_path, tmp_path, tmp_path / "node.log")
    _, status = os.waitpid(one.pid, 0)
    return one.result(status)


@pytest.mark.slow
@pytest.mark.parametrize("has_memory", [True, False], ids=["in memory", "a Python without memfd_create"])
def test_what_the_lines_set_and_the_environment_before_are_returned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_memory: bool
) -> None:
    if not has_memory:
        monkeypatch.delattr(os, "memfd_create")
    env = _run(tmp_path, 'export GREETING="hello $WHO', 'again"', "export NUMBER=$((1 + 1))", "LOCAL=no")
    assert env["GREETING"] == "hello world\nagain"
    assert (env["NUMBER"], env["WHO"]) == ("2", "world")
    assert {"LOCAL", "ORCH_SETUP_ENV", "SHLVL", "_"}.isdisjoint(env)


@pytest.mark.slow
def test_the_lines_environment_is_never_on_disk(tmp_path: Path) -> None:
    _run(tmp_path, "export TOKEN=s3cret")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["node.log", "setup.sh"]


@pytest.mark.slow
def test_the_first_failing_line_ends_them_and_their_last_words_are_told(tmp_path: Path) -> None:
    (tmp_path / "node.log").write_text("before\n")
    with pytest.raises(HostError) as caught:
        _run(tmp_path, "echo one", "echo two >&2; exit 3", "echo three")
    assert caught.value.reason == "the setup lines ended with code 3"
    assert caught.value.tail == "one\ntwo\n"


@pytest.mark.slow
def test_a_line_of_orch_that_refuses_is_the_reason(tmp_path: Path) -> None:
    with pytest.raises(HostError) as caught:
        _run(tmp_path, "echo one", "echo 'orch: python3 cannot import accelerate; install it'; exit 1")
    assert caught.value.reason == "python3 cannot import accelerate; install it"


@pytest.mark.slow
def test_lines_that_take_the_exit_trap_for_themselves_are_told_of_it(tmp_path: Path) -> None:
    with pytest.raises(HostError, match="do they set a trap on EXIT"):
        _run(tmp_path, "trap true EXIT")


@pytest.mark.slow
def test_lines_that_cannot_run_are_a_setup_error(tmp_path: Path) -> None:
    with pytest.raises(HostError, match="cannot run"):
        SetupRun(("true",), ENV, tmp_path / "missing", tmp_path, tmp_path / "node.log")


def test_a_program_is_found_on_the_path_or_relative_to_the_code(tmp_path: Path) -> None:
    program = tmp_path / "bin" / "tool"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    assert setup_script.find_program("bin/tool", ENV, tmp_path) == str(program)
    assert setup_script.find_program("tool", {"PATH": str(program.parent)}, Path("/")) == str(program)
    assert setup_script.find_program("/bin/sh", ENV, tmp_path) == "/bin/sh"
    with pytest.raises(HostError, match=r"there is no bin/none on this node \(PATH is "):
        setup_script.find_program("bin/none", ENV, tmp_path)


def test_the_first_program_that_is_there_is_taken_and_all_are_named_when_none_is(tmp_path: Path) -> None:
    assert setup_script.find_first_program(("/no/such/python", "sh", "cat"), ENV, tmp_path) == "sh"
    with pytest.raises(HostError, match=r"there is no /no/python and no nonesuch on this node \(PATH is "):
        setup_script.find_first_program(("/no/python", "nonesuch"), ENV, tmp_path)


def test_the_folder_of_the_jobs_python_comes_first_in_path(tmp_path: Path) -> None:
    for folder in ("a", "b"):
        python = tmp_path / folder / "python"
        python.parent.mkdir()
        python.write_text("#!/bin/sh\n")
        python.chmod(0o755)
    a, b = str(tmp_path / "a"), str(tmp_path / "b")

    def path(pythons: tuple[str, ...], given: str) -> str:
        return setup_script.extended_path(pythons, {"PATH": given}, tmp_path)

    assert path((f"{b}/python",), f"{a}:{b}") == f"{b}:{a}:{b}"
    assert path((f"{b}/python",), f"/no:{b}:{a}") == "", "it is the one that PATH gives"
    assert path(("b/python",), a) == f"{b}:{a}", "relative to the code"
    assert path((".venv/bin/python",), a) == f"{tmp_path}/.venv/bin:{a}", "setup lines may make it"
    assert path(("/no/python", "python"), a) == "", "a name is found in PATH"
    assert path((), a) == ""
    assert path((f"{b}/python",), "") == b, "an empty part would be the working folder"
