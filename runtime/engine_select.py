"""Engine selection: which data-parallel engine a request goes to (SPEC section 6, Algorithm 1).

One `EngineSelector` per client (API server). It knows the last trace of every engine and, as compensation,
the tokens that it has sent since: a trace names the last request that the engine had admitted when it was
taken, so a late snapshot neither counts a request twice nor erases one.

Every tie is broken by "next in order": the engines form a ring in index order, and the next one is the first
candidate behind the engine that this policy chose last. A pinned request and one that follows its affinity
leave the ring where it is: the order did not choose their engine, and turning the ring for them would send
every other request to that engine's neighbour.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

from .affinity import AffinityMap
from .decision_log import DecisionLog, LoggedDecision
from .select_config import SelectConfig
from .sent_requests import SentRequests
from .trace import EngineTrace

PINNED = "pinned"
ORDERED_NO_TRACE = "ordered_no_trace"
ORDERED_STALE = "ordered_stale"
KV_SATURATED = "kv_saturated"
SCORE = "score"
CLOSE = "close"
AFFINITY = "affinity"
REASONS = (PINNED, ORDERED_NO_TRACE, ORDERED_STALE, KV_SATURATED, SCORE, CLOSE, AFFINITY)

__all__ = ["REASONS", "Decision", "EngineSelector", "EngineTrace", "SelectConfig"]


@dataclass(frozen=True, slots=True)
class Decision:
    """Where a request goes.

    Attributes:
        engine: index of the engine.
        reason: one of `REASONS`.
        seq: number of this request among those that this client sent to this engine, from 1.
    """

    engine: int
    reason: str
    seq: int


class EngineSelector:
    """Algorithm 1 of SPEC section 6, for one client. Not thread-safe: one event loop owns it.

    Args:
        num_engines: engines to choose from, >= 1.
        token_budget: Q, tokens of one engine step (max_num_batched_tokens); makes the score dimensionless.
        config: the constants; by default those of the SPEC.
        kv_capacity_tokens: tokens that one engine's KV cache holds; None: unknown, and tokens sent since the
            last trace do not count as KV cache use.
        max_num_seqs: requests that one engine runs at a time; None: unknown, and nothing waits for a slot.
        first: engine at which the order starts. Clients that start at different engines do not all send their
            first request to the same one.
        clients: API servers that choose for these engines. Each sees the others' requests in traces only; what
            it has sent itself since is taken to have been sent by every one of them.

    Raises:
        ValueError: a size below 1, or `first` that is no engine.
    """

    def __init__(
        self,
        num_engines: int,
        token_budget: int,
        config: SelectConfig | None = None,
        *,
        kv_capacity_tokens: int | None = None,
        max_num_seqs: int | None = None,
        first: int = 0,
        clients: int = 1,
    ) -> None:
        if clients < 1:
            raise ValueError(f"clients: {clients}; valid: an integer >= 1")
        if num_engines < 1:
            raise ValueError(f"num_engines: {num_engines}; valid: an integer >= 1")
        if token_budget < 1:
            raise ValueError(f"token_budget: {token_budget}; valid: an integer >= 1")
        if kv_capacity_tokens is not None and kv_capacity_tokens < 1:
            raise ValueError(f"kv_capacity_tokens: {kv_capacity_tokens}; valid: an integer >= 1, or None")
        if max_num_seqs is not None and max_num_seqs < 1:
            raise ValueError(f"max_num_seqs: {max_num_seqs}; valid: an integer >= 1, or None")
        if not 0 <= first < num_engines:
            raise ValueError(f"first: {first}; valid: 0 to {num_engines - 1}")
        self.num_engines = num_engines
        self.token_budget = token_budget
        self.config = config if config is not None else SelectConfig()
        self.kv_capacity_tokens = kv_capacity_tokens
        self.max_num_seqs = max_num_seqs
        self.clients = clients
        self._next = first
        # One list per figure, kept up to date engine by engine: what is left for select() is min and max.
        self._time = [-math.inf] * num_engines  # -inf: no trace yet
        self._prefill = [0.0] * num_engines
        self._kv = [0.0] * num_engines
        self._moe = [0.0] * num_engines
        self._kv_now = [0.0] * num_engines  # kv'
        self._moe_term = [0.0] * num_engines
        self._requests = [0] * num_engines
        self._request_steps = [0.0] * num_engines
        self._steps_per_slot = 0.0  # of a slot held by one request, the mean over the engines
        self._means_changed = False
        self._score = [0.0] * num_engines
        self._sent = SentRequests(num_engines)
        self._live: Sequence[int] = range(num_engines)
        self._scored: tuple[Sequence[int], Sequence[float]] | None = None
        self._affinity = AffinityMap(self.config.affinity_keys)
        self.decisions = DecisionLog(self.config.decisions_kept)

    @property
    def scores(self) -> tuple[float | None, ...] | None:
        """Per engine the score in the last decision that computed scores, None where it was no candidate."""
        if self._scored is None:
            return None
        by_engine = dict(zip(*self._scored, strict=True))
        return tuple(by_engine.get(engine) for engine in range(self.num_engines))

    def compensation(self, engine: int) -> int:
        """Tokens sent to `engine` that its last trace does not include yet and that have not finished."""
        self._check_engine("engine", engine)
        return self._sent.tokens[engine]

    def trace_age(self, engine: int, now: float) -> float | None:
        """Seconds since the last trace of `engine`; None: there is none yet, or not any more."""
        self._check_engine("engine", engine)
        seen = self._time[engine]
        return None if seen == -math.inf else now - seen

    @property
    def live_engines(self) -> tuple[int, ...]:
        """Engines that have not been removed, ascending."""
        return tuple(self._live)

    def remove_engine(self, engine: int) -> None:
        """An engine is gone: all that was sent there and every affinity to it is dropped, and it is not chosen
        until `restore_engine`. Its traces are ignored. Removing it again does nothing.

        Raises:
            ValueError: `engine` is none.
        """
        self._check_engine("engine", engine)
        self._live = [other for other in self._live if other != engine]
        self._sent.forget(engine)
        self._affinity.drop_engine(engine)
        self._time[engine] = -math.inf
        self._prefill[engine] = self._kv[engine] = self._moe[engine] = self._request_steps[engine] = 0.0
        self._requests[engine] = 0
        self._means_changed = True
        self._refresh(engine)

    def restore_engine(self, engine: int) -> None:
        """An engine is back, or its successor is: without a trace, as at the start.

        Raises:
            ValueError: `engine` is none.
        """
        self._check_engine("engine", engine)
        self._live = sorted({*self._live, engine})
        self._means_changed = True

    def add_engine(self) -> int:
        """One more engine, behind the last one and without a trace; its index. A removed one comes back by
        `restore_engine`.
        """
        engine = self.num_engines
        self.num_engines += 1
        self._time.append(-math.inf)
        levels = (
            self._prefill,
            self._kv,
            self._moe,
            self._kv_now,
            self._moe_term,
            self._request_steps,
            self._score,
        )
        for figures in levels:
            figures.append(0.0)
        self._requests.append(0)
        self._sent.add_engine()
        self.restore_engine(engine)
        return engine

    def observe(self, engine: int, trace: EngineTrace) -> None:
        """Take a new trace of one engine and drop the requests that it includes.

        A trace that is older than one seen before (its time or its ack went back) changes nothing, and
        neither does one that is not finite: the trace before it ages on. An ack beyond anything sent cannot
        be about this client's requests, so it drops none.

        Raises:
            ValueError: `engine` is none.
        """
        self._check_engine("engine", engine)
        prefill = trace.run_prefill + trace.wait_prefill
        figures = (prefill, trace.kv, trace.moe, trace.time, trace.requests, trace.request_steps)
        if not all(map(math.isfinite, figures)):
            return
        if engine not in self._live or trace.time < self._time[engine]:
            return
        if not self._sent.acknowledge(engine, trace.ack):
            return
        self._prefill[engine] = max(0.0, prefill)
        self._kv[engine] = max(0.0, trace.kv)
        self._moe[engine] = max(0.0, trace.moe)
        self._requests[engine] = max(0, trace.requests)
        self._request_steps[engine] = max(0.0, trace.request_steps)
        self._means_changed = True  # over the engines, and with them every engine's terms
        self._time[engine] = trace.time
        self._refresh(engine)

    def release(self, engine: int, seq: int) -> None:
        """A request has finished, failed or been aborted: drop it unless a trace already includes it.

        Calling it again, or for a number that was never given out, does nothing.

        Raises:
            ValueError: `engine` is none.
        """
        self._check_engine("engine", engine)
        self._sent.release(engine, seq)
        self._refresh(engine)

    def select(
        self,
        tokens: int,
        *,
        now: float,
        pinned: int | None = None,
        affinity: int | None = None,
        affinity_key: Hashable | None = None,
        cached: Callable[[int], int] | None = None,
    ) -> Decision:
        """Choose the engine for a request and remember that it was sent there.

        Args:
            tokens: the request's prompt tokens that no prefix cache holds; all of them if `cached` is given.
            now: the client's monotonic time in seconds, on the clock of `EngineTrace.time`.
            pinned: the engine that the request must go to; no test is made.
            affinity: the engine that is taken if its score is close to the best.
            affinity_key: of a session, a prefix (`affinity.prefix_key`) or the caller's choice. Without
                `affinity`, the engine that the key's last request went to takes its place.
            cached: gives, for the engine that is chosen, how many of `tokens` its prefix cache holds. The rest,
                at least one token, is what is remembered: an engine computes the last one in any case.

        Raises:
            ValueError: `tokens` is no integer >= 0; `pinned` or `affinity` is no engine; `pinned` has been
                removed; no engine is left.
        """
        if not isinstance(tokens, int) or tokens < 0:
            raise ValueError(f"tokens: {tokens!r}; valid: an integer >= 0")
        if pinned is not None:
            self._check_engine("pinned", pinned)
            if pinned not in self._live:
                raise ValueError(f"pinned: engine {pinned} has been removed; valid: {list(self._live)}")
            return self._send(pinned, PINNED, _uncached(tokens, cached, pinned), affinity_key)
        if not self._live:
            raise ValueError("num_engines: every engine has been removed; valid: at least one that is left")
        if affinity is not None:
            self._check_engine("affinity", affinity)
        elif affinity_key is not None:
            affinity = self._affinity.get(affinity_key)
        before = self._scored
        engine, reason = self._choose(now, affinity)
        if reason != AFFINITY:
            self._next = engine + 1
        scored = self._scored if self._scored is not before else None
        return self._send(engine, reason, _uncached(tokens, cached, engine), affinity_key, now, scored)

    def _choose(self, now: float, affinity: int | None) -> tuple[int, str]:
        config = self.config
        candidates = self._candidates()
        oldest = min(self._at(self._time, candidates))
        if oldest == -math.inf:
            return self._next_in_order(candidates), ORDERED_NO_TRACE
        if now - oldest > config.stale_after:
            return self._next_in_order(candidates), ORDERED_STALE

        kv = self._at(self._kv_now, candidates)
        highest, lowest = max(kv), min(kv)
        if highest > config.kv_saturated and highest - lowest > config.kv_gap:
            freest = [engine for engine, use in zip(candidates, kv, strict=True) if use == lowest]
            return self._next_in_order(freest), KV_SATURATED

        if self._means_changed:
            self._weigh()
        scores = list(self._at(self._score, candidates))
        self._scored = (candidates, scores)
        best, close = min(scores), config.close
        equal = [engine for engine, score in zip(candidates, scores, strict=True) if score - best <= close]
        if len(equal) == 1:
            return equal[0], SCORE
        if affinity is not None and affinity in equal:
            return affinity, AFFINITY
        return self._next_in_order(equal), CLOSE

    def _candidates(self) -> Sequence[int]:
        """All engines that are left in ascending order, without the full ones if another has room.

        An engine without a trace has an unknown KV cache use: it is neither full nor a reason to leave others
        out.
        """
        full, saturated = self.config.kv_full, self.config.kv_saturated
        everyone = self._live
        if max(self._kv) < full:
            return everyone
        room = any(self._kv[engine] < saturated and self._time[engine] != -math.inf for engine in everyone)
        return [engine for engine in everyone if self._kv[engine] < full] if room else everyone

    def _at(self, figures: list[float], candidates: Sequence[int]) -> Sequence[float]:
        if len(candidates) == self.num_engines:
            return figures
        return [figures[engine] for engine in candidates]

    def _refresh(self, engine: int) -> None:
        """kv' and S of one engine: S = (prefill + compensation)/Q + w_kv·kv' + w_moe·max(0, moe/mean − 1)
        + w_slots·max(0, n + 1 − M)·G/M.

        With several clients the compensation stands for what all of them have sent. The last term, this
        project's own, is the wait for a slot, in steps like the first: of M slots, each held for G steps, one
        comes free every G/M steps, and a request behind n others needs n + 1 − M of them to. Where slots are what
        is short, the tokens left to prefill do not show who waits.
        """
        sent = self.clients * self._sent.tokens[engine]
        kv = self._kv[engine]
        if self.kv_capacity_tokens is not None:
            kv += sent / self.kv_capacity_tokens
        self._kv_now[engine] = kv
        prefill = (self._prefill[engine] + sent) / self.token_budget
        self._score[engine] = (
            prefill + self.config.w_kv * kv + self._moe_term[engine] + self._slot_term(engine)
        )

    def _slot_term(self, engine: int) -> float:
        slots = self.max_num_seqs
        if slots is None:
            return 0.0
        ahead = self._requests[engine] + self.clients * self._sent.count(engine) + 1 - slots
        return self.config.w_slots * ahead * self._steps_per_slot / slots if ahead > 0 else 0.0

    def _weigh(self) -> None:
        """The terms of every engine that contain a mean over all that are left, candidates or not."""
        known = [steps for steps in self._request_steps if steps > 0.0]
        self._steps_per_slot = sum(known) / len(known) if known else 0.0
        mean = sum(self._moe) / len(self._live)
        for engine, moe in enumerate(self._moe):
            # A mean of 0 says that no engine has processed anything: there is no pressure to compare.
            excess = max(0.0, moe / mean - 1.0) if mean > 0.0 else 0.0
            self._moe_term[engine] = self.config.w_moe * excess
            self._refresh(engine)
        self._means_changed = False

    def _next_in_order(self, members: Sequence[int]) -> int:
        """The first of `members` (ascending, not empty) at or behind the ring's position."""
        place = bisect_left(members, self._next)
        return members[place] if place < len(members) else members[0]

    def _send(
        self,
        engine: int,
        reason: str,
        tokens: int,
        key: Hashable | None,
        now: float | None = None,
        scored: tuple[Sequence[int], Sequence[float]] | None = None,
    ) -> Decision:
        seq = self._sent.send(engine, tokens)
        self._refresh(engine)
        if key is not None:
            self._affinity.put(key, engine)
        self.decisions.add(LoggedDecision(now, engine, reason, seq, tokens, *(scored or ())))
        return Decision(engine, reason, seq)

    def _check_engine(self, name: str, engine: int) -> None:
        if not 0 <= engine < self.num_engines:
            raise ValueError(f"{name}: {engine}; valid: 0 to {self.num_engines - 1}")


def _uncached(tokens: int, cached: Callable[[int], int] | None, engine: int) -> int:
    return tokens if cached is None else max(min(1, tokens), tokens - cached(engine))
