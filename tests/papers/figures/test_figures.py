"""Every figure, by discovery, from a tiny run of every memory: drawn with its numbers, or refused with the reason."""

from __future__ import annotations

import csv
import io
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dist_mem.__main__ import main
from dist_mem.config.memory_blocks import PER_BLOCK, kinds_of
from dist_mem.data.shard import TokenizedDocument, write_split
from dist_mem.data.tokenizers.registry import save_tokenizer
from dist_mem.errors import EXIT_DONE, EXIT_USAGE, UnusableError
from dist_mem.evaluation.plotting.drawn import Drawn, write_figure
from dist_mem.evaluation.plotting.style import MARK, styled
from dist_mem.evaluation.trained_model import find_checkpoint
from dist_mem.memory import memory_class, memory_kinds
from dist_mem.memory.base import Inspectable
from dist_mem.model import MemoryLM
from dist_mem.papers.figures import ELSEWHERE, figure_named, figures
from dist_mem.papers.figures.infinite_fig7 import densities
from dist_mem.papers.figures.infinite_fig10 import memory_space
from dist_mem.papers.figures.lamemo_fig1 import attention_by_distance
from dist_mem.papers.figures.lamemo_fig6 import mean_alpha, shown_layers
from dist_mem.papers.figures.parts.signal import signal_memories
from dist_mem.papers.figures.parts.source import Settings, Source
from dist_mem.tracking.log import METRICS_FILE
from tests.support.messages import said
from tests.support.scored_library import ALONE, SEG_LEN, TOKENIZER, make_config, save_weights, write_other
from tests.support.tracked import log_points

LENGTH = 160  # tokens of a document
NUM_TOKENS = 48  # read for a mean
NAMES = ("Anna", "Ben", "Clara", "David", "Ella")


def write_documents(folder: Path) -> Path:
    """Write a split `test` of three documents of short words; in each, every second line is a reply."""
    save_tokenizer(TOKENIZER, folder)
    draw = np.random.default_rng(0)
    documents = []
    for number in range(3):
        words = [NAMES[place] for place in draw.integers(len(NAMES), size=LENGTH)]
        text = "".join(f"{word}{'' if place % 4 else chr(10)} " for place, word in enumerate(words))[:LENGTH]
        scored = np.cumsum([letter == "\n" for letter in f" {text}"[:LENGTH]]) % 2 == 1
        documents.append(
            TokenizedDocument(
                id=f"doc{number}",
                title=f"Title {number}",
                year=1900,
                words=len(text.split()),
                bytes=LENGTH,
                tokens=TOKENIZER.encode(text),
                mask=scored,
            )
        )
    write_split(documents, folder / "test", name="tiny", split="test", tokenizer_fingerprint=TOKENIZER.fingerprint)
    return folder


def memories() -> dict[str, dict[str, Any]]:
    """Return every memory of the package by its file name, sticky sampling, the dialogue model's, and a map of two."""
    blocks = {kind: {"kind": kind, **memory_class(kind).small_options(SEG_LEN)} for kind in memory_kinds()}
    return {
        **blocks,
        "sticky": {**blocks["infinite"], "sampling": "sticky"},
        "gpt2": {**blocks["infinite"], "over": {"kind": "causal"}},
        "map": {"kind": PER_BLOCK, "default": blocks["transformer_xl"], "2": blocks["infinite"]},
    }


def make_run(folder: Path, data: Path, memory: dict[str, Any]) -> Path:
    """Write a run with random weights and three logged steps; a model with causal attention is a GPT-2."""
    model: dict[str, Any] = {"init_std": 0.3, "num_layers": 3}
    if "causal" in [kind for _, kind in kinds_of(memory)]:
        model |= {"kind": "gpt2", "num_positions": SEG_LEN}
    config = make_config(data={"path": str(data)}, model=model, eval={"split": "test"})
    config.memory = memory
    torch.manual_seed(0)
    save_weights(folder, MemoryLM(config, TOKENIZER.vocab_size).eval(), config, step=3)
    points = [{"step": step, "time": 0.0, "metrics": {"loss": 5.0 / step}} for step in (1, 2, 3)]
    log_points(folder / METRICS_FILE, points)
    return folder


def source_of(run: Path, **settings: Any) -> Source:
    """Return a run to draw from."""
    return Source(
        find_checkpoint(run), run.name, Settings(**{"num_tokens": NUM_TOKENS, **settings}), ALONE, lambda *_: None
    )


KINDS = list(memories())
SIGNALS = {"infinite", "sticky", "gpt2", "map"}  # have a continuous memory in a layer; `map` in the last one only


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("figures")
    data = write_documents(folder / "data")
    return {kind: make_run(folder / kind, data, block) for kind, block in memories().items()}


def draw(name: str, kind: str, runs: dict[str, Path]) -> Drawn:
    figure = figure_named(name)
    sources = [source_of(runs[each]) for each in [kind, "transformer_xl"][: figure.least_runs]]
    with styled():
        return figure.draw(name, sources)


def plotted(drawn: Drawn) -> list[float]:
    """The heights of every line and bar that shows data."""
    found: list[float] = []
    for axes in drawn.picture.axes:
        lines = [line for line in axes.lines if line.get_gid() != MARK and len(line.get_ydata()) > 2]
        found += [float(value) for line in lines for value in line.get_ydata() if value == value]
        found += [float(bar.get_height()) for container in axes.containers for bar in container]
    return found


def shows_rows(block: dict[str, Any]) -> bool:
    if block["kind"] == PER_BLOCK:
        return True
    found = memory_class(block["kind"])
    return issubclass(found, Inspectable) and found.inspect is not Inspectable.inspect


MADE = {
    **{f"infinite.fig{number}": SIGNALS for number in (4, 12, 7, 8, 9)},
    **{name: {"sticky"} for name in ("infinite.fig5", "infinite.fig10", "infinite.fig11")},
    "lamemo.fig1": {name for name in KINDS if shows_rows(memories()[name])},
    "lamemo.fig8": set(KINDS),
    "lamemo.fig6": {"lamemo"},
}


@pytest.mark.parametrize("name", figures())
def test_every_figure_is_drawn_from_its_memories_with_its_numbers_or_refused(
    name: str, runs: dict[str, Path], tmp_path: Path
) -> None:
    made = set()
    kinds = KINDS if name == figure_named(name).names[0] else ["sticky"]  # others differ in the document only
    for kind in kinds:
        try:
            drawn = draw(name, kind, runs)
        except UnusableError as error:
            assert re.search(rf"memory\.kind is '{memories()[kind]['kind']}', but {name[:5]}", str(error))
            continue
        made.add(kind)
        with styled():
            files = write_figure(drawn, tmp_path / kind, name, form="svg")
        assert [path.suffix for path in files] == [".svg", ".csv", ".md"]
        rows = list(csv.reader(io.StringIO(files[1].read_text(encoding="utf-8"))))
        assert all(len(row) == len(rows[0]) for row in rows)
        numbers = {float(cell) for row in rows[1:] for cell in row if re.fullmatch(r"-?[\d.]+(e-?\d+)?", cell)}
        assert set(plotted(drawn)) <= numbers, "the file has not every number of the picture"
        assert drawn.caption in files[2].read_text(encoding="utf-8")
    assert made
    assert made == MADE.get(name, made) & set(kinds)


def test_the_space_of_all_words_is_one_with_and_without_sticky_memories(runs: dict[str, Path]) -> None:
    source = source_of(runs["sticky"])
    space = memory_space(source, signal_memories(source, "infinite.fig10")[-1], 0)
    assert sum(space.sticky) == pytest.approx(1.0)
    assert sum(space.even) == pytest.approx(1.0)
    assert len(space.words) == len(space.sticky) == len(space.even)
    assert len(space.borders) == 4
    assert space.borders == sorted(space.borders)


@pytest.mark.parametrize("kind", ["infinite", "sticky", "gpt2", "map"])
def test_densities_are_at_most_one_in_all(kind: str, runs: dict[str, Path]) -> None:
    found, count = densities(source_of(runs[kind]), 40)
    integrals = found.mean(dim=2)
    assert count >= 40
    assert (found >= 0).all()
    assert (integrals <= 1 + 1e-6).all()
    assert (integrals > 0).all()


@pytest.mark.parametrize("kind", ["rmt", "infini"])
def test_attention_by_distance_says_what_has_no_distance(kind: str, runs: dict[str, Path]) -> None:
    curves, _ = attention_by_distance(source_of(runs[kind]), NUM_TOKENS)
    assert 0.0 < float(curves["summary"]) < 1.0
    caption = draw("lamemo.fig1", kind, runs).caption
    assert f"Of {kind}, {float(curves['summary']):.2f} is read from a summary" in caption


def test_alpha_is_a_share(runs: dict[str, Path]) -> None:
    alpha, count = mean_alpha(source_of(runs["lamemo"]), 3)
    assert list(alpha) == [0, 1]  # of three layers; the last refreshes nothing
    assert count == 3
    for values in alpha.values():
        assert values.shape == (memories()["lamemo"]["mem_len"],)
        assert ((values >= 0) & (values <= 1)).all()
        assert not torch.equal(values, torch.ones_like(values))


def test_layers_are_spread_over_the_model() -> None:
    assert shown_layers([0, 1, 2]) == [0, 1, 2]
    spread = shown_layers(list(range(15)))
    assert len(spread) == 8
    assert (spread[0], spread[-1]) == (0, 14)


def run_main(*arguments: str) -> int:
    return main(["figure", *arguments])


@pytest.mark.usefixtures("single_process")
def test_the_command_writes_into_the_run_or_a_folder(
    runs: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = str(runs["lamemo"])
    assert run_main("lamemo.fig6", run, "--tokens", "16", "--split", "test") == EXIT_DONE
    names = sorted(path.name for path in (runs["lamemo"] / "figures").iterdir())
    assert names == [f"lamemo.fig6-test-step-00000003.{ending}" for ending in ("csv", "md", "png")]
    other, tag = write_other(tmp_path / "data")
    assert run_main("lamemo.fig6", run, f"data.path={other}", "--tokens", "16", "--split", "test") == EXIT_DONE
    added = {path.name for path in (runs["lamemo"] / "figures").iterdir()} - set(names)
    assert added == {f"lamemo.fig6-test-step-00000003{tag}.{ending}" for ending in ("csv", "md", "png")}
    assert run_main("lamemo.fig6", run, "--format", "svg", "-o", str(tmp_path / "out")) == EXIT_DONE
    assert "<svg" in next((tmp_path / "out").glob("*.svg")).read_text(encoding="utf-8")
    assert "written: " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("command", "named"),
    [
        ("lamemo.fig99 RUN", "did you mean lamemo.fig"),
        ("infinite.fig8 RUN", "BASELINE"),
        ("lamemo.fig5 RUN", "dist-mem reproduce"),
        ("lamemo.fig6 RUN --document doc9", "--document doc9"),
        ("", "give a name and a run"),
    ],
)
@pytest.mark.usefixtures("single_process")
def test_a_wrong_command_says_what_is_wrong(
    command: str, named: str, runs: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_main(*command.replace("RUN", str(runs["lamemo"])).split()) == EXIT_USAGE
    said(f"exit code 2: {capsys.readouterr().err}", named)


def test_the_list_names_every_figure(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_main("--list") == EXIT_DONE
    printed = capsys.readouterr().out
    names = [line.split()[0] for line in printed.splitlines() if not line.startswith(" ")]  # others continue a line
    assert names == [*figures(), *ELSEWHERE]
