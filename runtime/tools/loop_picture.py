"""The loop in one picture: what is measured, decided and moved while requests are served."""

from __future__ import annotations

from dataclasses import dataclass

from .charts import svg, text

REQUESTS = ("requests",)
CHOICE = ("engine choice", "prefill, KV use,", "MoE pressure")
ENGINE_0 = ("engine 0", "shortest prefill first,", "5 s ageing")
ENGINE_1 = ("engine 1", "shortest prefill first,", "5 s ageing")
MOE = ("MoE layers", "experts on all", "expert-parallel ranks")
COUNTING = ("counting", "picks [layer, source,", "expert] per window")
PLACEMENT = ("placement", "remote picks, balance,", "moves")
MIGRATION = ("migration", "weights and maps", "move together")


@dataclass(frozen=True)
class _Layout:
    """Where things are: boxes (x, y, width, height, lines), arrows as paths, labels (x, y, anchor, text)."""

    width: int
    height: int
    boxes: tuple[tuple[int, int, int, int, tuple[str, ...]], ...]
    arrows: tuple[str, ...]
    dashed: str
    labels: tuple[tuple[int, int, str, str], ...]


WIDE = _Layout(
    width=664,
    height=326,
    boxes=(
        (10, 84, 96, 52, REQUESTS),
        (136, 72, 130, 76, CHOICE),
        (300, 20, 150, 76, ENGINE_0),
        (300, 124, 150, 76, ENGINE_1),
        (484, 72, 140, 76, MOE),
        (484, 222, 140, 64, COUNTING),
        (300, 222, 150, 64, PLACEMENT),
        (136, 222, 130, 64, MIGRATION),
    ),
    arrows=(
        "M106 110H134",
        "M266 98L298 66",
        "M266 122L298 154",
        "M450 62L482 98",
        "M450 158L482 122",
        "M554 148V220",
        "M484 254H452",
        "M300 254H268",
        "M201 286V318H652V110H626",
    ),
    dashed="M554 72V8H201V70",
    labels=((412, 312, "middle", "experts change ranks"), (546, 50, "end", "pressure")),
)
NARROW = _Layout(
    width=360,
    height=566,
    boxes=(
        (115, 6, 130, 36, REQUESTS),
        (95, 68, 170, 64, CHOICE),
        (16, 160, 156, 64, ENGINE_0),
        (188, 160, 156, 64, ENGINE_1),
        (95, 252, 170, 64, MOE),
        (95, 342, 170, 60, COUNTING),
        (95, 428, 170, 60, PLACEMENT),
        (95, 514, 170, 46, (MIGRATION[0], "weights with maps")),
    ),
    arrows=(
        "M180 42V66",
        "M130 132L105 158",
        "M230 132L255 158",
        "M105 224L130 250",
        "M255 224L230 250",
        "M180 316V340",
        "M180 402V426",
        "M180 488V512",
        "M265 537H354V284H267",
    ),
    dashed="M95 284H6V100H93",
    labels=((348, 420, "end", "experts"), (348, 436, "end", "change ranks"), (12, 278, "start", "pressure")),
)


def _box(x: int, y: int, width: int, height: int, lines: tuple[str, ...]) -> str:
    middle = x + width / 2
    top = y + height / 2 - 8 * (len(lines) - 1) + 5
    parts = [f'<rect class="box" x="{x}" y="{y}" width="{width}" height="{height}" rx="6"/>']
    parts.append(text(middle, top, lines[0], anchor="middle", css="name"))
    parts += [text(middle, top + 16 * i, line, anchor="middle") for i, line in enumerate(lines[1:], start=1)]
    return "".join(parts)


def picture(*, narrow: bool = False) -> str:
    """The picture as SVG text, side by side or, for narrow screens, from top to bottom.

    Colours and fonts come from the style sheet of the page.
    """
    layout = NARROW if narrow else WIDE
    tip = "tip-narrow" if narrow else "tip-wide"
    parts = [
        f'<defs><marker id="{tip}" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" '
        'orient="auto"><path d="M0 0L8 4L0 8z" class="tip"/></marker></defs>'
    ]
    parts += [f'<path class="arrow" d="{path}" marker-end="url(#{tip})"/>' for path in layout.arrows]
    parts.append(f'<path class="arrow dashed" d="{layout.dashed}" marker-end="url(#{tip})"/>')
    parts += [text(x, y, words, anchor=anchor) for x, y, anchor, words in layout.labels]
    parts += [_box(*box) for box in layout.boxes]
    label = "Requests, engine choice, engines, MoE layers, counting, placement, migration, and back"
    return svg(layout.width, layout.height, parts, label)


STYLE = (
    "text{font:12px system-ui,'DejaVu Sans',sans-serif;fill:#1f2937}.name{font-weight:600;font-size:13px}"
    ".box{fill:#f3f6fa;stroke:#94a3b8}.arrow{fill:none;stroke:#475569;stroke-width:1.6}"
    ".dashed{stroke-dasharray:5 4}.tip{fill:#475569;stroke:none}"
)


def standalone() -> str:
    """The picture as a file of its own (docs/loop.svg), on white, with its style inside."""
    body = picture().replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1)
    ground = f'<rect width="{WIDE.width}" height="{WIDE.height}" fill="#fff"/>'
    return body.replace("<defs>", f"<style>{STYLE}</style>{ground}<defs>", 1) + "\n"
