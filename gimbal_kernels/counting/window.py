"""The traffic of the running window, and the sum of a closed one over the EP group (SPEC section 2)."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist


class TrafficWindow:
    """Accumulators of two generations: `counts`, which is recorded into, and a closed one, which is summed.

    `counts` stays the same tensor at the same address for the life of the window, so captured CUDA graphs may
    record into it. Closing does not exchange the tensors; it copies what was recorded into the second
    generation and zeroes the first, both on the recording stream, which costs one pass over L·S·E counters.
    The sum over the group then runs on a stream of its own, and recording goes on meanwhile.

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
        self._recording = torch.zeros(shape, dtype=dtype, device=device)
        self._closed = torch.zeros(shape, dtype=torch.int64, device=device)
        self._group = group
        self._contribute = contribute
        self._side_stream = torch.cuda.Stream(self._recording.device) if self._recording.is_cuda else None

    @property
    def counts(self) -> Any:
        """int32 or int64 [L, S, E]: picks recorded since the last `fold` or `close`; add to it in place."""
        return self._recording

    def fold(self) -> None:
        """Moves the recorded picks into the int64 generation and zeroes `counts`, on the current stream."""
        self._closed.add_(self._recording)
        self._recording.zero_()

    def close(self) -> Any:
        """Ends the window and starts the next one.

        A collective call: every rank of the group closes its windows in the same order. On CUDA call it with the
        recording stream as the current stream. That stream is not blocked; the calling host thread waits
        until the sum is there.

        Returns:
            int64 [L, S, E], the picks of the window summed over the group with one all-reduce; a new tensor
            on the window's device.

        Raises:
            Whatever the all-reduce raises. The picks are kept then, and the next window includes them.
        """
        self.fold()
        total = torch.empty_like(self._closed)
        if self._side_stream is None:
            self._reduce_into(total)
            return total
        folded = torch.cuda.Event()
        folded.record(torch.cuda.current_stream(total.device))
        self._side_stream.wait_event(folded)
        with torch.cuda.stream(self._side_stream):
            self._reduce_into(total)
            reduced = torch.cuda.Event()
            reduced.record(self._side_stream)
        # Waiting here is what makes the next fold into the closed generation safe without a further event.
        reduced.synchronize()
        return total

    def _reduce_into(self, total: Any) -> None:
        if self._contribute:
            total.copy_(self._closed)
        else:
            total.zero_()
        if self._group is not None:
            dist.all_reduce(total, op=dist.ReduceOp.SUM, group=self._group)
        self._closed.zero_()
