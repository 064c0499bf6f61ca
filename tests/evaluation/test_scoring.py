"""Scoring: every token once, as if its document were alone; what cannot be right is an error."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from dist_mem.data.batch import IGNORE
from dist_mem.data.shard import Index, ShardError, TokenizedDocument, read_index, write_split
from dist_mem.evaluation import scoring
from dist_mem.evaluation.scores import Report
from dist_mem.evaluation.scoring import EvaluationError
from dist_mem.memory.base import map_state
from dist_mem.model import LMOutput, LMState, MemoryLM
from dist_mem.runtime.distributed import World
from tests.support.faults import flip
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


DOCUMENTS = [make_document(number, length) for number, length in enumerate(LENGTHS)]


@torch.no_grad()
def read_plainly(
    model: MemoryLM, tokens: np.ndarray, inputs: np.ndarray | None = None, *, document: int = 0, forgets: bool = False
) -> np.ndarray:
    """NLL of every token, and whether it is the likeliest, (2, N): one lane, segment after segment, written plainly.

    Args:
        inputs: the token before each; without them the text begins a document.
        document: its number, which a memory may draw by.
        forgets: whether every segment is read with a fresh memory.
    """
    inputs = np.concatenate(([TOKENIZER.bos_id], tokens[:-1])) if inputs is None else inputs
    found = np.zeros((2, len(tokens)))
    state = fresh = model.init_state(torch.tensor([document]), "cpu", torch.float32)
    for begin in range(0, len(tokens), SEG_LEN):
        length = len(tokens[begin : begin + SEG_LEN])
        segment = torch.zeros(1, SEG_LEN, dtype=torch.int64)
        segment[0, :length] = torch.from_numpy(inputs[begin : begin + length].astype(np.int64))
        targets = torch.from_numpy(tokens[begin : begin + length].astype(np.int64))
        log_probs, read = model.log_probs(segment, torch.tensor([length]), state=state)
        found[0, begin : begin + length] = -log_probs[0, :length].gather(1, targets[:, None])[:, 0].numpy()
        found[1, begin : begin + length] = (log_probs[0, :length].argmax(-1) == targets).numpy()
        state = fresh if forgets else read
    return found


def by_distance(values: np.ndarray, recall: np.ndarray) -> dict[int, float]:
    """The sum of the values of all tokens that recall something, by the distance to it."""
    return {distance: math.fsum(values[recall == distance]) for distance in np.unique(recall[recall > 0]).tolist()}


def test_every_document_scores_as_if_it_were_alone(index: Index) -> None:
    model = make_model()
    report = score(index, model)
    losses = [read_plainly(model, document.tokens)[0] for document in DOCUMENTS]
    assert [found.nll for found in report.documents] == pytest.approx([math.fsum(each) for each in losses], rel=1e-6)
    assert [found.num_scored for found in report.documents] == list(LENGTHS)
    expected = by_distance(np.concatenate(losses), np.concatenate([document.recall for document in DOCUMENTS]))
    assert {score.distance: score.nll for score in report.recall} == pytest.approx(expected, rel=1e-6)
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


@pytest.mark.parametrize(("num_lanes", "micro_lanes"), [(3, 1), (10, 4), (50, 3)])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_no_idle_lane_is_computed(
    index: Index, rank_pool: Callable[[int], RankPool], size: int, num_lanes: int, micro_lanes: int
) -> None:
    """Neither lanes beyond the number of documents, nor those that have run out while others still read.

    Every rank makes the same number of forwards: with ZeRO each gathers parameters. One without a lane left makes them
    with one idle row.
    """
    if size == 1:
        ranks = [rows_of_forwards(index, num_lanes=num_lanes, micro_lanes=micro_lanes)]
        assert [0] not in ranks[0]
    else:
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
    for document, found in zip(DOCUMENTS, report.documents, strict=True):
        text = TOKENIZER.decode(document.tokens[:20])
        assert (found.num_scored, found.words, found.bytes) == (len(text), len(text.split()), len(text))
    assert report.documents[0].nll == pytest.approx(read_plainly(model, DOCUMENTS[0].tokens[:20])[0].sum())
    assert report.num_words == sum(document.words for document in report.documents)


def write_one(folder: Path, document: TokenizedDocument, **facts: Any) -> Index:
    """A split of one document."""
    fingerprint = TOKENIZER.fingerprint
    return write_split([document], folder, name="one", split="test", tokenizer_fingerprint=fingerprint, **facts)


def test_the_official_word_count_is_used_for_a_whole_split_only(tmp_path: Path) -> None:
    index = write_one(tmp_path, DOCUMENTS[0], official_words=7)
    assert score(index, make_model()).num_words == 7
    assert score(index, make_model(), max_document_len=50).num_words < 7 + 50


def test_masked_tokens_are_read_but_not_scored(tmp_path: Path) -> None:
    """A split of which nothing is scored has no figure, as when `max_document_len` ends before all answers."""
    tokens = TOKENIZER.encode("question one? answer two three. question? answer four.")
    mask = np.zeros(len(tokens), dtype=bool)
    mask[14:32] = mask[43:] = True
    index = write_one(tmp_path, TokenizedDocument("chat", "Chat", None, 9, len(tokens), tokens, mask=mask))
    model = make_model()
    report = score(index, model)
    (scored,) = report.documents
    assert scored.nll == pytest.approx(read_plainly(model, tokens)[0][mask].sum(), rel=1e-6)
    assert (scored.num_scored, scored.words, scored.bytes) == (29, 5, 29)
    assert report.recall == []
    with refused(EvaluationError, "max_document_len"):
        score(index, model, max_document_len=14)


@pytest.mark.parametrize("layout", ["documents", "stream"])
def test_a_token_that_is_not_scored_is_an_error(index: Index, monkeypatch: pytest.MonkeyPatch, layout: str) -> None:
    name = "stream_batches" if layout == "stream" else "evaluation_batches"
    batches = getattr(scoring, name)

    def one_less(*args: Any, **kwargs: Any) -> Any:
        for number, groups in enumerate(batches(*args, **kwargs)):
            if number == 2:
                batch = groups[0] if layout == "documents" else groups[0][0]
                batch.targets[0, 3] = IGNORE
            yield groups

    monkeypatch.setattr(scoring, name, one_less)
    with refused(EvaluationError):
        score(index, make_model(), layout=layout)


def test_a_loss_that_is_not_finite_is_an_error(index: Index) -> None:
    model = make_model()
    with torch.no_grad():
        next(model.parameters()).fill_(math.nan)
    with refused(EvaluationError):
        score(index, model)


@pytest.fixture
def damaged(library: Path, tmp_path: Path) -> Index:
    """The split with one flipped bit in document 5."""
    index = read_index(shutil.copytree(library / "test", tmp_path / "test"))
    flip(index.split_dir / index.shards[0].name, index.documents[5].tokens_offset)
    return index


@pytest.mark.parametrize("layout", ["documents", "stream"])
def test_a_damaged_document_is_named_before_any_forward(damaged: Index, layout: str) -> None:
    """Amid which other ranks would wait."""
    with refused(ShardError):
        score(damaged, make_model(), layout=layout, init_state=lambda lane_ids: pytest.fail("forward"))


def score_on_rank(world: World, split_dir: Path) -> Report:
    return score(read_index(split_dir), make_model(), num_lanes=5, world=world)


def test_a_damaged_document_stops_every_rank(damaged: Index, rank_pool: Callable[[int], RankPool]) -> None:
    with pytest.raises(AssertionError) as caught:
        rank_pool(2).run(score_on_rank, damaged.split_dir)
    ranks = str(caught.value).split("rank 1:\n")
    assert len(ranks) == 2
    assert all("UnusableError: " in text and "document doc5" in text and "is damaged" in text for text in ranks)
