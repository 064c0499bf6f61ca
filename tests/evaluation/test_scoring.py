"""Scoring of documents and of a stream: every token once, right or not; what cannot be right is an error."""

import math
import shutil
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from dist_mem.block import model_spec
from dist_mem.config import change_config
from dist_mem.data.batch import IGNORE
from dist_mem.data.shard import Index, TokenizedDocument, read_index, write_split
from dist_mem.data.tokenizers.words import EOS, WordTokenizer
from dist_mem.engine.engine import Engine
from dist_mem.errors import UnusableError
from dist_mem.evaluation import split_layout
from dist_mem.evaluation.scores import Report
from dist_mem.evaluation.scoring import EvaluationError, score_split
from dist_mem.memory.base import map_state
from dist_mem.model import LMOutput, LMState, MemoryLM
from dist_mem.nn.vocabulary import Softmax, adaptive_bins, plain_bin
from dist_mem.runtime.distributed import World
from dist_mem.training.opening import check_evaluated
from tests.support.faults import flip
from tests.support.messages import refused
from tests.support.plain_scores import DOCUMENTS, read_plainly
from tests.support.ranks import Pools
from tests.support.scored_library import (
    ALONE,
    LENGTHS,
    MEM_LEN,
    SEG_LEN,
    TOKENIZER,
    assert_same,
    make_config,
    make_document,
    make_model,
    score,
)
from tests.support.tiny import zero_block

RECALL: list[Any] = [document.recall for document in DOCUMENTS]


def by_distance(values: np.ndarray, recall: np.ndarray) -> dict[int, float]:
    """The sum of the values of all tokens that recall something, by the distance to it."""
    return {distance: math.fsum(values[recall == distance]) for distance in np.unique(recall[recall > 0]).tolist()}


def scored_of(number: int) -> np.ndarray:
    """Which tokens of a document are scored in a masked split: in those of odd number some, in one of them none."""
    places = np.arange(LENGTHS[number])
    return places % number == 2 if number % 2 else places >= 0


def write(folder: Path, *documents: TokenizedDocument, **facts: Any) -> Index:
    fingerprint = TOKENIZER.fingerprint
    return write_split(documents, folder, name="tiny", split="test", tokenizer_fingerprint=fingerprint, **facts)


def write_masked(folder: Path) -> Index:
    return write(folder, *(replace(document, mask=scored_of(number)) for number, document in enumerate(DOCUMENTS)))


def check_report(report: Report, index: Index, scores: Sequence[np.ndarray], *, masked: bool) -> None:
    """Against the loss of every token, and whether it is a hit, (2, N) of every document."""
    masks = [scored_of(number) if masked else np.ones(length, dtype=bool) for number, length in enumerate(LENGTHS)]
    kept = [part[:, scored] for part, scored in zip(scores, masks, strict=True)]
    assert [found.num_scored for found in report.documents] == [part.shape[1] for part in kept]
    assert [found.nll for found in report.documents] == pytest.approx([part[0].sum() for part in kept], rel=1e-6)
    assert [found.hits for found in report.documents] == [part[1].sum() for part in kept]
    losses, hits = np.concatenate(kept, axis=1)
    recall = np.concatenate([part[scored] for part, scored in zip(RECALL, masks, strict=True)])
    nll, number = by_distance(losses, recall), by_distance(np.ones_like(hits), recall)
    assert {score.distance: score.nll for score in report.recall} == pytest.approx(nll, rel=1e-6)
    assert {score.distance: (score.num_scored, score.hits) for score in report.recall} == {
        distance: (number[distance], at) for distance, at in by_distance(hits, recall).items()
    }
    near = hits[(recall > SEG_LEN) & (recall <= 3 * SEG_LEN)]  # within the short-term memory
    assert report.metrics()["test/recall_accuracy_memory"] == near.mean()
    assert report.metrics()["test/accuracy"] == hits.mean()
    if not masked:
        assert report.num_scored == index.num_tokens == sum(LENGTHS)
        assert report.word_perplexity == pytest.approx(math.exp(losses.sum() / index.num_words))
        assert report.bits_per_byte == pytest.approx(losses.sum() / math.log(2) / sum(LENGTHS))


VOCABULARIES: dict[str, dict[str, Any]] = {
    "plain": {},
    "adaptive": {"adaptive": {"cutoffs": [40, 120], "div_val": 1}},
    "adaptive, narrow": {"adaptive": {"cutoffs": [3, 120], "div_val": 2}},
}


@cache
def learnt_a_little(vocabulary: str) -> MemoryLM:
    """Return a model that hits and misses."""
    torch.manual_seed(1)
    model = MemoryLM(model_spec(make_config(model={"init_std": 0.1, **VOCABULARIES[vocabulary]}), TOKENIZER.vocab_size))
    text = torch.from_numpy(make_document(0, 8 * SEG_LEN + 1).tokens.astype(np.int64))
    tokens, targets, full = text[:-1].view(8, SEG_LEN), text[1:].view(8, SEG_LEN), torch.full((8,), SEG_LEN)
    state = model.init_state(torch.arange(8), "cpu", torch.float32)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(40):
        optimizer.zero_grad()
        model(tokens, targets, full, state=state).nll.mean().backward()
        optimizer.step()
    return model.eval()


@pytest.mark.parametrize(
    ("vocabulary", "num_lanes", "micro_lanes"),
    [("plain", 3, 2), ("plain", 1, 1), ("plain", 16, 4), ("adaptive", 5, 2), ("adaptive, narrow", 9, 3)],
)
@pytest.mark.parametrize("masked", [False, True])
def test_every_document_scores_as_if_it_were_alone(
    index: Index, tmp_path: Path, vocabulary: str, masked: bool, num_lanes: int, micro_lanes: int
) -> None:
    index, model = write_masked(tmp_path) if masked else index, learnt_a_little(vocabulary)
    report = score(index, model, num_lanes=num_lanes, micro_lanes=micro_lanes)
    check_report(report, index, [read_plainly(model, each.tokens) for each in DOCUMENTS], masked=masked)
    assert 0.1 < report.accuracy < 0.9 and 0 < report.metrics()["test/recall_accuracy_memory"] < 1


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
def test_no_idle_lane_is_computed(index: Index, rank_pool: Pools, size: int, num_lanes: int, micro_lanes: int) -> None:
    """Neither lanes beyond the number of documents, nor those that have run out while others still read.

    Every rank makes the same number of forwards: with ZeRO each gathers parameters. One without a lane left makes them
    with one idle row.
    """
    if size == 1:
        ranks = [rows_of_forwards(index, num_lanes=num_lanes, micro_lanes=micro_lanes)]
        assert [0] not in ranks[0]
        assert max(len(valid_len) for valid_len in ranks[0]) == min(num_lanes, micro_lanes)
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
        sizes: dict[str, Any] = {"num_lanes": num_lanes, "micro_lanes": micro_lanes, "seg_len": seg_len}
        return score(index, forward, init_state=lambda ids: model.init_state(ids, "cpu", torch.float32), **sizes)

    assert scored(model) == scored(filled)


def test_segments_are_as_long_as_the_keys_of_eval_say_amid_a_training_too(index: Index) -> None:
    model = make_model()
    given: dict[str, Any] = {"index": index, "tokenizer": TOKENIZER, "world": ALONE}
    found, expected = (
        score_split(model, lambda ids: model.init_state(ids, "cpu", torch.float32), config=config, **given)
        for config in (make_config(eval={"seg_len": 4}), make_config(train={"seg_len": 4}))
    )
    assert found == expected and (found.seg_len, found.mem_len) == (4, MEM_LEN)


def test_evaluation_leaves_random_numbers_and_parameters_alone(index: Index) -> None:
    model = make_model()
    parameters = [parameter.clone() for parameter in model.parameters()]
    random_state = torch.get_rng_state()
    score(index, model)
    assert torch.equal(torch.get_rng_state(), random_state)
    assert all(torch.equal(before, after) for before, after in zip(parameters, model.parameters(), strict=True))
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("layout", ["documents", "stream"])
def test_cut_documents_count_the_words_and_bytes_that_were_scored(index: Index, layout: str) -> None:
    model = make_model()
    report = score(index, model, max_document_len=20, layout=layout)
    assert report.max_document_len == 20
    for document, found in zip(DOCUMENTS, report.documents, strict=True):
        text = TOKENIZER.decode(document.tokens[:20])
        assert (found.num_scored, found.words, found.bytes) == (len(text), len(text.split()), len(text))
    assert report.documents[0].nll == pytest.approx(read_plainly(model, DOCUMENTS[0].tokens[:20])[0].sum())
    assert report.num_words == sum(document.words or 0 for document in report.documents)


def test_the_official_word_count_is_used_for_a_whole_split_only(tmp_path: Path) -> None:
    index = write(tmp_path, DOCUMENTS[0], official_words=7)
    assert score(index, make_model()).num_words == 7
    assert 0 < (score(index, make_model(), max_document_len=50).num_words or 0) < 7 + 50


@pytest.mark.parametrize("settings", [{}, {"max_document_len": 9}, {"blocks": True}])
def test_a_token_of_a_vocabulary_of_words_is_a_word_also_a_line_end(tmp_path: Path, settings: dict[str, Any]) -> None:
    """As published counts of WikiText have it: a cut of one token changes no more than that token."""
    words = WordTokenizer(["the", "cat", "sat", EOS])
    documents = []
    for number, text in enumerate(["the cat\nsat\n\n" * 4, "the\n"]):
        tokens = words.encode(text)
        documents.append(TokenizedDocument(str(number), "", None, len(text.split()), len(text), tokens))
    index = write_split(documents, tmp_path, name="tiny", split="test", tokenizer_fingerprint=words.fingerprint)
    report = score(index, make_model(), tokenizer=words, **settings)
    assert [found.words for found in report.documents] == [found.num_scored for found in report.documents]
    assert report.word_perplexity == pytest.approx(report.token_perplexity)


def test_of_masked_tokens_neither_words_nor_bytes_count(tmp_path: Path) -> None:
    """A split of which nothing is scored has no figure, as when `max_document_len` ends before all answers."""
    tokens = TOKENIZER.encode("question one? answer two three. question? answer four.")
    mask = np.zeros(len(tokens), dtype=bool)
    mask[14:32] = mask[43:] = True
    index = write(tmp_path, TokenizedDocument("chat", "Chat", None, 9, len(tokens), tokens, mask=mask))
    report = score(index, make_model())
    (scored,) = report.documents
    assert (scored.num_scored, scored.words, scored.bytes) == (29, 5, 29)
    assert report.recall == []
    with refused(EvaluationError, "max_document_len"):
        score(index, make_model(), max_document_len=14)


@pytest.mark.parametrize("layout", ["documents", "stream"])
def test_a_token_that_is_not_scored_is_an_error(index: Index, monkeypatch: pytest.MonkeyPatch, layout: str) -> None:
    name = "stream_batches" if layout == "stream" else "evaluation_batches"
    batches = getattr(split_layout, name)

    def one_less(*args: Any, **kwargs: Any) -> Any:
        for number, groups in enumerate(batches(*args, **kwargs)):
            if number == 2:
                batch = groups[0] if layout == "documents" else groups[0][0]
                batch.targets[0, 3] = IGNORE
            yield groups

    monkeypatch.setattr(split_layout, name, one_less)
    with refused(EvaluationError, "doc0", "99 tokens scored"):
        score(index, make_model(), layout=layout)


def test_a_loss_that_is_not_finite_is_an_error(index: Index) -> None:
    model = make_model()
    with torch.no_grad():
        next(model.parameters()).fill_(math.nan)
    with refused(EvaluationError, "doc0", "loss is nan"):
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
    with refused(UnusableError, "doc5", "checksum"):
        score(damaged, make_model(), layout=layout, init_state=lambda lane_ids: pytest.fail("forward"))


def score_on_rank(world: World, split_dir: Path, num_lanes: int = 5, layout: str = "documents") -> Report:
    return score(read_index(split_dir), make_model(), num_lanes=num_lanes, layout=layout, world=world)


def test_a_damaged_document_stops_every_rank(damaged: Index, rank_pool: Pools) -> None:
    with pytest.raises(AssertionError) as caught:
        rank_pool(2).run(score_on_rank, damaged.split_dir)
    ranks = str(caught.value).split("rank 1:\n")
    assert len(ranks) == 2
    assert all("UnusableError: " in text and "document doc5" in text and "is damaged" in text for text in ranks)


@pytest.mark.parametrize("stage", [0, 3])
def test_ranks_do_not_change_the_hits(tmp_path: Path, rank_pool: Pools, stage: int) -> None:
    index, model = write_masked(tmp_path), learnt_a_little("adaptive, narrow")
    expected = [found.hits for found in all_scores(score(index, model))]
    assert rank_pool(2).run(hits_on_ranks, tmp_path, stage) == [expected, expected]


def all_scores(report: Report) -> list[Any]:
    """By document, then by distance."""
    return [*report.documents, *report.recall]


def hits_on_ranks(world: World, split_dir: Path, stage: int) -> list[int | None]:
    config, model = make_config(model=VOCABULARIES["adaptive, narrow"]), learnt_a_little("adaptive, narrow")
    engine = Engine(model, config.train, config.optimizer, zero_block(stage), world_size=world.size, accumulation=1)
    engine.train(False)
    index = read_index(split_dir)
    report = score(index, engine, init_state=engine.init_state, micro_lanes=1, mem_len=0, world=world)
    return [found.hits for found in all_scores(report)]


VOCAB = 53


@pytest.mark.parametrize("kind", ["plain", "adaptive"])
@pytest.mark.parametrize("spread", [0.1, 1.0])
def test_every_token_of_the_vocabulary_can_be_a_hit(kind: str, spread: float) -> None:
    """Every target at every position: exactly one of them is a hit, and it is the argmax. One bin holds one token."""
    torch.manual_seed(0)
    sizes = {"d_model": 16, "d_embed": 16}
    adaptive = adaptive_bins(VOCAB, **sizes, cutoffs=[5, 20, 21], div_val=2, tie_projections=None)
    head = Softmax(adaptive if kind == "adaptive" else plain_bin(VOCAB, **sizes), d_model=16)
    assert head(torch.randn(1, 3, 16), torch.zeros(1, 3, dtype=torch.int64)).hits is None, "training does not ask"
    head.eval()
    for parameter in head.parameters():
        torch.nn.init.normal_(parameter, std=spread)
    hidden = torch.randn(1, 200, 16).expand(VOCAB, -1, -1)
    targets = torch.arange(VOCAB)[:, None].expand(-1, 200).contiguous()
    with torch.no_grad():
        hits = head(hidden, targets).hits
        best = head.log_probs(hidden[0]).argmax(-1)
    assert hits is not None
    assert torch.equal(hits.sum(0), torch.ones(200, dtype=torch.int64))
    assert torch.equal(hits.int().argmax(0), best)
    if kind == "adaptive" and spread == 1.0:
        assert {sum(int(token) >= edge for edge in (5, 20, 21)) for token in best} == {0, 1, 2, 3}
    ignored = head(hidden, torch.full_like(targets, IGNORE)).hits
    assert ignored is not None
    assert not ignored.any()


def test_a_model_that_does_not_say_has_no_accuracy(index: Index) -> None:
    model = make_model()

    def silent(*args: Any, **state: Any) -> Any:
        return model(*args, **state)._replace(hits=None)

    silent.init_state = model.init_state  # type: ignore[attr-defined]
    report = score(index, silent)
    assert {found.hits for found in all_scores(report) if found.num_scored} == {None}
    assert np.isnan(report.accuracy)


def plain_scores(num_lanes: int) -> np.ndarray:
    """NLL of every token of the stream, and which was the likeliest, (2, N): lane after lane."""
    model, tokens = make_model(), np.concatenate([document.tokens for document in DOCUMENTS])
    inputs = np.concatenate(([TOKENIZER.bos_id], tokens[:-1]))
    bounds = [round(lane * len(tokens) / num_lanes) for lane in range(num_lanes + 1)]
    parts = [read_plainly(model, tokens[first:last], inputs[first:last]) for first, last in pairwise(bounds)]
    return np.concatenate(parts, axis=1)


@pytest.mark.parametrize(("num_lanes", "masked"), [(1, False), (3, False), (7, False), (3, True)])
def test_every_token_of_a_stream_counts_once_for_its_own_document(
    index: Index, tmp_path: Path, num_lanes: int, masked: bool
) -> None:
    index = write_masked(tmp_path) if masked else index
    scores = np.split(plain_scores(num_lanes), np.cumsum(LENGTHS)[:-1], axis=1)
    check_report(score(index, make_model(), num_lanes=num_lanes, layout="stream"), index, scores, masked=masked)


def test_too_many_lanes_are_refused_before_the_training_too(index: Index, library: Path) -> None:
    with refused(ValueError, "eval.batch_size"):
        score(index, make_model(), num_lanes=1000, layout="stream")
    evaluation = {"every": 1, "split": "test", "layout": "stream", "batch_size": 1000}
    config = make_config(data={"path": str(library), "train_split": "test"}, eval=evaluation)
    with refused(ValueError, "eval.batch_size"):
        check_evaluated([index], TOKENIZER, config.eval)


def test_a_split_of_which_nothing_would_be_scored_is_refused_before_the_training(tmp_path: Path) -> None:
    """As of a recall task whose answers come later than what is read."""
    answers = [replace(document, mask=np.arange(len(document.tokens)) >= 8) for document in DOCUMENTS]
    index = write(tmp_path / "test", *answers)
    config = make_config(data={"path": str(tmp_path)}, eval={"split": "test", "max_document_len": 8})
    with refused(ValueError, "eval.max_document_len", tmp_path / "test"):
        check_evaluated([index], TOKENIZER, config.eval)
    config = change_config(config, {"eval.max_document_len": 9})
    check_evaluated([index], TOKENIZER, config.eval)


@pytest.mark.parametrize("num_lanes", [2, 5])  # of five, three ranks of four have two or one; the last has none
@pytest.mark.parametrize("size", [2, 4])
def test_the_number_of_ranks_changes_no_metric_of_a_stream(
    index: Index, rank_pool: Pools, size: int, num_lanes: int
) -> None:
    expected = score_on_rank(ALONE, index.split_dir, num_lanes, "stream")
    reports = rank_pool(size).run(score_on_rank, index.split_dir, num_lanes, "stream")
    assert all(report == reports[0] for report in reports)
    assert_same(reports[0], expected)
