"""Draw docs/images/lanes.svg: every lane reads one book after another, and what it remembers at one step.

python docs/images/draw_lanes.py
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

FILE = Path(__file__).parent / "lanes.svg"
WIDTH, LENGTH = 448, 316  # words stay legible on a phone, 368 pixels wide
SHOWN = 1.4  # times this size, elsewhere
LEFT, SEGMENT, SEGMENTS = 100, 26, 13  # pixels: where the books begin, the width of a segment; segments that are shown
LANE_Y, HEIGHT = (44, 76, 122, 154), 26  # of each lane, two per rank
TOP, BOTTOM = LANE_Y[0] - 4, LANE_Y[-1] + HEIGHT + 4
NOW = 8  # the segment that is read at this step
SHORT = 3  # segments in the short-term memory


class Book(NamedTuple):
    """A book that a lane reads, from its first segment up to `end`."""

    number: int
    colour: str
    begin: int
    end: int


LANES = (
    (Book(41, "a", 0, SEGMENTS),),
    (Book(7, "b", 0, 5), Book(19, "c", 5, SEGMENTS)),
    (Book(12, "d", 0, 10), Book(26, "a", 10, SEGMENTS)),
    (Book(30, "e", 0, NOW), Book(3, "b", NOW, SEGMENTS)),
)
ABOUT = (
    "A lane's memory stays on the rank that reads the book.",
    "A checkpoint contains it, with the reading positions.",
    "On other ranks, every lane continues with its book and its memory.",
)
STYLE = """\
    .page { fill: #ffffff; stroke: #d0d7de; } .ink { fill: #1f2328; } .soft { fill: #59636e; }
    .line { stroke: #59636e; fill: none; } .cut { stroke: #ffffff; stroke-width: 2; }
    .a { fill: #8cb8ea; } .b { fill: #f0bd84; } .c { fill: #96cfa4; } .d { fill: #c9b1ea; } .e { fill: #ea9fae; }
    .now { fill: #0969da22; stroke: #0969da; stroke-width: 2; } .blue { fill: #0969da; }
    .short { stroke: #1f2328; stroke-width: 3; fill: none; }
    .long { stroke: #1f2328; stroke-width: 2; stroke-dasharray: 3 4; fill: url(#old); }
    .stripe { stroke: #1f2328; stroke-opacity: 0.35; } .later { fill: #ffffff; fill-opacity: 0.68; }
    @media (prefers-color-scheme: dark) {
      .page { fill: #0d1117; stroke: #3d444d; } .ink { fill: #f0f6fc; } .soft { fill: #9198a1; }
      .line { stroke: #9198a1; } .cut { stroke: #0d1117; }
      .a { fill: #2f5d91; } .b { fill: #8a5a23; } .c { fill: #2f6b40; } .d { fill: #604689; } .e { fill: #87404d; }
      .now { fill: #4493f833; stroke: #4493f8; } .blue { fill: #4493f8; }
      .short { stroke: #f0f6fc; } .long { stroke: #f0f6fc; } .stripe { stroke: #f0f6fc; } .later { fill: #0d1117; }
    }"""
HEAD = f"""\
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {LENGTH}" \
width="{WIDTH * SHOWN:.0f}" height="{LENGTH * SHOWN:.0f}" \
font-family="system-ui, -apple-system, 'Segoe UI', Helvetica, Arial, sans-serif" font-size="12" role="img" \
aria-labelledby="title about">
  <title id="title">Lanes, segments and memories</title>
  <desc id="about">Two ranks hold two lanes each. Every lane reads one book after another, one segment per step, and \
carries a memory of what it has read of that book.</desc>
  <style>
{STYLE}
  </style>
  <defs>
    <pattern id="old" width="7" height="7" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">\
<path class="stripe" d="M0 0V7"/></pattern>
    <marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" orient="auto">\
<path class="soft" d="M0 0L8 4L0 8z"/></marker>
  </defs>
  <rect class="page" x="0.5" y="0.5" width="{WIDTH - 1}" height="{LENGTH - 1}" rx="8"/>"""


def x_of(segment: int) -> int:
    return LEFT + segment * SEGMENT


def box(kind: str, x: float, y: float, width: float, height: float, *, corner: int = 4) -> str:
    return f'  <rect class="{kind}" x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="{corner}"/>'


def text(x: float, y: float, content: str, *, kind: str = "ink", more: str = "") -> str:
    return f'  <text class="{kind}" x="{x:g}" y="{y:g}"{more}>{content}</text>'


def books() -> list[str]:
    """Draw the books of all lanes, cut into segments; what comes after this step is pale."""
    drawn = []
    for y, lane in zip(LANE_Y, LANES, strict=True):
        for book in lane:
            width = (book.end - book.begin) * SEGMENT
            gap_before, gap_after = 2 * (book.begin > 0), 2 * (book.end < SEGMENTS)
            drawn.append(box(book.colour, x_of(book.begin) + gap_before, y, width - gap_before - gap_after, HEIGHT))
    cuts = "".join(f"M{x_of(segment)} {TOP}V{BOTTOM}" for segment in range(1, SEGMENTS))
    drawn.append(f'  <path class="cut" d="{cuts}"/>')
    drawn.append(box("later", x_of(NOW + 1) + 3, TOP, x_of(SEGMENTS) - x_of(NOW + 1), BOTTOM - TOP, corner=0))
    return drawn


def memories() -> list[str]:
    """Draw what each lane remembers of its book at this step."""
    drawn = []
    for y, lane in zip(LANE_Y, LANES, strict=True):
        begin = next(book.begin for book in lane if book.begin <= NOW < book.end)
        edge = max(begin, NOW - SHORT)
        if begin < edge:
            drawn.append(box("long", x_of(begin) + 1, y + 2, x_of(edge) - x_of(begin) - 3, HEIGHT - 4))
        if edge < NOW:
            drawn.append(box("short", x_of(edge) + 3, y + 2, x_of(NOW) - x_of(edge) - 6, HEIGHT - 4))
        else:
            drawn.append(
                text(x_of(NOW) - 6, y + 17, "new book: no memory", more=' font-style="italic" text-anchor="end"')
            )
    return drawn


def names() -> list[str]:
    """Write the names of ranks, lanes and books."""
    bold = ' font-weight="600"'
    drawn = [text(8, TOP + 36, "rank 0", more=bold), text(8, BOTTOM - 27, "rank 1", more=bold)]
    for number, (y, lane) in enumerate(zip(LANE_Y, LANES, strict=True)):
        drawn.append(text(58, y + 17, f"lane {number}"))
        for book in lane:
            x = x_of(book.begin) + 6
            if book.begin == NOW:
                x += SEGMENT  # beside the frame of this step
            drawn.append(text(x, y + 17, f"book {book.number}", kind="ink" if book.begin < NOW else "soft"))
    return [*drawn, '  <path class="line" d="M56 44H52V102H56M56 122H52V180H56"/>']


def drawn() -> dict[Path, str]:
    """Return the picture by its file."""
    legend = [
        box("now", 12, 206, 24, 14),
        text(44, 217, "the segment: T tokens"),
        box("short", 202, 207, 24, 12),
        text(234, 217, "short-term memory: the last M"),
        box("long", 202, 229, 24, 12),
        text(234, 239, "long-term memory: what is older"),
        *(text(12, 266 + 17 * line, about, kind="soft") for line, about in enumerate(ABOUT)),
    ]
    parts = [
        HEAD,
        *books(),
        *memories(),
        box("now", x_of(NOW) - 1, TOP - 6, SEGMENT + 2, BOTTOM - TOP + 12, corner=6),
        text(
            x_of(NOW) + SEGMENT / 2,
            24,
            "step s: one segment of every lane",
            kind="blue",
            more=' text-anchor="middle" font-weight="600"',
        ),
        f'  <path class="line" d="M{LEFT} 20H{LEFT + 40}" marker-end="url(#tip)"/>',
        text(LEFT + 46, 24, "steps", kind="soft"),
        *names(),
        *legend,
        "</svg>",
    ]
    return {FILE: "\n".join(parts) + "\n"}


if __name__ == "__main__":
    for path, content in drawn().items():
        path.write_text(content, encoding="utf-8")
        print(path)
