"""The page of the arena's second edition, and README, have the numbers of the cells in docs/results."""

from __future__ import annotations

import glob
import json
import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import pytest

from dist_mem.config import load_config
from dist_mem.evaluation.bootstrap import accuracy_interval, bits_interval, gain_interval
from dist_mem.evaluation.scores import Band
from dist_mem.studies.budget import fitted
from dist_mem.studies.cells import CELLS, Run, report_of
from dist_mem.studies.page import cell
from dist_mem.studies.study import load_study
from tests.support.paths import ROOT

RESULTS = ROOT / "docs" / "results"
FINISHED = RESULTS / "arena"
PAGE = RESULTS / "arena.md"
COLUMNS = ("perplexity", "recall 65 to 256", "recall beyond 256")
BANDS = (Band(0, 64), Band(64, 128), Band(128, 192), Band(192, 256), Band(256, None))
SHORT = (
    "none", "Transformer-XL", "compressive", "infinity-former as published", "XL then Gated DeltaNet", "DeltaNet",
)  # fmt: skip
VOCABULARY = 1280  # pieces of the sample library
LONG = {  # tasks a thousand tokens back: vocabulary, and the column of all answers
    "mqar_long": (64, "answers"),
    "passkey_long": (VOCABULARY, "whole answers"),
    "babilong_long": (VOCABULARY, "whole answers"),
}
EQUAL = RESULTS / "equal_bytes"
BOOKS = RESULTS / "pg19"
EQUAL_SPEC = ROOT / "configs" / "arena" / "equal_bytes.yaml"
BITS = "bits per byte"
FAR_BANDS = ("up to 64 back", "65 to 512", "beyond 512")
MATRICES = ("DeltaNet", "Gated DeltaNet then XL", "GLA", "RetNet", "Kimi Delta Attention", "Gated DeltaNet")
AGAINST = ("none", "Transformer-XL", "XL then none")  # rows that the others are compared with
COPIES = 1.7  # loss below which a model copies


def runs_of(folder: Path, finished: Path = FINISHED, column: str = COLUMNS[0]) -> dict[str, list[Run]]:
    """Return the finished runs of every row, by seed, in the order of their mean of a column."""
    shutil.copytree(finished, folder / CELLS, ignore=shutil.ignore_patterns("tuning"))
    found: dict[str, list[Run]] = {}
    for path in sorted((folder / CELLS).glob("*.json")):
        row, seed = path.stem.rsplit("-seed", 1)
        found.setdefault(row, []).append(Run(row, "", int(seed), folder))
    return dict(sorted(found.items(), key=lambda item: cell(item[1], column).mean or 0.0))


def gain(runs: Sequence[Run], others: Sequence[Run], column: str = COLUMNS[0]) -> str:
    """Return the interval of the perplexity of some runs divided by that of others."""
    pair = [[one for run in side if (one := report_of(run, column)) is not None] for side in (runs, others)]
    interval = gain_interval(*pair)
    return "" if interval is None or runs is others else " to ".join(f"{bound:.3f}" for bound in interval)


class Trial(NamedTuple):
    """A row trained at one rate, at the budget of the table."""

    results: list[float]  # of the first column, on validation, by seed
    begins: str  # with the first seed


def trials(row: str, finished: Path = FINISHED) -> dict[float, Trial]:
    """Return a row's trials at the budget of the table by rate, ascending; none: not tried yet."""
    bodies: dict[float, list[dict[str, Any]]] = {}
    for path in sorted((finished / "tuning").glob(f"{glob.escape(row)} lr *-seed?.json")):
        body = json.loads(path.read_text())
        bodies.setdefault(body["definition"]["optimizer.lr"], []).append(body)
    return {
        rate: Trial([body["results"]["tuned"]["value"] for body in each], begins(each[0]))
        for rate, each in sorted(bodies.items())
    }


def best(results: dict[float, Trial]) -> float:
    """Return the rate of the best mean, of those that were tried with most seeds."""
    most = max(len(trial.results) for trial in results.values())
    whole = {rate: fmean(trial.results) for rate, trial in results.items() if len(trial.results) == most}
    return min(whole, key=lambda rate: whole[rate])


def begins(body: dict[str, Any]) -> str:
    """Return the first logged update of a cell whose loss shows that the model copies."""
    return next((str(step) for step, loss, *_ in body["curve"] if loss < COPIES), "never")


def rates(found: dict[str, list[Run]], text: Callable[[Trial], str], finished: Path = FINISHED) -> list[str]:
    """Return the lines of the table of trials, the best in bold."""
    tried = {row: trials(row, finished) for row in found}
    grid = sorted({rate for results in tried.values() for rate in results})
    lines = [f"| memory | {' | '.join(map(str, grid))} |"]
    for row, results in tried.items():
        texts = {rate: text(trial) for rate, trial in results.items()}
        texts[best(results)] = f"**{texts[best(results)]}**"
        lines.append(f"| {' | '.join([row, *(texts.get(rate, '') for rate in grid)])} |")
    return lines


def copied(trial: Trial) -> str:
    """Return perplexity, and from when the model copies."""
    return f"{trial.results[0]:.3f} ({trial.begins})"


def bits(trial: Trial) -> str:
    """Return bits per byte of the seeds."""
    return ", ".join(f"{result:.3f}" for result in trial.results)


def right(runs: Sequence[Run]) -> str:
    """Return the cells of what is predicted right by distance, means over the seeds."""
    reports = [report for run in runs if (report := report_of(run, COLUMNS[0])) is not None]
    means = (fmean(report.recall_accuracy(band) for report in reports) for band in BANDS)
    return " | ".join(f"{mean:.0%}" for mean in means)


def shares(found: dict[str, list[Run]]) -> list[str]:
    """Return the lines of the table of what is predicted right, in the order of the table of results."""
    return [f"| {row} | {right(runs)} |" for row, runs in found.items()]


def by_seed(found: dict[str, list[Run]]) -> list[str]:
    """Return the lines of the table of what each seed predicts right, of the rows with a matrix in the first block."""
    lines = []
    for row in (row for row in found if row in MATRICES):
        shares = [right([run]).split(" | ") for run in found[row]]
        lines.append(f"| {row} | {' | '.join(', '.join(seeds) for seeds in zip(*shares, strict=True))} |")
    return lines


def setting(folder: Path, row: str, key: str) -> Any:
    """Return a setting of a row's first run."""
    return json.loads((folder / f"{row}-seed0.json").read_text())["definition"][key]


def means(found: dict[str, list[Run]], bold: int) -> dict[str, list[str]]:
    """Return the means of the columns by row, in the first `bold` of them the best in bold."""
    texts = {row: [cell(runs, column).text(deviation=True) for column in COLUMNS] for row, runs in found.items()}
    for place, column in enumerate(COLUMNS[:bold]):
        first = min(found, key=lambda row: cell(found[row], column).mean or 0.0)
        texts[first][place] = f"**{texts[first][place]}**"
    return texts


def table(found: dict[str, list[Run]], state_bytes: dict[str, int]) -> list[str]:
    """Return the lines of the table of results, the best in bold where models recall at all: not beyond 256 tokens."""
    lines = []
    for row, results in means(found, bold=2).items():
        gains = [gain(found[other], found[row]) for other in AGAINST]
        copies = [begins(json.loads(run.cell.read_text())) for run in found[row]]
        cells = [row, *results, *gains, f"{state_bytes[row]:,}", ", ".join(copies)]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def equal_bytes(found: dict[str, list[Run]]) -> list[str]:
    """Return the lines of the table of equal bytes, the best of each column in bold."""
    lines = []
    for row, results in means(found, bold=3).items():
        gains = [gain(found[other], found[row]) for other in AGAINST[1:]]
        lines.append(f"| {' | '.join([row, str(len(found[row])), *results, *gains, right(found[row])])} |")
    return lines


def books(found: dict[str, list[Run]], state_bytes: dict[str, int]) -> list[str]:
    """Return the lines of the table of real books: how many bits less a byte costs, over all seeds and of each."""
    reports = {row: [one for run in runs if (one := report_of(run, BITS)) is not None] for row, runs in found.items()}
    lines = []
    for row, mine in reports.items():
        cells = [row, ", ".join(f"{one.bits_per_byte:.4f}" for one in mine)]
        for other in AGAINST[:2]:
            for seeds in (slice(None), *(slice(seed, seed + 1) for seed in range(len(mine)))):
                interval = bits_interval(reports[other][seeds], mine[seeds])
                assert interval is not None
                cells.append("" if other == row else " to ".join(f"{round(bound, 3) + 0.0:.3f}" for bound in interval))
        lines.append(f"| {' | '.join([*cells, f'{state_bytes[row]:,}'])} |")
    return lines


def short(found: dict[str, list[Run]], state_bytes: dict[str, int]) -> list[str]:
    """Return the numbers of README's table: bytes, perplexity, and what is predicted right by distance."""
    perplexities = {row: cell(found[row], COLUMNS[0]).text(deviation=True) for row in SHORT}
    return [f"| {state_bytes[row]:,} | {perplexities[row]} | {right(found[row])} |" for row in SHORT]


def far_back(found: dict[str, list[Run]], state_bytes: dict[str, int], column: str) -> list[str]:
    """Return the lines of the table of a task a thousand tokens back; last, how much more Gated DeltaNet answers."""
    reports = {row: [one for run in runs if (one := report_of(run, column)) is not None] for row, runs in found.items()}
    lines = []
    for row, runs in reversed(found.items()):
        shares = [", ".join(f"{value:.0%}" for value in cell(runs, each).values) for each in (column, *FAR_BANDS)]
        interval = accuracy_interval(reports[row], reports["Gated DeltaNet"], whole=column == "whole answers")
        assert interval is not None
        more = "" if row == "Gated DeltaNet" else " to ".join(f"{round(100 * bound)}" for bound in interval)
        lines.append(f"| {row} | {state_bytes[row]:,} | {' | '.join(shares)} | {more} |")
    return lines


def sizes(finished: Path = FINISHED, name: str = "second_edition", vocabulary: int = VOCABULARY) -> dict[str, int]:
    """Return the bytes of memory per lane of every row that has a finished run."""
    study = load_study(str(ROOT / "configs" / "arena" / f"{name}.yaml"))
    rows = {run: [*study.train, *study.trained[run]] for run in study.rows if run in study.trained}
    return {
        name: fitted(name, words, study.budget, study.fit, load_config, vocabulary)[1].state_bytes
        for name, words in rows.items()
        if list(finished.glob(f"{name}-seed*.json"))
    }


@pytest.mark.timeout(300)
def test_the_page_has_the_numbers_of_the_cells(tmp_path: Path) -> None:
    page, readme = (path.read_text(encoding="utf-8") for path in (PAGE, ROOT / "README.md"))
    found, state_bytes = runs_of(tmp_path), sizes()
    assert {len(runs) for runs in found.values()} == {3}  # seeds, as the page says
    lines, tables = page.splitlines(), [table(found, state_bytes), shares(found), by_seed(found), rates(found, copied)]
    assert [line for each in tables for line in each if line not in lines] == []
    assert [line for line in short(found, state_bytes) if line not in readme] == []


def test_every_interval_in_a_sentence_stands_in_a_table() -> None:
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    tables, text = ("\n".join(line for line in lines if line.startswith("|") is is_row) for is_row in (True, False))
    intervals = set(re.findall(r"\d\.\d{3}\s+to\s+\d\.\d{3}", text))
    assert len(intervals) > 5 and {one for one in intervals if " ".join(one.split()) not in tables} == set()
    points = {" ".join(one.split()) for one in re.findall(r"\d+\s+to\s+\d+(?=\s+percentage\s+points)", text)}
    assert len(points) > 2 and points <= {one.strip() for one in tables.split("|")}


@pytest.mark.parametrize("finished, tuned", [(FINISHED, FINISHED), (BOOKS, BOOKS), (EQUAL, FINISHED)])
def test_every_run_has_the_rate_that_was_best_on_validation(tmp_path: Path, finished: Path, tuned: Path) -> None:
    found = runs_of(tmp_path, finished, BITS if finished is BOOKS else COLUMNS[0])
    assert len(found) > 4
    for row, results in {row: trials(row, tuned) for row in found}.items():
        assert len(results) > 2, row
        chosen = {json.loads(run.cell.read_text())["definition"]["optimizer.lr"] for run in found[row]}
        assert chosen == {best(results)}, row


@pytest.mark.parametrize("task", LONG)
def test_the_page_has_the_numbers_of_tasks_a_thousand_tokens_back(tmp_path: Path, task: str) -> None:
    lines, finished = PAGE.read_text(encoding="utf-8").splitlines(), RESULTS / task
    vocabulary, column = LONG[task]
    found = far_back(runs_of(tmp_path, finished, column), sizes(finished, task, vocabulary), column)
    assert len(found) > 3 and [line for line in found if line not in lines] == []


def test_the_page_has_the_numbers_of_equal_bytes(tmp_path: Path) -> None:
    page = PAGE.read_text(encoding="utf-8")
    found, wanted = equal_bytes(runs_of(tmp_path, EQUAL)), load_study(str(EQUAL_SPEC)).budget["state_bytes"]
    assert len(found) > 4 and [line for line in found if line not in page.splitlines()] == []
    wide, narrow = (setting(folder, "DeltaNet", "train.steps") for folder in (EQUAL, FINISHED))
    number = setting(EQUAL, "Transformer-XL", "memory.mem_len")
    for said in (f"{wide:,} updates instead of {narrow:,}", f"{number} rows per block for Transformer-XL"):
        assert said in " ".join(page.split())
    assert all(abs(size / wanted - 1) < 0.02 for size in sizes(EQUAL, EQUAL_SPEC.stem).values())


def test_the_page_has_the_numbers_of_real_books(tmp_path: Path) -> None:
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    found = runs_of(tmp_path, BOOKS, BITS)
    tables = books(found, sizes(BOOKS, "pg19", 4000)), rates(found, bits, BOOKS)
    assert len(found) > 4 and [line for each in tables for line in each if line not in lines] == []
