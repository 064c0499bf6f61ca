"""The results of a study: `table.md`, `table.csv` with a line per cell, and `table.png`; with a budget more pictures.

The paper's metrics appear beside ours only at the paper's scale. At other scales, where data and sizes differ, the
Markdown has them in a separate section, and the CSV and the plot omit them. A study with a budget also shows what
every row took, and an interval of its gain over the first row.

Every line of the CSV has the commands of its training and of its evaluation, and a checksum of what the evaluation
found in every document: who repeats the two commands on the same kind of machine gets the same checksum.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

from dist_mem.evaluation.intervals import MIN_DOCUMENTS, about_settled
from dist_mem.evaluation.scores import POSITION_METRIC, RECALL_METRICS
from dist_mem.runtime import markdown
from dist_mem.runtime.csv_text import csv_text
from dist_mem.runtime.figures import NO_FIGURE
from dist_mem.runtime.files import write_text
from dist_mem.studies.budget import HEADING
from dist_mem.studies.cells import CellRun, checksum, origin_of, read_result, report_of
from dist_mem.studies.pictures import PARETO, by_result, draw, draw_comparison, has_means
from dist_mem.studies.results import (
    NOT_GIVEN,
    SHARES,
    RowSummary,
    cell,
    first_metric,
    rank_of_runs,
    standings,
    table_rows,
)
from dist_mem.studies.runs import BITS, columns_to_measure, evaluate_command, runs_behind, shown_rows, train_words
from dist_mem.studies.study import Study
from dist_mem.studies.study_call import StudyCall

PAGE, CSV, PICTURE = "table.md", "table.csv", "table.png"


def write_results(job: StudyCall, provenance: Mapping[str, str]) -> list[Path]:
    """Write the files of the results, and return their paths."""
    study = job.study
    paths = [job.out / name for name in (PAGE, CSV, PICTURE)]
    found = standings(study, job.runs, job.costs)
    write_text(paths[0], to_markdown(study, job.runs, provenance, found))
    write_text(paths[1], to_csv(study, job.runs, job.extra, ranks=job.ranks))
    if not draw(study, job.runs, paths[2]):
        paths.pop()
    return paths + (draw_comparison(job, found) if found else [])


def to_markdown(
    study: Study, runs: Sequence[CellRun], provenance: Mapping[str, str], found: Mapping[str, RowSummary] | None = None
) -> str:
    """Return the table with its notes and, except at the paper's scale, a section with the paper's metrics.

    Args:
        found: what each row of a study with a budget took.
    """
    found = found or {}
    columns, shown = study.columns, list(found) or table_rows(study)
    beside = study.is_papers and any(name in row.paper for row in study.rows.values() for name in columns)
    pairs = ([f"{name}, paper", f"{name}, ours"] if beside else [name] for name in columns)
    heading = ["", *(text for pair in pairs for text in pair), *(_budget_heading(study, shown[0]) if found else [])]
    rows = []
    best = _best_cells(study, runs, found)
    for key in by_result(found) if found else shown:
        row = study.rows[key]
        cells = [row.name]
        for name in columns:
            mine = runs_behind(study, runs, key, name)
            ours = cell(mine, name).text() if mine else NOT_GIVEN
            ours = f"**{ours}**" if (key, name) in best else ours
            cells += [_number(row.paper.get(name)), ours] if beside else [ours]
        rows.append([*cells, *(_budget_cells(study, found[key]) if found else [])])
    lines = [f"# {study.title}", "", study.source, "", *markdown.table(heading, rows), "", study.about, ""]
    if found:
        lines += [_about_interval(study, found, runs), ""]
        lines += [f"![Quality against cost]({PARETO})", ""] if has_means(found) else []
    lines += [f"- {study.rows[key].name}: {study.rows[key].note}" for key in shown if study.rows[key].note]
    lines += [_chosen_line(study, runs, key) for key in shown if study.rows[key].best_of]
    left_out = [row.name for key, row in study.rows.items() if key not in shown_rows(study)]
    if left_out:
        lines.append(f"- not run at this scale: {'; '.join(left_out)}")
    lines += [f"- {note}" for note in study.notes]
    lines += [f"- {name}: {value}" for name, value in provenance.items()]
    if not study.is_papers:
        lines += _papers_section(study)
    return "\n".join(lines) + "\n"


def _best_cells(study: Study, runs: Sequence[CellRun], found: Mapping[str, RowSummary]) -> set[tuple[str, str]]:
    """Return the best row of each column of a study with a budget, (row, column); they are bold."""
    ranks: dict[str, dict[str, tuple[int, float]]] = {name: {} for name in study.columns}
    for row, (name, column) in product(found, study.columns.items()):  # row by row, as cells are kept in memory
        ranks[name][row] = rank_of_runs(runs_behind(study, runs, row, name), name, column)
    known = {name: {row: rank for row, rank in each.items() if rank[0] == 0} for name, each in ranks.items()}
    return {(min(each, key=each.__getitem__), name) for name, each in known.items() if len(each) > 1}


def _budget_heading(study: Study, first: str) -> list[str]:
    name, metric = study.rows[first].name, first_metric(study)
    gain = f"memory - {name}" if metric in SHARES else f"{name} {'-' if metric == BITS else '/'} memory"
    return [f"{gain}, 95 %", *HEADING, "tokens/s"]


def _budget_cells(study: Study, found: RowSummary) -> list[str]:
    form = ".3f" if first_metric(study).endswith("perplexity") else "+.3f"
    interval = "" if found.interval is None else found.interval.text(is_settled=found.is_settled, form=form)
    speed = NO_FIGURE if found.speed is None else f"{found.speed:,.0f}"
    return [interval, *found.costs.texts(), speed]


def _about_interval(study: Study, found: Mapping[str, RowSummary], runs: Sequence[CellRun]) -> str:
    """Return the sentences that say what the numbers and intervals of a study with a budget are."""
    seeds = ", ".join(map(str, sorted({run.seed for run in runs})))
    metric, name = first_metric(study), study.rows[next(iter(found))].name
    means = f"Means over the seeds {seeds}, ± their standard deviation."
    known = [each.interval for each in found.values() if each.interval is not None]
    if metric in RECALL_METRICS:
        return f"{means} There is no interval: evaluations record recall by distance, not by document."
    what, nothing = f"{name}'s perplexity of all scored words or tokens divided by the memory's", 1
    if metric in SHARES:
        what, nothing = f"the memory's {metric.replace('_', ' ')} minus {name}'s", 0
    elif metric == POSITION_METRIC:
        what = f"{name}'s perplexity at the positions of the first column divided by the memory's"
    elif metric == BITS:
        what, nothing = f"{name}'s bits per byte minus the memory's", 0
    about = (
        f"{means} The interval is that of {what}, with other seeds and other documents of the same kind; with one seed "
    )
    about += f"of a row, of other documents only. One that contains {nothing} settles nothing. "
    if study.paired:
        about += "Rows are compared seed by seed. "
    if (over_seeds := sum(each.over_seeds for each in known)) > 1:
        about += (
            f"{about_settled(over_seeds)}. Where a few seeds end far from the others, it holds the truth less often. "
        )
    return f"{about}Fewer than {MIN_DOCUMENTS} documents have none."


def _papers_section(study: Study) -> list[str]:
    """Return the paper's table as a separate section; empty if it prints no metric."""
    names = list(dict.fromkeys(name for row in study.rows.values() for name in row.paper))
    if not names:
        return []
    head = ["", "## The paper's metrics", "", "Other data and other sizes than above: not comparable.", ""]
    rows = [[row.name, *(_number(row.paper.get(name)) for name in names)] for row in study.rows.values() if row.paper]
    return [*head, *markdown.table(["", *names], rows)]


def _number(value: float | None) -> str:
    return NOT_GIVEN if value is None else f"{value:g}"


def _chosen_line(study: Study, runs: Sequence[CellRun], key: str) -> str:
    """Return a line that names the rows chosen on validation."""
    chosen = []
    for name in study.columns:
        behind = [run for run in runs_behind(study, runs, key, name) if read_result(run, name) is not None]
        chosen += [f"{name}: {study.rows[run.row].name} (seed {run.seed})" for run in behind]
    return f"- {study.rows[key].name}, chosen on validation: {'; '.join(chosen) or 'nothing yet'}"


def to_csv(study: Study, runs: Sequence[CellRun], extra: Sequence[str], *, ranks: int = 1) -> str:
    """Return a CSV of every cell: our metric, step, outcome, checksum and commands; at the paper's scale its metric.

    Args:
        extra: overrides of every training.
        ranks: of a training that has not ended.
    """
    lines: list[list[object]] = []
    lines.append(["row", "column", "seed", *(["paper"] if study.is_papers else []), "value", "step", "ended"])
    lines[0] += ["sha256", "training", "evaluation"]
    for run in runs:
        processes = origin_of(run).get("ranks", ranks)
        start = "dist-mem" if processes == 1 else f"torchrun --nproc_per_node {processes} -m dist_mem"
        training = f"{start} {shlex.join(['train', *train_words(study, run, extra)])}"
        digests: dict[str | None, str] = {None: ""}  # of the reports, of which several columns have one
        for name, column in columns_to_measure(study, run).items():
            result: dict[str, Any] = read_result(run, name) or {"to run": True}
            ended = next((word for word in ("diverged", "absent", "to run") if word in result), "evaluated")
            paper = [study.rows[run.row].paper.get(name, "")] if study.is_papers else []
            if (source := result.get("report")) not in digests and (report := report_of(run, name)) is not None:
                digests[source] = checksum(report)
            metrics = [*paper, result.get("value", ""), result.get("step", ""), ended, digests[source]]
            words = evaluate_command(run, column, extra)
            evaluation = shlex.join(["dist-mem", *words[words.index("dist_mem") + 1 :]])
            lines.append([run.row, name, run.seed, *metrics, training, evaluation])
    return csv_text(lines)
