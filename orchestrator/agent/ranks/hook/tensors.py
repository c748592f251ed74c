"""Numbers of a rank's tensors: sums of its parameters, by which ranks that hold the same are compared, and the norms that it clips
its gradients by.

They are copied to the CPU behind the optimizer's step, and read at a later step once they are there, so that the training does
not wait for them. A sum is of the bits, one 64-bit number for each optimizer: equal parameters have equal sums, and one flipped
bit makes another.
"""

import os
import sys

from .layout import (
    COMPARE_ENV,
    NORMS_WORD,
    OPTIMIZERS_MAX,
    SUM_COLUMNS,
    SUMS_MADE_WORD,
    SUMS_MAX,
    SUMS_WORD,
    TYPE_CHECKING,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from .errors import HookNotes

MASK = (1 << 64) - 1
# Attributes of optimizers of torch whose replicas rightly differ for a while: local SGD, and parts that are still being sent.
DIFFERING = ("averager", "_overlap_with_ddp")


class ParameterSums:
    """Writes the sum of an optimizer's parameters after every Nth of its steps."""

    def __init__(self, notes: "HookNotes") -> None:
        given = os.environ.get(COMPARE_ENV, "")
        self.every = int(given) if given.isdigit() else 0  # 0: never
        self._notes = notes
        self._pending: list[tuple[int, int, int, list[tuple[Any, Any]]]] = []
        self._made = 0

    def count(self, words: memoryview, own_step: "int | None", step: int, optimizer: "Any") -> None:
        """Sum up where it is due; `own_step` as in `OptimizerSteps`, `step` of the script. Raises nothing."""
        try:
            if self._pending:
                self._write_finished(words)
            if any(getattr(optimizer, name, None) for name in DIFFERING):
                self.every, self._pending = 0, []
            elif own_step and own_step // OPTIMIZERS_MAX % self.every == 0:
                place, totals = sum_parameters(optimizer)
                self._pending.append((own_step, step, place, totals))
                self._write_finished(words)
        except Exception as err:  # not tried again: it would cost as much each time
            self.every, self._pending = 0, []
            self._notes.add("parameter sums", err)

    def _write_finished(self, words: memoryview) -> None:
        while self._pending:
            own_step, step, place, totals = self._pending[0]
            if not all(event is None or event.query() for event, _ in totals):
                return
            del self._pending[0]
            row = SUMS_WORD + self._made % SUMS_MAX * SUM_COLUMNS
            words[row], words[row + 1] = own_step, step
            words[row + 2] = (place + sum(int(total) for _, total in totals)) & MASK
            self._made += 1
            words[SUMS_MADE_WORD] = self._made


class GradientNorms:
    """Looks at the norms that torch's `clip_grad_norm_` returns: how many in a row are not finite.

    A norm is looked at when the next one is there. One that is not finite counts only if all optimizers have stepped between: a
    GradScaler, or the script, leaves out such a step on purpose. While its copy to the CPU is under way, norms are passed over.
    """

    def __init__(self) -> None:
        self.latest: Any = None  # since the last step
        self._pending: list[tuple[int, Any, Any]] = []  # one at most
        # Whether no other came behind it, and until then a bit for each optimizer that has stepped
        self._is_last, self._stepped = False, 0

    def count(
        self, words: memoryview, own_step: "int | None", step: int, optimizer: "Any", living: "Callable[[], int]"
    ) -> None:
        """Note a step; `own_step` and `living` as in `OptimizerSteps`, `step` of the script."""
        norm, self.latest, torch = self.latest, None, sys.modules["torch"]
        if norm is not None:
            self._is_last = all(event is None or event.query() for _, event, _ in self._pending)
            if self._is_last:
                self._write_finished(words, living)
                is_read = type(norm) is torch.Tensor and norm.device.type in ("cpu", "cuda")
                self._pending, self._stepped = [(step, *begin_copy(norm, torch))] if is_read else [], 0
        # Where it has this attribute, a GradScaler leaves it to the optimizer to make no step.
        if self._is_last and own_step and not hasattr(optimizer, "found_inf"):
            self._stepped |= 1 << own_step % OPTIMIZERS_MAX

    def _write_finished(self, words: memoryview, living: "Callable[[], int]") -> None:
        for step, _, copied in self._pending:
            norm = float(copied)
            is_finite = norm - norm == 0.0
            if is_finite or not living() & ~self._stepped:
                words[NORMS_WORD] = 0 if is_finite else words[NORMS_WORD] + 1
                if words[NORMS_WORD] <= 1:
                    at = NORMS_WORD + (3 if is_finite else 1)
                    words[at], words[at + 1 : at + 2].cast("B").cast("d")[0] = step, norm


def watch_norms(steps: "Any", is_compiling: "Callable[[], bool]") -> None:
    """Wrap torch's `clip_grad_norm_`, so that `steps` gets the norms. A compiler that traces through it sees torch's own."""
    import functools

    utils: Any = sys.modules["torch.nn.utils"]
    clip = utils.clip_grad_norm_

    @functools.wraps(clip)
    def clip_and_keep(*args: "Any", **kwargs: "Any") -> "Any":
        norm = clip(*args, **kwargs)
        if not is_compiling():
            steps.norms.latest = getattr(norm, "_local_tensor", norm)  # one part that is not finite makes the whole so
        return norm

    utils.clip_grad_norm_ = utils.clip_grad.clip_grad_norm_ = clip_and_keep


def sum_parameters(optimizer: "Any") -> "tuple[int, list[tuple[Any, Any]]]":
    """Return a number for the places of an optimizer's parameters, and for each device their sum, on its way to the CPU,
    with the event after which it is there. Each parameter has a weight, so that two that are swapped differ."""
    import zlib

    torch = sys.modules["torch"]
    places: list[tuple[Any, ...]] = []
    by_device: dict[Any, Any] = {}
    parameters = [one.detach() for group in optimizer.param_groups for one in group["params"]]
    for number, parameter in enumerate(parameters):
        local = getattr(parameter, "_local_tensor", parameter)
        places.append((tuple(local.shape), str(local.dtype), find_shard(parameter)))
        total = sum_bits(local, torch) * (2 * number + 1)
        by_device[local.device] = by_device[local.device] + total if local.device in by_device else total
    totals = [begin_copy(total, torch) for total in by_device.values()]
    return zlib.crc32(repr(places).encode()) * 0x9E3779B97F4A7C15, totals


def begin_copy(tensor: "Any", torch: "Any") -> "tuple[Any, Any]":
    """Return a tensor that is on its way to the CPU, behind the event after which it is there; None: it is there."""
    if tensor.device.type != "cuda":
        return None, tensor
    copied, event = tensor.to("cpu", non_blocking=True), torch.cuda.Event()
    event.record(torch.cuda.current_stream(tensor.device))
    return event, copied


def find_shard(parameter: "Any") -> "list[tuple[str, int]]":
    """Return where a DTensor's part lies: each dimension of its mesh along which it differs, and the coordinate there."""
    mesh = getattr(parameter, "device_mesh", None)
    coordinates = mesh.get_coordinate() if mesh is not None else None
    places = zip(parameter.placements, coordinates) if coordinates else ()  # noqa: B905 -- Python 3.8 has no `strict`
    return [(str(placement), coordinate) for placement, coordinate in places if not placement.is_replicate()]


def sum_bits(tensor: "Any", torch: "Any") -> "Any":
    """Return the sum of a tensor's bits, eight bytes at a time, as an integer of 64 bits on its device."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    size, flat = tensor.element_size(), tensor.reshape(-1)
    if flat.storage_offset() * size % 8:
        flat = flat.clone()  # else it cannot be read so
    end = flat.numel() * size // 8 * 8 // size
    total = flat[:end].view(torch.int64).sum()
    if end < flat.numel():
        rest = flat[end:].view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[size])
        total = total + rest.sum(dtype=torch.int64)
    return total
