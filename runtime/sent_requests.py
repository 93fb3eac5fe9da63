"""What a client has sent to each engine and the engine has not acknowledged yet (SPEC section 6).

Each request gets a number per engine, from 1. An engine's trace names the last number that it had admitted when
the trace was taken: those up to it are in the trace's figures, and the later ones are not. So a request is
counted exactly once, however late a trace is.
"""

from __future__ import annotations

from itertools import takewhile


class SentRequests:
    """Requests per engine that no trace includes yet, and their tokens.

    Args:
        num_engines: >= 1.
    """

    def __init__(self, num_engines: int) -> None:
        self._seq = [0] * num_engines
        self._ack = [0] * num_engines
        self._sent: list[dict[int, int]] = [{} for _ in range(num_engines)]  # number -> tokens, ascending
        self.tokens = [0] * num_engines

    def add_engine(self) -> None:
        """One more engine, to which nothing has been sent."""
        self._seq.append(0)
        self._ack.append(0)
        self._sent.append({})
        self.tokens.append(0)

    def count(self, engine: int) -> int:
        """Requests sent to `engine` that its last trace does not include."""
        return len(self._sent[engine])

    def send(self, engine: int, tokens: int) -> int:
        """Remember a request; its number."""
        self._seq[engine] += 1
        seq = self._seq[engine]
        self._sent[engine][seq] = tokens
        self.tokens[engine] += tokens
        return seq

    def acknowledge(self, engine: int, ack: int) -> bool:
        """Drop the requests up to `ack`. False when `ack` goes back, and nothing was changed.

        An ack beyond anything sent cannot be about this client's requests, so it drops none.
        """
        if ack > self._seq[engine]:
            return True
        if ack < self._ack[engine]:
            return False
        self._ack[engine] = ack
        sent = self._sent[engine]
        for seq in list(takewhile(lambda seq: seq <= ack, sent)):
            self.tokens[engine] -= sent.pop(seq)
        return True

    def release(self, engine: int, seq: int) -> None:
        """Drop a request that has ended; nothing happens when it has been dropped already."""
        self.tokens[engine] -= self._sent[engine].pop(seq, 0)

    def forget(self, engine: int) -> None:
        """Drop all requests of an engine that is gone.

        The numbers go on where they were: the end of a request that was sent before is then never taken for
        that of one sent to the engine's successor. The successor's acknowledgements start at 0 again.
        """
        self._sent[engine].clear()
        self.tokens[engine] = 0
        self._ack[engine] = 0
