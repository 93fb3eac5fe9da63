"""Prefill deflection for prefill/decode-disaggregated serving (SPEC section 8, arXiv 2607.02043).

A request may have its prompt computed on a decode node, in chunks small enough for the tokens that this node is
decoding to stay on time, instead of on a prefill node with a transfer of the KV cache afterwards. `route`
predicts the time to first token both ways, from each node's own iteration model, and takes the decode node where
it is clearly shorter.

Ties: the node that comes first in the list it was given in. Two decode nodes tie when their predicted times are
equal; a decode node whose time is exactly alpha times the prefill node's is taken.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np

from .chunk_steps import CHUNK_SIZES, count_steps
from .iteration_model import IterationModel

__all__ = [
    "DecodeNode",
    "DeflectionConfig",
    "DeflectionRouter",
    "IterationModel",
    "PrefillNode",
    "Route",
]

DEFLECTED = "deflected"
PREFILL = "prefill"
IN_ORDER = "in_order"
ONLY_DECODE = "only_decode"
NOWHERE = "nowhere"
ROUTE_REASONS = (DEFLECTED, PREFILL, IN_ORDER, ONLY_DECODE, NOWHERE)


@dataclass(frozen=True, slots=True)
class PrefillNode:
    """A prefill node as the router sees it. A signal that is missing (None) is not zero: the node is then no
    candidate, and gets requests only when there is no candidate at all.

    Attributes:
        name: of the node.
        model: of its iterations.
        queued: per queued or running prefill (prompt tokens left, prompt tokens done).
        link_wait: seconds until its link to the decode nodes is free.
        kv_bytes_per_token: bytes of KV cache that one token takes on the link.
        bandwidth: of the link, bytes per second.
        token_budget: prompt tokens of one iteration; the queue is then priced in full iterations. None: one
            iteration per prefill.
        live: whether it answers; a node that does not gets nothing.

    Raises:
        ValueError: a signal outside its range.
    """

    name: str
    model: IterationModel | None
    queued: Sequence[tuple[int, int]] | None
    link_wait: float | None
    kv_bytes_per_token: float
    bandwidth: float
    token_budget: int | None = field(default=None, kw_only=True)
    live: bool = field(default=True, kw_only=True)

    def __post_init__(self) -> None:
        for left, done in self.queued or ():
            if left < 0 or done < 0:
                raise ValueError(f"queued: ({left}, {done}); valid: pairs of integers >= 0")
        _require(
            self.link_wait is None or self.link_wait >= 0.0, "link_wait", self.link_wait, ">= 0, or None"
        )
        _require(self.kv_bytes_per_token >= 0.0, "kv_bytes_per_token", self.kv_bytes_per_token, ">= 0")
        _require(self.bandwidth > 0.0, "bandwidth", self.bandwidth, "> 0")
        budget = self.token_budget
        _require(budget is None or budget >= 1, "token_budget", budget, "an integer >= 1, or None")

    @property
    def candidate(self) -> bool:
        """Live, and with every signal that a prediction needs."""
        if not self.live or self.model is None or not self.model.good or self.queued is None:
            return False
        return self.link_wait is not None


@dataclass(frozen=True, slots=True)
class DecodeNode:
    """A decode node as the router sees it; missing signals (None) as in `PrefillNode`.

    Attributes:
        name: of the node.
        model: of its iterations.
        n_decode: requests that are decoding.
        kv_tokens: tokens in their KV cache.
        kv_free: tokens for which its KV cache has room.
        tbt_slo: strictest time between tokens that a resident request asks for, seconds; None: none asks.
            Without a resident request (n_decode 0) there is no limit.
        deflected_in_flight: deflected prefills on it that have not finished.
        live: whether it answers.

    Raises:
        ValueError: a signal outside its range.
    """

    name: str
    model: IterationModel | None
    n_decode: int | None
    kv_tokens: int | None
    kv_free: int | None
    tbt_slo: float | None
    deflected_in_flight: int | None
    live: bool = field(default=True, kw_only=True)

    def __post_init__(self) -> None:
        for name in ("n_decode", "kv_tokens", "kv_free", "deflected_in_flight"):
            value = getattr(self, name)
            _require(value is None or value >= 0, name, value, "an integer >= 0, or None")
        _require(self.tbt_slo is None or self.tbt_slo > 0.0, "tbt_slo", self.tbt_slo, "seconds > 0, or None")

    @property
    def candidate(self) -> bool:
        """Live, with every signal, a good fit and no deflected prefill in flight (room is not looked at)."""
        if not self.live or self.model is None or not self.model.good or self.deflected_in_flight != 0:
            return False
        return self.n_decode is not None and self.kv_tokens is not None and self.kv_free is not None

    @property
    def limit(self) -> float:
        """Seconds between tokens that its resident requests allow."""
        return math.inf if not self.n_decode or self.tbt_slo is None else self.tbt_slo


@dataclass(frozen=True, kw_only=True)
class DeflectionConfig:
    """Constants of the router (SPEC section 8).

    Attributes:
        alpha: deflect only when the decode node's time is at most this share of the prefill node's.
        beta: share of the strictest time-between-tokens limit that an iteration with a chunk may take.
        ttft_slo: seconds to first token that a deflected request must meet; inf: no such limit.
        chunk_sizes: tokens, descending, each at least half of the one before; the rest of a prompt may be a
            chunk too if it is at most the largest.

    Raises:
        ValueError: a value outside its range.
    """

    alpha: float = 0.95
    beta: float = 1.0
    ttft_slo: float = math.inf
    chunk_sizes: tuple[int, ...] = CHUNK_SIZES

    def __post_init__(self) -> None:
        for name in ("alpha", "beta"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0.0):
                raise ValueError(f"{name}: {value!r}; valid: a finite number > 0")
        if not self.ttft_slo > 0.0:
            raise ValueError(f"ttft_slo: {self.ttft_slo!r}; valid: seconds > 0, or math.inf")
        sizes = self.chunk_sizes
        steps = all(small < large <= 2 * small for large, small in pairwise(sizes))
        if not sizes or sizes[-1] < 1 or not steps:
            raise ValueError(
                f"chunk_sizes: {sizes}; valid: positive integers, each smaller than the one before and at "
                f"least half of it"
            )


@dataclass(frozen=True, slots=True)
class Route:
    """Where a request's prompt is computed.

    Attributes:
        node: name of the node; None: there is none (reason `nowhere`).
        deflected: the node is a decode node.
        chunks: prompt tokens of each iteration on it, in order; empty when not deflected.
        ttft_prefill: predicted seconds to first token by the best prefill node; inf: no candidate.
        ttft_decode: the same by the best decode node; inf: no candidate that fits.
        reason: one of `ROUTE_REASONS`.
    """

    node: str | None
    deflected: bool
    chunks: tuple[int, ...]
    ttft_prefill: float
    ttft_decode: float
    reason: str = field(default=PREFILL, kw_only=True)


class DeflectionRouter:
    """Decides per request between prefill and decode nodes. Keeps nothing but the position of the order in
    which prefill nodes are taken when none has a prediction. Not thread-safe.

    Args:
        config: the constants; by default those of the SPEC.
    """

    def __init__(self, config: DeflectionConfig | None = None) -> None:
        self.config = config if config is not None else DeflectionConfig()
        self._next = 0

    def route(
        self,
        prompt_tokens: int,
        uncached_tokens: int,
        prefill_nodes: Sequence[PrefillNode],
        decode_nodes: Sequence[DecodeNode],
    ) -> Route:
        """Choose the node that computes a prompt.

        A prompt that is cached as a whole counts as one uncached token: engines compute at least the last one.

        Args:
            prompt_tokens: L, all tokens of the prompt.
            uncached_tokens: u, those that no prefix cache holds.
            prefill_nodes: in their fixed order.
            decode_nodes: in their fixed order.

        Raises:
            ValueError: `prompt_tokens` below 1, or `uncached_tokens` outside 0 to `prompt_tokens`.
        """
        if prompt_tokens < 1:
            raise ValueError(f"prompt_tokens: {prompt_tokens!r}; valid: an integer >= 1")
        if not 0 <= uncached_tokens <= prompt_tokens:
            raise ValueError(f"uncached_tokens: {uncached_tokens!r}; valid: 0 to {prompt_tokens}")
        uncached = max(1, uncached_tokens)
        by_prefill, prefill_name = _best_prefill(prompt_tokens, uncached, prefill_nodes)
        by_decode, decode_node = self._best_decode(prompt_tokens, uncached, decode_nodes)
        clearly = by_decode <= self.config.alpha * by_prefill and by_decode <= self.config.ttft_slo
        if decode_node is not None and clearly:
            return self._deflect(DEFLECTED, prompt_tokens, uncached, decode_node, by_prefill, by_decode)
        if prefill_name is not None:
            return Route(prefill_name, False, (), by_prefill, by_decode, reason=PREFILL)
        live = [place for place, node in enumerate(prefill_nodes) if node.live]
        if live:
            place = next((place for place in live if place >= self._next), live[0])
            self._next = place + 1
            return Route(prefill_nodes[place].name, False, (), by_prefill, by_decode, reason=IN_ORDER)
        if decode_node is not None:  # late is better than never
            return self._deflect(ONLY_DECODE, prompt_tokens, uncached, decode_node, by_prefill, by_decode)
        return Route(None, False, (), by_prefill, by_decode, reason=NOWHERE)

    def reconsider(
        self, waiting: Sequence[tuple[int, int]], node: PrefillNode, decode_nodes: Sequence[DecodeNode]
    ) -> tuple[int, Route] | None:
        """Choose a request that waits for a prefill node and is now better deflected.

        To be asked when a decode node has become free: a request is routed once when it arrives, and by then
        every decode node may have had a deflected prefill in flight.

        Args:
            waiting: (prompt tokens, uncached tokens) of the requests that wait for `node` and can still be
                taken back, in the order in which it will serve them.
            node: with everything in `queued` that it serves before them, and none of them.
            decode_nodes: in their fixed order.

        Returns:
            The place of the first request in `waiting` that `route` would deflect, counting those before it as
            queued, and its route; None: there is none.
        """
        if not any(decode.candidate for decode in decode_nodes):
            return None
        ahead = list(node.queued or ())
        for place, (prompt, uncached) in enumerate(waiting):
            route = self.route(prompt, uncached, [replace(node, queued=tuple(ahead))], decode_nodes)
            if route.reason == DEFLECTED:
                return place, route
            ahead.append((uncached, prompt - uncached))
        return None

    def _deflect(
        self, reason: str, tokens: int, uncached: int, node: DecodeNode, by_prefill: float, by_decode: float
    ) -> Route:
        chunks = self.chunk_schedule(tokens, uncached, node)
        return Route(node.name, True, chunks, by_prefill, by_decode, reason=reason)

    def chunk_schedule(self, prompt_tokens: int, uncached_tokens: int, node: DecodeNode) -> tuple[int, ...]:
        """The chunks in which a decode node would compute a prompt: step by step the largest of
        `chunk_sizes`, or the whole rest if that is at most the largest of them, whose iteration stays within
        beta times the node's limit. Empty: some step has none.
        """
        model, limit = node.model, self.config.beta * node.limit
        if model is None or node.n_decode is None or node.kv_tokens is None:
            return ()
        base = model.a + model.c0 * node.n_decode + model.c1 * node.kv_tokens
        sizes = self.config.chunk_sizes
        done = prompt_tokens - uncached_tokens
        chunks: list[int] = []
        place = 0  # chunks only get smaller: the same chunk costs more the later it comes
        while done < prompt_tokens:
            rest = prompt_tokens - done
            if rest <= sizes[0] and base + rest * (model.c_pf + model.c_attn * (done + rest / 2)) <= limit:
                return (*chunks, rest)
            while place < len(sizes):
                size = sizes[place]
                if size <= rest and base + size * (model.c_pf + model.c_attn * (done + size / 2)) <= limit:
                    break
                place += 1
            else:
                return ()
            chunks.append(sizes[place])
            done += sizes[place]
        return tuple(chunks)

    def _best_decode(
        self, tokens: int, uncached: int, nodes: Sequence[DecodeNode]
    ) -> tuple[float, DecodeNode | None]:
        """Least predicted time over all candidates with room, and the node; (inf, None): there is none."""
        fitting = [node for node in nodes if node.candidate and node.kv_free >= tokens]  # type: ignore[operator]
        if not fitting:
            return math.inf, None
        figures = np.array(
            [
                (
                    model.a + model.c0 * node.n_decode + model.c1 * node.kv_tokens,  # type: ignore[operator]
                    model.c_pf,
                    model.c_attn,
                    node.limit,
                )
                for node in fitting
                if (model := node.model) is not None
            ]
        )
        base, c_pf, c_attn, limit = figures.T
        done = tokens - uncached
        steps = count_steps(
            tokens, done, base, c_pf, c_attn, self.config.beta * limit, self.config.chunk_sizes
        )
        times = np.where(
            steps > 0, steps * base + uncached * (c_pf + c_attn * (done + uncached / 2)), math.inf
        )
        best = int(times.argmin())
        return (math.inf, None) if steps[best] == 0 else (float(times[best]), fitting[best])


def _require(valid: bool, name: str, value: object, allowed: str) -> None:
    if not valid:
        raise ValueError(f"{name}: {value!r}; valid: {allowed}")


def _best_prefill(tokens: int, uncached: int, nodes: Sequence[PrefillNode]) -> tuple[float, str | None]:
    """Least predicted time to first token over all candidates, and the node's name; (inf, None): none."""
    best, name = math.inf, None
    for node in nodes:
        if node.candidate:
            seconds = prefill_ttft(tokens, uncached, node)
            if seconds < best:
                best, name = seconds, node.name
    return best, name


def prefill_ttft(prompt_tokens: int, uncached_tokens: int, node: PrefillNode) -> float:
    """Predicted seconds to first token by a prefill node that is a candidate: everything it has queued, the
    prompt's own prefill, the wait for the link, and the transfer of the whole prompt's KV cache.
    """
    model = node.model
    if model is None or node.queued is None or node.link_wait is None:
        return math.inf
    work = [*node.queued, (uncached_tokens, prompt_tokens - uncached_tokens)]
    iterations = len(work)
    if node.token_budget is not None:
        iterations = -(-sum(left for left, _ in work) // node.token_budget)
    prefill = sum(left * (model.c_pf + model.c_attn * (done + left / 2)) for left, done in work)
    transfer = prompt_tokens * node.kv_bytes_per_token / node.bandwidth
    return iterations * model.a + prefill + node.link_wait + transfer
