"""Inventory of the resources for a job: this machine's GPUs, or what its hosts report."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Mapping

from orchestrator.core.errors import ClusterError, HostError
from orchestrator.core.host import gpus
from orchestrator.spec.load import SpecFile
from orchestrator.submission import planner
from orchestrator.submission.planner import Inventory

GPU_LIST_S_MAX = 20.0

NO_GPUS = 6
"""Exit code of nvidia-smi when it works and finds no GPU."""


def local_inventory(environ: Mapping[str, str], asks_gpus: bool = True) -> Inventory:
    """Return what this machine has for jobs; its GPUs are not listed for a job without GPUs. Raises ClusterError when
    they cannot be listed."""
    return Inventory(socket.gethostname(), _gpus(environ) if asks_gpus else (), sys.executable)


def host_inventory(file: SpecFile, failed: Mapping[str, str]) -> Inventory:
    """Return what the hosts have; they are asked only for what the job file leaves open. Raises OrchError."""
    from orchestrator.backends.ssh import fanout

    gpus_per_node: int | None = None
    if planner.must_ask_hosts(file):
        names = [host.name for host in file.hosts]
        gpus_per_node = fanout.count_gpus(names, planner.make_ssh_plan(file.spec), file.where("gpus_per_node"))
    return Inventory(socket.gethostname(), (), sys.executable, gpus_per_node, failed=failed)


def _gpus(environ: Mapping[str, str]) -> tuple[int, ...]:
    tool = gpus.find_nvidia_smi(environ.get("PATH", os.defpath))
    if tool is None:
        return ()
    fix = "see why with nvidia-smi, or use procs_per_node for CPU ranks"
    try:
        done = gpus.run_nvidia_smi(tool, "--query-gpu=index,uuid", "--format=csv,noheader", limit_s=GPU_LIST_S_MAX)
    except HostError as err:
        raise ClusterError("nvidia-smi does not answer", tool, fix) from err
    if done.returncode == NO_GPUS:
        return ()
    if done.returncode not in gpus.GOOD_CODES:
        raise ClusterError(f"nvidia-smi cannot list the GPUs: {gpus.output_line(done)}", tool, fix)
    rows = gpus.parse_csv(done.stdout)
    indices = {row[1]: int(row[0]) for row in rows if len(row) == 2 and row[0].isdigit()}
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    return tuple(indices.values()) if visible is None else _visible_gpus(visible, indices)


def _visible_gpus(variable: str, indices: Mapping[str, int]) -> tuple[int, ...]:
    """Return the GPUs that CUDA_VISIBLE_DEVICES names, by index or by the beginning of a UUID, in its order.

    As in CUDA, an empty word or -1 ends the list. Raises ClusterError for a GPU that is missing.
    """
    chosen: list[int] = []
    for word in map(str.strip, variable.split(",")):
        if word in ("", "-1"):
            break
        named = [
            gpu for uuid, gpu in indices.items() if word == str(gpu) or (word[:4] == "GPU-" and uuid.startswith(word))
        ]
        if len(named) != 1:
            what = f"{word} is not one of the {len(indices)} GPUs that nvidia-smi lists"
            raise ClusterError(what, f"CUDA_VISIBLE_DEVICES={variable}", "name whole GPUs there, or unset it")
        chosen += named
    return tuple(dict.fromkeys(chosen))
