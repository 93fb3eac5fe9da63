"""Runs the CUDA counting kernels on the host (tests/simt) by the launches that the product plans for a GPU."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from counting_cases import Case, Prepared, prepare

from gimbal_kernels.counting import cuda, reference
from tests.simt import build

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
SOURCES = [ROOT / "csrc" / "counting" / name for name in ("call.cuh", "choice.cuh", "counting.cuh")]
KERNELS = [
    f"gimbal_count_{ids}{rows}{shares}"
    for rows in ("", "_per_row")
    for shares in ("", "_weighted")
    for ids in ("i32", "i64")
]


def program(sanitizer: str = "plain", headers: Path | None = None) -> Path:
    """The driver with the kernels of csrc/, or with altered ones from the folder `headers`."""
    include = [ROOT / "csrc"] if headers is None else [headers, ROOT / "csrc"]
    watch = SOURCES if headers is None else [*SOURCES, *sorted(headers.rglob("*.cuh"))]
    source = HERE / "simt_counting.cpp"
    return build.build("counting", source, sanitizer=sanitizer, include=include, watch=watch)


@dataclass(frozen=True)
class Call:
    """One call, ready to be launched on the host, and what the reference makes of it."""

    case: Case
    data: bytes
    expected: dict[str, Any]


def make_call(case: Case, seed: int, *, multiprocessors: int = 3, workers: int = 2) -> Call:
    prepared = prepare(case, seed=seed)
    replica_map = prepared.replica_map
    counts = torch.arange(case.sources * case.experts).view(1, case.sources, case.experts) % 7
    counts = counts.repeat(case.layers, 1, 1).to(case.count_dtype)
    load = torch.ones(case.layers, case.slots, dtype=case.load_dtype) if case.with_load else None
    ids, out = _ids_and_out(prepared)
    controls = {
        "layer": case.layer,
        "source": prepared.source,
        "physical_load": load,
        "num_tokens": prepared.num_tokens,
        "enabled": prepared.enabled,
    }
    plan = cuda.plan_launch(ids, replica_map, counts, out=out, multiprocessors=multiprocessors, **controls)
    arrays = [
        ids,
        None if out is ids else out,
        replica_map.replicas[case.layer],
        replica_map.nearest[case.layer],
        None if replica_map.thresholds is None else replica_map.thresholds[case.layer],
        counts[case.layer],
        None if load is None else load[case.layer],
        *(value if isinstance(value, torch.Tensor) else None for value in _pointers(prepared)),
    ]
    header = (KERNELS.index(plan.kernel), plan.blocks, plan.shared_bytes, seed, workers)
    words = (*[0] * 10, *plan.words[10:])
    contents = [None if a is None else _memory(a) for a in arrays]
    sizes = [-1 if c is None else len(c) for c in contents]
    data = struct.pack(f"={5 + len(words) + 10}q", *header, *words, *sizes)
    data += b"".join(c for c in contents if c is not None)
    reference.map_and_count(ids, replica_map, counts, out=out, **controls)
    expected = {"out": _memory(out), "counts": _memory(counts[case.layer])}
    expected["load"] = b"" if load is None else _memory(load[case.layer])
    return Call(case, data, expected)


def _pointers(prepared: Prepared) -> tuple[Any, Any, Any]:
    return prepared.source, prepared.num_tokens, prepared.enabled


def _ids_and_out(prepared: Prepared) -> tuple[Any, Any]:
    ids = prepared.ids
    if prepared.case.layout == "transposed":
        ids = ids.t().contiguous().t()
    return ids, ids if prepared.case.layout == "in place" else torch.empty_like(ids)


def _memory(tensor: Any) -> bytes:
    """The elements in the order of memory."""
    flat = tensor if tensor.is_contiguous() else tensor.t()
    assert flat.is_contiguous()
    if flat.dtype == torch.bool:
        flat = flat.view(torch.uint8)
    return bytes(np.ascontiguousarray(flat.numpy()).tobytes())


def run_calls(driver: Path, calls: Sequence[Call], folder: Path) -> tuple[Any, list[list[str]]]:
    """Runs all calls in one process; the finished process, and what differs from the reference in each call."""
    (folder / "calls").write_bytes(b"".join(call.data for call in calls))
    done = build.run(driver, folder / "calls", folder / "results")
    results, at, wrong = (folder / "results").read_bytes(), 0, []
    for call in calls:
        names = []
        for name, content in call.expected.items():
            if results[at : at + len(content)] != content:
                names.append(name)
            at += len(content)
        wrong.append(names)
    return done, wrong
