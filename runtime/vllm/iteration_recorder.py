"""What an engine's iterations contain and how long they take, measured where vLLM schedules and ends them.

An iteration lasts from the end of the one before it to its own end, so that the work between two steps is in it and
batches that overlap (asynchronous scheduling) are not counted twice; after an idle time, from its scheduling.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..iteration_model import Iteration, IterationFitter, IterationModel
from ..node_report import REQUEST_ARGUMENT, Computed

REFIT_EVERY = 16
"""New iterations until the model is fitted again, when somebody asks: a fit takes a millisecond of the engine."""
KEPT = 64
"""Completed prompts that are remembered."""


def argument(request: Any, name: str) -> Any:
    """An extra argument (`vllm_xargs`) of a request; None: it has none of that name."""
    parameters = request.sampling_params
    return ((parameters.extra_args or {}) if parameters is not None else {}).get(name)


def seconds_argument(request: Any, name: str) -> float | None:
    """An extra argument that is a number above 0; None: it is missing or anything else. Clients may send any JSON,
    infinities and integers beyond a double among it."""
    value = argument(request, name)
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return float(value) if number and 0.0 < value < sys.float_info.max else None


def request_name(request: Any) -> str:
    """The router's name of a request; empty: it did not come through one."""
    name = argument(request, REQUEST_ARGUMENT)
    return name if isinstance(name, str) else ""


@dataclass(frozen=True, slots=True)
class _Batch:
    """A scheduled iteration. `measured`: its time is that of the model, and of nothing else."""

    output: Any
    started: float
    n_decode: int
    kv_tokens: int
    chunks: tuple[tuple[int, int], ...]
    completing: tuple[Any, ...]
    measured: bool


class IterationRecorder:
    """One engine's iterations; used on its main thread only.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.steps = 0
        self.computed: deque[Computed] = deque(maxlen=KEPT)
        self._clock = clock
        self._fitter = IterationFitter()
        self._model: IterationModel | None = None
        self._fitted = 0
        self._batches: deque[_Batch] = deque()
        self._last_end: float | None = None
        self._begun: dict[str, float] = {}  # request id -> start of its first iteration

    def scheduled(self, scheduler: Any, output: Any, started: float) -> None:
        """vLLM has put an iteration together."""
        for request_id in output.finished_req_ids:
            self._begun.pop(request_id, None)
        if not output.num_scheduled_tokens:
            return
        n_decode = kv_tokens = 0
        chunks, completing = [], []
        for request_id, tokens in output.num_scheduled_tokens.items():
            request = scheduler.requests[request_id]
            done = request.num_computed_tokens - tokens  # vLLM has advanced it already
            # A preempted request computes its own output again, like a prompt.
            if done < max(request.num_prompt_tokens, request.num_tokens - 1):
                chunks.append((tokens, done))
                self._begun.setdefault(request_id, started)
                if done < request.num_prompt_tokens <= request.num_computed_tokens:
                    completing.append(request)
            else:
                n_decode += 1
                kv_tokens += done
        measured = not getattr(output, "has_sync_kv_loads", False)  # such a load is a wait, not work
        self._batches.append(
            _Batch(output, started, n_decode, kv_tokens, tuple(chunks), tuple(completing), measured)
        )

    def ended(self, output: Any, *, idle: bool) -> None:
        """An iteration has ended; `idle`: the engine has nothing left to do."""
        now = self._clock()
        while self._batches:
            batch = self._batches.popleft()
            if batch.output is output:
                self._take(batch, now)
                break
        self._last_end = None if idle else now

    def model(self) -> IterationModel | None:
        """The model fitted to the iterations so far; None: none yet."""
        if self.steps and (self._model is None or self.steps - self._fitted >= REFIT_EVERY):
            self._model, self._fitted = self._fitter.model(), self.steps
        return self._model

    def _take(self, batch: _Batch, now: float) -> None:
        started = batch.started if self._last_end is None else self._last_end
        if batch.measured and now > started:
            self._fitter.add(Iteration(batch.n_decode, batch.kv_tokens, batch.chunks, now - started))
            self.steps += 1
        for request in batch.completing:
            begun = self._begun.pop(request.request_id, batch.started)
            since_arrival = max(0.0, time.time() - request.arrival_time)
            self.computed.append(Computed(request_name(request), max(0.0, now - begun), since_arrival))
