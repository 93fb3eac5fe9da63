"""What an engine tells about itself, and how it travels.

An engine publishes one `EngineReport` for all its clients (API servers); the coordinator passes it on unread;
each client takes from it the `EngineTrace` that concerns itself. SPEC section 6.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

WIRE_VERSION = 2
_COUNT_LIMIT = 2**63


@dataclass(frozen=True, slots=True)
class EngineTrace:
    """One engine as one client sees it.

    Not checked on construction: it is built for every engine at every publication. `EngineReport.from_wire`
    checks what came over the wire, and `EngineSelector.observe` ignores a trace that is not finite.

    Attributes:
        run_prefill: prompt tokens that running requests have still to prefill.
        wait_prefill: prompt tokens of waiting requests.
        kv: share of the KV cache in use, 0 to 1.
        moe: recent tokens processed by the experts on the engine's EP ranks (token-equivalents).
        ack: last sequence number of this client that the engine has admitted; 0: none yet.
        time: client's monotonic time, in seconds, at which the engine's counter last rose.
        requests: running and waiting requests.
        request_steps: mean number of tokens that a request had produced when it ended: about the engine steps for
            which it had held a slot (speculative decoding makes several tokens a step); 0: none has ended yet, or
            requests produce none (pooling).
    """

    run_prefill: float
    wait_prefill: float
    kv: float
    moe: float
    ack: int
    time: float
    requests: int = 0
    request_steps: float = 0.0


@dataclass(frozen=True, slots=True)
class EngineReport:
    """One publication of one engine, for all clients.

    Attributes:
        run_prefill, wait_prefill, requests, request_steps: as in `EngineTrace`.
        kv: 0 to 1.
        moe: token-equivalents.
        counter: rises by at least one with each publication: a repeated or late copy is told by it.
        acks: client index -> last sequence number admitted from that client.
        figures: metric figures that the engine passes along, by name.
    """

    run_prefill: int
    wait_prefill: int
    kv: float
    moe: float
    counter: int
    acks: Mapping[int, int]
    figures: Mapping[str, float] = field(default_factory=dict)
    requests: int = 0
    request_steps: float = 0.0

    def to_wire(self) -> dict[str, Any]:
        """Plain msgpack (and JSON) types under short string keys; `figures` only when there are any."""
        wire: dict[str, Any] = {
            "v": WIRE_VERSION,
            "r": int(self.run_prefill),
            "w": int(self.wait_prefill),
            "u": float(self.kv),
            "m": float(self.moe),
            "c": int(self.counter),
            "n": int(self.requests),
            "g": float(self.request_steps),
            # msgpack decoders refuse integer keys unless told otherwise, and JSON has none.
            "a": {str(client): int(ack) for client, ack in self.acks.items()},
        }
        if self.figures:
            wire["f"] = {str(name): float(value) for name, value in self.figures.items()}
        return wire

    @classmethod
    def from_wire(cls, obj: object) -> EngineReport | None:
        """The report in `obj`, or None for anything that is not one. Never raises.

        A missing signal is not zero: a report without one of its signals, or with one that is negative, not
        finite, (kv) above 1 or (request_steps) beyond any count, is no report, and the engine's trace ages instead.
        `figures` are no signals: one that is not a finite number is left out.
        """
        if not isinstance(obj, dict) or _count(obj.get("v")) != WIRE_VERSION:
            return None
        run_prefill, wait_prefill, counter, requests = (_count(obj.get(key)) for key in ("r", "w", "c", "n"))
        kv, moe, request_steps = (_level(obj.get(key)) for key in ("u", "m", "g"))
        acks = _acks(obj.get("a"))
        if run_prefill is None or wait_prefill is None or counter is None or acks is None:
            return None
        if kv is None or kv > 1.0 or moe is None or requests is None:
            return None
        # A mean of counts; its product with `requests` has to be finite.
        if request_steps is None or request_steps >= _COUNT_LIMIT:
            return None
        return cls(
            run_prefill=run_prefill,
            wait_prefill=wait_prefill,
            kv=kv,
            moe=moe,
            counter=counter,
            acks=acks,
            figures=_figures(obj.get("f")),
            requests=requests,
            request_steps=request_steps,
        )

    def trace_for(self, client_index: int, time: float) -> EngineTrace:
        """The trace for one client; `time` is that client's monotonic time at which `counter` last rose."""
        return EngineTrace(
            run_prefill=self.run_prefill,
            wait_prefill=self.wait_prefill,
            kv=self.kv,
            moe=self.moe,
            ack=self.acks.get(client_index, 0),
            time=time,
            requests=self.requests,
            request_steps=self.request_steps,
        )


def _count(value: object) -> int | None:
    # bool is an int in Python, but true is no count.
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < _COUNT_LIMIT:
        return None
    return value


def _finite(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        number = float(value)
    except OverflowError:  # an integer beyond the range of a double
        return None
    return number if math.isfinite(number) else None


def _level(value: object) -> float | None:
    number = _finite(value)
    return None if number is None or number < 0.0 else number


def _acks(value: object) -> dict[int, int] | None:
    if not isinstance(value, dict):
        return None
    acks: dict[int, int] = {}
    for key, entry in value.items():
        ack = _count(entry)
        if ack is None or not isinstance(key, str) or not (key.isascii() and key.isdigit()) or len(key) > 9:
            return None
        acks[int(key)] = ack
    return acks


def _figures(value: object) -> dict[str, float]:
    if not isinstance(value, dict):
        return {}
    numbers = {name: _finite(number) for name, number in value.items() if isinstance(name, str)}
    return {name: number for name, number in numbers.items() if number is not None}
