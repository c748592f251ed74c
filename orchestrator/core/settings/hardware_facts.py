"""Facts about a host from which settings of ranks follow. Pure data; `core.host.hardware` gathers them."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class RdmaPort:
    """One port of an InfiniBand or RoCE device, as /sys/class/infiniband shows it."""

    # Such as mlx5_0
    device: str
    port: int
    # `ACTIVE`, `DOWN`, `INIT`, `ARMED`
    state: str
    # Such as `400 Gb/sec (4X NDR)`
    rate: str
    # The link layer is Ethernet
    roce: bool


@dataclass(frozen=True, slots=True)
class NetInterface:
    """A network interface that is up and has an IPv4 address. `speed_mbit_s`: 0 where the driver does not tell."""

    name: str
    address: str
    speed_mbit_s: int


@dataclass(frozen=True, slots=True)
class HardwareFacts:
    """What a host has for ranks, and what its environment sets already."""

    # Logical CPUs that the process may run on, and the physical cores among them
    cpus: int = 1
    cores: int = 1
    # How much processor time the cgroup allows, in CPUs; None: no limit
    quota_cpus: float | None = None
    # The CPUs that Slurm has given the job on this node, None outside of Slurm
    slurm_cpus: int | None = None
    # Their addresses on the PCI bus
    gpus: tuple[str, ...] = ()
    # How the GPUs are connected, in words; empty where that was not asked
    gpu_links: str = ""
    rdma: tuple[RdmaPort, ...] = ()
    interfaces: tuple[NetInterface, ...] = ()
    # Those variables of the host's environment that bear on training, see `rank_settings.is_watched`
    environ: dict[str, str] = field(default_factory=dict)
