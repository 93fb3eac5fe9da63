"""How long one iteration of a node takes (SPEC section 8), fitted from the node's own iterations.

    t = a + c0·n_decode + c1·kv_tokens + c_pf·Σχ + c_attn·Σ χ·(k + χ/2)

over the prefills of the iteration: χ tokens of a prompt computed in it, k tokens of that prompt done before it.
Every term is work, so no coefficient is negative. The prefill sums do not depend on how a prompt is cut into
chunks (Σ χ·(k + χ/2) telescopes to L²/2 over a whole prompt): chunking costs one `a` and one decode batch per
further iteration, nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any, NamedTuple

import numpy as np

# A fit is good when iterations that it was fitted to are met within 15 % (root mean square of the relative
# error), when there are enough of them, and when enough of those had a prefill: coefficients of work that was
# never seen would come out as 0, and a node whose prefill seems to cost nothing would be sent every prompt.
MAX_ERROR = 0.15
MIN_ITERATIONS = 32.0
MIN_PREFILLS = 8.0
# Fewer prompt tokens in an iteration than this say nothing about what prefill costs: a decode node computes the
# last few tokens of every prompt whose KV cache it was sent.
MIN_PREFILL_TOKENS = 64

_TERMS = 5


class Iteration(NamedTuple):
    """One measured iteration.

    Attributes:
        n_decode: requests that decoded one token in it.
        kv_tokens: tokens in the KV cache of those requests.
        chunks: per prefill (tokens computed, tokens of that prompt done before).
        seconds: its duration, > 0.
    """

    n_decode: int
    kv_tokens: int
    chunks: Sequence[tuple[int, int]]
    seconds: float


@dataclass(frozen=True, slots=True)
class FitQuality:
    """What a fitted model is worth.

    Attributes:
        error: root mean square of the relative error over the iterations fitted, weighted as the fit was.
        iterations: sum of the weights of all iterations, and
        prefills: of those with a prefill of at least 64 tokens.
    """

    error: float
    iterations: float
    prefills: float

    @property
    def good(self) -> bool:
        """The node may be used for deflection: error <= 15 %, >= 32 iterations, >= 8 with a prefill."""
        return self.good_within(MAX_ERROR)

    def good_within(self, max_error: float) -> bool:
        """The same with another limit on the error."""
        return self.error <= max_error and self.iterations >= MIN_ITERATIONS and self.prefills >= MIN_PREFILLS


@dataclass(frozen=True, slots=True)
class IterationModel:
    """Coefficients of the iteration time.

    Attributes:
        a: seconds per iteration.
        c0: seconds per decoding request.
        c1: seconds per token in the KV cache of the decoding requests.
        c_pf: seconds per prefill token.
        c_attn: seconds per prefill token and token that it attends to.
        quality: of the fit; None: the coefficients were given, not fitted.

    Raises:
        ValueError: a coefficient that is negative or not finite.
    """

    a: float
    c0: float
    c1: float
    c_pf: float
    c_attn: float
    quality: FitQuality | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        for name in ("a", "c0", "c1", "c_pf", "c_attn"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0.0):
                raise ValueError(f"{name}: {value!r}; valid: a finite number >= 0")

    @property
    def good(self) -> bool:
        """A good fit, or coefficients that were given."""
        return self.quality is None or self.quality.good

    def time(self, n_decode: int, kv_tokens: int, chunks: Iterable[tuple[int, int]] = ()) -> float:
        """Seconds of one iteration.

        Args:
            n_decode: decoding requests.
            kv_tokens: tokens in their KV cache.
            chunks: per prefill (tokens computed now, tokens done before).
        """
        seconds = self.a + self.c0 * n_decode + self.c1 * kv_tokens
        for tokens, done in chunks:
            seconds += tokens * (self.c_pf + self.c_attn * (done + tokens / 2))
        return seconds

    @classmethod
    def fit(
        cls, samples: Iterable[Iteration | tuple[Any, ...]], *, forgetting: float = 1.0
    ) -> IterationModel:
        """The model of least relative error with no negative coefficient.

        Args:
            samples: iterations, oldest first; plain tuples in the order of `Iteration` will do.
            forgetting: weight of an iteration relative to the next one of its kind, in (0, 1].

        Raises:
            ValueError: no sample, one that is not valid, or `forgetting` outside (0, 1].
        """
        fitter = IterationFitter(forgetting=forgetting)
        for sample in samples:
            fitter.add(Iteration(*sample))
        return fitter.model()


class IterationFitter:
    """Fits a node's model while it serves: O(1) memory and work per iteration, old iterations forgotten.

    The squares minimised are of relative errors, (1 - predicted/measured)²: an error of 5 ms matters in an
    iteration of 20 ms, where it decides over a token's deadline, and not in one of 400 ms. What is kept is the
    weighted normal equations (5 × 5), from which the error follows too. Solving enumerates the 31 sets of
    positive coefficients, which is exact and needs no iteration.

    Iterations with a prefill are forgotten as others with a prefill come, and those without likewise: on a decode
    node that is sent no prompt for an hour, what prefill costs would otherwise be forgotten, and the node would be
    sent none ever after.

    Args:
        forgetting: weight of an iteration relative to the next one of its kind, in (0, 1]; 0.999 remembers about
            the last 1,000.

    Raises:
        ValueError: `forgetting` outside (0, 1].
    """

    def __init__(self, *, forgetting: float = 0.999) -> None:
        if not 0.0 < forgetting <= 1.0:
            raise ValueError(f"forgetting: {forgetting!r}; valid: above 0 and at most 1")
        self.forgetting = forgetting
        # Per kind, 0 without and 1 with a prefill: normal equations, and the sum of weights.
        self._gram = np.zeros((2, _TERMS, _TERMS))
        self._moment = np.zeros((2, _TERMS))
        self._weight = np.zeros(2)

    def add(self, sample: Iteration) -> None:
        """Take one iteration into account.

        Raises:
            ValueError: a count that is negative, or `seconds` that is not finite and > 0.
        """
        prefill = sum(tokens for tokens, _ in sample.chunks)
        attention = sum(tokens * (done + tokens / 2) for tokens, done in sample.chunks)
        work = (sample.n_decode, sample.kv_tokens, prefill, attention)
        if not all(math.isfinite(count) and count >= 0 for count in work):
            raise ValueError(f"sample: {sample!r}; valid: finite counts >= 0")
        if any(tokens < 0 or done < 0 for tokens, done in sample.chunks):
            raise ValueError(f"sample.chunks: {sample.chunks!r}; valid: pairs of integers >= 0")
        if not (math.isfinite(sample.seconds) and sample.seconds > 0.0):
            raise ValueError(f"sample.seconds: {sample.seconds!r}; valid: finite seconds > 0")
        row = np.array((1.0, *work)) / sample.seconds
        keep = self.forgetting
        kind = int(prefill >= MIN_PREFILL_TOKENS)
        self._gram[kind] = keep * self._gram[kind] + np.outer(row, row)
        self._moment[kind] = keep * self._moment[kind] + row
        self._weight[kind] = keep * self._weight[kind] + 1.0

    def model(self) -> IterationModel:
        """The model fitted to the iterations so far, with its quality.

        Raises:
            ValueError: none has been added.
        """
        iterations = float(self._weight.sum())
        if iterations == 0.0:
            raise ValueError("samples: none; valid: at least one iteration")
        gram, moment = self._gram.sum(axis=0), self._moment.sum(axis=0)
        coefficients, squares = _nonnegative_least_squares(gram, moment, iterations)
        error = math.sqrt(max(0.0, squares) / iterations)
        a, c0, c1, c_pf, c_attn = (float(value) for value in coefficients)
        quality = FitQuality(error, iterations, float(self._weight[1]))
        return IterationModel(a, c0, c1, c_pf, c_attn, quality=quality)


def _nonnegative_least_squares(gram: Any, moment: Any, total: float) -> tuple[Any, float]:
    """x >= 0 of least xᵀ·gram·x - 2·xᵀ·moment + total, and that value; ties: fewer, then lower terms.

    The optimum is the plain least-squares solution over the terms that are positive in it, so the best
    non-negative one among all sets of terms is the optimum. A singular set adds nothing: a smaller one spans
    the same predictions.
    """
    scale = np.sqrt(np.diag(gram))
    terms = [term for term in range(_TERMS) if scale[term] > 0.0]
    scale = np.where(scale > 0.0, scale, 1.0)
    gram = gram / np.outer(scale, scale)  # terms differ by eight orders of magnitude
    moment = moment / scale
    best, least = np.zeros(_TERMS), total
    for size in range(1, len(terms) + 1):
        for chosen in combinations(terms, size):
            part = gram[np.ix_(chosen, chosen)]
            if size > 1 and np.linalg.cond(part) > 1e12:
                continue
            values = np.linalg.solve(part, moment[list(chosen)])
            if np.any(values < 0.0):
                continue
            squares = float(total - values @ moment[list(chosen)])
            if squares < least - 1e-12 * total:
                best, least = np.zeros(_TERMS), squares
                best[list(chosen)] = values
    return best / scale, least
