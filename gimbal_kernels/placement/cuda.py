"""Method "portfolio" on a GPU, one copy per expert (SPEC section 3.3): csrc/placement/kernels.cuh.

The host scales the layers to integers (`portfolio.to_integers`). Then three launches: one block per layer finds the
starts, one per (layer, start) descends from it, one per (layer, seed) kicks the best of them; the host takes the
best after each. The bytes are the host's. What is launched does not depend on the device: tests run it on the host.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from .. import _device_library
from .portfolio import FEW_RANKS, Effort, IntegerLayer, to_integers
from .portfolio_search import Search
from .problem import PlacementProblem
from .reference import slots_of

FOLDER = "placement"
# Of kernels.cuh: kMostThreads, kKeyBytes, kGpuStarts (by rank, by class, current).
MOST_THREADS, KEY_BYTES, STARTS = 512, 512, 3
INTS = ("experts", "ranks", "size", "classes", "windows", "stride", "move_cost")
POINTERS = ("rank_class", "comm", "home", "load", "cost_rows", "share", "cooling")
FLOATS = ("unit", "curvature", "share_step", "count_step", "price_limit")
# struct View of search.cuh.
VIEW: Any = np.dtype(
    [(name, kind) for names, kind in ((INTS, "<i4"), (POINTERS, "<u8"), (FLOATS, "<f4")) for name in names],
    align=True,
)


def status() -> str:
    """ "ready", or the reason why the CUDA kernels cannot be used here."""
    return _device_library.status(FOLDER)


def why_not(problem: PlacementProblem, method: str, *, limited: bool) -> str | None:
    """Why these kernels cannot solve `problem` here, or None. limited: by max_moves or a time budget."""
    if method != "portfolio":
        return f"it serves method portfolio only, not {method!r}"
    if problem.num_slots != problem.num_experts:
        return (
            f"it has one copy per expert, but there are {problem.num_slots} slots for {problem.num_experts}"
        )
    if limited:
        return "it takes neither max_moves nor time_budget"
    if status() != "ready":
        return status()
    classes = np.unique(problem.topology.distance, axis=1).shape[1]
    needed = shared_bytes(problem.num_experts, problem.num_ranks, classes, 1 + len(problem.history))
    there = _device_library.most_shared_bytes(device_of(problem).index)
    if needed > there:
        return f"{needed} bytes of shared memory per block are needed, and this GPU has {there}"
    return None


def device_of(problem: PlacementProblem) -> torch.device:
    """Where it is solved: on the device that the traffic came from, else on the current one."""
    return problem.traffic_device or torch.device("cuda", torch.cuda.current_device())


def shared_bytes(experts: int, ranks: int, classes: int, windows: int) -> int:
    """Shared memory of a block, as `shared_bytes` of kernels.cuh: 4-byte elements, every array on 64 bytes."""
    cells, stride, size = experts, _stride(experts), experts // ranks
    search = [ranks * ranks] * 2 + [cells] * 6 + [classes * cells, windows * cells, windows * size]
    search += [windows * ranks] * 2 + [ranks]
    prices = [2 * ranks] + [ranks] * 6 + [stride] * 2 + [experts] * 2
    return KEY_BYTES + max(sum(-(-count // 16) * 64 for count in counts) for counts in (search, prices))


def pack(layers: list[IntegerLayer]) -> tuple[Any, Any]:
    """Views [layers], and the int32 words that they point into: pointers are bytes from the first word."""
    views: Any = np.zeros(len(layers), dtype=VIEW)
    parts: list[Any] = []
    end = 0
    for i, y in enumerate(layers):
        arrays = {
            "rank_class": y.rank_class.astype(np.int32),
            "comm": _rows(y.comm, np.int32, 0),
            "home": _rows(y.home, np.int32, -1),
            "load": _rows(y.load, np.int32, 0),
            "share": _rows(y.share, np.float32, 0),
            "cooling": y.cooling.astype(np.float32),
        }
        for name, array in arrays.items():
            views[name][i] = end
            parts.append(array.ravel().view(np.int32))
            end += array.nbytes
        sizes = (y.experts, y.ranks, y.size, len(y.comm), y.load.shape[1], _stride(y.experts), y.move_cost)
        per_rank = y.experts / y.ranks
        factors = (2.0**-28, y.curvature, per_rank, per_rank / y.size, y.ranks / y.curvature)
        for name, value in zip((*INTS, *FLOATS), (*sizes, *factors), strict=True):
            views[name][i] = value
    return views, np.concatenate(parts)


def _stride(experts: int) -> int:
    return -(-experts // 16) * 16


def _rows(array: Any, dtype: Any, padding: int) -> Any:
    """[..., E] as [..., stride]."""
    experts = array.shape[-1]
    rows: Any = np.full((*array.shape[:-1], _stride(experts)), padding, dtype=dtype)
    rows[..., :experts] = array
    return rows


def solve_portfolio(problem: PlacementProblem, effort: Effort, *, device: Any) -> Any:
    """Slot map int32 [L, P] by method "portfolio" without spare slots, as `reference.solve_portfolio`.

    Launched on torch's current stream of `device`, which the caller waits for.

    Raises:
        What CuPy raises when a kernel cannot be compiled, loaded or launched.
    """
    prepared = [to_integers(problem, layer) for layer in range(problem.num_layers)]
    layers = [y for y in prepared if y is not None]
    homes = iter(_best_ranks(layers, effort, device) if layers else ())
    slots: Any = np.empty((problem.num_layers, problem.num_slots), dtype=np.int32)
    for layer, y in enumerate(prepared):
        slots[layer] = slots_of(problem, layer, None if y is None else next(homes))
    return slots


def _best_ranks(layers: list[IntegerLayer], effort: Effort, device: Any) -> Any:
    """Rank of each expert, int32 [layers, E]. Ties: the first start, then the first seed."""
    y, rows = layers[0], np.arange(len(layers))
    kernels = _Kernels(layers, device)
    found, value = kernels.search(
        "gimbal_portfolio_settle", kernels.starts(), kernels.put(_kinds(y)), len(_kinds(y))
    )
    first = value.argmin(axis=1)
    best, lowest = found[rows, first], value[rows, first]
    if effort.kicks:
        found, value = kernels.search("gimbal_portfolio_kick", kernels.put(best), effort.kicks, effort.seeds)
        first = value.argmin(axis=1)
        better = value[rows, first] < lowest
        best[better], lowest[better] = found[rows, first][better], value[rows, first][better]
    for i, y in enumerate(layers):  # no better than what is there: stay
        if y.home[0] >= 0 and Search(y, y.home, len(y.load) - 1).objective() <= lowest[i]:
            best[i] = y.home
    return best


def _kinds(y: IntegerLayer) -> Any:
    """The starts that are taken, the same for all layers of a problem; by class: where classes are not ranks."""
    taken = (True, len(y.comm) < y.ranks, y.home[0] >= 0 and y.ranks <= FEW_RANKS)
    return np.flatnonzero(taken).astype(np.int32)


class _Kernels:
    """Layers in the memory of a device, and launches over them."""

    def __init__(self, layers: list[IntegerLayer], device: Any) -> None:
        self._device, self._layers = device, len(layers)
        y = layers[0]
        self._experts, self._ranks = y.experts, y.ranks
        self._threads = min(MOST_THREADS, -(-y.experts // 32) * 32)
        windows = max(y.load.shape[1] for y in layers)
        self._shared_bytes = shared_bytes(y.experts, y.ranks, len(y.comm), windows)
        views, words = pack(layers)
        self._words = self.put(words)
        for name in POINTERS:
            if name != "cost_rows":  # the host's only
                views[name] += np.uint64(self._words.data_ptr())
        self._views = self.put(views.view(np.uint8))

    def put(self, array: Any) -> torch.Tensor:
        """The array in the device's memory."""
        return torch.from_numpy(np.ascontiguousarray(array)).to(self._device)

    def starts(self) -> torch.Tensor:
        """Ranks to start from, int32 [layers, STARTS, E], from prices."""
        work = self.put(np.empty((self._layers, self._ranks, _stride(self._experts)), dtype=np.float32))
        starts = self.put(np.empty((self._layers, STARTS, self._experts), dtype=np.int32))
        self._launch("gimbal_portfolio_starts", self._layers, work, starts)
        return starts

    def search(self, kernel: str, start: torch.Tensor, option: Any, count: int) -> tuple[Any, Any]:
        """Ranks found, [layers, count, E], and their objectives, [layers, count], from `count` blocks per layer."""
        found = self.put(np.empty((self._layers, count, self._experts), dtype=np.int32))
        value = self.put(np.empty((self._layers, count), dtype=np.int64))
        self._launch(kernel, self._layers * count, start, option, count, found, value)
        return found.cpu().numpy(), value.cpu().numpy()

    def _launch(self, kernel: str, blocks: int, *arguments: Any) -> None:
        _device_library.launch(
            FOLDER,
            kernel,
            self._device,
            blocks=blocks,
            threads=self._threads,
            shared_bytes=self._shared_bytes,
            argument=tuple(
                np.uint64(x.data_ptr()) if isinstance(x, torch.Tensor) else np.int32(x)
                for x in (self._views, *arguments)
            ),
        )
