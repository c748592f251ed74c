"""At which step is a rank, how fast, and where was it at some moment? Read from the file its hook counts in.

The agent makes the file (`create`) before the rank starts; `node/hook.py` in the rank writes it through a mapping and
states its layout. Writer and reader share memory and no lock: the time of a step is in the ring before the step
is counted, so what is counted can be read.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path

from orchestrator.node.hook import (
    BEAT_BYTES,
    BEAT_MAGIC,
    BEAT_VERSION,
    PID_WORD,
    RING_STEPS,
    RING_WORD,
    STEP_WORD,
)

RATE_STEPS_MAX = 32
RATE_WINDOW_NS = 10_000_000_000
MTIME_LAG_NS = 10_000_000
"""A file's mtime comes from the kernel's coarse clock, up to one tick (10 ms at 100 Hz) behind the clock of a step.
Add it to an mtime before asking `step_at`."""

_HEADER = struct.Struct("<4Q")
_RING = struct.Struct(f"<{RING_STEPS}Q")


@dataclass(frozen=True, slots=True)
class Beat:
    """The last step a rank has finished, when (wall clock of its node), and who counts; all 0 before the first step.

    `step` counts the optimizer steps of that process: a script that restarts its trainer counts from 1 again.
    """

    step: int
    time_ns: int
    pid: int


NO_BEAT = Beat(step=0, time_ns=0, pid=0)


def create(path: Path) -> None:
    """Make an empty beat file. Its blocks are written, not left as a hole: storing into a hole on a full disk kills."""
    path.write_bytes(bytes(BEAT_BYTES))


class Beats:
    """One rank's beat file, mapped for reading. Raises OSError or ValueError when it is missing or too short."""

    def __init__(self, path: Path) -> None:
        with path.open("rb") as file:
            self._map = mmap.mmap(file.fileno(), BEAT_BYTES, access=mmap.ACCESS_READ)

    def read(self) -> Beat:
        """Return the last step with its time."""
        words = _HEADER.unpack_from(self._map)
        if words[0] != BEAT_MAGIC | BEAT_VERSION << 32 or words[STEP_WORD] == 0:
            return NO_BEAT
        step = words[STEP_WORD]
        # From the ring, not from the header: the header's time may already be that of the next step.
        (time_ns,) = struct.unpack_from("<Q", self._map, 8 * (RING_WORD + step % RING_STEPS))
        return Beat(step=step, time_ns=time_ns, pid=words[PID_WORD])

    def rate_per_s(self) -> float | None:
        """Return steps per second over the last 32 steps, of them only those of its last 10 s; None before two steps."""
        beat = self.read()
        ring = _RING.unpack_from(self._map, 8 * RING_WORD)
        last_ns = ring[beat.step % RING_STEPS]
        oldest = max(1, beat.step - RATE_STEPS_MAX)
        rate = None
        for step in range(beat.step - 1, oldest - 1, -1):
            elapsed_ns = last_ns - ring[step % RING_STEPS]
            if elapsed_ns == last_ns or elapsed_ns <= 0:  # not this counter's step, or the clock was set back
                break
            if elapsed_ns > RATE_WINDOW_NS and rate is not None:
                break
            rate = (beat.step - step) * 1e9 / elapsed_ns
        return rate

    def step_at(self, time_ns: int) -> int | None:
        """Return the last step finished at or before that moment of the node's wall clock.

        None when there was no step yet or the ring, 1,024 steps long, no longer knows.
        """
        beat = self.read()
        ring = _RING.unpack_from(self._map, 8 * RING_WORD)
        for step in range(beat.step, max(0, beat.step - RING_STEPS), -1):
            if 0 < ring[step % RING_STEPS] <= time_ns:
                return step
        return None

    def close(self) -> None:
        self._map.close()
