"""`dist-mem generate`: real runs, real processes, real files; texts as they are read, and those without an end."""

import gzip
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest

from dist_mem.__main__ import main
from dist_mem.config import load_config
from dist_mem.data.tokenizers.words import WordTokenizer
from dist_mem.datasets import corpus_rows
from dist_mem.datasets.builder import build_dataset
from dist_mem.datasets.recipes.characters import read_whole
from dist_mem.datasets.source import SourceDocument, read_text
from dist_mem.errors import EXIT_FAILED, EXIT_USAGE, UnfitError, UnusableError
from dist_mem.evaluation.trained_model import load_exported, load_model
from dist_mem.generation.continue_prompts import read_prompt
from dist_mem.generation.generate import Sampling, generate
from dist_mem.generation.reading import read, start
from dist_mem.generation.text import read_file
from dist_mem.hf.folder import read_weights
from dist_mem.runtime import files
from dist_mem.runtime.terminal import make_printable
from tests.support.jobs import build_books, train_here, write_config
from tests.support.limits import limit
from tests.support.messages import refused, said
from tests.support.ranks import Pools

PROMPT = "mirukoten solqua verba \u20ac"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, rank_pool: Pools) -> Path:
    """Two runs on bytes, with memory and without, and one on words."""
    folder = tmp_path_factory.mktemp("generation")
    data = build_books(folder)
    words = ["alpha", "beta", "gamma", "<eos>"]
    (folder / "words.txt").write_text("alpha beta gamma beta alpha\n" * 40, encoding="utf-8")
    sources = [SourceDocument(id=str(n), title="words", source=folder / "words.txt", year=1900) for n in range(2)]
    build_dataset({"train": sources}, folder / "word_shards", name="words", tokenizer=WordTokenizer(words))
    memories = {"txl": (data, None), "none": (data, {"kind": "none"}), "words": (folder / "word_shards", None)}
    for name, (path, memory) in memories.items():
        steps = {"train": {"steps": 2, "global_batch_size": 2, "micro_batch_size": 2}, "model": {"dropout": 0.0}}
        config = write_config(folder / f"{name}.yaml", path, folder / name, steps, memory=memory)
        rank_pool(1).run(train_here, config)
    return folder


def ask(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> tuple[int, str, str]:
    code = main(["generate", *map(str, arguments)])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_text_is_that_of_the_python_api(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompt_file = folder / "prompt.txt"
    prompt_file.write_text(PROMPT * 9, encoding="utf-8")
    options = ["--tokens", "40", "--seed"]
    code, out, err = ask(capsys, folder / "txl", "--prompt-file", prompt_file, *options, "3")
    trained = load_model(folder / "txl")
    tokens = trained.tokenizer.encode(PROMPT * 9)
    reading = read(trained, start(trained), [tokens])
    written = generate(trained, reading, num_tokens=40, sampling=Sampling(top_p=0.95, seed=3)).tokens[0]
    assert code == 0 and out == make_printable(trained.tokenizer.decode(written)) + "\n"
    assert f"prompt of {len(tokens)} tokens" in err and "40 tokens, " in err
    assert ask(capsys, folder / "txl", "--prompt", PROMPT * 9, *options, "3")[1] == out
    assert ask(capsys, folder / "txl", "--prompt", PROMPT * 9, *options, "4")[1] != out


def test_samples_are_apart_and_the_first_is_that_of_one_alone(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [folder / "txl", "eval.seg_len=8", "--prompt", PROMPT, "--tokens", "20", "--out"]
    assert ask(capsys, *arguments, tmp_path / "one.txt")[0] == 0
    code, out, _ = ask(capsys, *arguments, tmp_path / "three.json", "--samples", "3")
    written = json.loads((tmp_path / "three.json").read_text(encoding="utf-8"))["continuations"][0]
    assert code == 0 and len(set(written["texts"])) == 3 and written["num_tokens"] == [20] * 3
    assert written["texts"][0] == (tmp_path / "one.txt").read_text(encoding="utf-8")
    assert written["seg_len"] == 8 and "text 3 of 3" in out
    assert ask(capsys, *arguments, tmp_path / "other.json", "--samples", "3", "--seed", "1")[0] == 0
    others = json.loads((tmp_path / "other.json").read_text(encoding="utf-8"))["continuations"][0]["texts"]
    assert len({*written["texts"], *others}) == 6, "the seed counts for every text"


def test_all_runs_of_a_comparison_are_found_before_one_writes(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The text of the first was written, and lost."""
    runs = (folder / "txl", tmp_path / "nosuch")
    code, out, err = ask(capsys, "--compare", *runs, "--prompt", "It was", "--tokens", 5, "--out", tmp_path / "c.md")
    assert code == EXIT_USAGE and not out
    said(err, tmp_path / "nosuch")


def test_a_run_that_cannot_read_the_prompt_keeps_the_texts_of_those_before(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """They were lost."""
    runs, out = [folder / "txl", folder / "words"], tmp_path / "c.json"
    code, _, err = ask(capsys, "--compare", *runs, "--prompt", "It was", "--tokens", "5", "--out", out)
    assert code == EXIT_USAGE
    said(err, "It")
    assert [entry["run"] for entry in json.loads(out.read_text(encoding="utf-8"))["continuations"]] == [str(runs[0])]


def test_runs_are_compared_on_the_same_prompt(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs, asked = [folder / "none", folder / "txl"], ["--prompt", PROMPT, "--tokens", "30", "--top-k", "20"]
    for name in ("study.json", "study.md"):
        code, out, err = ask(capsys, "--compare", *runs, *asked, "--out", tmp_path / name)
        assert code == 0
    study = json.loads((tmp_path / "study.json").read_text(encoding="utf-8"))
    entries = study["continuations"]
    expected = [(str(runs[0]), "none", 0), (str(runs[1]), "transformer_xl", 24)]
    assert [(entry["run"], entry["memory"], entry["mem_len"]) for entry in entries] == expected
    assert study["sampling"] == {"temperature": 1.0, "top_k": 20, "top_p": 0.95, "seed": 0}
    assert study["prompt"] == {"characters": len(PROMPT), "end": PROMPT}
    page = (tmp_path / "study.md").read_text(encoding="utf-8")
    for entry in entries:
        assert ask(capsys, entry["run"], *asked)[1] == make_printable(entry["texts"][0]) + "\n"
        assert entry["texts"][0] in page and f"| {entry['run']} |" in page and entry["run"] in out
        assert {"rep-1", "rep-4", "distinct-1", "distinct-4"} < entry.keys()
    assert re.search(r"^run +rep-1 +rep-2 .* distinct-4$", err, re.MULTILINE)


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "dist_mem", "generate", *map(str, arguments)]


def test_what_cannot_be_done_is_said_in_one_line(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    latin1 = tmp_path / "latin1.txt"
    latin1.write_bytes("caf\u00e9".encode("latin-1"))
    run, prompt = folder / "txl", ["--prompt", "a"]
    cases: list[tuple[list[str | Path], str]] = [
        ([run, "--prompt-file", latin1], "latin1.txt"),
        ([folder / "words", "--prompt", "alpha delta"], "'delta'"),
        ([run, *prompt, "--temperature", "-1"], "--temperature"),
        ([run, *prompt, "--top-p", "0"], "--top-p"),
        ([run, "model.d_model=8", *prompt], "model.d_model"),
        ([run], "--prompt"),
        (prompt, "0 runs"),
        (["--compare", run, *prompt], "--compare"),
    ]
    for arguments, named in cases:
        code, out, err = ask(capsys, *arguments)
        assert (code, out) == (2, "")
        said(err, named)
    assert ask(capsys, run, *prompt, "--tokens", "1", "--out", "/dev/full")[0] == EXIT_FAILED
    for wrong in ([*prompt, "--prompt-file", "b"], [*prompt, "--tokens", "0"], [*prompt, "--top-k", "0"]):
        with pytest.raises(SystemExit):
            main(["generate", str(run), *wrong])


@pytest.mark.parametrize("options", [["--tokens", "1000000"], ["--tokens", "40", "--samples", "2"]])
def test_a_reader_that_has_enough_ends_it_quietly(folder: Path, tmp_path: Path, options: list[str]) -> None:
    out = tmp_path / "so_far.json"
    arguments = command(folder / "txl", "--prompt", PROMPT, "--temperature", "2", "--out", out, *options)
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(arguments, stdout=writer, stderr=subprocess.PIPE, timeout=limit(120))
    os.close(writer)
    assert done.returncode == 0, done.stderr
    assert b"error" not in done.stderr and b"Traceback" not in done.stderr
    assert json.loads(out.read_text(encoding="utf-8"))["continuations"][0]["texts"][0]


def test_words_are_written_as_words(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = ask(capsys, folder / "words", "--prompt", "alpha beta\n", "--tokens", "30", "--temperature", "2")
    assert code == 0 and set(out.split()) <= {"alpha", "beta", "gamma"} and len(out.split()) > 5


def test_ctrl_c_ends_with_the_text_so_far(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "so_far.json"
    options = ["--tokens", "1000000", "--temperature", "0", "--out", out]
    arguments = command(folder / "txl", "--prompt", PROMPT, *options)
    # Without a buffer: what it held, `communicate` would not see.
    process = subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0)
    assert process.stdout is not None
    begin = process.stdout.read(1)  # text comes while it is written: the whole would take hours
    process.send_signal(signal.SIGINT)
    rest, err = process.communicate(timeout=limit(120))
    assert process.returncode == 0, err
    text = json.loads(out.read_text(encoding="utf-8"))["continuations"][0]["texts"][0]
    assert len(begin) == 1 and b"stopped; " in err and b"Traceback" not in err
    assert (begin + rest).decode() == make_printable(text) + "\n"


LIMIT = 2_000_000
ZERO = Path("/dev/zero")


def read_compressed_rows(folder: Path) -> None:
    path = folder / "rows.json.gz"
    path.write_bytes(gzip.compress(bytes(LIMIT + 1)))
    list(corpus_rows.read_rows(corpus_rows.RowFile(path, "text", None, 0)))


READERS: dict[str, Callable[[Path], object]] = {
    "--prompt-file, --text and `read`": lambda folder: read_file(ZERO, "--text"),
    "a text of a builder": lambda folder: read_text(ZERO),
    "enwik8": lambda folder: read_whole(ZERO),
    "a row that is small as it is stored": read_compressed_rows,
}


@pytest.mark.parametrize("reader", READERS)
def test_a_text_without_an_end_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reader: str) -> None:
    monkeypatch.setattr(files.read_at_most, "__defaults__", (LIMIT,))
    monkeypatch.setattr(corpus_rows, "MAX_TEXT_BYTES", LIMIT)
    with refused(UnusableError, "rows.json.gz, line 1" if reader.startswith("a row") else ZERO):
        READERS[reader](tmp_path)


@pytest.mark.parametrize("reader", ["a configuration", "a prompt", "weights of transformers", "weights of an export"])
def test_a_disk_that_fails_for_a_time_is_no_fault_of_the_users(tmp_path: Path, reader: str) -> None:
    """Reading /proc/self/mem from its start is EIO, as of a failing disk: another start may succeed, exit code 1."""
    names = {"a configuration": "job.yaml", "a prompt": "prompt.txt"}
    path = tmp_path / names.get(reader, "model.safetensors")
    path.symlink_to("/proc/self/mem")
    read: dict[str, Callable[[], object]] = {
        "a configuration": lambda: load_config([str(path)]),
        "a prompt": lambda: read_file(path, "--prompt-file"),
        "weights of transformers": lambda: read_weights(tmp_path),
        "weights of an export": lambda: load_exported(cast(Any, None), tmp_path, is_published=True),
    }
    with refused(UnfitError, str(path)):
        read[reader]()


def test_a_text_is_read_as_those_of_training_are(tmp_path: Path) -> None:
    """Out of a pipe too, as in --text <(zcat book.gz), which has no size."""
    path = tmp_path / "book.txt"
    path.write_bytes(b"\xef\xbb\xbfOne.\r\nTwo.\r")
    with path.open("rb") as stream:
        assert read_file(Path(f"/dev/fd/{stream.fileno()}"), "--text") == "One.\nTwo.\n"
    assert read_prompt(None, path) == read_prompt("One.\r\nTwo.\r", None) == "One.\nTwo.\n"


def test_a_prompt_of_bytes_that_are_no_text_is_one_line() -> None:
    with refused(UnusableError, "--prompt", "character 3", "--prompt-file"):
        read_prompt("caf\udce9", None)
