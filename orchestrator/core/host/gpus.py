"""Which GPUs has this host? Those that `nvidia-smi -L` lists; where one is cut up by MIG, its parts in its place."""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import dataclass

LIST_S_MAX = 15.0
"""How long nvidia-smi may take; without persistence mode it wakes every GPU first."""

_PLACES = ("/usr/bin/nvidia-smi", "/usr/local/bin/nvidia-smi", "/usr/lib/wsl/lib/nvidia-smi")
_WHOLE = re.compile(r"GPU (\d+): (.*) \(UUID: (\S+)\)")
_PART = re.compile(r"\s+MIG (.*?)\s+Device\s+\d+: \(UUID: (\S+)\)")


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU, or one part of it. `uuid` names it on this host for good; `id` is its name in CUDA_VISIBLE_DEVICES."""

    id: str
    uuid: str
    model: str


class GpuError(Exception):
    """The host's GPUs cannot be listed."""


def here() -> tuple[Gpu, ...]:
    """List this host's GPUs. Raises GpuError when that fails, or when there is no driver."""
    program = shutil.which("nvidia-smi") or next((place for place in _PLACES if shutil.which(place)), None)
    if program is None:
        raise GpuError("there is no nvidia-smi on this host")
    try:
        done = subprocess.run(
            [program, "-L"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=LIST_S_MAX,
            check=False,
        )
    except subprocess.TimeoutExpired as err:
        raise GpuError(f"`{program} -L` has not answered for {LIST_S_MAX:.0f} s") from err
    except OSError as err:
        raise GpuError(f"`{program} -L` cannot be run: {err.strerror}") from err
    if done.returncode != 0:
        words = " ".join((done.stdout + done.stderr).split())[:300]
        raise GpuError(f"`{program} -L` ended with code {done.returncode}: {words}")
    return listed(done.stdout)


def listed(text: str) -> tuple[Gpu, ...]:
    """Return the GPUs in the output of `nvidia-smi -L`.

    Equal GPUs are called by their numbers, which every script understands. CUDA counts unequal ones fastest first and
    nvidia-smi by bus, and a MIG part has no number: then they are called by their UUIDs.
    """
    found: list[Gpu] = []
    wholes, cut = 0, False
    for line in text.splitlines():
        if whole := _WHOLE.match(line):
            found.append(Gpu(whole.group(1), whole.group(3), whole.group(2)))
            wholes += 1
        elif part := _PART.match(line):
            if found and not found[-1].uuid.startswith("MIG-"):
                found.pop()
            found.append(Gpu(part.group(2), part.group(2), f"MIG {part.group(1)}"))
            cut = True
    if cut or len({gpu.model for gpu in found}) > 1:
        return tuple(Gpu(gpu.uuid, gpu.uuid, gpu.model) for gpu in found)
    return tuple(found)
