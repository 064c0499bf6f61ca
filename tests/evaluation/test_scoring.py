"""Scoring: every token once, as if its document were alone; what cannot be right is an error."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from dist_mem.data.batch import IGNORE
from dist_mem.data.shard import Index, TokenizedDocument, read_index, write_split
from dist_mem.evaluation import scoring
from dist_mem.evaluation.scores import Report
from dist_mem.evaluation.scoring import EvaluationError
from dist_mem.memory.base import map_state
from dist_mem.model import LMOutput, LMState, MemoryLM
from dist_mem.runtime.distributed import World
from tests.support.messages import refused
from tests.support.ranks import RankPool
from tests.support.scored_library import (
    ALONE,
    LENGTHS,
    SEG_LEN,
    TOKENIZER,
    assert_same,
    make_document,
    make_model,
    score,
)

pytestmark = pytest.mark.ranks


@torch.no_grad()
def score_alone(model: MemoryLM, tokens: np.ndarray) -> list[float]:
    """NLL of every token of one document, one lane, segment after segment, written out plainly."""
    state = model.init_state(torch.zeros(1, dtype=torch.int64), "cpu", torch.float32)
    inputs = np.concatenate(([TOKENIZER.bos_id], tokens[:-1])).astype(np.int64)
    losses: list[float] = []
    for begin in range(0, len(tokens), SEG_LEN):
        length = len(tokens[begin : begin + SEG_LEN])
        segment, targets = torch.zeros(1, SEG_LEN, dtype=torch.int64), torch.full((1, SEG_LEN), IGNORE)
        segment[0, :length] = torch.from_numpy(inputs[begin : begin + length])
        targets[0, :length] = torch.from_numpy(tokens[begin : begin + length].astype(np.int64))
        output = model(segment, targets, torch.tensor([length]), state=state)
        state = output.state
        losses += output.nll[0, :length].tolist()
    return losses


def test_every_document_scores_as_if_it_were_alone(index: Index) -> None:
    model = make_model()
    report = score(index, model)
    by_distance: dict[int, float] = {}
    for number, length in enumerate(LENGTHS):
        document = make_document(number, length)
        losses = score_alone(model, document.tokens) if length else []
        assert report.documents[number].nll == pytest.approx(math.fsum(losses), rel=1e-6)
        assert report.documents[number].num_scored == length
        assert document.recall is not None
        for distance, loss in zip(document.recall.tolist(), losses, strict=True):
            if distance:
                by_distance[distance] = by_distance.get(distance, 0.0) + loss
    assert {score.distance: score.nll for score in report.recall} == pytest.approx(by_distance, rel=1e-6)
    assert report.num_scored == index.num_tokens == sum(LENGTHS)
    assert report.word_perplexity == pytest.approx(math.exp(report.nll / index.num_words))
    assert report.bits_per_byte == pytest.approx(report.nll / math.log(2) / sum(LENGTHS))


@pytest.mark.parametrize(("num_lanes", "micro_lanes"), [(1, 1), (2, 2), (5, 2), (9, 3), (16, 4)])
def test_the_number_of_lanes_changes_nothing(index: Index, num_lanes: int, micro_lanes: int) -> None:
    model = make_model()
    assert_same(score(index, model, num_lanes=num_lanes, micro_lanes=micro_lanes), score(index, model))


def rows_of_forwards(index: Index, *, num_lanes: int, micro_lanes: int, world: World = ALONE) -> list[list[int]]:
    """`valid_len` of each forward that this rank makes."""
    model, rows = make_model(), []

    def noted(tokens: Tensor, targets: Tensor, valid_len: Tensor, *, state: LMState) -> LMOutput:
        rows.append(valid_len.tolist())
        return model(tokens, targets, valid_len, state=state)

    def empty(documents: Tensor) -> LMState:
        return model.init_state(documents, "cpu", torch.float32)

    score(index, noted, num_lanes=num_lanes, micro_lanes=micro_lanes, world=world, init_state=empty)
    return rows


def rows_on_rank(world: World, split_dir: Path, num_lanes: int, micro_lanes: int) -> list[list[int]]:
    return rows_of_forwards(read_index(split_dir), num_lanes=num_lanes, micro_lanes=micro_lanes, world=world)


NUM_SEGMENTS = sum(-(-length // SEG_LEN) for length in LENGTHS)


@pytest.mark.parametrize(("num_lanes", "micro_lanes"), [(1, 1), (3, 2), (8, 8), (10, 4), (50, 16)])
def test_no_idle_lane_is_computed(index: Index, num_lanes: int, micro_lanes: int) -> None:
    """Neither lanes beyond the number of documents, nor those that have run out while others still read."""
    rows = rows_of_forwards(index, num_lanes=num_lanes, micro_lanes=micro_lanes)
    assert all(valid_len > 0 for batch in rows for valid_len in batch)
    assert sum(map(len, rows)) == NUM_SEGMENTS


@pytest.mark.parametrize(("num_lanes", "micro_lanes"), [(3, 1), (5, 2), (50, 3)])
@pytest.mark.parametrize("size", [2, 4])
def test_every_rank_makes_the_same_number_of_forwards(
    index: Index, rank_pool: Callable[[int], RankPool], size: int, num_lanes: int, micro_lanes: int
) -> None:
    """With ZeRO each gathers parameters; a rank without a lane left makes them with one idle row."""
    ranks = rank_pool(size).run(rows_on_rank, index.split_dir, num_lanes, micro_lanes)
    assert len({len(rows) for rows in ranks}) == 1
    assert sum(valid_len > 0 for rows in ranks for batch in rows for valid_len in batch) == NUM_SEGMENTS
    assert all(batch == [0] for rows in ranks for batch in rows if 0 in batch)


@pytest.mark.parametrize(("num_lanes", "micro_lanes"), [(3, 3), (8, 8), (10, 4)])
def test_rows_that_are_left_out_change_no_bit(index: Index, num_lanes: int, micro_lanes: int) -> None:
    """Against forwards that are filled up with idle lanes, as all were before.

    In segments of 32: with a handful of rows, a matrix product rounds by their number (docs/howto/evaluate.md).
    """
    model, seg_len = make_model(), 32

    def filled(tokens: Tensor, targets: Tensor, valid_len: Tensor, *, state: LMState) -> LMOutput:
        num_rows, num_idle = len(tokens), micro_lanes - len(tokens)
        idle = model.init_state(torch.zeros(num_idle, dtype=torch.int64), "cpu", torch.float32)
        output = model(
            torch.cat([tokens, tokens.new_zeros(num_idle, seg_len)]),
            torch.cat([targets, targets.new_full((num_idle, seg_len), IGNORE)]),
            torch.cat([valid_len, valid_len.new_zeros(num_idle)]),
            state=map_state(lambda *parts: torch.cat(parts), state, idle),
        )
        assert output.hits is not None
        state = map_state(lambda part: part[:num_rows], output.state)
        return output._replace(nll=output.nll[:num_rows], hits=output.hits[:num_rows], state=state)

    def scored(forward: Any) -> Report:
        sizes = {"num_lanes": num_lanes, "micro_lanes": micro_lanes, "seg_len": seg_len}
        return score(index, forward, init_state=lambda ids: model.init_state(ids, "cpu", torch.float32), **sizes)

    assert scored(model) == scored(filled)


def test_evaluation_leaves_random_numbers_and_parameters_alone(index: Index) -> None:
    model = make_model()
    parameters = [parameter.clone() for parameter in model.parameters()]
    random_state = torch.get_rng_state()
    score(index, model)
    assert torch.equal(torch.get_rng_state(), random_state)
    assert all(torch.equal(before, after) for before, after in zip(parameters, model.parameters(), strict=True))
    assert all(parameter.grad is None for parameter in model.parameters())


def test_cut_documents_count_the_words_and_bytes_that_were_scored(index: Index) -> None:
    model = make_model()
    report = score(index, model, max_document_len=20)
    for number, length in enumerate(LENGTHS):
        text = TOKENIZER.decode(make_document(number, length).tokens[:20])
        found = report.documents[number]
        assert (found.num_scored, found.words, found.bytes) == (min(length, 20), len(text.split()), len(text))
    assert report.documents[0].nll == pytest.approx(math.fsum(score_alone(model, make_document(0, 100).tokens[:20])))
    assert report.num_words == sum(document.words for document in report.documents)


def test_the_official_word_count_is_used_for_a_whole_split_only(tmp_path: Path) -> None:
    index = write_split(
        [make_document(0, 100)],
        tmp_path,
        name="tiny",
        split="test",
        tokenizer_fingerprint=TOKENIZER.fingerprint,
        official_words=7,
    )
    assert score(index, make_model()).num_words == 7
    assert score(index, make_model(), max_document_len=50).num_words < 7 + 50


def test_masked_tokens_are_read_but_not_scored(tmp_path: Path) -> None:
    tokens = TOKENIZER.encode("question one? answer two three. question? answer four.")
    mask = np.zeros(len(tokens), dtype=bool)
    mask[14:32] = mask[43:] = True
    document = TokenizedDocument("chat", "Chat", None, 9, len(tokens), tokens, mask=mask)
    index = write_split([document], tmp_path, name="chat", split="test", tokenizer_fingerprint=TOKENIZER.fingerprint)
    model = make_model()
    report = score(index, model)
    losses = score_alone(model, tokens)
    scored = report.documents[0]
    assert scored.nll == pytest.approx(
        math.fsum(loss for loss, counts in zip(losses, mask, strict=True) if counts), rel=1e-6
    )
    assert (scored.num_scored, scored.words, scored.bytes) == (29, 5, 29)
    assert report.recall == []


def test_a_split_of_which_nothing_is_scored_is_an_error(tmp_path: Path) -> None:
    """As when `max_document_len` ends before the answers of the sorting task: no figure, and none to divide by."""
    tokens = TOKENIZER.encode("question one? answer")
    mask = np.arange(len(tokens)) > 13
    document = TokenizedDocument("chat", "Chat", None, 3, len(tokens), tokens, mask=mask)
    index = write_split([document], tmp_path, name="chat", split="test", tokenizer_fingerprint=TOKENIZER.fingerprint)
    assert score(index, make_model()).num_scored == 6
    with refused(EvaluationError, "max_document_len"):
        score(index, make_model(), max_document_len=14)


def test_a_token_that_is_not_scored_is_an_error(index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    batches = scoring.evaluation_batches
    monkeypatch.setattr(scoring, "evaluation_batches", lambda *args, **kwargs: list(batches(*args, **kwargs))[:-1])
    with refused(EvaluationError):
        score(index, make_model(), num_lanes=9)


def test_a_loss_that_is_not_finite_is_an_error(index: Index) -> None:
    model = make_model()
    with torch.no_grad():
        next(model.parameters()).fill_(math.nan)
    with refused(EvaluationError):
        score(index, model)


@pytest.fixture
def damaged(library: Path, tmp_path: Path) -> Index:
    """The split with one flipped bit in document 5."""
    for path in (library / "test").iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    index = read_index(tmp_path)
    shard = tmp_path / index.shards[0].name
    content = bytearray(shard.read_bytes())
    content[index.documents[5].tokens_offset] ^= 1
    shard.write_bytes(content)
    return index


def test_a_damaged_document_is_named_before_any_forward(damaged: Index) -> None:
    with refused(ValueError):
        score(damaged, lambda *args, **kwargs: pytest.fail("forward"))


def score_on_rank(world: World, split_dir: Path) -> Report:
    return score(read_index(split_dir), make_model(), num_lanes=5, world=world)


def test_a_damaged_document_stops_every_rank(damaged: Index, rank_pool: Callable[[int], RankPool]) -> None:
    with pytest.raises(AssertionError) as caught:
        rank_pool(2).run(score_on_rank, damaged.split_dir)
    ranks = str(caught.value).split("rank 1:\n")
    assert len(ranks) == 2
    assert all("UnusableError: " in text and "document doc5" in text and "is damaged" in text for text in ranks)
