"""A stand-in for torch's worker server: it answers what an agent asks a rank, without torch, in every Python process of it."""

from __future__ import annotations

import json
from pathlib import Path

from orchestrator.agent.ranks.hook.layout import PENDING_HANDLER, RANK_DIR_ENV, SOCKET_FILE

TRACE_ENV = "FAKE_TRACE"
"""Names the file with what it says of collectives; without one there were none."""

SOURCE = f"""
import _thread, faulthandler, os, socket, tempfile

held = []


def answer(question):
    if b"fr_trace_json" in question:
        trace = os.environ.get("{TRACE_ENV}", "")
        return open(trace, "rb").read() if trace else b'{{"entries": []}}'
    if b"dump_traceback" in question:
        with tempfile.TemporaryFile() as file:
            faulthandler.dump_traceback(file, all_threads=True)
            file.seek(0)
            return file.read()
    if b"{PENDING_HANDLER}" in question:
        from _orch_hook.errors import pending_exception, to_record
        return to_record(pending_exception()).encode() if pending_exception() else b""
    return b"{{}}"


def serve(listener):
    while True:
        asked, _ = listener.accept()
        try:
            with asked:
                asked.sendall(b"HTTP/1.1 200 OK\\r\\n\\r\\n" + answer(asked.recv(4096)))
        except OSError:
            pass  # it no longer waits


def begin():
    listener = socket.socket(socket.AF_UNIX)
    fd = os.open(os.environ["{RANK_DIR_ENV}"], os.O_RDONLY)  # the whole path may be too long for a socket
    listener.bind(f"/proc/self/fd/{{fd}}/" + "{SOCKET_FILE}".format(os.getpid()))
    os.close(fd)
    listener.listen()
    held.append(listener)  # where a script has closed it, its number may be that of a file of the script
    _thread.start_new_thread(serve, (listener,))


if "RANK" in os.environ:
    begin()
"""


def install(folder: Path) -> str:
    """Put it into a folder that is to stand in PYTHONPATH, and return that: Python runs it after orch's hook."""
    folder.mkdir(parents=True)
    (folder / "sitecustomize.py").write_text(SOURCE)
    return str(folder)


def trace(count: int) -> bytes:
    """Return a trace with entries numbered from 0, in more than one line."""
    entries = [
        {
            "profiling_name": "gloo:all_reduce", "process_group": ["0", "default_pg"], "collective_seq_id": number,
            "input_sizes": [[10]], "input_dtypes": ["Float"], "time_created_ns": number,
        }
        for number in range(count)
    ]  # fmt: skip
    return json.dumps({"version": "2.10", "entries": entries}, indent=1).encode()
