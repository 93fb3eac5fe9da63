"""The traffic of the running window, and the sum of a closed one over the EP group (SPEC section 2)."""

from __future__ import annotations

import contextlib
import threading
from typing import Any

import torch
import torch.distributed as dist


class TrafficWindow:
    """Accumulators of two generations: `counts`, which is recorded into, and a closed one, which is summed.

    `counts` stays the same tensor at the same address for the life of the window, so captured CUDA graphs may
    record into it. Closing does not exchange the tensors; it adds what was recorded to the second
    generation and zeroes the first, both on the recording stream, which costs one pass over L·S·E counters.
    The sum over the group then runs on a stream of its own, and recording goes on meanwhile. `close_async` does not
    block the calling thread either: a balancer thread waits on the handle that it returns.

    Totals are int64 and cannot wrap: 2^63 picks are decades of serving.

    Args:
        num_layers, num_sources, num_experts: L, S, E, all >= 1.
        device: where the accumulators live.
        group: the torch.distributed process group to sum over (`torch.distributed.group.WORLD` for all ranks).
            Absent: this process alone.
        dtype: of `counts`: torch.int64, or torch.int32 for half the memory traffic per step. An int32 counter
            must be folded (`fold`) before any cell reaches 2^31 picks.
        contribute: whether this rank's counts enter the sum. Under tensor parallelism the ranks of a DP group route
            the same tokens: let one of them contribute, so that no token is counted twice.

    Raises:
        ValueError: a size below 1, or another dtype.
    """

    def __init__(
        self,
        num_layers: int,
        num_sources: int,
        num_experts: int,
        *,
        device: Any = "cpu",
        group: Any = None,
        dtype: Any = torch.int64,
        contribute: bool = True,
    ) -> None:
        sizes = (("num_layers", num_layers), ("num_sources", num_sources), ("num_experts", num_experts))
        for name, size in sizes:
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                raise ValueError(f"{name}: {size!r}; valid: an integer >= 1")
        if dtype not in (torch.int32, torch.int64):
            raise ValueError(f"dtype: {dtype}; valid: torch.int64 or torch.int32")
        shape = (num_layers, num_sources, num_experts)
        with torch.inference_mode(False):  # tensors made inside of it could not be added to outside
            self._recording = torch.zeros(shape, dtype=dtype, device=device)
            self._closed = torch.zeros(shape, dtype=torch.int64, device=device)
        self._group = group
        self._contribute = contribute
        self._side_stream = torch.cuda.Stream(self._recording.device) if self._recording.is_cuda else None
        self._taken: Any = None  # on CUDA: the event after which the closed generation is free again
        self._lock = threading.Lock()  # a handle may put picks back from another thread

    @property
    def counts(self) -> Any:
        """int32 or int64 [L, S, E]: picks recorded since the last `fold` or `close`; add to it in place."""
        return self._recording

    def fold(self) -> None:
        """Moves the recorded picks into the int64 generation and zeroes `counts`, on the current stream."""
        with self._lock:
            if self._taken is not None:
                torch.cuda.current_stream(self._closed.device).wait_event(self._taken)
            self._closed.add_(self._recording)
            self._recording.zero_()

    def close(self) -> Any:
        """Ends the window, starts the next one, and waits for the sum: `close_async().wait()`."""
        return self.close_async().wait()

    def close_async(self) -> ClosingWindow:
        """Ends the window and starts the next one; neither the recording stream nor the host is blocked.

        A collective call: every rank of the group closes its windows in the same order. On CUDA call it with the
        recording stream as the current stream. Several windows may be on their way at once.

        Returns:
            A handle; its `wait` gives int64 [L, S, E], summed over the group with one all-reduce.

        Raises:
            Whatever starting the all-reduce raises. The picks are kept then, and the next window includes them.
        """
        self.fold()
        own, total = torch.empty_like(self._closed), torch.empty_like(self._closed)
        with self._on_side_stream(own, total):
            self._take(own)
            total.copy_(own) if self._contribute else total.zero_()
            work = None
            if self._group is not None:
                try:
                    work = dist.all_reduce(total, op=dist.ReduceOp.SUM, group=self._group, async_op=True)
                except Exception:
                    self._put_back(own)
                    raise
        return ClosingWindow(self, own, total, work)

    @contextlib.contextmanager
    def _on_side_stream(self, *tensors: Any) -> Any:
        """On CUDA: the side stream, after all that the current stream has been given; else nothing."""
        if self._side_stream is None:
            yield
            return
        self._side_stream.wait_stream(torch.cuda.current_stream(self._closed.device))
        with torch.cuda.stream(self._side_stream):
            for tensor in tensors:
                tensor.record_stream(self._side_stream)
            yield

    def _take(self, own: Any) -> None:
        with self._lock:
            own.copy_(self._closed)
            self._closed.zero_()
            self._note_taken()

    def _put_back(self, own: Any) -> None:
        """Adds the picks of a window whose sum failed to the closed generation, on the current stream."""
        with self._lock:
            self._closed.add_(own)
            self._note_taken()

    def _note_taken(self) -> None:
        if self._side_stream is not None:
            self._taken = torch.cuda.Event()
            self._taken.record(torch.cuda.current_stream(self._closed.device))


class ClosingWindow:
    """A window whose sum over the group is on its way; made by `TrafficWindow.close_async`.

    Any thread may wait on it, several times.
    """

    def __init__(self, window: TrafficWindow, own: Any, total: Any, work: Any) -> None:
        self._window, self._own, self._total, self._work = window, own, total, work
        self._lock = threading.Lock()
        self._error: Exception | None = None
        self._finished = False

    def done(self) -> bool:
        """Whether the sum over the group has ended, well or not; on CUDA the copy to it may still be on its way."""
        if self._finished or self._work is None:
            return True
        return bool(self._work.is_completed())

    def wait(self) -> Any:
        """Blocks the calling thread until the sum is there.

        Returns:
            int64 [L, S, E], the picks of the window summed over the group; a tensor on the window's device.

        Raises:
            Whatever the all-reduce raises. The picks are kept then, and the window closed next includes them.
        """
        with self._lock:
            if not self._finished:
                self._finish()
            if self._error is not None:
                raise self._error
            return self._total

    def _finish(self) -> None:
        window = self._window
        side = window._side_stream
        with contextlib.nullcontext() if side is None else torch.cuda.stream(side):
            try:
                if self._work is not None:
                    self._work.wait()
                if side is not None:
                    side.synchronize()
            except Exception as error:
                window._put_back(self._own)
                self._error = error
        self._finished, self._work, self._own = True, None, None
