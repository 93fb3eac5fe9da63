"""Chunks of a deflected prefill (SPEC section 8): the iterations that it takes on many decode nodes at once, and
the next one under a schedule.

The step-by-step search of `DeflectionRouter.chunk_schedule`, a run of equal chunks at a time: for every chunk size
the last position at which it still fits is found once, and the rest is integer arithmetic. The comparisons are the
same in the same floating-point arithmetic, so the counts are exactly those of the search.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

CHUNK_SIZES = (2048, 1024, 512, 256, 128)
"""Tokens of a chunk, descending (SPEC section 8)."""
FINER_SIZES = (64, 32, 16)
"""Taken only when a batch has grown since the plan was made: too small to plan with, each costs an iteration."""


def count_steps(
    tokens: int, done: int, base: Any, c_pf: Any, c_attn: Any, limit: Any, sizes: tuple[int, ...]
) -> Any:
    """Iterations of the prefill on each node, int64 [nodes]; 0 where some step has no chunk that fits.

    Args:
        tokens: of the prompt, and
        done: those that are cached.
        base: [nodes] seconds of an iteration without a chunk.
        c_pf, c_attn: [nodes] coefficients of the iteration models.
        limit: [nodes] seconds that an iteration may take; inf: any.
        sizes: of chunks, descending, each at least half of the one before.
    """
    last = _last_fitting(tokens, np.array(sizes)[:, None], base, c_pf, c_attn, limit)
    at = np.full(base.shape, done, dtype=np.int64)
    steps = np.zeros(base.shape, dtype=np.int64)
    for size, above, fits_until in zip(sizes, (2 * sizes[0], *sizes), last, strict=False):
        # As long as the rest is at least the next size up, which did not fit, the rest does not fit either: no
        # need to try it. Below that at most one chunk of this size is left, since sizes at most halve.
        count = np.minimum((fits_until - at) // size + 1, (tokens - at - above) // size + 1).clip(0)
        at += count * size
        steps += count
        rest = tokens - at
        whole = (rest > 0) & (rest < above) & (rest <= sizes[0])
        whole &= base + rest * (c_pf + c_attn * (at + rest / 2)) <= limit
        chunk = np.where(whole, rest, np.where((rest >= size) & (at <= fits_until), size, 0))
        at += chunk
        steps += chunk > 0
    rest = tokens - at
    whole = (rest > 0) & (rest < sizes[-1]) & (base + rest * (c_pf + c_attn * (at + rest / 2)) <= limit)
    return np.where((rest == 0) | whole, steps + whole, 0)


def _last_fitting(tokens: int, size: Any, base: Any, c_pf: Any, c_attn: Any, limit: Any) -> Any:
    """Largest position in -1 .. tokens at which a chunk of `size` fits; arguments broadcast to [sizes, nodes].

    -1: not even at the start of a prompt. A closed form gives the position up to rounding, the comparison that
    `chunk_schedule` makes settles it.
    """

    def fits(at: Any) -> Any:
        return base + size * (c_pf + c_attn * (at + size / 2)) <= limit

    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        guess = ((limit - base) / size - c_pf) / c_attn - size / 2
    # 0/0 comes from a node without attention cost that is exactly at its limit: as good as any guess.
    at = np.nan_to_num(guess, nan=0.0, posinf=tokens, neginf=-1.0).clip(-1, tokens).astype(np.int64)
    while (low := (at >= 0) & ~fits(at)).any():
        at -= low
    while (high := (at < tokens) & fits(at + 1)).any():
        at += high
    return at


def next_chunk(chunks: Sequence[int], prompt_tokens: int, done: int) -> int | None:
    """Most tokens that the next iteration may compute of a prompt under a chunk schedule; None: no limit.

    The schedule covers the end of the prompt: the tokens before it were thought to be cached. Whatever `done` is,
    iterations end where the schedule's do, so a prompt of which less was cached, or that is computed again after
    a preemption, keeps to chunks that are no larger than the first.

    Args:
        chunks: tokens of each iteration, all > 0.
        prompt_tokens: of the prompt.
        done: tokens computed already; from `prompt_tokens` on the request decodes.
    """
    if not chunks or done >= prompt_tokens:
        return None
    end = prompt_tokens - sum(chunks)
    if done < end:
        return min(chunks[0], end - done)
    for chunk in chunks:
        end += chunk
        if done < end:
            return end - done
    return None


def fitting_chunk(
    planned: int, seconds: Callable[[int], float], limit: float, sizes: Sequence[int] = CHUNK_SIZES
) -> int:
    """The largest of `planned`, the smaller `sizes` and `FINER_SIZES` whose iteration stays within `limit` now.
    When none does, smaller chunks would only be late more often, and a prompt that stands still would never end:
    then the smallest of `planned` and `sizes`.

    Args:
        planned: tokens of the chunk under its schedule, > 0.
        seconds: of the iteration with a chunk of so many tokens.
        limit: seconds; inf: any.
        sizes: of chunks, descending.
    """
    tried = [planned, *(size for size in sizes if size < planned)]
    finer = (size for size in FINER_SIZES if size < tried[-1])
    return next((size for size in (*tried, *finer) if seconds(size) <= limit), tried[-1])
