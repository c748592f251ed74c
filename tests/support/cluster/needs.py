"""What does this machine lack for a cluster in a box? One line that says it, or nothing."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
from collections.abc import Mapping

COMMANDS = {
    "sshd": "openssh-server",
    "ssh": "openssh-client",
    "ip": "iproute2",
    "nft": "nftables",
    "rsync": "rsync",
    "unshare": "util-linux",
    "nsenter": "util-linux",
    "setpriv": "util-linux",
}
"""The programs, each with the Debian package it is in."""

SLURM = {
    "slurmctld": "slurm-wlm",
    "slurmd": "slurm-wlm",
    "sbatch": "slurm-wlm",
    "srun": "slurm-wlm",
    "munged": "munge",
}
ACCOUNTING = {"slurmdbd": "slurmdbd", "mariadbd": "mariadb-server", "mariadb-install-db": "mariadb-server"}

SBIN = "/usr/local/sbin:/usr/sbin:/sbin"
TRY_S_MAX = 20.0
NAMESPACES = ("--net", "--uts", "--ipc", "--mount", "--pid", "--fork", "--kill-child")


@functools.cache
def missing() -> str | None:
    """Return what is missing, or None when hosts can be made here."""
    if os.geteuid() != 0:
        return "a cluster in a box needs root"
    lacking = _lacking("a cluster in a box", COMMANDS)
    if lacking:
        return lacking
    script = "mount -t tmpfs tmpfs /mnt && mount -t proc proc /proc && ip link add name a type veth peer name b"
    tried = subprocess.run(
        ["unshare", *NAMESPACES, "sh", "-c", f"{script} && nft add table bridge t"],
        env={**os.environ, "PATH": _path()}, capture_output=True, text=True, timeout=TRY_S_MAX, check=False,
    )  # fmt: skip
    if tried.returncode != 0:
        return f"a cluster in a box needs namespaces, mounts, veth and nft: {tried.stderr.strip() or 'refused'}"
    return None


def missing_slurm(*, accounting: bool = False) -> str | None:
    """Return what is missing for a Slurm on a cluster in a box, or None; `accounting`: and for sacct."""
    wanted = {**SLURM, **ACCOUNTING} if accounting else SLURM
    return missing() or _lacking("a Slurm in a box", wanted)


def _lacking(what: str, commands: Mapping[str, str]) -> str | None:
    absent = [command for command in commands if shutil.which(command, path=_path()) is None]
    if not absent:
        return None
    packages = sorted({commands[command] for command in absent})
    return f"{what} needs {', '.join(absent)}: apt install {' '.join(packages)}"


def _path() -> str:
    return f"{os.environ.get('PATH', '')}:{SBIN}"
