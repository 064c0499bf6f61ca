"""Evaluation after a memory file: every document is scored as the continuation of the text that was read."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest

from dist_mem.__main__ import main
from dist_mem.errors import EXIT_DONE, EXIT_USAGE
from dist_mem.evaluation.evaluate import evaluate_checkpoint
from dist_mem.evaluation.memory_file import read_memory_file
from dist_mem.evaluation.scores import Report, read_report
from dist_mem.evaluation.trained_model import TrainedModel, find_checkpoint, load_model, read_settings
from dist_mem.generation.text_memory import TextMemory, load_memory, read_text, save_memory
from dist_mem.generation.text_scores import score
from tests.evaluation.test_protocol import MEMORIES, asked, make_run
from tests.support.scored_library import ALONE, LENGTHS, SEG_LEN, assert_same, counts, make_document

KINDS = {**MEMORIES, "sticky": {**MEMORIES["infinite"], "sampling": "sticky"}}
REST = ["transformer_xl", "lamemo", "compressive", "infinite_over_compressive", "infinite"]
NAMES = ["infinite_over_lamemo", "sticky", "none", *(pytest.param(name, marks=pytest.mark.nightly) for name in REST)]
TEXT = "It was the best of times, it was the worst of times, it was the age of wisdom.\n"


def prepared(folder: Path, library: Path, name: str, num_tokens: int, *overrides: str) -> tuple[TrainedModel, Path]:
    """A run, and the memory file of a text of `num_tokens`."""
    run_dir, _ = make_run(folder, library, KINDS[name])
    trained = load_model(run_dir, *overrides)
    save_memory(trained, read_text(trained, TEXT[:num_tokens]), folder / "text.mem")
    return trained, folder / "text.mem"


def report_after(run_dir: Path, memory: Path, *overrides: str) -> Report:
    checkpoint = find_checkpoint(run_dir)
    config = read_settings(checkpoint.directory, ["eval.batch_size=3", *overrides])
    return evaluate_checkpoint(checkpoint, config, split="test", world=ALONE, memory=read_memory_file(memory))


def one_by_one(trained: TrainedModel, memory: TextMemory) -> list[float]:
    """NLL of every document of the library, scored alone after the text."""
    documents = [make_document(number, length).tokens.astype(np.int64) for number, length in enumerate(LENGTHS)]
    scores = [score(trained, tokens, after=memory.reading).nll for tokens in documents]
    return [math.fsum(nll[~nll.isnan()].tolist()) for nll in scores]


@pytest.mark.parametrize("num_tokens", [3, SEG_LEN - 1, SEG_LEN, 5 * SEG_LEN + 2])
@pytest.mark.parametrize("name", [*NAMES, "transformer_xl in blocks"])
def test_every_document_is_scored_as_the_continuation_of_the_text(
    library: Path, tmp_path: Path, name: str, num_tokens: int
) -> None:
    """The same tokens as without a text; with blocks, the blocks are those of text and document together."""
    kind, _, in_blocks = name.partition(" in ")
    overrides = ["eval.blocks=true"] if in_blocks else []
    trained, path = prepared(tmp_path, library, kind, num_tokens, *overrides)
    report = report_after(tmp_path / "run", path, *overrides)
    expected = one_by_one(trained, load_memory(trained, path))
    assert [document.nll for document in report.documents] == pytest.approx(expected, rel=1e-6)
    if num_tokens == 3 and not in_blocks:
        assert counts(report) == counts(asked(tmp_path / "run"))


def test_after_an_empty_text_the_report_is_that_of_documents(library: Path, tmp_path: Path) -> None:
    _, path = prepared(tmp_path, library, "infinite_over_lamemo", 0)
    assert_same(report_after(tmp_path / "run", path), asked(tmp_path / "run"))


@pytest.mark.parametrize("override", ["eval.batch_size=1", "eval.batch_size=9", "train.micro_batch_size=1"])
def test_lanes_do_not_change_the_report(library: Path, tmp_path: Path, override: str) -> None:
    _, path = prepared(tmp_path, library, "infinite_over_lamemo", 21)
    assert_same(report_after(tmp_path / "run", path, override), report_after(tmp_path / "run", path))


def test_a_document_cut_short_keeps_its_length(library: Path, tmp_path: Path) -> None:
    _, path = prepared(tmp_path, library, "transformer_xl", 21)
    report = report_after(tmp_path / "run", path, "eval.max_document_len=10")
    assert [document.num_scored for document in report.documents] == [min(length, 10) for length in LENGTHS]


@pytest.mark.usefixtures("single_process")
def test_the_command_says_after_what_and_writes_apart(
    library: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, path = prepared(tmp_path, library, "transformer_xl", 21)
    command = ["evaluate", str(tmp_path / "run"), "--split", "test", "eval.batch_size=3"]
    assert main(command) == EXIT_DONE
    assert main([*command, "--memory", str(path)]) == EXIT_DONE
    assert "documents, after text (21 tokens)" in capsys.readouterr().out
    name = f"test-step-00000003-{read_memory_file(path).tag}"
    written = tmp_path / "run" / "evaluations" / f"{name}.json"
    assert read_report(written) == report_after(tmp_path / "run", path)
    facts = json.loads(written.read_text())["memory_file"]
    assert facts["path"] == str(path) and facts["texts"][0]["num_tokens"] == 21
    assert main([*command, "--memory", str(path), "eval.layout=stream"]) == EXIT_USAGE
    assert "eval.layout is stream, whose lanes begin within documents: set eval.layout=documents" in (
        capsys.readouterr().err
    )
    assert main([*command, "--memory", str(path), "eval.seg_len=4"]) == EXIT_USAGE
    assert "give eval.seg_len=8, or read the text again" in capsys.readouterr().err
