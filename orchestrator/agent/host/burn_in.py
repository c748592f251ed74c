"""One round of a burn-in of this host, run by the ranks' own Python and torch (3.8 or newer), on all devices at once.

The matrices hold whole numbers from -8 to 8, so each sum in a product is exact in float32, in any order and on any hardware;
in float32 so is the result. It reads one JSON object from standard input, and prints one as its last line.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import os
import platform
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from pathlib import Path
from typing import Any

GPU_SIZE, CPU_SIZE = 8192, 1024
"""Rows and columns of the matrices."""

PART_S = 0.5
"""How long one part is repeated, before the next part follows."""

SAMPLES_MIN = 3
"""With fewer repetitions of a part it has no speed."""

GPU_SPARE_BYTES = 4 << 30
COPY_BYTES = CPU_MEMORY_BYTES = 256 << 20
DISK_BYTES, DISK_SPARE_BYTES = 64 << 20, 1 << 30
CHUNK_WORDS = 1 << 26
PATTERNS = (0x5555555555555555, 0x2AAAAAAAAAAAAAAA)


class Matrices:
    """Two matrices, made without a random generator, and the exact checksum of their product."""

    def __init__(self, torch: Any, size: int) -> None:
        self.torch, self.size = torch, size
        self.weights = torch.arange(size) % 251 + 1
        self.left, self.right = (self._make(seed) for seed in (1, 2))
        rows = (self.left.to(torch.int64) * self.weights[:, None]).sum(0)
        self.exact = int((rows * (self.right.to(torch.int64) * self.weights).sum(1)).sum())

    def _make(self, seed: int) -> Any:
        values = self.torch.arange(self.size * self.size) * 2654435761 + seed * 40503
        return (((values ^ (values >> 15)) >> 3) % 17 - 8).to(self.torch.int8).view(self.size, self.size)

    def checksum(self, product: Any) -> int:
        """Return the sum of all elements, each with a weight of its place, modulo 2^64."""
        weights, total = self.weights.to(product.device), product.to(self.torch.int64)
        return int(total.mul_(weights[:, None]).mul_(weights).sum())


class Device:
    """One device: its speeds by part, the checksums of its products, what proves it wrong, and what could not be tried."""

    def __init__(self, matrices: Matrices, name: str, folder: str) -> None:
        self.samples: dict[str, list[float]] = {}
        self.sums: dict[str, int] = {}
        self.wrong: set[str] = set()
        self.notes: set[str] = set()
        self._matrices, self._torch, self.name, self._on_gpu = matrices, matrices.torch, name, name != "cpu"
        self._label = f"GPU {name[5:]}: " if self._on_gpu else ""
        self._parts = {
            **{kind: self._products(kind) for kind in ("float32", "bfloat16", "float16")[: 3 if self._on_gpu else 2]},
            "memory": self._memory(),
            **({"copies": self._copies()} if self._on_gpu else {}),
            **({"disk": self._disk(Path(folder).expanduser())} if folder else {}),
        }

    def run(self, seconds: float) -> None:
        """Take turns at all parts for so long; a part that fails proves nothing, and is left out from then on."""
        end_s = time.monotonic() + seconds
        while self._parts:
            for name, part in list(self._parts.items()):
                try:
                    next(part, None)
                except Exception as err:
                    self.notes.add(f"{self._label}{name} cannot be tried: {describe(err)}")
                    del self._parts[name]
            if time.monotonic() > end_s:
                return

    def _time(self, part: str, amount: float, *works: Callable[[], Any], least_s: float = PART_S) -> None:
        """Repeat some works; note how much of the amount was done each second."""
        began_s, count = time.monotonic(), 0
        while not count or time.monotonic() - began_s < least_s:
            for work in works:
                work()
            if self._on_gpu:
                self._torch.cuda.synchronize(self.name)
            count += 1
        self.samples.setdefault(part, []).append(amount * count / (time.monotonic() - began_s))

    def _products(self, kind: str) -> Iterator[None]:
        dtype, batch = getattr(self._torch, kind), 8 if self._on_gpu else 1
        left, right = (one.to(self.name).to(dtype) for one in (self._matrices.left, self._matrices.right))
        product = self._torch.matmul(left, right)  # its first use takes longer
        work = 2e-12 * self._matrices.size**3 * batch
        while True:
            self._time(kind, work, *[functools.partial(self._torch.matmul, left, right, out=product)] * batch)
            checksum = self._matrices.checksum(product)
            if self.sums.setdefault(kind, checksum) != checksum:
                self.wrong.add(f"{self._label}products of the same {kind} matrices have different checksums")
            if kind == "float32" and checksum != self._matrices.exact:
                self.wrong.add(f"{self._label}a float32 product is not the exact one")
            yield

    def _memory(self) -> Iterator[None]:
        free = self._torch.cuda.mem_get_info(self.name)[0] if self._on_gpu else 0
        words = max(CPU_MEMORY_BYTES, int((free - GPU_SPARE_BYTES) * 0.9)) // 16
        halves = [self._torch.zeros(words, dtype=self._torch.int64, device=self.name) for _ in range(2)]
        for pattern in itertools.cycle(PATTERNS):
            halves[0].fill_(pattern)
            self._time("memory", 16e-9 * words, lambda: halves[1].copy_(halves[0]))
            if any(bool((part != pattern).any()) for half in halves for part in half.split(CHUNK_WORDS)):
                self.wrong.add(f"{self._label}memory does not hold what was written to it")
            yield

    def _copies(self) -> Iterator[None]:
        here, back = (self._torch.zeros(COPY_BYTES // 8, dtype=self._torch.int64).pin_memory() for _ in range(2))
        there = here.to(self.name)
        for pattern in itertools.cycle(PATTERNS):
            here.fill_(pattern)
            self._time("host to device", COPY_BYTES / 1e9, lambda: there.copy_(here), least_s=PART_S / 2)
            self._time("device to host", COPY_BYTES / 1e9, lambda: back.copy_(there), least_s=PART_S / 2)
            if not self._torch.equal(here, back):
                self.wrong.add(f"{self._label}bytes copied to the GPU and back are not the same")
            yield

    def _disk(self, path: Path) -> Iterator[None]:
        """Write files to the nearest folder that exists; a disk that is full, or closed to this user, has no speed."""
        data = os.urandom(DISK_BYTES)
        with contextlib.suppress(OSError):
            while not path.exists():
                path = path.parent
            for _ in range(SAMPLES_MIN if shutil.disk_usage(path).free > DISK_SPARE_BYTES else 0):
                with tempfile.TemporaryFile(dir=path) as file:
                    sync = functools.partial(os.fsync, file.fileno())
                    self._time(
                        "disk", DISK_BYTES / 1e9, functools.partial(file.write, data), file.flush, sync, least_s=0
                    )
                yield


def describe(err: BaseException) -> str:
    """Return an error in one short line."""
    return f"{type(err).__name__}: {(str(err).strip().splitlines() or [''])[0]}"[:200]


def upper_quartile(samples: list[float]) -> float:
    """Return what a quarter of the repetitions has reached, whatever has disturbed a few; 0 for too few of them."""
    return sorted(samples)[len(samples) * 3 // 4] if len(samples) >= SAMPLES_MIN else 0.0


def processor_times() -> tuple[int, int]:
    """Return for how long the processors have been, and for how long others than this process have used them, in ticks."""
    times = [int(word) for word in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    own = time.process_time() * os.sysconf("SC_CLK_TCK")
    return sum(times), sum(times) - times[3] - times[4] - int(own)


def burn(request: dict[str, Any]) -> dict[str, Any]:
    """Burn in all devices at once for a while, and return what came of it."""
    import torch

    for setting in ("allow_bf16_reduced_precision_reduction", "allow_fp16_reduced_precision_reduction"):
        with contextlib.suppress(Exception):
            setattr(torch.backends.cuda.matmul, setting, False)
    count = torch.cuda.device_count() if request["on_gpu"] else 0
    matrices = Matrices(torch, GPU_SIZE if count else CPU_SIZE)
    names = [f"cuda:{index}" for index in range(count)] or ["cpu"]
    devices = [Device(matrices, name, "" if at else request["folder"]) for at, name in enumerate(names)]
    began, others_began = processor_times()
    with futures.ThreadPoolExecutor(len(devices)) as pool:
        list(pool.map(lambda one: one.run(request["seconds"]), devices))
    ended, others_ended = processor_times()
    _, _, text = Path("/proc/cpuinfo").read_text(errors="replace").partition("model name")
    model = text.partition(":")[2].splitlines()[0].strip() if text else platform.machine()
    capability = getattr(getattr(torch.backends, "cpu", None), "get_cpu_capability", str)()
    cpu = f"{model} {capability}, {torch.get_num_threads()} threads"
    return {
        "devices": [
            f"{torch.cuda.get_device_name(one.name) if count else cpu}, torch {torch.__version__}" for one in devices
        ],
        "speeds": {
            part: [upper_quartile(each.samples.get(part, [])) for each in devices]
            for one in devices
            for part in one.samples
        },
        "sums": {
            kind: sorted({f"{each.sums[kind]:x}" for each in devices if kind in each.sums})
            for one in devices
            for kind in one.sums
        },
        "busy": 0.0 if count else (others_ended - others_began) / max(1, ended - began),
        "wrong": sorted(text for one in devices for text in one.wrong),
        "notes": sorted(text for one in devices for text in one.notes),
    }


def main() -> None:
    """Run one round."""
    request = json.loads(sys.stdin.read())
    try:
        result = burn(request)
    except BaseException as err:
        result = {"fault": describe(err)}
    print("\n" + json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
