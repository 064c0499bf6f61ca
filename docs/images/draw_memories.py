"""Draw docs/images/memory_*.svg: what a query reads in each memory, and how the memory changes after a segment.

python docs/images/draw_memories.py
"""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path

FOLDER = Path(__file__).parent
WIDTH, HEIGHT = 700, 210
BOX, GAP = 22, 4  # pixels: a row's side, and the space to the next
LINE = 96  # y of the rows
# Okabe and Ito's colours: segment, memory, compressed or continuous memory, what is read
BLUE, ORANGE, GREEN, RED, GREY = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#777777"


def text(x: float, y: float, content: str, *, color: str = "black", anchor: str = "middle", size: int = 13) -> str:
    return f'<text x="{x:.0f}" y="{y:.0f}" text-anchor="{anchor}" fill="{color}" font-size="{size}">{content}</text>'


def rows(x: float, number: int, color: str, *, width: float = BOX, is_old: bool = False) -> list[str]:
    """Draw rows side by side from x on; old ones have a dashed border."""
    dashes = ' stroke-dasharray="3 3"' if is_old else ""
    fill = "none" if is_old else color
    return [
        f'<rect x="{x + place * (width + GAP):.0f}" y="{LINE}" width="{width:.0f}" height="{BOX}" rx="3" fill="{fill}" '
        f'fill-opacity="0.55" stroke="{color}"{dashes}/>'
        for place in range(number)
    ]


def end_of(x: float, number: int, width: float = BOX) -> float:
    return x + number * (width + GAP) - GAP


def middle(x: float, place: int, width: float = BOX) -> float:
    return x + place * (width + GAP) + width / 2


def arc(start: float, end: float, *, above: bool = True, color: str = RED, head: str = "") -> str:
    """Draw what `start` reads of `end`."""
    y = LINE - 4 if above else LINE + BOX + 4
    height = min(52.0, 14 + 0.16 * abs(start - end)) * (-1 if above else 1)
    path = f"M {start:.0f} {y} C {start:.0f} {y + height:.0f}, {end:.0f} {y + height:.0f}, {end:.0f} {y}"
    return f'<path d="{path}" fill="none" stroke="{color}" stroke-opacity="0.7" stroke-width="1.4"{head}/>'


def arrow(points: list[tuple[float, float]], *, color: str = GREY) -> str:
    path = " L ".join(f"{x:.0f} {y:.0f}" for x, y in points)
    return f'<path d="M {path}" fill="none" stroke="{color}" stroke-width="1.6" marker-end="url(#head)"/>'


def brace(start: float, end: float, label: str, *, color: str = "black") -> list[str]:
    y = LINE + BOX + 12
    return [
        f'<path d="M {start:.0f} {y - 4} V {y} H {end:.0f} V {y - 4}" fill="none" stroke="{color}"/>',
        text((start + end) / 2, y + 17, label),
    ]


def picture(title: str, parts: list[str]) -> str:
    head = (
        f'<marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        f'<path d="M 0 0 L 8 4 L 0 8 z" fill="{GREY}"/></marker>'
    )
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" '
            f'viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" role="img" aria-label="{title}">',
            f"<defs>{head}</defs>",
            '<rect width="100%" height="100%" fill="white"/>',
            text(12, 22, title, anchor="start", size=14),
            *parts,
            "</svg>",
            "",
        ]
    )


SEGMENT = 500.0  # x of the segment's first row
TOKENS = 6
QUERY = middle(SEGMENT, TOKENS - 1)


def segment() -> list[str]:
    return [
        *rows(SEGMENT, TOKENS, BLUE),
        *brace(SEGMENT, end_of(SEGMENT, TOKENS), "segment, T tokens", color=BLUE),
        *(arc(QUERY, middle(SEGMENT, place)) for place in range(TOKENS - 1)),
    ]


def none() -> str:
    past = 500.0 - 8 * (BOX + GAP) - 20
    return picture(
        "none: a query reads its own segment",
        [
            *rows(past, 8, GREY, is_old=True),
            *brace(past, end_of(past, 8), "earlier tokens: not kept", color=GREY),
            *segment(),
        ],
    )


def transformer_xl() -> str:
    memory = SEGMENT - 8 * (BOX + GAP) - 20
    reads = [arc(QUERY, middle(memory, place)) for place in range(8)]
    return picture(
        "transformer_xl: a query reads the segment and the last M hidden states",
        [
            *rows(memory - 4 * (BOX + GAP) - 20, 4, GREY, is_old=True),
            *rows(memory, 8, ORANGE),
            *brace(memory, end_of(memory, 8), "memory, M rows, no gradient", color=ORANGE),
            *segment(),
            *reads,
            arrow([(end_of(SEGMENT, TOKENS) - 40, 190), (memory + 20, 190)]),
            text((SEGMENT + memory) / 2 + 80, 183, "after the segment: its rows enter", color=GREY),
            arrow([(memory - 8, 190), (memory - 90, 190)]),
            text(memory - 52, 183, "the oldest leave", color=GREY),
        ],
    )


def compressive() -> str:
    memory = SEGMENT - 6 * (BOX + GAP) - 20
    wide = 2.2 * BOX
    older = memory - 4 * (wide + GAP) - 20
    reads = [arc(QUERY, middle(memory, place)) for place in range(6)]
    reads += [arc(QUERY, middle(older, place, wide)) for place in range(4)]
    return picture(
        "compressive: rows that leave the memory are compressed and kept longer",
        [
            *rows(older, 4, GREEN, width=wide),
            *brace(older, end_of(older, 4, wide), "compressed memory, C rows", color=GREEN),
            *rows(memory, 6, ORANGE),
            *brace(memory, end_of(memory, 6), "memory, M rows", color=ORANGE),
            *segment(),
            *reads,
            arrow([(memory + 40, 190), (end_of(older, 4, wide) - 40, 190)]),
            text(memory + 52, 194, "c rows become one (convolution, pooling, ...)", color=GREY, anchor="start"),
        ],
    )


def lamemo() -> str:
    memory = SEGMENT - 9 * (BOX + GAP) - 20
    row = middle(memory, 3)
    seen = [middle(memory, place) for place in range(4, 9)] + [middle(SEGMENT, 0)]
    return picture(
        "lamemo: memory rows look ahead and are refreshed",
        [
            *rows(memory, 9, ORANGE),
            text(memory - 12, LINE + 16, "memory, M rows", anchor="end"),
            *segment(),
            *(arc(QUERY, middle(memory, place)) for place in range(9)),
            *(arc(row, place, above=False, color=GREEN) for place in seen),
            f'<rect x="{row - BOX / 2 - 2:.0f}" y="{LINE - 2}" width="{BOX + 4}" height="{BOX + 4}" rx="4" fill="none" '
            f'stroke="{GREEN}" stroke-width="2.4"/>',
            text(12, 178, "the row keeps alpha of what it saw to its left,", color=GREEN, anchor="start"),
            text(
                12, 196, "and takes 1 - alpha of what it sees to its right: of newer rows", color=GREEN, anchor="start"
            ),
        ],
    )


def infinite() -> str:
    left, right, low, high = 40.0, 330.0, 128.0, 62.0
    tau = 0.6

    def x_of(place: float) -> float:
        return left + (right - left) * place

    wave = [0.5 + 0.25 * math.sin(17 * t * t + 2) + 0.16 * math.cos(23 * t) for t in (i / 160 for i in range(161))]
    curve = " L ".join(f"{x_of(i / 160):.1f} {low - (low - high) * value:.1f}" for i, value in enumerate(wave))
    mean, deviation = 0.3, 0.06
    bell = [
        (x_of(t), low - 58 * math.exp(-0.5 * ((t - mean) / deviation) ** 2)) for t in (i / 100 for i in range(5, 56))
    ]
    density = " L ".join(f"{x:.1f} {y:.1f}" for x, y in bell)
    memory = SEGMENT - 4 * (BOX + GAP) - 20
    return picture(
        "infinite: rows that leave the memory become a signal on [0, 1], read under a density",
        [
            f'<path d="M {density} Z" fill="{RED}" fill-opacity="0.25" stroke="{RED}"/>',
            f'<path d="M {curve}" fill="none" stroke="{GREEN}" stroke-width="2.2"/>',
            f'<path d="M {left:.0f} {low + 6:.0f} H {right:.0f}" stroke="black"/>',
            f'<path d="M {x_of(tau):.0f} {high - 8:.0f} V {low + 10:.0f}" stroke="{GREY}" stroke-dasharray="4 3"/>',
            text(left, low + 22, "0"),
            text(right, low + 22, "1"),
            text(x_of(tau), low + 22, "tau"),
            text(x_of(mean), high - 10, "N(mu, sigma²) of a query", color=RED),
            text(x_of(tau) / 2 + 20, low + 40, "the past, contracted to [0, tau]", color=GREEN),
            text(x_of((1 + tau) / 2) + 20, low + 58, "the newest rows", color=GREEN),
            *rows(memory, 4, ORANGE),
            *brace(memory, end_of(memory, 4), "memory, M rows", color=ORANGE),
            *segment(),
            *(arc(QUERY, middle(memory, place)) for place in range(4)),
            arrow([(memory + 10, 170), (memory - 24, 170), (x_of((1 + tau) / 2), low + 10)]),
            text(memory + 16, 174, "rows that leave: a regression onto N basis functions", color=GREY, anchor="start"),
        ],
    )


def infini() -> str:
    side, left = 12, 250.0
    top = LINE + BOX / 2 - 2.5 * side
    cells = [
        f'<rect x="{left + column * side:.0f}" y="{top + row * side:.0f}" width="{side}" height="{side}" '
        f'fill="{GREEN}" fill-opacity="{0.25 + 0.1 * ((3 * row + 5 * column) % 6):.2f}" stroke="{GREEN}"/>'
        for row in range(5)
        for column in range(5)
    ]
    right, past = left + 5 * side, 40.0
    return picture(
        "infini: one matrix per head holds all earlier segments, and a gate mixes in its reading",
        [
            *rows(past, 6, GREY, is_old=True),
            *brace(past, end_of(past, 6), "earlier segments: not kept", color=GREY),
            *cells,
            text(left + 2.5 * side, top - 8, "sum of sigma(k)ᵀ v", color=GREEN),
            *segment(),
            arc(QUERY, right - 4),
            text((QUERY + right) / 2, LINE - 50, "sigma(q)", color=RED),
            arrow([(SEGMENT + 40, 176), (left + 2.5 * side, 176), (left + 2.5 * side, top + 5 * side + 6)]),
            text(SEGMENT + 40, 196, "after the segment: what the matrix does not return yet", color=GREY, anchor="end"),
        ],
    )


def linear() -> str:
    side, left, width = 9, 30.0, 116.0
    parts = []
    for place in range(TOKENS):
        x, top = left + place * width, LINE - 34.0
        fills = [0.2 + 0.12 * ((2 * cell + place * (cell % 3)) % 6) for cell in range(16)]
        parts += [
            f'<rect x="{x + 8 + cell % 4 * side:.0f}" y="{top + cell // 4 * side:.0f}" width="{side}" height="{side}" '
            f'fill="{GREEN}" fill-opacity="{fill:.2f}" stroke="{GREEN}"/>'
            for cell, fill in enumerate(fills)
        ]
        token = x + 8 + 2 * side
        parts += [
            f'<rect x="{token - BOX / 2:.0f}" y="{LINE + 44}" width="{BOX}" height="{BOX}" rx="3" fill="{BLUE}" '
            f'fill-opacity="0.55" stroke="{BLUE}"/>',
            arrow([(token - 6, LINE + 42), (token - 6, top + 4 * side + 4)], color=BLUE),
            arrow([(token + 6, top + 4 * side + 3), (token + 6, LINE + 41)], color=RED),
        ]
        if place < TOKENS - 1:
            parts += [
                arrow([(x + 12 + 4 * side, top + 2 * side), (x + width + 4, top + 2 * side)]),
                text(x + 62 + side, top + 2 * side - 6, "x alpha", color=GREY, size=11),
            ]
    return picture(
        "linear: every token decays one matrix per head, writes to it (here by the delta rule), and reads it",
        [
            *parts,
            text(left, 192, "writes beta (v less what the matrix returns for k)", color=BLUE, anchor="start"),
            text(left + 330, 192, "reads with its query", color=RED, anchor="start"),
        ],
    )


def rmt() -> str:
    number, width = 2, 18.0
    past, now = 40.0, 380.0
    parts = []
    for left, is_now in ((past, False), (now, True)):
        begin = left + number * (width + GAP) + 10
        after = begin + TOKENS * (BOX + GAP) + 10
        parts += [
            *rows(left, number, GREEN, width=width),
            *rows(begin, TOKENS, BLUE, is_old=not is_now),
            *rows(after, number, GREEN, width=width),
        ]
        if is_now:
            query = middle(begin, TOKENS - 1)
            parts += [*(arc(query, middle(begin, place)) for place in range(TOKENS - 1))]
            parts += [*(arc(query, middle(left, place, width)) for place in range(number))]
            parts += [*brace(begin, end_of(begin, TOKENS), "segment, T tokens", color=BLUE)]
            parts += [text(middle(after, 0, width) + 10, LINE - 12, "write", color=GREEN)]
            parts += [text(middle(left, 0, width) + 10, LINE + BOX + 17, "read", color=GREEN)]
        else:
            row = middle(after, 0, width)
            seen = [middle(begin, place) for place in range(TOKENS)] + [middle(left, 0, width)]
            parts += [*(arc(row, place, above=False, color=GREEN) for place in seen)]
            top = end_of(after, number, width) - width / 2
            read = middle(now, 0, width)
            parts += [arrow([(top, LINE - 4), (top, 52), (read, 52), (read, LINE - 6)])]
            parts += [text((top + now) / 2 + 8, 45, "after the last block", color=GREY)]
    parts += [text(12, 196, "M memory tokens read the segment and the old ones", color=GREEN, anchor="start")]
    return picture("rmt: memory tokens before the segment are read, those after it are written", parts)


def memorizing() -> str:
    first, number = 20.0, 14
    nearest = (1, 2, 7, 11)
    return picture(
        "memorizing: a query reads the k nearest of the keys and values of all earlier segments",
        [
            *rows(first, number, ORANGE),
            *brace(first, end_of(first, number), "M keys and values of earlier tokens", color=ORANGE),
            *segment(),
            *(arc(QUERY, middle(first, place)) for place in nearest),
            text(first + 130, LINE - 56, "the k nearest, by q . k", color=RED),
            arrow([(SEGMENT + 40, 176), (end_of(first, number) - 14, 176), (end_of(first, number) - 14, LINE + 30)]),
            text(SEGMENT + 40, 196, "after the segment: over the oldest rows", color=GREY, anchor="end"),
        ],
    )


def titans() -> str:
    left, across, down, middle_y = 90.0, 62, 24, LINE + BOX / 2
    layers = [
        [(left + across * x, middle_y + down * (y - (n - 1) / 2)) for y in range(n)] for x, n in enumerate((3, 4, 3))
    ]
    lines = [
        f'<path d="M {x:.0f} {y:.0f} L {to_x:.0f} {to_y:.0f}" stroke="{GREEN}" '
        f'stroke-opacity="{0.25 + 0.15 * ((3 * row + 5 * column) % 5):.2f}" stroke-width="1.6"/>'
        for one, other in pairwise(layers)
        for row, (x, y) in enumerate(one)
        for column, (to_x, to_y) in enumerate(other)
    ]
    units = [
        f'<circle cx="{x:.0f}" cy="{y:.0f}" r="7" fill="white" stroke="{GREEN}" stroke-width="1.6"/>'
        for layer in layers
        for x, y in layer
    ]
    window = SEGMENT - 4 * (BOX + GAP)
    learns_at, right = middle(SEGMENT, 2), left + 2 * across
    return picture(
        "titans (gate): a network that every token trains, beside attention to a window",
        [
            *lines,
            *units,
            text(left + across, 48, "weights: decayed, pushed by momentum", color=GREEN),
            *rows(window, 4, ORANGE),
            *segment(),
            *(arc(QUERY, middle(window, place)) for place in range(2, 4)),
            arc(QUERY, right + 12),
            text((QUERY + right) / 2 - 40, LINE - 50, "asks the network", color=RED),
            arrow(
                [(learns_at, 152), (learns_at, 176), (left + across, 176), (left + across, middle_y + 2 * down)],
                color=BLUE,
            ),
            text(
                learns_at - 10,
                194,
                "every token: one step from what is returned for k towards v",
                color=BLUE,
                anchor="end",
            ),
        ],
    )


def block_recurrent() -> str:
    states, before = 60.0, SEGMENT - TOKENS * (BOX + GAP) - 20
    return picture(
        "block_recurrent: tokens and a set of states read each other, a window at a time",
        [
            *rows(states, 5, GREEN),
            *brace(states, end_of(states, 5), "S states", color=GREEN),
            *rows(before, TOKENS, ORANGE),
            *brace(before, end_of(before, TOKENS), "window before", color=ORANGE),
            *rows(SEGMENT, TOKENS, BLUE),
            *brace(SEGMENT, end_of(SEGMENT, TOKENS), "window, W tokens", color=BLUE),
            *(arc(QUERY, middle(SEGMENT, place)) for place in range(TOKENS - 1)),
            arc(QUERY, middle(before, TOKENS - 1)),
            *(arc(QUERY, middle(states, place)) for place in range(5)),
            arrow([(SEGMENT + 40, 176), (middle(states, 2), 176), (middle(states, 2), LINE + BOX + 36)]),
            text(
                SEGMENT + 40,
                196,
                "after the window: states read each other and both windows, and a gate mixes it in",
                color=GREY,
                anchor="end",
            ),
        ],
    )


def drawn() -> dict[Path, str]:
    """Return every picture by its file."""
    pictures = (
        *(none, transformer_xl, compressive, lamemo, infinite, infini, linear),
        *(rmt, memorizing, block_recurrent, titans),
    )
    return {FOLDER / f"memory_{draw.__name__}.svg": draw() for draw in pictures}


if __name__ == "__main__":
    for path, content in drawn().items():
        path.write_text(content, encoding="utf-8")
        print(path)
