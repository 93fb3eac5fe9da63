"""What the engines' prefix caches probably hold of a prompt, as far as a client can know (SPEC section 6).

An API server is not told what an engine has cached. It does know which prompts it has sent where: their blocks are
remembered per engine, the least recently used ones forgotten once they are more than the engine's KV cache has.
The estimate errs both ways: it misses what other API servers sent and what was generated, and it does not see what
an engine evicted for its running requests. It only ever changes the size of a request in the compensation, and
that until the engine's next trace, which has the exact figure.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence


class PrefixEstimate:
    """Blocks of prompt tokens sent to each engine.

    Args:
        num_engines: >= 1.
        block_size: tokens of a block; engines cache whole blocks.
        capacity_blocks: blocks that one engine's KV cache holds.

    Raises:
        ValueError: a size below 1.
    """

    def __init__(self, num_engines: int, *, block_size: int, capacity_blocks: int) -> None:
        for name, value in (
            ("num_engines", num_engines),
            ("block_size", block_size),
            ("capacity_blocks", capacity_blocks),
        ):
            if value < 1:
                raise ValueError(f"{name}: {value}; valid: an integer >= 1")
        self.block_size = block_size
        self.capacity_blocks = capacity_blocks
        self._held: list[OrderedDict[int, None]] = [OrderedDict() for _ in range(num_engines)]

    def blocks(self, token_ids: Sequence[int], *, seed: Hashable = None) -> list[int]:
        """One hash per whole block of the prompt; each depends on all tokens before it.

        Args:
            token_ids: of the prompt.
            seed: whatever else must be equal for a block to be shared, such as a cache salt or an adapter.
        """
        size = self.block_size
        found: list[int] = []
        chain = hash(seed)
        for start in range(0, len(token_ids) - size + 1, size):
            chain = hash((chain, tuple(token_ids[start : start + size])))
            found.append(chain)
        return found

    def cached_tokens(self, engine: int, blocks: Sequence[int]) -> int:
        """Tokens of the leading blocks that were sent to `engine` before."""
        held = self._held[engine]
        count = next((place for place, block in enumerate(blocks) if block not in held), len(blocks))
        return count * self.block_size

    def add(self, engine: int, blocks: Sequence[int]) -> None:
        """A prompt has been sent to `engine`."""
        held = self._held[engine]
        # The end of a prompt is forgotten before its beginning: without the beginning it is of no use.
        for block in reversed(blocks[: self.capacity_blocks]):
            held[block] = None
            held.move_to_end(block)
        while len(held) > self.capacity_blocks:
            held.popitem(last=False)

    def forget(self, engine: int) -> None:
        """The engine, and its cache with it, is gone."""
        self._held[engine].clear()

    def add_engine(self) -> None:
        """One more engine, with an empty cache."""
        self._held.append(OrderedDict())
