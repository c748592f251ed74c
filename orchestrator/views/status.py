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
    parse_iso,
    time_of_day,
)
from orchestrator.core.slurm import command_output
from orchestrator.core.slurm.hostlist import may_contain
from orchestrator.core.status_types import NextAction, Suspicion
from orchestrator.core.text import format_count, next_action_text, one_line_fault, ranks_text, split_fix
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
    name_list,
    or_dash,
    plain_text,
    shorten_paths,
    size,
)

RANKS_SHOWN_MAX = 64
HOSTS_SHOWN_MAX = 64
NOTES_SHOWN_MAX = 16
TRANSFERS_SHOWN_MAX = STRAGGLERS_SHOWN_MAX = 4


# One job


def headline(status: Status) -> Line:
    """Return a job in one line: its state, attempt, step, pace, time left and time spent."""
    state, training = status.state, status.training
    parts = [Cell(state, STYLES.get(state, "")), Cell(f"  attempt {status.attempt}")]
    if status.launch_call > 1:
        parts.append(Cell(f"  launch {status.launch_call}"))
    if status.step is not None:
        total = f"/{training.total_steps:,}" if training.total_steps else ""
        parts.append(Cell(f"  step {status.step:,}{total}"))
    elif progress := status.progress:
        parts.append(Cell(f"  {progress}"))
    if training.percent is not None:
        parts.append(Cell(f"  {training.percent:.0f}%"))
    if training.loss is not None:
        parts.append(Cell(f"  loss {training.loss:.4g}", "" if math.isfinite(training.loss) else "yellow"))
    if status.steps_per_s:
        parts.append(Cell(f"  {status.steps_per_s:.2f} steps/s"))
    if training.eta_s is not None:
        parts.append(Cell(f"  {duration(training.eta_s)} left"))
    if (spent_s := elapsed_s(status)) is not None:
        has_ended = status.ended_at is not None
        parts.append(Cell(f"  in {duration(spent_s)}" if has_ended else f"  {duration(spent_s)} so far"))
    if status.restarts:
        parts.append(Cell(f"  {format_count(status.restarts, 'restart')}", "yellow"))
    return line(*parts)


def elapsed_s(status: Status) -> float | None:
    """Return how many seconds the job has run; None before its start."""
    began, end = status.started_at, status.ended_at or status.written_at
    if not began or not end:
        return None
    return max(0.0, parse_iso(end) - parse_iso(began) + (0.0 if status.ended_at else status.written_s or 0.0))


def job(status: Status, *, every_rank: bool = False, reference: str = "", chars_max: int | None = None) -> list[Line]:
    """Return one job in full: its head, its nodes and its ranks. Those of a large job are counted by their state, unless
    `every_rank` is wanted. `reference`: the job in commands, by default its id. A table of ranks that is wider than `chars_max`
    has fewer columns."""
    nodes, ranks = status.nodes, [rank for rank in status.ranks if rank.node]
    has_pool, has_ended = status.backend != "local", status.state in ENDED
    batch = f", batch {status.effective_batch:,}" if status.effective_batch is not None else ""
    lines = [
        line(
            Cell(status.id, "bold"),
            f"  {format_count(status.world_size, 'rank')}{_node_count_text(nodes, has_pool)}, {status.backend}{batch}",
        ),
        headline(status),
    ]
    if status.reason and not status.suspicion and not is_queue_reason(status):
        why = strip_notes(reason(status), nodes) if has_pool else reason(status)
        lines.append(line(Cell(why, "dim" if status.state == "SUCCEEDED" else "")))
    lines += queue(status)
    lines += [*suspicion(status, reference), *notices(status)]
    lines += _straggler_lines(status.stragglers)
    if status.is_late or status.copy_of:
        lines.append(line(Cell(outdated_text(status), "bold red")))
    if status.checkpoint:
        step = status.checkpoint.step
        at = f" (step {step:,})" if step is not None else ""
        lines.append(line(f"checkpoint  {shorten_paths(status.checkpoint.path, status.dir)}{at}"))
        if not status.checkpoint.safe:
            of = f"{size(status.checkpoint.safe_bytes)} of {size(status.checkpoint.bytes)}"
            lines.append(line(" " * 12, Cell(f"not safe yet: {of} copied to another host or a disk", "yellow")))
    for kind, runs in groupby(sorted(status.trackers, key=lambda run: run.kind), lambda run: run.kind):
        *before, last = [shorten_paths(run.path, status.dir) for run in runs]
        lines.append(line(f"{kind:<11} ", f"{len(before) + 1} runs, the last " if before else "", last))
    lines += [] if has_ended else _transfer_lines(status.travels)
    if nodes or not has_pool:
        lines += [
            (),
            *(_pool_lines(nodes, has_ended, every_rank) if has_pool else _node_lines(nodes, has_ended, every_rank)),
        ]
    if len(ranks) > RANKS_SHOWN_MAX and not every_rank:
        lines += [(), *large_job.ranks(ranks)]
    elif ranks:
        marks = _rank_marks(status)
        lines += [(), *_ranks([_rank_row(rank, marks.get(rank.rank, "")) for rank in ranks], chars_max)]
    return lines


def suspicion(status: Status, reference: str = "", chars_max: int | None = None) -> list[Line]:
    """Return the suspicion, cut at `chars_max`, and below it the action that follows, its time, and the command for it."""
    if not status.suspicion:
        return []
    next_action = next_action_line(status.suspected, status.written_at, reference or status.id)
    return suspicion_lines(cut(shorten_paths(status.suspicion, status.dir), chars_max), next_action)


def suspicion_lines(suspicion_text: str, next_action: str) -> list[Line]:
    """Return the lines of a suspicion, and of the action that follows."""
    lines = [line("suspicion   ", Cell(suspicion_text, "yellow"))]
    return [*lines, *([line(" " * 12, Cell(next_action, "yellow"))] if next_action else [])]


def next_action_line(suspected: Suspicion | None, written_at: str, reference: str) -> str:
    """Return the action that follows from a suspicion, its time, and the command for it; empty where that is unknown.
    `written_at`: the time of the status; `called`: the job's name in commands."""
    if suspected is None:
        return ""
    due = iso(parse_iso(written_at) + (suspected.in_s or 0.0))
    return next_action_text(suspected, time_of_day(due), reference)


def notices(status: Status) -> list[Line]:
    """Return the notices on the job's setup, each with its fix."""
    return [one for notice in status.notices for one in notice_lines(notice, status.dir)]


def notice_lines(notice: str, folder: str) -> list[Line]:
    """Return one notice, and below it its fix."""
    what, fix = split_fix(shorten_paths(notice, folder))
    return [
        line("notice      ", Cell(what, "yellow")),
        *([line(f"            fix: {fix}")] if fix else []),
    ]


def _rank_marks(status: Status) -> dict[int, str]:
    """Return the text that replaces the state of stuck, silent and slow ranks."""
    suspected = status.suspected
    marks = {slow.rank: f"{slow.factor:.1f}x slow" for slow in status.stragglers}
    mark_texts = {NextAction.ENDS: "stuck", NextAction.NOTHING: "stuck", NextAction.LOST: "silent"}
    if suspected is not None and suspected.follows in mark_texts:
        marks |= dict.fromkeys(suspected.ranks, f"{mark_texts[suspected.follows]} {duration(suspected.for_s)}")
    return marks


def queue(status: Status) -> list[Line]:
    """Return Slurm's state of a job, and the fix for what keeps it in the queue."""
    if (queued := status.queue) is None:
        return []
    what, fix = queued.said + command_output.expected_start_text(queued.expected_start), queued.fix
    if queued.silent:
        age = f", {duration(queued.heard_s)} ago" if queued.heard_s else ""
        what += f"{age}; no answer now: {queued.silent}"
    shown = line("queue       ", Cell(what, "yellow" if queued.silent or fix else ""))
    return [shown, *([line(f"            fix: {fix}")] if fix else [])]


def is_queue_reason(status: Status) -> bool:
    """Return whether a job's reason is the queue's, which has its own line."""
    queued = status.queue
    return queued is not None and status.reason == one_line_fault(queued.said, fix=queued.fix)


def reason(status: Status) -> str:
    """Return why the job is in its state, with the paths of its own folder shortened."""
    return shorten_paths(status.reason, status.dir)


def reason_lines(reason: str, folder: str) -> list[Line]:
    """Return the reason of a job's state, and below it the fix, if there is one."""
    what, fix = split_fix(shorten_paths(reason, folder))
    return [line(what), *([line(f"  fix: {fix}")] if fix else [])]


def outdated_text(status: Status) -> str:
    """Say that no supervisor updates this status, and which one last did; or of what job it is a copy."""
    if status.copy_of:
        return f"a copy of {status.copy_of}: commands do not change it"
    holder, queued = status.supervisor, status.queue
    supervisor_text = f"its supervisor (pid {holder.pid} on {holder.host})" if holder else "its supervisor"
    may_be_gone = status.backend == "local" and holder
    host_lost_hint = "; if that machine is gone, orch resume explains how to continue" if may_be_gone else ""
    hint = "its batch script restarts it" if queued else f"run orch status there{host_lost_hint}"
    hint = "Slurm has suspended it" if queued and queued.state == "SUSPENDED" else hint
    if status.full_disk:
        hint = disk_full(status.full_disk)
    elif queued and holder and not may_contain(queued.nodes, holder.host):
        hint = "that node is lost, and the job is being requeued"
    return f"this is {duration(status.written_s)} old: no update from {supervisor_text}; {hint}"


_RANK_HEADS = (
    "RANK", "NODE", "PID", "STATE", "STEP", "STEPS/S", "LOSS", "CPU", "MEMORY", "GPU", "GPU MEMORY", "BEAT", "EXIT",
)  # fmt: skip
_OPTIONAL_HEADS = ("LOSS", "CPU", "MEMORY", "GPU", "GPU MEMORY")
"""The columns that are shown only if some rank has a value."""

_DROPPABLE_HEADS = ("PID", "GPU MEMORY", "MEMORY", "CPU", "GPU", "BEAT", "LOSS")
"""The columns that a narrow terminal leaves out, in this order."""


def _ranks(rows: Sequence[Sequence[Cell]], chars_max: int | None) -> list[Line]:
    """Return the table of ranks: with all columns that are known, as far as they fit."""
    known = {
        head
        for head, cells in zip(_RANK_HEADS, zip(*rows, strict=True), strict=True)
        if head not in _OPTIONAL_HEADS or any(cell.text != "-" for cell in cells)
    }
    for spared in (None, *_DROPPABLE_HEADS):
        known.discard(spared or "")
        kept = [index for index, head in enumerate(_RANK_HEADS) if head in known]
        table = columns([[row[index] for index in kept] for row in rows], [_RANK_HEADS[i] for i in kept])
        if chars_max is None or len(plain_text(table[:1]).rstrip("\n")) <= chars_max:
            break
    return table


def _node_count_text(nodes: Sequence[NodeStatus], has_pool: bool) -> str:
    """Return on how many nodes the ranks are; for a pool, on how many of its hosts."""
    if not has_pool:
        return f" on {format_count(len(nodes), 'node')}"
    if not nodes:
        return ""
    placed = sum(1 for node in nodes if node.role == "placed")
    return f" on {placed or 'none'} of {format_count(len(nodes), 'host')}"


def _transfer_lines(transfers: Sequence[TransferStatus]) -> list[Line]:
    lines = []
    for copy in transfers[:TRANSFERS_SHOWN_MAX]:
        way = "from" if copy.direction == "fetch" else "to"
        done = "" if copy.done_bytes is None else f"{size(copy.done_bytes)} of "
        lines.append(line(f"copying     {copy.name} {way} {copy.node}, {done}{size(copy.bytes)}"))
    if len(transfers) > TRANSFERS_SHOWN_MAX:
        lines.append(line(f"            and {len(transfers) - TRANSFERS_SHOWN_MAX} more: --json shows all"))
    return lines


def _straggler_lines(stragglers: Sequence[StragglerStatus]) -> list[Line]:
    """Return the ranks that hold up their peers: how much slower each is, and since which step."""
    lines: list[Line] = []
    for slow in stragglers[:STRAGGLERS_SHOWN_MAX]:
        times = f"{slow.factor:.1f} x its peers"
        text = f"rank {slow.rank} on {slow.node}, {times} since step {slow.since_step:,}"
        text += f"; {slow.gpu_remarks}" if slow.gpu_remarks else ""
        lines.append(line(f"{'' if lines else 'slow':<12}", Cell(text, "yellow")))
    if len(stragglers) > STRAGGLERS_SHOWN_MAX:
        lines.append(line(f"            and {len(stragglers) - STRAGGLERS_SHOWN_MAX} more: --json shows all"))
    return lines


def _pool_lines(nodes: Sequence[NodeStatus], has_ended: bool, every_rank: bool) -> list[Line]:
    """Return the hosts of a pool: a table of those with a part in the job, the number of idle ones, and notes."""
    idle = [node for node in nodes if _is_idle(node)]
    listed = [node for node in nodes if not _is_idle(node)]
    chosen = has_ended or any(node.role == "placed" for node in nodes)
    heads = ("HOST", "STATE", "RANKS", "SEEN")[: 3 if has_ended else 4]
    if len(listed) > HOSTS_SHOWN_MAX and not every_rank:
        lines = large_job.hosts([(_host_state(node, has_ended, chosen), node) for node in listed], "HOSTS")
    else:
        rows = [_host_row(node, has_ended, chosen)[: len(heads)] for node in listed]
        lines = columns(rows, heads) if rows else []
    if idle:
        names = name_list([node.name for node in idle])
        text = f"{format_count(len(idle), 'host')} on standby: {names}"
        lines.append(line(Cell(text, "dim")))
    return [*lines, *_note_lines(nodes)]


def _note_lines(nodes: Sequence[NodeStatus]) -> list[Line]:
    """Return the notes of hosts in full; a note that several hosts share, once."""
    hosts: dict[tuple[str, str], list[str]] = {}
    for node in nodes:
        if node.note:
            hosts.setdefault((node.note, node.fix), []).append(node.name)
    if not hosts:
        return []
    lines: list[Line] = [()]
    for (what, fix), names in list(hosts.items())[:NOTES_SHOWN_MAX]:
        lines.append(line(Cell(name_list(names), "bold"), f": {what}"))
        lines += [line(f"  fix: {fix}")] if fix else []
    if len(hosts) > NOTES_SHOWN_MAX:
        lines.append(line(f"and {len(hosts) - NOTES_SHOWN_MAX} more: --json shows all"))
    return lines


def strip_notes(text: str, nodes: Sequence[NodeStatus]) -> str:
    """Return a reason without the notes of hosts, which are on separate lines."""
    for node in nodes:
        if node.note:
            name, note = node.name, one_line_fault(node.note, fix=node.fix)
            bare = note.removeprefix("busy: ")
            text = text.removesuffix(f"; {name}: {note}")
            text = text.replace(f"{name} ({note})", name).replace(f"{name} ({bare})", name)
    return text


def _is_idle(node: NodeStatus) -> bool:
    """Return whether a host has no part in the job and no note."""
    return node.role == "idle" and node.state in ("absent", "left") and not node.note


_ROLE_TEXTS = {"placed": "running", "spare": "spare", "idle": "idle"}
"""The role of a host whose agent is up, as text."""


def _host_state(node: NodeStatus, has_ended: bool, chosen: bool) -> str:
    """Return the state of a host as text; a host is a spare only once hosts are `chosen`."""
    state = node.state
    if state == "up" and not has_ended:
        return _ROLE_TEXTS[node.role] if chosen else "ready"
    if state == "absent" and (node.note or node.role == "idle"):
        return "unused" if not node.note else "failed" if node.seen_s is None else "lost"
    return state


def _host_row(node: NodeStatus, has_ended: bool, chosen: bool) -> list[Cell]:
    state = _host_state(node, has_ended, chosen)
    style = "red" if state in large_job.BAD_STATES else "yellow" if state == "busy" else ""
    return [Cell(node.name), Cell(state, style), Cell(ranks_text(node.ranks) or "-"), Cell(_seen_text(node))]


def _seen_text(node: NodeStatus) -> str:
    return f"{duration(node.seen_s)} ago" if node.seen_s is not None else "-"


def _node_lines(nodes: Sequence[NodeStatus], has_ended: bool, every_rank: bool) -> list[Line]:
    """Return the nodes of a fixed plan; without their ages once the job is over."""
    if len(nodes) > HOSTS_SHOWN_MAX and not every_rank:
        return large_job.hosts([(node.state, node) for node in nodes], "NODES")
    heads = ("NODE", "HOST", "AGENT", "SEEN")[: 3 if has_ended else 4]
    return columns([_node_row(node)[: len(heads)] for node in nodes], heads)


def _node_row(node: NodeStatus) -> list[Cell]:
    style = "red" if node.state in large_job.BAD_STATES else ""
    return [Cell(node.name), Cell(node.host), Cell(node.state, style), Cell(_seen_text(node))]


def _rank_row(rank: RankStatus, mark: str) -> list[Cell]:
    """Return the row of a rank; `mark`: the text that replaces its state."""
    bad = rank.state in large_job.BAD_STATES or rank.exit not in (None, 0)
    pace, loss, usage = rank.steps_per_s, rank.training.loss, rank.usage
    return [
        Cell(str(rank.rank)),
        Cell(rank.node),
        Cell(or_dash(rank.pid)),
        Cell(mark or rank.state, "red" if bad else "yellow" if mark else ""),
        Cell(or_dash(rank.step if rank.step is not None else rank.progress)),
        Cell("-" if pace is None else f"{pace:.2f}" if pace else "0"),
        Cell("-" if loss is None else f"{loss:.4g}"),
        Cell(_percent_text(usage.cpu_share)),
        Cell("-" if usage.memory_bytes is None else size(usage.memory_bytes)),
        Cell(_percent_text(usage.gpu_share)),
        Cell("-" if usage.gpu_memory_bytes is None else size(usage.gpu_memory_bytes)),
        Cell(duration(rank.beat_s)),
        Cell(or_dash(rank.exit), "red" if bad else ""),
    ]


def _percent_text(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.0f}%"
