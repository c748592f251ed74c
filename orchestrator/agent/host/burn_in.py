"""One round of a burn-in of this host, run by the ranks' own Python and torch (3.8 or newer), on all devices at once.

The matrices hold whole numbers from -8 to 8, so each sum in a product is exact in float32, in any order and on any hardware;
in float32 so is the result. It reads one JSON object from standard input, and prints one as its last line.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from typing import Any

GPU_SIZE, CPU_SIZE = 8192, 1024
"""Rows and columns of the matrices."""

PART_S = 0.5
"""How long one part is repeated, before the next part follows."""

GPU_SPARE_BYTES = 4 << 30
COPY_BYTES = 256 << 20
CPU_MEMORY_BYTES = 256 << 20
DISK_BYTES = 64 << 20
DISK_SPARE_BYTES = 1 << 30
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


class DeviceRound:
    """The round of one device: its speeds by part, the checksums of its products, and what went wrong."""

    def __init__(self, matrices: Matrices, device: str, folder: str) -> None:
        self.device, self.folder = device, folder
        self.samples: dict[str, list[float]] = {}
        self.sums: dict[str, int] = {}
        self.wrong: list[str] = []
        self._matrices, self._torch = matrices, matrices.torch
        self._on_gpu = device != "cpu"

    def run(self, seconds: float) -> None:
        """Repeat all parts for so long; an error of the device is a result."""
        end_s = time.monotonic() + seconds
        try:
            self._measure_disk()
            kinds = ("float32", "bfloat16", "float16") if self._on_gpu else ("float32", "bfloat16")
            factors = {kind: self._factors(kind) for kind in kinds}
            halves = self._halves()
            while True:
                for kind, pair in factors.items():
                    self._multiply(kind, *pair)
                self._fill_memory(*halves)
                if self._on_gpu:
                    self._copy()
                if time.monotonic() > end_s:
                    return
        except Exception as err:
            self._note(f"{type(err).__name__}: {(str(err).strip().splitlines() or [''])[0]}"[:200])

    def _note(self, text: str) -> None:
        name = f"GPU {self.device.split(':')[1]}: " if self._on_gpu else ""
        if name + text not in self.wrong:
            self.wrong.append(name + text)

    def _time(self, name: str, amount: float, work: Callable[[], Any], least_s: float = PART_S) -> None:
        """Repeat some work; note how much of the amount was done each second."""
        began_s, count = time.monotonic(), 0
        while not count or time.monotonic() - began_s < least_s:
            work()
            if self._on_gpu:
                self._torch.cuda.synchronize(self.device)
            count += 1
        self.samples.setdefault(name, []).append(amount * count / (time.monotonic() - began_s))

    def _factors(self, kind: str) -> Any:
        dtype = getattr(self._torch, kind)
        pair = [one.to(self.device).to(dtype) for one in (self._matrices.left, self._matrices.right)]
        self._torch.matmul(*pair)  # its first use takes longer
        return pair

    def _multiply(self, kind: str, left: Any, right: Any) -> None:
        product = self._torch.empty_like(left)
        work = 2.0 * self._matrices.size**3 / 1e12
        batch = 8 if self._on_gpu else 1

        def multiply() -> None:
            for _ in range(batch):
                self._torch.matmul(left, right, out=product)

        self._time(kind, work * batch, multiply)
        checksum = self._matrices.checksum(product)
        if self.sums.setdefault(kind, checksum) != checksum:
            self._note(f"products of the same {kind} matrices have different checksums")
        if kind == "float32" and checksum != self._matrices.exact:
            self._note("a float32 product is not the exact one")

    def _halves(self) -> Any:
        n_bytes = CPU_MEMORY_BYTES
        if self._on_gpu:
            n_bytes = max(n_bytes, int((self._torch.cuda.mem_get_info(self.device)[0] - GPU_SPARE_BYTES) * 0.9))
        shape = n_bytes // 16
        return [self._torch.zeros(shape, dtype=self._torch.int64, device=self.device) for _ in range(2)]

    def _fill_memory(self, source: Any, target: Any) -> None:
        for pattern in PATTERNS:
            source.fill_(pattern)
            self._time("memory", 2.0 * source.numel() * 8 / 1e9, lambda: target.copy_(source), PART_S / 2)
            bad = sum(int((part != pattern).sum()) for half in (source, target) for part in half.split(CHUNK_WORDS))
            if bad:
                self._note("memory does not hold what was written to it")

    def _copy(self) -> None:
        here = self._torch.full((COPY_BYTES,), 0x5A, dtype=self._torch.uint8, pin_memory=True)
        there = self._torch.empty(COPY_BYTES, dtype=self._torch.uint8, device=self.device)
        self._time("host to device", COPY_BYTES / 1e9, lambda: there.copy_(here), PART_S / 2)
        back = self._torch.zeros_like(here, pin_memory=True)
        self._time("device to host", COPY_BYTES / 1e9, lambda: back.copy_(there), PART_S / 2)
        if not self._torch.equal(here, back):
            self._note("bytes copied to the GPU and back are not the same")

    def _measure_disk(self) -> None:
        """Write a file and read it back, from the disk where the system lets go of it; a full disk is no fault of this test."""
        if not self.folder or shutil.disk_usage(self.folder).free < DISK_SPARE_BYTES:
            return
        with contextlib.suppress(OSError), tempfile.TemporaryFile(dir=self.folder) as file:
            data, began_s = os.urandom(DISK_BYTES), time.monotonic()
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
            self.samples["disk"] = [DISK_BYTES / 1e9 / (time.monotonic() - began_s)]
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            file.seek(0)
            if file.read() != data:
                self._note(f"a file in {self.folder} does not hold what was written to it")


def upper_quartile(samples: list[float]) -> float:
    """Return what a quarter of the repetitions has reached: it does not depend on a few that something has disturbed."""
    return sorted(samples)[len(samples) * 3 // 4]


def burn(request: dict[str, Any]) -> dict[str, Any]:
    """Burn in all devices at once for a while, and return what came of it."""
    import torch

    for setting in ("allow_bf16_reduced_precision_reduction", "allow_fp16_reduced_precision_reduction"):
        with contextlib.suppress(Exception):
            setattr(torch.backends.cuda.matmul, setting, False)
    count = torch.cuda.device_count() if request["on_gpu"] else 0
    matrices = Matrices(torch, GPU_SIZE if count else CPU_SIZE)
    devices = [f"cuda:{index}" for index in range(count)] or ["cpu"]
    rounds = [DeviceRound(matrices, name, "" if at else request["folder"]) for at, name in enumerate(devices)]
    threads = [threading.Thread(target=one.run, args=(request["seconds"],)) for one in rounds]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    names = [torch.cuda.get_device_name(index) for index in range(count)] or [
        f"{request['cpu']}, {format(torch.get_num_threads())} threads"
    ]
    parts = dict.fromkeys(part for one in rounds for part in one.samples)
    kinds = dict.fromkeys(kind for one in rounds for kind in one.sums)
    return {
        "devices": [f"{name}, torch {torch.__version__}" for name in names],
        "speeds": {
            part: [upper_quartile(one.samples[part]) for one in rounds if part in one.samples] for part in parts
        },
        "sums": {kind: sorted({f"{one.sums[kind]:x}" for one in rounds if kind in one.sums}) for kind in kinds},
        "wrong": [text for one in rounds for text in one.wrong],
    }


def main() -> None:
    """Run one round."""
    request = json.loads(sys.stdin.read())
    try:
        result = burn(request)
    except BaseException as err:
        result = {"fault": f"{type(err).__name__}: {(str(err).strip().splitlines() or [''])[0]}"}
    print()
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
