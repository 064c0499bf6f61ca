"""Every figure, by discovery, from a tiny run of every memory: drawn with its numbers, or refused with the reason."""

import csv
import io
import itertools
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dist_mem.__main__ import main
from dist_mem.block import model_spec
from dist_mem.config import change_config
from dist_mem.config.memory_blocks import PER_BLOCK, kinds_of
from dist_mem.data.shard import TokenizedDocument, write_split
from dist_mem.data.tokenizers.registry import save_tokenizer
from dist_mem.data.tokenizers.single_bytes import BytesTokenizer
from dist_mem.errors import EXIT_DONE, EXIT_USAGE, UnusableError
from dist_mem.evaluation.plotting.drawn_figure import DrawnFigure, write_figure
from dist_mem.evaluation.plotting.style import MARK, use_style
from dist_mem.evaluation.trained_model import find_checkpoint
from dist_mem.memory import memory_class, memory_kinds
from dist_mem.memory.base import Inspectable
from dist_mem.memory.parts.inspection import Rows, Spans
from dist_mem.model import MemoryLM
from dist_mem.papers.figures import ELSEWHERE, figure_named, figures
from dist_mem.papers.figures.infinite_fig7 import densities
from dist_mem.papers.figures.infinite_fig8 import Gain, same_word_share
from dist_mem.papers.figures.infinite_fig10 import memory_space
from dist_mem.papers.figures.lamemo_fig1 import attention_by_distance
from dist_mem.papers.figures.lamemo_fig6 import mean_alpha, shown_layers
from dist_mem.papers.figures.lamemo_fig7 import g
from dist_mem.papers.figures.parts.signal import signal_memories, update_marks
from dist_mem.papers.figures.parts.source import FigureSettings, FigureSource
from dist_mem.papers.figures.parts.words import (
    LINE,
    DocumentWord,
    ShadedWord,
    excerpts,
    lines_of,
    mass_by_distance,
    phrases,
    token_mass,
    words_of,
)
from dist_mem.runtime.locks import hold_file
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


def make_run(folder: Path, data: Path, memory: dict[str, Any], *, cut: str = "start") -> Path:
    """Write a run with random weights and three logged steps; a model with causal attention is a GPT-2."""
    model: dict[str, Any] = {"init_std": 0.3, "num_layers": 3}
    if "causal" in [kind for _, kind in kinds_of(memory)]:
        model |= {"kind": "gpt2", "num_positions": SEG_LEN}
    config = change_config(
        make_config(data={"path": str(data), "cut": cut}, model=model, eval={"split": "test"}), {"memory": memory}
    )
    torch.manual_seed(0)
    save_weights(folder, MemoryLM(model_spec(config, TOKENIZER.vocab_size)).eval(), config, step=3)
    points = [{"step": step, "time": 0.0, "metrics": {"loss": 5.0 / step}} for step in (1, 2, 3)]
    log_points(folder / METRICS_FILE, points)
    return folder


def source_of(run: Path, **settings: Any) -> FigureSource:
    """Return a run to draw from."""
    return FigureSource(
        find_checkpoint(run), run.name, FigureSettings(**{"num_tokens": NUM_TOKENS, **settings}), ALONE, lambda *_: None
    )


KINDS = list(memories())
SIGNALS = {"infinite", "sticky", "gpt2", "map"}  # have a continuous memory in a layer; `map` in the last one only


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("figures")
    data = write_documents(folder / "data")
    return {kind: make_run(folder / kind, data, block) for kind, block in memories().items()}


def draw(name: str, kind: str, runs: dict[str, Path]) -> DrawnFigure:
    figure = figure_named(name)
    sources = [source_of(runs[each]) for each in [kind, "transformer_xl"][: figure.least_runs]]
    with use_style():
        return figure.draw(name, sources)


def plotted(drawn: DrawnFigure) -> list[float]:
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
        with use_style():
            files = write_figure(drawn, tmp_path / kind, name, form="svg")
        assert [path.suffix for path in files] == [".svg", ".csv", ".md"]
        rows = list(csv.reader(io.StringIO(files[1].read_text(encoding="utf-8"))))
        assert all(len(row) == len(rows[0]) for row in rows)
        numbers = {float(cell) for row in rows[1:] for cell in row if re.fullmatch(r"-?[\d.]+(e-?\d+)?", cell)}
        assert set(plotted(drawn)) <= numbers, "the file has not every number of the picture"
        assert drawn.caption in files[2].read_text(encoding="utf-8")
    assert made
    assert made == MADE.get(name, made) & set(kinds)


@pytest.mark.parametrize("length", [LENGTH, LENGTH - 5])
@pytest.mark.parametrize("cut", ["start", "end"])
def test_the_space_of_all_words_is_one_with_and_without_sticky_memories(cut: str, length: int, tmp_path: Path) -> None:
    """With `data.cut: end` the first update of a document has fewer rows if its length is no multiple of T."""
    memory = {**memories()["sticky"], "over": {"kind": "none"}}
    run = make_run(tmp_path / "run", write_documents(tmp_path / "data"), memory, cut=cut)
    source = source_of(run, overrides=(f"eval.max_document_len={length}",))
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


@pytest.mark.usefixtures("single_process")
def test_a_figure_that_another_command_draws_is_left_to_it(
    runs: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with hold_file(tmp_path / "out" / "lamemo.fig6-test-step-00000003"):
        command = "lamemo.fig6", str(runs["lamemo"]), "--split", "test", "-o", str(tmp_path / "out")
        assert run_main(*command) == EXIT_USAGE
        said(capsys.readouterr().err, "lamemo.fig6-test-step-00000003", "another command")


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
    said(capsys.readouterr().err, named)


def test_the_list_names_every_figure(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_main("--list") == EXIT_DONE
    printed = capsys.readouterr().out
    names = [line.split()[0] for line in printed.splitlines() if not line.startswith(" ")]  # others continue a line
    assert names == [*figures(), *ELSEWHERE]


HEADS, TOKENS, ROWS = 2, 5, 7


def some_rows() -> Rows:
    """Rows of one to four tokens, some of the same ones, and one that holds nothing."""
    generator = torch.Generator().manual_seed(0)
    weights = torch.rand(HEADS, 1, TOKENS, ROWS, generator=generator)
    weights[..., 3] = 0.0
    begin = torch.tensor([[-20, -20, -14, 0, -9, -5, -1]])
    return Rows(weights, Spans(begin, begin + torch.tensor([[4, 4, 2, 0, 3, 1, 1]])))


def test_mass_on_tokens_is_the_mass_on_rows() -> None:
    rows = some_rows()
    found = token_mass(rows, TOKENS)
    assert found.first == -20
    assert torch.allclose(found.mass.sum(dim=2), rows.weights[:, 0].double().sum(dim=2))
    assert torch.allclose(found.mass[..., -1], rows.weights[:, 0, :, 6].double())  # a row of the token -1 alone
    assert torch.allclose(found.mass[..., 0], rows.weights[:, 0, :, :2].double().sum(dim=2) / 4)


def test_rows_that_hold_nothing_have_no_tokens() -> None:
    rows = some_rows()
    empty = token_mass(Rows(rows.weights, Spans(rows.spans.begin, rows.spans.begin)), TOKENS)
    assert empty.mass.shape == (HEADS, TOKENS, 0)
    assert not mass_by_distance(empty, 10).any()


def test_mass_by_distance_is_all_mass_and_every_token_is_at_its_distance() -> None:
    found = token_mass(some_rows(), TOKENS)
    by_distance = mass_by_distance(found, 40)
    assert torch.allclose(by_distance.sum(dim=2), found.mass.sum(dim=2))
    for query in range(TOKENS):
        for distance in range(1, 41):
            column = query + 1 - distance - found.first
            expected = found.mass[:, query, column] if 0 <= column < found.mass.shape[2] else torch.zeros(HEADS)
            assert torch.equal(by_distance[:, query, distance - 1], expected.double())


@pytest.mark.parametrize("d_model", [4, 64])
def test_g_is_the_double_sum_of_the_paper_and_odd(d_model: int) -> None:
    places = torch.linspace(-9.0, 9.0, 37, dtype=torch.float64)
    frequencies = [10000.0 ** (-2.0 * k / d_model) for k in range(1, d_model // 2 + 1)]
    expected = [
        sum(
            math.sin(first * place) * math.cos(other * place)
            for index, first in enumerate(frequencies)
            for number, other in enumerate(frequencies)
            if index != number
        )
        for place in places.tolist()
    ]
    assert g(places, d_model).tolist() == pytest.approx(expected, abs=1e-9)
    assert torch.allclose(g(-places, d_model), -g(places, d_model))


def test_marks_are_the_powers_of_tau() -> None:
    marks = update_marks(0.5)
    assert marks[:3] == [0.5, 0.25, 0.125]
    assert marks[-1] > 0.01


def test_every_token_is_in_one_word() -> None:
    text = "Mr. Holmes  sat\n\ndown, he said."
    tokens = BytesTokenizer().encode(text)
    words = words_of(BytesTokenizer(), tokens)
    assert [word.text for word in words] == text.split()
    assert words[0].begin == 0
    assert words[-1].end == len(tokens)
    assert all(first.end == second.begin for first, second in itertools.pairwise(words))
    assert words_of(BytesTokenizer(), np.array([], dtype=np.int64)) == []


def test_phrases_are_neighbouring_words_above_the_limit() -> None:
    words = [
        DocumentWord(place, place + 1, text)
        for place, text in enumerate(["the", "old", "white", "whale", "and", "the", "sea"])
    ]
    values = [0.1, 0.3, 0.5, 0.4, 0.1, 0.2, 0.9]
    assert phrases(words, values, above=0.25) == [("sea", 0.9), ("old white whale", 0.5)]
    assert phrases(words, values, above=1.0) == []


def test_lines_hold_every_word_once_and_are_not_too_long() -> None:
    words = [ShadedWord("x" * (1 + place % 11), 0.0, "C0") for place in range(100)]
    lines = lines_of(words)
    assert [word for line in lines for _, word in line] == words
    assert all(column + len(word.text) <= LINE for line in lines for column, word in line)


def test_excerpts_are_what_is_near_a_shaded_word() -> None:
    words = [ShadedWord(str(place), float(place in (1, 9, 10)), "C0") for place in range(14)]
    texts = [word.text for word in excerpts(words, 2)]
    assert texts == ["0", "1", "2", "3", "[...]", "7", "8", "9", "10", "11", "12"]
    assert excerpts([word._replace(shade=0.0) for word in words], 2) == []


def test_the_share_of_the_same_word_is_of_attention_and_of_text() -> None:
    words = [
        DocumentWord(place, place + 1, text)
        for place, text in enumerate(["Anna,", "said", "Ben", "to", "Anna", "again"])
    ]
    seen = Gain(words[4], 2.0, [0.3, 0.1, 0.1, 0.0, 0.0, 0.0])
    unseen = Gain(words[5], 1.0, [0.3, 0.1, 0.1, 0.0, 0.0, 0.0])
    number, on_same, share = same_word_share([seen, unseen], words)
    assert number == 1
    assert on_same == pytest.approx(0.6)
    assert share == pytest.approx(1 / 3)
