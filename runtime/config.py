"""Settings of the runtime: where they come from, what is valid, what they mean.

`GimbalConfig` is the single table: every field carries its meaning and its valid range, and `settings()`
lists them for the documentation.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

MODES = ("off", "dp", "ep", "uncoordinated", "full")
RECORDINGS = ("auto", "kernel", "loads", "compare")
METHODS = ("portfolio", "greedy", "paper", "eplb")
TRANSFERS = ("auto", "stock", "process_group", "shared_memory", "peer_memory")
AFFINITIES = ("prefix", "session", "off")
SLOT_ORDERS = ("arrival", "size")
ENV_PREFIX = "GIMBAL_"
CONFIG_KEY = "gimbal"
# Set on a server that this package's tools start, so that they find its processes again; not a setting.
SERVER_VARIABLE = "GIMBAL_SERVER_ID"
# A Kubernetes service whose name begins with "gimbal" puts its addresses into the environment of every pod.
_SERVICE_VARIABLE = re.compile(r"_(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT(_\d+_(TCP|UDP|SCTP)(_\w+)?)?)$")

_TRUE = ("1", "true", "yes", "on")
_FALSE = ("0", "false", "no", "off")
_NO_AGEING = ("off", "inf")
_AUTO = "auto"


@dataclass(frozen=True)
class Setting:
    """One row of the settings table: field name, default, what it means, what is valid."""

    name: str
    default: Any
    meaning: str
    valid: str

    @property
    def variable(self) -> str:
        """Name of the environment variable."""
        return ENV_PREFIX + self.name.upper()


@dataclass(frozen=True)
class _Kind:
    """How a value is read from text and checked; both raise ValueError when the value is not valid."""

    valid: str
    check: Callable[[Any], Any]
    parse: Callable[[str], Any]


def _reject(value: object) -> ValueError:
    return ValueError(repr(value))


def _choice(names: tuple[str, ...]) -> _Kind:
    def check(value: Any) -> str:
        if not isinstance(value, str) or value not in names:
            raise _reject(value)
        return value

    return _Kind(valid=", ".join(names), check=check, parse=str.lower)


def _flag() -> _Kind:
    def check(value: Any) -> bool:
        if not isinstance(value, bool):
            raise _reject(value)
        return value

    def parse(text: str) -> Any:
        word = text.lower()
        return True if word in _TRUE else False if word in _FALSE else text

    return _Kind(valid="true or false (also 1, 0, yes, no, on, off in a variable)", check=check, parse=parse)


def _number(
    valid: str,
    *,
    low: float = 0.0,
    high: float = math.inf,
    above: bool = False,
    optional: bool = False,
    unlimited: bool = False,
    auto: bool = False,
) -> _Kind:
    """A float in [low, high], or (low, high] with `above`; `unlimited` takes infinity, "off" and "inf", and
    `auto` takes "auto"."""

    def check(value: Any) -> float | str | None:
        if value is None and optional:
            return None
        if auto and isinstance(value, str) and value.lower() == _AUTO:
            return _AUTO
        if unlimited and isinstance(value, str) and value.lower() in _NO_AGEING:
            return math.inf
        # bool is an int in Python: true is not a number here.
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise _reject(value)
        # NaN fails both comparisons, so it is never in range.
        in_range = (value > low if above else value >= low) and value <= high
        if not in_range or (math.isinf(value) and not unlimited):
            raise _reject(value)
        return float(value)

    def parse(text: str) -> Any:
        try:
            return float(text)
        except ValueError:
            return text

    return _Kind(valid=valid, check=check, parse=parse)


def _integer(low: int, *, optional: bool = False) -> _Kind:
    def check(value: Any) -> int | None:
        if value is None and optional:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or value < low:
            raise _reject(value)
        return value

    def parse(text: str) -> Any:
        try:
            return int(text)
        except ValueError:
            return text

    return _Kind(valid=f"an integer >= {low}", check=check, parse=parse)


def _path() -> _Kind:
    def check(value: Any) -> str | None:
        if value is not None and (not isinstance(value, str) or not value):
            raise _reject(value)
        return value

    return _Kind(valid="a folder's path", check=check, parse=str)


def _setting(default: Any, kind: _Kind, meaning: str) -> Any:
    return field(default=default, metadata={"kind": kind, "meaning": meaning})


_WEIGHT = _number("a finite number >= 0", optional=True)
_SHARE = _number("a number from 0 to 1", high=1.0)
_PART = _number("a number from 0 to below 1", high=math.nextafter(1.0, 0.0))
_FACTOR = _number("a finite number >= 0")
_SECONDS = _number("a finite number of seconds > 0", above=True)


@dataclass(frozen=True, kw_only=True)
class GimbalConfig:
    """All settings, checked. The scheduling constants are those of SPEC sections 6 and 7.

    Raises:
        ValueError: a value of the wrong type or outside its range, `kv_full` below `kv_saturated`, or a
            `heartbeat` that is not shorter than `stale_after`.
    """

    mode: str = _setting(
        "full",
        _choice(MODES),
        "off: stock vLLM; dp: engine choice and queue; ep: expert placement; uncoordinated: both, without "
        "feedback; full: both, with MoE pressure fed back to engine choice",
    )
    strict: bool = _setting(
        False, _flag(), "a hook that does not fit the installed vLLM is an error at start-up, not a warning"
    )
    observe: bool = _setting(
        False,
        _flag(),
        "in modes off and dp: count source rows and export figures all the same, place nothing",
    )
    traffic_dir: str | None = _setting(
        None, _path(), "folder in which every closed window's traffic is saved as an .npz"
    )
    recording: str = _setting(
        "auto",
        _choice(RECORDINGS),
        "how picks are counted: kernel: map_and_count in place of vLLM's recording function; loads: from vLLM's "
        "load counters; auto: kernel where experts are placed, else loads; compare: kernel, checked against "
        "vLLM's own recording at every window",
    )
    first_window: int | None = _setting(
        None,
        _integer(1, optional=True),
        "steps of the first window, so that the first placement comes early (unset: vLLM's own, a quarter of its "
        "step_interval)",
    )
    node_statistics: bool = _setting(
        False,
        _flag(),
        "prefill and decode nodes: measure iterations and answer `gimbal route` at /gimbal/node",
    )
    method: str = _setting("portfolio", _choice(METHODS), "placement method (docs/placement.md)")
    alpha: float | None = _setting(None, _WEIGHT, "placement: weight of remote picks (unset: the method's)")
    beta: float | None = _setting(None, _WEIGHT, "placement: weight of imbalance (unset: the method's)")
    gamma: float | None = _setting(
        None,
        _WEIGHT,
        "placement: price of a moved expert (unset: by its bytes; for method paper the paper's)",
    )
    horizon: float = _setting(
        3.0,
        _number("a finite number > 0", above=True),
        "placement: windows that a placement is expected to live; a move has to earn back its bytes in them",
    )
    max_moves: int | None = _setting(
        None,
        _integer(0, optional=True),
        "placement: experts of a layer that may change rank after a window (method portfolio; unset: any number)",
    )
    bandwidth: float | None = _setting(
        None,
        _number("a finite number > 0", above=True, optional=True),
        "break-even: GB/s that a rank can send and receive (unset: the rule is off)",
    )
    pick_time: float | None = _setting(
        None,
        _number("a finite number > 0", above=True, optional=True),
        "break-even: microseconds that one pick adds to a layer on its rank (unset: the rule is off)",
    )
    overlap: float = _setting(
        0.0, _PART, "break-even: part of a transfer that is hidden behind serving (asynchronous EPLB)"
    )
    margin: float = _setting(0.0, _PART, "break-even: part by which the gain must exceed the price")
    shares_interval: int | None = _setting(
        None,
        _integer(1, optional=True),
        "spare slots: engine steps between refreshes of the copies' shares (unset: the nearest copies, evenly)",
    )
    migration: str = _setting(
        "auto",
        _choice(TRANSFERS),
        "how experts travel: stock: vLLM's own way; process_group: between any ranks; shared_memory: CPUs of one "
        "machine; peer_memory: GPUs of one machine; auto: shared_memory where it is possible, else stock",
    )
    migration_timeout: float = _setting(
        30.0, _SECONDS, "seconds of silence after which a rank is given up and its rearrangement abandoned"
    )
    w_kv: float = _setting(1.0, _FACTOR, "engine choice: weight of KV cache use in the score")
    w_moe: float = _setting(1.0, _FACTOR, "engine choice: weight of MoE pressure in the score")
    w_slots: float = _setting(
        0.5, _FACTOR, "engine choice: weight of the wait for one of `max_num_seqs` slots"
    )
    close: float = _setting(0.05, _FACTOR, "engine choice: scores this near to the best count as equal")
    stale_after: float = _setting(5.0, _SECONDS, "engine choice: seconds until a trace counts as stale")
    kv_saturated: float = _setting(0.90, _SHARE, "engine choice: KV cache use from which the veto looks")
    kv_gap: float = _setting(0.10, _SHARE, "engine choice: spread of KV cache use from which the veto acts")
    kv_full: float = _setting(0.995, _SHARE, "engine choice: KV cache use at which an engine is left out")
    affinity: str = _setting(
        "prefix",
        _choice(AFFINITIES),
        "engine choice: what keeps requests on one engine while scores are close. session: the request's affinity "
        "key, else its session, else its cache salt; prefix: the same, else its first 256 tokens",
    )
    age_limit: Any = _setting(  # noqa: RUF009  # a float, or "auto"
        5.0,
        _number("a number of seconds >= 0, or off, or auto", unlimited=True, auto=True),
        "queue: seconds after which a request is served in arrival order (off or inf: never; auto: by the "
        "waits seen lately)",
    )
    slot_order: str = _setting(
        "arrival",
        _choice(SLOT_ORDERS),
        "queue: order while requests wait for slots rather than tokens. arrival: the age limit shrinks; size: it "
        "does not",
    )
    pressure_interval: int = _setting(8, _integer(1), "engine steps between exchanges of MoE pressure")
    heartbeat: float = _setting(1.0, _SECONDS, "seconds after which an engine publishes an unchanged trace")

    def __post_init__(self) -> None:
        for entry in fields(self):
            value = _checked(entry.metadata["kind"], getattr(self, entry.name), entry.name)
            object.__setattr__(self, entry.name, value)
        if self.kv_full < self.kv_saturated:
            raise ValueError(
                f"kv_full: {self.kv_full} is below kv_saturated ({self.kv_saturated}); "
                f"valid: {self.kv_saturated} to 1"
            )
        if self.heartbeat >= self.stale_after:
            # An idle engine publishes once per heartbeat only: it would look dead between two of them.
            raise ValueError(
                f"heartbeat: {self.heartbeat} s is not shorter than stale_after ({self.stale_after} s); "
                f"valid: above 0 and below {self.stale_after}"
            )

    @property
    def chooses_engines(self) -> bool:
        """Algorithms 1 and 2 are in force."""
        return self.mode in ("dp", "uncoordinated", "full")

    @property
    def places_experts(self) -> bool:
        """Experts are placed by this project instead of vLLM's own policy."""
        return self.mode in ("ep", "uncoordinated", "full")

    @property
    def feeds_pressure(self) -> bool:
        """MoE pressure enters the score of engine choice."""
        return self.mode == "full"

    @property
    def replaces_recording(self) -> bool:
        """vLLM's recording function is replaced, where a model allows it."""
        return self.recording in ("kernel", "compare") or (self.recording == "auto" and self.places_experts)

    @property
    def counts_traffic(self) -> bool:
        """Source rows [L, S, E] are recorded."""
        return self.places_experts or self.observe

    @classmethod
    def from_sources(
        cls, additional_config: Mapping[str, Any] | None, environ: Mapping[str, str]
    ) -> GimbalConfig:
        """Settings from vLLM's `additional_config["gimbal"]` and, below it, from GIMBAL_* variables.

        A variable that is set but empty counts as unset. A value that is overridden is not looked at.

        Raises:
            ValueError: an unknown name, or a value that is not valid; one line that lists what is valid.
        """
        kinds: dict[str, _Kind] = {entry.name: entry.metadata["kind"] for entry in fields(cls)}
        given = _section(additional_config)
        values: dict[str, Any] = {}
        for variable, text in environ.items():
            if not variable.startswith(ENV_PREFIX) or variable == SERVER_VARIABLE:
                continue
            if _SERVICE_VARIABLE.search(variable):
                continue
            name = variable[len(ENV_PREFIX) :].lower()
            if name not in kinds or variable != ENV_PREFIX + name.upper():
                known = ", ".join(entry.variable for entry in settings())
                raise ValueError(f"{variable}: no such variable; valid: {known}")
            text = text.strip()
            if text and name not in given:
                values[name] = _checked(kinds[name], kinds[name].parse(text), variable)
        for name, value in given.items():
            if name not in kinds:
                raise ValueError(f"{CONFIG_KEY}.{name}: no such setting; valid: {', '.join(kinds)}")
            values[name] = _checked(kinds[name], value, f"{CONFIG_KEY}.{name}")
        return cls(**values)


def settings() -> tuple[Setting, ...]:
    """The settings table in field order: name, default, meaning, valid values."""
    return tuple(
        Setting(
            name=entry.name,
            default=entry.default,
            meaning=entry.metadata["meaning"],
            valid=entry.metadata["kind"].valid,
        )
        for entry in fields(GimbalConfig)
    )


def _section(additional_config: Mapping[str, Any] | None) -> Mapping[str, Any]:
    if additional_config is None:
        return {}
    section = additional_config.get(CONFIG_KEY)
    if section is None:
        return {}
    if not isinstance(section, Mapping):
        raise ValueError(
            f"additional_config[{CONFIG_KEY!r}]: {section!r}; valid: an object of settings, "
            f"such as {{'mode': 'full'}}"
        )
    return section


def _checked(kind: _Kind, value: Any, label: str) -> Any:
    try:
        return kind.check(value)
    except (ValueError, OverflowError):  # OverflowError: an integer beyond the range of a double
        raise ValueError(f"{label}: {value!r}; valid: {kind.valid}") from None
