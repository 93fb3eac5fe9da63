"""Which engine a session or a prefix was sent to last: a bounded map, asked among close scores only.

An engine that has served a session's last turn, or another prompt with the same beginning, may still hold its
KV blocks; and requests that belong together route to the same experts, which is what gives source-aware
placement (SPEC section 3.2) a skew to use. Affinity never outweighs load: engine selection asks for it only
among engines whose scores count as equal.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence


class AffinityMap:
    """Key -> engine, at most `limit` keys; the key that has not been used for longest makes room.

    Args:
        limit: keys kept, >= 0; 0 keeps none.

    Raises:
        ValueError: a negative `limit`.
    """

    def __init__(self, limit: int) -> None:
        if limit < 0:
            raise ValueError(f"limit: {limit}; valid: an integer >= 0")
        self.limit = limit
        self._engine: OrderedDict[Hashable, int] = OrderedDict()

    def __len__(self) -> int:
        return len(self._engine)

    def get(self, key: Hashable) -> int | None:
        """The engine that `key` was sent to last; None: not known any more."""
        return self._engine.get(key)

    def put(self, key: Hashable, engine: int) -> None:
        """`key` has been sent to `engine`."""
        if self.limit == 0:
            return
        self._engine[key] = engine
        self._engine.move_to_end(key)
        if len(self._engine) > self.limit:
            self._engine.popitem(last=False)

    def drop_engine(self, engine: int) -> None:
        """Forget all keys of an engine that is gone. O(number of keys)."""
        for key in [key for key, value in self._engine.items() if value == engine]:
            del self._engine[key]


def prefix_key(token_ids: Sequence[int], *, tokens: int = 256) -> Hashable | None:
    """An affinity key for prompts that begin alike: the first `tokens` ids; None for a shorter prompt.

    A shorter prompt has no prefix worth keeping together. The key is a hash, so that the map stays small: two
    prefixes that collide share an engine when scores are close, which does no harm.

    Raises:
        ValueError: `tokens` below 1.
    """
    if tokens < 1:
        raise ValueError(f"tokens: {tokens}; valid: an integer >= 1")
    return hash(tuple(token_ids[:tokens])) if len(token_ids) >= tokens else None
