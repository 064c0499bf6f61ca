"""A split scored as one stream: every token once, memory carried from document to document, on any number of ranks."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dist_mem.data.shard import Index, read_index, write_split
from dist_mem.evaluation.scores import Report
from dist_mem.runtime.distributed import World
from dist_mem.training.opening import check_data
from tests.evaluation.test_scoring import DOCUMENTS, by_distance, read_plainly
from tests.support.messages import refused
from tests.support.ranks import RankPool
from tests.support.scored_library import (
    ALONE,
    LENGTHS,
    TOKENIZER,
    assert_same,
    make_config,
    make_model,
    score,
)

pytestmark = pytest.mark.ranks


def score_stream(index: Index, world: World = ALONE, *, num_lanes: int = 3, **settings: Any) -> Report:
    return score(index, make_model(), world=world, num_lanes=num_lanes, layout="stream", **settings)


def score_here(world: World, library: Path, num_lanes: int) -> Report:
    """In a rank of a pool."""
    return score_stream(read_index(library / "test"), world, num_lanes=num_lanes)


def plain_scores(num_lanes: int) -> np.ndarray:
    """NLL of every token of the stream, and which was the likeliest, (2, N): lane after lane."""
    model, tokens = make_model(), np.concatenate([document.tokens for document in DOCUMENTS])
    inputs = np.concatenate(([TOKENIZER.bos_id], tokens[:-1]))
    bounds = [round(lane * len(tokens) / num_lanes) for lane in range(num_lanes + 1)]
    parts = [read_plainly(model, tokens[first:last], inputs[first:last]) for first, last in pairwise(bounds)]
    return np.concatenate(parts, axis=1)


@pytest.mark.parametrize(("num_lanes", "masked"), [(1, False), (3, False), (7, False), (3, True)])
def test_every_token_counts_once_for_its_own_document(tmp_path: Path, num_lanes: int, masked: bool) -> None:
    """Unless the mask of its document says that it is read only."""
    masks = [np.arange(length) % 3 == 0 if masked and number % 2 else None for number, length in enumerate(LENGTHS)]
    documents = [replace(document, mask=mask) for document, mask in zip(DOCUMENTS, masks, strict=True)]
    fingerprint = TOKENIZER.fingerprint
    index = write_split(documents, tmp_path, name="tiny", split="test", tokenizer_fingerprint=fingerprint)
    report = score_stream(index, num_lanes=num_lanes)
    is_scored = [np.ones(len(doc.tokens), dtype=bool) if doc.mask is None else doc.mask for doc in documents]
    parts = np.split(plain_scores(num_lanes), np.cumsum(LENGTHS)[:-1], axis=1)
    kept = [part[:, scored] for part, scored in zip(parts, is_scored, strict=True)]
    assert [found.num_scored for found in report.documents] == [part.shape[1] for part in kept]
    assert [found.nll for found in report.documents] == pytest.approx([part[0].sum() for part in kept], rel=1e-6)
    assert [found.hits for found in report.documents] == [part[1].sum() for part in kept]
    losses, hits = np.concatenate(kept, axis=1)
    recall = np.concatenate([doc.recall[scored] for doc, scored in zip(documents, is_scored, strict=True)])
    expected = by_distance(losses, recall)
    assert {score.distance: score.nll for score in report.recall} == pytest.approx(expected, rel=1e-6)
    assert {score.distance: score.hits for score in report.recall} == by_distance(hits, recall)
    if not masked:
        assert report.word_perplexity == pytest.approx(math.exp(losses.sum() / index.num_words))


def test_too_many_lanes_are_refused_before_the_training_too(index: Index, library: Path) -> None:
    with refused(ValueError, "eval.batch_size"):
        score_stream(index, num_lanes=1000)
    evaluation = {"every": 1, "split": "test", "layout": "stream", "batch_size": 1000}
    config = make_config(data={"path": str(library), "train_split": "test"}, eval=evaluation)
    with refused(ValueError, "eval.batch_size"):
        check_data(config.data, config.eval, ["test", "test"])


@pytest.mark.parametrize("num_lanes", [2, 5])  # of five, three ranks of four have two or one; the last has none
@pytest.mark.parametrize("size", [2, 4])
def test_the_number_of_ranks_changes_no_metric(
    library: Path, rank_pool: Callable[[int], RankPool], size: int, num_lanes: int
) -> None:
    expected = score_here(ALONE, library, num_lanes)
    reports = rank_pool(size).run(score_here, library, num_lanes)
    assert all(report == reports[0] for report in reports)
    assert_same(reports[0], expected)


def test_documents_can_be_cut_to_their_beginning(index: Index) -> None:
    report = score_stream(index, max_document_len=8)
    assert [score.num_scored for score in report.documents] == [min(length, 8) for length in LENGTHS]
