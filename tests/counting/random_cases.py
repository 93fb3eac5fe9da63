"""Random calls of map_and_count from seeds: T 0 to 5,000, E 1 to 1,100, K 1 to 16, S 1 to 64, every option."""

from __future__ import annotations

import random

import torch
from counting_cases import Case

NUM_CASES = 2000
FLAGS = (torch.bool, torch.uint8, torch.int32, torch.int64)


def random_case(seed: int, *, max_tokens: int = 5000, max_experts: int = 1100) -> Case:
    """The case of one seed; sizes are spread over their orders of magnitude, so that small ones are common too."""
    draw = random.Random(seed)

    def size(low: int, high: int) -> int:
        return min(high, int(low + (high - low + 1) ** draw.random() - 1))

    tokens, experts = size(0, max_tokens), size(1, max_experts)
    ranks = draw.choice((1, 2, 3, 4, 8, 16))
    slots = -(-(experts + draw.choice((0, 0, 1, ranks, 16, 40))) // ranks) * ranks
    sources = size(1, 64)
    limit = draw.randrange(0, tokens + 3)
    return Case(
        f"seed {seed}",
        tokens=tokens,
        top_k=draw.randint(1, 16),
        experts=experts,
        ranks=ranks,
        slots=slots,
        sources=sources,
        layers=2,
        layer=draw.randrange(2),
        source=draw.choice((draw.randrange(sources), "blocks", "mixed", "stray")),
        id_dtype=draw.choice((torch.int32, torch.int64)),
        count_dtype=draw.choice((torch.int32, torch.int64)),
        load_dtype=draw.choice((torch.int32, torch.int64)),
        num_tokens=draw.choice((None, limit, ("device", limit), ("device", limit, torch.int64))),
        enabled=draw.choice((None, None, False, ("device", draw.randrange(3), draw.choice(FLAGS)))),
        with_load=draw.random() < 0.7,
        layout=draw.choice(("plain", "plain", "transposed", "in place")),
        # Making shares takes a plain loop over sources and experts.
        shares=draw.choice((None, "random")) if sources * experts < 1000 else None,
    )
