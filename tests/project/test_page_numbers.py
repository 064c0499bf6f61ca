"""Numbers of the pages are those of the package, of the log, or of a named test or benchmark."""

import re
import shlex
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

from dist_mem.__main__ import main
from dist_mem.block import model_spec
from dist_mem.config import load_config
from dist_mem.errors import EXIT_DONE
from dist_mem.model import describe
from tests.support.page_commands import FENCE, anchor_of
from tests.support.paths import ROOT

DOCS = ROOT / "docs"
LOG = "".join(path.read_text(encoding="utf-8") for path in (DOCS / "log").glob("*.md"))
VOCABULARY = 1280  # pieces of the sample library
PAGES = [
    ROOT / "README.md",
    *sorted(path for folder in ("start", "howto", "explanation", "memories") for path in (DOCS / folder).glob("*.md")),
]
CLAIMS = DOCS / "explanation" / "claims.md"
VERDICTS = {"seen", "seen at small scale", "not seen", "opposite seen", "open"}


def table_with(heading: str, text: str) -> dict[str, list[str]]:
    """Return the rows of the table whose head begins so: first cell -> the others."""
    lines = text[text.index(f"\n| {heading}") + 1 :].partition("\n\n")[0].splitlines()[2:]
    cells = [[cell.strip() for cell in line.strip("| ").split(" |")] for line in lines]
    return {first: others for first, *others in cells}


def test_the_overview_of_memories_has_their_bytes() -> None:
    """Every memory of the first table is in the second one, with all memories of rows of the same length."""
    page = (DOCS / "memories" / "README.md").read_text(encoding="utf-8")
    shown = {name: cells[1] for name, cells in table_with("memory | numbers", page).items()}
    presets = re.findall(r"^\| \[([^]]+)\]\(.* \| `(\w+)\.yaml` \|$", page, flags=re.MULTILINE)
    shape = ["model.num_layers=12", "model.d_model=768", "model.num_heads=12", "train.seg_len=512"]
    sizes = {}
    for name, preset in presets:
        words = [f"configs/memory/{preset}.yaml", *shape, "train.precision=fp32", "train.steps=1"]
        memory = load_config(words).memory
        places = {"memory": memory, "memory.over": memory.get("over") or {}}
        lengths = [f"{place}.{key}=512" for place in places for key in ("mem_len", "cmem_len") if key in places[place]]
        facts = describe(model_spec(load_config([*words, *lengths]), VOCABULARY))
        sizes[name] = f"{facts['state_bytes_per_lane'] / 2**20:.3g}"
    assert shown == sizes


# What docs/results/write_pages.py writes: tests/studies/test_result_pages.py compares it with the cells.
WRITTEN = re.compile(r"<!-- table .*?<!-- end -->|<!-- \w+ \w+: .*?<!---->", re.S)


def test_a_measured_figure_stands_in_the_log_or_its_section_names_what_measures_it(subtests: pytest.Subtests) -> None:
    """A figure is a number with a decimal point, in a text or a table."""
    for page in PAGES:
        with subtests.test(page=page):
            known = set(re.findall(r"\d[\d,]*\.\d+", LOG)) | {"3.11", "3.12", "3.13"}  # versions of Python
            unknown = {}
            text = WRITTEN.sub("", FENCE.sub("", page.read_text(encoding="utf-8")))
            for section in re.split(r"\n(?=#+ )", text):
                shown = re.sub(r"`[^`]*`", "`", re.sub(r"\]\([^)]*\)", "]", section))
                figures = re.findall(r"(?<![\w.=/])\d[\d,]*\.\d+(?![.\d])", shown)
                if not re.search(r"(?:tests|benchmarks|dist_mem)/[\w./]+\.py", section):
                    unknown[section.splitlines()[0]] = [figure for figure in figures if figure not in known]
            assert not {heading: figures for heading, figures in unknown.items() if figures}


class Claim(NamedTuple):
    """A row of claims.md."""

    paper: str  # the heading above it
    claim: str
    run: str
    verdict: str
    result: str

    def sections(self) -> dict[str, str]:
        """Return the sections that the result links to, and entries of the log: link -> text."""
        found = {}
        for page, anchor in re.findall(r"\]\(([^)#]+\.md)(?:#([^)]+))?\)", self.result):
            sections = sections_of(CLAIMS.parent / page)
            if anchor or "/log/" in page:
                found[f"{page}#{anchor}"] = sections[anchor] if anchor else "".join(sections.values())
        return found


@cache
def sections_of(page: Path) -> dict[str, str]:
    """Return the sections of a page, each up to the next heading: anchor -> text."""
    parts = re.split(r"^#+ +(?=.*$)", FENCE.sub("", page.read_text(encoding="utf-8")), flags=re.MULTILINE)
    return {anchor_of(part.partition("\n")[0]): part for part in parts[1:]}


def claims() -> Iterator[Claim]:
    paper = ""
    for line in CLAIMS.read_text(encoding="utf-8").splitlines():
        paper = line.removeprefix("## ") if line.startswith("## ") else paper
        cells = line.strip("| ").split(" | ")
        if line.startswith("| ") and len(cells) == 4 and cells[0] != "claim":
            yield Claim(paper, *cells)


def test_a_claim_has_a_verdict_and_its_figures_stand_in_what_it_links_to(subtests: pytest.Subtests) -> None:
    assert len(list(claims())) > 30
    for claim in claims():
        with subtests.test(claim=claim.claim):
            assert claim.verdict in VERDICTS
            is_measured = "](../log/" in claim.result or re.search(r"`tests/[\w/]+\.py`", claim.run)
            assert is_measured or claim.verdict == "open"
            known = re.findall(r"\d+\.?\d*", "".join(claim.sections().values()).replace(",", ""))
            text = re.sub(r"`[^`]*`|\]\([^)]*\)|(?:sec\.|app\.) [\w.]+", "", claim.result)
            for shown in re.findall(r"\d+\.\d+", text.replace(",", "")):
                places = len(shown.partition(".")[2])
                assert any(f"{float(number):.{places}f}" == shown for number in known), shown


def test_a_claim_of_a_check_has_what_the_check_prints(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    shown = dict[str, set[str]]()  # command -> figures
    command = ""
    for claim in claims():
        command = next(iter(re.findall(r"`dist-mem ([^`]+)`", claim.run)), command)
        if "--check" in command:
            shown.setdefault(command, set()).update(re.findall(r"\d+\.\d M\b", claim.result))
    assert sum(map(len, shown.values())) > 3
    for command, figures in shown.items():
        assert main(shlex.split(command)) == EXIT_DONE
        printed = capsys.readouterr().out
        assert {figure for figure in figures if f" {figure} per predicted token" not in printed} == set()
