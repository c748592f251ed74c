"""A torch that a check of hosts can import in no time: a sum over sockets in the place of gloo's."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from .host import Host

EXTRA = "/home/trainer/extra"
"""A folder for the ranks' PYTHONPATH on each host."""

MEETING = """
import socket, time

def init_process_group(backend, init_method, rank, world_size, timeout):
    host, port = init_method[6:].split(":")
    globals().update(rank=rank, world=world_size, peers=[])
    if rank == 0:
        with socket.create_server((host, int(port))) as listener:
            listener.settimeout(timeout.total_seconds())
            peers.extend(listener.accept()[0] for _ in range(world_size - 1))
        return
    for _ in range(300):
        try:
            peers.append(socket.create_connection((host, int(port)), timeout=timeout.total_seconds()))
            return
        except ConnectionRefusedError:
            time.sleep(0.05)
    raise RuntimeError("no rank 0")

def all_reduce(ones):
    if rank:
        peers[0].sendall(b".")
    for peer in peers:
        if not peer.recv(1):
            raise RuntimeError("Connection closed by peer")
    if not rank:
        for peer in peers:
            peer.sendall(b".")
    ones.value *= world

def barrier():
    pass

def destroy_process_group():
    for peer in peers:
        peer.close()
"""
TORCH = {
    "torch/__init__.py": """
__version__ = "2.13.0"
class version:
    cuda = hip = None
class cuda:
    is_available = device_count = staticmethod(lambda: 0)
class ones:
    def __init__(self, n, device):
        self.n, self.value = n, 1
    def sum(self):
        return self.n * self.value
""",
    "torch/distributed.py": MEETING,
}
"""What a check needs of torch: the real one takes seconds to import, on each host."""


def write(folder: Path) -> dict[str, str]:
    """Write the small torch into a folder of this machine, and return the environment of ranks in which it is found."""
    for name, text in TORCH.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return {"PYTHONPATH": str(folder)}


def install(hosts: Iterable[Host]) -> dict[str, str]:
    """Write the small torch on hosts, and return the environment of ranks in which it is found."""
    for host in hosts:
        for name, text in TORCH.items():
            host.write(f"{EXTRA}/{name}", text, user="trainer")
    return {"PYTHONPATH": EXTRA}
