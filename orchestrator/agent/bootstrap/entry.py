"""Entry point of the bootstrap on a host: reads one request, answers it, and leaves a monitor running after a launch.

The launch script runs it with the bundle in memory, before any file of orch is on the host. Stages of a launch: folder,
copy, lease, agent. A failure is reported with its stage and ends the launch. The monitor stays only when the launcher
has received its leases and has answered `GO`.
"""

from __future__ import annotations

import dataclasses
import os
import select
import shutil
import sys
from pathlib import Path

from orchestrator.agent.bootstrap import fork, job_folder
from orchestrator.agent.bootstrap.replies import Replies, request_failure
from orchestrator.core import codec
from orchestrator.core.host import procfs
from orchestrator.core.jobdir import locks, ownership
from orchestrator.core.jobdir.durable import replace_text
from orchestrator.core.jobdir.layout import JobDir
from orchestrator.core.wire import bootstrap as w
from orchestrator.core.wire.agent_config import AgentConfig

LEASE_S_MAX = 25.0
"""How long a monitor may take to lease: it lists the GPUs, and another launch may choose before it."""

UP_S_MAX = 10.0

LOG_TAIL_BYTES = 4096
LOG_TAIL_LINES = 5

_REQUESTS = codec.classes_by_kind(w.HostRequest)
_STEPS = codec.classes_by_kind(w.CheckStep)
_REPLIES = codec.classes_by_kind(w.Reply)


def main(mark: str, line: bytes, bundle: bytes, bundle_fd: int) -> int:
    """Serve the request in `line`, send replies that begin with `mark`, and return 0, or 1 for a failure.

    `bundle` is the archive that this code was imported from, open as `bundle_fd`.
    """
    replies = Replies(mark, sys.stdin.buffer)
    ownership.restrict_umask()
    try:
        match codec.loads_kind(_REQUESTS, line):
            case w.LaunchAgent() as request:
                _launch(request, bundle, bundle_fd, replies)
            case w.QueryAgent() as request:
                replies.send(_redirect_agent(request))
            case w.CleanUp() as request:
                from orchestrator.agent.bootstrap import cleanup

                replies.send(cleanup.clean_up(request))
            case w.SurveyHost() as request:
                from orchestrator.agent.bootstrap import survey

                replies.send(survey.survey(request))
                _serve_steps(replies)
    except w.RequestFailed as failure:
        replies.send(failure.reply)
        return 1
    except (BrokenPipeError, EOFError):
        return 1  # the launcher is gone
    except OSError as err:
        replies.send(request_failure("folder", err, "").reply)
        return 1
    return 0


def _launch(request: w.LaunchAgent, bundle: bytes, bundle_fd: int, replies: Replies) -> None:
    job = job_folder.resolve(request.root)
    job_folder.check_space(job, request)
    job_folder.create_folder(job, request)
    is_own = job_folder.is_submit_folder(job, request.config.token)
    config = dataclasses.replace(request.config, root=str(job.root), ships=request.config.ships and not is_own)
    has_rsync = shutil.which("rsync") is not None
    notes = (f"{job.root} is the job's own folder there too: nothing is copied",) if is_own else ()
    placed = w.FolderReady(str(job.root), config.ships, has_rsync, procfs.boot_id(), notes)
    if is_own:
        replies.send(placed)
    else:
        job_folder.install(job, request, bundle, replies, placed)
    replies.send(w.FilesVerified())
    _start_monitor(job, config, bundle_fd, replies)


def _serve_steps(replies: Replies) -> None:
    """Answer the steps of a check, a line each, until the launcher closes; what they have opened is closed.

    A burn-in has all GPUs, or all slots, from its first round on, so that no job begins here."""
    from orchestrator.agent.bootstrap import survey
    from orchestrator.agent.host import check_steps

    steps, held = check_steps.CheckSteps(dict(os.environ)), None
    try:
        while line := replies.next_line(w.STEP_S_MAX):
            step = codec.loads_kind(_STEPS, line)
            if isinstance(step, w.AllReduce) and not step.world and held is None:
                held = survey.lease_all(step.on_gpu)
            replies.send(steps.run(step))
    finally:
        steps.close()


def _start_monitor(job: JobDir, config: AgentConfig, bundle_fd: int, replies: Replies) -> None:
    """Start a monitor, forward its replies, and detach from it after `GO`; without `GO` it ends by itself."""
    log = job.node(config.node) / "agent.log"
    with log.open("ab") as file:
        begin_bytes = file.tell()
        monitor = fork.fork_monitor(job, file.fileno(), bundle_fd)
    try:
        monitor.send(codec.dumps(config))
        reply = _next_reply(monitor, LEASE_S_MAX, while_connected=True)
        replies.send(reply)
        if isinstance(reply, w.Leased) and _received_go(replies, monitor):
            monitor.send(w.GO.decode())
            replies.send(_next_reply(monitor, UP_S_MAX, while_connected=False))
    except EOFError as err:
        output = _log_tail(log, begin_bytes) or "no output"
        reason = f"the agent's monitor ended with code {monitor.wait(UP_S_MAX)}: {output}"
        raise w.RequestFailed("agent", reason, f"see its log there: {log}", "transient") from err
    finally:
        monitor.detach()


def _next_reply(monitor: fork.AgentMonitor, wait_s: float, *, while_connected: bool) -> w.Reply:
    """Return the monitor's next reply, or a failure when none comes in time. Raises EOFError.

    `while_connected`: raises BrokenPipeError when the launcher's end closes in the meantime; it sends nothing at this
    stage.
    """
    replies_fd = monitor.replies.fileno()
    ready = select.select([replies_fd, 0] if while_connected else [replies_fd], [], [], wait_s)[0]
    if not ready:
        monitor.kill()
        return w.Failed("agent", f"the agent's monitor sent no reply for {wait_s:.0f} s", "", "transient")
    if replies_fd not in ready:
        raise BrokenPipeError("the launcher has gone")
    reply: w.Reply = codec.loads_kind(_REPLIES, monitor.receive())
    return reply


def _received_go(replies: Replies, monitor: fork.AgentMonitor) -> bool:
    """Wait for `GO`, as long as the monitor does. Raises EOFError when the monitor ends before."""
    replies_fd = monitor.replies.fileno()
    ready = select.select([0, replies_fd], [], [], w.GO_S_MAX)[0]
    if replies_fd in ready:
        raise EOFError
    return bool(ready) and replies.received_go()


def _log_tail(log: Path, begin_bytes: int) -> str:
    """Return the last lines written to `log` after its first `begin_bytes` bytes."""
    with log.open("rb") as file:
        end = file.seek(0, os.SEEK_END)
        file.seek(max(begin_bytes, end - LOG_TAIL_BYTES))
        lines = file.read(LOG_TAIL_BYTES).decode(errors="replace").split("\n")
    return " | ".join([line.strip() for line in lines if line.strip()][-LOG_TAIL_LINES:])


def _redirect_agent(request: w.QueryAgent) -> w.AgentStatus:
    """Write the address that an agent is to dial, and return whether the agent lives."""
    job = job_folder.resolve(request.root)
    job_folder.require_ownership(job)
    node = job.node(request.node)
    is_alive = locks.is_held(node / "agent.lock")
    if request.endpoint and node.is_dir():
        try:
            replace_text(node / "endpoint", f"{request.endpoint}\n", durable=False)
        except OSError as err:
            raise w.RequestFailed("folder", f"{node}: {err.strerror}", "", "transient") from err
    log = node / "agent.log"
    return w.AgentStatus(is_alive, procfs.boot_id(), _log_tail(log, 0) if log.is_file() else "")
