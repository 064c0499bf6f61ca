"""Loss by position: every token once, in the octave of its place in its document, however lanes and ranks read it."""

import math
from collections import defaultdict
from pathlib import Path

import pytest

from dist_mem.__main__ import main
from dist_mem.evaluation.intervals import MIN_DOCUMENTS
from dist_mem.evaluation.memory_file import read_memory_file
from dist_mem.evaluation.position import position_bins, positions_to_csv
from dist_mem.evaluation.scores import Band, read_report
from dist_mem.evaluation.trained_model import load_model
from dist_mem.generation.text_memory import read_text
from tests.support.evaluated_runs import MEMORIES, asked, make_run
from tests.support.messages import said_line
from tests.support.plain_scores import DOCUMENTS, read_plainly
from tests.support.saved_reports import save_report
from tests.support.scored_library import SEG_LEN


@pytest.mark.parametrize("lanes", [1, 3, 8])
def test_the_sums_are_those_of_the_tokens_at_these_positions(library: Path, tmp_path: Path, lanes: int) -> None:
    run_dir, model = make_run(tmp_path, library, MEMORIES["transformer_xl"])
    report = asked(run_dir, f"eval.batch_size={lanes}", by_position=True)
    wanted: dict[tuple[int, int], list[float]] = defaultdict(list)
    for number, document in enumerate(DOCUMENTS):
        for place, nll in enumerate(read_plainly(model, document.tokens)[0], start=1):
            wanted[number, place.bit_length() - 1].append(float(nll))
    found = {(score.document, score.bin): score for score in report.positions}
    assert found.keys() == wanted.keys()
    for key, losses in wanted.items():
        assert found[key].num_scored == len(losses)
        assert found[key].nll == pytest.approx(math.fsum(losses), rel=1e-5)
    for low, high in ((0, None), (1, 7), (7, None)):
        within = [
            loss for (_, number), losses in wanted.items() for loss in losses if low < 2**number <= (high or math.inf)
        ]
        perplexity = report.position_perplexity(Band(low, high))
        assert perplexity == pytest.approx(math.exp(math.fsum(within) / len(within)), rel=1e-5)
        assert report.at_positions(Band(low, high)).num_scored == len(within)
    assert math.isnan(report.position_perplexity(Band(2**20 - 1, None)))
    assert math.fsum(score.nll for score in report.positions) == pytest.approx(report.nll)
    _, path = save_report(report, tmp_path, "written")
    assert read_report(path) == report
    bins = position_bins(report)
    assert [(each.first, each.last) for each in bins] == [(2**k, 2 ** (k + 1) - 1) for k in range(len(bins))]
    for each in bins:
        assert math.isnan(each.low) == math.isnan(each.high) == (each.num_documents < MIN_DOCUMENTS)
        assert math.isnan(each.low) or each.low <= each.loss <= each.high
    assert len({math.isnan(each.low) for each in bins}) == 2
    assert sum(each.num_tokens for each in bins) == report.num_scored
    assert len(positions_to_csv(bins).splitlines()) == len(bins) + 1
    assert asked(run_dir).positions == []


@pytest.mark.parametrize("num_tokens", [0, 3, SEG_LEN, 2 * SEG_LEN + 1])
def test_positions_count_from_the_document_also_after_a_text(library: Path, tmp_path: Path, num_tokens: int) -> None:
    run_dir, _ = make_run(tmp_path, library, MEMORIES["transformer_xl"])
    read_text(load_model(run_dir), "It was the best of times, it was"[:num_tokens]).save(tmp_path / "text.mem")
    memory = read_memory_file(tmp_path / "text.mem")
    found, alone = (asked(run_dir, memory=given, by_position=True).positions for given in (memory, None))
    assert [(score.document, score.bin, score.num_scored) for score in found] == [
        (score.document, score.bin, score.num_scored) for score in alone
    ]


def test_the_command_writes_a_table_and_a_picture_where_tokens_have_a_place(
    library: Path, tmp_path: Path, single_process: None, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir, _ = make_run(tmp_path, library, MEMORIES["none"])
    command = ["evaluate", str(run_dir), "--split", "test", "--by", "position"]
    assert main([*command, "eval.layout=stream", "eval.batch_size=2"]) == 2
    said_line(capsys.readouterr().err, "--by position", "eval.layout=documents")
    assert main(command) == 0
    assert "95 % over documents" in capsys.readouterr().out
    assert {path.suffix for path in (run_dir / "evaluations").glob("*.position.*")} == {".csv", ".png"}
