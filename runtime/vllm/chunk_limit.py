"""A deflected request's prompt is computed in the chunks that the router has planned (SPEC section 8).

vLLM limits chunks for all requests alike. It asks one method per request and step how many of the tokens that it
is about to schedule may stay, to leave room for drafts at a prompt's end; `ChunkLimited` answers that question.
"""

from __future__ import annotations

import functools
from typing import Any

from ..chunk_steps import next_chunk
from ..node_report import CHUNKS_ARGUMENT
from .guard import Fuse, Hook, HookMismatch, expect

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
        scheduler: Any = super()
        allowed = scheduler._reserve_prefill_lookahead(*args, **kwargs)
        fuse = vars(self).setdefault("_chunk_fuse", Fuse("chunk-limit"))
        return fuse.run(lambda: self._limited(allowed, *args, **kwargs), lambda: allowed)

    def _limited(self, allowed: int, request: Any, num_computed_tokens: int, num_new_tokens: int) -> int:
        chunks = planned_chunks(request)
        if not chunks or request.has_encoder_inputs or not obeyed(self):
            return allowed
        most = next_chunk(chunks, request.num_prompt_tokens, num_computed_tokens)
        return allowed if most is None else min(allowed, most)


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
