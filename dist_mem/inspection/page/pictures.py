"""The figures of runs, embedded in the page: RUN/figures, and the pictures of `dist-mem evaluate --sweep`."""

from __future__ import annotations

import base64
from collections.abc import Iterator, Sequence
from pathlib import Path

from dist_mem.inspection.page.markup import Markup, element, joined
from dist_mem.runtime.files import checked_inside

_TYPES = {".svg": "image/svg+xml", ".png": "image/png"}


def pictures(runs: Sequence[Path], labels: Sequence[str]) -> Markup:
    """Return the figures of all runs, or nothing if there are none."""
    found = [
        element(
            "figure",
            element("figcaption", path.stem, element("small", f" ({label})")),
            _embedded(checked_inside(run_dir, path)),
            _text(checked_inside(run_dir, path.with_suffix(".md"))),
        )
        for run_dir, label in zip(runs, labels, strict=True)
        for path in _paths(run_dir)
    ]
    return element("div", *found, class_="pictures") if found else Markup()


def _paths(run_dir: Path) -> Iterator[Path]:
    """Yield the pictures of a run; of one that is there in both formats, the SVG."""
    for folder in ("figures", "evaluations"):
        paths = sorted((run_dir / folder).rglob("*"))
        for path in paths:
            is_double = path.suffix == ".png" and path.with_suffix(".svg") in paths
            if path.suffix in _TYPES and not is_double:
                yield path


def _text(path: Path) -> Markup:
    """Return the caption that `dist-mem figure` wrote beside a picture, with what follows it folded, or nothing.

    Args:
        path: of the caption.
    """
    if not path.exists():
        return Markup()
    caption, _, rest = path.read_text(encoding="utf-8", errors="replace").strip().partition("\n\n")
    folded = element("details", element("summary", "Excerpts"), element("pre", rest)) if rest else ""
    return joined([element("p", caption, class_="hint"), folded])


def _embedded(path: Path) -> Markup:
    content = base64.b64encode(path.read_bytes()).decode()
    return element("img", src=f"data:{_TYPES[path.suffix]};base64,{content}", alt=path.stem, loading="lazy")
