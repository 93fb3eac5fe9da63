"""Scheduler classes: vLLM's own, with Algorithm 2 (SPEC section 7) as the waiting queue.

`settings` names one of them in the scheduler configuration unless the user has named another. With vLLM's
priority policy a lower value comes first whatever the sizes and ages; Algorithm 2 orders requests of one priority.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.request_queue import RequestQueue, SchedulingPolicy
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import RequestStatus

from ..request_queue import ShortestPrefillQueue
from ..slot_wait import RequestSteps
from .chunk_limit import ChunkLimited
from .guard import Fuse, logger
from .settings import config_for


@dataclass(frozen=True, slots=True, eq=False)
class _Waiting:
    """A waiting request with the size that it was queued by."""

    request: Any
    prefill_tokens: int
    arrival_time: float
    priority: int


class WaitingQueue(RequestQueue):  # type: ignore[misc]
    """vLLM's queue interface over `ShortestPrefillQueue`.

    Args:
        age_limit: seconds; older requests are served in arrival order. math.inf: never.
        block_size: tokens of a KV block; sizes are compared in blocks.
        uncached_tokens: tokens of a request that no prefix cache holds.
        priorities: vLLM's priority policy is on.
    """

    def __init__(
        self,
        *,
        age_limit: float | str,
        block_size: int,
        uncached_tokens: Callable[[Any], int],
        priorities: bool = False,
    ) -> None:
        self._taken: dict[str, int] = {}  # request id -> size, of those popped in this scheduling pass
        # Requests carry the wall-clock time at which the API server received them.
        self._queue: ShortestPrefillQueue[_Waiting] = ShortestPrefillQueue(
            age_limit=age_limit, clock=time.time, block_size=block_size, priorities=priorities
        )
        self._entries: dict[str, _Waiting] = {}
        self._uncached_tokens = uncached_tokens
        self.prefill_tokens = 0  # of all waiting requests, as they were queued

    def add_request(self, request: Any) -> None:
        self._queue.push(self._enter(request))

    def prepend_request(self, request: Any) -> None:
        """Preempted requests go first, within their priority; one that was only passed over goes back to its
        place."""
        if request.status == RequestStatus.PREEMPTED:
            self._queue.push_front(self._enter(request))
        else:
            self.add_request(request)

    def prepend_requests(self, requests: Iterable[Any]) -> None:
        for request in requests:
            self.prepend_request(request)

    def peek_request(self) -> Any:
        return self._queue.peek().request

    def pop_request(self) -> Any:
        entry = self._queue.pop()
        self._taken[entry.request.request_id] = entry.prefill_tokens
        return self._leave(entry)

    def remove_request(self, request: Any) -> None:
        entry = self._entries[request.request_id]
        self._queue.remove(entry)
        self._leave(entry)

    def remove_requests(self, requests: Iterable[Any]) -> None:
        """Removes those that are here; vLLM passes requests of both its queues to each of them."""
        for request in requests:
            if request.request_id in self._entries:
                self.remove_request(request)

    def end_pass(self, *, slots_short: bool | None = None) -> None:
        """A scheduling pass is over: what was popped and not put back has been started.

        Args:
            slots_short: the pass had tokens left, but no slot; None: that is not to matter.
        """
        self._taken.clear()
        if self._entries and slots_short is not None:
            self._queue.end_pass(slots_short=slots_short)

    def __bool__(self) -> bool:
        return bool(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Any]:
        return (entry.request for entry in self._queue)

    def _enter(self, request: Any) -> _Waiting:
        # One that was only passed over is not looked up in the prefix cache again, step after step.
        size = self._taken.pop(request.request_id, None)
        if size is None or request.status == RequestStatus.PREEMPTED:
            size = self._uncached_tokens(request)
        entry = _Waiting(request, size, request.arrival_time, request.priority)
        self._entries[request.request_id] = entry
        self.prefill_tokens += entry.prefill_tokens
        return entry

    def _leave(self, entry: _Waiting) -> Any:
        del self._entries[entry.request.request_id]
        self.prefill_tokens -= entry.prefill_tokens
        return entry.request


class _ShortestPrefillFirst:
    """Mixin: replaces the waiting queue once vLLM's scheduler is built. The other queue, of requests that hold KV
    blocks already, stays vLLM's: it is drained first in any case."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.request_steps = RequestSteps()
        self._slot_fuse = Fuse("slot-wait", "what is known of slots stays as it is")
        super().__init__(*args, **kwargs)
        scheduler: Any = self
        if scheduler.policy not in (SchedulingPolicy.FCFS, SchedulingPolicy.PRIORITY):
            logger.warning("Gimbal: vLLM's '%s' policy is on; the queue stays vLLM's", scheduler.policy.value)
            return
        self._prefix_fuse = Fuse("queue-prefix-lookup")
        self._ages_by_slots = config_for(scheduler.vllm_config).slot_order == "arrival"
        scheduler.waiting = Fuse("queue").run(self._waiting_queue, lambda: scheduler.waiting)

    def _waiting_queue(self) -> WaitingQueue:
        scheduler: Any = self
        return WaitingQueue(
            age_limit=config_for(scheduler.vllm_config).age_limit,
            block_size=scheduler.block_size,
            uncached_tokens=self._uncached_tokens,
            priorities=scheduler.policy == SchedulingPolicy.PRIORITY,
        )

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        """vLLM's scheduling pass."""
        stock: Any = super()
        output = stock.schedule(*args, **kwargs)
        waiting = vars(self).get("waiting")
        if isinstance(waiting, WaitingQueue):
            short = self._slot_fuse.run(lambda: self._slots_short(output, *args, **kwargs), lambda: None)
            waiting.end_pass(slots_short=short)
        return output

    def _slots_short(self, output: Any, throttle_prefills: bool = False) -> bool | None:
        """Whether the pass that is over had tokens left, but no slot.

        None: nothing follows from it. `slot_order` is size, or vLLM itself kept requests waiting: it is paused, or
        (for balance between engines) the pass started no prefill and left the slots that came free empty.

        Args:
            output: of the pass.
            throttle_prefills: as vLLM's `schedule` was given it.
        """
        scheduler: Any = self
        if not self._ages_by_slots or throttle_prefills or scheduler.pause_state:  # PauseState.UNPAUSED is 0
            return None
        # A streaming session that waits for its next input keeps its slot.
        held = len(scheduler.running) + scheduler.num_waiting_for_streaming_input
        tokens_left = output.total_num_scheduled_tokens < scheduler.max_num_scheduled_tokens
        return bool(held >= scheduler.max_num_active_reqs and tokens_left)

    def _free_request(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        """vLLM's; a request has ended, and its slot is free."""
        self._slot_fuse.attempt(lambda: self.request_steps.observe(request.num_output_tokens))
        stock: Any = super()
        return stock._free_request(request, *args, **kwargs)

    def _uncached_tokens(self, request: Any) -> int:
        left = int(request.num_tokens - request.num_computed_tokens)
        return self._prefix_fuse.run(lambda: left - self._cached_tokens(request), lambda: left)

    def _cached_tokens(self, request: Any) -> int:
        """Tokens that the prefix cache would give now; it is only looked at, no statistics are touched."""
        manager: Any = getattr(self, "kv_cache_manager", None)
        if request.num_computed_tokens or not manager.prefix_cache_lookup_enabled(request):
            return 0
        return int(
            manager.coordinator.find_longest_cache_hit(request.block_hashes, request.num_tokens - 1)[1]
        )


class GimbalScheduler(_ShortestPrefillFirst, ChunkLimited, Scheduler):  # type: ignore[misc]
    """vLLM's scheduler with the shortest prefill first."""


class GimbalAsyncScheduler(_ShortestPrefillFirst, ChunkLimited, AsyncScheduler):  # type: ignore[misc]
    """vLLM's asynchronous scheduler with the shortest prefill first."""
