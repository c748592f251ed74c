"""GPUs of this host, by nvidia-smi: those that `nvidia-smi -L` lists; a GPU that MIG partitions counts as its parts."""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import dataclass

from orchestrator.core.errors import HostError

LIST_S_MAX = 15.0
"""How long nvidia-smi may take: without persistence mode it wakes every GPU first."""

LINE_CHARS_MAX = 300

GOOD_CODES = (0, 14)
"""Exit codes of nvidia-smi with an answer. 14: it warns of a damaged infoROM, with which a GPU computes as ever."""

_PLACES = ("/usr/bin/nvidia-smi", "/usr/local/bin/nvidia-smi", "/usr/lib/wsl/lib/nvidia-smi")
_WHOLE = re.compile(r"GPU (\d+): (.*) \(UUID: (\S+)\)")
_PART = re.compile(r"\s+MIG (.*?)\s+Device\s+\d+: \(UUID: (\S+)\)")


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU, or one MIG part of a GPU. `uuid` never changes on this host; `id` is its name in CUDA_VISIBLE_DEVICES."""

    id: str
    uuid: str
    model: str


def find_nvidia_smi(path: str | None = None) -> str | None:
    """Return where nvidia-smi is: in PATH or where drivers put it; with `path`, in that PATH only. None where it is not
    found."""
    usual = _PLACES if path is None else ()
    return shutil.which("nvidia-smi", path=path) or next((place for place in usual if shutil.which(place)), None)


def run_nvidia_smi(tool: str, *options: str, limit_s: float) -> subprocess.CompletedProcess[str]:
    """Run nvidia-smi. Raises HostError when it cannot be run or does not end in time; an exit code is the caller's."""
    command_text = f"`{tool} {' '.join(options)}`"
    try:
        return subprocess.run(
            [tool, *options], stdin=subprocess.DEVNULL, capture_output=True, encoding="utf-8", errors="replace",
            timeout=limit_s, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired as err:
        raise HostError(f"{command_text} has not answered for {limit_s:g} s") from err
    except OSError as err:
        raise HostError(f"{command_text} cannot be run: {err.strerror}") from err


def output_line(done: subprocess.CompletedProcess[str]) -> str:
    """Return what nvidia-smi has printed, in one line of at most `LINE_CHARS_MAX` characters."""
    return " ".join((done.stdout + done.stderr).split())[:LINE_CHARS_MAX]


def parse_csv(text: str) -> list[list[str]]:
    """Return the rows of a table that nvidia-smi prints (`--format=csv`), each as its cells."""
    return [[cell.strip() for cell in line.split(",")] for line in text.splitlines()]


def list_gpus() -> tuple[Gpu, ...]:
    """List this host's GPUs. Raises HostError when that fails, or when there is no driver."""
    tool = find_nvidia_smi()
    if tool is None:
        raise HostError("there is no nvidia-smi on this host")
    done = run_nvidia_smi(tool, "-L", limit_s=LIST_S_MAX)
    if done.returncode not in GOOD_CODES:
        raise HostError(f"`{tool} -L` ended with code {done.returncode}: {output_line(done)}")
    return parse_gpu_list(done.stdout)


def parse_gpu_list(text: str) -> tuple[Gpu, ...]:
    """Return the GPUs in the output of `nvidia-smi -L`.

    Equal GPUs are named by their numbers, which every script understands. CUDA counts unequal ones fastest first and
    nvidia-smi by bus, and a MIG part has no number: then they are named by their UUIDs.
    """
    gpus: list[Gpu] = []
    wholes, cut = 0, False
    for line in text.splitlines():
        if whole := _WHOLE.match(line):
            gpus.append(Gpu(whole.group(1), whole.group(3), whole.group(2)))
            wholes += 1
        elif part := _PART.match(line):
            if gpus and not gpus[-1].uuid.startswith("MIG-"):
                gpus.pop()
            gpus.append(Gpu(part.group(2), part.group(2), f"MIG {part.group(1)}"))
            cut = True
    if cut or len({gpu.model for gpu in gpus}) > 1:
        return tuple(Gpu(gpu.uuid, gpu.uuid, gpu.model) for gpu in gpus)
    return tuple(gpus)
