"""Accuracy: scored tokens that the model holds for the most probable, for any vocabulary, lanes and ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dist_mem.data.batch import IGNORE
from dist_mem.data.shard import read_index, write_split
from dist_mem.data.tokenizers.registry import save_tokenizer
from dist_mem.engine.engine import Engine
from dist_mem.evaluation.scores import Report
from dist_mem.model import MemoryLM
from dist_mem.nn.vocabulary import Bin, Softmax, adaptive_bins, plain_bin
from dist_mem.runtime.distributed import World
from tests.evaluation.test_scoring import DOCUMENTS, by_distance, read_plainly
from tests.support.ranks import RankPool
from tests.support.scored_library import LENGTHS, SEG_LEN, TOKENIZER, make_config, make_document, score
from tests.support.tiny import zero_block

pytestmark = pytest.mark.ranks

VOCAB = 53
VOCABULARIES = {
    "plain": {},
    "adaptive": {"adaptive": {"cutoffs": [40, 120], "div_val": 1}},
    "adaptive, narrow": {"adaptive": {"cutoffs": [3, 120], "div_val": 2}},
}


def make_model(vocabulary: str) -> MemoryLM:
    """It has learnt a little of the documents, so that it hits and misses."""
    torch.manual_seed(1)
    model = MemoryLM(make_config(model={"init_std": 0.1, **VOCABULARIES[vocabulary]}), TOKENIZER.vocab_size)
    text = torch.from_numpy(make_document(0, 8 * SEG_LEN + 1).tokens.astype(np.int64))
    tokens, targets, full = text[:-1].view(8, SEG_LEN), text[1:].view(8, SEG_LEN), torch.full((8,), SEG_LEN)
    state = model.init_state(torch.arange(8), "cpu", torch.float32)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(40):
        optimizer.zero_grad()
        model(tokens, targets, full, state=state).nll.mean().backward()
        optimizer.step()
    return model.eval()


@pytest.fixture(scope="module")
def split_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Nine documents; in those of odd number only some tokens are scored, in one of them none."""
    folder = tmp_path_factory.mktemp("masked")
    save_tokenizer(TOKENIZER, folder)
    masked = [replace(document, mask=scored_of(number)) for number, document in enumerate(DOCUMENTS)]
    write_split(masked, folder / "test", name="tiny", split="test", tokenizer_fingerprint=TOKENIZER.fingerprint)
    return folder / "test"


def scored_of(number: int) -> np.ndarray:
    """Which tokens of a document are scored."""
    places = np.arange(LENGTHS[number])
    return places % number == 2 if number % 2 else places >= 0


@pytest.mark.parametrize("vocabulary", VOCABULARIES)
def test_accuracy_is_that_of_the_most_probable_tokens(split_dir: Path, vocabulary: str) -> None:
    model = make_model(vocabulary)
    report = score(read_index(split_dir), model)
    kept = [scored_of(number) for number in range(len(DOCUMENTS))]
    hits = [read_plainly(model, each.tokens)[1][scored] for each, scored in zip(DOCUMENTS, kept, strict=True)]
    recall = np.concatenate([each.recall[scored] for each, scored in zip(DOCUMENTS, kept, strict=True)])
    assert [document.hits for document in report.documents] == [each.sum() for each in hits]
    together = np.concatenate(hits)
    at, number = by_distance(together, recall), by_distance(np.ones_like(together), recall)
    assert {score.distance: (score.num_scored, score.hits) for score in report.recall} == {
        distance: (number[distance], at[distance]) for distance in at
    }
    near = together[(recall > SEG_LEN) & (recall <= 3 * SEG_LEN)]  # within the short-term memory
    assert report.metrics()["test/recall_accuracy_memory"] == near.mean() and 0 < near.mean() < 1
    assert report.metrics()["test/accuracy"] == together.mean() and 0.1 < together.mean() < 0.9
    assert len(together) == report.num_scored < sum(LENGTHS), "masked tokens do not count"


@pytest.mark.parametrize("stage", [0, 3])
def test_ranks_and_lanes_do_not_change_it(split_dir: Path, rank_pool: Callable[[int], RankPool], stage: int) -> None:
    index, model = read_index(split_dir), make_model("adaptive, narrow")
    expected = all_hits(score(index, model))
    assert all_hits(score(index, model, num_lanes=9, micro_lanes=3)) == expected
    assert rank_pool(2).run(hits_on_ranks, split_dir, stage) == [expected, expected]


def all_hits(report: Report) -> list[int | None]:
    """By document, then by distance."""
    return [score.hits for score in [*report.documents, *report.recall]]


def hits_on_ranks(world: World, split_dir: Path, stage: int) -> list[int | None]:
    config = make_config(model=VOCABULARIES["adaptive, narrow"])
    engine = Engine(make_model("adaptive, narrow"), config, zero_block(stage), world_size=world.size, accumulation=1)
    engine.train(False)
    index = read_index(split_dir)
    return all_hits(
        score(index, engine, init_state=engine.init_state, micro_lanes=1, seg_len=SEG_LEN, mem_len=0, world=world)
    )


def bins_of(kind: str) -> list[Bin]:
    if kind == "plain":
        return plain_bin(VOCAB, d_model=16, d_embed=16)
    return adaptive_bins(VOCAB, d_model=16, d_embed=16, cutoffs=[5, 20, 21], div_val=2, tie_projections=None)


@pytest.mark.parametrize("kind", ["plain", "adaptive"])
@pytest.mark.parametrize("spread", [0.1, 1.0])
def test_every_token_of_the_vocabulary_can_be_a_hit(kind: str, spread: float) -> None:
    """Every target at every position: exactly one of them is a hit, and it is the argmax. One bin holds one token."""
    torch.manual_seed(0)
    head = Softmax(bins_of(kind), d_model=16).eval()
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


@pytest.mark.parametrize("kind", ["plain", "adaptive"])
def test_training_does_not_ask(kind: str) -> None:
    head = Softmax(bins_of(kind), d_model=16)
    assert head(torch.randn(1, 3, 16), torch.zeros(1, 3, dtype=torch.int64)).hits is None


def test_a_model_that_does_not_say_has_no_accuracy(split_dir: Path) -> None:
    model = make_model("plain")

    def silent(*args: Any, **state: Any) -> Any:
        return model(*args, **state)._replace(hits=None)

    silent.init_state = model.init_state  # type: ignore[attr-defined]
    report: Report = score(read_index(split_dir), silent)
    assert {score.hits for score in [*report.documents, *report.recall] if score.num_scored} == {None}
    assert np.isnan(report.accuracy)
