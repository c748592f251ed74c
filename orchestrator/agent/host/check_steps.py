"""Steps of a check on this node, one after another: the facts, ports, links, an all-reduce, a burn-in.

What a step has opened is closed at the end of the check.
"""

from __future__ import annotations

import platform
import resource
import socket
from collections.abc import Mapping
from dataclasses import replace

from orchestrator.agent.host import gpu_health, peers, program, resources
from orchestrator.core.errors import HostError
from orchestrator.core.host import interfaces
from orchestrator.core.host_facts import AllReduced, HostFacts
from orchestrator.core.wire import bootstrap as w


class CheckSteps:
    """A check in progress on one node; `environ` is the environment that ranks would have, without the job's own."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._environ = environ
        self._listener: peers.PeerListener | None = None

    def run(self, step: w.CheckStep) -> w.Reply:
        """Do a step, and return what came of it."""
        match step:
            case w.GatherFacts():
                return self.gather_facts(step)
            case w.OpenPorts(token, port):
                return self._open_ports(token, port)
            case w.MeasurePeer(addresses, ports, token, send_s):
                return peers.measure_link(addresses, ports, token, send_s)
            case w.AllReduce():
                return self._reduce(step) if step.world else self.burn_in(step)

    def close(self) -> None:
        """Close what the steps have opened."""
        if self._listener is not None:
            self._listener.close()
            self._listener = None

    def _open_ports(self, token: str, port: int | None) -> w.PortsOpened:
        self.close()
        try:
            self._listener = peers.PeerListener(token, port)
        except HostError as err:
            return w.PortsOpened((), (), str(err))
        return w.PortsOpened(self._listener.ports, interfaces.list_addresses(), "")

    def _reduce(self, step: w.AllReduce) -> AllReduced:
        self.close()  # rank 0 listens on the port that was held
        request = {
            "rank": step.rank, "world": step.world, "address": step.address, "port": step.port,
            "on_gpu": step.on_gpu, "group_s_max": program.REDUCE_GROUP_S_MAX, "seconds": step.burn_s,
        }  # fmt: skip
        return program.run_burn(
            step.program, "reduce_rank", request, {**self._environ, **step.env}, program.REDUCE_S_MAX
        )

    def burn_in(self, step: w.AllReduce) -> AllReduced:
        """Burn this node in for a round; after the first one NVIDIA's own tests are run."""
        if step.on_gpu and gpu_health.read().users:
            return AllReduced("its GPUs are in use")
        burned = program.run_burn(
            step.program, "burn_in", {"seconds": step.burn_s, "on_gpu": step.on_gpu, "folder": step.folder},
            {**self._environ, **step.env}, step.burn_s + program.BURN_EXTRA_S_MAX,
        )  # fmt: skip
        return (
            replace(burned, notes=(*gpu_health.failed_diagnoses(), *burned.notes))
            if step.on_gpu and not step.rank
            else burned
        )

    def gather_facts(self, step: w.GatherFacts) -> HostFacts:
        """Gather the node's facts."""
        health = gpu_health.read()
        shm_bytes, shm_free_bytes = resources.shm_sizes()
        env = {**self._environ, **step.env}
        return HostFacts(
            hostname=socket.gethostname(),
            kernel=platform.release(),
            memory_bytes=resources.memory_bytes(),
            cgroup_bytes=resources.cgroup_bytes(),
            shm_bytes=shm_bytes,
            shm_free_bytes=shm_free_bytes,
            open_files_max=resources.soft_limit(resource.RLIMIT_NOFILE),
            processes_max=resources.soft_limit(resource.RLIMIT_NPROC),
            locked_bytes_max=resources.soft_limit(resource.RLIMIT_MEMLOCK),
            has_infiniband=resources.has_infiniband(),
            folders=tuple(resources.inspect_folder(path) for path in step.folders),
            unresolved=resources.find_unresolved((socket.gethostname(), *step.names)),
            gpus=health.gpus,
            gpu_users=health.users,
            gpu_fault=health.fault,
            xids=health.xids,
            program=program.probe_program(step, env) if step.program else None,
            available_bytes=resources.available_bytes(),
        )
