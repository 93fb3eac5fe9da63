"""The loop in one picture: what is measured, decided and moved while requests are served."""

from __future__ import annotations

from .charts import svg, text

BOXES = (
    (10, 84, 96, 52, ("requests",)),
    (136, 72, 130, 76, ("engine choice", "prefill, KV use,", "MoE pressure")),
    (300, 20, 150, 76, ("engine 0", "shortest prefill first,", "5 s ageing")),
    (300, 124, 150, 76, ("engine 1", "shortest prefill first,", "5 s ageing")),
    (484, 72, 140, 76, ("MoE layers", "experts on all", "expert-parallel ranks")),
    (484, 222, 140, 64, ("counting", "picks [layer, source,", "expert] per window")),
    (300, 222, 150, 64, ("placement", "remote picks, balance,", "moves")),
    (136, 222, 130, 64, ("migration", "weights and maps", "move together")),
)
"""(x, y, width, height, lines): the first line is the name."""

ARROWS = (
    "M106 110H134",
    "M266 98L298 66",
    "M266 122L298 154",
    "M450 62L482 98",
    "M450 158L482 122",
    "M554 148V220",
    "M484 254H452",
    "M300 254H268",
)


def _box(x: int, y: int, width: int, height: int, lines: tuple[str, ...]) -> str:
    middle = x + width / 2
    top = y + height / 2 - 8 * (len(lines) - 1) + 5
    parts = [f'<rect class="box" x="{x}" y="{y}" width="{width}" height="{height}" rx="6"/>']
    parts.append(text(middle, top, lines[0], anchor="middle", css="name"))
    parts += [text(middle, top + 16 * i, line, anchor="middle") for i, line in enumerate(lines[1:], start=1)]
    return "".join(parts)


def picture() -> str:
    """The picture as SVG text; colours come from the page's style sheet."""
    parts = [
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" '
        'orient="auto"><path d="M0 0L8 4L0 8z" class="tip"/></marker></defs>'
    ]
    parts += [f'<path class="arrow" d="{path}" marker-end="url(#tip)"/>' for path in ARROWS]
    # Below the boxes, so that no line crosses another: new weights go back to the MoE layers.
    parts.append('<path class="arrow" d="M201 286V318H652V110H626" marker-end="url(#tip)"/>')
    parts.append(text(412, 312, "experts change ranks", anchor="middle"))
    # Above the boxes: how busy each engine's experts were.
    parts.append('<path class="arrow dashed" d="M554 72V8H201V70" marker-end="url(#tip)"/>')
    parts.append(text(540, 62, "pressure", anchor="end"))
    parts += [_box(*box) for box in BOXES]
    return svg(
        664, 326, parts, "Requests, engine choice, engines, MoE layers, counting, placement, migration"
    )
