"""CUDA graphs of a rank: each replay of a graph that holds optimizer steps makes these steps; their capture makes none."""

TYPE_CHECKING = False  # typing's own costs 3 ms
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any
    from weakref import ref


class Graphs:
    """Watches torch's class `CUDAGraph`: which optimizers step while a graph is captured, and its replays."""

    def __init__(self, count_step: "Callable[[Any], object]") -> None:
        """`count_step` counts one step of an optimizer."""
        self._count_step = count_step
        self._capturing: list[ref[Any]] | None = None

    def watch(self, kind: "Any") -> None:
        """Wrap the methods of `torch.cuda.CUDAGraph` by which a graph is captured and replayed."""
        import functools

        begin, end, replay = kind.capture_begin, kind.capture_end, kind.replay

        @functools.wraps(begin)
        def capture_begin(graph: "Any", *args: "Any", **kwargs: "Any") -> "Any":
            result = begin(graph, *args, **kwargs)
            graph._orch_steps = self._capturing = []  # only once it captures
            return result

        @functools.wraps(end)
        def capture_end(graph: "Any") -> "Any":
            self._capturing = None
            return end(graph)

        @functools.wraps(replay)
        def replay_and_count(graph: "Any") -> "Any":
            result = replay(graph)
            for reference in getattr(graph, "_orch_steps", ()):
                if (optimizer := reference()) is not None:
                    self._count_step(optimizer)
            return result

        kind.capture_begin, kind.capture_end, kind.replay = capture_begin, capture_end, replay_and_count

    def captures(self, optimizer: object) -> bool:
        """Return whether a step of this optimizer is only captured: it is noted for the replays of its graph."""
        if self._capturing is None:
            return False
        import weakref

        self._capturing.append(weakref.ref(optimizer))
        return True
