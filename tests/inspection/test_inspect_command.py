"""`dist-mem inspect RUN --book ID`: what it prints, writes and refuses; classes of words by stated rules."""

import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import dist_mem
from dist_mem.__main__ import main
from dist_mem.errors import EXIT_FAILED, EXIT_USAGE
from dist_mem.evaluation.scoring import EvaluationError
from dist_mem.inspection import inspect_document
from dist_mem.inspection.aggregates import aggregate
from dist_mem.inspection.content import passages_content
from dist_mem.inspection.counterfactual import Counterfactual, Removals, TokenSpan, remove_passages
from dist_mem.inspection.reading import text_document
from dist_mem.inspection.request import InspectionRequest, InspectionSubject
from dist_mem.inspection.terminal_view import PASSAGES, colour_words, excerpt, passages_table, top_table
from dist_mem.inspection.words import FUNCTION, MARK, NAME, NUMBER, OTHER, distances_to_last, words_of
from tests.support.evaluated_runs import MEMORIES, asked, make_diverged_run, make_run
from tests.support.messages import refused, said
from tests.support.plain_scores import emptied
from tests.support.scored_library import write_other

pytestmark = pytest.mark.usefixtures("single_process")


MEMORY_OFF = ("memory off", "memory off, in overlapping windows")


@pytest.fixture
def run_dir(library: Path, tmp_path: Path) -> Path:
    return make_run(tmp_path, library, MEMORIES["transformer_xl"])[0]


def written(run_dir: Path) -> dict[str, Any]:
    (path,) = (run_dir / "evaluations").glob("inspect-*.json")
    content: dict[str, Any] = json.loads(path.read_text())
    path.unlink()
    return content


def test_it_prints_tables_and_writes_every_token(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(run_dir), "--book", "doc0", "--split", "test", "--passages"]) == 0
    printed = capsys.readouterr().out
    assert "memory off: the same model with its memory emptied before every segment of" in printed
    assert "in brackets\nthe nats by which the loss rises without it" in printed
    assert "of the 20 largest gains are names" in printed
    assert "later words that get worse" in printed and "\x1b[" not in printed
    assert "0:0 (" not in printed, "no passage was read by the first segment"
    content = written(run_dir)
    gains = [
        without - nll
        for nll, without in zip(content["losses"]["nll"], content["losses"]["without_memory"], strict=True)
    ]
    difference = emptied(run_dir).documents[0].nll - asked(run_dir).documents[0].nll
    assert sum(gains) / 100 == pytest.approx(difference / 100, abs=1e-6)
    windowed = [a - b for a, b in zip(content["losses"]["windowed"], content["losses"]["nll"], strict=True)]
    assert content["metrics"][MEMORY_OFF[1]] == pytest.approx(sum(windowed), abs=1e-4)
    assert content["aggregates"]["nats"] == pytest.approx(sum(windowed), abs=1e-4)
    assert content["metrics"]["memory off"] == pytest.approx(difference, abs=1e-4)
    assert len(content["pieces"]) == len(content["passages"]["most_harmful"]["rise"]) == 100
    assert set(content["layers"][0]["memory"]) == {"mass", "begin", "end", "shares"}


@pytest.mark.parametrize(
    ("arguments", "comparison", "tag"),
    [
        (["--empty-at", "40"], "memory emptied at 40", "-empty-at-40"),
        (["--without", "30:40"], "memory without 30:40", "-without-30-40"),
        (["OTHER"], "OTHER", "-against-run_??????"),
    ],
)
def test_every_comparison_has_its_file(
    run_dir: Path, library: Path, tmp_path: Path, capsys: Any, arguments: list[str], comparison: str, tag: str
) -> None:
    other, _ = make_run(tmp_path / "other", library, MEMORIES["none"])
    given = [text.replace("OTHER", str(other)) for text in arguments]
    assert main(["inspect", str(run_dir), *given, "--book", "doc6", "--split", "test", "--color", "always"]) == 0
    assert "\x1b[48;5;" in capsys.readouterr().out
    assert len(list((run_dir / "evaluations").glob(f"inspect-test-doc6-step-00000003{tag}.json"))) == 1
    names = {comparison.replace("OTHER", str(other))}
    names |= {f"{other}, in overlapping windows"} if comparison == "OTHER" else set()  # it has no memory
    assert set(written(run_dir)["metrics"]) == {*MEMORY_OFF, *names}


def test_a_book_of_other_data_has_its_file(run_dir: Path, tmp_path: Path) -> None:
    other, tag = write_other(tmp_path / "data")
    for given in ([], [f"data.path={other}"]):
        assert main(["inspect", str(run_dir), "--book", "doc0", "--split", "test", *given]) == 0
    names = {path.name for path in (run_dir / "evaluations").iterdir()}
    assert names == {f"inspect-test-doc0-step-00000003{each}.json" for each in ("", tag)}


def test_no_result_replaces_that_of_another_request(run_dir: Path, library: Path, tmp_path: Path) -> None:
    """Texts and runs of one name, and the removals of every passage, which take hours, replaced one another."""
    others = [make_run(tmp_path / name, library, MEMORIES["none"])[0] for name in ("a", "b")]
    texts = [tmp_path / name / "text.txt" for name in ("a", "b")]
    for text in texts:
        text.write_text(f"Mara Holt of Dunwick told {text}.")
    book = ["--book", "doc0", "--split", "test"]
    requests = [*([*book, str(other)] for other in others), book, [*book, "--passages"], [*book, "--passages", "2"]]
    for number, request in enumerate([*requests, *(["--text", str(text)] for text in texts)], 1):
        assert main(["inspect", str(run_dir), *request]) == 0
        assert len(list((run_dir / "evaluations").iterdir())) == number


def test_every_name_of_a_document_has_a_file_of_its_own_however_long() -> None:
    """A text of 80 Chinese letters was read and then lost, and `part 1`, `part_1` and `part:1` shared one file."""
    names = ["part 1", "part_1", "part:1", *("\u66f8" * 80 + end for end in "ab")]
    request = InspectionRequest(Path("run"), Path("/" + "\u66f8" * 85))

    def file_of(name: str) -> str:
        subject = InspectionSubject(*[None] * 3, name, 0)  # type: ignore[arg-type, call-arg]
        return inspect_document._file_name(request, subject, 3, "books_123456-M640")

    assert len({file_of(name) for name in names}) == len(names)
    assert max(len(f".{file_of(name)}.json.123456-1234567.partial".encode()) for name in names) < 256


def test_what_cannot_be_written_is_shown(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run_dir / "evaluations").write_text("a file, as nobody may write into")
    assert main(["inspect", str(run_dir), "--book", "doc6", "--split", "test"]) == EXIT_USAGE
    printed = capsys.readouterr()
    said(printed.err, run_dir / "evaluations")
    assert "by word, gain over memory off" in printed.out


def test_a_text_of_ones_own_is_read(run_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "a text.txt").write_text("Mara Holt of Dunwick told Mara Holt's friend.")
    arguments = ["--text", str(tmp_path / "a text.txt")]
    assert main(["inspect", str(run_dir), *arguments]) == 0
    assert "".join(written(run_dir)["pieces"]) == "Mara Holt of Dunwick told Mara Holt's friend."


def test_what_cannot_be_inspected_is_named_before_anything_is_read(
    run_dir: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dist_mem.inspection.reading._read_with_memory", lambda *_: pytest.fail("it is read"))
    doc6 = ["--book", "doc6", "--split", "test"]
    for arguments, named in (
        (["--passages"], "--passages"),
        (["--book", "99", "--split", "test"], "--book 99"),
        (["--book", "doc1", "--split", "test"], "this document"),
        ([*doc6, "--empty-at", "64"], "--empty-at 64"),
        ([*doc6, "a", "b"], "a, b"),
        ([*doc6, "--limit", "3"], "--limit 3"),
        (["--text", "a.txt", "--split", "nosuch"], "--split nosuch"),
        ([*doc6, "--without", "5000:6000"], "--without 5000:6000"),
        ([*doc6, "--show", "5000:6000"], "--show 5000:6000"),
    ):
        assert main(["inspect", str(run_dir), *arguments]) == EXIT_USAGE
        said(capsys.readouterr().err, named)
    assert not list(run_dir.rglob("inspect-*"))


def test_losses_that_are_not_finite_are_refused(
    library: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """They were left out as tokens without a score, and the metrics were those of the rest."""
    run, text = make_diverged_run(tmp_path, library), "Some words first, then Zoe and more words."
    model = dist_mem.load(run)
    assert model.score("Some words first").mean > 0.0

    def remove(text: str) -> Counterfactual:
        return remove_passages(model.trained, text_document(model.trained, text))

    for read in (model.score, model.inspect, remove):
        with refused(EvaluationError, "nan", "the model has diverged"):
            read(text)
    (tmp_path / "text.txt").write_text(text)
    assert main(["inspect", str(run), "--text", str(tmp_path / "text.txt")]) == EXIT_FAILED
    said(capsys.readouterr().err, "the model has diverged")
    assert not list(run.rglob("inspect-*"))


def test_a_value_per_token_is_made_of_the_passages_in_the_table_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was made of every passage, and all were held: 42 GB for a book of 580,000 tokens, later minutes.

    It also went through all removals for each of them, and once more for each of the largest gains.
    """

    class CountedList(list[Removals]):
        times = 0

        def __iter__(self) -> Iterator[Removals]:
            self.times += 1
            return super().__iter__()

    num_passages, seg_len = 60, 8
    passages = [TokenSpan(begin * seg_len, (begin + 1) * seg_len) for begin in range(num_passages)]
    rises = torch.rand(num_passages, seg_len, generator=torch.Generator().manual_seed(5))
    rises[-1, -3:] = torch.nan  # padding
    removals = CountedList(
        Removals(end, [TokenSpan(begin, end)], rise[None]) for (begin, end), rise in zip(passages, rises, strict=True)
    )
    pieces = [" a"] * ((num_passages + 1) * seg_len - 3)
    removed, shown, without = Counterfactual(len(pieces), removals), list[TokenSpan](), Counterfactual.without

    def counted(removed: Counterfactual, passage: TokenSpan) -> torch.Tensor:
        shown.append(passage)
        return without(removed, passage)

    monkeypatch.setattr(Counterfactual, "without", counted)
    lines = passages_table(removed, words_of(pieces), pieces)
    found = passages_content(removed)["removed"]
    assert removals.times == 2, "by passage, and for the passage that each token needs"
    assert [line.split()[0] for line in lines[1:]] == [f"{passage.begin}:{passage.end}" for passage in shown]
    columns = [without(removed, passage) for passage in passages]
    totals = [float(column.double().nansum()) for column in columns]
    assert shown == sorted(passages, key=lambda each: -totals[passages.index(each)])[:PASSAGES]
    assert [each["nats"] for each in found] == pytest.approx(totals)
    worst = [column.nan_to_num(0.0).sort(descending=True) for column in columns]
    for each, (values, places) in zip(found, worst, strict=True):
        assert [place for place, _ in each["tokens"]] == places[values > 0].tolist()


def test_results_are_written_before_they_are_shown(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(inspect_document, "passages_table", fail)
    with pytest.raises(MemoryError):
        main(["inspect", str(run_dir), "--book", "doc6", "--split", "test", "--passages"])
    assert written(run_dir)["passages"]


def test_a_removal_that_the_memory_cannot_do_is_refused_before_anything_is_read(
    library: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, _ = make_run(tmp_path, library, {"kind": "infini"})
    for arguments in (["--without", "8:16"], ["--passages"]):
        assert main(["inspect", str(run), "--book", "doc0", "--split", "test", *arguments]) == EXIT_USAGE
        printed = capsys.readouterr()
        said(printed.err, "memory.kind is infini")
        assert "memory off" not in printed.out and not list(run.rglob("inspect-*"))


def test_a_range_that_is_none_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for text in ("5", "9:3", "3:3", "a:b"):
        with pytest.raises(SystemExit) as ended:
            main(["inspect", "run", "--book", "1", "--without", text])
        assert ended.value.code == 2
        assert "--without" in capsys.readouterr().err


TEXT = (
    'Chapter 1\n\nOnce Mara Holt of Dunwick promised. "Tom," said she, "I\'m here." Mara went with 3 mules.\n\n'
    "CHAPTER TWO\n\nMara Holt's two mules slept. Sleep came."
)


def pieces_of(text: str) -> list[str]:
    return re.findall(r"\s*\w+|\s*[^\w\s]|\s+", text)


def test_words_are_sorted_by_the_stated_rules() -> None:
    words = words_of(pieces_of(TEXT))
    assert {text: [word.kind for word in words if word.text == text] for text in KINDS} == KINDS


@pytest.mark.parametrize("width", [0, 1, 3])
def test_every_token_belongs_to_one_word(width: int) -> None:
    """Whatever the tokens are: words, single characters, or pieces of three."""
    pieces = [TEXT[at : at + width] for at in range(0, len(TEXT), width)] if width else pieces_of(TEXT)
    words = words_of(pieces)
    assert [word.first for word in words] == [0, *(word.end for word in words[:-1])]
    assert words[-1].end == len(pieces)


def test_a_name_is_found_again_with_its_possessive() -> None:
    words = words_of(pieces_of(TEXT))
    holts = [place for place, word in enumerate(words) if word.text.startswith("Holt")]
    distances = distances_to_last(words)
    assert distances[holts[0]] is None
    assert distances[holts[1]] == words[holts[1]].first - words[holts[0]].first


def test_the_groups_sum_to_the_whole() -> None:
    pieces = pieces_of(TEXT)
    words = words_of(pieces)
    gain = torch.linspace(-1.0, 2.0, len(pieces), dtype=torch.float64)
    gain[0] = torch.nan  # not scored
    found = aggregate(words, gain)
    assert found.num_tokens == len(pieces) - 1
    for groups in (found.by_class, found.by_position):
        assert sum(group.gain for group in groups) == pytest.approx(found.total)
    names = found.by_class[0]
    assert (names.label, sum(group.num_words for group in found.by_distance)) == (NAME, names.num_words)
    assert found.top[0].gain == max(each.gain for each in found.top)
    assert found.names_in_top == sum(each.word.kind == NAME for each in found.top)


@pytest.mark.parametrize("size", [1, 3, 99])
def test_a_passage_is_shown_around_its_last_mention_of_the_word_whatever_the_tokens_are(size: int) -> None:
    """With words of several tokens, as all of a tokenizer of bytes, its beginning was shown instead."""
    text = "It was long ago. Mara met Holt and then Holt slept in the barn. Nobody saw Holt"
    pieces = [part[at : at + size] for part in re.findall(r"\s*\w+|\.", text) for at in range(0, len(part), size)]
    *_, word = words_of(pieces)
    shown = excerpt(word, TokenSpan(-1, word.first), pieces)
    assert "Holt sl" in shown and "long" not in shown


def test_a_text_without_blanks_makes_no_wide_table() -> None:
    """It is one word; a column of 1,200 letters fits on no screen."""
    pieces = ["abcd"] * 300
    top = aggregate(words_of(pieces), torch.ones(len(pieces), dtype=torch.float64)).top
    lines = top_table(top, pieces, [(TokenSpan(0, 300), 0.5)] * len(top), is_removed=False).splitlines()
    assert max(map(len, lines)) < 300
    assert lines[-1].count("...") == 3


@pytest.mark.parametrize("text", ["\U0001f600 \U0001f9e0\n", "\n\n\n", "...", "two mules", "Mara saw Mara"])
def test_a_group_without_words_has_no_share_of_the_gain(text: str) -> None:
    """Emoji had six classes of 0 words, with -0.0 % of a gain that was not 0."""
    pieces = pieces_of(text)
    found = aggregate(words_of(pieces), torch.full((len(pieces),), -0.25, dtype=torch.float64))
    for group in (*found.by_class, *found.by_distance, *found.by_position):
        assert math.isnan(group.share(found.total)) == (group.num_words == 0)


@pytest.mark.parametrize("with_colour", [False, True])
def test_the_shown_text_is_the_text_with_marks(with_colour: bool) -> None:
    from dist_mem.inspection.aggregates import word_gains

    pieces = pieces_of(TEXT)
    gain = torch.linspace(-4.0, 4.0, len(pieces), dtype=torch.float64)
    found = colour_words(word_gains(words_of(pieces), gain), pieces, TokenSpan(0, len(pieces)), with_colour=with_colour)
    assert re.sub(r"\x1b\[[\d;]*m|\[[+-]\d+\.\d\]", "", found) == TEXT
    assert ("\x1b[" in found) == with_colour


KINDS = {
    "Mara": [NAME, NAME, NAME],  # once inside a sentence, so also where it begins one
    "Holt": [NAME],
    "Holt's": [NAME],
    "Dunwick": [NAME],
    "Tom": [OTHER],  # it begins a sentence here, and is a name nowhere else
    "I'm": [FUNCTION],
    "here": [FUNCTION],
    "CHAPTER": [OTHER],
    "1": [NUMBER],
    "two": [NUMBER],
    "mules": [OTHER, OTHER],
    "Sleep": [OTHER],
    ".": [MARK] * 4,
}
