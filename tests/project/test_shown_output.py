"""The output on a page is compared in form: figures may differ, words may not."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.page_commands import Item, MisplacedOutputError, items_of
from tests.support.shown_output import difference

PRINTED = """\
resuming from /tmp/a-1/runs/demo/checkpoints/step-00000400
step 410/800  loss 1.2e-3  ppl 12,004.10  eta 0:01:30
weights 0f3a99c1d2
run        word ppl
demo_none  7.28
demo       4.03 (1.81x lower)
"""


@pytest.mark.parametrize(
    ("shown", "is_equal"),
    [
        (PRINTED, True),
        ("...\nrun  word ppl\ndemo_none  n/a (1.2x higher)\ndemo  12,000.7\n", True),
        ("resuming from /home/ann/x/y\nstep 1/2 loss 3 ppl 4 eta 1:00\n...\ndemo ...\n", True),
        ("...\nweights deadbeef01\n\nrun ... ppl\n...\n", True),
        (PRINTED.replace("loss", "mean loss"), False),
        ("run  word ppl\n...\n", False),
        (PRINTED.replace("weights 0f3a99c1d2\n", ""), False),
        ("...\ndemo  4.03\ndemo_none  7.28\n", False),
    ],
)
def test_figures_paths_and_what_is_left_out_may_differ_and_nothing_else(shown: str, is_equal: bool) -> None:
    assert (difference(shown, PRINTED) is None) == is_equal


def test_an_output_belongs_to_the_command_before_it(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    blocks = [("sh", "make a\nmake b"), ("output", "b"), ("python", "x = 1"), ("python", "print(x)"), ("output", "1")]
    page.write_text("".join(f"Text.\n\n```{kind}\n{content}\n```\n" for kind, content in blocks), encoding="utf-8")
    first, second, program = items_of(page)
    assert (first, second) == (Item("make a"), Item("make b", output="b\n"))
    assert program == Item("x = 1\nprint(x)\n", is_python=True, output="1\n")
    page.write_text("```output\n1\n```\n", encoding="utf-8")
    with pytest.raises(MisplacedOutputError):
        list(items_of(page))
