"""Synthetic traffic for bench/replica_report.py: windows of one law, and requests of topics whose mix drifts."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np


def random_windows(seed: int, layers: int, experts: int, sources: int, count: int) -> list[Any]:
    """Windows [L, S, E] of 6.8 million picks: the second follows a law, the others are 15 % off; sources 12 %."""
    rng = np.random.default_rng(seed)
    popularity = rng.standard_normal((layers, experts))
    windows = []
    for window in range(count):
        drifted = popularity + 0.15 * (window != 1) * rng.standard_normal((layers, experts))
        noise = 0.12 * rng.standard_normal((sources, layers, experts))
        share = np.exp(drifted + noise).transpose(1, 0, 2)
        share /= share.sum(axis=2, keepdims=True)
        windows.append(rng.multinomial(6_800_000 // sources, share))
    return windows


@dataclass
class Topics:
    """Requests of 24 topics; a topic tilts which experts are popular, and the mix of topics drifts."""

    seed: int
    layers: int = 8
    experts: int = 128
    topics: int = 24
    rng: Any = field(init=False)
    popularity: Any = field(init=False)  # [layers, topics, experts]
    mix: Any = field(init=False)

    def __post_init__(self) -> None:
        self.rng = np.random.default_rng(self.seed)
        base = 0.9 * self.rng.standard_normal((self.layers, 1, self.experts))
        tilt = self.rng.standard_normal((self.layers, self.topics, self.experts))
        share = np.exp(base + tilt)
        self.popularity = share / share.sum(axis=2, keepdims=True)
        for _ in range(20):  # a token picks 8 different experts: no share above 1/8, with some room
            clipped = np.minimum(self.popularity, 0.9 / 8)
            self.popularity = clipped / clipped.sum(axis=2, keepdims=True)
        self.mix = self.rng.dirichlet(np.ones(self.topics))

    def drift(self, rate: float) -> None:
        moved = np.exp(np.log(self.mix + 1e-4) + rate * self.rng.standard_normal(self.topics))
        self.mix = moved / moved.sum()

    def window(self, *, affine: bool, requests: int = 1000, sources: int = 2) -> Any:
        """[L, S, E] picks of so many requests of about 850 tokens, dispatched at random or mostly by topic."""
        rng = self.rng
        topic = rng.choice(self.topics, requests, p=self.mix)
        tokens = np.maximum(16, rng.lognormal(np.log(850) - 0.72, 1.2, requests)).astype(int)
        source = rng.integers(0, sources, requests)
        if affine:
            source = np.where(rng.random(requests) < 0.9, topic % sources, source)
        picks: Any = np.zeros((self.layers, sources, self.experts))
        for s in range(sources):
            for t in range(self.topics):
                mine = tokens[(source == s) & (topic == t)]
                if mine.size:
                    picks[:, s] += self._picks(t, mine)
        return picks

    def _picks(self, topic: int, tokens: Any) -> Any:
        """[L, E]; requests of a topic differ, which so many of them average out."""
        effective = tokens.sum() ** 2 / (tokens.astype(float) ** 2).sum()
        noise = 0.35 / np.sqrt(effective) * self.rng.standard_normal((self.layers, self.experts))
        share = self.popularity[:, topic] * np.exp(noise)
        share /= share.sum(axis=1, keepdims=True)
        return self.rng.multinomial(int(tokens.sum()) * 8, share)
