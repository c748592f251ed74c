"""Configuration that an agent is started with."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LeaseNeeds:
    """Resources that an agent must lease of its host before it starts: GPUs, or slots. All 0: nothing, as on backend local."""

    gpus: int
    slots: int
    # How many slots the host has, 0: as many as cores
    host_slots: int


@dataclass(frozen=True, slots=True)
class AgentConfig:
    """Configuration of an agent at its start, as JSON on its standard input: nothing of it shows in argv."""

    job: str
    # Empty where one text goes to many nodes, and each knows its own name
    node: str
    root: str
    token: str
    certificate: str
    address: str
    heartbeat_s: float
    # How long its loop may stall before its agent monitor replaces it
    node_timeout_s: float
    # How long it runs without contact until a `Fence` sets another time; None: forever, on the supervisor's own machine
    fence_s: float | None
    checkpoint_glob: str
    finds_checkpoints: bool
    ships: bool
    needs: LeaseNeeds
    # The GPUs that its agent monitor has leased; only the monitor fills them in
    gpus: tuple[str, ...] = ()
    # By which the processes of the job on this node are known; only the agent monitor fills it in
    tag: str = ""
    # It runs in a Slurm step. Slurm signals all processes of a job when it takes the nodes: TERM is not for the agent then
    allocated: bool = False
    # How long it runs without contact if its ranks have made steps for long; never less than `fence_s`
    disconnected_timeout_s: float = 0.0
    # How much of the host's memory its checkpoints may take, 0: they are written to disk; and the folder for them
    memory_bytes: int = 0
    memory_dir: str = ""
    # The key and certificate of the agents among themselves, as PEM
    peer_key: str = ""
    peer_certificate: str = ""
    # Limit on copies between agents, None: not limited
    copy_mb_s: float | None = None
