"""Status view of one job: its status as lines of text, for a terminal, a pipe or a log.

Pure: a status in, lines out. A style is a word or two, such as `bold red`, which `terminal` knows
and `rich` knows too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import groupby

from orchestrator.core.jobdir.status_file import (
    ENDED,
    NodeStatus,
    RankStatus,
    Status,
    StragglerStatus,
    TransferStatus,
    iso,
    seconds,
    time_of_day,
)
from orchestrator.core.shown import Follows, Suspicion
from orchestrator.core.slurm import command_output
from orchestrator.core.slurm.hostlist import holds
from orchestrator.core.text import counted, follows, ranks_text, sentence, with_fix
from orchestrator.views import large_job
from orchestrator.views.cells import (
    STYLES,
    Cell,
    Line,
    columns,
    cut,
    disk_full,
    duration,
    line,
    named,
    or_dash,
    plain,
    short,
    size,
)

RANKS_SHOWN_MAX = 64
HOSTS_SHOWN_MAX = 64
NOTES_SHOWN_MAX = 16
TRAVELS_SHOWN_MAX = STRAGGLERS_SHOWN_MAX = 4


# One job


def headline(status: Status) -> Line:
    """Return a job in one line: its state, attempt, step, pace, time left and time spent."""
    state, told = status.state, status.training
    parts = [Cell(state, STYLES.get(state, "")), Cell(f"  attempt {status.attempt}")]
    if status.launch_call > 1:
        parts.append(Cell(f"  launch {status.launch_call}"))
    if status.step is not None:
        total = f"/{told.total_steps:,}" if told.total_steps else ""
        parts.append(Cell(f"  step {status.step:,}{total}"))
    elif progress := status.progress:
        parts.append(Cell(f"  {progress}"))
    if told.percent is not None:
        parts.append(Cell(f"  {told.percent:.0f}%"))
    if told.loss is not None:
        parts.append(Cell(f"  loss {told.loss:.4g}", "" if math.isfinite(told.loss) else "yellow"))
    if status.steps_per_s:
        parts.append(Cell(f"  {status.steps_per_s:.2f} steps/s"))
    if told.eta_s is not None:
        parts.append(Cell(f"  {duration(told.eta_s)} left"))
    if (spent_s := elapsed_s(status)) is not None:
        over = status.ended_at is not None
        parts.append(Cell(f"  in {duration(spent_s)}" if over else f"  {duration(spent_s)} so far"))
    if status.restarts:
        parts.append(Cell(f"  {counted(status.restarts, 'restart')}", "yellow"))
    return line(*parts)


def elapsed_s(status: Status) -> float | None:
    """Return how many seconds the job has run; None before its start."""
    began, end = status.started_at, status.ended_at or status.written_at
    if not began or not end:
        return None
    return max(0.0, seconds(end) - seconds(began) + (0.0 if status.ended_at else status.written_s or 0.0))


def job(
    status: Status, *, every_rank: bool = False, called: str = "", chars_max: int | None = None
) -> list[Line]:
    """Return one job in full: its head, its nodes and its ranks. Those of a large job are counted by their state, unless
    `every_rank` is wanted. `called`: the job in commands, by default its id. A table of ranks that is wider than `chars_max`
    has fewer columns."""
    nodes, ranks = status.nodes, [rank for rank in status.ranks if rank.node]
    has_pool, over = status.backend != "local", status.state in ENDED
    lines = [
        line(
            Cell(status.id, "bold"),
            f"  {counted(status.world_size, 'rank')}{_count(nodes, has_pool)}, {status.backend}{_batch(status)}",
        ),
        headline(status),
    ]
    if status.reason and not status.suspicion and not is_of_queue(status):
        why = without_notes(reason(status), nodes) if has_pool else reason(status)
        lines.append(line(Cell(why, "dim" if status.state == "SUCCEEDED" else "")))
    lines += queue(status)
    lines += [*suspicion(status, called), *notices(status)]
    lines += _stragglers(status.stragglers)
    if status.is_late or status.copy_of:
        lines.append(line(Cell(outdated(status), "bold red")))
    if status.checkpoint:
        step = status.checkpoint.step
        at = f" (step {step:,})" if step is not None else ""
        lines.append(line(f"checkpoint  {short(status.checkpoint.path, status.dir)}{at}"))
    for kind, runs in groupby(sorted(status.trackers, key=lambda run: run.kind), lambda run: run.kind):
        *before, last = [short(run.path, status.dir) for run in runs]
        lines.append(line(f"{kind:<11} ", f"{len(before) + 1} runs, the last " if before else "", last))
    lines += [] if over else _travels(status.travels)
    if nodes or not has_pool:
        lines += [(), *(_pool(nodes, over, every_rank) if has_pool else _nodes(nodes, over, every_rank))]
    if len(ranks) > RANKS_SHOWN_MAX and not every_rank:
        lines += [(), *large_job.ranks(ranks)]
    elif ranks:
        marks = _marks(status)
        lines += [(), *_ranks([_rank_row(rank, marks.get(rank.rank, "")) for rank in ranks], chars_max)]
    return lines


def suspicion(status: Status, called: str = "", chars_max: int | None = None) -> list[Line]:
    """Return the suspicion, cut at `chars_max`, and below it the action that follows, its time, and the command for it."""
    if not status.suspicion:
        return []
    said = short(status.suspicion, status.dir)
    then = what_follows(status.suspected, status.written_at, called or status.id)
    return suspicion_lines(cut(said, chars_max), then)


def suspicion_lines(said: str, then: str) -> list[Line]:
    """Return the lines of a suspicion, and of the action that follows."""
    lines = [line("suspicion   ", Cell(said, "yellow"))]
    return [*lines, *([line(" " * 12, Cell(then, "yellow"))] if then else [])]


def what_follows(suspected: Suspicion | None, written_at: str, called: str) -> str:
    """Return the action that follows from a suspicion, its time, and the command for it; empty where that is unknown.
    `written_at`: the time of the status; `called`: the job's name in commands."""
    if suspected is None:
        return ""
    due = iso(seconds(written_at) + (suspected.in_s or 0.0))
    return follows(suspected, time_of_day(due), called)


def notices(status: Status) -> list[Line]:
    """Return the notices on the job's setup, each with its fix."""
    return [one for notice in status.notices for one in notice_lines(notice, status.dir)]


def notice_lines(notice: str, folder: str) -> list[Line]:
    """Return one notice, and below it its fix."""
    what, fix = with_fix(short(notice, folder))
    return [
        line("notice      ", Cell(what, "yellow")),
        *([line(f"            fix: {fix}")] if fix else []),
    ]


def _marks(status: Status) -> dict[int, str]:
    """Return the text that replaces the state of stuck, silent and slow ranks."""
    seen = status.suspected
    marks = {slow.rank: f"{slow.factor:.1f}x slow" for slow in status.stragglers}
    word = {Follows.ENDS: "stuck", Follows.NOTHING: "stuck", Follows.LOST: "silent"}
    if seen is not None and seen.follows in word:
        marks |= dict.fromkeys(seen.ranks, f"{word[seen.follows]} {duration(seen.for_s)}")
    return marks


def queue(status: Status) -> list[Line]:
    """Return Slurm's state of a job, and the fix for what keeps it in the queue."""
    if (queued := status.queue) is None:
        return []
    what, fix = queued.said + command_output.start(queued.expected_start), queued.fix
    if queued.silent:
        age = f", {duration(queued.heard_s)} ago" if queued.heard_s else ""
        what += f"{age}; no answer now: {queued.silent}"
    shown = line("queue       ", Cell(what, "yellow" if queued.silent or fix else ""))
    return [shown, *([line(f"            fix: {fix}")] if fix else [])]


def is_of_queue(status: Status) -> bool:
    """Tell whether a job's reason is the queue's, which has its own line."""
    queued = status.queue
    return queued is not None and status.reason == sentence(queued.said, fix=queued.fix)


def reason(status: Status) -> str:
    """Return why the job is in its state, with the paths of its own folder shortened."""
    return short(status.reason, status.dir)


def reason_lines(reason: str, folder: str) -> list[Line]:
    """Return the reason of a job's state, and below it the fix, if there is one."""
    what, fix = with_fix(short(reason, folder))
    return [line(what), *([line(f"  fix: {fix}")] if fix else [])]


def outdated(status: Status) -> str:
    """Say that no supervisor updates this status, and which one last did; or of what job it is a copy."""
    if status.copy_of:
        return f"a copy of {status.copy_of}: commands do not change it"
    holder, queued = status.supervisor, status.queue
    who = f"its supervisor (pid {holder.pid} on {holder.host})" if holder else "its supervisor"
    gone = ""
    if status.backend == "local" and holder:
        gone = "; if that machine is gone, orch resume explains how to continue"
    more = "its batch script restarts it" if queued else f"run orch status there{gone}"
    more = "Slurm has suspended it" if queued and queued.state == "SUSPENDED" else more
    if status.full_disk:
        more = disk_full(status.full_disk)
    elif queued and holder and not holds(queued.nodes, holder.host):
        more = "that node is lost, and the job is being requeued"
    return f"this is {duration(status.written_s)} old: no update from {who}; {more}"


_RANK_HEADS = (
    "RANK", "NODE", "PID", "STATE", "STEP", "STEPS/S", "LOSS", "CPU", "MEMORY", "GPU", "GPU MEMORY", "BEAT", "EXIT",
)  # fmt: skip
_WHERE_KNOWN = ("LOSS", "CPU", "MEMORY", "GPU", "GPU MEMORY")
"""The columns that are shown only if some rank has a value."""

_SPARED = ("PID", "GPU MEMORY", "MEMORY", "CPU", "GPU", "BEAT", "LOSS")
"""The columns that a narrow terminal leaves out, in this order."""


def _ranks(rows: Sequence[Sequence[Cell]], chars_max: int | None) -> list[Line]:
    """Return the table of ranks: with all columns that are known, as far as they fit."""
    known = {
        head
        for head, cells in zip(_RANK_HEADS, zip(*rows, strict=True), strict=True)
        if head not in _WHERE_KNOWN or any(cell.text != "-" for cell in cells)
    }
    for spared in (None, *_SPARED):
        known.discard(spared or "")
        kept = [index for index, head in enumerate(_RANK_HEADS) if head in known]
        table = columns([[row[index] for index in kept] for row in rows], [_RANK_HEADS[i] for i in kept])
        if chars_max is None or len(plain(table[:1]).rstrip("\n")) <= chars_max:
            break
    return table


def _batch(status: Status) -> str:
    return f", batch {status.effective_batch:,}" if status.effective_batch is not None else ""


def _count(nodes: Sequence[NodeStatus], has_pool: bool) -> str:
    """Return on how many nodes the ranks are; for a pool, on how many of its hosts."""
    if not has_pool:
        return f" on {counted(len(nodes), 'node')}"
    if not nodes:
        return ""
    placed = sum(1 for node in nodes if node.role == "placed")
    return f" on {placed or 'none'} of {counted(len(nodes), 'host')}"


def _travels(travels: Sequence[TransferStatus]) -> list[Line]:
    lines = []
    for copy in travels[:TRAVELS_SHOWN_MAX]:
        way = "from" if copy.direction == "fetch" else "to"
        done = "" if copy.done_bytes is None else f"{size(copy.done_bytes)} of "
        lines.append(line(f"copying     {copy.name} {way} {copy.node}, {done}{size(copy.bytes)}"))
    if len(travels) > TRAVELS_SHOWN_MAX:
        lines.append(line(f"            and {len(travels) - TRAVELS_SHOWN_MAX} more: --json shows all"))
    return lines


def _stragglers(stragglers: Sequence[StragglerStatus]) -> list[Line]:
    """Return the ranks that hold up their peers: how much slower each is, and since which step."""
    lines: list[Line] = []
    for slow in stragglers[:STRAGGLERS_SHOWN_MAX]:
        times = f"{slow.factor:.1f} x its peers"
        text = f"rank {slow.rank} on {slow.node}, {times} since step {slow.since_step:,}"
        lines.append(line(f"{'' if lines else 'slow':<12}", Cell(text, "yellow")))
    if len(stragglers) > STRAGGLERS_SHOWN_MAX:
        lines.append(line(f"            and {len(stragglers) - STRAGGLERS_SHOWN_MAX} more: --json shows all"))
    return lines


def _pool(nodes: Sequence[NodeStatus], over: bool, every_rank: bool) -> list[Line]:
    """Return the hosts of a pool: a table of those with a part in the job, the number of idle ones, and notes."""
    idle = [node for node in nodes if _is_idle(node)]
    listed = [node for node in nodes if not _is_idle(node)]
    chosen = over or any(node.role == "placed" for node in nodes)
    heads = ("HOST", "STATE", "RANKS", "SEEN")[: 3 if over else 4]
    if len(listed) > HOSTS_SHOWN_MAX and not every_rank:
        lines = large_job.hosts([(_host_state(node, over, chosen), node) for node in listed], "HOSTS")
    else:
        rows = [_host_row(node, over, chosen)[: len(heads)] for node in listed]
        lines = columns(rows, heads) if rows else []
    if idle:
        names = named([node.name for node in idle])
        text = f"{counted(len(idle), 'host')} on standby: {names}"
        lines.append(line(Cell(text, "dim")))
    return [*lines, *_notes(nodes)]


def _notes(nodes: Sequence[NodeStatus]) -> list[Line]:
    """Return the notes of hosts in full; a note that several hosts share, once."""
    hosts: dict[tuple[str, str], list[str]] = {}
    for node in nodes:
        if node.note:
            hosts.setdefault((node.note, node.fix), []).append(node.name)
    if not hosts:
        return []
    lines: list[Line] = [()]
    for (what, fix), names in list(hosts.items())[:NOTES_SHOWN_MAX]:
        lines.append(line(Cell(named(names), "bold"), f": {what}"))
        lines += [line(f"  fix: {fix}")] if fix else []
    if len(hosts) > NOTES_SHOWN_MAX:
        lines.append(line(f"and {len(hosts) - NOTES_SHOWN_MAX} more: --json shows all"))
    return lines


def without_notes(text: str, nodes: Sequence[NodeStatus]) -> str:
    """Return a reason without the notes of hosts, which are on separate lines."""
    for node in nodes:
        if node.note:
            name, note = node.name, sentence(node.note, fix=node.fix)
            bare = note.removeprefix("busy: ")
            text = text.removesuffix(f"; {name}: {note}")
            text = text.replace(f"{name} ({note})", name).replace(f"{name} ({bare})", name)
    return text


def _is_idle(node: NodeStatus) -> bool:
    """Tell whether a host has no part in the job and no note."""
    return node.role == "idle" and node.state in ("absent", "left") and not node.note


_POOL_WORDS = {"placed": "running", "spare": "spare", "idle": "idle"}
"""The role of a host whose agent is up, as text."""


def _host_state(node: NodeStatus, over: bool, chosen: bool) -> str:
    """Return the state of a host as text; a host is a spare only once hosts are `chosen`."""
    state = node.state
    if state == "up" and not over:
        return _POOL_WORDS[node.role] if chosen else "ready"
    if state == "absent" and (node.note or node.role == "idle"):
        return "unused" if not node.note else "failed" if node.seen_s is None else "lost"
    return state


def _host_row(node: NodeStatus, over: bool, chosen: bool) -> list[Cell]:
    state = _host_state(node, over, chosen)
    style = "red" if state in large_job.WORRYING else "yellow" if state == "busy" else ""
    return [Cell(node.name), Cell(state, style), Cell(ranks_text(node.ranks) or "-"), Cell(_seen(node))]


def _seen(node: NodeStatus) -> str:
    return f"{duration(node.seen_s)} ago" if node.seen_s is not None else "-"


def _nodes(nodes: Sequence[NodeStatus], over: bool, every_rank: bool) -> list[Line]:
    """Return the nodes of a fixed plan; without their ages once the job is over."""
    if len(nodes) > HOSTS_SHOWN_MAX and not every_rank:
        return large_job.hosts([(node.state, node) for node in nodes], "NODES")
    heads = ("NODE", "HOST", "AGENT", "SEEN")[: 3 if over else 4]
    return columns([_node_row(node)[: len(heads)] for node in nodes], heads)


def _node_row(node: NodeStatus) -> list[Cell]:
    style = "red" if node.state in large_job.WORRYING else ""
    return [Cell(node.name), Cell(node.host), Cell(node.state, style), Cell(_seen(node))]


def _rank_row(rank: RankStatus, mark: str) -> list[Cell]:
    """Return the row of a rank; `mark`: the text that replaces its state."""
    bad = rank.state in large_job.WORRYING or rank.exit not in (None, 0)
    pace, loss, usage = rank.steps_per_s, rank.training.loss, rank.usage
    return [
        Cell(str(rank.rank)),
        Cell(rank.node),
        Cell(or_dash(rank.pid)),
        Cell(mark or rank.state, "red" if bad else "yellow" if mark else ""),
        Cell(or_dash(rank.step if rank.step is not None else rank.progress)),
        Cell("-" if pace is None else f"{pace:.2f}" if pace else "0"),
        Cell("-" if loss is None else f"{loss:.4g}"),
        Cell(_share(usage.cpu_share)),
        Cell("-" if usage.memory_bytes is None else size(usage.memory_bytes)),
        Cell(_share(usage.gpu_share)),
        Cell("-" if usage.gpu_memory_bytes is None else size(usage.gpu_memory_bytes)),
        Cell(duration(rank.beat_s)),
        Cell(or_dash(rank.exit), "red" if bad else ""),
    ]


def _share(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.0f}%"
