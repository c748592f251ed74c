"""How does a job look? Statuses as lines of text, for a terminal, a pipe or a log.

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
from orchestrator.core.text import ranks_text, with_fix
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

_WORRYING = ("stopped", "zombie", "dead", "silent", "absent", "failed", "excluded", "lost")
RANKS_SHOWN_MAX = 64
HOSTS_SHOWN_MAX = 64
NOTES_SHOWN_MAX = 16
TRAVELS_SHOWN_MAX = STRAGGLERS_SHOWN_MAX = 4


# One job


def headline(status: Status) -> Line:
    """Return a job in one line: what it is, how far, how fast, and how long it still takes."""
    state = status["state"]
    parts = [Cell(state, STYLES.get(state, "")), Cell(f"  attempt {status['attempt']}")]
    if status["step"] is not None:
        total = f"/{status['total_steps']:,}" if status["total_steps"] else ""
        parts.append(Cell(f"  step {status['step']:,}{total}"))
    if status["steps_per_s"]:
        parts.append(Cell(f"  {status['steps_per_s']:.2f} steps/s"))
    if (left := eta_s(status)) is not None:
        parts.append(Cell(f"  {duration(left)} left"))
    if (spent_s := elapsed_s(status)) is not None:
        over = status["ended_at"] is not None
        parts.append(Cell(f"  in {duration(spent_s)}" if over else f"  {duration(spent_s)} so far"))
    if status["restarts"]:
        parts.append(Cell(f"  {status['restarts']} restart{'s' if status['restarts'] > 1 else ''}", "yellow"))
    return line(*parts)


def elapsed_s(status: Status) -> float | None:
    """Return for how many seconds the job has run, or ran; None when it has not begun."""
    began, end = status["started_at"], status["ended_at"] or status["written_at"]
    if not began or not end:
        return None
    return max(
        0.0, seconds(end) - seconds(began) + (0.0 if status["ended_at"] else status.get("written_s", 0.0))
    )


def eta_s(status: Status) -> float | None:
    """Return the seconds that are left, where the job's total of steps and its pace are known."""
    total, step, pace = status["total_steps"], status["step"], status["steps_per_s"]
    if not total or not pace or step is None or status["state"] != "RUNNING":
        return None
    return max(0.0, float(total - step) / float(pace))


def job(status: Status) -> list[Line]:
    """Return one job in full: its head, its nodes and its ranks."""
    nodes, ranks = status["nodes"], [rank for rank in status["ranks"] if rank["node"]]
    has_pool, over = status["backend"] != "local", status["state"] in ENDED
    ranks_there = f"{status['world_size']} rank{'s' if status['world_size'] != 1 else ''}"
    lines = [
        line(Cell(status["id"], "bold"), f"  {ranks_there}{_count(nodes, has_pool)}, {status['backend']}"),
        headline(status),
    ]
    if status["reason"] and not status["suspicion"] and not _is_of_queue(status):
        why = without_notes(reason(status), nodes) if has_pool else reason(status)
        lines.append(line(Cell(why, "dim" if status["state"] == "SUCCEEDED" else "")))
    lines += queue(status)
    if status["suspicion"]:
        lines.append(line("suspicion   ", Cell(status["suspicion"], "yellow")))
    lines += _stragglers(status["stragglers"])
    if "supervisor" in status:
        lines.append(line(Cell(unheard(status), "bold red")))
    if status["checkpoint"]:
        step = status["checkpoint"]["step"]
        at = f" (step {step:,})" if step is not None else ""
        lines.append(line(f"checkpoint  {status['checkpoint']['path']}{at}"))
    lines += [] if over else _travels(status["travels"])
    if nodes or not has_pool:
        lines += [(), *(_pool(nodes, over=over) if has_pool else _nodes(nodes, over=over))]
    if ranks:
        lines += [(), *columns([_rank_row(rank) for rank in ranks[:RANKS_SHOWN_MAX]], _RANK_HEADS)]
    if len(ranks) > RANKS_SHOWN_MAX:
        lines.append(line(f"and {len(ranks) - RANKS_SHOWN_MAX} more ranks: --json shows all"))
    return lines


def queue(status: Status) -> list[Line]:
    """Return what Slurm says of a job that is in its hands, and how to mend what keeps it there."""
    if not (told := status.get("queue")):
        return []
    what, fix = with_fix(told["said"])
    if told["expected_start"]:
        what += f", expected to start at {told['expected_start'][:16].replace('T', ' ')} UTC"
    if told["silent"]:
        age = f", {duration(told['heard_s'])} ago" if told["heard_s"] else ""
        what += f"{age}; no answer now: {told['silent']}"
    shown = line("queue       ", Cell(what, "yellow" if told["silent"] or fix else ""))
    return [shown, *([line(f"            fix: {fix}")] if fix else [])]


def _is_of_queue(status: Status) -> bool:
    """Tell whether a job's reason is what the queue says of it, which has a line of its own."""
    return bool(status.get("queue")) and status["reason"] == status["queue"]["said"]


def reason(status: Status) -> str:
    """Return why the job is in its state, with paths in the job's own folder made short."""
    return short(status["reason"], status.get("dir", ""))


def reason_lines(reason: str, folder: str) -> list[Line]:
    """Return the reason of a job's state, and below it how to mend that, where the reason says so."""
    what, fix = with_fix(short(reason, folder))
    return [line(what), *([line(f"  fix: {fix}")] if fix else [])]


def unheard(status: Status) -> str:
    """Say that nobody keeps this status up to date, and who last did."""
    holder, told = status["supervisor"], status.get("queue")
    who = f"its supervisor (pid {holder['pid']} on {holder['host']})" if holder else "its supervisor"
    more = "its batch script starts it again" if told else "orch status there tells more"
    more = "Slurm has suspended it" if told and told["state"] == "SUSPENDED" else more
    if full := status.get("full_disk"):
        more = f"the disk of {full} is full: the job goes on when there is room"
    elif told and holder and not holds(told["nodes"], holder["host"]):
        more = "that node is lost, and Slurm is asked to put the job back into its queue"
    return f"this is {duration(status['written_s'])} old: no word from {who}; {more}"


_RANK_HEADS = ("RANK", "NODE", "PID", "STATE", "STEP", "STEPS/S", "BEAT", "EXIT")


def _count(nodes: Sequence[NodeStatus], has_pool: bool) -> str:
    """Return on how many nodes the ranks are; of a pool, which may wait for its hosts, on how many of them."""
    if not has_pool:
        return f" on {len(nodes)} node{'s' if len(nodes) != 1 else ''}"
    if not nodes:
        return ""
    placed = sum(1 for node in nodes if node["role"] == "placed")
    return f" on {placed or 'none'} of {_hosts(len(nodes))}"


def _travels(travels: Sequence[TransferStatus]) -> list[Line]:
    """Return what is being copied to and from hosts, and how far it has come."""
    lines = []
    for one in travels[:TRAVELS_SHOWN_MAX]:
        way = "from" if one["direction"] == "fetch" else "to"
        done = "" if one["done_bytes"] is None else f"{size(one['done_bytes'])} of "
        lines.append(line(f"copying     {one['name']} {way} {one['node']}, {done}{size(one['bytes'])}"))
    if len(travels) > TRAVELS_SHOWN_MAX:
        lines.append(line(f"            and {len(travels) - TRAVELS_SHOWN_MAX} more: --json shows all"))
    return lines


def _stragglers(stragglers: Sequence[StragglerStatus]) -> list[Line]:
    """Return the ranks that hold up their peers: how much slower each is by itself, and since when."""
    lines: list[Line] = []
    for one in stragglers[:STRAGGLERS_SHOWN_MAX]:
        times = f"{one['factor']:.1f} x its peers"
        text = f"rank {one['rank']} on {one['node']}, {times} since step {one['since_step']:,}"
        lines.append(line(f"{'' if lines else 'slow:':<12}", Cell(text, "yellow")))
    if len(stragglers) > STRAGGLERS_SHOWN_MAX:
        lines.append(line(f"            and {len(stragglers) - STRAGGLERS_SHOWN_MAX} more: --json shows all"))
    return lines


def _pool(nodes: Sequence[NodeStatus], *, over: bool) -> list[Line]:
    """Return the hosts of a pool: those that are used, those that are not, how many are merely there, and why so."""
    idle = [node for node in nodes if _is_idle(node)]
    told = [node for node in nodes if not _is_idle(node)]
    chosen = over or any(node["role"] == "placed" for node in nodes)
    heads = ("HOST", "STATE", "RANKS", "SEEN")[: 3 if over else 4]
    rows = [_host_row(node, over, chosen)[: len(heads)] for node in told[:HOSTS_SHOWN_MAX]]
    lines = columns(rows, heads) if rows else []
    if len(told) > HOSTS_SHOWN_MAX:
        lines.append(line(f"and {len(told) - HOSTS_SHOWN_MAX} more hosts: --json shows all"))
    if idle:
        names = named([node["name"] for node in idle])
        text = f"{_hosts(len(idle))} {'not used' if chosen else 'to choose from'}: {names}"
        lines.append(line(Cell(text, "dim")))
    return [*lines, *_notes(nodes)]


def _notes(nodes: Sequence[NodeStatus]) -> list[Line]:
    """Return what there is to say of hosts, whole, and once where it is the same of several."""
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


def _hosts(count: int) -> str:
    return f"{count} host{'s' if count != 1 else ''}"


def without_notes(text: str, nodes: Sequence[NodeStatus]) -> str:
    """Return a reason without what stands below it as the notes of hosts."""
    for node in nodes:
        if note := node["note"]:
            name, bare = node["name"], note.removeprefix("busy: ")
            text = text.removesuffix(f"; {name}: {note}")
            text = text.replace(f"{name} ({note})", name).replace(f"{name} ({bare})", name)
    return text


def _is_idle(node: NodeStatus) -> bool:
    """Tell whether there is nothing to say of a host but that it is listed."""
    return node["role"] == "idle" and node["state"] in ("absent", "left") and not node["note"]


_POOL_WORDS = {"placed": "running", "spare": "spare", "idle": "idle"}
"""What a host whose agent is there is called for people: what it does."""


def _host_state(node: NodeStatus, over: bool, chosen: bool) -> str:
    """Return what a host is called for people; before any host is `chosen` none is a spare."""
    state, note = str(node["state"]), node["note"]
    if state == "up" and not over:
        return _POOL_WORDS[node["role"]] if chosen else "ready"
    if state == "absent" and note:
        return "busy" if note.startswith("busy: ") else "failed" if node["seen_s"] is None else "lost"
    return state


def _host_row(node: NodeStatus, over: bool, chosen: bool) -> list[Cell]:
    state = _host_state(node, over, chosen)
    style = "red" if state in _WORRYING else "yellow" if state == "busy" else ""
    return [Cell(node["name"]), Cell(state, style), Cell(ranks_text(node["ranks"]) or "-"), Cell(_seen(node))]


def _seen(node: NodeStatus) -> str:
    return f"{duration(node['seen_s'])} ago" if node["seen_s"] is not None else "-"


def _nodes(nodes: Sequence[NodeStatus], *, over: bool) -> list[Line]:
    """Return the nodes that a plan has fixed; when they were seen says nothing any more once the job is over."""
    heads = ("NODE", "HOST", "AGENT", "SEEN")[: 3 if over else 4]
    return columns([_node_row(node)[: len(heads)] for node in nodes], heads)


def _node_row(node: NodeStatus) -> list[Cell]:
    style = "red" if node["state"] in _WORRYING else ""
    return [Cell(node["name"]), Cell(node["host"]), Cell(node["state"], style), Cell(_seen(node))]


def _rank_row(rank: RankStatus) -> list[Cell]:
    bad = rank["state"] in _WORRYING or rank["exit"] not in (None, 0)
    pace = rank["steps_per_s"]
    return [
        Cell(str(rank["rank"])),
        Cell(rank["node"]),
        Cell(or_dash(rank["pid"])),
        Cell(rank["state"], "red" if bad else ""),
        Cell(or_dash(rank["step"])),
        Cell(f"{pace:.2f}" if pace else "-"),
        Cell(duration(rank["beat_s"])),
        Cell(or_dash(rank["exit"]), "red" if bad else ""),
    ]
