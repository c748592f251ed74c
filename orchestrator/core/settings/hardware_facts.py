"""Facts about a host from which settings of ranks follow. Pure data; `core.host.hardware` gathers them."""

from __future__ import annotations

from dataclasses import dataclass, field

from orchestrator.core.observations import Address


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
    # Of interfaces that are up
    interfaces: tuple[Address, ...] = ()
    # Those variables of the host's environment that bear on training, see `rank_settings.is_watched`
    environ: dict[str, str] = field(default_factory=dict)
