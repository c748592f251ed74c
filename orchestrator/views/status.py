"""Status view of one job: its status as lines of text, for a terminal, a pipe or a log.

Pure: JSON objects of the contract in, lines out. A style is a word or two, such as `bold red`, which `terminal` knows
and `rich` knows too.
"""

from __future__ import annotations

from collections.abc import Sequence

from orchestrator.core.jobdir.status_file import (
    ENDED,
    NodeStatus,
    RankStatus,
    Status,
    StragglerStatus,
    TransferStatus,
    seconds,
)
from orchestrator.core.slurm.hostlist import holds
from orchestrator.core.text import counted, ranks_text, with_fix
from orchestrator.views import large_job
from orchestrator.views.cells import (
    STYLES,
    Cell,
    Line,
    columns,
    duration,
    line,
    named,
    or_dash,
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
    state = status["state"]
    parts = [Cell(state, STYLES.get(state, "")), Cell(f"  attempt {status['attempt']}")]
    if status["step"] is not None:
        total = f"/{status['total_steps']:,}" if status["total_steps"] else ""
        parts.append(Cell(f"  step {status['step']:,}{total}"))
    elif progress := status.get("progress"):
        parts.append(Cell(f"  {progress}"))
    if status["steps_per_s"]:
        parts.append(Cell(f"  {status['steps_per_s']:.2f} steps/s"))
    if (remaining_s := eta_s(status)) is not None:
        parts.append(Cell(f"  {duration(remaining_s)} left"))
    if (spent_s := elapsed_s(status)) is not None:
        over = status["ended_at"] is not None
        parts.append(Cell(f"  in {duration(spent_s)}" if over else f"  {duration(spent_s)} so far"))
    if status["restarts"]:
        parts.append(Cell(f"  {counted(status['restarts'], 'restart')}", "yellow"))
    return line(*parts)


def elapsed_s(status: Status) -> float | None:
    """Return for how many seconds the job has run; None when it has not begun."""
    began, end = status["started_at"], status["ended_at"] or status["written_at"]
    if not began or not end:
        return None
    return max(
        0.0, seconds(end) - seconds(began) + (0.0 if status["ended_at"] else status.get("written_s", 0.0))
    )


def eta_s(status: Status) -> float | None:
    """Return the seconds that are left; None where the total of steps or the pace is unknown."""
    total, step, pace = status["total_steps"], status["step"], status["steps_per_s"]
    if not total or not pace or step is None or status["state"] != "RUNNING":
        return None
    return max(0.0, float(total - step) / float(pace))


def job(status: Status, *, every_rank: bool = False) -> list[Line]:
    """Return one job in full: its head, its nodes and its ranks. Those of a large job are counted by their state, unless
    `every_rank` is wanted."""
    nodes, ranks = status["nodes"], [rank for rank in status["ranks"] if rank["node"]]
    has_pool, over = status["backend"] != "local", status["state"] in ENDED
    lines = [
        line(
            Cell(status["id"], "bold"),
            f"  {counted(status['world_size'], 'rank')}{_count(nodes, has_pool)}, {status['backend']}{_batch(status)}",
        ),
        headline(status),
    ]
    if status["reason"] and not status["suspicion"] and not _is_of_queue(status):
        why = without_notes(reason(status), nodes) if has_pool else reason(status)
        lines.append(line(Cell(why, "dim" if status["state"] == "SUCCEEDED" else "")))
    lines += queue(status)
    if status["suspicion"]:
        lines.append(line("suspicion   ", Cell(status["suspicion"], "yellow")))
    for notice in status.get("notices", ()):
        what, fix = with_fix(notice)
        lines.append(line("notice      ", Cell(what, "yellow")))
        lines += [line(f"            fix: {fix}")] if fix else []
    lines += _stragglers(status["stragglers"])
    if "supervisor" in status:
        lines.append(line(Cell(outdated(status), "bold red")))
    if status["checkpoint"]:
        step = status["checkpoint"]["step"]
        at = f" (step {step:,})" if step is not None else ""
        lines.append(line(f"checkpoint  {status['checkpoint']['path']}{at}"))
    lines += [] if over else _travels(status["travels"])
    if nodes or not has_pool:
        lines += [(), *(_pool(nodes, over, every_rank) if has_pool else _nodes(nodes, over, every_rank))]
    if len(ranks) > RANKS_SHOWN_MAX and not every_rank:
        lines += [(), *large_job.ranks(ranks)]
    elif ranks:
        lines += [(), *columns([_rank_row(rank) for rank in ranks], _RANK_HEADS)]
    return lines


def queue(status: Status) -> list[Line]:
    """Return Slurm's state of a job, and how to mend what keeps it in the queue."""
    if not (queued := status.get("queue")):
        return []
    what, fix = with_fix(queued["said"])
    if queued["expected_start"]:
        what += f", expected to start at {queued['expected_start'][:16].replace('T', ' ')} UTC"
    if queued["silent"]:
        age = f", {duration(queued['heard_s'])} ago" if queued["heard_s"] else ""
        what += f"{age}; no answer now: {queued['silent']}"
    shown = line("queue       ", Cell(what, "yellow" if queued["silent"] or fix else ""))
    return [shown, *([line(f"            fix: {fix}")] if fix else [])]


def _is_of_queue(status: Status) -> bool:
    """Tell whether a job's reason is that of the queue, which has a line of its own."""
    return bool(status.get("queue")) and status["reason"] == status["queue"]["said"]


def reason(status: Status) -> str:
    """Return why the job is in its state, with the paths of its own folder shortened."""
    return short(status["reason"], status.get("dir", ""))


def reason_lines(reason: str, folder: str) -> list[Line]:
    """Return the reason of a job's state, and below it how to mend that, where the reason says so."""
    what, fix = with_fix(short(reason, folder))
    return [line(what), *([line(f"  fix: {fix}")] if fix else [])]


def outdated(status: Status) -> str:
    """Return that no supervisor keeps this status up to date, and which one last did."""
    holder, queued = status["supervisor"], status.get("queue")
    who = f"its supervisor (pid {holder['pid']} on {holder['host']})" if holder else "its supervisor"
    gone = ""
    if status["backend"] == "local" and holder:
        gone = f"; if that machine is gone: orch resume --gone {holder['host']}"
    more = "its batch script starts it again" if queued else f"orch status there tells more{gone}"
    more = "Slurm has suspended it" if queued and queued["state"] == "SUSPENDED" else more
    if full := status.get("full_disk"):
        more = f"the disk of {full} is full: the job goes on when there is room"
    elif queued and holder and not holds(queued["nodes"], holder["host"]):
        more = "that node is lost, and Slurm is asked to put the job back into its queue"
    return f"this is {duration(status['written_s'])} old: no word from {who}; {more}"


_RANK_HEADS = ("RANK", "NODE", "PID", "STATE", "STEP", "STEPS/S", "BEAT", "EXIT")


def _batch(status: Status) -> str:
    return f", batch {status['effective_batch']:,}" if "effective_batch" in status else ""


def _count(nodes: Sequence[NodeStatus], has_pool: bool) -> str:
    """Return on how many nodes the ranks are; for a pool, on how many of its hosts."""
    if not has_pool:
        return f" on {counted(len(nodes), 'node')}"
    if not nodes:
        return ""
    placed = sum(1 for node in nodes if node["role"] == "placed")
    return f" on {placed or 'none'} of {counted(len(nodes), 'host')}"


def _travels(travels: Sequence[TransferStatus]) -> list[Line]:
    """Return the checkpoints that are copied to and from hosts, with their progress."""
    lines = []
    for copy in travels[:TRAVELS_SHOWN_MAX]:
        way = "from" if copy["direction"] == "fetch" else "to"
        done = "" if copy["done_bytes"] is None else f"{size(copy['done_bytes'])} of "
        lines.append(line(f"copying     {copy['name']} {way} {copy['node']}, {done}{size(copy['bytes'])}"))
    if len(travels) > TRAVELS_SHOWN_MAX:
        lines.append(line(f"            and {len(travels) - TRAVELS_SHOWN_MAX} more: --json shows all"))
    return lines


def _stragglers(stragglers: Sequence[StragglerStatus]) -> list[Line]:
    """Return the ranks that hold up their peers: how much slower each is, and since which step."""
    lines: list[Line] = []
    for slow in stragglers[:STRAGGLERS_SHOWN_MAX]:
        times = f"{slow['factor']:.1f} x its peers"
        text = f"rank {slow['rank']} on {slow['node']}, {times} since step {slow['since_step']:,}"
        lines.append(line(f"{'' if lines else 'slow:':<12}", Cell(text, "yellow")))
    if len(stragglers) > STRAGGLERS_SHOWN_MAX:
        lines.append(line(f"            and {len(stragglers) - STRAGGLERS_SHOWN_MAX} more: --json shows all"))
    return lines


def _pool(nodes: Sequence[NodeStatus], over: bool, every_rank: bool) -> list[Line]:
    """Return the hosts of a pool: a table of those with a part in the job, the number of idle ones, and notes."""
    idle = [node for node in nodes if _is_idle(node)]
    listed = [node for node in nodes if not _is_idle(node)]
    chosen = over or any(node["role"] == "placed" for node in nodes)
    heads = ("HOST", "STATE", "RANKS", "SEEN")[: 3 if over else 4]
    if len(listed) > HOSTS_SHOWN_MAX and not every_rank:
        lines = large_job.hosts([(_host_state(node, over, chosen), node) for node in listed], "HOSTS")
    else:
        rows = [_host_row(node, over, chosen)[: len(heads)] for node in listed]
        lines = columns(rows, heads) if rows else []
    if idle:
        names = named([node["name"] for node in idle])
        text = f"{counted(len(idle), 'host')} {'not used' if chosen else 'to choose from'}: {names}"
        lines.append(line(Cell(text, "dim")))
    return [*lines, *_notes(nodes)]


def _notes(nodes: Sequence[NodeStatus]) -> list[Line]:
    """Return the notes of hosts in full; a note that several hosts share, once."""
    hosts: dict[str, list[str]] = {}
    for node in nodes:
        if node["note"]:
            hosts.setdefault(node["note"], []).append(node["name"])
    if not hosts:
        return []
    lines: list[Line] = [()]
    for note, names in list(hosts.items())[:NOTES_SHOWN_MAX]:
        what, fix = with_fix(note)
        lines.append(line(Cell(named(names), "bold"), f": {what}"))
        lines += [line(f"  fix: {fix}")] if fix else []
    if len(hosts) > NOTES_SHOWN_MAX:
        lines.append(line(f"and {len(hosts) - NOTES_SHOWN_MAX} more: --json shows all"))
    return lines


def without_notes(text: str, nodes: Sequence[NodeStatus]) -> str:
    """Return a reason without the notes of hosts, which have lines of their own."""
    for node in nodes:
        if note := node["note"]:
            name, bare = node["name"], note.removeprefix("busy: ")
            text = text.removesuffix(f"; {name}: {note}")
            text = text.replace(f"{name} ({note})", name).replace(f"{name} ({bare})", name)
    return text


def _is_idle(node: NodeStatus) -> bool:
    """Tell whether a host has no part in the job and no note."""
    return node["role"] == "idle" and node["state"] in ("absent", "left") and not node["note"]


_POOL_WORDS = {"placed": "running", "spare": "spare", "idle": "idle"}
"""How people call the role of a host whose agent is up."""


def _host_state(node: NodeStatus, over: bool, chosen: bool) -> str:
    """Return the state of a host for people; a host is a spare only once hosts are `chosen`."""
    state, note = str(node["state"]), node["note"]
    if state == "up" and not over:
        return _POOL_WORDS[node["role"]] if chosen else "ready"
    if state == "absent" and note:
        return "busy" if note.startswith("busy: ") else "failed" if node["seen_s"] is None else "lost"
    return state


def _host_row(node: NodeStatus, over: bool, chosen: bool) -> list[Cell]:
    state = _host_state(node, over, chosen)
    style = "red" if state in large_job.WORRYING else "yellow" if state == "busy" else ""
    return [Cell(node["name"]), Cell(state, style), Cell(ranks_text(node["ranks"]) or "-"), Cell(_seen(node))]


def _seen(node: NodeStatus) -> str:
    return f"{duration(node['seen_s'])} ago" if node["seen_s"] is not None else "-"


def _nodes(nodes: Sequence[NodeStatus], over: bool, every_rank: bool) -> list[Line]:
    """Return the nodes of a fixed plan; without their ages once the job is over."""
    if len(nodes) > HOSTS_SHOWN_MAX and not every_rank:
        return large_job.hosts([(node["state"], node) for node in nodes], "NODES")
    heads = ("NODE", "HOST", "AGENT", "SEEN")[: 3 if over else 4]
    return columns([_node_row(node)[: len(heads)] for node in nodes], heads)


def _node_row(node: NodeStatus) -> list[Cell]:
    style = "red" if node["state"] in large_job.WORRYING else ""
    return [Cell(node["name"]), Cell(node["host"]), Cell(node["state"], style), Cell(_seen(node))]


def _rank_row(rank: RankStatus) -> list[Cell]:
    bad = rank["state"] in large_job.WORRYING or rank["exit"] not in (None, 0)
    pace = rank["steps_per_s"]
    return [
        Cell(str(rank["rank"])),
        Cell(rank["node"]),
        Cell(or_dash(rank["pid"])),
        Cell(rank["state"], "red" if bad else ""),
        Cell(or_dash(rank["step"] if rank["step"] is not None else rank.get("progress"))),
        Cell(f"{pace:.2f}" if pace else "-"),
        Cell(duration(rank["beat_s"])),
        Cell(or_dash(rank["exit"]), "red" if bad else ""),
    ]
