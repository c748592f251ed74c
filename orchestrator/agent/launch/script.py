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
from orchestrator.agent.launch import calls, gangs, options, shim_files
from orchestrator.agent.launch.shim import MESSAGE_BYTES_MAX, RUN_S_MAX
from orchestrator.agent.ranks import spawn
from orchestrator.agent.ranks.hook.launch import FOLDER_ENV, GANGS_FILE, REAL_ENV, find_launcher
from orchestrator.agent.ranks.processes import NodeRanks, RanksGoal
from orchestrator.agent.ranks.rank_start import LauncherCall, RankCall
from orchestrator.core import placeholders
from orchestrator.core.errors import UserError
from orchestrator.core.host import procfs
from orchestrator.core.jobdir.durable import make_subfolders
from orchestrator.core.settings import rank_env
from orchestrator.core.settings.rank_env import NodePlan
from orchestrator.core.wire import reports

CALL_S_MAX = 10.0
"""How long a shim may take to send its call."""

CHECK_S = 1.0
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
        self._ranks, self._node_plan, self._script_variables = ranks, at, rank_env.script_env(at)
        self._has_slurm_shims = at.plan.slurm is None
        if self._has_slurm_shims:
            cpus = str(len(os.sched_getaffinity(0)))
            self._script_variables = {
                "SLURM_CPUS_ON_NODE": cpus,
                "SLURM_SUBMIT_DIR": str(at.job.code),
                **self._script_variables,
            }
        self._report, self._note, self._wake = report, note, wake
        self._shims, self._hook = place / "launch", str(place / "hook")
        self._log = at.job.node_log(at.attempt, at.node)
        self._log_start = self._log.stat().st_size if self._log.exists() else 0
        self._calls = 0
        self._call: RankCall | None = None  # its ranks are not begun
        self._waiting_shim: asyncio.StreamWriter | None = None  # the shim of the ranks that run
        self._has_failed = False
        self._check_due_s = 0.0
        self._launchers_since: dict[int, float] = {}
        self.is_running = True
        """The script's shell has not been reaped."""
        name = f"orch-{secrets.token_hex(16)}"
        make_subfolders(at.job.root, self._shims / shim_files.SLURM_FOLDER)
        shim_files.write_shims(self._shims, name, self._hook, at.job.bundle, has_slurm_shims=self._has_slurm_shims)
        (self._shims / GANGS_FILE).unlink(missing_ok=True)
        file = self._shims / "script.sh"
        file.write_text(f"{at.plan.argv[-1]}\n")
        env = calls.script_env(self._script_variables, given, self._shims, self._hook)
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
        server = await asyncio.start_unix_server(self._serve_connection, sock=self._socket, limit=MESSAGE_BYTES_MAX)
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            server.close()

    def note_exit(self, pid: int, status: int) -> bool:
        """Report the end of the script, if it is the process that was reaped; return whether it is."""
        if pid != self._ranks.script_pid:
            return False
        self.is_running = False
        code = os.waitstatus_to_exitcode(status)
        self._note(f"the script ended with {f'code {code}' if code >= 0 else f'signal {-code}'}")
        if not (self._calls or code) and (left := self._find_background_process()):
            fix = "no &, nohup, setsid, tmux or screen: orch runs the script without your shell, and waits for its launcher"
            self._fail(f"the script ended but left in the background: {left}", self._tail(), fix)
        elif self._ranks.goal is RanksGoal.RUN:
            self._report(reports.LaunchEnded(self._ranks.attempt, self._calls, code, self._tail()))
        return True

    def _find_background_process(self) -> str:
        """Return the command line of a process that the script has started and that still runs; empty for none."""
        folder = str(self._shims)
        left = [pid for pid in procfs.pids() if procfs.environment(pid, FOLDER_ENV) == folder]
        return _command_line(max(left)).rpartition(f"{folder}/")[2] if left else ""

    def note_rank_exit(self) -> None:
        """Note that a rank has ended: when all of a call have succeeded, the script continues."""
        ranks, writer = self._ranks, self._waiting_shim
        if writer is not None and ranks.goal is RanksGoal.RUN and not ranks.alive and ranks.all_ended_well:
            self._waiting_shim = None
            _send(writer, {"exit": 0})

    @property
    def has_call(self) -> bool:
        """Whether a launcher is called, and the ranks of the call before it have ended."""
        return self._call is not None and self._ranks.goal is RanksGoal.RUN and not self._ranks.alive

    def take_call(self) -> RankCall:
        """Make way for the ranks of the launcher call, and return it."""
        assert self._call is not None
        call, self._call = self._call, None
        self._ranks.begin_call(call)
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

    async def _serve_connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            if _peer_credentials(writer)[1] == os.getuid():
                await self._serve_call(reader, writer)
        except (OSError, ValueError, asyncio.TimeoutError, asyncio.IncompleteReadError) as err:
            self._note(f"a launcher shim's call cannot be read: {err}")
        finally:
            if self._waiting_shim is not writer:
                writer.close()

    async def _serve_call(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        request = calls.ShimRequest.from_data(await _receive(reader, CALL_S_MAX))
        try:
            answer = await self._read_call(request, reader, writer)
            if isinstance(answer, LauncherCall):
                self._accept_call(request, answer, writer)
        except UserError as err:
            self._refuse(request, err, writer)
            return
        if isinstance(answer, LauncherCall):
            await self._watch_shim(reader, writer)
        elif isinstance(answer, options.RunOnce):
            _send(writer, {"exec": answer.argv, "is_real": False})
        elif request.real and not (request.name == "srun" and self._has_slurm_shims):
            self._note(f"{request.name} {' '.join(request.args[:3])} is passed to {request.real}")
            _send(writer, {"exec": [request.real, *request.args], "is_real": True})
        elif answer.argv:
            _send(writer, {"exec": answer.argv, "is_real": False})
        else:
            _send(writer, {"say": f"orch: {request.name} is not installed on this node", "exit": NOT_FOUND})

    async def _read_call(
        self, request: calls.ShimRequest, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> LauncherCall | options.RunOnce | options.PassThrough:
        """Return what is asked for. Raises UserError."""
        words = request.accelerate_args
        if words is None:
            return calls.read_call(request, self._node_plan)
        settings = calls.accelerate_settings(words, self._node_plan)
        _send(writer, {"run": [request.python, "-m", "orchestrator.agent.ranks.accelerate_env", settings]})
        return calls.parse_accelerate_reply(await _receive(reader, RUN_S_MAX + CALL_S_MAX), self._node_plan)

    def _accept_call(self, request: calls.ShimRequest, call: LauncherCall, writer: asyncio.StreamWriter) -> None:
        if self._waiting_shim is not None:
            raise UserError(
                f"{call.launcher} is called while the ranks of launcher call {self._calls} run: one gang at a time; start the "
                "calls one after the other"
            )
        env = calls.rank_env(request, call, self._script_variables, self._hook)
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
        values = placeholders.values_from_environment(request.env, str(self._node_plan.job.root))
        words = [placeholders.fill(word, values) for word in call.words]
        argv = (program, *(words if call.is_python else words[1:]))
        limits = spawn.read_limits(_peer_credentials(writer)[0])
        self._calls += 1
        self._waiting_shim = writer
        shown = " ".join(call.words)
        self._note(f"launcher call {self._calls}: {call.launcher} starts {shown}")
        if call.unused:
            self._note(f"{', '.join(call.unused)}: {_NOT_NEEDED}")
        _send(writer, {"say": ""})  # it waits now without limit
        self._call = RankCall(self._calls, call, argv, cwd, env, limits)
        self._wake()

    def _refuse(self, request: calls.ShimRequest, err: UserError, writer: asyncio.StreamWriter) -> None:
        usage = f"\nusage: {err.fix}" if err.fix else ""
        line = " ".join((request.name, *request.args))
        _send(writer, {"say": f"orch: {err.what}{usage}", "exit": 2})
        self._fail(f"{err.what}", f"{line}{usage}\n")

    def _fail(self, reason: str, tail: str, fix: str = "", *, is_final: bool = True) -> None:
        """Report once that the attempt cannot continue, unless it is being stopped: that ends shims, too."""
        if not self._has_failed and self._ranks.goal is RanksGoal.RUN:
            self._has_failed = True
            self._report(reports.PrepareFailed(self._ranks.attempt, reason, tail, is_final=is_final, fix=fix))

    async def _watch_shim(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Notice the end of a shim whose ranks run: a launcher that is killed takes its ranks with it."""
        with contextlib.suppress(OSError):
            await reader.read(1)
        if self._waiting_shim is writer and self.is_running and not self._has_failed:
            self._waiting_shim = None
            reason = f"the launcher of call {self._calls} was ended by its script while its ranks ran"
            self._fail(reason, self._tail(), is_final=False)

    # Launchers that run without a shim

    def check_launchers(self, now_s: float) -> None:
        """End the attempt when a launcher runs without a shim."""
        if now_s < self._check_due_s or not self.is_running or self._ranks.goal is not RanksGoal.RUN:
            return
        self._check_due_s = now_s + CHECK_S
        if not self._calls and (gang := gangs.diagnose_script(self._shims)):
            self._fail(gang[0], self._tail(), gang[1])
        tree, script = procfs.children(), self._ranks.script_pid
        below = [pid for pid in (script, *procfs.descendants(script, tree)) if self._is_launcher(pid)]
        self._launchers_since = {pid: self._launchers_since.get(pid, now_s) for pid in below}
        for pid, seen_at in self._launchers_since.items():
            hands_over = procfs.environment(pid, FOLDER_ENV) and not tree.get(pid)
            if not hands_over or now_s - seen_at > HAND_OVER_S_MAX:
                self._fail(
                    f"a launcher runs without orch: {_command_line(pid)}",
                    self._tail(),
                    "its ranks would not meet those of other nodes: start it with the script's environment, without env -i or "
                    "python -I, and keep what is in PYTHONPATH: export PYTHONPATH=.:$PYTHONPATH; for ranks in a container write command:",
                )

    def _is_launcher(self, pid: int) -> bool:
        argv = procfs.read_text(Path(f"/proc/{pid}/cmdline")).split("\0")[:-1]
        folder = f"{self._shims}/"
        if not argv or any(word.startswith(folder) for word in argv[:4]) or procfs.environment(pid, REAL_ENV):
            return False
        program = argv[0].rpartition("/")[2]
        is_named = bool(find_launcher(argv)[0]) if program.startswith("python") else program in shim_files.SHIMS
        return is_named or bool(procfs.environment(pid, "TORCHELASTIC_RUN_ID"))  # torch's launcher has started it


def _command_line(pid: int) -> str:
    return procfs.read_text(Path(f"/proc/{pid}/cmdline")).replace("\0", " ").strip()[:LINE_CHARS_MAX]


def _peer_credentials(writer: asyncio.StreamWriter) -> tuple[int, int, int]:
    """Return pid, user and group of the process at the other end."""
    peer = writer.get_extra_info("socket").getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    return struct.unpack("3i", peer)


async def _receive(reader: asyncio.StreamReader, limit_s: float) -> Any:
    line = await asyncio.wait_for(reader.readline(), limit_s)
    return json.loads(line.decode("utf-8", "surrogateescape"))  # bytes of other encodings stay what they are


def _send(writer: asyncio.StreamWriter, data: Mapping[str, Any]) -> None:
    with contextlib.suppress(OSError):
        writer.write(json.dumps(data).encode() + b"\n")
