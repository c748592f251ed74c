"""Torchrun, also as `python -m torch.distributed.run` and `python -m torch.distributed.launch` (torch 2.13)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from orchestrator.spec.launchers.launch_line import (
    ALL,
    LOGS,
    NUMBERED,
    RANKS_EACH,
    RENDEZVOUS,
    ROLES,
    STARTS,
    UNBOUND,
    Dropped,
    Given,
    LaunchLine,
    Setting,
    count_later,
    is_later,
    kind_of,
    last,
    number,
    options,
    program,
    read,
    sorted_out,
)

NOT_NEEDED = {
    RENDEZVOUS: "--rdzv-backend= --rdzv-endpoint= --rdzv-id= --rdzv-conf= --standalone --master-addr= --local-addr=",
    f"{RENDEZVOUS}; rendezvous.port fixes it": "--master-port=",
    NUMBERED: "--node-rank=",
    LOGS: "--log-dir= -r/--redirects= -t/--tee= --local-ranks-filter= --duplicate-stdout-filters= "
    "--duplicate-stderr-filters= --logs-specs= --event-log-handler=",
    STARTS: "--monitor-interval= --start-method= --signals-to-handle= --run-path",
    ROLES: "--role=",
    "orch sets LOCAL_RANK, and gives the script no argument": "--use-env",
    "each rank has its own LOCAL_RANK and sees all GPUs of its job on the node": "--virtual-local-rank",
    UNBOUND: "--numa-binding=",
}
"""Options of torchrun that orch does not need."""

_OWN = "--nnodes= --nproc-per-node= -m/--module --no-python"
_TAKEN = {"--max-restarts=": "restart.max", "--shutdown-timeout=": "monitor.stop_grace"}
_RUN = options("torchrun", _TAKEN, NOT_NEEDED, own=_OWN)
_LAUNCH = options("torch.distributed.launch", _TAKEN, NOT_NEEDED, own=_OWN)


def has_option(name: str) -> bool:
    """Tell whether an option is one of torchrun's."""
    return _RUN.find(name) is not None


def torchrun(words: Sequence[str], start: int) -> LaunchLine:
    """Return the launch line whose options begin at `start`."""
    given, at = read(words, start, _RUN)
    return _line(words, at, given, "torchrun")


def distributed_launch(words: Sequence[str], start: int) -> LaunchLine:
    """Return the same for torch.distributed.launch, which tells the script its local rank unless `--use-env` is given."""
    given, at = read(words, start, _LAUNCH)
    line = _line(words, at, given, "torch.distributed.launch")
    is_told = last(given, "--use-env") is None and line.kind != "command"
    return replace(line, local_rank="--local-rank" if is_told else "")


def _line(words: Sequence[str], at: int, given: list[Given], launcher: str) -> LaunchLine:
    settings, dropped = sorted_out(given)
    for one in (last(given, "--nnodes"), last(given, "--nproc-per-node")):
        if one is not None:
            _count(one, settings, dropped)
    if last(given, "--nproc-per-node") is None:
        settings.append(Setting(RANKS_EACH, "1", f"{launcher} without --nproc-per-node", yields=True))
    kind = kind_of(launcher, given, "-m")
    started = program(words, at, launcher)
    if words[at + 1 : at + 2] == ["--"]:
        # torchrun takes it away, too: what stands behind it is for the script
        started = (at, *started[2:])
    return LaunchLine(launcher, kind, started, tuple(settings), tuple(dropped))


def _count(option: Given, settings: list[Setting], dropped: list[Dropped]) -> None:
    """Note how many nodes, or ranks on each, an option asks for."""
    if is_later(option.value):
        count_later(option, dropped)
    elif option.name == "--nnodes":
        low, _, high = option.value.partition(":")
        most = number(replace(option, value=high or low))
        settings.append(Setting("nodes", str(most), option.text))
        if high and low != high:
            dropped.append(
                Dropped(option.text, f"a job keeps its number of nodes: {most}, the most of these")
            )
    elif option.value in ("gpu", "auto"):
        settings.append(Setting(RANKS_EACH, ALL, option.text))
    elif option.value == "cpu":
        raise ValueError(
            f"{option.text}: the number of cores of the nodes is not known here; write procs_per_node: 4 and leave it out"
        )
    elif option.value == "xpu":
        raise ValueError(
            f"{option.text}: orch knows NVIDIA GPUs and CPU ranks only; write the number of ranks"
        )
    else:
        settings.append(Setting(RANKS_EACH, str(number(option)), option.text))
