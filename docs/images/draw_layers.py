"""Draw docs/images/layers.svg: the folders of dist_mem as layers, and which layer imports which.

python docs/images/draw_layers.py
"""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "dist_mem"
PICTURE = ROOT / "docs" / "images" / "layers.svg"
ROW, WIDTH, LEFT = 34, 150, 250  # pixels: from box to box, of a box, of the space for arcs


def layers() -> list[str]:
    """Lowest first: the order of the table in design.md, which a test compares with the imports."""
    text = (ROOT / "docs" / "explanation" / "design.md").read_text(encoding="utf-8")
    rows = [line.split("|")[1] for line in text.splitlines() if line.startswith("| `")]
    return [name.removesuffix(".py").rstrip("/") for row in rows for name in row.strip().strip("`").split("`, `")]


def imports() -> Counter[tuple[str, str]]:
    """(layer, lower layer) -> how many modules of the first import from the second."""
    found: Counter[tuple[str, str]] = Counter()
    for path in PACKAGE.rglob("*.py"):
        layer = path.relative_to(PACKAGE).with_suffix("").parts[0]
        nodes = [
            node for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, ast.ImportFrom)
        ]
        names = [node.module or "" for node in nodes]
        found.update({(layer, name.split(".")[1]) for name in names if name.startswith("dist_mem.")})
    return found


def drawn() -> str:
    """The picture: highest layer on top, an arc for each pair, wider for more importing modules (1, 2 to 5, more)."""
    names = layers()[::-1]
    top = {name: 10 + ROW * index for index, name in enumerate(names)}
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{LEFT + WIDTH + 20}" height="{ROW * len(names) + 20}" '
        'font-family="sans-serif" font-size="13">',
        '<rect width="100%" height="100%" fill="white"/>',
    ]
    for (upper, lower), count in sorted(imports().items()):
        if upper in top and lower in top and upper != lower:
            start, end = top[upper] + 13, top[lower] + 13
            bend = LEFT - 14 - (end - start) * 0.32
            lines.append(
                f'<path d="M {LEFT} {start} C {bend:.0f} {start}, {bend:.0f} {end}, {LEFT} {end}" fill="none" '
                f'stroke="#4477aa" stroke-opacity="0.45" stroke-width="{1 + 1.5 * (count > 1) + 2 * (count > 5)}"/>'
            )
    for name, y in top.items():
        lines += [
            f'<rect x="{LEFT}" y="{y}" width="{WIDTH}" height="26" rx="4" fill="#eef3f8" stroke="#335577"/>',
            f'<text x="{LEFT + 10}" y="{y + 18}">{name}</text>',
        ]
    return "\n".join([*lines, "</svg>", ""])


if __name__ == "__main__":
    PICTURE.write_text(drawn(), encoding="utf-8")
    print(PICTURE)
