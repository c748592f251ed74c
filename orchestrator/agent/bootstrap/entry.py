"""What happens on a host when a job comes to it? One request is heard and answered; an agent may be left behind.

Run by the launch script with the bundle in memory: nothing of ours is on the host yet. Stages of a launch: the folder,
the copy, the lease, the agent; what fails is said in a word with its stage, and ends it. A keeper is only left behind
when the other end has heard that it holds what it needs, and has answered.
"""

from __future__ import annotations

import dataclasses
import os
import select
import shutil
import sys
from pathlib import Path

from orchestrator.agent.bootstrap import fork, job_folder
from orchestrator.agent.bootstrap.replies import Fault, Replies, fault
from orchestrator.core import codec
from orchestrator.core.host import procfs
from orchestrator.core.jobdir import locks, ownership
from orchestrator.core.jobdir.durable import replace_text
from orchestrator.core.jobdir.layout import JobDir
from orchestrator.core.wire import bootstrap as w
from orchestrator.core.wire.messages import AgentConfig

LEASE_S_MAX = 25.0
"""How long a keeper may take to lease: the GPUs are listed, another launch may choose before it."""

UP_S_MAX = 10.0

LAST_WORDS_BYTES = 4096
LAST_WORDS_LINES = 5

_REQUESTS = codec.by_kind(w.Request)
_WORDS = codec.by_kind(w.Word)


def main(mark: str, line: bytes, bundle: bytes, bundle_fd: int) -> int:
    """Do what the request in `line` asks for, answer in words that begin with `mark`, and return 0, or 1 for a failure.

    This code comes from `bundle`, which is open as `bundle_fd`.
    """
    replies = Replies(mark, sys.stdin.buffer)
    ownership.close_to_others()
    try:
        match codec.loads_kind(_REQUESTS, line):
            case w.Launch() as request:
                _launch(request, bundle, bundle_fd, replies)
            case w.Reach() as request:
                replies.say(_reach(request))
            case w.CleanUp() as request:
                from orchestrator.agent.bootstrap import cleanup

                replies.say(cleanup.clean_up(request))
            case w.SurveyHost() as request:
                from orchestrator.agent.bootstrap import survey

                replies.say(survey.survey(request))
    except Fault as found:
        replies.say(found.word)
        return 1
    except (BrokenPipeError, EOFError):
        return 1  # nobody is there any more to be told
    except OSError as err:
        replies.say(fault("folder", err, "").word)
        return 1
    return 0


def _launch(request: w.Launch, bundle: bytes, bundle_fd: int, replies: Replies) -> None:
    job = job_folder.resolved(request.root)
    job_folder.check_space(job, request)
    job_folder.open_at(job, request)
    own = job_folder.is_own(job, request.config.token)
    config = dataclasses.replace(request.config, root=str(job.root), ships=request.config.ships and not own)
    placed = w.Placed(
        str(job.root),
        config.ships,
        shutil.which("rsync") is not None,
        procfs.boot_id(),
        job_folder.notes(job, request, own),
    )
    if own:
        replies.say(placed)
    else:
        job_folder.fill(job, request, bundle, replies, placed)
    replies.say(w.CopiedHere())
    _bring_up(job, config, bundle_fd, replies)


def _bring_up(job: JobDir, config: AgentConfig, bundle_fd: int, replies: Replies) -> None:
    """Start a keeper, pass its words on, and leave it when it was told to go; without that leave it ends itself."""
    log = job.node(config.node) / "agent.log"
    with log.open("ab") as file:
        begin_bytes = file.tell()
        keeper = fork.fork_keeper(job, file.fileno(), bundle_fd)
    try:
        keeper.tell(codec.dumps(config))
        word = _word(keeper, LEASE_S_MAX, while_heard=True)
        replies.say(word)
        if isinstance(word, w.Leased) and _heard_go(replies, keeper):
            keeper.tell(w.GO.decode())
            replies.say(_word(keeper, UP_S_MAX, while_heard=False))
    except fork.EndedError as err:
        words = _last_words(log, begin_bytes) or "it left no word"
        reason = f"the agent's keeper ended with code {keeper.wait(UP_S_MAX)}: {words}"
        raise Fault("agent", reason, f"its log is {log} there", "transient") from err
    finally:
        keeper.leave()


def _word(keeper: fork.Keeper, wait_s: float, *, while_heard: bool) -> w.Word:
    """Return the keeper's next word, or that there is none in time. Raises EndedError.

    `while_heard`: raises BrokenPipeError when whoever launched us goes meanwhile; it has nothing to say now.
    """
    words_fd = keeper.words.fileno()
    ready = select.select([words_fd, 0] if while_heard else [words_fd], [], [], wait_s)[0]
    if not ready:
        keeper.kill()
        return w.Failed("agent", f"the agent's keeper has said nothing for {wait_s:.0f} s", "", "transient")
    if words_fd not in ready:
        raise BrokenPipeError("whoever launched this has gone")
    word: w.Word = codec.loads_kind(_WORDS, keeper.hear())
    return word


def _heard_go(replies: Replies, keeper: fork.Keeper) -> bool:
    """Wait for the leave to start, as long as the keeper does. Raises EndedError when that ends before."""
    words_fd = keeper.words.fileno()
    ready = select.select([0, words_fd], [], [], w.GO_S_MAX)[0]
    if words_fd in ready:
        raise fork.EndedError
    return bool(ready) and replies.heard_go()


def _last_words(log: Path, begin_bytes: int) -> str:
    """Return the last lines that were written to `log` since it was so long."""
    with log.open("rb") as file:
        end = file.seek(0, os.SEEK_END)
        file.seek(max(begin_bytes, end - LAST_WORDS_BYTES))
        lines = file.read(LAST_WORDS_BYTES).decode(errors="replace").split("\n")
    return " | ".join([line.strip() for line in lines if line.strip()][-LAST_WORDS_LINES:])


def _reach(request: w.Reach) -> w.AgentSeen:
    """Tell an agent where to dial from now on, and say whether it is there."""
    job = job_folder.resolved(request.root)
    job_folder.require_own(job)
    node = job.node(request.node)
    alive = locks.is_held(node / "agent.lock")
    if request.endpoint and node.is_dir():
        try:
            replace_text(node / "endpoint", f"{request.endpoint}\n", durable=False)
        except OSError as err:
            raise Fault("folder", f"{node}: {err.strerror}", "", "transient") from err
    log = node / "agent.log"
    return w.AgentSeen(alive, procfs.boot_id(), _last_words(log, 0) if log.is_file() else "")
