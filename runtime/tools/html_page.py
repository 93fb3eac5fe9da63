"""The frame of a one-file HTML report: no scripts, no fonts or files from elsewhere."""

from __future__ import annotations

import base64
import html
import struct
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np

STYLE = """
:root { color-scheme: light; --ink: #1f2937; --soft: #6b7280; --line: #e5e7eb; }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 1160px; padding: 24px 16px 48px; color: var(--ink); background: #fff;
  font: 15px/1.5 system-ui, "Segoe UI", "DejaVu Sans", sans-serif; }
h1 { font-size: 26px; margin: 0 0 4px; } h2 { font-size: 19px; margin: 32px 0 6px; }
p { margin: 4px 0 12px; max-width: 84ch; } .soft { color: var(--soft); }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: 4px 14px; text-align: right; border-bottom: 1px solid var(--line); white-space: nowrap; }
th:first-child { text-align: left; padding-left: 0; font-weight: 400; } thead th { font-weight: 600; }
.grid2 { display: grid; gap: 12px 28px;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 460px), 1fr)); }
figure { margin: 8px 0; min-width: 0; } figcaption { font-weight: 600; font-size: 14px; margin-bottom: 4px; }
svg { width: 100%; height: auto; display: block; } svg text { font: 12px system-ui, "DejaVu Sans", sans-serif;
  fill: var(--ink); } svg .axis { fill: var(--soft); } svg .small { font-size: 10.5px; }
svg .tiny { font-size: 9.5px; }
svg .grid { stroke: var(--line); } svg .light { fill: #fff; } svg image { image-rendering: pixelated; }
svg .own { fill: none; stroke: #d9480f; stroke-width: 1.4; } svg .other { fill: none; stroke: #9ca3af;
  stroke-width: 0.6; } svg .mark { fill: none; stroke: #d9480f; stroke-width: 2; }
"""


def page(title: str, sections: Sequence[str]) -> str:
    """The whole page."""
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{html.escape(title)}</title><style>{STYLE}</style></head><body>"
        f"<h1>{html.escape(title)}</h1>{''.join(sections)}</body></html>\n"
    )


def figure(caption: str, body: str) -> str:
    """A picture with its caption."""
    return f"<figure><figcaption>{html.escape(caption)}</figcaption>{body}</figure>"


def side_by_side(figures: Sequence[str]) -> str:
    """Figures in two columns, in one on narrow screens."""
    return f'<div class="grid2">{"".join(figures)}</div>'


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table whose first column names the rows."""
    cells = "".join(f'<th scope="col">{html.escape(cell)}</th>' for cell in head)
    lines = [f"<thead><tr>{cells}</tr></thead><tbody>"]
    for label, *values in rows:
        numbers = "".join(f"<td>{html.escape(value)}</td>" for value in values)
        lines.append(f'<tr><th scope="row">{html.escape(label)}</th>{numbers}</tr>')
    return f'<div class="scroll"><table>{"".join(lines)}</tbody></table></div>'


def png_uri(pixels: Any) -> str:
    """A picture as a data URI (PNG, RFC 2083); pixels: uint8 [height, width, 3]."""
    height, width, _ = pixels.shape
    rows = np.concatenate([np.zeros((height, 1), np.uint8), pixels.reshape(height, -1)], axis=1)

    def chunk(kind: bytes, body: bytes) -> bytes:
        check = zlib.crc32(kind + body)
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", check)

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    data = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows.tobytes(), 9))
    return "data:image/png;base64," + base64.b64encode(data + chunk(b"IEND", b"")).decode("ascii")
