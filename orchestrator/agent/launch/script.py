"""Script of a node in one attempt: its process, the calls of its shims, and the check for launchers that run without one.

1. The script runs in a session of its own; what it prints goes to the node's log.
2. One call at a time: a shim waits until the ranks of its call have succeeded; then the script continues.
3. While ranks fail or are stopped, no shim returns: the script ends with the attempt.
4. A launcher that runs without orch would start copies that never meet: the attempt ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import secrets
import shutil
import socket
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from orchestrator.agent.host.setup_script import TAIL_BYTES
from orchestrator.agent.launch import calls, files, gangs, options
from orchestrator.agent.launch.stand_in import MESSAGE_BYTES_MAX, RUN_S_MAX
from orchestrator.agent.ranks import spawn
from orchestrator.agent.ranks.hook.launch import FOLDER_ENV, GANGS_FILE, REAL_ENV, launcher_of
from orchestrator.agent.ranks.processes import NodeRanks, RanksGoal
from orchestrator.agent.ranks.rank_start import Call, RankCall
from orchestrator.core import placeholders
from orchestrator.core.errors import UserError
from orchestrator.core.host import procfs
from orchestrator.core.jobdir.durable import make_inside
from orchestrator.core.settings import rank_env
from orchestrator.core.settings.rank_env import NodePlan
from orchestrator.core.wire import reports

ASK_S_MAX = 10.0
"""How long a shim may take to send its call."""

WATCH_S = 1.0
"""How often the processes of the script are checked for launchers."""

HAND_OVER_S_MAX = 10.0
"""How long a launcher with the hook on its path may take to become a shim: its Python may lie on a cold network disk."""

LINE_CHARS_MAX = 200
NOT_FOUND = 127
"""A shell's exit code for a program that is not there."""

_AGENT_LINE = re.compile(r"^\d\d:\d\d:\d\d agent: ")
_NOT_NEEDED = "not needed, orch does that itself"


class LaunchScript:
    """The script of one attempt, which runs, and the ranks that it calls launchers for."""

    def __init__(
        self,
        ranks: NodeRanks,
        at: NodePlan,
        given: Mapping[str, str],
        report: Callable[[reports.ReliableReport], None],
        note: Callable[[str], None],
        wake: Callable[[], None],
    ) -> None:
        """Start the script. `given`: the environment that setup lines made; `wake` is called when a launcher is called.
        Raises OSError."""
        place = at.job.node(at.node)
        self._ranks, self._at, self._own = ranks, at, rank_env.script_env(at)
        self._stands_in_slurm = at.plan.slurm is None
        if self._stands_in_slurm:
            cpus = str(len(os.sched_getaffinity(0)))
            self._own = {"SLURM_CPUS_ON_NODE": cpus, "SLURM_SUBMIT_DIR": str(at.job.code), **self._own}
        self._report, self._note, self._wake = report, note, wake
        self._stand_ins, self._hook = place / "launch", str(place / "hook")
        self._log = at.job.node_log(at.attempt, at.node)
        self._log_start = self._log.stat().st_size if self._log.exists() else 0
        self._calls = 0
        self._call: RankCall | None = None  # its ranks are not begun
        self._waiting: asyncio.StreamWriter | None = None  # the shim of the ranks that run
        self._is_refused = False
        self._watch_at = 0.0
        self._seen: dict[int, float] = {}
        self.is_running = True
        """The script's shell has not been reaped."""
        name = f"orch-{secrets.token_hex(16)}"
        make_inside(at.job.root, self._stand_ins / files.SLURM_FOLDER)
        files.write(self._stand_ins, name, self._hook, at.job.bundle, stands_in_slurm=self._stands_in_slurm)
        (self._stand_ins / GANGS_FILE).unlink(missing_ok=True)
        file = self._stand_ins / "script.sh"
        file.write_text(f"{at.plan.argv[-1]}\n")
        env = calls.script_env(self._own, given, self._stand_ins, self._hook)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._socket.bind("\0" + name)
            self._socket.listen()
            ranks.script_pid = spawn.start(spawn.Program(("bash", str(file)), env, at.job.code, self._log))
        except OSError:
            self._socket.close()
            raise
        self._note(f"the script runs (pid {ranks.script_pid})")
        self._serving = asyncio.get_running_loop().create_task(self._serve())

    async def _serve(self) -> None:
        """Serve shims until `close`. From Python 3.12 on `Server.wait_closed`, which `async with` calls, waits for every
        connection, and that of a shim whose ranks run has no other owner that closes it."""
        server = await asyncio.start_unix_server(self._answer, sock=self._socket, limit=MESSAGE_BYTES_MAX)
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            server.close()

    def ended(self, pid: int, status: int) -> bool:
        """Report the end of the script, if it is the process that was reaped; return whether it is."""
        if pid != self._ranks.script_pid:
            return False
        self.is_running = False
        code = os.waitstatus_to_exitcode(status)
        self._note(f"the script ended with {f'code {code}' if code >= 0 else f'signal {-code}'}")
        if not (self._calls or code) and (left := self._left_behind()):
            fix = "no &, nohup, setsid, tmux or screen: orch runs the script without your shell, and waits for its launcher"
            self._fail(f"the script ended but left in the background: {left}", self._tail(), fix)
        elif self._ranks.want is RanksGoal.RUN:
            self._report(reports.LaunchEnded(self._ranks.attempt, self._calls, code, self._tail()))
        return True

    def _left_behind(self) -> str:
        """Return the command line of a process that the script has started and that still runs; empty for none."""
        folder = str(self._stand_ins)
        left = [pid for pid in procfs.pids() if procfs.environment(pid, FOLDER_ENV) == folder]
        return _line(max(left)).rpartition(f"{folder}/")[2] if left else ""

    def rank_ended(self) -> None:
        """Note that a rank has ended: when all of a call have succeeded, the script continues."""
        ranks, writer = self._ranks, self._waiting
        if writer is not None and ranks.want is RanksGoal.RUN and not ranks.alive and ranks.all_ended_well:
            self._waiting = None
            _send(writer, {"exit": 0})

    @property
    def is_called(self) -> bool:
        """Whether a launcher is called, and the ranks of the call before it have ended."""
        return self._call is not None and self._ranks.want is RanksGoal.RUN and not self._ranks.alive

    def begin_call(self) -> RankCall:
        """Make way for the ranks of the launcher call, and return it."""
        assert self._call is not None
        call, self._call = self._call, None
        self._ranks.renew(call)
        return call

    def _tail(self) -> str:
        """Return the last lines that the script has written."""
        with contextlib.suppress(OSError), self._log.open("rb") as file:
            file.seek(max(self._log_start, self._log.stat().st_size - TAIL_BYTES))
            lines = file.read().decode("utf-8", "replace").splitlines(keepends=True)
            return "".join(line for line in lines if not _AGENT_LINE.match(line))
        return ""

    def close(self) -> None:
        """Close the socket, which is the server's to close: the loop must forget it before its number is free."""
        self._serving.cancel()

    # Shims

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            if _peer(writer)[1] == os.getuid():
                await self._serve_call(reader, writer)
        except (OSError, ValueError, asyncio.TimeoutError, asyncio.IncompleteReadError) as err:
            self._note(f"a launcher shim's call cannot be read: {err}")
        finally:
            if self._waiting is not writer:
                writer.close()

    async def _serve_call(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        request = calls.Request.of(await _receive(reader, ASK_S_MAX))
        try:
            answer = await self._read(request, reader, writer)
            if isinstance(answer, Call):
                self._begin(request, answer, writer)
        except UserError as err:
            self._refuse(request, err, writer)
            return
        if isinstance(answer, Call):
            await self._watch_stand_in(reader, writer)
        elif isinstance(answer, options.Once):
            _send(writer, {"exec": answer.words, "is_real": False})
        elif request.real and not (request.name == "srun" and self._stands_in_slurm):
            self._note(f"{request.name} {' '.join(request.words[:3])} is passed to {request.real}")
            _send(writer, {"exec": [request.real, *request.words], "is_real": True})
        elif answer.words:
            _send(writer, {"exec": answer.words, "is_real": False})
        else:
            _send(writer, {"say": f"orch: {request.name} is not installed on this node", "exit": NOT_FOUND})

    async def _read(
        self, request: calls.Request, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> Call | options.Once | options.ToReal:
        """Return what is asked for. Raises UserError."""
        words = request.accelerate_words
        if words is None:
            return calls.read(request, self._at)
        settings = calls.accelerate_settings(words, self._at)
        _send(writer, {"run": [request.python, "-m", "orchestrator.agent.ranks.accelerate_env", settings]})
        return calls.of_accelerate(await _receive(reader, RUN_S_MAX + ASK_S_MAX), self._at)

    def _begin(self, request: calls.Request, call: Call, writer: asyncio.StreamWriter) -> None:
        if self._waiting is not None:
            raise UserError(
                f"{call.launcher} is called while the ranks of launcher call {self._calls} run: one gang at a time; start the "
                "calls one after the other"
            )
        env = calls.rank_env(request, call, self._own, self._hook)
        first = request.python if call.is_python else call.words[0]
        program = shutil.which(first, path=env.get("PATH", os.defpath)) or ""
        cwd = Path(request.cwd) / call.cwd
        if not cwd.is_dir():
            raise UserError(
                f"{call.launcher} is called in {cwd}, and there is no such folder; make it, or cd to another"
            )
        if not program and (cwd / first).exists():
            program = str(cwd / first)
        if not program:
            raise UserError(f"{call.launcher}: there is no {first or 'python'} on this node")
        values = placeholders.of_environment(request.env)
        words = [placeholders.fill(word, values) for word in call.words]
        argv = (program, *(words if call.is_python else words[1:]))
        limits = spawn.limits_of(_peer(writer)[0])
        self._calls += 1
        self._waiting = writer
        shown = " ".join(call.words)
        self._note(f"launcher call {self._calls}: {call.launcher} starts {shown}")
        if call.unused:
            self._note(f"{', '.join(call.unused)}: {_NOT_NEEDED}")
        _send(writer, {"say": ""})  # it waits now without limit
        self._call = RankCall(self._calls, call, argv, cwd, env, limits)
        self._wake()

    def _refuse(self, request: calls.Request, err: UserError, writer: asyncio.StreamWriter) -> None:
        usage = f"\nusage: {err.fix}" if err.fix else ""
        line = " ".join((request.name, *request.words))
        _send(writer, {"say": f"orch: {err.what}{usage}", "exit": 2})
        self._fail(f"{err.what}", f"{line}{usage}\n")

    def _fail(self, reason: str, tail: str, fix: str = "", *, is_final: bool = True) -> None:
        """Report once that the attempt cannot continue, unless it is being stopped: that ends shims, too."""
        if not self._is_refused and self._ranks.want is RanksGoal.RUN:
            self._is_refused = True
            self._report(reports.PrepareFailed(self._ranks.attempt, reason, tail, is_final=is_final, fix=fix))

    async def _watch_stand_in(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Notice the end of a shim whose ranks run: a launcher that is killed takes its ranks with it."""
        with contextlib.suppress(OSError):
            await reader.read(1)
        if self._waiting is writer and self.is_running and not self._is_refused:
            self._waiting = None
            reason = f"the launcher of call {self._calls} was ended by its script while its ranks ran"
            self._fail(reason, self._tail(), is_final=False)

    # Launchers that run without a shim

    def watch(self, now_s: float) -> None:
        """End the attempt when a launcher runs without a shim."""
        if now_s < self._watch_at or not self.is_running or self._ranks.want is not RanksGoal.RUN:
            return
        self._watch_at = now_s + WATCH_S
        if not self._calls and (found := gangs.of_script(self._stand_ins)):
            self._fail(found[0], self._tail(), found[1])
        tree, script = procfs.children(), self._ranks.script_pid
        below = [pid for pid in (script, *procfs.descendants(script, tree)) if self._is_launcher(pid)]
        self._seen = {pid: self._seen.get(pid, now_s) for pid in below}
        for pid, seen_at in self._seen.items():
            hands_over = procfs.environment(pid, FOLDER_ENV) and not tree.get(pid)
            if not hands_over or now_s - seen_at > HAND_OVER_S_MAX:
                self._fail(
                    f"a launcher runs without orch: {_line(pid)}",
                    self._tail(),
                    "its ranks would not meet those of other nodes: start it with the script's environment, without env -i or "
                    "python -I, and keep what is in PYTHONPATH: export PYTHONPATH=.:$PYTHONPATH; for ranks in a container write command:",
                )

    def _is_launcher(self, pid: int) -> bool:
        argv = procfs.text(Path(f"/proc/{pid}/cmdline")).split("\0")[:-1]
        folder = f"{self._stand_ins}/"
        if not argv or any(word.startswith(folder) for word in argv[:4]) or procfs.environment(pid, REAL_ENV):
            return False
        program = argv[0].rpartition("/")[2]
        is_named = bool(launcher_of(argv)[0]) if program.startswith("python") else program in files.STAND_INS
        return is_named or bool(
            procfs.environment(pid, "TORCHELASTIC_RUN_ID")
        )  # torch's launcher has started it


def _line(pid: int) -> str:
    return procfs.text(Path(f"/proc/{pid}/cmdline")).replace("\0", " ").strip()[:LINE_CHARS_MAX]


def _peer(writer: asyncio.StreamWriter) -> tuple[int, int, int]:
    """Return pid, user and group of the process at the other end."""
    peer = writer.get_extra_info("socket").getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    return struct.unpack("3i", peer)


async def _receive(reader: asyncio.StreamReader, limit_s: float) -> Any:
    line = await asyncio.wait_for(reader.readline(), limit_s)
    return json.loads(line.decode("utf-8", "surrogateescape"))  # bytes of other encodings stay what they are


def _send(writer: asyncio.StreamWriter, data: Mapping[str, Any]) -> None:
    with contextlib.suppress(OSError):
        writer.write(json.dumps(data).encode() + b"\n")
