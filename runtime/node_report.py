"""What a server of prefill/decode-disaggregated serving tells the router, and how it travels (SPEC section 8).

One server publishes one `NodeReport` about its engine as JSON; `gimbal route` reads it. Both know a request by the
name that the proxy gives it in the request's extra arguments.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from .iteration_model import FitQuality, IterationModel

WIRE_VERSION = 1
PATH = "/gimbal/node"
"""Where a server answers with its report."""

REQUEST_ARGUMENT = "gimbal_request"
"""Extra argument (`vllm_xargs`): name of the request, unique to it."""
CHUNKS_ARGUMENT = "gimbal_chunks"
"""Extra argument: prompt tokens of each iteration; the request is deflected."""
BETA_ARGUMENT = "gimbal_beta"
"""Extra argument: share of the strictest time between tokens that an iteration with its chunks may take."""
TBT_ARGUMENT = "gimbal_tbt_slo"
"""Extra argument: seconds between tokens that the request asks for."""
TRANSFERRED_ARGUMENT = "gimbal_transferred"
"""Extra argument: the prompt's KV cache has been computed by a prefill node."""

_COEFFICIENTS = ("a", "c0", "c1", "c_pf", "c_attn")


class Prefill(NamedTuple):
    """A prompt that is queued or running on a node.

    Attributes:
        request: name of the request; empty: it did not come through a router.
        left, done: prompt tokens to compute, and computed.
    """

    request: str
    left: int
    done: int


class Computed(NamedTuple):
    """A prompt that a node has completed lately.

    Attributes:
        request: name of the request.
        seconds: from the start of its first iteration to the end of the last one of its prompt.
        since_arrival: seconds from its arrival at the server to the same end.
    """

    request: str
    seconds: float
    since_arrival: float


@dataclass(frozen=True, slots=True)
class NodeReport:
    """State of one engine between two iterations.

    Attributes:
        steps: iterations so far.
        model: of its iterations; None: none measured yet.
        prefills: queued and running prompts.
        resident: names of all requests on it that have one.
        n_decode: requests that are decoding, and
        kv_tokens: tokens in their KV cache.
        kv_free: tokens for which its KV cache has room, those that waiting prompts will take subtracted; None:
            not known.
        tbt_slo: strictest time between tokens that a request on it asks for, seconds; None: none asks.
        deflected: of `prefills`, the names of those that are deflected.
        limits_chunks: whether its scheduler obeys `CHUNKS_ARGUMENT`.
        token_budget: prompt tokens of one iteration.
        kv_bytes_per_token: bytes of KV cache of one token; None: not known.
        computed: prompts completed lately, oldest first.
    """

    steps: int
    model: IterationModel | None
    prefills: tuple[Prefill, ...]
    resident: frozenset[str]
    n_decode: int
    kv_tokens: int
    kv_free: int | None
    tbt_slo: float | None
    deflected: tuple[str, ...]
    limits_chunks: bool
    token_budget: int
    kv_bytes_per_token: float | None
    computed: tuple[Computed, ...] = ()

    def to_wire(self) -> dict[str, Any]:
        """Plain JSON types."""
        return {
            "version": WIRE_VERSION,
            "steps": self.steps,
            "model": _model_to_wire(self.model),
            "prefills": [list(prefill) for prefill in self.prefills],
            "resident": sorted(self.resident),
            "n_decode": self.n_decode,
            "kv_tokens": self.kv_tokens,
            "kv_free": self.kv_free,
            "tbt_slo": self.tbt_slo,
            "deflected": list(self.deflected),
            "limits_chunks": self.limits_chunks,
            "token_budget": self.token_budget,
            "kv_bytes_per_token": self.kv_bytes_per_token,
            "computed": [list(entry) for entry in self.computed],
        }

    @classmethod
    def from_wire(cls, obj: object) -> NodeReport | None:
        """The report in `obj`, or None for anything that is not one. Never raises.

        A missing signal is not zero: a report without one of its fields, or with one out of range, is none.
        """
        try:
            return _read(obj) if isinstance(obj, Mapping) and obj["version"] == WIRE_VERSION else None
        except (KeyError, TypeError, ValueError, OverflowError):
            return None


def _model_to_wire(model: IterationModel | None) -> dict[str, Any] | None:
    if model is None:
        return None
    wire: dict[str, Any] = {name: getattr(model, name) for name in _COEFFICIENTS}
    quality = model.quality
    if quality is None:
        return wire | {"quality": None}
    fit = {"error": quality.error, "iterations": quality.iterations, "prefills": quality.prefills}
    return wire | {"quality": fit, "good": model.good}


def _read_model(obj: Any) -> IterationModel | None:
    if obj is None:
        return None
    coefficients = [_level(obj[name]) for name in _COEFFICIENTS]
    fit = obj["quality"]
    if fit is None:
        return IterationModel(*coefficients)
    quality = FitQuality(_level(fit["error"]), _level(fit["iterations"]), _level(fit["prefills"]))
    return IterationModel(*coefficients, quality=quality)


def _read(obj: Mapping[Any, Any]) -> NodeReport:
    tbt_slo, kv_free, kv_bytes = obj["tbt_slo"], obj["kv_free"], obj["kv_bytes_per_token"]
    return NodeReport(
        steps=_count(obj["steps"]),
        model=_read_model(obj["model"]),
        prefills=tuple(
            Prefill(_text(name), _count(left), _count(done)) for name, left, done in _rows(obj["prefills"])
        ),
        resident=frozenset(_text(name) for name in _rows(obj["resident"])),
        n_decode=_count(obj["n_decode"]),
        kv_tokens=_count(obj["kv_tokens"]),
        kv_free=None if kv_free is None else _count(kv_free),
        tbt_slo=None if tbt_slo is None else _positive(tbt_slo),
        deflected=tuple(_text(name) for name in _rows(obj["deflected"])),
        limits_chunks=_flag(obj["limits_chunks"]),
        token_budget=max(1, _count(obj["token_budget"])),
        kv_bytes_per_token=None if kv_bytes is None else _level(kv_bytes),
        computed=tuple(
            Computed(_text(name), _level(seconds), _level(since))
            for name, seconds, since in _rows(obj["computed"])
        ),
    )


def _rows(value: Any) -> Sequence[Any]:
    if not isinstance(value, (list, tuple)):
        raise TypeError(value)
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(value)
    return value


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise TypeError(value)
    return value


def _count(value: Any) -> int:
    # bool is an int in Python, but true is no count.
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**63:
        raise ValueError(value)
    return value


def _level(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(value)
    number = float(value)
    if not (math.isfinite(number) and number >= 0.0):
        raise ValueError(value)
    return number


def _positive(value: Any) -> float:
    number = _level(value)
    if number == 0.0:
        raise ValueError(value)
    return number
