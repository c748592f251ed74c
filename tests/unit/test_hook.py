"""The hook in real, short Python processes with a stand-in for torch, and the beat file from both of its sides."""

from __future__ import annotations

import os
import shutil
import struct
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from orchestrator.node import beats, hook, stacks
from orchestrator.node.beats import NO_BEAT, Beat, Beats

STACK_SIGNAL = 50
RUN_S_MAX = 60

# As much of torch as the hook looks at: a module with this name and this function.
STAND_IN = """
HOOKS = []
def register_optimizer_step_post_hook(hook):
    HOOKS.append(hook)
def step():
    for hook in HOOKS:
        hook(None, (), {})
"""
STEPS = """
import sys
from torch.optim.optimizer import step
import colorsys  # any later import: then the hook sees torch
for _ in range(int(sys.argv[1])):
    step()
"""


@dataclass(frozen=True, slots=True)
class Rank:
    """A rank's folder, the hook's folder and the user's code, as an agent would lay them out."""

    root: Path

    @property
    def dir(self) -> Path:
        return self.root / "rank"

    @property
    def code(self) -> Path:
        return self.root / "code"

    @property
    def env(self) -> dict[str, str]:
        return {
            **bare_env(),
            "ORCH_RANK_DIR": str(self.dir),
            "ORCH_STACK_SIGNAL": str(STACK_SIGNAL),
            "RANK": "0",
            "PYTHONPATH": f"{self.root / 'hook'}:{self.code}",
        }

    def script(self, text: str, name: str = "train.py") -> Path:
        path = self.code / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    def run(self, argv: Sequence[str | Path], **env: str) -> subprocess.CompletedProcess[bytes]:
        return run(argv, {**self.env, **env})

    def run_bare(self, argv: Sequence[str | Path]) -> subprocess.CompletedProcess[bytes]:
        return run(argv, {**bare_env(), "PYTHONPATH": str(self.code)})

    def beat(self) -> Beat:
        return Beats(self.dir / hook.BEAT_FILE).read()

    def errors(self) -> list[stacks.RankError]:
        paths = self.dir.glob(hook.ERROR_FILE.format("*"))
        found = [stacks.error_of(self.dir, int(path.stem.partition("-")[2])) for path in paths]
        return [error for error in found if error is not None]

    def error(self) -> stacks.RankError:
        (error,) = self.errors()
        return error

    def files(self) -> list[str]:
        return sorted(path.name for path in self.dir.iterdir())


def bare_env() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "RANK")}


def run(argv: Sequence[str | Path], env: dict[str, str]) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        argv, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=RUN_S_MAX, check=False
    )


def lay_out(root: Path) -> Rank:
    """Make a rank's folders as an agent does before the start."""
    rank = Rank(root)
    for folder in (rank.dir, rank.code, root / "hook"):
        folder.mkdir()
    shutil.copy(hook.__file__, root / "hook" / "sitecustomize.py")
    beats.create(rank.dir / hook.BEAT_FILE)
    return rank


@pytest.fixture
def rank(tmp_path: Path) -> Rank:
    rank = lay_out(tmp_path)
    rank.script("", "torch/__init__.py")
    rank.script("", "torch/optim/__init__.py")
    rank.script(STAND_IN, "torch/optim/optimizer.py")
    return rank


# Who counts steps.


def test_steps_are_counted_with_their_times(rank: Rank) -> None:
    done = rank.run([sys.executable, rank.script(STEPS), "5"])
    assert (done.returncode, done.stdout) == (0, b"")
    reader = Beats(rank.dir / hook.BEAT_FILE)
    beat = reader.read()
    assert beat.step == 5
    assert reader.step_at(beat.time_ns) == 5
    assert reader.rate_per_s() is not None
    assert rank.files() == ["beat", "beat-claim-0"]


def test_a_grandchild_of_the_ranks_shell_counts(rank: Rank) -> None:
    script = rank.script(STEPS)
    assert rank.run(["bash", "-c", f"{sys.executable} {script} 3; true"]).returncode == 0
    assert rank.beat().step == 3


def test_only_the_first_living_process_counts_and_a_dead_ones_claim_passes_on(rank: Rank) -> None:
    rank.script(STEPS, "child.py")
    script = rank.script(
        f"{STEPS}\nimport subprocess\nsubprocess.run([sys.executable, {str(rank.code / 'child.py')!r}, '7'])\n"
    )
    rank.run([sys.executable, script, "2"])
    assert rank.beat().step == 2
    rank.run([sys.executable, script, "4"])
    assert rank.beat().step == 4
    assert rank.files() == ["beat", "beat-claim-0", "beat-claim-1"]


def test_a_forked_child_stays_silent(rank: Rank) -> None:
    fork = "\nimport os\nif os.fork() == 0:\n    step()\n    os._exit(0)\nos.wait()\n"
    rank.run([sys.executable, rank.script(STEPS + fork), "3"])
    assert rank.beat().step == 3


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_the_children_of_multiprocessing_stay_silent(rank: Rank, method: str) -> None:
    script = rank.script(
        "import multiprocessing, torch.optim.optimizer, colorsys\n"
        "def work():\n    torch.optim.optimizer.step()\n"
        "if __name__ == '__main__':\n"
        f"    child = multiprocessing.get_context({method!r}).Process(target=work)\n"
        "    child.start(); child.join()\n    print(child.exitcode)\n"
    )
    assert rank.run([sys.executable, script]).stdout == b"0\n"
    assert rank.beat() == NO_BEAT
    assert rank.files() == ["beat"]


def test_without_a_rank_the_hook_does_nothing(rank: Rank) -> None:
    env = {name: value for name, value in rank.env.items() if name != "RANK"}
    done = run([sys.executable, "-c", "import sys; print(sys.excepthook is sys.__excepthook__)"], env)
    assert done.stdout == b"True\n"
    assert rank.files() == ["beat"]


@pytest.mark.parametrize("flag", ["-I", "-E", "-S"])
def test_an_isolated_python_runs_unharmed(rank: Rank, flag: str) -> None:
    done = rank.run([sys.executable, flag, "-c", "print('ran')"])
    assert (done.returncode, done.stdout) == (0, b"ran\n")


# What of the script stays as it was.


def test_the_users_own_sitecustomize_runs_and_keeps_the_name(rank: Rank) -> None:
    rank.script("import builtins\nbuiltins.mine = 'ran'\n", "sitecustomize.py")
    show = "import sys, sitecustomize; print(mine, sitecustomize.__file__, sys.path[1:])"
    assert rank.run([sys.executable, "-c", show]).stdout == rank.run_bare([sys.executable, "-c", show]).stdout


def test_a_failing_sitecustomize_fails_with_the_same_words(rank: Rank) -> None:
    rank.script("raise RuntimeError('mine')", "sitecustomize.py")
    with_hook = rank.run([sys.executable, "-c", "pass"])
    assert b"mine" in with_hook.stdout
    assert with_hook.stdout == rank.run_bare([sys.executable, "-c", "pass"]).stdout


def test_where_there_is_no_other_sitecustomize_there_is_none(rank: Rank) -> None:
    show = "import sys; print('sitecustomize' in sys.modules, sys.path[1:]); import sitecustomize"
    assert rank.run([sys.executable, "-c", show]).stdout == rank.run_bare([sys.executable, "-c", show]).stdout


def test_two_hooks_on_the_path_count_once(rank: Rank) -> None:
    shutil.copytree(rank.root / "hook", rank.root / "hook2")
    path = f"{rank.root / 'hook2'}:{rank.env['PYTHONPATH']}"
    rank.run([sys.executable, rank.script(STEPS), "3"], PYTHONPATH=path)
    assert rank.beat().step == 3


def test_torchs_own_spec_and_loader_are_as_ever(rank: Rank) -> None:
    show = (
        "import importlib.util, importlib, sys\nprint(importlib.util.find_spec('torch').loader.exec_module)\n"
        "import torch.optim.optimizer, colorsys\nprint(type(torch.__spec__.loader), importlib.reload(torch))\n"
        "print([getattr(finder, '__name__', type(finder)) for finder in sys.meta_path])"
    )
    first, *rest = rank.run([sys.executable, rank.script(show)]).stdout.splitlines()
    bare_first, *bare_rest = rank.run_bare([sys.executable, rank.script(show)]).stdout.splitlines()
    assert rest == bare_rest
    assert first.startswith(bare_first[:60])


# Script, then the type, line and function to be found.
FAILURES = {
    "plain": ("def f():\n    raise ValueError('no')\nf()", "ValueError", 2, "f"),
    "chained": (
        "try:\n    1 / 0\nexcept ArithmeticError as e:\n    raise KeyError from e",
        "KeyError",
        4,
        "<module>",
    ),
    "in the library": ("import json\njson.loads('{')", "json.decoder.JSONDecodeError", 2, "<module>"),
    "syntax": ("x = 1\ndef (:\n", "SyntaxError", 2, "<module>"),
    "own type": ("class Bad(Exception): pass\nraise Bad", "Bad", 2, "<module>"),
    "missing module": ("\nimport nowhere", "ModuleNotFoundError", 2, "<module>"),
    "hook replaced": (
        "import sys\nsys.excepthook = lambda *a: print('mine')\n1 / 0",
        "ZeroDivisionError",
        3,
        "<module>",
    ),
    "rich": (
        "import rich.traceback\nrich.traceback.install(width=80)\n1 / 0",
        "ZeroDivisionError",
        3,
        "<module>",
    ),
    "str fails": ("class Odd(Exception):\n    def __str__(self): 1 / 0\nraise Odd", "Odd", 3, "<module>"),
}


@pytest.mark.parametrize("name", FAILURES)
def test_an_uncaught_exception_is_noted_and_the_log_is_the_same(rank: Rank, name: str) -> None:
    text, kind, line, function = FAILURES[name]
    script = rank.script(text)
    done, bare = rank.run([sys.executable, script]), rank.run_bare([sys.executable, script])
    assert (done.returncode, done.stdout) == (bare.returncode, bare.stdout)
    error = rank.error()
    assert (error.type, Path(error.file), error.line, error.function) == (kind, script, line, function)
    assert kind.rpartition(".")[2] in error.traceback


@pytest.mark.parametrize(
    "text",
    [
        "raise SystemExit('bye')",
        "import sys; sys.exit(3)",
        "import os; os._exit(4)",
        "raise KeyboardInterrupt",
    ],
)
def test_an_exit_and_an_interrupt_are_no_errors_and_end_alike(rank: Rank, text: str) -> None:
    done, bare = rank.run([sys.executable, "-c", text]), rank.run_bare([sys.executable, "-c", text])
    assert (done.returncode, done.stdout) == (bare.returncode, bare.stdout)
    assert rank.errors() == []


def test_long_messages_and_tracebacks_are_cut(rank: Rank) -> None:
    rank.run([sys.executable, "-c", "raise ValueError('head' + 'm' * 100000 + 'tail')"])
    error = rank.error()
    assert len(error.message) == hook.MESSAGE_CHARS_MAX
    assert len(error.traceback) <= hook.TRACEBACK_CHARS_MAX
    assert error.traceback.startswith("Traceback") and error.traceback.endswith("tail\n")


@pytest.mark.parametrize("folder", ["/proc/self", "/nonexistent", "/dev/null"])
def test_a_folder_that_cannot_be_written_is_harmless(rank: Rank, folder: str) -> None:
    script = rank.script(f"{STEPS}\nraise ValueError('no')")
    done, bare = (
        rank.run([sys.executable, script, "3"], ORCH_RANK_DIR=folder),
        rank.run_bare([sys.executable, script, "3"]),
    )
    assert (done.returncode, done.stdout) == (bare.returncode, bare.stdout)


@pytest.mark.parametrize("damage", ["missing", "short", "a folder"])
def test_a_damaged_beat_file_is_harmless_and_noted_once(rank: Rank, damage: str) -> None:
    beat = rank.dir / hook.BEAT_FILE
    beat.unlink()
    if damage == "short":
        beat.write_bytes(b"0" * 10)
    elif damage == "a folder":
        beat.mkdir()
    done = rank.run([sys.executable, rank.script(STEPS), "3"])
    assert (done.returncode, done.stdout) == (0, b"")
    assert len((rank.dir / hook.NOTES_FILE).read_text().splitlines()) == 1


def test_a_hook_folder_deleted_midway_is_harmless(rank: Rank) -> None:
    text = f"import shutil\nshutil.rmtree({str(rank.root / 'hook')!r})\n{STEPS}\nraise ValueError('no')"
    done = rank.run([sys.executable, rank.script(text), "3"])
    assert done.returncode == 1
    assert rank.beat().step == 3
    assert rank.error().type == "ValueError"


def test_many_short_runs_end_alike_with_and_without(rank: Rank) -> None:
    for number in range(10):
        script = rank.script(f"print({number})\nimport json\nraise SystemExit({number} % 3)")
        done, bare = rank.run([sys.executable, script]), rank.run_bare([sys.executable, script])
        assert (done.returncode, done.stdout) == (bare.returncode, bare.stdout)
    assert rank.files() == ["beat"]


# The beat file by itself.


def written(path: Path, times_ns: Sequence[int], first_step: int = 1, pid: int = 7) -> Beats:
    """A beat file as the hook would leave it after steps at these times."""
    beats.create(path)
    words = [0] * (hook.BEAT_BYTES // 8)
    words[hook.MAGIC_WORD] = hook.BEAT_MAGIC | hook.BEAT_VERSION << 32
    words[hook.PID_WORD] = pid
    for step, time_ns in enumerate(times_ns, first_step):
        words[hook.RING_WORD + step % hook.RING_STEPS] = time_ns
        words[hook.TIME_WORD] = time_ns
        words[hook.STEP_WORD] = step
    path.write_bytes(struct.pack(f"<{len(words)}Q", *words))
    return Beats(path)


def seconds(*times_s: float) -> list[int]:
    return [int(time_s * 1e9) for time_s in times_s]


def test_before_the_first_step_nothing_is_known(tmp_path: Path) -> None:
    beats.create(tmp_path / "beat")
    reader = Beats(tmp_path / "beat")
    assert reader.read() == NO_BEAT
    assert reader.rate_per_s() is None
    assert reader.step_at(1 << 62) is None


def test_a_moment_tells_its_step(tmp_path: Path) -> None:
    reader = written(tmp_path / "beat", seconds(100, 101, 103))
    asked = seconds(99.9, 100, 102, 103, 1000)
    assert [reader.step_at(time_ns) for time_ns in asked] == [None, 1, 2, 3, 3]


def test_what_the_ring_has_forgotten_is_unknown(tmp_path: Path) -> None:
    reader = written(tmp_path / "beat", seconds(*range(1, 2001)))
    oldest = 2000 - hook.RING_STEPS + 1
    assert reader.read() == Beat(step=2000, time_ns=2000 * 10**9, pid=7)
    assert reader.step_at(oldest * 10**9) == oldest
    assert reader.step_at(oldest * 10**9 - 1) is None


def test_a_counter_that_took_over_late_knows_only_its_own_steps(tmp_path: Path) -> None:
    reader = written(tmp_path / "beat", seconds(100, 101), first_step=500)
    assert reader.step_at(99 * 10**9) is None
    assert reader.rate_per_s() == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("times_s", "rate_per_s"),
    [
        ([100], None),
        ([100, 100.5], 2.0),
        ([0.5 * n for n in range(1, 101)], 2.0),
        ([1, 60, 61, 62], 1.0),  # the pause lies outside the window
        ([100, 160], 1 / 60),  # slower than the window: the last two steps
        ([100, 50], None),  # the clock was set back
    ],
)
def test_the_rate_is_that_of_the_last_steps(
    tmp_path: Path, times_s: list[float], rate_per_s: float | None
) -> None:
    rate = written(tmp_path / "beat", seconds(*times_s)).rate_per_s()
    assert rate == (None if rate_per_s is None else pytest.approx(rate_per_s))


def test_a_file_of_another_layout_is_no_beat(tmp_path: Path) -> None:
    written(tmp_path / "beat", seconds(1, 2))
    data = bytearray((tmp_path / "beat").read_bytes())
    data[4] += 1  # the version
    (tmp_path / "beat").write_bytes(data)
    assert Beats(tmp_path / "beat").read() == NO_BEAT
