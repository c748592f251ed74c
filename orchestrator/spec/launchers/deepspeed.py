"""DeepSpeed's launcher (0.19), also as `python -m deepspeed.launcher.runner`."""

from __future__ import annotations

from collections.abc import Sequence

from orchestrator.spec.launchers.launch_line import (
    ALL,
    DEVICE,
    LOGS,
    NUMBERED,
    RANKS_EACH,
    REACHES,
    RENDEZVOUS,
    UNBOUND,
    Dropped,
    LaunchLine,
    Setting,
    counts,
    kind_of,
    last,
    options,
    program,
    read,
    sorted_out,
)

_OPTIONS = options(
    "deepspeed",
    {"--venv-script=": "setup"},
    {
        RENDEZVOUS: "--master-port= --master-addr=",
        NUMBERED: "--node-rank=",
        f"{REACHES}: write its hosts as ssh.hosts, with backend: ssh and nodes": "-H/--hostfile= --force-multi",
        REACHES: "--launcher= --launcher-args= --no-ssh --no-ssh-check",
        f"{REACHES}; their port is ssh.port": "--ssh-port=",
        LOGS: "--enable-each-rank-log= --log-level= -q/--quiet",
        "orch knows the processes that it starts": "--save-pid",
        UNBOUND: "--bind-cores-to-rank --bind-core-list=",
    },
    refused={
        "it starts many jobs one after the other; tune with deepspeed itself, on one node": "--autotuning=",
        "leave the hosts out of ssh.hosts, or give their GPUs in ssh.hosts_file as gpus=N": "-e/--exclude=",
    },
    own="--num-nodes= --num-gpus/--num-accelerators= -i/--include= --module --no-python --no-local-rank",
)


def deepspeed(words: Sequence[str], start: int) -> LaunchLine:
    """Return the launch line whose options begin at `start`. The launcher tells the script its local rank."""
    given, at = read(words, start, _OPTIONS)
    settings, dropped = sorted_out(given)
    settings += counts(given, {"--num-nodes": "nodes", "--num-gpus": RANKS_EACH}, dropped)
    if (chosen := last(given, "-i")) is not None:
        settings += _chosen(chosen.value, chosen.text)
        dropped.append(
            Dropped(chosen.text, "counts give nodes and gpus_per_node; orch chooses free GPUs of the hosts")
        )
    if not any(setting.key == RANKS_EACH for setting in settings):
        settings.append(Setting(RANKS_EACH, ALL, "deepspeed without --num_gpus", yields=True))
    settings.append(Setting(DEVICE, "gpu", "deepspeed", yields=True))
    kind, local_rank = kind_of("deepspeed", given, "--module"), "--local_rank"
    if (silent := last(given, "--no-local-rank")) is not None:
        local_rank = ""
        dropped.append(Dropped(silent.text, "the script reads LOCAL_RANK, which orch sets"))
    return LaunchLine(
        "deepspeed", kind, program(words, at, "deepspeed"), tuple(settings), tuple(dropped), local_rank
    )


def _chosen(text: str, option: str) -> list[Setting]:
    """Return nodes and GPUs of `worker-0:0,1@worker-1:0,1`. Raises ValueError for hosts with different counts."""
    slots = {host: names for host, _, names in (part.partition(":") for part in text.split("@"))}
    counts = {len(names.split(",")) for names in slots.values() if names}
    if len(counts) > 1 or (counts and not all(slots.values())):
        raise ValueError(
            f"{option} takes different numbers of GPUs of its hosts; orch starts equally many on each node"
        )
    each = [Setting(RANKS_EACH, str(counts.pop()), option)] if counts else []
    return [Setting("nodes", str(len(slots)), option), *each]
