"""The table of docs/howto/model_sizes.md is what `dist-mem estimate` prints."""

import json
import re

import pytest

from dist_mem.__main__ import main
from tests.support.page_commands import ROOT

PAGE = (ROOT / "docs/howto/model_sizes.md").read_text(encoding="utf-8")
ROWS = re.findall(r"^\| \[?(\w[\w.]*)\S* \| (\d+) \| (\d+) \| (.*?) \| (.*?) ?\|$", PAGE, re.MULTILINE)
BY_DAY = [("125m", "8"), ("6.7b", "64")]


def test_the_table_has_four_sizes_on_three_numbers_of_gpus() -> None:
    assert [row[1] for row in ROWS] == ["1", "8", "64"] * 4
    assert {row[0] for row in ROWS} == {path.stem for path in (ROOT / "configs" / "sizes").glob("*.yaml")}


@pytest.mark.parametrize(
    ("size", "gpus", "lanes", "memory", "hours"),
    [pytest.param(*row, marks=() if row[:2] in BY_DAY else pytest.mark.nightly) for row in ROWS],
)
def test_a_row_is_what_the_command_prints(
    capsys: pytest.CaptureFixture[str], size: str, gpus: str, lanes: str, memory: str, hours: str
) -> None:
    config = [str(ROOT / "configs" / "sizes" / f"{size}.yaml"), f"train.micro_batch_size={lanes}"]
    main(["estimate", *config, "--gpus", gpus, "--gpu", "h100-80gb", "--json"])
    found = json.loads(capsys.readouterr().out)
    fits = found["memory"]["fits"]
    assert memory == f"{found['memory']['total'] / 2**30:.1f}{'' if fits else ': does not fit'}"
    assert hours == (" to ".join(f"{each:.1f}" for each in found["hours_likely"]) if fits else "")
