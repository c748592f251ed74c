"""Steps of a check on this node, one after another: the facts, ports, links, an all-reduce.

What a step has opened is closed at the end of the check.
"""

from __future__ import annotations

import platform
import resource
import socket
from collections.abc import Mapping
from pathlib import Path

from orchestrator.agent.host import gpu_health, peers, program, resources
from orchestrator.agent.process import leases
from orchestrator.core.errors import HostError
from orchestrator.core.host import gpus, interfaces, procfs
from orchestrator.core.host_facts import HostFacts
from orchestrator.core.wire import bootstrap as w
from orchestrator.core.wire.agent_config import LeaseNeeds


class CheckSteps:
    """A check in progress on one node; `environ` is the environment that ranks would have, without the job's own."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._environ = environ
        self._listener: peers.PeerListener | None = None
        self._leases: leases.Leases | None = None

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
                return self.burn_in(step) if step.burn_s else self._reduce(step)

    def close(self) -> None:
        """Close what the steps have opened."""
        if self._leases is not None:
            self._leases.close()
            self._leases = None
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

    def _reduce(self, step: w.AllReduce) -> w.AllReduced:
        self.close()  # rank 0 listens on the port that was held
        request = {
            "rank": step.rank, "world": step.world, "address": step.address, "port": step.port,
            "on_gpu": step.on_gpu, "group_s_max": program.REDUCE_GROUP_S_MAX,
        }  # fmt: skip
        return w.AllReduced(program.all_reduce(step.program, {**self._environ, **step.env}, request))

    def burn_in(self, step: w.AllReduce) -> w.AllReduced:
        """Burn this node in for a round; its GPUs are leased until the end of the check, so that no job begins on them."""
        if step.on_gpu and self._leases is None:
            try:
                needs = LeaseNeeds(len(gpus.list_gpus()), 0, 0)
                self._leases = leases.acquire(
                    needs, leases.this_holder("orch check", ""), leases.LeaseCapacity(gpus.list_gpus, 1)
                )
            except (HostError, w.RequestFailed) as err:
                return w.AllReduced(str(err))
        models = [
            line for line in procfs.read_text(Path("/proc/cpuinfo")).splitlines() if line.startswith("model name")
        ]
        cpu = models[0].partition(":")[2].strip() if models else platform.machine()
        request = {"seconds": step.burn_s, "on_gpu": step.on_gpu, "folder": step.folder, "cpu": cpu}
        return program.burn_in(step.program, {**self._environ, **step.env}, request)

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
        )
