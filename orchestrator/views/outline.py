"""View of `orch plan`: nodes with ranks and devices, then the variables of their ranks, each with its reason.

Pure: the JSON object of the contract in, lines out.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby

from orchestrator.core.codec import Json
from orchestrator.core.settings.rank_settings import SetBy
from orchestrator.core.text import format_count, ranks_text
from orchestrator.views.cells import Cell, Line, columns, line, name_list

CONTRACT = "RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT and the others of torchrun and orch"
NODES_SHOWN_MAX = 32


def outline(data: Json) -> list[Line]:
    """Return the outline of a job as lines."""
    lines = [line(Cell(f"{data['name']}", "bold"), f"  {data['size']}, backend {data['backend']}")]
    lines.append(line(f"  runs   {_launch_text(data['command']) if data['launches'] else data['command']}"))
    if data["batch"]:
        lines.append(line(f"  batch  {data['batch']}"))
    lines += [
        line(""),
        *(_unchosen_nodes(data["nodes"]) if data["backend"] == "slurm" else _nodes(data["nodes"])),
    ]
    lines += _environment(data["nodes"])
    lines += [line(""), line(Cell("also in their environment", "bold")), *_settings(data["variables"])]
    inherited = data["inherited"]
    more = f", and {format_count(inherited, 'more variable')} of your shell" if inherited else ""
    if data["backend"] == "ssh":
        more = ", and what their host sets"
    lines.append(line(f"  {CONTRACT}{more}"))
    return lines + [line(""), *(line(f"note: {note}") for note in data["notes"])] * bool(data["notes"])


def _launch_text(text: str) -> str:
    """Describe the launch lines: only the shell on the nodes knows the ranks' command."""
    first, *more = text.strip().splitlines()
    return (
        f"what the {len(more) + 1} lines of launch call, once on each node"
        if more
        else f"what {first} calls, once on each node"
    )


def _nodes(nodes: list[Json]) -> Iterator[Line]:
    rows = [
        (
            Cell(node["name"]),
            Cell(node["host"] or "-"),
            Cell(ranks_text(node["ranks"]) or "-"),
            Cell(node["devices"] or "-"),
            Cell(node["fault"], "red") if node["fault"] else Cell(_hardware_text(node)),
        )
        for node in nodes[:NODES_SHOWN_MAX]
    ]
    yield from columns(rows, ("NODE", "HOST", "RANKS", "DEVICES", "THE HOST HAS"))
    if len(nodes) > NODES_SHOWN_MAX:
        yield line(f"and {len(nodes) - NODES_SHOWN_MAX} more")
    for node in nodes:
        if node["fix"]:
            yield line(f"  {node['name']}: fix: {node['fix']}")


def _unchosen_nodes(nodes: list[Json]) -> list[Line]:
    """Return the nodes that Slurm has yet to choose, all in one line: they differ in nothing but their ranks."""
    first = nodes[0]
    devices = "CPUs" if first["devices"] == "CPU" else first["devices"]
    chosen = f"{format_count(len(nodes), 'node')} that Slurm chooses"
    return [line(f"  nodes  {chosen}, {format_count(len(first['ranks']), 'rank')} on {devices} each")]


def _hardware_text(node: Json) -> str:
    facts = node["facts"]
    if facts is None:
        return "-"
    parts = [format_count(facts["cores"], "core")]
    if facts["gpus"]:
        parts.append(format_count(len(facts["gpus"]), "GPU"))
    if facts["interfaces"]:
        parts.append(name_list(list(dict.fromkeys(address["interface"] for address in facts["interfaces"]))))
    held = f"; {node['held']}" if node["held"] else ""
    return ", ".join(parts) + ("" if node["ranks"] else "; standby") + held


def _environment(nodes: list[Json]) -> Iterator[Line]:
    """Yield the settings that all nodes share, then those that differ."""
    groups = _group_by_settings(nodes)
    if not groups:
        return
    common = [group for group in groups[0][1] if all(group in settings for _, settings in groups)]
    yield from (line(""), line(Cell("environment of the ranks", "bold")), *_settings(common))
    if len(groups) > 1:
        for names, settings in groups:
            yield line(Cell(f"on {name_list(names)}", "bold"))
            yield from _settings([setting for setting in settings if setting not in common])


def _group_by_settings(nodes: list[Json]) -> list[tuple[list[str], list[Json]]]:
    names: list[tuple[list[str], list[Json]]] = []
    for node in nodes:
        if node["fault"]:
            continue
        same = next((names_held for names_held, settings in names if settings == node["settings"]), None)
        if same is None:
            names.append(([node["name"]], node["settings"]))
        else:
            same.append(node["name"])
    return names


def _settings(settings: list[Json]) -> Iterator[Line]:
    """Yield variables with the same reason together, then that reason."""
    for (set_by, reason), group in groupby(settings, lambda one: (one["set_by"], one["reason"])):
        for one in group:
            is_set = one["value"] is not None
            shown = f"={one['value']}" if is_set else ""
            yield line(Cell(f"  {one['name']}{shown}", "" if is_set else "dim"))
        yield line(Cell(f"      {set_by}: {reason}", "green" if set_by == SetBy.YOU.value else "dim"))
