"""What engine choice reads of a request besides its length: its affinity key, and the blocks of its prompt."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from ..affinity import prefix_key
from ..prefix_estimate import PrefixEstimate

KEY_ARGUMENT = "gimbal_affinity_key"
"""Field of a request's `vllm_xargs` with a key of the caller's choice."""
LONGEST_KEY = 128
"""Characters of an affinity key that are kept as they are."""
LEAST_BLOCK = 64
"""Tokens of a block of the estimate, at least: hashing a prompt must not cost more than choosing its engine."""
UNKNOWN_CAPACITY = 65_536
"""Blocks remembered per engine while the KV cache's size is not known."""


def affinity_key(request: Any, affinity: str) -> Hashable | None:
    """The key by which a request stays with others: the first of affinity key, session, cache salt and, with
    `affinity` = prefix, the first 256 tokens. None: there is none.
    """
    if affinity == "off":
        return None
    arguments = getattr(request.sampling_params, "extra_args", None) or {}
    if KEY_ARGUMENT in arguments:
        return "key", _short(str(arguments[KEY_ARGUMENT]))
    session = getattr(request, "session_id", None)
    if session:
        return "session", _short(session)
    if request.cache_salt:
        return "salt", _short(request.cache_salt)
    if affinity != "prefix" or not request.prompt_token_ids:
        return None
    prefix = prefix_key(request.prompt_token_ids)
    return None if prefix is None else ("prefix", _adapter(request), prefix)


def _short(text: str) -> str | int:
    """Tens of thousands of keys are kept, and clients choose how long theirs are: a long one by its hash."""
    return text if len(text) <= LONGEST_KEY else hash(text)


def make_estimate(cache_config: Any, num_engines: int) -> PrefixEstimate | None:
    """The estimate of what the engines' prefix caches hold; None: they have none."""
    if not cache_config.enable_prefix_caching or not cache_config.block_size:
        return None
    size = cache_config.block_size * -(-LEAST_BLOCK // cache_config.block_size)
    capacity = getattr(cache_config, "kv_cache_size_tokens", None)
    blocks = max(1, capacity // size) if capacity else UNKNOWN_CAPACITY
    return PrefixEstimate(num_engines, block_size=size, capacity_blocks=blocks)


def prompt_blocks(request: Any, estimate: PrefixEstimate | None) -> list[int]:
    """The prompt's blocks for `estimate`; none for a prompt that is not read from the cache, or whose token ids
    do not tell its content (images, embeddings).
    """
    if estimate is None or not request.prompt_token_ids or request.mm_features or _skips_cache(request):
        return []
    return estimate.blocks(request.prompt_token_ids, seed=(request.cache_salt, _adapter(request)))


def _adapter(request: Any) -> str | None:
    return request.lora_request.lora_name if request.lora_request is not None else None


def _skips_cache(request: Any) -> bool:
    params = request.sampling_params or request.pooling_params
    return bool(getattr(params, "skip_reading_prefix_cache", False))
