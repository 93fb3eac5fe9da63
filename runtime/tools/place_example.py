"""Example traffic in the shape of the Gimbal paper's placement experiments (arXiv 2606.15177)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

LAYERS, SOURCES, EXPERTS, TOP_K = 48, 2, 128, 8
RANKS = 4
TOKENS = 850_000
# Spread of the logarithm of an expert's popularity, and of what a source prefers beyond it.
POPULARITY, TASTE = 1.0, 0.5


def example_traffic(seed: int = 0, *, layers: int = LAYERS) -> Any:
    """int64 [layers, 2, 128]: 850,000 tokens with 8 picks each, split unevenly over two sources.

    Generated, not measured: log-normal popularity, no expert above 0.9/8 of the picks, and a log-normal taste of
    each source, as affine dispatch gives.
    """
    rng = np.random.default_rng(seed)
    share = np.exp(POPULARITY * rng.standard_normal((layers, 1, EXPERTS)))
    share /= share.sum(axis=2, keepdims=True)
    for _ in range(20):
        share = np.minimum(share, 0.9 / TOP_K)
        share /= share.sum(axis=2, keepdims=True)
    taste = share * np.exp(TASTE * rng.standard_normal((layers, SOURCES, EXPERTS)))
    taste /= taste.sum(axis=2, keepdims=True)
    split = rng.dirichlet(np.full(SOURCES, 60.0))
    return rng.poisson(TOKENS * TOP_K * split[:, None] * taste)


def write_example(path: Path, seed: int = 0) -> None:
    """Writes a TRAFFIC.npz with the example's traffic and a current placement, expert e in slot e."""
    current = np.tile(np.arange(EXPERTS, dtype=np.int32), (LAYERS, 1))
    with path.open("wb") as file:
        np.savez_compressed(file, traffic=example_traffic(seed), current=current)
