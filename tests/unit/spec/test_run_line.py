"""Does a line without a file become the job file that one would have written, and do its faults name the line?"""

from __future__ import annotations

from pathlib import Path

import pytest

from orchestrator.spec.load import SpecError, load
from orchestrator.spec.run_line import RunLine, derive_job_name, make_job_file, split_python


def _spell(name: str, value: str) -> str:
    return f"--{name} {value}"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "train.py").touch()
    return tmp_path / "job.yaml"


def test_only_given_values_are_written(path: Path) -> None:
    file = make_job_file(RunLine(("train.py", "--lr", "0.1")), path, ["Written by: me"], _spell)
    assert file.text == "# Written by: me\nname: train\nentrypoint: train.py --lr 0.1\n"


def test_text_explains_what_was_read_from_line(path: Path) -> None:
    line = RunLine(
        ("train.py", "--note", "two words", "$X"),
        nodes=2,
        procs=3,
        name="gpt",
        env={"A": 1, "B": "on"},
        python=".venv/bin/python",
        settings={"restart": {"max": 0}, "logs.unbuffered": False, "secrets": ["TOKEN"]},
        overrides=("monitor.hang_timeout=off", 'checkpoint.path="*.pt"'),
    )
    file = make_job_file(line, path, (), _spell)
    path.write_text(file.text)
    assert load(path).spec == file.spec
    assert file.spec.entry.args == ("--note", "two words", "$X")
    assert (file.spec.nodes, file.spec.procs_per_node, file.spec.env) == (2, 3, {"A": "1", "B": "on"})
    assert (file.spec.logs.unbuffered, file.spec.monitor.hang_timeout) == (False, None)


def test_installed_program_is_one_rank_or_launcher(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An installed Python program is the one rank or starts the ranks."""
    for name, head in (("tune", "#!/opt/v/bin/python3.11\n"), ("ls2", "\x7fELF")):
        (path.parent / name).write_text(head)
        (path.parent / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(path.parent), prepend=":")
    words = ("tune", "run", "full.py")
    one = make_job_file(RunLine(words), path, (), _spell).spec.entry
    assert (one.kind, one.target) == ("command", "tune run full.py")
    many = make_job_file(RunLine(words, procs=2), path, (), _spell).spec.entry
    assert (many.kind, many.target) == ("launch", "tune run full.py")
    assert make_job_file(RunLine(("ls2", "x")), path, (), _spell).spec.entry.kind != "launch"


def test_hosts_mean_ssh_and_all_of_them(path: Path) -> None:
    spec = make_job_file(RunLine(("train.py",), hosts="gpu[01-03],big"), path, (), _spell).spec
    assert (spec.backend, spec.nodes, spec.ssh.hosts) == ("ssh", 4, ("gpu[01-03]", "big"))
    assert make_job_file(RunLine(("train.py",), nodes=2, hosts=["a", "b", "c"]), path, (), _spell).spec.nodes == 2


def test_fault_names_the_option(path: Path) -> None:
    line = RunLine(("trian.py",), nodes=0, gpus="many", name="a/b", env={"1A": "x"}, overrides=("x=1",))
    with pytest.raises(SpecError) as caught:
        make_job_file(line, path, (), _spell)
    faults = str(caught.value)
    for start in (
        "--nodes 0: must",
        "--gpus many: must",
        "--name a/b: must",
        "--env 1A: env.1A: must",
        "--set x=1: ",
    ):
        assert f"\n{start}" in f"\n{faults}", faults
    assert "SCRIPT: no file trian.py" in faults
    assert "did you mean train.py?" in faults


@pytest.mark.parametrize(
    "line",
    ["uv run train.py", "uv run --with torch pkg/train.py", "pixi run python train.py"],
)
def test_program_with_own_environment_is_a_command(path: Path, line: str) -> None:
    entry = make_job_file(RunLine(tuple(line.split())), path, (), _spell).spec.entry
    assert (entry.kind, " ".join(entry.args) or entry.target) == ("command", line)


@pytest.mark.parametrize(
    ("words", "launch"),
    [
        ("bash tools/dist_train.sh cfg.py 8", "bash tools/dist_train.sh cfg.py 8"),
        ("./run.sh", "./run.sh"),
        ("A=x|y torchrun --nproc-per-node 2 t.py $X", "A='x|y' torchrun --nproc-per-node 2 t.py '$X'"),
        ("uv run torchrun --nproc-per-node 2 t.py", "uv run torchrun --nproc-per-node 2 t.py"),
        ("python -m torch.distributed.run --nproc-per-node 2 t.py", "python -m torch.distributed.run --nproc-per-node 2 t.py"),
    ],
)  # fmt: skip
def test_launch_line_is_kept_as_typed(path: Path, words: str, launch: str) -> None:
    line = RunLine(tuple(words.split()), procs=2)
    file = make_job_file(line, path, (), _spell)
    assert (file.spec.entry.kind, file.spec.entry.target) == ("launch", launch)
    assert f"\nlaunch: {launch}\n" in file.text


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ("train.py --lr 1", "train"),
        ("src/pkg/my train.py".replace(" ", "_"), "my_train"),
        ("-m pkg.train --x", "train"),
        ("torchrun --nproc-per-node 2 train.py --config a.py", "train"),
        ("accelerate launch -m pkg.sft", "sft"),
        ("bash tools/run.sh x.py 8", "run"),
        ("Größe.py", "Gr-e"),
        ("---.py", "job"),
        (f"{'x' * 80}.py", "x" * 63),
    ],
)
def test_job_is_named_after_script(line: str, name: str) -> None:
    assert derive_job_name(line.split(" ")) == name


@pytest.mark.parametrize(
    ("line", "python", "rest"),
    [
        ("python train.py --x", "python", "train.py --x"),
        (".venv/bin/python3.11 -u -m pkg.train", ".venv/bin/python3.11", "-m pkg.train"),
        ("python -m torch.distributed.run train.py", "", "python -m torch.distributed.run train.py"),
        ("python -c pass", "", "python -c pass"),
        ("python", "", "python"),
        ("train.py python", "", "train.py python"),
    ],
)
def test_leading_interpreter_is_jobs_python(line: str, python: str, rest: str) -> None:
    assert split_python(line.split()) == (python, tuple(rest.split()))
