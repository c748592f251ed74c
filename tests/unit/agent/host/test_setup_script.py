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
def test_setup_returns_exports_and_environment_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_memory: bool
) -> None:
    if not has_memory:
        monkeypatch.delattr(os, "memfd_create")
    env = _run(tmp_path, 'export GREETING="hello $WHO', 'again"', "export NUMBER=$((1 + 1))", "LOCAL=no")
    assert env["GREETING"] == "hello world\nagain"
    assert (env["NUMBER"], env["WHO"]) == ("2", "world")
    assert {"LOCAL", "ORCH_SETUP_ENV", "SHLVL", "_"}.isdisjoint(env)


@pytest.mark.slow
def test_setup_environment_is_never_on_disk(tmp_path: Path) -> None:
    _run(tmp_path, "export TOKEN=s3cret")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["node.log", "setup.sh"]


@pytest.mark.slow
def test_first_failing_setup_line_ends_with_its_output(tmp_path: Path) -> None:
    """The first failing line ends the setup, and its last output is reported."""
    (tmp_path / "node.log").write_text("before\n")
    with pytest.raises(HostError) as caught:
        _run(tmp_path, "echo one", "echo two >&2; exit 3", "echo three")
    assert caught.value.reason == "the setup lines ended with code 3"
    assert caught.value.tail == "one\ntwo\n"


@pytest.mark.slow
def test_refusal_by_orch_line_is_the_reason(tmp_path: Path) -> None:
    """A setup line of orch that refuses gives the reason."""
    with pytest.raises(HostError) as caught:
        _run(tmp_path, "echo one", "echo 'orch: python3 cannot import accelerate; install it'; exit 1")
    assert caught.value.reason == "python3 cannot import accelerate; install it"


@pytest.mark.slow
def test_setup_lines_trapping_exit_are_reported(tmp_path: Path) -> None:
    """Setup lines that set the EXIT trap themselves are reported."""
    with pytest.raises(HostError, match="do they set a trap on EXIT"):
        _run(tmp_path, "trap true EXIT")


@pytest.mark.slow
def test_setup_that_cannot_run_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(HostError, match="cannot run"):
        SetupRun(("true",), ENV, tmp_path / "missing", tmp_path, tmp_path / "node.log")


def test_program_is_found_on_path_or_in_code(tmp_path: Path) -> None:
    program = tmp_path / "bin" / "tool"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    assert setup_script.find_program("bin/tool", ENV, tmp_path) == str(program)
    assert setup_script.find_program("tool", {"PATH": str(program.parent)}, Path("/")) == str(program)
    assert setup_script.find_program("/bin/sh", ENV, tmp_path) == "/bin/sh"
    with pytest.raises(HostError, match=r"there is no bin/none on this node \(PATH is "):
        setup_script.find_program("bin/none", ENV, tmp_path)


def test_first_existing_program_is_used_or_all_named(tmp_path: Path) -> None:
    assert setup_script.find_first_program(("/no/such/python", "sh", "cat"), ENV, tmp_path) == "sh"
    with pytest.raises(HostError, match=r"there is no /no/python and no nonesuch on this node \(PATH is "):
        setup_script.find_first_program(("/no/python", "nonesuch"), ENV, tmp_path)


def test_job_python_folder_comes_first_in_path(tmp_path: Path) -> None:
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
