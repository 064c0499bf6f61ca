"""`dist-mem read`, `dist-mem memory show`, and `--memory` of generate: real runs, exports and files."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from dist_mem.__main__ import main
from dist_mem.errors import EXIT_DONE, EXIT_USAGE
from dist_mem.evaluation.memory_file import read_memory_file
from dist_mem.evaluation.trained_model import load_model
from dist_mem.generation.text_memory import load_memory
from dist_mem.generation.text_scores import score
from tests.evaluation.test_protocol import MEMORIES, make_run
from tests.support.faults import flip
from tests.support.messages import said
from tests.support.scored_library import SEG_LEN

TEXT = "It was the best of times, it was the worst of times. \u20ac\n" * 3
OPTIONS = ["--tokens", "20", "--seed", "3"]


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory, library: Path) -> Path:
    return make_run(tmp_path_factory.mktemp("read"), library, MEMORIES["infinite_over_transformer_xl"])[0]


@pytest.fixture
def book(tmp_path: Path) -> Path:
    (tmp_path / "book.txt").write_text(TEXT, encoding="utf-8")
    return tmp_path / "book.txt"


def read(book: Path, run_dir: Path, *options: str | Path) -> Path:
    """The memory file of a book, beside it."""
    out = book.with_suffix(".mem")
    assert main(["read", str(book), "--run", str(run_dir), "-o", str(out), *map(str, options)]) == EXIT_DONE
    return out


def ask(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> tuple[int, str, str]:
    capsys.readouterr()
    code = main(["generate", *map(str, arguments)])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.mark.parametrize("overrides", [[], ["eval.seg_len=4", "eval.mem_len=24"], ["eval.blocks=true"]])
def test_a_book_read_before_is_continued_as_one_that_is_read_now(
    run_dir: Path, book: Path, overrides: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    memory, out_file = read(book, run_dir, *overrides), book.with_name("texts.json")
    options = [*overrides, *OPTIONS, "--samples", "2"]
    assert f"{len(TEXT.encode())} tokens read" in capsys.readouterr().out
    code, out, err = ask(capsys, run_dir, "--memory", memory, *options, "--out", out_file)
    assert (code, f"{memory}: {len(TEXT.encode())} tokens read before" in err) == (EXIT_DONE, True)
    assert out == ask(capsys, run_dir, "--prompt-file", book, *options)[1]
    (written,) = json.loads(out_file.read_text(encoding="utf-8"))["continuations"]
    assert written["memory_file"] == str(memory) and len(set(written["texts"])) == 2
    further = book.with_name("both.txt")
    further.write_text(f"{TEXT}We had everything", encoding="utf-8")
    out = ask(capsys, run_dir, *overrides, "--memory", memory, "--prompt", "We had everything", *OPTIONS)[1]
    assert out == ask(capsys, run_dir, *overrides, "--prompt-file", further, *OPTIONS)[1]


def test_a_second_volume_is_read_after_the_first(run_dir: Path, book: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = read(book, run_dir)
    second = book.with_name("second.txt")
    second.write_text("It was the age of wisdom.\n", encoding="utf-8")
    both = read(second, run_dir, "--memory", first)
    expected = [("book.txt", len(TEXT.encode())), ("second.txt", second.stat().st_size)]
    assert [(text.name, text.num_tokens) for text in read_memory_file(both).texts] == expected
    whole = book.with_name("whole.txt")
    whole.write_text(TEXT + second.read_text(), encoding="utf-8")
    texts = [ask(capsys, run_dir, *source, *OPTIONS)[1] for source in (["--memory", both], ["--prompt-file", whole])]
    assert texts[0] == texts[1]


def test_an_export_and_a_moved_run_take_the_memory_of_their_run(
    run_dir: Path, book: Path, tmp_path: Path, library: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    memory = shutil.move(read(book, run_dir), tmp_path / "moved.mem")
    exported, copy = tmp_path / "exported", shutil.copytree(run_dir, tmp_path / "copy")
    assert main(["export", str(run_dir), "--out", str(exported)]) == EXIT_DONE
    texts = {ask(capsys, place, "--memory", memory, *OPTIONS)[1] for place in (run_dir, exported, copy)}
    assert len(texts) == 1
    trained = load_model(exported)
    reading = load_memory(trained, memory).reading
    assert torch.equal(
        score(trained, "We had", after=reading).nll,
        score(load_model(run_dir), TEXT + "We had").nll[-6:],
    )
    assert read(book, exported).read_bytes() == Path(memory).read_bytes()


def test_show_says_what_is_in_it_without_the_run(
    run_dir: Path, book: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    moved = shutil.copytree(run_dir, tmp_path / "gone")
    memory = read(book, moved)
    shutil.rmtree(moved)
    capsys.readouterr()
    assert main(["memory", "show", str(memory)]) == EXIT_DONE
    shown = " ".join(capsys.readouterr().out.split())  # long lines are wrapped
    num_tokens = len(TEXT.encode())
    for part in (
        f"book.txt, {num_tokens} tokens, SHA-256 ",
        f"{num_tokens} tokens read; inputs of the open segment: {num_tokens % SEG_LEN + 1} ",
        *("step 3, SHA-256 of the weights ", "eval.seg_len = 8", "memory.over.kind = transformer_xl", " (verified)"),
    ):
        assert part in shown, shown
    flip(memory, -1)
    assert main(["memory", "show", str(memory)]) == EXIT_USAGE


def test_what_cannot_be_done_is_said_in_one_line(
    run_dir: Path, book: Path, tmp_path: Path, library: Path, capsys: pytest.CaptureFixture[str], single_process: None
) -> None:
    memory = read(book, run_dir)
    other, _ = make_run(tmp_path / "other", library, MEMORIES["transformer_xl"])
    (tmp_path / "latin1.txt").write_bytes("caf\u00e9".encode("latin-1"))
    out, absent = ["-o", tmp_path / "new.mem"], ["--memory", tmp_path / "no.mem"]
    cases: list[tuple[list[str | Path], str]] = [
        (["generate", other, "--memory", memory], "another model"),
        (["generate", run_dir, "eval.mem_len=24", "--memory", memory], "eval.mem_len=16"),
        (["generate", run_dir, "--memory", book], "book.txt"),
        (["generate", run_dir, *absent], "no.mem"),
        (["generate", run_dir], "--memory"),
        (["generate", "--compare", run_dir, other, "--memory", memory], "--compare"),
        (["evaluate", run_dir, *absent], "no.mem"),
        (["evaluate", run_dir, "--memory", memory, "--without-memory"], "--without-memory"),
        (["evaluate", run_dir, "--memory", memory, "--sweep", "mem_len=8"], "--sweep"),
        (["read", tmp_path / "latin1.txt", "--run", run_dir, *out], "latin1.txt"),
        (["read", book, "--run", run_dir, "model.d_model=8", *out], "model.d_model"),
        (["read", book, "--run", run_dir, *absent, *out], "no.mem"),
        (["read", book, "--run", other, "--memory", memory, *out], "another model"),
        (["memory", "show", book], "book.txt"),
    ]
    for arguments, named in cases:
        capsys.readouterr()
        code = main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        assert (code, captured.out, captured.err.count("\n")) == (EXIT_USAGE, "", 1), (arguments, captured.err)
        said(captured.err, named)
    assert not (tmp_path / "new.mem").exists()
