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
import torch

from dist_mem.data.batch import IGNORE
from dist_mem.data.shard import Index, ShardError, read_index, write_split
from dist_mem.evaluation import scoring
from dist_mem.evaluation.scores import Report
from dist_mem.evaluation.scoring import EvaluationError
from dist_mem.runtime.distributed import World
from dist_mem.training.opening import check_data
from tests.support.messages import refused
from tests.support.ranks import RankPool
from tests.support.scored_library import (
    ALONE,
    LENGTHS,
    SEG_LEN,
    TOKENIZER,
    assert_same,
    make_config,
    make_document,
    make_model,
    score,
)

pytestmark = pytest.mark.ranks


def score_stream(index: Index, world: World = ALONE, *, num_lanes: int = 3, **settings: Any) -> Report:
    return score(index, make_model(), world=world, num_lanes=num_lanes, layout="stream", **settings)


def score_here(world: World, library: Path, num_lanes: int) -> Report:
    """In a rank of a pool."""
    return score_stream(read_index(library / "test"), world, num_lanes=num_lanes)


@torch.no_grad()
def plain_losses(num_lanes: int) -> tuple[np.ndarray, np.ndarray]:
    """NLL of every token of the stream, and which was the likeliest; lane after lane, written out plainly."""
    model = make_model()
    tokens = np.concatenate([make_document(number, length).tokens for number, length in enumerate(LENGTHS)])
    inputs = np.concatenate(([TOKENIZER.bos_id], tokens[:-1])).astype(np.int64)
    losses, hits = np.zeros((2, len(tokens)))
    bounds = [round(lane * len(tokens) / num_lanes) for lane in range(num_lanes + 1)]
    for first, last in pairwise(bounds):
        state = model.init_state(torch.zeros(1, dtype=torch.int64), "cpu", torch.float32)
        for begin in range(first, last, SEG_LEN):
            length = min(SEG_LEN, last - begin)
            segment, targets = torch.zeros(1, SEG_LEN, dtype=torch.int64), torch.full((1, SEG_LEN), IGNORE)
            segment[0, :length] = torch.from_numpy(inputs[begin : begin + length])
            targets[0, :length] = torch.from_numpy(tokens[begin : begin + length].astype(np.int64))
            output = model(segment, targets, torch.tensor([length]), state=state)
            state = output.state
            losses[begin : begin + length] = output.nll[0, :length].numpy()
            hits[begin : begin + length] = output.hits[0, :length].numpy()
    return losses, hits


@pytest.mark.parametrize("num_lanes", [1, 3, 7])
def test_every_token_counts_once_for_its_own_document(index: Index, num_lanes: int) -> None:
    (losses, hits), report = plain_losses(num_lanes), score_stream(index, num_lanes=num_lanes)
    ends = np.cumsum(LENGTHS)
    for found, end, length in zip(report.documents, ends, LENGTHS, strict=True):
        assert found.num_scored == length
        assert found.nll == pytest.approx(losses[end - length : end].sum(), rel=1e-6)
        assert found.hits == hits[end - length : end].sum()
    by_distance: dict[int, float] = {}
    hits_at: dict[int, float] = {}
    recall = np.concatenate([make_document(number, length).recall for number, length in enumerate(LENGTHS)])
    for distance, loss, is_hit in zip(recall.tolist(), losses.tolist(), hits.tolist(), strict=True):
        if distance:
            by_distance[distance] = by_distance.get(distance, 0.0) + loss
            hits_at[distance] = hits_at.get(distance, 0.0) + is_hit
    assert {score.distance: score.nll for score in report.recall} == pytest.approx(by_distance, rel=1e-6)
    assert {score.distance: score.hits for score in report.recall} == hits_at
    assert report.num_scored == index.num_tokens
    assert report.word_perplexity == pytest.approx(math.exp(losses.sum() / index.num_words))


@pytest.mark.parametrize("num_lanes", [2, 5])  # of five, three ranks of four have two or one; the last has none
@pytest.mark.parametrize("size", [2, 4])
def test_the_number_of_ranks_changes_no_metric(
    library: Path, rank_pool: Callable[[int], RankPool], size: int, num_lanes: int
) -> None:
    expected = score_here(ALONE, library, num_lanes)
    reports = rank_pool(size).run(score_here, library, num_lanes)
    assert all(report == reports[0] for report in reports)
    assert_same(reports[0], expected)


def test_one_document_in_one_lane_scores_as_in_the_layout_of_documents(tmp_path: Path) -> None:
    document = make_document(0, 100)
    write_split([document], tmp_path / "test", name="one", split="test", tokenizer_fingerprint=TOKENIZER.fingerprint)
    index = read_index(tmp_path / "test")
    reports = [score(index, make_model(), num_lanes=1, layout=layout) for layout in ("stream", "documents")]
    assert reports[0] == reports[1]


def test_documents_can_be_cut_to_their_beginning(index: Index) -> None:
    report = score_stream(index, max_document_len=8)
    assert [score.num_scored for score in report.documents] == [min(length, 8) for length in LENGTHS]


def test_masks_of_some_documents_hold_in_the_stream(tmp_path: Path) -> None:
    documents = [make_document(number, length) for number, length in enumerate(LENGTHS)]
    masks = [np.arange(length) % 3 == 0 if number % 2 else None for number, length in enumerate(LENGTHS)]
    masked = [replace(document, mask=mask) for document, mask in zip(documents, masks, strict=True)]
    write_split(masked, tmp_path / "test", name="tiny", split="test", tokenizer_fingerprint=TOKENIZER.fingerprint)
    losses, _ = plain_losses(3)
    report = score_stream(read_index(tmp_path / "test"))
    ends = np.cumsum(LENGTHS)
    for found, mask, end, length in zip(report.documents, masks, ends, LENGTHS, strict=True):
        counted = losses[end - length : end][slice(None) if mask is None else mask]
        assert found.num_scored == len(counted)
        assert found.nll == pytest.approx(counted.sum(), rel=1e-6)


def test_a_token_that_is_not_scored_is_an_error(index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    batches = scoring.stream_batches

    def one_less(*args: Any, **kwargs: Any) -> Any:
        for number, groups in enumerate(batches(*args, **kwargs)):
            if number == 2:
                groups[0][0].targets[0, 3] = IGNORE
            yield groups

    monkeypatch.setattr(scoring, "stream_batches", one_less)
    with refused(EvaluationError):
        score_stream(index)


def test_a_damaged_document_and_too_many_lanes_are_refused(
    index: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with refused(ValueError, "eval.batch_size"):
        score_stream(index, num_lanes=1000)
    documents = [make_document(number, length) for number, length in enumerate(LENGTHS)]
    write_split(documents, tmp_path / "test", name="bad", split="test", tokenizer_fingerprint=TOKENIZER.fingerprint)
    damaged = read_index(tmp_path / "test")
    tar = tmp_path / "test" / damaged.shards[0].name
    content = bytearray(tar.read_bytes())
    content[damaged.documents[6].tokens_offset] ^= 1
    tar.write_bytes(content)
    monkeypatch.setattr(scoring, "score_batches", pytest.fail)  # no forward begins, amid which ranks would wait
    with refused(ShardError):
        score_stream(damaged)


def test_too_many_lanes_are_refused_before_the_training(library: Path) -> None:
    evaluation = {"every": 1, "split": "test", "layout": "stream", "batch_size": 1000}
    config = make_config(data={"path": str(library), "train_split": "test"}, eval=evaluation)
    with refused(ValueError, "eval.batch_size"):
        check_data(config.data, config.eval, ["test", "test"])
