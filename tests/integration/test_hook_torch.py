"""The hook under real torch and its frameworks, and the stacks of processes that hang."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from orchestrator.agent.probes import python_stacks
from orchestrator.agent.probes.python_stacks import RankStack
from orchestrator.agent.rank import error_file, hook
from orchestrator.agent.rank.step_counter import NO_STEP
from orchestrator.core.host import procfs
from tests.support.hooked import (
    RUN_S_MAX,
    STACK_SIGNAL,
    WORLD_SIZE,
    Rank,
    bare_env,
    free_port,
    gang,
    lay_out,
    torchrun_env,
)

STEPS = 6
STACKS_S_MAX = 2.0  # a busy machine; the agent waits less
START_S_MAX = 10.0

MODEL = """
import os, sys, torch
import torch.distributed as dist
steps = int(sys.argv[1])
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 1))
"""
LOOP = """
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(steps):
    model(torch.ones(4, 8)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
DDP = f"""{MODEL}
dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(model)
{LOOP}
print("done", dist.get_rank())
dist.destroy_process_group()
"""
FSDP2 = f"""{MODEL}
from torch.distributed.fsdp import fully_shard
dist.init_process_group("gloo")
fully_shard(model, mesh=torch.distributed.device_mesh.init_device_mesh("cpu", (2,)))
{LOOP}
print("done", dist.get_rank())
dist.destroy_process_group()
"""
ACCELERATE = f"""{MODEL}
from accelerate import Accelerator
accelerator = Accelerator(gradient_accumulation_steps=2, cpu=True)
data = torch.utils.data.DataLoader(torch.ones(4 * steps * 2 * 2, 8), batch_size=4)
model, optimizer, data = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), data)
for batch in data:
    with accelerator.accumulate(model):
        accelerator.backward(model(batch).sum())
        optimizer.step()
        optimizer.zero_grad()
print("done", accelerator.process_index)
accelerator.end_training()
"""
LIGHTNING = f"""{MODEL}
import lightning
class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = model
    def training_step(self, batch, number):
        return self.model(batch).sum()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)
trainer = lightning.Trainer(
    strategy="ddp", devices=2, num_nodes=1, accelerator="cpu", max_steps=steps, logger=False,
    enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
)
trainer.fit(Module(), torch.utils.data.DataLoader(torch.ones(1000, 8), batch_size=4))
print("done", trainer.global_rank)
dist.destroy_process_group()
"""


def train(ranks: list[Rank], text: str, **env: str) -> list[tuple[int, bytes]]:
    """Run `text` as the script of all ranks at once; exit codes and logs by rank."""
    meeting = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "TORCHELASTIC_RUN_ID": "test",
        **env,
    }
    running = [
        subprocess.Popen(
            [sys.executable, rank.script(text), str(STEPS)],
            env={**rank.env, **torchrun_env(number, len(ranks)), **meeting, hook.SOCKET_ENV: "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        for number, rank in enumerate(ranks)
    ]
    logs = [process.communicate(timeout=RUN_S_MAX)[0] for process in running]
    return [(process.returncode, log) for process, log in zip(running, logs, strict=True)]


@pytest.mark.parametrize(
    "text", [DDP, FSDP2, ACCELERATE, LIGHTNING], ids=["ddp", "fsdp2", "accelerate", "lightning"]
)
def test_every_step_of_every_rank_is_counted(tmp_path: Path, text: str) -> None:
    ranks = gang(tmp_path)
    for number, (code, log) in enumerate(train(ranks, text)):
        assert code == 0, log.decode()
        assert f"done {number}".encode() in log
    assert [rank.last_step().step for rank in ranks] == [STEPS] * WORLD_SIZE
    assert [rank.files() for rank in ranks] == [["groups.json", "steps", "steps-claim-0"]] * WORLD_SIZE
    readers = [rank.reader() for rank in ranks]
    assert all(reader.exiting_pid() == reader.read().pid for reader in readers)
    counts = [[(end.step, end.total) for end in reader.step_ends(STEPS)] for reader in readers]
    assert counts[0] == counts[1]
    assert all(count for _, count in counts[0]), "a step of a gang enters collectives"


def test_dataloader_workers_stay_silent(tmp_path: Path) -> None:
    rank = lay_out(tmp_path)
    script = rank.script(
        "import torch\n"
        "class Data(torch.utils.data.Dataset):\n"
        "    def __len__(self): return 4\n"
        "    def __getitem__(self, number):\n"
        "        weight = torch.nn.Parameter(torch.ones(1))\n"
        "        weight.grad = torch.ones(1)\n"
        "        torch.optim.SGD([weight], lr=0.1).step()\n"
        "        return number\n"
        "if __name__ == '__main__':\n"
        "    for method in ('fork', 'spawn'):\n"
        "        loader = torch.utils.data.DataLoader(Data(), num_workers=1, multiprocessing_context=method)\n"
        "        print(sum(batch.item() for batch in loader))\n"
    )
    done = rank.run([sys.executable, script])
    assert (done.returncode, done.stdout) == (0, b"6\n6\n")
    assert rank.last_step() == NO_STEP
    assert rank.files() == ["steps"]


def test_an_error_is_noted_under_torchs_hooks_and_the_log_is_theirs(tmp_path: Path) -> None:
    rank = lay_out(tmp_path)
    script = rank.script(
        "import torch, torch.distributed as dist\n"
        "from torch.distributed.elastic.multiprocessing.errors import record\n"
        "@record\n"
        "def main():\n    raise RuntimeError('no')\n"
        "dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)\n"
        "main()\n"
    )
    done, bare = rank.run([sys.executable, script]), rank.run_bare([sys.executable, script])
    assert done.returncode == bare.returncode == 1
    assert b"[rank0]: RuntimeError: no" in done.stdout
    assert _without_times(done.stdout) == _without_times(bare.stdout)
    error = rank.error()
    assert (error.type, error.file, error.line, error.function) == ("RuntimeError", str(script), 5, "main")


def _without_times(log: bytes) -> list[bytes]:
    """Leave out what differs from run to run: the time that `record` writes, and lines of torch's own loggers."""
    return [
        line for line in log.splitlines() if b"timestamp" not in line and not line.startswith((b"[W", b"E"))
    ]


def test_errors_are_read_of_the_first_process_else_the_newest(tmp_path: Path) -> None:
    assert error_file.error_of(tmp_path, 1) is None
    for age_s, pid in enumerate((30, 10, 20)):
        path = tmp_path / hook.ERROR_FILE.format(pid)
        path.write_text(
            f'{{"type": "E{pid}", "message": "", "traceback": "", "file": "", "line": 0, "function": ""}}'
        )
        os.utime(path, (1000 - age_s, 1000 - age_s))
    (tmp_path / hook.ERROR_FILE.format(5)).write_text("torn")
    found = [error_file.error_of(tmp_path, pid) for pid in (10, 20, 5, 99)]
    assert [error.type for error in found if error is not None] == ["E10", "E20", "E30", "E30"]


# Stacks.


@contextmanager
def running(rank: Rank, text: str) -> Iterator[subprocess.Popen[bytes]]:
    """A process of the rank that has said `ready`."""
    argv = [sys.executable, "-u", str(rank.script(text))]
    process = subprocess.Popen(argv, env=rank.env, stdout=subprocess.PIPE, start_new_session=True)
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == b"ready\n"
        yield process
    finally:
        if process.poll() is None:
            os.killpg(process.pid, 9)
        process.wait()
        process.stdout.close()


HOLDS_THE_GIL = """
def train_step():
    sum(range(10**12))  # one call into C, which never lets go
print("ready")
train_step()
"""
SLEEPS = """
import time
def train_step():
    time.sleep(60)
print("ready")
train_step()
"""
FORKS = """
import os, time
def work():
    time.sleep(60)
def wait():
    os.wait()
if os.fork() == 0:
    work()
print("ready")
wait()
"""


def take_until(process: subprocess.Popen[bytes], rank: Rank, *words: str) -> list[RankStack]:
    """Take stacks until each process shows its word: it may just have said `ready` and not be there yet."""
    deadline = time.monotonic() + START_S_MAX
    found: list[RankStack] = []
    while time.monotonic() < deadline and process.poll() is None:
        found = python_stacks.take(process.pid, rank.dir, STACK_SIGNAL, STACKS_S_MAX)
        if len(found) == len(words) and all(word in one.text for word, one in zip(words, found, strict=True)):
            return found
        time.sleep(python_stacks.POLL_S)
    raise AssertionError(f"{words} not in {found}")


def test_a_loop_that_holds_the_gil_shows_its_line(tmp_path: Path) -> None:
    rank = lay_out(tmp_path)
    with running(rank, HOLDS_THE_GIL) as process:
        for _ in range(2):  # the second answer is the new one only
            (stack,) = take_until(process, rank, 'train.py", line 3 in train_step')
            assert stack.pid == process.pid
            assert stack.text.count("most recent call first") == 1
        assert process.poll() is None


def test_forked_children_answer_each_for_itself(tmp_path: Path) -> None:
    rank = lay_out(tmp_path)
    with running(rank, FORKS) as process:
        parent, child = take_until(process, rank, "in wait\n", "in work\n")
        assert "in work\n" not in parent.text
        assert "in wait\n" not in child.text
        assert rank.files() == [f"stacks-{process.pid}.txt", "steps"]


def test_a_process_without_a_handler_is_described_and_not_killed(tmp_path: Path) -> None:
    process = subprocess.Popen(["sleep", "60"], env=bare_env())
    try:
        settled_by = time.monotonic() + START_S_MAX
        while (
            not ((stat := procfs.stat(process.pid)) and stat.state == "S") and time.monotonic() < settled_by
        ):
            time.sleep(0.01)  # a process that is still being loaded may be in state D
        (stack,) = python_stacks.take(process.pid, tmp_path, STACK_SIGNAL, STACKS_S_MAX)
        assert "no Python stack" in stack.text
        assert process.poll() is None
    finally:
        process.kill()
        process.wait()


def test_a_stopped_process_is_said_to_be_stopped_at_once(tmp_path: Path) -> None:
    rank = lay_out(tmp_path)
    with running(rank, SLEEPS) as process:
        os.kill(process.pid, 19)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
        asked = python_stacks.ask(process.pid, rank.dir, STACK_SIGNAL)
        found = python_stacks.answer(asked)
        assert found is not None
        assert found[0].state == "T"
        assert found[0].text.startswith("stopped (state T)")
        assert not procfs.has_pending(process.pid, STACK_SIGNAL)


CHURNS = """
import threading, time
print("ready")
until_s = time.monotonic() + 3
while time.monotonic() < until_s:
    threads = [threading.Thread(target=sum, args=(range(1000),)) for _ in range(4)]
    for thread in threads: thread.start()
    for thread in threads: thread.join()
"""
ENDS = """
import time
print("ready")
time.sleep(0.05)
"""


@pytest.mark.parametrize("text", [CHURNS, *[ENDS] * 9])
def test_looks_without_number_do_no_harm_while_threads_come_and_go_or_the_process_ends(
    tmp_path: Path, text: str
) -> None:
    rank = lay_out(tmp_path)
    with running(rank, text) as process:
        deadline = time.monotonic() + START_S_MAX
        while process.poll() is None and time.monotonic() < deadline:
            os.kill(process.pid, STACK_SIGNAL)
            time.sleep(0.0003)  # else it comes to nothing else
        assert process.returncode == 0


def test_eight_ranks_answer_together_without_threads(tmp_path: Path) -> None:
    ranks = gang(tmp_path, 8)
    threads = threading.active_count()
    with ExitStack() as open_ranks:
        pids = [open_ranks.enter_context(running(rank, SLEEPS)).pid for rank in ranks]
        asked = [
            python_stacks.ask(pid, rank.dir, STACK_SIGNAL) for pid, rank in zip(pids, ranks, strict=True)
        ]
        deadline = time.monotonic() + STACKS_S_MAX
        found = [python_stacks.answer(one) for one in asked]
        while not all(found) and time.monotonic() < deadline:
            time.sleep(python_stacks.POLL_S)
            found = [old or python_stacks.answer(one) for old, one in zip(found, asked, strict=True)]
        texts = [one[0].text for one in found if one]
        assert len(texts) == len(ranks)
        assert all('train.py", line ' in text for text in texts)
        assert threading.active_count() == threads


def test_a_stack_in_the_middle_of_a_collective_does_not_disturb_it(tmp_path: Path) -> None:
    """Rank 1 comes late to an all_reduce; rank 0 is asked for its stacks while it waits inside, and both end well."""
    late = DDP.replace(
        "model = torch.nn.parallel",
        "import pathlib, time\n"
        "while dist.get_rank() == 1 and not pathlib.Path(os.environ['GO']).exists(): time.sleep(0.01)\n"
        "dist.all_reduce(torch.ones(1))\nmodel = torch.nn.parallel",
    )
    ranks = gang(tmp_path)
    go = tmp_path / "go"
    results: list[tuple[int, bytes]] = []
    training = threading.Thread(target=lambda: results.extend(train(ranks, late, GO=str(go))))
    training.start()
    seen = ""
    deadline = time.monotonic() + RUN_S_MAX / 2
    while "all_reduce" not in seen and time.monotonic() < deadline:
        for proc in procfs.with_env(f"ORCH_RANK_DIR={ranks[0].dir}".encode()):
            seen = "".join(
                s.text for s in python_stacks.take(proc.pid, ranks[0].dir, STACK_SIGNAL, STACKS_S_MAX)
            )
        time.sleep(0.1)
    go.touch()
    training.join()
    assert "all_reduce" in seen
    assert [code for code, _ in results] == [0, 0], results
    assert [rank.last_step().step for rank in ranks] == [STEPS] * WORLD_SIZE
