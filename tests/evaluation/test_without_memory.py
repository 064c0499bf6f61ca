"""Evaluation with the memory emptied at every segment: the same tokens, each segment as if nothing stood before it."""

import json
import math
import shlex
from pathlib import Path
from typing import Any

import pytest

from dist_mem.__main__ import main
from dist_mem.errors import EXIT_DONE
from dist_mem.evaluation import job
from dist_mem.evaluation.memory_gain import memory_gain
from dist_mem.evaluation.scores import Band, DocumentScore, RecallScore, Report, read_report
from tests.support.evaluated_runs import MEMORIES, asked, make_run
from tests.support.messages import refused
from tests.support.plain_scores import DOCUMENTS, emptied, read_plainly
from tests.support.scored_library import SEG_LEN, counts

STICKY = {**MEMORIES["infinite"], "sampling": "sticky"}


@pytest.mark.parametrize("name", [*MEMORIES, "sticky"])
def test_every_segment_is_read_from_a_fresh_state(library: Path, tmp_path: Path, name: str) -> None:
    """The stem of LaMemo and the numbers that a sticky memory draws are fresh too."""
    run_dir, model = make_run(tmp_path, library, {**MEMORIES, "sticky": STICKY}[name])
    with_memory, without = asked(run_dir), emptied(run_dir)
    assert counts(without) == counts(with_memory)
    losses = [read_plainly(model, each.tokens, document=n, forgets=True)[0] for n, each in enumerate(DOCUMENTS)]
    assert [document.nll for document in without.documents] == pytest.approx([each.sum() for each in losses], rel=1e-6)
    assert (without == with_memory) == (name == "none") == (memory_gain(with_memory, without).nats == 0.0)


def test_who_speaks_is_no_memory(library: Path, tmp_path: Path) -> None:
    """Token types are read off the text of earlier segments; emptying memories must not change them."""
    types = [{"id": 1}, {"id": 2, "after": [ord("w")]}, {"id": 3, "after": [ord("\n")]}]
    sizes: dict[str, Any] = {"kind": "gpt2", "num_positions": SEG_LEN, "token_types": types}
    run_dir, model = make_run(tmp_path, library, {"kind": "causal"}, **sizes)
    assert model.token_types is not None
    assert memory_gain(asked(run_dir), emptied(run_dir)).nats == 0.0


@pytest.mark.parametrize("override", ["eval.layout=stream", "eval.blocks=true", "eval.seg_len=4"])
def test_it_goes_with_every_protocol(library: Path, tmp_path: Path, override: str) -> None:
    """A memory of one lane and one that is emptied differ; without any, lanes of a stream change nothing."""
    run_dir, _ = make_run(tmp_path, library, MEMORIES["transformer_xl"])
    with_memory, without = asked(run_dir, override), emptied(run_dir, override)
    assert counts(without) == counts(with_memory)
    assert without.nll != with_memory.nll
    assert emptied(run_dir, override, "train.micro_batch_size=1").nll == pytest.approx(without.nll, rel=1e-6)


def test_the_gain_is_the_mean_difference_over_all_tokens_and_in_a_band() -> None:
    report = make_report({7: (20.0, 10)}, nll=100.0)
    other = make_report({7: (50.0, 10)}, nll=150.0)
    whole, in_band = memory_gain(report, other), memory_gain(report, other, Band(0, 8))
    assert (whole.num_scored, whole.nats) == (100, 0.5)
    assert whole.without / whole.with_memory == pytest.approx(math.exp(0.5))
    assert (in_band.num_scored, in_band.nats) == (10, 3.0)
    assert memory_gain(report, other, Band(8, None)).num_scored == 0
    with refused(ValueError, "do not score the same tokens"):
        memory_gain(report, make_report({}, nll=150.0, num_scored=99))


def make_report(recall: dict[int, tuple[float, int]], *, nll: float, num_scored: int = 100) -> Report:
    scores = [RecallScore(distance, *found) for distance, found in recall.items()]
    return Report("test", "", "", None, 8, 16, 20, [DocumentScore("1", "One", nll, num_scored, 20, 300)], scores)


@pytest.mark.usefixtures("single_process")
def test_the_command_writes_apart_and_prints_the_gain(
    library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    reported: list[dict[str, float]] = []
    monkeypatch.setattr(job, "log_to_run", lambda config, **given: reported.append(given["metrics"]))
    run_dir, _ = make_run(tmp_path, library, MEMORIES["lamemo"])
    command = ["evaluate", str(run_dir), "--split", "test", "tracking.mlflow=true", "eval.mem_len=24"]
    assert main([*command, "--without-memory"]) == EXIT_DONE
    output = capsys.readouterr().out
    assert "T 8, M 24, documents, memory emptied at every segment" in output
    hint = output.splitlines()[-1].partition("run: dist-mem ")[2]
    assert main(shlex.split(hint)) == EXIT_DONE  # what it says to run is what was left to do
    printed = capsys.readouterr().out.splitlines()
    name = run_dir / "evaluations" / "test-step-00000003-M24"
    with_memory, without = (read_report(Path(f"{name}{ending}.json")) for ending in ("", "-without-memory"))
    gain = memory_gain(with_memory, without)
    assert f"gain of the memory: {gain.nats:.4f} nats per token" in "\n".join(printed)
    assert any(line.startswith("recall, referent (8, 32] tokens back (memory): ") for line in printed)
    assert main([*command, "--without-memory"]) == EXIT_DONE
    assert f"gain of the memory: {gain.nats:.4f} nats per token" in capsys.readouterr().out
    assert json.loads(Path(f"{name}-without-memory.json").read_text())["protocol"]["without_memory"] is True
    assert reported[0]["test-M24-without-memory/token_perplexity"] == without.token_perplexity
    assert reported[1]["test-M24/token_perplexity"] == with_memory.token_perplexity


@pytest.mark.usefixtures("single_process")
def test_a_report_of_other_tokens_is_named_and_no_gain_is_reported(
    library: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir, _ = make_run(tmp_path, library, MEMORIES["transformer_xl"])
    command = ["evaluate", str(run_dir), "--split", "test"]
    assert main(command) == EXIT_DONE
    path = run_dir / "evaluations" / "test-step-00000003.json"
    content: dict[str, Any] = json.loads(path.read_text())
    content["report"]["documents"][0]["num_scored"] += 1
    path.write_text(json.dumps(content))
    assert main([*command, "--without-memory"]) == EXIT_DONE
    output = capsys.readouterr()
    assert "do not score the same tokens" in output.err and "nats per token" not in output.out
