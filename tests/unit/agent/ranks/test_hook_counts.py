"""Collective counts and exit notes of the hook, with a stand-in for torch.distributed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from orchestrator.agent.ranks.hook import layout
from orchestrator.core import observations
from tests.support.hooked import RUN_S_MAX, STEPS, Rank, lay_out_with_stand_in

pytestmark = pytest.mark.slow

# As much of torch.distributed as the hook reads: the table of groups, and a group's sequence number.
DISTRIBUTED = """
class Group:
    group_desc = "default_pg"
    def __init__(self, count=0):
        self.count = count
    def _get_sequence_number_for_group(self):
        if self.count is None:
            raise RuntimeError("this backend counts nothing")
        return self.count
class World:
    def __init__(self):
        self.pg_map, self.pg_names, self.pg_group_ranks = {}, {}, {}
    def add(self, name, ranks, count=0):
        group = Group(count)
        self.pg_names[group] = name
        self.pg_group_ranks[group] = {rank: place for place, rank in enumerate(ranks)}
        self.pg_map[group] = ("gloo", None)
        return group
    def destroy(self, group):
        for table in (self.pg_map, self.pg_names, self.pg_group_ranks):
            del table[group]
_world = World()
"""
GROUPS = """
import gc, weakref
from torch.optim.optimizer import Optimizer, step
from torch.distributed.distributed_c10d import _world as world
import colorsys
"""


@pytest.fixture
def rank(tmp_path: Path) -> Rank:
    rank = lay_out_with_stand_in(tmp_path)
    rank.script("", "torch/distributed/__init__.py")
    rank.script(DISTRIBUTED, "torch/distributed/distributed_c10d.py")
    return rank


# Steps of the script.


def steps_of(rank: Rank, loop: str) -> int:
    """Return the step of a script with optimizers `a`, `b` and `c`."""
    text = f"{GROUPS}\na, b, c = (Optimizer(parameters) for parameters in (1, 2, 3))\n{loop}\n"
    assert rank.run([sys.executable, rank.script(text)]).stdout == b""
    return rank.last_step().step


@pytest.mark.parametrize(
    ("loop", "step"),
    [
        ("for _ in range(10): a.step(); b.step()", 10),
        ("for _ in range(10): a.step(); b.step(); c.step()", 10),
        ("for _ in range(4):\n    for _ in range(5): a.step()\n    b.step()", 20),
        ("for _ in range(4):\n    b.step()\n    for _ in range(5): a.step()", 20),
        ("for turn in range(10):\n    a.step()\n    if turn % 2: b.step()", 10),
        ("for one in (a, b):\n    for _ in range(10): one.step()", 19),
        ("many = [Optimizer(9) for _ in range(300)]\nfor _ in range(4):\n    for one in many: one.step()", 4),
    ],
    ids=[
        "gan",
        "three",
        "critic",
        "critic last",
        "delayed actor",
        "one after the other",
        "one for each layer",
    ],
)
def test_most_stepping_optimizer_counts(rank: Rank, loop: str, step: int) -> None:
    assert steps_of(rank, loop) == step


def test_speed_is_that_of_script_steps(rank: Rank) -> None:
    steps_of(rank, "import time\nfor _ in range(20): a.step(); b.step(); time.sleep(0.01)")
    reader = rank.reader()
    last, rate = reader.read(), reader.rate_per_s()
    assert (last.step, last.rows) == (20, 40)
    assert rate is not None and rate < 100


def test_step_filling_optimizer_state_is_not_counted(rank: Rank) -> None:
    """A step that torch makes to fill an optimizer's state is not counted."""
    rank.script("", "torch/distributed/checkpoint/__init__.py")
    rank.script(
        "def _init_optim_state(optimizer):\n    (lambda: optimizer.step())()\n",
        "torch/distributed/checkpoint/state_dict.py",
    )
    loop = "from torch.distributed.checkpoint.state_dict import _init_optim_state\n"
    assert steps_of(rank, loop + "for _ in range(3): _init_optim_state(a); a.step(); _init_optim_state(a)") == 3
    assert rank.last_step().rows == 3


# As much of a CUDA graph as the hook wraps; a graph cannot be captured without a GPU.
CUDA_GRAPHS = """
class CUDAGraph:
    replays = 0
    def capture_begin(self, pool=None, capture_error_mode="global"):
        self.mode = capture_error_mode
    def capture_end(self):
        pass
    def replay(self):
        self.replays += 1
"""


def test_cuda_graph_replay_with_optimizer_is_a_step(rank: Rank) -> None:
    """Captures are no steps, nor are replays of graphs without an optimizer's step, or of one whose optimizer is gone."""
    rank.script("", "torch/cuda/__init__.py")
    rank.script(CUDA_GRAPHS, "torch/cuda/graphs.py")
    loop = """
from torch.cuda.graphs import CUDAGraph
import wave
for _ in range(3): a.step()
whole, forward, dead = CUDAGraph(), CUDAGraph(), CUDAGraph()
whole.capture_begin(capture_error_mode="relaxed"); a.step(); whole.capture_end()
forward.capture_begin(); forward.capture_end()
dead.capture_begin(); b.step(); dead.capture_end()
del b
gc.collect()
for _ in range(10): forward.replay(); dead.replay(); whole.replay()
b = a
b.step()
assert whole.mode == "relaxed" and whole.replays == forward.replays == dead.replays == 10
"""
    assert steps_of(rank, loop) == 14


# Ranks that are alone.


@pytest.mark.parametrize(
    ("before", "alone"),
    [
        ("", observations.Framework.TORCH),
        ("world.add('0', [0])", observations.Framework.TORCH),
        ("sys.modules['lightning'] = sys", observations.Framework.LIGHTNING),
        ("world.add('0', [0, 1])", None),
        ("world.add('0', [0]); world.add('1', [0, 1])", None),
        ("world.destroy(world.add('0', [0, 1])) if a.step() else 0; world.add('0', [0, 1])", None),
        ("sys.modules['horovod'] = sys", None),
        ("del world.pg_map", None),
    ],
    ids=[
        "none",
        "a world of one",
        "lightning",
        "a gang",
        "a second group",
        "late",
        "horovod",
        "another torch",
    ],
)
def test_rank_without_process_group_is_alone(rank: Rank, before: str, alone: observations.Framework | None) -> None:
    steps_of(rank, f"import sys\n{before}\nfor _ in range(3): a.step()")
    assert rank.reader().framework_without_group() is alone


def test_rank_joining_late_is_alone_until_then(rank: Rank) -> None:
    steps_of(rank, "for _ in range(60): a.step()\nworld.add('0', [0, 1])\na.step()")
    assert rank.reader().framework_without_group() is None


# Collective counts.


def test_collectives_of_each_group_are_counted_per_step(rank: Rank) -> None:
    text = f"""{GROUPS}
every, some = world.add("0", [0, 1, 2, 3]), world.add("7", [3, 1], 10)
some.group_desc = "tensor parallel"
for _ in range(5):
    every.count += 2
    step()
"""
    assert rank.run([sys.executable, rank.script(text)]).stdout == b""
    reader = rank.reader()
    assert [(one.name, one.label, one.ranks) for one in reader.groups()] == [
        ("0", "default_pg", (0, 1, 2, 3)),
        ("7", "tensor parallel", (3, 1)),
    ]
    assert reader.collective_counts(0, 5) == (
        observations.CollectiveCounts(2, 0, 2, (4, 10)),
        observations.CollectiveCounts(4, 0, 4, (8, 10)),
    )
    assert reader.history() == (
        observations.CollectiveCounts(1, 0, 1, (2, 10)),
        observations.CollectiveCounts(5, 0, 5, (10, 10)),
    )
    assert [end.total for end in reader.step_ends(3)] == [16, 18, 20]
    assert len({group.key for group in reader.groups()}) == 2


def test_steps_of_each_optimizer_are_numbered_separately(rank: Rank) -> None:
    text = f"""{GROUPS}
every = world.add("0", [0, 1])
main, probe = Optimizer(7), Optimizer(7)
for turn in range(4):
    every.count += 1
    main.step()
    if turn == 1:
        for _ in range(3):
            probe.step()
        main = Optimizer(7)  # as after a new start: goes on where the other was
    if turn == 2:
        every.count += 1
for parameters in range(10, 20):
    Optimizer(parameters).step()
"""
    assert rank.run([sys.executable, rank.script(text)]).stdout == b""
    assert not (rank.dir / layout.NOTES_FILE).exists()
    reader = rank.reader()
    assert reader.collective_counts(0, 6) == (
        observations.CollectiveCounts(2, 0, 2, (2,)),
        observations.CollectiveCounts(3, 1, 2, (2,)),
    )
    assert reader.collective_counts(5, 7) == (
        observations.CollectiveCounts(4, 0, 3, (3,)),
        observations.CollectiveCounts(5, 0, 4, (5,)),
    )
    assert reader.history()[:2] == (
        observations.CollectiveCounts(1, 0, 1, (1,)),
        observations.CollectiveCounts(5, 0, 4, (5,)),
    )
    assert [(mark.optimizer, mark.optimizer_step) for mark in reader.collective_counts(7, 17)] == [
        (number, 1) for number in (4, 5, 6, 7)
    ]


def test_non_torch_optimizer_does_not_inherit_previous_count(rank: Rank) -> None:
    text = f"""{GROUPS}
world.add("0", [0, 1], 5)
odd = Optimizer()
del odd.param_groups
step()
odd.step()
odd.step()
step()
"""
    assert rank.run([sys.executable, rank.script(text)]).stdout == b""
    assert rank.reader().collective_counts(0, 4) == (
        observations.CollectiveCounts(1, 0, 1, (5,)),
        observations.CollectiveCounts(4, 0, 2, (5,)),
    )
    (note,) = (rank.dir / layout.NOTES_FILE).read_text().splitlines()
    assert "param_groups" in note


def test_column_of_destroyed_group_goes_to_next_one(rank: Rank) -> None:
    text = f"""{GROUPS}
every, some = world.add("0", [0, 1], 5), world.add("1", [0], 5)
step()
world.destroy(every)
gone = weakref.ref(every)
del every
gc.collect()
print(gone() is None)
step()
world.add("2", [0, 1], 50)
step()
"""
    assert rank.run([sys.executable, rank.script(text)]).stdout == b"True\n"
    reader = rank.reader()
    assert [(one.name, one.column) for one in reader.groups()] == [("1", 1), ("2", 0)]
    assert reader.collective_counts(0, 3) == (
        observations.CollectiveCounts(3, 0, 3, (5, 50)),
    )  # before, the new group was not there


def test_uncountable_group_is_left_out_and_noted_once(rank: Rank) -> None:
    """A group that cannot be counted is left out and noted once."""
    text = f"{GROUPS}\nworld.add('0', [0], None)\nworld.add('1', [0], 3)\nfor _ in range(3):\n    step()\n"
    assert rank.run([sys.executable, rank.script(text)]).stdout == b""
    assert rank.reader().collective_counts(0, 3) == tuple(
        observations.CollectiveCounts(step, 0, step, (3,)) for step in (1, 2, 3)
    )
    (note,) = (rank.dir / layout.NOTES_FILE).read_text().splitlines()
    assert "counts nothing" in note


def test_first_eight_of_many_groups_are_counted(rank: Rank) -> None:
    text = f"{GROUPS}\nfor number in range(20):\n    world.add(str(number), [0], number)\nstep()\n"
    rank.run([sys.executable, rank.script(text)])
    assert rank.reader().history() == (observations.CollectiveCounts(1, 0, 1, (0, 1, 2, 3, 4, 5, 6, 7)),)


def test_groups_being_changed_are_not_read(rank: Rank) -> None:
    rank.run([sys.executable, rank.script(f"{GROUPS}\nworld.add('0', [0], 3)\nstep()\n")])
    data = bytearray((rank.dir / layout.STEP_FILE).read_bytes())
    data[8 * layout.GROUPS_WORD] += 1
    (rank.dir / layout.STEP_FILE).write_bytes(data)
    assert (rank.reader().groups(), rank.reader().collective_counts(0, 1)) == ((), ())


# The process that notes its exit.


def test_process_that_made_steps_notes_its_exit(rank: Rank) -> None:
    script = rank.script(f"{STEPS}\nimport os\nprint(os.getpid())")
    done = rank.run(["bash", "-c", f"{sys.executable} {script} 2; true"])
    assert rank.reader().exiting_pid() == int(done.stdout) and not rank.reader().made_no_step()


def test_first_process_notes_exit_without_steps(rank: Rank) -> None:
    rank.run([sys.executable, "-c", "pass"])
    assert rank.reader().exiting_pid() is None
    first = subprocess.Popen([sys.executable, "-c", "pass"], env=rank.env, start_new_session=True)
    assert first.wait(RUN_S_MAX) == 0
    assert rank.reader().exiting_pid() == first.pid


JOIN = """
class Join:
    def __init__(self, enable=True):
        self._enable = enable
    def __enter__(self): ...
    def __exit__(self, *exc): ...
"""


@pytest.mark.parametrize("enable", [True, False])
def test_counting_stops_once_ranks_shadow_collectives(rank: Rank, enable: bool) -> None:
    """Those whose data has come to an end make no steps then: torch.distributed.algorithms.join."""
    rank.script("", "torch/_C/__init__.py")
    rank.script("def _WorkerServer(path): ...", "torch/_C/_distributed_c10d.py")
    rank.script("", "torch/distributed/algorithms/__init__.py")
    rank.script(JOIN, "torch/distributed/algorithms/join.py")
    text = f"""{GROUPS}
import torch._C._distributed_c10d, torch.distributed.algorithms.join, wave
every, mine = world.add("0", [0, 1]), Optimizer(1)
mine.step()
with torch.distributed.algorithms.join.Join(enable={enable}):
    mine.step()
"""
    done = rank.run([sys.executable, rank.script(text)], **{layout.SOCKET_ENV: "1"})
    assert done.returncode == 0, done.stdout
    assert rank.last_step().step == 2
    assert len(rank.reader().collective_counts(0, 2)) == (1 if enable else 2)


def test_launcher_exit_is_not_its_trainers(rank: Rank) -> None:
    script = rank.script("import subprocess, sys\nprint(subprocess.run([sys.executable, *sys.argv[1:]]).returncode)")
    argv: list[str | Path] = [
        sys.executable,
        script,
        rank.script(f"{STEPS}\nimport os\nos._exit(3)", "child.py"),
        "2",
    ]
    launcher = subprocess.Popen(argv, env=rank.env, start_new_session=True, stdout=subprocess.DEVNULL)
    assert launcher.wait(RUN_S_MAX) == 0
    assert rank.reader().exiting_pid() is None


def test_exit_is_noted_after_registered_handlers(rank: Rank) -> None:
    """The exit is noted after everything that the script has registered."""
    text = (
        "import atexit, os, struct\n"
        f"def look():\n    words = open({str(rank.dir / layout.STEP_FILE)!r}, 'rb').read(64)\n"
        f"    print(struct.unpack('<8Q', words)[{layout.EXITING_WORD}])\n"
        "atexit.register(look)\n"
    )
    done = subprocess.run(
        [sys.executable, rank.script(text)], env=rank.env, stdout=subprocess.PIPE, start_new_session=True,
        timeout=RUN_S_MAX, check=True,
    )  # fmt: skip
    assert done.stdout == b"0\n"
    assert rank.reader().exiting_pid() is not None


@pytest.mark.parametrize(("text", "is_said"), [("# loss.backward()\nimport torch", True), ("import torch", False)])
def test_training_without_steps_says_so_at_end(rank: Rank, text: str, is_said: bool) -> None:
    first = subprocess.Popen([sys.executable, rank.script(text)], env=rank.env, start_new_session=True)
    assert first.wait(RUN_S_MAX) == 0
    assert rank.reader().made_no_step() == is_said
