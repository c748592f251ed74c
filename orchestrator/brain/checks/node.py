"""Check of one node: its resources, its GPUs, its Python and torch, and the job's code under that Python."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from orchestrator.brain.checks.finding import Finding, error, format_size, warning
from orchestrator.core.host_facts import (
    UNKNOWN,
    UNLIMITED,
    FolderFacts,
    HostFacts,
    ProgramFacts,
    find_memory_shortage,
)

KERNEL_MIN = (5, 5)
"""Accelerate warns that older kernels can make a job hang."""

SHM_BYTES_MIN = 256 << 20
"""Workers of a DataLoader hand their batches over in /dev/shm, and NCCL keeps its buffers there; containers get 64 MiB."""

OPEN_FILES_MIN = 1024
PROCESSES_MIN = 1024
RANK_BYTES_MIN = 1 << 30
"""Memory that a rank needs for torch alone, and something."""

INODES_MIN = 1000
CHECKPOINTS_ON_DISK = 2
"""A new checkpoint is written before the previous one is deleted."""

CLOCK_S_MAX = 5.0
"""Clocks that differ by more make logs and files of several nodes hard to compare."""

MISSING_SHOWN_MAX = 5


@dataclass(frozen=True, slots=True)
class JobNeeds:
    """What a job needs from each node; `has_setup`: its setup lines may still install what is missing."""

    ranks_each: int
    gpus_each: int
    has_setup: bool
    # Size of its last checkpoint, UNKNOWN without one
    checkpoint_bytes: int
    # How much of its memory checkpoints take, and in which folder; 0: none
    memory_bytes: int = 0
    memory_dir: str = ""


def findings(name: str, facts: HostFacts, job: JobNeeds) -> Iterator[Finding]:
    """Yield what is wrong with a node, errors of one kind before the next."""
    if facts.program is not None:
        yield from _program(name, facts.program, facts, job)
    for folder in facts.folders:
        is_memory = folder.path == job.memory_dir
        yield from (_memory(name, folder, facts, job) if is_memory else _folder(name, folder, job))
    yield from _resources(name, facts, job)
    yield from _gpus(name, facts)


def check_clock(name: str, offset_s: float, uncertainty_s: float) -> Iterator[Finding]:
    """Yield a clock that differs from this machine's by more than `CLOCK_S_MAX`, beyond the uncertainty of the round trip."""
    if abs(offset_s) - uncertainty_s > CLOCK_S_MAX:
        found = f"its clock is {abs(offset_s):.0f} s {'ahead' if offset_s > 0 else 'behind'}"
        yield warning("clock", [name], found, "synchronize it with chrony or systemd-timesyncd")


def _program(name: str, program: ProgramFacts, facts: HostFacts, job: JobNeeds) -> Iterator[Finding]:
    if program.fault:
        fix = "try it by hand, or name another interpreter in python:"
        yield error("python", [name], f"the ranks' Python cannot be used: {program.fault}", fix)
        return
    yield from check_code(name, program, job.has_setup)
    visible = program.gpus
    if job.gpus_each and program.torch and UNKNOWN != visible < len(facts.gpus):
        found = f"torch {program.torch} sees {visible} of {len(facts.gpus)} GPUs"
        yield error("gpus", [name], found, "install a torch that is built for this driver's CUDA")


def check_code(name: str, program: ProgramFacts, has_setup: bool) -> Iterator[Finding]:
    """Yield what the ranks' Python says of the job's code. What setup lines or the code itself may still provide, when it
    is missing, is no error."""
    if program.syntax:
        yield error("script", [name], program.syntax, f"fix the script, or use another Python than {program.python}")
    for missing in program.missing[:MISSING_SHOWN_MAX]:
        found = f"{missing.file}:{missing.line}: no module named {missing.module}"
        if has_setup:
            fix = "make sure that the setup lines provide it (a check does not run them)"
            yield warning("import", [name], f"{found}, before the setup lines", fix)
        elif program.changes_path:
            fix = "make sure that it is on that path"
            yield warning("import", [name], f"{found}, unless {program.changes_path} makes it importable", fix)
        else:
            fix = "install it there, or name another interpreter in python:"
            yield error("import", [name], found, fix)


def _folder(name: str, folder: FolderFacts, job: JobNeeds) -> Iterator[Finding]:
    if folder.fault:
        fix = "make it writable for this user, or name another place: ORCH_HOME, over SSH ssh.remote_dir, or checkpoint.path"
        yield error("folder", [name], f"{folder.path} cannot be written to: {folder.fault}", fix)
        return
    needed_bytes = job.checkpoint_bytes * CHECKPOINTS_ON_DISK
    if UNKNOWN != folder.free_bytes < needed_bytes:
        found = (
            f"{format_size(folder.free_bytes)} free in {folder.path}, and the last checkpoint had {format_size(job.checkpoint_bytes)} "
            f"({format_size(needed_bytes)} are needed while it is replaced)"
        )
        yield warning("disk", [name], found, "free some space there, or name a larger disk")
    if UNKNOWN != folder.free_inodes < INODES_MIN:
        found = f"{folder.free_inodes} more files fit into {folder.path}: its disk is out of inodes"
        yield warning("disk", [name], found, "remove files there, or name another disk")


def _memory(name: str, folder: FolderFacts, facts: HostFacts, job: JobNeeds) -> Iterator[Finding]:
    """Yield why checkpoints cannot be in the node's memory."""
    free = (folder.free_bytes, facts.available_bytes)
    fault = folder.fault or find_memory_shortage(job.memory_bytes, 1, folder.path, *free)
    if fault:
        fix = "lower checkpoint.memory, free some memory there, or name another folder in checkpoint.memory_dir"
        yield warning("memory", [name], f"checkpoints would be written to disk: {fault}", fix)
    elif not folder.may_be_memory:
        yield warning(
            "memory",
            [name],
            f"{folder.path} is on a disk: checkpoints there are not in memory",
            "name a tmpfs in checkpoint.memory_dir, such as /dev/shm",
        )


def _resources(name: str, facts: HostFacts, job: JobNeeds) -> Iterator[Finding]:
    """Yield what is too old or too small; the first part of each row is the condition."""
    kernel, shm, free = _version(facts.kernel), facts.shm_bytes, facts.shm_free_bytes
    has_little_shm = UNKNOWN != shm < SHM_BYTES_MIN
    cgroup_min = min(job.ranks_each * RANK_BYTES_MIN, facts.memory_bytes)
    limits = "raise it in /etc/security/limits.conf there, and log in again"
    rows = (
        (
            kernel is not None and kernel < KERNEL_MIN, "kernel",
            f"its kernel {facts.kernel} is older than 5.5, with which Accelerate has seen jobs hang",
            "install a newer kernel",
        ), (
            has_little_shm, "shm",
            f"/dev/shm has {format_size(shm)}: workers of a DataLoader hand batches over there",
            "enlarge it (in a container: --shm-size=8g), or use num_workers=0",
        ), (
            not has_little_shm and UNKNOWN != free < SHM_BYTES_MIN, "shm",
            f"/dev/shm has {format_size(free)} free of {format_size(shm)}",
            "remove what earlier jobs have left there: ls -l /dev/shm",
        ), (
            UNKNOWN != facts.cgroup_bytes < cgroup_min, "memory",
            f"a cgroup limits its memory to {format_size(facts.cgroup_bytes)}, for {job.ranks_each} ranks",
            "raise the limit of the user's slice or container",
        ), (
            facts.open_files_max < OPEN_FILES_MIN, "ulimit",
            f"a process may open only {facts.open_files_max} files (ulimit -n)", limits,
        ), (
            facts.processes_max < PROCESSES_MIN, "ulimit",
            f"the user may have only {facts.processes_max} processes and threads (ulimit -u)", limits,
        ), (
            facts.has_infiniband and facts.locked_bytes_max < UNLIMITED, "ulimit",
            f"a process may lock only {format_size(facts.locked_bytes_max)} of memory (ulimit -l), which InfiniBand needs",
            limits,
        ), (
            bool(facts.unresolved), "names",
            f"names that it cannot look up: {'; '.join(facts.unresolved)}",
            "add them to its /etc/hosts: gloo and torch look up the host's own name",
        ),
    )  # fmt: skip
    yield from (warning(what, [name], found, fix) for holds, what, found, fix in rows if holds)


def _gpus(name: str, facts: HostFacts) -> Iterator[Finding]:
    if facts.gpu_fault:
        yield error("gpus", [name], facts.gpu_fault, "see why with nvidia-smi there, or reload the driver")
    yield from (warning("gpus", [name], found, fix) for found, fix in _gpu_faults(facts))


def _gpu_faults(facts: HostFacts) -> Iterator[tuple[str, str]]:
    """Yield what is wrong with single GPUs, and the fix."""
    indices = {gpu.uuid: gpu.index for gpu in facts.gpus}
    for user in facts.gpu_users:
        who = f"pid {user.pid}" + (f" ({user.command})" if user.command else "")
        finding = f"GPU {indices.get(user.uuid, user.uuid)}: {who} uses {max(user.memory_mib, 0)} MiB"
        yield finding, "wait for it, end it, or use other GPUs by CUDA_VISIBLE_DEVICES"
    for gpu in facts.gpus:
        which = f"GPU {gpu.index} ({gpu.model})"
        if gpu.ecc_errors > 0:
            finding = f"{which} has {gpu.ecc_errors} uncorrected ECC errors since its driver was loaded"
            yield finding, "reset the GPU (nvidia-smi -r) or reboot; if they come back, replace it"
        for why in gpu.slowdowns:
            finding = f"{which} runs at lowered clocks: {why}"
            yield finding, "see nvidia-smi -q -d PERFORMANCE; check cooling and power"
    if facts.xids:
        finding = f"its kernel reports failures of a GPU, the last one: {facts.xids[-1]}"
        yield finding, "look the Xid up in NVIDIA's list; most want a reset or a reboot"


def _version(kernel: str) -> tuple[int, int] | None:
    """Return the first two numbers of a kernel's release, None where there are none."""
    match = re.match(r"([0-9]+)\.([0-9]+)", kernel)
    return (int(match[1]), int(match[2])) if match else None
