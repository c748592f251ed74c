"""What does this machine lack for a cluster in a box? One line that says it, or nothing."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess

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

SBIN = "/usr/local/sbin:/usr/sbin:/sbin"
TRY_S_MAX = 20.0
NAMESPACES = ("--net", "--uts", "--ipc", "--mount", "--pid", "--fork", "--kill-child")


@functools.cache
def missing() -> str | None:
    """Return what is missing, or None when hosts can be made here."""
    if os.geteuid() != 0:
        return "a cluster in a box needs root"
    path = f"{os.environ.get('PATH', '')}:{SBIN}"
    lacking = [command for command in COMMANDS if shutil.which(command, path=path) is None]
    if lacking:
        packages = sorted({COMMANDS[command] for command in lacking})
        return f"a cluster in a box needs {', '.join(lacking)}: apt install {' '.join(packages)}"
    script = (
        "mount -t tmpfs tmpfs /mnt && mount -t proc proc /proc && ip link add name a type veth peer name b"
    )
    tried = subprocess.run(
        ["unshare", *NAMESPACES, "sh", "-c", f"{script} && nft add table bridge t"],
        env={**os.environ, "PATH": path}, capture_output=True, text=True, timeout=TRY_S_MAX, check=False,
    )  # fmt: skip
    if tried.returncode != 0:
        return (
            f"a cluster in a box needs namespaces, mounts, veth and nft: {tried.stderr.strip() or 'refused'}"
        )
    return None
