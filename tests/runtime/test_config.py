"""Settings: sources and their order, modes, ranges, and messages that list what is valid."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any

import pytest
from gimbal_runtime.config import MODES, GimbalConfig, settings


def from_sources(section: Any = None, **environ: str) -> GimbalConfig:
    return GimbalConfig.from_sources({"gimbal": section} if section is not None else None, environ)


def test_defaults() -> None:
    assert dataclasses.asdict(GimbalConfig()) == {
        "mode": "full",
        "strict": False,
        "observe": False,
        "traffic_dir": None,
        "recording": "auto",
        "first_window": None,
        "node_statistics": False,
        "method": "portfolio",
        "alpha": None,
        "beta": None,
        "gamma": None,
        "horizon": 3.0,
        "max_moves": None,
        "bandwidth": None,
        "pick_time": None,
        "overlap": 0.0,
        "margin": 0.0,
        "shares_interval": None,
        "migration": "auto",
        "migration_timeout": 30.0,
        "w_kv": 1.0,
        "w_moe": 1.0,
        "w_slots": 0.5,
        "close": 0.05,
        "stale_after": 5.0,
        "kv_saturated": 0.90,
        "kv_gap": 0.10,
        "kv_full": 0.995,
        "affinity": "prefix",
        "age_limit": 5.0,
        "slot_order": "arrival",
        "pressure_interval": 8,
        "heartbeat": 1.0,
    }
    assert from_sources() == from_sources({}) == GimbalConfig()
    assert GimbalConfig.from_sources({"other": 1, "gimbal": None}, {"PATH": "/bin"}) == GimbalConfig()


@pytest.mark.parametrize(
    ("mode", "engines", "experts", "pressure"),
    [
        ("off", False, False, False),
        ("dp", True, False, False),
        ("ep", False, True, False),
        ("uncoordinated", True, True, False),
        ("full", True, True, True),
    ],
)
def test_modes(mode: str, engines: bool, experts: bool, pressure: bool) -> None:
    config = GimbalConfig(mode=mode)
    assert (config.chooses_engines, config.places_experts, config.feeds_pressure) == (
        engines,
        experts,
        pressure,
    )
    assert config.counts_traffic is experts
    assert GimbalConfig(mode=mode, observe=True).counts_traffic is True


def test_additional_config_wins_over_variables() -> None:
    config = from_sources({"mode": "dp", "close": 0}, GIMBAL_MODE="ep", GIMBAL_CLOSE="x", GIMBAL_KV_GAP="0.2")
    assert (config.mode, config.close, config.kv_gap) == ("dp", 0.0, 0.2)


def test_variables_are_read_as_their_field() -> None:
    config = from_sources(
        GIMBAL_MODE="Full",
        GIMBAL_STRICT="1",
        GIMBAL_OBSERVE="no",
        GIMBAL_TRAFFIC_DIR="traffic",
        GIMBAL_ALPHA="2",
        GIMBAL_PRESSURE_INTERVAL="16",
        GIMBAL_METHOD="",
        GIMBAL_SERVER_ID="anything",
    )
    expected = GimbalConfig(strict=True, traffic_dir="traffic", alpha=2.0, pressure_interval=16)
    assert config == expected
    assert isinstance(config.alpha, float)


@pytest.mark.parametrize("value", ["off", "OFF", "inf", math.inf])
def test_ageing_can_be_switched_off(value: Any) -> None:
    assert from_sources({"age_limit": value}).age_limit == math.inf
    assert from_sources(GIMBAL_AGE_LIMIT=str(value)).age_limit == math.inf


def test_a_section_survives_json() -> None:
    section = json.loads('{"mode": "ep", "gamma": null, "traffic_dir": null, "beta": 4, "age_limit": "inf"}')
    assert from_sources(section) == GimbalConfig(mode="ep", beta=4.0, age_limit=math.inf)


def test_unknown_names_list_the_valid_ones() -> None:
    with pytest.raises(
        ValueError, match=r"^GIMBAL_MOED: .*valid: GIMBAL_MODE, GIMBAL_STRICT, .*GIMBAL_HEARTBEAT\b.*$"
    ):
        from_sources(GIMBAL_MOED="full")
    with pytest.raises(ValueError, match=r"^gimbal\.moed: .*valid: mode, strict, .*, heartbeat\b.*$"):
        from_sources({"moed": "full"})
    with pytest.raises(ValueError, match=r"^GIMBAL_mode: "):
        from_sources(GIMBAL_mode="full")


@pytest.mark.parametrize("section", ["full", 3, ["mode"]])
def test_a_section_that_is_no_object_is_refused(section: Any) -> None:
    with pytest.raises(ValueError, match=r"additional_config\['gimbal'\]: .*valid: an object"):
        from_sources(section)


INVALID = [
    ("mode", "fast", "off, dp, ep, uncoordinated, full"),
    ("method", "milp", "portfolio, greedy, paper, eplb"),
    ("horizon", 0, "a finite number > 0"),
    ("max_moves", -1, "an integer >= 0"),
    ("bandwidth", 0, "a finite number > 0"),
    ("pick_time", math.inf, "a finite number > 0"),
    ("overlap", 1, "a number from 0 to below 1"),
    ("margin", -0.1, "a number from 0 to below 1"),
    ("shares_interval", 0, "an integer >= 1"),
    ("strict", "maybe", "true or false"),
    ("alpha", -1, "a finite number >= 0"),
    ("beta", math.nan, "a finite number >= 0"),
    ("gamma", math.inf, "a finite number >= 0"),
    ("w_kv", "heavy", "a finite number >= 0"),
    ("w_moe", -0.1, "a finite number >= 0"),
    ("w_slots", -0.1, "a finite number >= 0"),
    ("close", "off", "a finite number >= 0"),
    ("stale_after", 0, "a finite number of seconds > 0"),
    ("kv_saturated", 1.1, "a number from 0 to 1"),
    ("kv_gap", -0.1, "a number from 0 to 1"),
    ("kv_full", 99.5, "a number from 0 to 1"),
    ("affinity", "user", "prefix, session, off"),
    ("age_limit", -1, "a number of seconds >= 0, or off"),
    ("age_limit", math.nan, "a number of seconds >= 0, or off"),
    ("slot_order", "longest", "arrival, size"),
    ("pressure_interval", 0, "an integer >= 1"),
    ("pressure_interval", 2.5, "an integer >= 1"),
    ("heartbeat", math.inf, "a finite number of seconds > 0"),
]


@pytest.mark.parametrize(("name", "value", "valid"), INVALID)
def test_what_is_not_valid_is_named_in_one_line(name: str, value: Any, valid: str) -> None:
    calls = {
        f"GIMBAL_{name.upper()}": lambda: from_sources(**{f"GIMBAL_{name.upper()}": str(value)}),
        f"gimbal.{name}": lambda: from_sources({name: value}),
        name: lambda: GimbalConfig(**{name: value}),
    }
    for label, call in calls.items():
        with pytest.raises(ValueError, match="valid: ") as caught:
            call()
        message = str(caught.value)
        assert message.startswith(f"{label}: ")
        assert valid in message
        assert "\n" not in message


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("mode", None),
        ("mode", ["full"]),
        ("strict", 1),
        ("strict", None),
        ("w_kv", True),
        ("w_kv", "1.0"),
        ("w_kv", None),
        ("w_kv", 10**400),
        ("traffic_dir", 3),
        ("traffic_dir", ""),
        ("pressure_interval", 8.0),
        ("pressure_interval", True),
    ],
)
def test_json_values_of_the_wrong_type_are_refused(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"^gimbal\.{name}: "):
        from_sources({name: value})


def test_settings_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(ValueError, match=r"kv_full: 0\.8 is below kv_saturated"):
        GimbalConfig(kv_full=0.8)
    with pytest.raises(ValueError, match=r"heartbeat: 5\.0 s is not shorter than stale_after"):
        GimbalConfig(heartbeat=5)


def test_the_settings_table_is_the_dataclass() -> None:
    table = settings()
    assert [row.name for row in table] == [entry.name for entry in dataclasses.fields(GimbalConfig)]
    assert {row.name: row.default for row in table} == dataclasses.asdict(GimbalConfig())
    assert all(row.meaning and row.valid and row.variable == f"GIMBAL_{row.name.upper()}" for row in table)
    assert table[0].valid == ", ".join(MODES)


def test_a_config_is_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        GimbalConfig().mode = "off"  # type: ignore[misc]


@pytest.mark.parametrize(
    ("mode", "recording", "replaces"),
    [
        ("full", "auto", True),
        ("ep", "loads", False),
        ("off", "auto", False),
        ("off", "kernel", True),
        ("dp", "compare", True),
    ],
)
def test_vllms_recording_is_replaced_where_experts_are_placed_or_as_asked(
    mode: str, recording: str, replaces: bool
) -> None:
    assert from_sources(GIMBAL_MODE=mode, GIMBAL_RECORDING=recording).replaces_recording is replaces


@pytest.mark.parametrize("value", ["0", "1.5", "soon"])
def test_first_window_is_a_number_of_steps(value: str) -> None:
    assert from_sources(GIMBAL_FIRST_WINDOW="40").first_window == 40
    with pytest.raises(ValueError, match=r"GIMBAL_FIRST_WINDOW: .*; valid: an integer >= 1"):
        from_sources(GIMBAL_FIRST_WINDOW=value)
