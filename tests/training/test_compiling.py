"""What a start says of compiled blocks: the measured gain and cost, whether they are compiled or not."""

from __future__ import annotations

import re

import pytest

from dist_mem.training.compiling import describe_compilation
from tests.support.paths import ROOT


@pytest.mark.parametrize("seconds", [None, 82.4])
def test_a_start_on_a_cpu_says_the_figures_of_the_table(seconds: float | None) -> None:
    page = (ROOT / "docs" / "howto" / "performance.md").read_text(encoding="utf-8")
    table = page[page.index("| memory, ZeRO-2, one rank, one thread |") :].partition("\n\n")[0]
    rows = [line.split("|")[2:4] for line in table.splitlines()[2:]]
    ratios = sorted(float(ratio.split()[0]) for ratio, _ in rows)
    times = sorted(int(cold.split("/")[0]) for _, cold in rows)
    (message,) = describe_compilation(seconds, "cpu")
    assert f"took {ratios[0]:.2f} to {ratios[-1]:.2f} of the time of an update" in message
    assert f"{times[0]} to {times[-1]} s to compile" in message
    said = message.partition(" CPUs, ")[0]
    assert said == ("train.compile is off: on" if seconds is None else "compiled the blocks in 82 s; on")


def test_a_start_on_a_gpu_claims_no_figure() -> None:
    assert describe_compilation(None, "cuda") == []
    (message,) = describe_compilation(82.4, "cuda")
    assert "not measured" in message and not re.search(r"0\.\d", message)
