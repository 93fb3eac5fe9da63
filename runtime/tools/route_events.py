"""Server-sent events of a node's stream, whole ones."""

from __future__ import annotations

from typing import Protocol

MAX_EVENT = 1 << 20
"""Bytes that are kept of an event whose end has not come; a longer one is passed on in parts."""
_BLANK_LINES = (b"\n\n", b"\n\r\n", b"\r\r")
"""What ends an event, whatever ends its lines."""


class Content(Protocol):
    """What of `aiohttp.StreamReader` is read from."""

    async def readany(self) -> bytes:
        """What has come; empty: the stream has ended."""


class Events:
    """A stream's events as they come. An error event behind half of another one could not be read, and a stream of
    which only half an event has come can still be begun again elsewhere.

    Args:
        content: of the answer.

    Attributes:
        inside: what was read last ends in the middle of an event.
    """

    def __init__(self, content: Content) -> None:
        self._content, self._begun = content, bytearray()
        self.inside = False

    async def read(self) -> bytes:
        """Whole events, or a part of one that is longer than `MAX_EVENT`, or what is left when the stream has
        ended; empty: nothing is left."""
        while chunk := await self._content.readany():
            searched = max(0, len(self._begun) - 2)  # a blank line has at most two bytes before this chunk
            self._begun += chunk
            end = _end_of_events(self._begun, searched)
            if len(self._begun) - end > MAX_EVENT:
                end = len(self._begun)
            if end:
                return self._take(end)
        return self._take(len(self._begun))

    def _take(self, end: int) -> bytes:
        taken = bytes(self._begun[:end])
        del self._begun[:end]
        self.inside = not taken.endswith(_BLANK_LINES)
        return taken


def _end_of_events(data: bytearray, start: int) -> int:
    """Where the last whole event ends; 0: there is none. No blank line begins before `start`."""
    places = ((data.rfind(blank, start), len(blank)) for blank in _BLANK_LINES)
    return max((place + length for place, length in places if place >= 0), default=0)
