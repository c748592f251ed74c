"""Stack frames: real dumps of `faulthandler`, those of other versions and torn ones, and the meaning of places."""

from __future__ import annotations

import faulthandler
import sys
import threading
from pathlib import Path

import pytest

from orchestrator.agent.hang import stack_frames
from orchestrator.agent.ranks import stack_dump
from orchestrator.core.status_types import Frame

SITE = "/opt/venv/lib/python3.11/site-packages"
C10D = f"{SITE}/torch/distributed/distributed_c10d.py"
LOGGER = f"{SITE}/torch/distributed/c10d_logger.py"
LOADER = f"{SITE}/torch/utils/data/dataloader.py"
FETCH = f"{SITE}/torch/utils/data/_utils/fetch.py"
MINE = "/home/me/code/train.py"


def stack(*places: tuple[str, str]) -> tuple[Frame, ...]:
    """Return frames, innermost first, with their places as lines."""
    return tuple(Frame(file, number, function) for number, (file, function) in enumerate(places, start=1))


def test_dump_of_this_process_has_all_threads(tmp_path: Path) -> None:
    """The dump of this very process is read with all its threads."""
    done = threading.Event()
    other = threading.Thread(target=done.wait, daemon=True)
    other.start()
    with (tmp_path / "dump").open("w+") as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        text = file.read()
    done.set()
    threads = stack_dump.parse_dump(text)
    assert other.ident in {thread.ident for thread in threads}
    main = threads[-1]
    assert main.ident == threading.main_thread().ident
    assert main.frames[0].function == "test_dump_of_this_process_has_all_threads"
    assert main.frames[0].file == __file__


def test_python_3_14_dump_with_names_parses_alike() -> None:
    """A dump of Python 3.14, which has thread names, is read like the others."""
    text = (
        "Thread 0x00007f01 [Thread-1 (wait)] (most recent call first):\n"
        '  File "/usr/lib/python3.14/threading.py", line 373 in wait\n\n'
        "Current thread 0x00007f02 [python] (most recent call first):\n"
        "  Garbage-collecting\n"
        f'  File "{MINE}", line 7 in <module>\n'
        '\nCurrent thread\'s C stack trace (most recent call first):\n  Binary file "/lib/libc.so", at x [0x1]\n'
    )
    threads = stack_dump.parse_dump(text)
    assert [(thread.name, len(thread.frames)) for thread in threads[:2]] == [
        ("Thread-1 (wait)", 1),
        ("python", 1),
    ]
    main = stack_dump.dumped_stack(text)
    assert main is not None
    assert main.frames == (Frame(MINE, 7, "<module>"),)


def test_frames_of_orch_are_left_out_of_traceback() -> None:
    """Frames of orch are left out, and a stack dump reads like a traceback."""
    template = "/h/jobs/j/nodes/node-0/template/template.py"
    text = (
        f'Stack (most recent call first):\n  File "{MINE}", line 7 in step\n  File "{MINE}", line 9 in <module>\n'
        f'  File "{template}", line 171 in run\n  File "{template}", line 246 in main\n'
    )
    page = stack_dump.format_traceback(stack_dump.parse_dump(text), lambda frame: f"line {frame.line}")
    assert page == (
        f'Stack (most recent call last):\n  File "{MINE}", line 9, in <module>\n    line 9\n'
        f'  File "{MINE}", line 7, in step\n    line 7\n'
    )


def test_torn_and_unknown_lines_are_skipped() -> None:
    text = (
        'Current thread 0x00007f02 (most recent call first):\n  File "a.py", line 3 in f\n  <invalid frame>\n'
        '  File "a.py", line ??? in g\n  File "a.py", li'
    )
    main = stack_dump.dumped_stack(text)
    assert main is not None
    assert main.frames == (Frame("a.py", 3, "f"), Frame("a.py", 0, "g"))
    assert stack_dump.dumped_stack("waits in the kernel and takes no signal (state D)\n") is None


def test_location_is_innermost_user_frame_with_loader() -> None:
    """The location is the user's innermost frame and mentions the loader around it."""
    plain = stack((C10D, "all_reduce"), (LOGGER, "wrapper"), (MINE, "step"), (MINE, "<module>"))
    assert stack_frames.describe_shown_frame(plain) == "train.py:3 step"
    loading = stack((MINE, "load_batch"), (FETCH, "fetch"), (LOADER, "__next__"), (MINE, "<module>"))
    assert stack_frames.describe_shown_frame(loading) == "train.py:1 load_batch (DataLoader of the main thread)"
    assert stack_frames.describe_shown_frame(stack((C10D, "barrier"))) == "distributed_c10d.py:1 barrier"
    assert stack_frames.describe_shown_frame(()) == ""


@pytest.mark.parametrize(
    ("inner", "line", "awaited"),
    [
        ([(C10D, "all_reduce"), (LOGGER, "wrapper")], "", "all_reduce"),
        ([(C10D, "all_gather"), (LOGGER, "wrapper"), (C10D, "all_gather_object")], "", "all_gather_object"),
        ([(C10D, "init_process_group"), (LOGGER, "wrapper")], "", "init_process_group"),
        ([(f"{SITE}/torch/distributed/rendezvous.py", "_create_c10d_store")], "", "the rendezvous"),
        ([(f"{SITE}/torch/nn/parallel/distributed.py", "__init__")], "", "DistributedDataParallel"),
        ([(f"{SITE}/torch/autograd/graph.py", "_engine_run_backward")], "", "backward, for the gradients"),
        (
            [(f"{SITE}/torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py", "wait_for_unshard")],
            "",
            "FSDP",
        ),
        ([], "work.wait()", "wait() of a collective"),
        ([], "store.get('key')", "the store"),
        ([], "loss = model(batch)", ""),
        ([(LOADER, "_try_get_data")], "", ""),
        ([("/usr/lib/python3.11/threading.py", "wait")], "", ""),
        ([(f"{SITE}/torch/distributed/elastic/multiprocessing/api.py", "wait")], "", ""),
        ([(f"{SITE}/torch/distributed/checkpoint/filesystem.py", "write_data")], "", ""),
    ],
)
def test_waits_for_other_ranks_are_recognised_by_call(inner: list[tuple[str, str]], line: str, awaited: str) -> None:
    assert stack_frames.find_rank_wait(stack(*inner, (MINE, "<module>")), line) == awaited


def test_import_machinery_is_left_out_unless_alone() -> None:
    """Frames of the import machinery are left out unless there are no others."""
    machinery = (
        ("<frozen importlib._bootstrap>", "_find_and_load"),
        ("<frozen importlib._bootstrap>", "_load"),
    )
    deep = stack(*machinery, (f"{SITE}/torch/__init__.py", "<module>"), *machinery, (MINE, "<module>"))
    assert [frame.file for frame in stack_frames.drop_import_frames(deep)] == [
        f"{SITE}/torch/__init__.py",
        MINE,
    ]
    assert stack_frames.drop_import_frames(deep[:2]) == deep[:2]
    assert stack_frames.find_shown_frame(deep[:3]) == deep[2].brief


@pytest.mark.parametrize(
    ("places", "phase"),
    [
        ([(MINE, "step"), (MINE, "<module>")], "train"),
        ([("<frozen importlib._bootstrap>", "_find_and_load"), (MINE, "<module>")], "import"),
        ([(C10D, "init_process_group"), (MINE, "<module>")], "rendezvous"),
        ([(f"{SITE}/torch/_ops.py", "__call__"), (MINE, "evaluate"), (MINE, "<module>")], "evaluate"),
        ([(f"{SITE}/torch/serialization.py", "_save"), (MINE, "finish")], "save"),
        ([(f"{SITE}/torch/serialization.py", "_load"), (MINE, "begin")], "train"),
        ([(MINE, "save_checkpoint"), (MINE, "<module>")], "save"),
        ([(C10D, "destroy_process_group"), (MINE, "<module>")], "exit"),
        ([("/usr/lib/python3.11/threading.py", "_shutdown")], "exit"),
        ([], ""),
    ],
)
def test_the_phase_is_read_from_the_stack(places: list[tuple[str, str]], phase: str) -> None:
    assert stack_frames.find_phase(stack(*places)) == phase


def test_prompt_for_a_person_is_named() -> None:
    """Code that asks a person for input is named."""
    lib = f"/usr/lib/python3.{sys.version_info.minor}"
    typed = stack((f"{lib}/cmd.py", "cmdloop"), (f"{lib}/pdb.py", "interaction"), (f"{lib}/bdb.py", "x"), (MINE, "f"))
    assert stack_frames.find_prompt(typed, "") == "pdb"
    assert stack_frames.find_prompt(stack((MINE, "f")), "name = input('who? ')") == "input()"
    assert stack_frames.find_prompt(stack((MINE, "f")), "model.prepare_input(x)") == ""


@pytest.mark.parametrize("line", ["lock.acquire()", "with self._lock:", "with b:", "item = queue.get()"])
def test_lock_line_is_recognised(line: str) -> None:
    assert stack_frames.awaits_lock(stack((MINE, "f")), line)


@pytest.mark.parametrize("line", ["loss.backward()", "with open(path) as file:", "x = a @ b"])
def test_other_line_is_no_lock(line: str) -> None:
    assert not stack_frames.awaits_lock(stack((MINE, "f")), line)


def in_library(*inside: tuple[str, str]) -> tuple[Frame, ...]:
    return tuple(Frame(f"/usr/lib/python3.11/{file}", 1, function) for file, function in inside)


def test_idle_process_is_distinguished_from_busy_one() -> None:
    """A process that has nothing to do is distinguished from one that has."""
    main = Frame("/home/ada/train.py", 5, "main")
    get, worker = ("multiprocessing/queues.py", "get"), ("multiprocessing/pool.py", "worker")
    assert stack_frames.awaits_task((*in_library(get, worker), main))
    assert not stack_frames.awaits_task((*in_library(("socket.py", "recv"), worker), main))
    assert not stack_frames.awaits_task((*in_library(get), main, *in_library(worker)))
    loop = Frame("/site-packages/torch/utils/data/_utils/worker.py", 9, "_worker_loop")
    assert stack_frames.awaits_task((*in_library(get), loop, main)) and stack_frames.is_loader_worker((main, loop))


def test_service_thread_is_distinguished_from_working_thread() -> None:
    """A thread that only serves a library's queue is distinguished from one that does work."""
    pool, start = "multiprocessing/pool.py", ("threading.py", "_bootstrap")
    feeds = ("threading.py", "wait"), ("multiprocessing/queues.py", "_feed"), start
    assert stack_frames.is_service_thread(in_library(*feeds))
    assert stack_frames.is_service_thread(
        in_library(("multiprocessing/connection.py", "recv"), (pool, "_handle_results"), start)
    )
    assert stack_frames.is_service_thread(in_library(("concurrent/futures/thread.py", "_worker"), start))
    shares = ("socket.py", "accept"), ("multiprocessing/resource_sharer.py", "_serve"), start
    assert stack_frames.is_service_thread(in_library(*shares))  # of every worker that has sent a tensor
    # What the user has given: an iterable, a callback, a function of the library.
    assert not stack_frames.is_service_thread(
        in_library((pool, "_guarded_task_generation"), (pool, "_handle_tasks"), start)
    )
    assert not stack_frames.is_service_thread(
        in_library(("json/decoder.py", "decode"), (pool, "_set"), (pool, "_handle_results"))
    )
    assert not stack_frames.is_service_thread(in_library(("socket.py", "readinto"), (pool, "worker"), start))
    assert not stack_frames.is_service_thread(
        in_library(("threading.py", "wait"), ("threading.py", "run"), start)
    )  # a Timer
    assert not stack_frames.is_service_thread(
        (Frame("/home/ada/train.py", 5, "rows"), *in_library((pool, "_handle_results")))
    )
