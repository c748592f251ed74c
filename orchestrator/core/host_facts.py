"""Facts about a host: hardware that decides the settings of ranks, and what a check gathers: resources, GPUs, and the
ranks' Python. Pure data; -1 or an empty text: unknown."""

from __future__ import annotations

from dataclasses import dataclass, field

from orchestrator.core.observations import Address

UNKNOWN = -1
UNLIMITED = 1 << 60
"""Stands for no limit."""


@dataclass(frozen=True, slots=True)
class SourceFile:
    """File of the job's code, an entry point or a module; `path` is shown to people."""

    path: str
    text: str


@dataclass(frozen=True, slots=True)
class MissingImport:
    """An import at the top of a file that the ranks' Python cannot find."""

    module: str
    file: str
    line: int


@dataclass(frozen=True, slots=True)
class ProgramFacts:
    """Facts about the ranks' Python, its torch, and the imports of the job's code."""

    # Why it could not be asked; all else is then empty
    fault: str = ""
    python: str = ""
    torch: str = ""
    # Why torch cannot be imported
    no_torch: str = ""
    cuda: str = ""
    nccl: str = ""
    # How many GPUs torch sees
    gpus: int = UNKNOWN
    # `file:line: what` of the first file that does not compile
    syntax: str = ""
    missing: tuple[MissingImport, ...] = ()
    # `file:line` where the code changes sys.path, so that what is missing may yet be found
    changes_path: str = ""


@dataclass(frozen=True, slots=True)
class GpuFacts:
    """One GPU by nvidia-smi."""

    index: str
    uuid: str
    model: str
    driver: str
    memory_mib: int
    # Uncorrected ECC errors since the driver was loaded
    ecc_errors: int
    # Why its clocks are lowered, as text
    slowdowns: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class GpuUser:
    """A process that uses a GPU."""

    pid: int
    uuid: str
    memory_mib: int
    command: str


@dataclass(frozen=True, slots=True)
class FolderFacts:
    """A folder that the job writes to; the disk is that of the nearest folder that exists."""

    path: str
    # Why it cannot be written to
    fault: str
    free_bytes: int
    # UNKNOWN where the disk does not count them
    free_inodes: int
    # The kernel does not say that it is on a disk
    may_be_memory: bool = True


@dataclass(frozen=True, slots=True)
class HostFacts:
    """Facts that a check has gathered on one node."""

    hostname: str
    kernel: str
    memory_bytes: int
    # The smallest limit of the cgroups around this process
    cgroup_bytes: int
    # Size of /dev/shm, and what is free of it
    shm_bytes: int
    shm_free_bytes: int
    # Soft limits: `ulimit -n`, `-u`, `-l`
    open_files_max: int
    processes_max: int
    locked_bytes_max: int
    has_infiniband: bool
    folders: tuple[FolderFacts, ...]
    # Names that could not be looked up, each with the reason
    unresolved: tuple[str, ...]
    gpus: tuple[GpuFacts, ...]
    gpu_users: tuple[GpuUser, ...]
    # Why nvidia-smi, which is there, does not answer
    gpu_fault: str
    # Lines of the kernel's log about failures of a GPU
    xids: tuple[str, ...]
    program: ProgramFacts | None
    # How much memory new programs have at most
    available_bytes: int = UNKNOWN


@dataclass(frozen=True, slots=True)
class Link:
    """A link to another node as one of its ends has measured it."""

    # Where the other end answers, empty where it does not
    address: str
    rtt_s: float
    # 0: not measured
    bytes_per_s: float
    # Of the rendezvous port, and of one that the kernel chose: why it is not reached, empty where it is
    faults: tuple[str, ...]

    @property
    def is_cut(self) -> bool:
        """Whether one of the ports is not reached."""
        return any(self.faults)


@dataclass(frozen=True, slots=True)
class AllReduced:
    """The end of an all-reduce, or of a round of a burn-in; an empty fault for one that ran to its end."""

    fault: str
    # Of a burn-in: each device with its torch; hosts are compared only where these are equal
    devices: tuple[str, ...] = ()
    # By part, of each device: 10^12 operations or 10^9 bytes in a second, 0 where it is not known. Of an all-reduce: of the group
    speeds: dict[str, tuple[float, ...]] = field(default_factory=dict)
    # By type, the checksums of the product of the same matrices
    sums: dict[str, tuple[str, ...]] = field(default_factory=dict)
    # What proves that the host computes or stores wrongly
    wrong: tuple[str, ...] = ()
    # What could not be tried, and tests of others that failed
    notes: tuple[str, ...] = ()
    # The share of the processors that other processes used, where they are what was measured
    busy: float = 0.0


@dataclass(frozen=True, slots=True)
class HardwareFacts:
    """Hardware of a host for ranks, and the settings in its environment."""

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
    # Variables of the host's environment that affect training, see `rank_settings.is_watched`
    environ: dict[str, str] = field(default_factory=dict)


def find_memory_shortage(
    memory_bytes: int, nodes: int, memory_dir: str, folder_bytes: int, host_bytes: int, *cgroups_bytes: int
) -> str:
    """Return why the checkpoints of so many nodes do not fit into the memory of their host; empty where they do.

    `folder_bytes`: what is free in `memory_dir`; `host_bytes`: of the host's memory; `cgroups_bytes`: in the limits of cgroups.
    """
    wanted = f"checkpoint.memory is {gigabytes(memory_bytes)}" + f" on each of {nodes} nodes" * (nodes > 1)
    rooms = [(folder_bytes, f"{memory_dir} has"), (host_bytes, "free memory of the host is")]
    for free_bytes, what in (*rooms, (min(cgroups_bytes, default=UNKNOWN), "the job's cgroup has room for")):
        if UNKNOWN != free_bytes < memory_bytes * nodes:
            return f"{wanted}, {what} {gigabytes(free_bytes)}"
    return ""


def gigabytes(size_bytes: int) -> str:
    """Return a size as `64.0 GB`, or `0.06 GB`."""
    return f"{size_bytes / 1e9:.{1 if size_bytes >= 10**9 else 2}f} GB"
