"""Survey of a host before a launch: folder, disk, GPUs, interfaces, and the ranks' program. It leaves no files."""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
from pathlib import Path

from orchestrator.agent.bootstrap import job_folder
from orchestrator.agent.bootstrap.replies import request_failure
from orchestrator.agent.process import leases
from orchestrator.core.errors import HostError
from orchestrator.core.host import gpus, hardware, procfs
from orchestrator.core.wire import bootstrap as w
from orchestrator.core.wire.agent_config import LeaseNeeds


def survey(request: w.SurveyHost) -> w.HostSurveyed:
    """Return what this host has for a job."""
    root, reason, fix = _try_folder(request.root)
    nearest = job_folder.nearest_existing(Path(root)) if root else Path("/")
    disk = os.statvfs(nearest)
    return w.HostSurveyed(
        root=root,
        fault=reason,
        fix=fix,
        free_bytes=disk.f_bavail * disk.f_frsize,
        noexec=bool(disk.f_flag & os.ST_NOEXEC),
        cores=os.cpu_count() or 1,
        gpus=_gpus(),
        interfaces=tuple(name for _, name in socket.if_nameindex()),
        has_rsync=shutil.which("rsync") is not None,
        program=_find_program(request.programs),
        hardware=hardware.gather(os.environ),
        held=leases.list_held(
            leases.LeaseCapacity(gpus.list_gpus, os.cpu_count() or 1),
            procfs.read_text(Path("/proc/net/unix")),
        ),
    )


def lease_all(on_gpu: bool) -> leases.Leases:
    """Lease all GPUs, or all slots, until this process ends. Raises RequestFailed, which names who has some."""
    cores = os.cpu_count() or 1
    needs = LeaseNeeds(len(_gpus()) if on_gpu else 0, cores, 0)
    return leases.acquire(needs, leases.this_holder("orch check", ""), leases.LeaseCapacity(gpus.list_gpus, cores))


def _try_folder(folder: str) -> tuple[str, str, str]:
    """Return the folder's resolved path, and why it cannot be created, with the fix; empty texts for no fault."""
    try:
        root = job_folder.resolve(folder).root
    except w.RequestFailed as failure:
        return "", failure.reply.reason, failure.reply.fix
    nearest = job_folder.nearest_existing(root)
    try:
        with tempfile.TemporaryFile(dir=nearest) as file:
            file.write(bytes(job_folder.WRITE_TEST_BYTES))
    except OSError as err:
        fix = request_failure("folder", err, nearest).reply.fix
        return str(root), f"{nearest}: {(err.strerror or str(err)).lower()}", fix
    return str(root), "", ""


def _gpus() -> tuple[str, ...]:
    try:
        return tuple(f"{gpu.id}: {gpu.model}" for gpu in gpus.list_gpus())
    except HostError:
        return ()


def _find_program(programs: tuple[str, ...]) -> str:
    """Return the program that would run the ranks, empty without one. One in the code snapshot is not on the host yet."""
    for program in programs:
        if "/" in program and not program.startswith(("/", "~")):
            return program
        file = shutil.which(str(Path(program).expanduser()))
        if file is not None:
            return file
    return ""
