"""A deflected request's prompt is computed in the chunks that the router has planned (SPEC section 8).

vLLM limits chunks for all requests alike. It asks one method per request and step how many of the tokens that it
is about to schedule may stay, to leave room for drafts at a prompt's end; `ChunkLimited` answers that question. The
plan is an upper limit: a chunk that would make the tokens decoded beside it late by now is taken smaller.
"""

from __future__ import annotations

import functools
from typing import Any

from ..chunk_steps import fitting_chunk, next_chunk
from ..node_report import BETA_ARGUMENT, CHUNKS_ARGUMENT, TBT_ARGUMENT
from .guard import Fuse, Hook, HookMismatch, expect
from .iteration_recorder import seconds_argument

METHOD = "_reserve_prefill_lookahead"
PARAMETERS = ["self", "request", "num_computed_tokens", "num_new_tokens"]


def planned_chunks(request: Any) -> tuple[int, ...]:
    """The chunk schedule that came with the request; empty: none, or none that can be obeyed."""
    arguments = getattr(request.sampling_params, "extra_args", None) or {}
    chunks = arguments.get(CHUNKS_ARGUMENT)
    if not isinstance(chunks, (list, tuple)) or not all(type(chunk) is int and chunk > 0 for chunk in chunks):
        return ()
    return tuple(chunks)


def obeyed(scheduler: Any) -> bool:
    """Whether this scheduler limits the chunks of requests that ask for it."""
    if not isinstance(scheduler, ChunkLimited) or not _fits():
        return False
    # A state-space model's chunks end at block boundaries, and vLLM sees to that before it asks.
    return not getattr(scheduler, "need_mamba_block_aligned_split", False)


class ChunkLimited:
    """Mixin for vLLM's scheduler classes."""

    def _reserve_prefill_lookahead(self, *args: Any, **kwargs: Any) -> Any:
        stock: Any = super()._reserve_prefill_lookahead  # type: ignore[misc]
        fuse = vars(self).setdefault("_chunk_fuse", Fuse("chunk-limit"))
        limited = fuse.run(lambda: self._limited(*args, **kwargs), lambda: None)
        if limited is None:
            return stock(*args, **kwargs)
        # vLLM has the last word: a chunk must leave its drafter enough of a prompt's end. When that leaves nothing
        # of a chunk of ours, the prompt would stand still.
        return stock(*limited) or stock(*args, **kwargs)

    def _limited(self, request: Any, num_computed_tokens: int, num_new_tokens: int) -> Any:
        """The arguments with fewer new tokens; None: nothing to limit."""
        chunks = planned_chunks(request)
        if not chunks or request.has_encoder_inputs or not obeyed(self):
            return None
        most = next_chunk(chunks, request.num_prompt_tokens, num_computed_tokens)
        if most is None:
            return None
        planned = min(most, num_new_tokens)
        if planned > 0:
            planned = fitting_now(self, request, num_computed_tokens, planned)
        return request, num_computed_tokens, planned


def fitting_now(scheduler: Any, request: Any, done: int, planned: int) -> int:
    """Tokens of the next chunk, at most `planned`, beside the batch as it is now: the plan was made for that of the
    moment in which the request was routed. Without a model of iterations the plan stands.

    Prompts beside it are counted with all that they have left, within the budget of an iteration.
    """
    recorder = vars(scheduler).get("gimbal_recorder")
    beside = [other for other in scheduler.running if other is not request]
    decoding = [other for other in beside if other.num_computed_tokens >= other.num_prompt_tokens]
    limits = [limit for other in decoding if (limit := seconds_argument(other, TBT_ARGUMENT)) is not None]
    model = recorder.model() if recorder is not None and limits else None
    if model is None:
        return planned
    budget = scheduler.max_num_scheduled_tokens
    chunks = [
        (min(left, budget), other.num_computed_tokens)
        for other in beside
        if (left := other.num_prompt_tokens - other.num_computed_tokens) > 0
    ]
    kv_tokens = sum(other.num_computed_tokens for other in decoding)
    share = seconds_argument(request, BETA_ARGUMENT)
    # A model that is off by its error one time in three may plan no closer to the limit than that.
    error = 0.0 if model.quality is None else model.quality.error
    limit = min(limits) * (1.0 if share is None else share) / (1.0 + error)
    return fitting_chunk(
        planned, lambda size: model.time(len(decoding), kv_tokens, [*chunks, (size, done)]), limit
    )


@functools.cache
def _fits() -> bool:
    try:
        expect("vllm.v1.core.sched.scheduler", f"Scheduler.{METHOD}", PARAMETERS)
    except HookMismatch:
        return False
    return True


def _install() -> None:
    expect("vllm.v1.core.sched.scheduler", f"Scheduler.{METHOD}", PARAMETERS)


HOOKS = (Hook("chunk-limit", _install),)
