"""Agent's side of a warm start: the template process of a node, and the forks it makes in place of new interpreters.

A template is optional: where it is not ready in time, dies, does not answer, or reports that ranks must start fresh, they
are started by `spawn`, and `why_fresh` has the reason.
"""

from __future__ import annotations

import contextlib
import json
import os
import pkgutil
import select
import signal
import socket
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from orchestrator.agent.ranks import first_imports, spawn
from orchestrator.agent.ranks.hook.layout import RANK_DIR_ENV
from orchestrator.agent.ranks.imports_ahead import RANK_VARIABLES
from orchestrator.agent.ranks.template import COMMAND_ROOM, PACKET_BYTES_MAX, die_with_parent
from orchestrator.core import codec
from orchestrator.core.jobdir import ownership
from orchestrator.core.jobdir.durable import replace_bytes
from orchestrator.core.jobdir.layout import JobDir

TICKET = "fork"
"""The file of a rank's folder that a fork renames before it becomes the rank, and the agent deletes to prevent that: one of
them comes first, so that a template that answers too late makes no second rank."""

IMPORT_S_MAX = 60.0
"""How long a start waits for a template that imports; then ranks are started as new interpreters."""

FORK_S_MAX = 5.0
"""How long a template may take to fork a rank."""

MODULES = ("torch", "torch._dynamo", "torch.distributed", "torch.nn.parallel")
"""What every template imports: what ranks of torch import at the latest when their first optimizer and DDP are made.
`torch._dynamo` is half of it; torch itself imports numpy."""

FILES = ("template.py", "imports_ahead.py")
"""What a template runs; the first is its program."""

PACKAGES_SHOWN_MAX = 4
"""How many imported packages are named for people."""


def read_source(argv: tuple[str, ...], cwd: Path, *, has_stepped: bool) -> first_imports.ProgramSource:
    """Return the source of the program that ranks run. Raises ValueError, with the reason, where a template cannot take the
    place of its interpreter.

    A program that does not import torch would wait for nothing, until its ranks have been seen to make steps.
    """
    source = first_imports.read_program(argv, cwd)
    if source.sets_variable:
        raise ValueError(f"{source.script.name} sets {source.sets_variable}, which torch may read when it is imported")
    if not (source.imports_torch or has_stepped):
        raise ValueError(f"{source.script.name} does not import torch")
    return source


@dataclass(frozen=True, slots=True)
class TemplateReply:
    """What a template says: which modules are imported, with its pid; why it cannot be forked, with the module that has
    caused that, and whether it is one of every template's; or the pid of a rank, or why there is none."""

    ready: tuple[str, ...] = ()
    fresh: str = ""
    module: str = ""
    is_fixed: bool = False
    pid: int = 0
    error: str = ""


@dataclass(slots=True)
class Template:
    """The template process of a node, for one program and environment."""

    # The node's folder, with the hook below it
    folder: Path
    argv: tuple[str, ...]
    env: Mapping[str, str]
    cwd: Path
    modules: tuple[str, ...] = MODULES
    imports: tuple[first_imports.Import, ...] = ()
    pid: int = 0
    is_ready: bool = False
    why_fresh: str = ""
    # What it has imported
    imported: TemplateReply = TemplateReply()
    # The module from which on ranks import themselves, with the reason; "" for none
    left_out: str = ""
    began_at: float = 0.0
    _line: socket.socket | None = None

    def begin(self) -> None:
        """Start the process. An OSError is a reason to start ranks fresh."""
        folder = self.folder / "template"
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        agent_pid = os.getpid()
        env = {name: value for name, value in self.env.items() if name not in RANK_VARIABLES}
        hook = str(self.folder / "hook")
        try:
            folder.mkdir(exist_ok=True)
            for name in FILES:
                file, source = folder / name, pkgutil.get_data("orchestrator.agent.ranks", name)
                assert source is not None
                if not file.exists() or file.read_bytes() != source:
                    replace_bytes(file, source, durable=False)
            with ownership.open_for_append(folder / "template.log") as log:
                process = subprocess.Popen(
                    [self.argv[0], str(folder / FILES[0]), str(theirs.fileno()), hook, " " * COMMAND_ROOM],
                    cwd=self.cwd, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
                    pass_fds=(theirs.fileno(),),
                    preexec_fn=lambda: die_with_parent(agent_pid, signal.SIGKILL),
                )  # fmt: skip
            request = {
                "argv": self.argv[1:],
                "own": str(
                    first_imports.import_folder(self.argv, self.cwd)
                ),  # what the program imports its modules from
                "modules": self.modules,
                "imports": self.imports,
            }
            ours.send(codec.dumps(request).encode())
        except OSError as err:
            self.why_fresh = f"its template cannot be started: {err.strerror or err}"
            ours.close()
            return
        finally:
            theirs.close()
        process.returncode = 0  # reaped by the agent, as ranks are
        self.pid, self._line = process.pid, ours
        self.began_at = self.began_at or time.monotonic()

    @property
    def is_importing(self) -> bool:
        """Whether it is not known yet whether this template can fork ranks; it is for a limited time."""
        return self.pid != 0 and not self.is_ready and time.monotonic() - self.began_at < IMPORT_S_MAX

    @property
    def is_gone(self) -> bool:
        """Whether it has died after it was ready, and another may be begun."""
        return not self.pid and not self.why_fresh

    @property
    def _death_text(self) -> str:
        return f"its template died; see {self.folder / 'template' / 'template.log'}"

    def poll(self) -> None:
        """Read the template's reply without waiting."""
        answer = self._receive(0.0)
        if answer is None or self.is_ready:
            return
        if not answer.fresh:
            self.is_ready, self.imported = True, answer
            return
        self.end()
        if answer.is_fixed or self.left_out:
            self.why_fresh = f"import {answer.module} {answer.fresh}"
            return
        # Another template imports what comes before that module.
        self.left_out = f"{answer.module}, which {answer.fresh}"
        self.imports = self.imports[: [found.module for found in self.imports].index(answer.module)]
        self.begin()

    def fork(self, program: spawn.Program) -> int:
        """Fork a rank and return its pid, a child of this process; 0 when a new interpreter must do.

        Raises OSError where it is unknown whether the rank was forked.
        """
        if not self.is_ready or self._line is None:
            return 0
        ticket = Path(program.env[RANK_DIR_ENV]) / TICKET
        order = {
            "argv": program.argv, "env": dict(program.env), "cwd": str(program.cwd), "output": str(program.output),
            "agent": os.getpid(), "ticket": str(ticket), "limits": program.limits,
        }  # fmt: skip
        with contextlib.suppress(OSError):
            ticket.touch()
            self._line.send(json.dumps(order).encode())
            answer = self._receive(FORK_S_MAX) or TemplateReply()
            if answer.pid:
                return answer.pid
            self.why_fresh = answer.error
        self.why_fresh = self.why_fresh or "its template did not answer"
        self.end()
        return _cancel_fork(ticket)

    def _receive(self, wait_s: float) -> TemplateReply | None:
        """Return the next packet; None where there is none in time, and the template is given up when it is gone."""
        line = self._line
        if line is None or not select.select([line], [], [], wait_s)[0]:
            return None
        try:
            packet = line.recv(PACKET_BYTES_MAX)
            answer = codec.loads(TemplateReply, packet) if packet else None
        except (OSError, ValueError):
            answer = None
        if answer is None:
            if not self.is_ready:
                self.why_fresh = self.why_fresh or self._death_text
            self.end()
            return None
        return answer

    def note_exit(self) -> None:
        """Note that the process was reaped."""
        first = self.pid
        self.poll()
        if self.pid != first:
            return
        if not self.is_ready:
            self.why_fresh = self.why_fresh or self._death_text
        self.pid = 0
        self.end()

    def end(self) -> None:
        """Kill the process; ranks that it has forked live on."""
        if self.pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
        self.is_ready, self.pid = False, 0
        if self._line is not None:
            self._line.close()
            self._line = None


def _list_packages(template: Template) -> str:
    """Return, for people, the packages that a template has imported and the one that has ended its imports."""
    packages = list(dict.fromkeys(name.partition(".")[0] for name in template.imported.ready))
    more = [f"{len(packages) - PACKAGES_SHOWN_MAX} more"] if len(packages) > PACKAGES_SHOWN_MAX else []
    text = ", ".join(packages[:PACKAGES_SHOWN_MAX] + more) or "nothing"
    return f"{text}; not {template.left_out}" if template.left_out else text


def _cancel_fork(ticket: Path) -> int:
    """Prevent the start of a rank that was ordered and did not answer; return its pid if it has started already, else
    0. Raises OSError where neither is certain: a second rank must not be started on a guess."""
    try:
        ticket.unlink()
    except FileNotFoundError:
        taken = [path.name.rpartition(".")[2] for path in ticket.parent.glob(f"{TICKET}.*")]
        return next((int(pid) for pid in taken), 0)
    return 0


class RankStarter:
    """How ranks are started on this node: forks of its template where there is one, else new interpreters."""

    def __init__(self) -> None:
        self._template = Template(Path(), (), {}, Path())  # that was never begun
        self.has_stepped = False

    def prepare(self, argv: tuple[str, ...], env: Mapping[str, str], job: JobDir, node: str, cwd: Path) -> None:
        """Begin a template for ranks that will run `argv` in `cwd`, unless there is one or it could not take their place."""
        previous = self._template
        same = (previous.argv[:2], previous.env, previous.cwd) == (argv[:2], env, cwd)
        if previous.began_at and same and not previous.is_gone:
            return
        self.close()
        self._template = Template(job.node(node), argv, dict(env), cwd)
        try:
            self._template.imports = read_source(argv, cwd, has_stepped=self.has_stepped).imports
        except ValueError as err:
            self._template.why_fresh = str(err)
        else:
            self._template.begin()

    @property
    def forks(self) -> bool:
        """Whether the ranks are forks of the template."""
        return self._template.is_ready

    @property
    def description(self) -> str:
        """How the ranks are started, for people."""
        template = self._template
        if self.forks:
            return f"forks of a process that has imported {_list_packages(template)}"
        why = template.why_fresh
        if template.began_at and not why:
            late = f"its template has not imported torch within {IMPORT_S_MAX:g} s"
            why = late if template.pid else "its template died"
        return f"new interpreters{f': {why}' if why else ''}"

    @property
    def pid(self) -> int:
        """The pid of the template, 0 without one."""
        return self._template.pid

    @property
    def is_importing(self) -> bool:
        """Whether a start is to wait for the template."""
        return self._template.is_importing

    def poll(self) -> None:
        """Read the template's reply."""
        self._template.poll()

    def start(self, program: spawn.Program) -> int:
        """Start a rank and return its pid. Raises OSError when its program cannot be executed."""
        return self._template.fork(program) or spawn.start(program)

    def note_exit(self, pid: int) -> bool:
        """Return whether a process that was reaped is the template, and note its end."""
        is_template = 0 < pid == self._template.pid
        if is_template:
            self._template.note_exit()
        return is_template

    def close(self) -> None:
        """End the template."""
        self._template.end()
