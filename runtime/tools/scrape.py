"""Figures from a server's /metrics page (Prometheus text format)."""

from __future__ import annotations

import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

Samples = Mapping[tuple[str, frozenset[tuple[str, str]]], float]


@dataclass(frozen=True)
class Snapshot:
    """All samples of one scrape, by name and labels."""

    samples: Samples

    def total(self, name: str) -> float | None:
        """Sum of `name` over its labels; None when the page does not have it."""
        found = [value for (sample, _), value in self.samples.items() if sample == name]
        return sum(found) if found else None

    def by_label(self, name: str, label: str) -> dict[str, float]:
        """Sums of `name` by the value of one label."""
        sums: dict[str, float] = {}
        for (sample, labels), value in self.samples.items():
            key = dict(labels).get(label)
            if sample == name and key is not None:
                sums[key] = sums.get(key, 0.0) + value
        return sums

    def since(self, earlier: Snapshot) -> Snapshot:
        """Growth of every sample since `earlier` (absent there: since 0); meant for counters."""
        return Snapshot({key: value - earlier.samples.get(key, 0.0) for key, value in self.samples.items()})


def parse(text: str) -> Snapshot:
    """A snapshot of a page's text.

    Raises:
        ValueError: the text is not in the Prometheus format.
    """
    samples: dict[tuple[str, frozenset[tuple[str, str]]], float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            samples[(sample.name, frozenset(sample.labels.items()))] = float(sample.value)
    return Snapshot(samples)


def scrape(url: str, *, timeout: float = 10.0) -> Snapshot:
    """Reads `url`/metrics."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=timeout) as reply:
        return parse(reply.read().decode())
