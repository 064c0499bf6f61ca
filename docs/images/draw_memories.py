"""Draw docs/images/memory_*.svg: what a query reads in each memory, and how the memory changes after a segment.

python docs/images/draw_memories.py
"""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path

FOLDER = Path(__file__).parent
WIDTH, HEIGHT = 440, 190  # words stay legible on a phone, 368 pixels wide
SHOWN = 1.2  # times this size, elsewhere
BOX, GAP = 15, 3  # pixels: a row's side, and the space to the next
LINE = 80  # y of the rows
BELOW, NOTE = LINE + BOX + 55, LINE + BOX + 73  # y of arrows below the rows, and of the words about them
# Okabe and Ito's colours: segment, memory, compressed or continuous memory, what is read
BLUE, ORANGE, GREEN, RED, GREY = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#777777"


def text(x: float, y: float, content: str, *, color: str = "black", anchor: str = "middle", size: int = 12) -> str:
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
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH * SHOWN:.0f}" height="{HEIGHT * SHOWN:.0f}" '
            f'viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" role="img" aria-label="{title}">',
            f"<defs>{head}</defs>",
            '<rect width="100%" height="100%" fill="white"/>',
            *parts,
            "</svg>",
            "",
        ]
    )


LEFT, SPACE = 12.0, 14.0  # x of the first row; what lies between two groups of rows
TOKENS = 6
SEGMENT = WIDTH - LEFT - TOKENS * (BOX + GAP) + GAP  # x of the segment's first row
QUERY = middle(SEGMENT, TOKENS - 1)


def segment() -> list[str]:
    return [
        *rows(SEGMENT, TOKENS, BLUE),
        *brace(SEGMENT, end_of(SEGMENT, TOKENS), "segment, T tokens", color=BLUE),
        *(arc(QUERY, middle(SEGMENT, place)) for place in range(TOKENS - 1)),
    ]


def before(x: float, number: int, width: float = BOX) -> float:
    """Return the x of a group of rows that stands to the left of x."""
    return x - SPACE - end_of(0, number, width)


def note(x: float, content: str, *, color: str = GREY, anchor: str = "start", line: int = 0) -> str:
    return text(x, NOTE + 16 * line, content, color=color, anchor=anchor)


def none() -> str:
    past = before(SEGMENT, 8)
    return picture(
        "none: a query reads its own segment",
        [*rows(past, 8, GREY, is_old=True), *brace(past, end_of(past, 8), "earlier: not kept", color=GREY), *segment()],
    )


def transformer_xl() -> str:
    memory = before(SEGMENT, 8)
    older = before(memory, 4)
    return picture(
        "transformer_xl: a query reads the segment and the last M hidden states",
        [
            *rows(older, 4, GREY, is_old=True),
            *rows(memory, 8, ORANGE),
            *brace(memory, end_of(memory, 8), "memory, M rows", color=ORANGE),
            *segment(),
            *(arc(QUERY, middle(memory, place)) for place in range(8)),
            arrow([(end_of(SEGMENT, TOKENS) - 20, BELOW), (memory + 15, BELOW)]),
            note(memory + 15, "after the segment: its rows enter"),
            arrow([(memory - 6, BELOW), (older, BELOW)]),
            note(memory - 6, "the oldest leave", anchor="end"),
        ],
    )


def compressive() -> str:
    wide = 2.0 * BOX
    memory = before(SEGMENT, 6)
    older = before(memory, 4, wide)
    return picture(
        "compressive: rows that leave the memory are compressed and kept longer",
        [
            *rows(older, 4, GREEN, width=wide),
            *brace(older, end_of(older, 4, wide), "compressed, C rows", color=GREEN),
            *rows(memory, 6, ORANGE),
            *brace(memory, end_of(memory, 6), "memory, M rows", color=ORANGE),
            *segment(),
            *(arc(QUERY, middle(memory, place)) for place in range(6)),
            *(arc(QUERY, middle(older, place, wide)) for place in range(4)),
            arrow([(memory + 25, BELOW), (older + 2 * wide, BELOW)]),
            note(older + 2 * wide, "c rows become one: convolution, pooling, ..."),
        ],
    )


def lamemo() -> str:
    memory = before(SEGMENT, 9)
    row = middle(memory, 3)
    seen = [middle(memory, place) for place in range(4, 9)] + [middle(SEGMENT, 0)]
    return picture(
        "lamemo: memory rows look ahead and are refreshed",
        [
            *rows(memory, 9, ORANGE),
            text(memory - 10, LINE + 12, "memory, M rows", anchor="end"),
            *segment(),
            *(arc(QUERY, middle(memory, place)) for place in range(9)),
            *(arc(row, place, above=False, color=GREEN) for place in seen),
            f'<rect x="{row - BOX / 2 - 2:.0f}" y="{LINE - 2}" width="{BOX + 4}" height="{BOX + 4}" rx="4" fill="none" '
            f'stroke="{GREEN}" stroke-width="2.4"/>',
            note(LEFT, "the row keeps alpha of what it saw to its left,", color=GREEN),
            note(LEFT, "and takes 1 - alpha of what it sees to its right: of newer rows", color=GREEN, line=1),
        ],
    )


def infinite() -> str:
    right, low, high = 212.0, LINE + 24.0, 42.0
    tau = 0.6

    def x_of(place: float) -> float:
        return LEFT + (right - LEFT) * place

    wave = [0.5 + 0.25 * math.sin(17 * t * t + 2) + 0.16 * math.cos(23 * t) for t in (i / 160 for i in range(161))]
    curve = " L ".join(f"{x_of(i / 160):.1f} {low - (low - high) * value:.1f}" for i, value in enumerate(wave))
    mean, deviation = 0.3, 0.06
    bell = [
        (x_of(t), low - 52 * math.exp(-0.5 * ((t - mean) / deviation) ** 2)) for t in (i / 100 for i in range(5, 56))
    ]
    density = " L ".join(f"{x:.1f} {y:.1f}" for x, y in bell)
    memory, ticks = before(SEGMENT, 4), low + 21
    return picture(
        "infinite: rows that leave the memory become a signal on [0, 1], read under a density",
        [
            f'<path d="M {density} Z" fill="{RED}" fill-opacity="0.25" stroke="{RED}"/>',
            f'<path d="M {curve}" fill="none" stroke="{GREEN}" stroke-width="2.2"/>',
            f'<path d="M {LEFT:.0f} {low + 6:.0f} H {right:.0f}" stroke="black"/>',
            f'<path d="M {x_of(tau):.0f} {high - 8:.0f} V {low + 10:.0f}" stroke="{GREY}" stroke-dasharray="4 3"/>',
            text(LEFT, ticks, "0", anchor="start"),
            text(right, ticks, "1"),
            text(x_of(tau), ticks, "tau"),
            text(LEFT, high - 16, "N(mu, sigma²) of a query", color=RED, anchor="start"),
            text(x_of(tau / 2), ticks, "the past", color=GREEN),
            text(x_of((1 + tau) / 2), ticks, "newest", color=GREEN),
            *rows(memory, 4, ORANGE),
            *brace(memory, end_of(memory, 4), "M rows", color=ORANGE),
            *segment(),
            *(arc(QUERY, middle(memory, place)) for place in range(4)),
            arrow([(memory + 10, BELOW), (x_of((1 + tau) / 2), BELOW), (x_of((1 + tau) / 2), ticks + 5)]),
            note(LEFT, "rows that leave: a regression onto N basis functions;"),
            note(LEFT, "the past is contracted to [0, tau]", color=GREEN, line=1),
        ],
    )


def infini() -> str:
    side, left = 11, 165.0
    top = LINE + BOX / 2 - 2.5 * side
    cells = [
        f'<rect x="{left + column * side:.0f}" y="{top + row * side:.0f}" width="{side}" height="{side}" '
        f'fill="{GREEN}" fill-opacity="{0.25 + 0.1 * ((3 * row + 5 * column) % 6):.2f}" stroke="{GREEN}"/>'
        for row in range(5)
        for column in range(5)
    ]
    center, right = left + 2.5 * side, left + 5 * side
    return picture(
        "infini: one matrix per head holds all earlier segments, and a gate mixes in its reading",
        [
            *rows(LEFT, 6, GREY, is_old=True),
            *brace(LEFT, end_of(LEFT, 6), "earlier: not kept", color=GREY),
            *cells,
            text(right - 8, top - 8, "sum of sigma(k)ᵀ v", color=GREEN, anchor="end"),
            *segment(),
            arc(QUERY, right - 4),
            text((QUERY + right) / 2, LINE - 48, "sigma(q)", color=RED),
            arrow([(SEGMENT + 25, BELOW), (center, BELOW), (center, top + 5 * side + 6)]),
            note(LEFT, "after the segment: what the matrix does not return yet"),
        ],
    )


def linear() -> str:
    side, number, width = 8, 5, 86.0
    parts = []
    for place in range(number):
        x, top = LEFT + 10 + place * width, LINE - 40.0
        fills = [0.2 + 0.12 * ((2 * cell + place * (cell % 3)) % 6) for cell in range(16)]
        parts += [
            f'<rect x="{x + cell % 4 * side:.0f}" y="{top + cell // 4 * side:.0f}" width="{side}" height="{side}" '
            f'fill="{GREEN}" fill-opacity="{fill:.2f}" stroke="{GREEN}"/>'
            for cell, fill in enumerate(fills)
        ]
        token, end = x + 2 * side, top + 2 * side
        parts += [
            f'<rect x="{token - BOX / 2:.0f}" y="{LINE + 36}" width="{BOX}" height="{BOX}" rx="3" fill="{BLUE}" '
            f'fill-opacity="0.55" stroke="{BLUE}"/>',
            arrow([(token - 5, LINE + 34), (token - 5, top + 4 * side + 4)], color=BLUE),
            arrow([(token + 5, top + 4 * side + 3), (token + 5, LINE + 33)], color=RED),
        ]
        if place < number - 1:
            parts += [
                arrow([(x + 4 * side + 4, end), (x + width - 4, end)]),
                text(x + (width + 4 * side) / 2, end - 7, "x alpha", color=GREY, size=11),
            ]
    return picture(
        "linear: every token decays one matrix per head, writes to it (here by the delta rule), and reads it",
        [
            *parts,
            text(LEFT, NOTE - 10, "writes beta (v less what the matrix returns for k)", color=BLUE, anchor="start"),
            text(LEFT, NOTE + 8, "reads with its query", color=RED, anchor="start"),
        ],
    )


def rmt() -> str:
    number, width = 2, 13.0
    past, now = LEFT, 240.0
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
            parts += [text(middle(after, 0, width) + 8, LINE - 12, "write", color=GREEN)]
            parts += [text(middle(left, 0, width) + 8, LINE + BOX + 17, "read", color=GREEN)]
        else:
            row = middle(after, 0, width)
            seen = [middle(begin, place) for place in range(TOKENS)] + [middle(left, 0, width)]
            parts += [*(arc(row, place, above=False, color=GREEN) for place in seen)]
            top = end_of(after, number, width) - width / 2
            read = middle(now, 0, width)
            parts += [arrow([(top, LINE - 4), (top, 38), (read, 38), (read, LINE - 6)])]
            parts += [text((top + now) / 2 + 8, 31, "after the last block", color=GREY)]
    parts += [note(LEFT, "M memory tokens read the segment and the old ones", color=GREEN)]
    return picture("rmt: memory tokens before the segment are read, those after it are written", parts)


def armt() -> str:
    number, width, side, begin = 2, 13.0, 9, 240.0
    after, query = begin + TOKENS * (BOX + GAP) + 10, middle(240.0, TOKENS - 1)
    left, top = LEFT + 40.0, LINE - 14.0
    cells = [
        f'<rect x="{left + cell % 5 * side:.0f}" y="{top + cell // 5 * side:.0f}" width="{side}" height="{side}" '
        f'fill="{GREEN}" fill-opacity="{0.2 + 0.13 * ((3 * cell) % 5):.2f}" stroke="{GREEN}"/>'
        for cell in range(25)
    ]
    right, center = left + 5 * side, left + 2.5 * side
    written = middle(after, 0, width) + 8
    return picture(
        "armt: every row reads one matrix before the block, and the rows after the segment are written into it",
        [
            *cells,
            text(center, top - 8, "matrix", color=GREEN),
            *rows(begin, TOKENS, BLUE),
            *rows(after, number, GREEN, width=width),
            *(arc(query, middle(begin, place)) for place in range(TOKENS - 1)),
            *brace(begin, end_of(begin, TOKENS), "segment, T tokens", color=BLUE),
            text(written, LINE - 12, "write", color=GREEN),
            arc(query, right - 4),
            text((query + right) / 2, LINE - 48, "phi(q)", color=RED),
            arrow([(written, LINE + BOX + 6), (written, BELOW), (center, BELOW), (center, top + 5 * side + 6)]),
            note(LEFT, "after the block: what the matrix does not return yet"),
        ],
    )


def memorizing() -> str:
    number = 14
    last = end_of(LEFT, number) - 10
    return picture(
        "memorizing: a query reads the k nearest of the keys and values of all earlier segments",
        [
            *rows(LEFT, number, ORANGE),
            *brace(LEFT, end_of(LEFT, number), "M keys and values of earlier tokens", color=ORANGE),
            *segment(),
            *(arc(QUERY, middle(LEFT, place)) for place in (1, 2, 7, 11)),
            text(LEFT, LINE - 50, "the k nearest, by q . k", color=RED, anchor="start"),
            arrow([(SEGMENT + 25, BELOW), (last, BELOW), (last, LINE + BOX + 14)]),
            note(SEGMENT + 25, "after the segment: over the oldest rows", anchor="end"),
        ],
    )


def titans() -> str:
    left, across, down, middle_y = 40.0, 46, 19, LINE + BOX / 2
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
        f'<circle cx="{x:.0f}" cy="{y:.0f}" r="6" fill="white" stroke="{GREEN}" stroke-width="1.6"/>'
        for layer in layers
        for x, y in layer
    ]
    window = SEGMENT - 4 * (BOX + GAP)
    learns_at, right, center = middle(SEGMENT, 2), left + 2 * across, left + across
    return picture(
        "titans (gate): a network that every token trains, beside attention to a window",
        [
            *lines,
            *units,
            text(LEFT, 24, "weights: decayed, pushed by momentum", color=GREEN, anchor="start"),
            *rows(window, 4, ORANGE),
            *segment(),
            *(arc(QUERY, middle(window, place)) for place in range(2, 4)),
            arc(QUERY, right + 10),
            text(end_of(SEGMENT, TOKENS), 24, "asks the network", color=RED, anchor="end"),
            arrow(
                [(learns_at, BELOW - 18), (learns_at, BELOW), (center, BELOW), (center, middle_y + 2 * down)],
                color=BLUE,
            ),
            note(LEFT, "every token: one step from what is returned for k towards v", color=BLUE),
        ],
    )


def block_recurrent() -> str:
    earlier = before(SEGMENT, TOKENS)
    center = middle(LEFT, 2)
    return picture(
        "block_recurrent: tokens and a set of states read each other, a window at a time",
        [
            *rows(LEFT, 5, GREEN),
            *brace(LEFT, end_of(LEFT, 5), "S states", color=GREEN),
            *rows(earlier, TOKENS, ORANGE),
            *brace(earlier, end_of(earlier, TOKENS), "window before", color=ORANGE),
            *rows(SEGMENT, TOKENS, BLUE),
            *brace(SEGMENT, end_of(SEGMENT, TOKENS), "window, W tokens", color=BLUE),
            *(arc(QUERY, middle(SEGMENT, place)) for place in range(TOKENS - 1)),
            arc(QUERY, middle(earlier, TOKENS - 1)),
            *(arc(QUERY, middle(LEFT, place)) for place in range(5)),
            arrow([(SEGMENT + 25, BELOW), (center, BELOW), (center, LINE + BOX + 35)]),
            note(LEFT, "after the window: states read each other and both windows,"),
            note(LEFT, "and a gate mixes it in", line=1),
        ],
    )


def drawn() -> dict[Path, str]:
    """Return every picture by its file."""
    pictures = (
        *(none, transformer_xl, compressive, lamemo, infinite, infini, linear),
        *(rmt, armt, memorizing, block_recurrent, titans),
    )
    return {FOLDER / f"memory_{draw.__name__}.svg": draw() for draw in pictures}


if __name__ == "__main__":
    for path, content in drawn().items():
        path.write_text(content, encoding="utf-8")
        print(path)
