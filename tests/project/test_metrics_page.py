"""The page of metrics names exactly what the code can log, under the groups of MLflow."""

import re
from pathlib import Path
from typing import NamedTuple

import torch

from dist_mem.data.batch import Batch
from dist_mem.data.mixture import SourceUse
from dist_mem.engine.gradient_norms import Norms
from dist_mem.evaluation.probe import passage_metrics
from dist_mem.evaluation.scores import DocumentScore, RecallScore, Report
from dist_mem.memory import memory_kinds
from dist_mem.tracking.log import read_points
from dist_mem.tracking.names import in_group
from dist_mem.training.divergence import METRICS
from dist_mem.training.evaluation import ACCURACY, STAGE
from dist_mem.training.meter import LOGGED, MEASUREMENTS, Meter, Totals
from tests.support.contract_cases import LANES, subject
from tests.support.jobs import train_here, write_config
from tests.support.paths import ROOT
from tests.support.ranks import Pools
from tests.support.tiny import Gradients

PAGE = ROOT / "docs" / "reference" / "metrics.md"
FULL_LANES = "memory/full_lanes"  # counted over a whole run; the test with a run meets it


class Row(NamedTuple):
    """A row of one of the page's tables."""

    grouped: list[str]
    plain: list[str]  # in metrics.jsonl; none of what only MLflow has


def rows() -> list[Row]:
    """Figures of memories have one name, so their second cell has none."""
    lines = (line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| `"))
    found = [Row(*(re.findall("`([^`]+)`", cell) for cell in line.split(" | ")[:2])) for line in lines]
    return [row._replace(plain=row.grouped) if row.grouped[0].startswith(LOGGED) else row for row in found]


def on_page() -> list[str]:
    return [name for row in rows() for name in row.plain]


class AuxiliaryGradients(Gradients):
    """The figures of an engine that has parameters with an auxiliary loss."""

    def gradient_norms(self) -> Norms:
        return Norms(1.0, 1.0)


def of_training() -> set[str]:
    meter = Meter(lane_segments_per_update=1)
    meter.add(Totals(*[1.0] * len(Totals._fields)), epoch=0.1)
    of_source = {f"mixture/SOURCE/{key}" for key in SourceUse._fields}
    return {*meter.read(AuxiliaryGradients()), *MEASUREMENTS, *METRICS.values(), STAGE, ACCURACY, *of_source}


def of_evaluations() -> set[str]:
    document = DocumentScore("1", "A book", nll=2.0, num_scored=3, words=2, bytes=9, hits=1)
    recall = [RecallScore(distance, nll=1.0, num_scored=1, hits=1) for distance in (1, 5, 9)]
    return set(Report("SPLIT", "", "", None, 4, 4, num_words=2, documents=[document], recall=recall).metrics())


def of_memory(case: str) -> set[str]:
    """What a memory logs, and what the passage shows of it."""
    made, none_new = subject(case), torch.zeros(LANES, dtype=torch.bool)
    model, segments = made.model().eval(), made.segments()
    batches = [Batch(*segment, made.full_lengths(), none_new, torch.arange(LANES), None) for segment in segments]
    logged = {LOGGED + name for output in made.read(model) for name in output.logs}
    read = passage_metrics(model, lambda _: made.empty_state(model), model.memories(), batches, torch.device("cpu"))
    return {*logged, *read.metrics}


def test_the_page_has_all_that_the_code_can_log_and_nothing_else() -> None:
    of_memories = {
        name
        for case in (*memory_kinds(), "infinite over compressive", "linear over transformer_xl")
        for name in of_memory(case)
    }
    assert sorted(on_page()) == sorted({*of_training(), *of_evaluations(), *of_memories, FULL_LANES})


def test_names_stand_beside_those_in_their_group() -> None:
    assert [row for row in rows() if row.plain and [in_group(name) for name in row.plain] != row.grouped] == []


def test_everything_that_a_run_logs_is_on_the_page(tmp_path: Path, books: Path, rank_pool: Pools) -> None:
    run_dir = tmp_path / "run"
    config = write_config(tmp_path / "run.yaml", books, run_dir, {"eval": {"every": 4, "max_document_len": 64}})
    assert rank_pool(2).run(train_here, config) == [0, 0]
    logged = {
        name.replace("validation/", "SPLIT/")
        for point in read_points(run_dir / "metrics.jsonl")
        for name in point.metrics
    }
    assert logged - {*on_page()} == set()
    assert logged >= {"loss", FULL_LANES, "SPLIT/word_perplexity", "checkpoint/bytes", "goodput/seconds", "mfu"}
