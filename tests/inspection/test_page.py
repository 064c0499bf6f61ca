"""The report page as a file: well formed, of no network, no text taken for markup; a book as far as there is room."""

import json
import math
import os
import re
import shutil
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dist_mem.__main__ import main
from dist_mem.config import load_config, save_config
from dist_mem.data.shard import TokenizedDocument, write_split
from dist_mem.data.tokenizers.base import Tokenizer
from dist_mem.data.tokenizers.registry import KINDS, save_tokenizer
from dist_mem.errors import EXIT_DONE, EXIT_USAGE
from dist_mem.evaluation.scores import perplexity
from dist_mem.evaluation.trained_model import load_model
from dist_mem.inspection.counterfactual import Counterfactual, Removals, TokenSpan
from dist_mem.inspection.page.assemble import assemble
from dist_mem.inspection.page.book import NO_PASSAGE, encode_book
from dist_mem.inspection.page.columns import column, numbers
from dist_mem.inspection.page.markup import Markup, digits, element, short_count
from tests.support.books import PIECES, make_book
from tests.support.evaluated_runs import MEMORIES, asked, make_run
from tests.support.messages import refused, said
from tests.support.plain_scores import emptied
from tests.support.saved_reports import save_report
from tests.support.scored_library import TOKENIZER, make_document
from tests.support.terminals import HOSTILE as TERMINAL
from tests.support.terminals import steering
from tests.support.tokenizer_kinds import MAKE
from tests.support.tracked import config_for, job

pytestmark = pytest.mark.usefixtures("single_process")


BOOK = ("--book", "doc4", "--split", "test", "--no-removals")
HOSTILE = '</script><script>alert(1)</script> <!-- & "<img src=x onerror=alert(2)>" ]]> it was é, ∞\n'


class Checker(HTMLParser):
    """Collects the elements of a page, and what is wrong with their nesting."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.problems: list[str] = []
        self.feed(page)
        self.close()
        self.problems += [f"<{name}> is not closed" for name in self.open]

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attributes)))
        if tag not in ("meta", "link", "input"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if not self.open or self.open.pop() != tag:
            self.problems.append(f"</{tag}> at line {self.getpos()[0]}")


def checked(page: str) -> Checker:
    """Assert that a page is well formed and refers to nothing outside of itself."""
    found = Checker(page)
    assert found.problems == []
    ids = [attributes["id"] for _, attributes in found.elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    for name, attributes in found.elements:
        for key in ("src", "href", "action", "data", "srcset", "poster", "xlink:href"):
            assert (attributes.get(key) or "#").startswith(("#", "data:")), (name, attributes)
        assert not [key for key in attributes if key.startswith("on") or key == "style"], (name, attributes)
    assert not re.search(r"https?://(?!www\.w3\.org/)|@import|url\(", page)
    policy = next(a["content"] for name, a in found.elements if name == "meta" and "http-equiv" in a)
    assert policy is not None and policy.startswith("default-src 'none'; img-src data:;") and "unsafe" not in policy
    assert [name for name, a in found.elements].count("script") == 1 + ("book-data" in ids)
    return found


def book_of(page: str) -> Any:
    return json.loads(page.partition('id="book-data">')[2].partition("</script>")[0])


@pytest.fixture
def run_dir(library: Path, tmp_path: Path) -> Path:
    return open_run(tmp_path, library, MEMORIES["transformer_xl"])


def page_of(run: Path, *arguments: object) -> str:
    """The page of a run, well formed."""
    assert report(run, *arguments) == EXIT_DONE
    page = (run / "report.html").read_text(encoding="utf-8")
    checked(page)
    return page


def report(*arguments: object) -> int:
    return main(["report", *map(str, arguments), "tracking.mlflow=false"])


def test_a_page_is_well_formed_and_begins_with_a_summary_of_the_newest_evaluations(run_dir: Path) -> None:
    """Of reports of two steps, and one without memory."""
    with_memory, without = asked(run_dir), emptied(run_dir)
    for name, scored in (
        ("test-step-00000002", without),
        ("test-step-00000003", with_memory),
        ("test-step-00000003-without-memory", without),
    ):
        save_report(scored, run_dir / "evaluations", name)
    summary = page_of(run_dir, *BOOK).partition('id="summary"')[2].partition("</section>")[0]
    (row,) = re.findall(r"<tr>(.*?)</tr>", summary.partition("<tbody>")[2])
    gain = (without.nll - with_memory.nll) / with_memory.num_scored
    shown = [digits(with_memory.word_perplexity), digits(with_memory.bits_per_byte)]
    shown += [f"{with_memory.accuracy:.1%}", digits(gain)]
    assert re.findall(r">([^<>]*)</td>", row) == ["run", "test", "3", *shown]


@pytest.mark.parametrize("memory", ["transformer_xl", "none", "infinite_over_compressive"])
def test_the_totals_are_the_sum_of_the_gains_and_the_difference_of_the_evaluations(
    library: Path, tmp_path: Path, memory: str
) -> None:
    folder = open_run(tmp_path, library, MEMORIES[memory])
    stored = book_of(page_of(folder, "--book", "doc0", "--split", "test"))
    gains = numbers(stored["without"]).astype(float) - numbers(stored["nll"])
    scores = [{document.id: document.nll for document in found(folder).documents} for found in (emptied, asked)]
    total = stored["total"]
    assert gains.sum() == pytest.approx(total["without"] - total["nll"], rel=1e-9, abs=1e-6)
    assert total["emptied"] == pytest.approx(scores[0]["doc0"], rel=1e-6)
    assert total["nll"] == pytest.approx(scores[1]["doc0"], rel=1e-6)
    assert (total["without"] == total["nll"]) == (memory == "none") == (total["emptied"] == total["nll"])


def cards_of(page: str) -> dict[str, tuple[str, str]]:
    """The figure and the note of every card."""
    found = re.findall(r"<li><span>(.*?)</span><strong>(.*?)</strong><span>(.*?)</span></li>", page)
    return {name: (figure, note) for name, figure, note in found}


def test_cards_name_the_model_and_what_its_memory_is_worth(run_dir: Path, library: Path, tmp_path: Path) -> None:
    """On the book, unless both runs were evaluated on the same split."""
    page = page_of(run_dir, *BOOK)
    found, total = cards_of(page), book_of(page)["total"]
    assert list(found) == ["memory", "parameters", "training", "word perplexity of this book", "the memory saves"]
    assert found["memory"] == ("transformer_xl", "M = 16, segments of T = 8 tokens")
    assert found["training"][0] == "96 tokens" and found["training"][1].startswith("3 steps, data ")
    model = load_model(run_dir)
    number = sum(parameter.numel() for parameter in model.model.parameters())
    assert found["parameters"][0] == short_count(number)
    words = next(each.words for each in asked(run_dir).documents if each.id == "doc4")
    assert words is not None
    both = [perplexity(total[name], words) for name in ("nll", "without")]
    assert found["word perplexity of this book"] == (
        f"{digits(both[0])} against {digits(both[1])}",
        f"with memory against without: ratio {digits(both[1] / both[0])}",
    )
    gains = [digits(total[name] - total["nll"]) for name in ("without", "emptied")]
    assert found["the memory saves"][0] == f"{gains[0]} nats" and gains[1] in found["the memory saves"][1]
    other = open_run(tmp_path / "none", library, MEMORIES["none"]).rename(tmp_path / "other")
    for run in (run_dir, other):
        save_report(asked(run), run / "evaluations", "test-step-00000003")
    perplexities = [asked(run).word_perplexity for run in (run_dir, other)]
    assert cards_of(page_of(run_dir, other, *BOOK))["word perplexity, split test"] == (
        " against ".join(map(digits, perplexities)),
        f"run against other: ratio {digits(perplexities[1] / perplexities[0])}",
    )
    of_other = asked(other)  # of other documents: such perplexities stood beside each other, with a ratio
    save_report(replace(of_other, documents=of_other.documents[1:]), other / "evaluations", "test-step-00000003")
    assert "word perplexity of this book" in cards_of(page_of(run_dir, other, *BOOK))


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[pytest.mark.core] * (not KINDS[kind].keeps_text)) for kind in KINDS]
)
def test_the_word_perplexity_of_a_book_is_that_of_its_evaluation(kind: str, tmp_path: Path) -> None:
    """Line ends are words of a vocabulary of words; the pieces of others are not the text, as BERT's."""
    text = "It rained all day long, \u4e2d\u6587\nand nobody was walking.\n\n" * 2
    tokenizer, data = MAKE[kind](text), tmp_path / "data"
    document = TokenizedDocument("a", "A", None, len(text.split()), len(text.encode()), tokenizer.encode(text))
    save_tokenizer(tokenizer, data)
    write_split([document], data / "test", name="tiny", split="test", tokenizer_fingerprint=tokenizer.fingerprint)
    run = open_run(tmp_path, data, MEMORIES["none"], tokenizer)
    figure, _ = cards_of(page_of(run, "--book", "a", "--split", "test"))["word perplexity of this book"]
    assert figure.startswith(f"{digits(asked(run).word_perplexity)} against ")


def test_a_token_has_one_number_in_the_terminal_the_file_and_the_page(
    run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "text.txt").write_text("it was the best of times, it was the worst of times. " * 2, encoding="utf-8")
    asked_for = [str(run_dir), "--text", str(tmp_path / "text.txt")]
    assert report(*asked_for) == main(["inspect", *asked_for, "tracking.mlflow=false"]) == EXIT_DONE
    links = re.findall(r'href="#t=(\d+)">([\d,]+)<', (run_dir / "report.html").read_text(encoding="utf-8"))
    on_page = [int(position) for position, _ in links]
    assert [int(shown.replace(",", "")) for _, shown in links] == on_page
    rows = capsys.readouterr().out.partition("\nposition ")[2].partition("\n\n")[0].splitlines()[1:]
    assert [int(row.split()[0]) for row in rows] == on_page
    (file,) = (run_dir / "evaluations").glob("inspect-*.json")
    assert [word["first"] for word in json.loads(file.read_text(encoding="utf-8"))["aggregates"]["top"]] == on_page
    assert len(on_page) == 20


def test_a_memory_that_cannot_forget_has_a_page_without_removals_that_says_why(
    library: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And the page of a run without evaluations says that too."""
    page = page_of(open_run(tmp_path, library, {"kind": "infini"}), "--book", "doc4", "--split", "test")
    stored = book_of(page)
    assert "No evaluation yet" in page and stored["removed"] is None
    assert "How a language model read a book, word by word." in page
    assert stored["not_removed"].startswith("memory.kind is infini: Infini cannot forget a passage: its matrix")
    assert f"no removals of passages: {stored['not_removed']}" in capsys.readouterr().err


def test_no_file_from_outside_of_the_run_comes_into_the_page(
    run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_report(asked(run_dir), run_dir / "evaluations", "test-step-00000003")
    inside, outside = run_dir / "evaluations" / "test-step-00000003.json", tmp_path / "outside"
    inside.rename(outside)
    inside.symlink_to(outside)
    assert report(run_dir, *BOOK, "-o", tmp_path / "secret.html") == EXIT_USAGE
    said(capsys.readouterr().err, f"error: {inside}", f"out of {run_dir};")
    inside.unlink()
    os.mkfifo(inside)
    assert report(run_dir, *BOOK, "-o", tmp_path / "secret.html") == EXIT_USAGE
    assert f"{inside}: a pipe" in capsys.readouterr().err
    assert not (tmp_path / "secret.html").exists()


def test_no_text_is_taken_for_markup(run_dir: Path, tmp_path: Path) -> None:
    hostile_run = tmp_path / "a<b>&'c"
    run_dir.rename(hostile_run)
    text = tmp_path / "<script>x.txt"
    text.write_text(HOSTILE * 5, encoding="utf-8")
    out = tmp_path / "page.html"
    assert report(hostile_run, "--text", text, "-o", out) == EXIT_DONE
    page = out.read_text(encoding="utf-8")
    found = checked(page)
    assert "img" not in [name for name, _ in found.elements]
    assert "<title>&lt;script&gt;x.txt, read by a&lt;b&gt;&amp;&#x27;c</title>" in page
    stored = book_of(page)
    pieces = [stored["pieces"][number].encode("latin-1") for number in numbers(stored["ids"]).tolist()]
    assert b"".join(pieces).decode() == HOSTILE * 5
    assert stored["title"] == "<script>x.txt"


def test_a_title_turns_no_letters_around(library: Path, tmp_path: Path) -> None:
    data = Path(shutil.copytree(library, tmp_path / "data"))
    title = f"Title \u202egnitide{TERMINAL}".replace("\udc80", "")  # half a character, which no index can hold
    documents = [replace(make_document(3, 20), title=title)]
    write_split(documents, data / "test", name="tiny", split="test", tokenizer_fingerprint=TOKENIZER.fingerprint)
    page = page_of(open_run(tmp_path, data, MEMORIES["none"]), "--book", "doc3", "--split", "test")
    assert steering(page) == steering(book_of(page)["title"]) == []
    assert book_of(page)["title"].startswith("Title \ufffdgnitide\ufffd[2J")


def test_a_second_run_reads_the_book_too(run_dir: Path, library: Path, tmp_path: Path) -> None:
    other = open_run(tmp_path / "none", library, MEMORIES["none"]).rename(tmp_path / "other")
    stored = book_of(page_of(run_dir, other, *BOOK))
    losses = {document.id: document.nll for document in asked(other).documents}
    assert stored["other"] == "other" and stored["removed"] is None
    assert numbers(stored["others"]).astype(float).sum() == pytest.approx(losses["doc4"], abs=1e-4)


def test_what_cannot_be_reported_is_said(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, named in (
        (["--book", "doc77", "--split", "test"], "doc77"),
        (["--text", "a.txt", "--split", "test"], "--split test"),
        (["model.d_model=8", "--book", "doc1"], "model.d_model"),
    ):
        assert report(run_dir, *arguments) == EXIT_USAGE
        said(capsys.readouterr().err, named)
    with pytest.raises(SystemExit):
        report(run_dir)
    said(capsys.readouterr().err, "--book", "--text")
    assert not (run_dir / "report.html").exists()


def test_a_page_that_cannot_be_written_is_refused_before_anything_is_read(
    run_dir: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dist_mem.inspection.page.write_page.read_document", lambda *_, **__: pytest.fail("it is read"))
    (run_dir / "report.html").mkdir()
    for path, options in ((run_dir / "report.html", ()), ("/proc/page.html", ("-o", "/proc/page.html"))):
        assert report(run_dir, *BOOK, *options) == EXIT_USAGE
        said(capsys.readouterr().err, path, "-o FILE")


def open_run(folder: Path, library: Path, memory: dict[str, Any], tokenizer: Tokenizer = TOKENIZER) -> Path:
    """A run whose config.yaml lies where a training leaves it."""
    made, _ = make_run(folder, library, memory, tokenizer)
    (made / "config.yaml").write_text(next(made.glob("checkpoints/*/config.yaml")).read_text())
    return made


def test_the_page_is_added_to_the_run_in_mlflow(
    run_dir: Path, sqlite_uri: str, client: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tracker = job(config_for(sqlite_uri), run_dir, {1: 2.0})
    save_config(load_config([str(run_dir / "config.yaml"), "tracking.mlflow=true"]), run_dir / "config.yaml")
    arguments = ["report", str(run_dir), *BOOK, f"tracking.uri={sqlite_uri}"]
    assert main(arguments) == EXIT_DONE
    assert [file.path for file in client.list_artifacts(tracker.run_id)] == ["report.html"]
    assert main([*arguments, "-o", str(tmp_path / "page.html")]) == EXIT_DONE
    assert "not added to the run in MLflow" in capsys.readouterr().err


def test_a_third_run_is_refused(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The title named it as a reader, but it was never opened."""
    assert report(run_dir, "second", "third", *BOOK) == EXIT_USAGE
    said(capsys.readouterr().err, "third")


def test_the_page_of_a_checkpoint_is_that_of_its_run(run_dir: Path, tmp_path: Path) -> None:
    """It was written into the checkpoint, without the evaluations of the run."""
    save_report(asked(run_dir), run_dir / "evaluations", "test-step-00000003")
    other = open_run(tmp_path / "other", run_dir.parent, MEMORIES["none"])
    (checkpoint,) = (run_dir / "checkpoints").iterdir()
    files = sorted(checkpoint.rglob("*"))
    assert report(checkpoint, other, *BOOK, f"data.path={load_model(run_dir).config.data.path}") == EXIT_DONE
    page = (run_dir / "report.html").read_text(encoding="utf-8")
    assert "Newest evaluations" in page and sorted(checkpoint.rglob("*")) == files


def test_elements_escape_all_but_markup() -> None:
    inner = element("b", "<&>")
    assert element("p", inner, "a<b", title='"x"') == '<p title="&quot;x&quot;"><b>&lt;&amp;&gt;</b>a&lt;b</p>'


def test_metrics_have_three_significant_digits() -> None:
    for value, shown in ((2112.015, "2,110"), (100.0, "100"), (75.84, "75.8"), (9.999, "10.0"), (0.01204, "0.0120")):
        assert digits(value) == shown and digits(-value) == f"-{shown}" and digits(value, "+") == f"+{shown}"
    assert [digits(value) for value in (0.0, math.nan, math.inf, 2.5e7)] == ["0.00", "n/a", "n/a", "2.5e+07"]
    assert [short_count(number) for number in (999, 462_336, 1_230_000)] == ["999", "462 K", "1.23 M"]


@given(
    st.sampled_from(["u1", "u2", "u4", "i2", "f4"]).flatmap(
        lambda kind: st.tuples(st.just(kind), st.lists(st.integers(0, 127), max_size=40))
    )
)
def test_a_column_comes_back(case: tuple[str, list[int]]) -> None:
    kind, values = case
    assert numbers(column(np.array(values), kind)).tolist() == values


def test_a_number_that_does_not_fit_is_an_error() -> None:
    for kind, value in (("u1", 256), ("u2", -1), ("i2", 2**15), ("u4", 2**32)):
        with refused(ValueError, kind):
            column(np.array([value]), kind)


def test_details_are_kept_of_the_tokens_that_memory_changed_most() -> None:
    book = make_book(4000)
    everything = encode_book(book, room=10**7)
    room = len(json.dumps(everything)) * 2 // 3
    stored = encode_book(book, room=room)
    assert len(json.dumps(stored)) <= room
    kept = np.cumsum(numbers(stored["detailed"]))
    change = book.reading.gain.abs().numpy()
    others = np.setdiff1d(np.arange(4000), kept)
    assert 0 < len(kept) < np.count_nonzero(~np.isnan(change))
    assert change[kept].min() >= np.nanmax(change[others])
    looked, layer = book.reading.layers[0]["memory"], stored["looked"][0]
    begin = kept[:, None] - numbers(layer["back"]).reshape(-1, 3).astype(np.int64)
    assert np.array_equal(begin, looked.begin.numpy()[kept])
    assert np.abs(numbers(layer["shares"]).reshape(-1, 3) / 255 - looked.shares.numpy()[kept]).max() <= 1 / 510
    assert len(np.cumsum(numbers(encode_book(book, room=0)["detailed"]))) == 0


def test_a_token_names_the_passages_whose_removal_is_worst() -> None:
    book = make_book(64)
    passages = [TokenSpan(-1, 15), TokenSpan(15, 31), TokenSpan(31, 47), TokenSpan(3, 9)]
    rise = torch.randn(4, 16, generator=torch.Generator().manual_seed(5))
    rise[:, 3] = torch.nan  # not scored
    one_only = Removals(16, [TokenSpan(-1, 15)], torch.full((1, 16), 0.25))
    removed = Counterfactual(64, [one_only, Removals(48, passages, rise)])
    stored = encode_book(book._replace(removed=removed), room=10**6)["removed"]
    begin, end = (numbers(stored[name]).astype(np.int64) - 1 for name in ("begin", "end"))
    assert [TokenSpan(*pair) for pair in zip(begin.tolist(), end.tolist(), strict=True)] == sorted(passages)
    kept = np.cumsum(numbers(encode_book(book, room=10**6)["detailed"])).tolist()
    place, rises = (numbers(stored[name]).reshape(-1, 3) for name in ("place", "rise"))
    for row, token in enumerate(kept):
        found = [TokenSpan(int(begin[p]), int(end[p])) for p in place[row].tolist() if p != NO_PASSAGE]
        if token >= 48 and token != 51:
            worst = rise[:, token - 48].argsort(descending=True)[:3].tolist()
            assert found == [passages[number] for number in worst]
            assert rises[row] / 1000 == pytest.approx(rise[worst, token - 48].numpy(), abs=5.1e-4)
        else:
            assert found == ([TokenSpan(-1, 15)] if 16 <= token < 32 else [])


def test_a_book_of_500_000_tokens_is_under_10_mb() -> None:
    book = make_book(500_000, num_layers=3, seg_len=512)
    page = assemble("A long book", Markup(), encode_book(book, room=9_000_000), Markup(), footer="")
    assert len(page.encode()) < 10_000_000


def test_text_and_losses_are_stored_exactly() -> None:
    book = make_book(1000)
    stored = encode_book(book, room=10**6)
    for name, losses in (("nll", book.reading.nll), ("without", book.reading.windowed)):
        assert torch.equal(torch.from_numpy(numbers(stored[name])).nan_to_num(-1), losses.nan_to_num(-1))
    gains = (numbers(stored["without"]).astype(np.float64) - numbers(stored["nll"])).tolist()
    total = math.fsum(gain for gain in gains if not math.isnan(gain))
    assert total == pytest.approx(stored["total"]["without"] - stored["total"]["nll"], abs=1e-9)
    assert stored["num_scored"] == int((~book.reading.nll.isnan()).sum())
    pieces = [stored["pieces"][number].encode("latin-1") for number in numbers(stored["ids"]).tolist()]
    assert pieces == [PIECES[token] for token in book.reading.document.tokens.tolist()]
    assert len(set(stored["pieces"])) == len(stored["pieces"])
