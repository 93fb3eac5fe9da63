"""Files with expert traffic: this project's TRAFFIC.npz, and what SGLang and vLLM leave behind."""

from __future__ import annotations

import io
import json
import warnings
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from .errors import InputError

# Unpacked; a window of 58 layers, 64 sources and 256 experts has 7.6 MB.
MOST_BYTES = 2**31
MOST_EXPERTS = 16384
NO_SOURCES = "no source axis in this file: remote picks are unknown, what can be improved is balance only"
VALID = (
    "an .npz with `traffic` [L, S, E] integers and optional `current` [L, P], SGLang's "
    "expert_distribution_recorder_*.pt, or vLLM's expert_load_window with physical_to_logical_map"
)


@dataclass(frozen=True, eq=False)
class TrafficFile:
    """traffic: int64 [L, S, E] picks. current: int32 [L, P] or None. distance: [S, R] or None.

    kind: what the file is. loads_only: the file has no source axis; then S = 1.
    """

    path: Path
    kind: str
    traffic: Any
    current: Any
    distance: Any
    loads_only: bool


def read_traffic(path: Path) -> TrafficFile:
    """Reads a traffic file of any of the kinds in `VALID`.

    SGLang: `logical_count` [W, L, E] of W buffered steps (recorder modes stat and stat_approx; also as .json), or
    `records` with `global_physical_count` [L, P] each and `last_physical_to_logical_map` [L, P] (modes per_pass and
    per_token). vLLM 0.32 writes no dump itself; what is read here are the tensors of its EPLB state under their
    own names, saved by numpy.savez or torch.save: `expert_load_window` [W, L, P] (or `expert_load_pass` [L, P])
    with `physical_to_logical_map` [L, P], or `global_expert_load_window` [L, E].

    Raises:
        InputError: no such file, or not one of these.
    """
    try:
        is_file, size = path.is_file(), path.stat().st_size
    except OSError:
        is_file, size = False, 0
    if not is_file:
        raise InputError(f"{path}: no such file; valid: {VALID}")
    if size == 0:
        raise InputError(f"{path}: empty file; valid: {VALID}")
    if path.suffix in (".pt", ".pth"):
        content = _load_torch(path)
    elif path.suffix == ".json":
        content = _load_json(path)
    else:
        content = _load_npz(path)
    try:
        return _interpret(path, content)
    except InputError as error:
        raise InputError(f"{path}: {error}") from None


def _load_npz(path: Path) -> dict[str, Any]:
    try:
        with zipfile.ZipFile(path) as archive:
            largest = max((entry.file_size for entry in archive.infolist()), default=0)
            if largest > MOST_BYTES:
                raise InputError(
                    f"{path}: an array of {largest / 2**30:.1f} GiB; valid: at most {MOST_BYTES / 2**30:g} GiB"
                )
        with np.load(path, allow_pickle=False) as data:
            return {name: data[name] for name in data.files}
    except InputError:
        raise
    except (
        OSError,
        EOFError,
        KeyError,
        ValueError,
        zipfile.BadZipFile,
        MemoryError,
        NotImplementedError,
    ) as error:
        raise InputError(f"{path}: not readable as .npz ({_first_line(error)}); valid: {VALID}") from None


def _load_torch(path: Path) -> dict[str, Any]:
    if path.stat().st_size > MOST_BYTES:
        raise InputError(f"{path}: more than {MOST_BYTES / 2**30:g} GiB; valid: a smaller file")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about damaged files; what is wrong is said below in one line
            content = torch.load(io.BytesIO(path.read_bytes()), map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged pickle raises nearly anything
        raise InputError(
            f"{path}: not readable by torch.load ({_first_line(error)}); valid: {VALID}"
        ) from None
    return _as_mapping(path, content)


def _load_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"{path}: not readable as JSON ({_first_line(error)}); valid: {VALID}") from None
    return _as_mapping(path, content)


def _as_mapping(path: Path, content: Any) -> dict[str, Any]:
    if not isinstance(content, dict):
        raise InputError(f"{path}: holds a {type(content).__name__}; valid: {VALID}")
    return {str(name): value for name, value in content.items()}


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0][:120] if lines else type(error).__name__


def _interpret(path: Path, content: dict[str, Any]) -> TrafficFile:
    if "traffic" in content:
        traffic = _counts(content["traffic"], "traffic", "[L, S, E]")
        current = _slots(content["current"], "current") if "current" in content else None
        distance = content.get("distance")
        return _checked(TrafficFile(path, "traffic", traffic, current, distance, False))
    if "logical_count" in content:
        steps = np.asarray(_plain(content["logical_count"], "logical_count"))
        name, form = ("logical_count", "[W, L, E]") if steps.ndim != 2 else ("logical_count", "[L, E]")
        load = _counts(steps, name, form)
        return _loads(path, "SGLang expert distribution", load.sum(axis=0) if load.ndim == 3 else load, None)
    if "records" in content:
        return _sglang_records(path, content)
    if "global_expert_load_window" in content:
        load = _counts(content["global_expert_load_window"], "global_expert_load_window", "[L, E]")
        return _loads(path, "vLLM expert load", load, None)
    for name, form in (("expert_load_window", "[W, L, P]"), ("expert_load_pass", "[L, P]")):
        if name in content:
            load = _counts(content[name], name, form)
            load = load.sum(axis=0) if load.ndim == 3 else load
            return _physical(path, "vLLM expert load", load, content, "physical_to_logical_map")
    found = ", ".join(sorted(content)[:6]) or "nothing"
    raise InputError(f"no `traffic` in it, but {found}; valid: {VALID}")


def _sglang_records(path: Path, content: dict[str, Any]) -> TrafficFile:
    records = content["records"]
    if not isinstance(records, list) or not records:
        raise InputError("records: empty; valid: at least one forward pass")
    total: Any = None
    for record in records:
        if not isinstance(record, dict) or "global_physical_count" not in record:
            raise InputError("records: one without `global_physical_count`; valid: [L, P] counts in each")
        load = _counts(record["global_physical_count"], "global_physical_count", "[L, P]")
        if total is not None and load.shape != total.shape:
            raise InputError(f"records: counts of shape {load.shape} after {total.shape}; valid: all alike")
        total = load if total is None else total + load
    return _physical(path, "SGLang expert distribution", total, content, "last_physical_to_logical_map")


def _physical(path: Path, kind: str, load: Any, content: dict[str, Any], map_name: str) -> TrafficFile:
    """Loads of physical slots [L, P] with their map [L, P] as loads of logical experts."""
    if map_name not in content:
        raise InputError(f"no `{map_name}`; valid: the expert of each slot, [L, P]")
    current = _slots(content[map_name], map_name)
    if current.shape != load.shape:
        raise InputError(f"{map_name}: shape {current.shape}; valid: {load.shape}, as the loads")
    experts = int(current.max()) + 1
    if current.min() < 0 or experts > MOST_EXPERTS:
        raise InputError(
            f"{map_name}: experts {current.min()} to {experts - 1}; valid: 0 to {MOST_EXPERTS - 1}"
        )
    logical: Any = np.zeros((len(load), experts), dtype=np.int64)
    np.add.at(logical, (np.arange(len(load))[:, None], current), load)
    return _loads(path, kind, logical, current)


def _loads(path: Path, kind: str, load: Any, current: Any) -> TrafficFile:
    return _checked(TrafficFile(path, kind, np.ascontiguousarray(load[:, None]), current, None, True))


def _checked(file: TrafficFile) -> TrafficFile:
    if file.traffic.shape[2] > MOST_EXPERTS:
        raise InputError(f"{file.traffic.shape[2]} experts; valid: at most {MOST_EXPERTS}")
    if not file.traffic.any():
        raise InputError("no picks at all; valid: at least one")
    if float(file.traffic.astype(np.float64).sum()) > 2.0**63:
        raise InputError("more than 2^63 picks in all; valid: fewer")
    return file


def _plain(value: Any, name: str) -> Any:
    if isinstance(value, torch.Tensor):
        value = value.cpu().numpy()
    try:
        return np.asarray(value)
    except (TypeError, ValueError):
        raise InputError(f"{name}: not an array; valid: integers") from None


def _counts(value: Any, name: str, form: str) -> Any:
    """`value` as non-negative int64 of the dimensions in `form`."""
    array = _plain(value, name)
    dimensions = form.count(",") + 1
    if array.ndim != dimensions or 0 in array.shape:
        raise InputError(f"{name}: shape {list(array.shape)}; valid: {form}, none of them 0")
    if array.dtype.kind not in "iu":
        raise InputError(f"{name}: dtype {array.dtype}; valid: integers")
    if array.min() < 0:
        where = [int(i) for i in np.argwhere(array < 0)[0]]
        raise InputError(f"{name}: {array.min()} picks, first negative at {where}; valid: integers >= 0")
    if array.max() > np.iinfo(np.int64).max:
        raise InputError(f"{name}: {array.max()} picks; valid: below 2^63")
    return array.astype(np.int64)


def _slots(value: Any, name: str) -> Any:
    array = _plain(value, name)
    if array.ndim != 2 or 0 in array.shape or array.dtype.kind not in "iu":
        raise InputError(f"{name}: shape {list(array.shape)}, dtype {array.dtype}; valid: integers [L, P]")
    if array.max() >= 2**31 or array.min() < -(2**31):
        raise InputError(f"{name}: {array.max()}; valid: expert ids")
    return array.astype(np.int32)
