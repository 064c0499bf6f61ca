"""Record docs/images/report.gif: a visit to the report page of a run, in Chromium.

dist-mem report --example
PYTHONPATH=. python docs/images/record_report.py example_report.html
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from PIL import Image

from tests.support.chromium import running_chromium

PICTURE = Path(__file__).with_name("report.gif")
WIDTH, HEIGHT, COLOURS = 1280, 780, 128
WORD = "#t301"  # "wolves", who are feared by somebody 174 tokens before
# What is clicked before each frame, and for how many milliseconds it is shown.
VISIT = ((None, 2000), (WORD, 4000), ("#next", 4000))


def record(report: Path) -> None:
    """Write the picture of a report page of the example's book."""
    frames = []
    with tempfile.TemporaryDirectory() as folder, running_chromium(Path(folder)) as browser:
        page = browser.open(report.absolute(), width=WIDTH, height=HEIGHT)
        for number, (clicked, _) in enumerate(VISIT):
            if clicked:
                page.click(clicked)
            page.value("document.querySelector('#strip').scrollIntoView({block: 'start'})")
            path = Path(folder) / f"{number}.png"
            page.screenshot(path)
            with Image.open(path) as seen:
                frames.append(seen.convert("RGB").quantize(COLOURS, dither=Image.Dither.NONE))
    shown = [milliseconds for _, milliseconds in VISIT]
    frames[0].save(PICTURE, save_all=True, append_images=frames[1:], duration=shown, loop=0, optimize=True)


if __name__ == "__main__":
    record(Path(sys.argv[1]))
