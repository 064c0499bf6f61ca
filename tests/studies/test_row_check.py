"""`dist-mem reproduce TABLE --check`, tables of one's own, and rows that run at some points or on data of their own."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from dist_mem.__main__ import main
from dist_mem.errors import EXIT_DONE, EXIT_USAGE, UnusableError
from dist_mem.studies.results import cell, draw, to_csv, to_markdown
from dist_mem.studies.runs import all_runs, keep_result, runs_behind
from dist_mem.studies.tables import FOLDER, load_table, table_names
from tests.support.jobs import build_books, write_config
from tests.support.paths import ROOT

SCALES = [
    (name, scale) for name in table_names(ROOT / FOLDER) for scale in load_table(name, ROOT / FOLDER).scales
]  # every table, every scale


@pytest.mark.slow
@pytest.mark.parametrize(("name", "scale"), SCALES)
def test_check_lists_every_row_without_any_data(
    name: str, scale: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    monkeypatch.chdir(tmp_path)
    assert main(["reproduce", name, "--scale", scale, "--check"]) == EXIT_DONE
    captured = capsys.readouterr()
    assert captured.err == ""
    table = load_table(name)
    for key in table.scales[scale].rows:
        assert f"\n{key}: {table.rows[key].name}" in captured.out
    for point in table.scales[scale].points.values():
        assert f"{point.data}: not built yet" in " ".join(captured.out.split())
    if scale == "paper":
        assert "is assumed" not in captured.out  # the size of the vocabulary is known
        figures = [value for row in table.rows.values() for value in row.paper.values()]
        assert not [value for value in figures if f" {value:g}" not in captured.out]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["configs"]  # nothing is written


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A table of one's own in a folder of its own, with its configuration beside it."""
    data = build_books(tmp_path)
    (tmp_path / "my").mkdir()
    write_config(tmp_path / "my" / "job.yaml", data, tmp_path / "unused", {"train": {"steps": 2}})
    write(
        tmp_path,
        {
            "title": "Mine",
            "source": "nobody",
            "rows": {
                "none": {"name": "None", "paper": {"test": 1.5}, "sizes": {"parameters": 2e6}},
                "xl": {"name": "XL", "paper": {"test": 1.25}},
            },
            "columns": {"test": {"figure": "token_perplexity"}},
            "scales": {
                name: {
                    "about": "Seconds.",
                    "train": ["job.yaml", "tracking.mlflow=false"],
                    "rows": {"none": ["memory.kind=none"], "xl": []},
                    "points": {"": {"data": str(data)}},
                }
                for name in ("tiny", "paper")
            },
        },
    )
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(folder: Path, table: dict[str, Any]) -> None:
    (folder / "my" / "mine.yaml").write_text(yaml.safe_dump(table, sort_keys=False))


def read(folder: Path) -> dict[str, Any]:
    table: dict[str, Any] = yaml.safe_load((folder / "my" / "mine.yaml").read_text())
    return table


@pytest.mark.slow
def test_a_table_is_taken_from_any_path(own: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["reproduce", "my/mine.yaml", "--rows", "none", "checkpoint.every=null"]) == EXIT_DONE
    text = (own / "runs" / "reproduce" / "mine.tiny" / "table.md").read_text()
    assert re.search(r"\| None \| \d+\.?\d* \|\n", text)
    with pytest.raises(UnusableError, match=r"no table file my/other\.yaml"):
        load_table("my/other.yaml")


def test_check_tells_data_that_are_built_and_the_papers_figures(own: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["reproduce", "my/mine.yaml", "--scale", "paper", "--check", "train.steps=7"]) == EXIT_DONE
    text = capsys.readouterr().out
    assert "every row: my/job.yaml" in text
    assert " ".join(text.split()).count("steps=7 ") == 1  # what all rows share is printed once
    assert re.search(r"\nnone: None\n  memory +kind=none\n  parameters +[\d,]+ \(the paper: 2 M\)\n", text)
    assert re.search(r" data \S+, train: \d+ documents.*; 7 steps", " ".join(text.split()))  # lines are wrapped
    assert re.search(r"  the paper +test 1\.5\n", text)
    assert not (own / "runs").exists()


def test_check_names_every_row_that_cannot_run(own: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = read(own)
    table["scales"]["paper"]["rows"] = {"none": ["memory.kind=nonesuch"], "xl": ["train.global_batch_size=64"]}
    write(own, table)
    assert main(["reproduce", "my/mine.yaml", "--scale", "paper", "--check"]) == EXIT_USAGE
    errors = capsys.readouterr().err
    assert "row none: " in errors
    assert "nonesuch" in errors
    assert re.search(r"row xl: .*64", errors)  # the data have fewer documents than lanes


def test_a_row_may_have_data_of_its_own(own: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = read(own)
    table["scales"]["tiny"]["rows"]["none"].append("data.path=elsewhere")
    table["scales"]["tiny"]["points"][""]["made_by"] = "dist-mem data build text"
    write(own, table)
    assert main(["reproduce", "my/mine.yaml", "--check"]) == EXIT_DONE
    text = capsys.readouterr().out
    assert "elsewhere: not built yet" in text
    assert "data built by dist-mem data build text" in text
    assert main(["reproduce", "my/mine.yaml", "--rows", "none"]) == EXIT_USAGE
    assert "elsewhere is missing" in capsys.readouterr().err


def test_a_row_runs_at_the_points_that_have_it(own: Path) -> None:
    table = read(own)
    tiny = table["scales"]["tiny"]
    tiny["points"] = {"a": {"data": "d", "without": ["xl"]}, "b": {"data": "e"}}
    tiny["columns"] = {name: {"figure": "accuracy", "point": name} for name in ("a", "b")}
    table["rows"]["best"] = {"name": "Best", "best_of": ["none", "xl"]}
    write(own, table)
    loaded = load_table("my/mine.yaml")
    scale = loaded.scales["tiny"]
    runs = all_runs(scale, own / "out", [0], list(scale.rows))
    assert [run.name for run in runs] == ["none-a-seed0", "none-b-seed0", "xl-b-seed0"]
    for run in runs:
        for name in (run.point, f"{run.point} on validation"):
            keep_result(run, name, {"value": 0.9 if run.row == "xl" else 0.5, "step": 1})
    chosen = {name: [run.row for run in runs_behind(loaded, scale, runs, "best", name)] for name in ("a", "b")}
    assert chosen == {"a": ["none"], "b": ["xl"]}
    assert "| XL | - | 0.9 |" in to_markdown(loaded, scale, runs, {})
    tiny["points"]["a"]["without"] = ["xll"]
    write(own, table)
    with pytest.raises(UnusableError, match=r"points\.a\.without has 'xll'"):
        load_table("my/mine.yaml")
    tiny["points"] = {name: {"data": "d", "without": ["xl"]} for name in ("a", "b")}
    write(own, table)
    with pytest.raises(UnusableError, match=r"'xl' is run at no point"):
        load_table("my/mine.yaml")


def test_the_papers_figures_stand_beside_ours_at_its_scale_only(own: Path) -> None:
    table = load_table("my/mine.yaml")
    texts = {}
    for name, scale in table.scales.items():
        runs = all_runs(scale, own / name, [0, 1], list(scale.rows))
        for run in runs:
            keep_result(run, "test", {"value": 7.0 + run.seed, "step": 1})
        texts[name] = to_markdown(table, scale, runs, {}), to_csv(table, scale, runs)
        assert str(cell(runs[:1], "test")) == "7"
    assert "|  | test, paper | test, ours |" in texts["paper"][0]
    assert "| None | 1.5 | 7.5 ± 0.5 |" in texts["paper"][0]
    assert "none,test,0,1.5,7.0,1,evaluated" in texts["paper"][1]
    ours, _, papers = texts["tiny"][0].partition("## The paper's figures")
    assert "1.5" not in ours
    assert "| None | 7.5 ± 0.5 |" in ours
    assert "| None | 1.5 |" in papers
    assert "not comparable" in papers
    assert "paper" not in texts["tiny"][1]
    assert "none,test,0,7.0,1,evaluated" in texts["tiny"][1]


def test_the_picture_has_the_range_of_seeds_and_the_papers_points_at_its_scale_only(
    own: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from matplotlib.collections import LineCollection
    from matplotlib.figure import Figure

    drawn: list[Any] = []
    save = Figure.savefig
    monkeypatch.setattr(
        Figure, "savefig", lambda figure, *args, **kw: (drawn.append(figure), save(figure, *args, **kw))
    )
    table = load_table("my/mine.yaml")
    legends = {}
    for name, scale in table.scales.items():
        runs = all_runs(scale, own / name, [0, 1], list(scale.rows))
        for run in runs:
            keep_result(run, "test", {"value": 7.0 + run.seed, "step": 1})
        draw(table, scale, runs, own / f"{name}.png")
        (axes,) = drawn[-1].axes
        legends[name] = {text.get_text() for text in axes.figure.legends[0].get_texts()}
        bars = [collection for collection in axes.collections if isinstance(collection, LineCollection)]
        ranges = [tuple(segment[:, 1]) for collection in bars for segment in collection.get_segments()]
        assert ranges == [(7.0, 8.0), (7.0, 8.0)]
    assert legends == {"tiny": {"None", "XL"}, "paper": {"None", "XL", "the paper's"}}
