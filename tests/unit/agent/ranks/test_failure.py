"""The exception that ended a script, found in its output."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from orchestrator.agent.ranks import failure
from orchestrator.brain.diagnosis import library_errors

SCRIPTS = {
    "plain": ("def f():\n    raise ValueError('no data')\nf()\n", "ValueError", "no data", "train.py:2 f"),
    "no message": ("raise KeyError\n", "KeyError", "", "train.py:1 <module>"),
    "module": ("import json\njson.loads('{')\n", "json.decoder.JSONDecodeError", "Expecting property", "train.py:2"),
    "chained": ("try:\n    1 / 0\nexcept ZeroDivisionError:\n    [][1]\n", "IndexError", "list index", "train.py:4"),
    "syntax": ("x = (\n", "SyntaxError", "'(' was never closed", "train.py:1"),
    "lines": ("raise OSError('one\\ntwo')\n", "OSError", "one", "train.py:1"),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", list(SCRIPTS))
def test_python_traceback_is_parsed(tmp_path: Path, name: str) -> None:
    script, kind, message, where = SCRIPTS[name]
    (tmp_path / "train.py").write_text(script)
    done = subprocess.run(
        [sys.executable, "-I", "train.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    found = failure.parse_traceback("epoch 1\n" + done.stderr + "bye\n")
    assert found is not None
    assert found.type == kind
    assert found.message.startswith(message)
    assert where in str(found.where)
    assert "epoch" not in found.traceback
    assert "bye" not in found.traceback


def test_rank_prefix_of_torch_is_ignored() -> None:
    text = (
        "[rank3]: Traceback (most recent call last):\n"
        '[rank3]:   File "/code/train.py", line 9, in step\n'
        "[rank3]:     loss.backward()\n"
        "[rank3]: RuntimeError: Connection closed by peer\n"
    )
    found = failure.parse_traceback(text)
    assert found is not None
    assert (found.type, found.message) == ("RuntimeError", "Connection closed by peer")
    assert str(found.where) == "/code/train.py:9 step"


def test_last_of_several_tracebacks_counts() -> None:
    one = 'Traceback (most recent call last):\n  File "a.py", line 1, in f\n    f()\nValueError: {}\n'
    found = failure.parse_traceback(one.format("first") + "caught it\n" + one.format("second"))
    assert found is not None
    assert found.message == "second"


@pytest.mark.parametrize("text", ["", "all is well\n", 'Traceback (most recent call last):\n  File "a.py", line 1'])
def test_incomplete_traceback_is_none(text: str) -> None:
    assert failure.parse_traceback(text) is None


def test_only_end_of_log_is_read(tmp_path: Path) -> None:
    log = tmp_path / "rank.log"
    tail = 'Traceback (most recent call last):\n  File "a.py", line 1, in f\n    f()\nValueError: x\n'
    log.write_text("é" * 100_000 + "\n" + tail)
    found = failure.find_traceback(log)
    assert found is not None
    assert found.type == "ValueError"
    log.write_text(tail + "x" * 100_000)
    assert failure.find_traceback(log) is None
    assert failure.find_traceback(tmp_path / "missing.log") is None


def test_watchdog_message_before_abort_is_found(tmp_path: Path) -> None:
    log = tmp_path / "rank.log"
    log.write_text(
        "step 7\n[rank3]:[E1121 ProcessGroupNCCL.cpp:632] [Rank 3] Watchdog caught collective operation timeout: "
        "WorkNCCL(SeqNum=9, OpType=ALLREDUCE, Timeout(ms)=600000) ran for 600069 milliseconds\nterminate called\n"
    )
    found = failure.find_watchdog_line(log)
    assert found is not None
    assert found.type == ""
    assert "SeqNum=9" in found.message
    log.write_text("step 7\nterminate called\n")
    assert failure.find_watchdog_line(log) is None
    log.write_text("terminate called\n  what():  size mismatch\n")
    found = failure.find_watchdog_line(log)
    assert found is not None and found.message == "size mismatch"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("usage: train.py [-h]\ntrain.py: error: unrecognized arguments: --stepz 4\n\n", "train.py: error: unrec"),
        ("epoch 1\r\x1b[31mno data left\x1b[0m\r\n  \n", "no data left"),
        ("[rank0]: no data\n[rank0]:[W1121 22:46:05.1 ProcessGroupNCCL.cpp:1496] Warning: leaks\n", "no data"),
        ("x" * 100_000, "x" * failure.MESSAGE_CHARS_MAX),
    ],
)  # fmt: skip
def test_last_line_of_giving_up_script_is_found(tmp_path: Path, text: str, said: str) -> None:
    log = tmp_path / "rank.log"
    log.write_text(text)
    found = failure.last_line(log)
    assert found is not None and found.message.startswith(said)
    assert (found.type, found.traceback) == ("", "")
    assert len(found.message) <= failure.MESSAGE_CHARS_MAX


def test_last_line_skips_caught_exception(tmp_path: Path) -> None:
    log = tmp_path / "rank.log"
    caught = 'Traceback (most recent call last):\n  File "a.py", line 1, in f\n    f()\nValueError: x\n'
    log.write_text(f"epoch 1\n{caught}")
    assert failure.last_line(log) is None
    log.write_text(f"{caught}no data left\n")
    found = failure.last_line(log)
    assert found is not None and found.message == "no data left"
    assert failure.last_line(tmp_path / "missing.log") is None


def test_line_cut_by_tail_is_left_out(tmp_path: Path) -> None:
    log = tmp_path / "rank.log"
    rest = "x\n" * (failure.TAIL_BYTES // 2 - 8)
    log.write_text(f"the secret is hunter2-and-more NCCL error\n{rest}")
    assert failure.find_watchdog_line(log) is None


TRACEBACK = 'Traceback (most recent call last):\n  File "train.py", line 8, in f\n    f()\nValueError: no data\n'


@pytest.mark.parametrize(
    ("log", "is_found"),
    [
        (f"step 39/100\n{TRACEBACK}", True),
        (f"{TRACEBACK}\n[W1128 09:00:00.0 ProcessGroup.cpp:1] not destroyed\n", True),
        (f"{TRACEBACK}trying again\n", False),
        (f"Exception ignored in: <function Iter.__del__ at 0x7f>\n{TRACEBACK}", False),
        ("done\n", False),
    ],
    ids=["last", "before a warning", "caught", "ignored", "none"],
)
def test_code_0_after_traceback_has_that_exception(log: str, is_found: bool, tmp_path: Path) -> None:
    (tmp_path / "rank.log").write_text(log)
    found = failure.diagnose_exit(tmp_path, tmp_path / "rank.log", 0, 0)
    assert (found is not None and found.text == "ValueError: no data at train.py:8 f") == is_found
    assert is_found or found is None


# What another process has raised.


def noted(folder: Path, pid: int, kind: str, message: str, traceback: str = "") -> None:
    """Note an exception as the hook of a process does."""
    where = {"file": "/code/train.py", "line": 9, "function": "<module>"}
    text = f'{traceback}Traceback (most recent call last):\n  File "/code/train.py", line 9, in <module>\n    f()\n{kind}: {message}'
    record = {"type": kind, "message": message, "traceback": text, "where": where, "loading": ""}
    (folder / f"error-{pid}.json").write_text(json.dumps(record))


INNER = '{}\n  File "/code/data.py", line 5, in load\n    read()\nOSError: no disk\n'
NESTED = INNER.format("Traceback (most recent call last):")
DIRECT = "\nThe above exception was the direct cause of the following exception:\n\n"
RAY = "\x1b[36mray::f()\x1b[39m (pid=7, ip=10.0.0.1)"
WRAPPED = {
    "DataLoader": ("RuntimeError", f"Caught OSError in DataLoader worker process 0.\nOriginal {NESTED}", ""),
    "mp.spawn": ("torch.multiprocessing.spawn.ProcessRaisedException", f"\n\n-- Process 0 terminated with the following error:\n{NESTED}\n", ""),
    "Pool": ("OSError", "no disk", f'multiprocessing.pool.RemoteTraceback: \n"""\n{NESTED}"""\n{DIRECT}'),
    "joblib": ("OSError", "no disk", f'joblib.externals.loky.process_executor._RemoteTraceback: \n"""\n{NESTED}"""\n{DIRECT}'),
    "Ray": ("ray.exceptions.RayTaskError(OSError)", INNER.format(RAY), ""),
    "hydra": ("hydra.errors.InstantiationException", "Error in call to target 'data.load':\nOSError('no disk')", f"{NESTED}{DIRECT}"),
}  # fmt: skip


@pytest.mark.parametrize("wrapper", WRAPPED)
def test_wrapped_exception_is_named_by_its_cause(wrapper: str, tmp_path: Path) -> None:
    noted(tmp_path, 7, *WRAPPED[wrapper])
    found = failure.diagnose_exit(tmp_path, tmp_path / "rank.log", 7, 1)
    assert found is not None and found.text == "OSError: no disk at /code/data.py:5 load"
    assert WRAPPED[wrapper][1].strip().splitlines()[0].replace("\x1b[36m", "").replace("\x1b[39m", "") in found.message


def test_exception_without_wrapper_is_unchanged(tmp_path: Path) -> None:
    noted(tmp_path, 7, "ValueError", "no data\nsee above", f"{NESTED}{DIRECT}")
    noted(tmp_path, 8, "KeyError", "of a child")
    found = failure.diagnose_exit(tmp_path, tmp_path / "rank.log", 7, 1)
    assert found is not None and found.text == "ValueError: no data at /code/train.py:9 <module>"


CHILDREN = ["subprocess.CalledProcessError: Command 'x' returned non-zero exit status 1",
            "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: \n====\ntrain.py FAILED\n====",
            "RuntimeError: DataLoader worker (pid(s) 12) exited unexpectedly"]  # fmt: skip


@pytest.mark.parametrize("own", CHILDREN)
@pytest.mark.parametrize("is_noted", [True, False])
def test_end_of_child_is_named_by_its_exception(own: str, is_noted: bool, tmp_path: Path) -> None:
    kind, _, message = own.partition(": ")
    noted(tmp_path, 7, kind, message)
    own_traceback = json.loads((tmp_path / "error-7.json").read_text())["traceback"]
    (tmp_path / "rank.log").write_text(f"{'' if is_noted else NESTED}\n{own_traceback}\n")
    if is_noted:
        noted(tmp_path, 8, "OSError", "no disk")
    found = failure.diagnose_exit(tmp_path, tmp_path / "rank.log", 7, 1)
    assert found is not None and found.text.startswith("OSError: no disk at /code/")
    assert kind in found.traceback and "OSError: no disk" in found.traceback


def test_text_below_traceback_is_part_of_message() -> None:
    """A text below the last line of a traceback belongs to its message."""
    text = f"{NESTED.rpartition('OSError')[0]}RuntimeError: \n        An attempt has been made to start\n"
    found = failure.parse_traceback(text)
    assert found is not None and found.message == "An attempt has been made to start"


def test_full_shm_is_named_with_its_size(tmp_path: Path) -> None:
    noted(tmp_path, 7, "RuntimeError", "unable to write to file </torch_12_345_0>: No space left on device (28)")
    found = failure.diagnose_exit(tmp_path, tmp_path / "rank.log", 7, 1)
    assert found is not None and re.search(r"\(28\) \(/dev/shm has [\d,]+ MiB\) at ", found.text)
    assert "--shm-size" in library_errors.explain(found.message)
