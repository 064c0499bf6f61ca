"""`data.blocks`: segments as Hugging Face's run_clm cuts them, in training, evaluation and generation."""

import json
import math
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from dist_mem.__main__ import main
from dist_mem.config import Config, ConfigError, change_config, load_config, save_config
from dist_mem.config.resume_rules import check_changes
from dist_mem.data.shard import Index, TokenizedDocument, read_index, write_split
from dist_mem.data.tokenizers.registry import save_tokenizer
from dist_mem.errors import EXIT_DONE
from dist_mem.evaluation.protocol import for_evaluation, protocol_of, tag_of
from dist_mem.evaluation.scores import Report, read_report, same_text, to_csv, to_table
from dist_mem.evaluation.scoring import EvaluationError
from dist_mem.evaluation.trained_model import TrainedModel
from dist_mem.generation.reading import next_log_probs, read, start
from dist_mem.generation.text_scores import score as score_text
from dist_mem.memory import memory_kinds, memory_options
from dist_mem.runtime.distributed import World
from dist_mem.tracking.log import METRICS_FILE, read_points
from tests.support.generating import check_reads_as_anew, prompts, trained_model
from tests.support.gpt2_models import gpt2_config, save_random_gpt2
from tests.support.jobs import build_books, train_here, write_config
from tests.support.lane_corpus import LAYOUTS
from tests.support.messages import refused
from tests.support.paths import ROOT
from tests.support.ranks import Pools
from tests.support.saved_reports import save_report
from tests.support.scored_library import (
    ALONE,
    LENGTHS,
    TOKENIZER,
    assert_same,
    make_config,
    make_document,
    make_model,
    score,
)

EVAL_LEN = 8  # T of the evaluations


def test_a_run_trains_in_blocks_also_where_an_update_has_no_target(tmp_path: Path, rank_pool: Pools) -> None:
    """Of documents cut to 17 tokens every second segment is one token, which no loss comes from."""
    blocks = {
        "data": {"blocks": True, "max_document_len": 17},
        "train": {"global_batch_size": 1, "micro_batch_size": 1, "steps": 4},
        "eval": {"every": 4, "batch_size": 2},
    }
    config = write_config(tmp_path / "run.yaml", build_books(tmp_path / "books"), tmp_path / "run", blocks)
    assert rank_pool(1).run(train_here, config) == [0]
    points = [point.metrics for point in read_points(tmp_path / "run" / METRICS_FILE)]
    found = [point["loss"] for point in points if "loss" in point]
    assert [math.isfinite(loss) for loss in found] == [True, False, True, False]
    (evaluation,) = [point for point in points if "validation/token_perplexity" in point]
    assert "validation/word_perplexity" not in evaluation


# Evaluation


def write_documents(folder: Path, masks: dict[int, np.ndarray] | None = None) -> Index:
    """The documents of scored_library.py, some of them with a mask."""
    documents = [
        replace(make_document(number, length), mask=(masks or {}).get(number)) for number, length in enumerate(LENGTHS)
    ]
    save_tokenizer(TOKENIZER, folder)
    return write_split(
        documents, folder / "test", name="tiny", split="test", tokenizer_fingerprint=TOKENIZER.fingerprint
    )


def scored(world: World, library: Path, evaluation: dict[str, Any]) -> Report:
    """The test split scored by the model of scored_library.py; runs in a rank of a pool too."""
    return score(read_index(library / "test"), make_model(), world=world, **evaluation)


@torch.no_grad()
def plain_losses(parts: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """NLL of every token and which is scored, for token rows that are read each by itself; 0 where it is not."""
    model, losses, is_scored = make_model(), [], []
    for tokens in parts:
        state = model.init_state(torch.zeros(1, dtype=torch.int64), "cpu", torch.float32)
        for begin in range(0, len(tokens), EVAL_LEN):
            own = torch.from_numpy(tokens[begin : begin + EVAL_LEN].astype(np.int64))
            padded = torch.zeros(1, EVAL_LEN, dtype=torch.int64)
            padded[0, : len(own)] = own
            log_probs, state = model.log_probs(padded, torch.tensor([len(own)]), state=state)
            losses += [0.0, *(-log_probs[0, range(len(own) - 1), own[1:]]).tolist()]
            is_scored += [False] + [True] * (len(own) - 1)
    return np.array(losses), np.array(is_scored)


def parts_of(layout: str) -> list[np.ndarray]:
    """What is read with a memory that begins empty: each document, or each of three lanes' part of the stream."""
    documents = [make_document(number, length).tokens for number, length in enumerate(LENGTHS)]
    if layout == "documents":
        return documents
    corpus = np.concatenate(documents)
    bounds = [round(lane * len(corpus) / 3) for lane in range(4)]
    return [corpus[first:last] for first, last in pairwise(bounds)]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("with_masks", [False, True])
def test_an_evaluation_scores_all_but_the_first_of_each_block(tmp_path: Path, layout: str, with_masks: bool) -> None:
    masks = {0: np.arange(100) % 3 == 0, 5: np.arange(41) % EVAL_LEN != 0} if with_masks else {}
    write_documents(tmp_path, masks)
    losses, is_target = plain_losses(parts_of(layout))
    report = scored(ALONE, tmp_path, {"layout": layout, "blocks": True})
    ends = np.cumsum(LENGTHS)
    for number, (found, end, length) in enumerate(zip(report.documents, ends, LENGTHS, strict=True)):
        own = slice(end - length, end)
        counted = is_target[own] & masks.get(number, np.True_)
        assert found.num_scored == found.bytes == counted.sum()  # a byte is a token here
        assert found.nll == pytest.approx(losses[own][counted].sum(), rel=1e-6)
    assert report.num_scored < sum(LENGTHS) and report.recall
    assert sum(distance.num_scored for distance in report.recall) < report.num_scored


def test_words_are_reported_only_where_no_token_is_left_out(tmp_path: Path) -> None:
    """A mask that does not score the first of any block anyway leaves the runs of words whole."""
    write_documents(tmp_path, {5: np.arange(41) % EVAL_LEN != 0})
    report, whole = (scored(ALONE, tmp_path, {"blocks": blocks}) for blocks in (True, False))
    assert [found.words for found in report.documents] == [
        (0 if not length else whole.documents[number].words if number == 5 else None)
        for number, length in enumerate(LENGTHS)
    ]
    assert whole.num_words is not None and report.num_words is None
    assert math.isnan(report.word_perplexity)
    assert "test/word_perplexity" in whole.metrics() and "test/word_perplexity" not in report.metrics()
    assert not same_text([whole, report])
    paths = save_report(report, tmp_path / "evaluations", "test")
    assert read_report(paths[1]) == report
    assert "NaN" not in paths[1].read_text()
    rows = to_table(report, rows=len(LENGTHS)).splitlines()
    assert len({len(row) for row in rows[: 2 + len(LENGTHS)]}) == 1 and rows[1].split().count("n/a") == 2
    assert to_csv(report.documents).splitlines()[1].split(",")[3] == ""


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_number_of_ranks_changes_no_metric(library: Path, rank_pool: Pools, layout: str) -> None:
    evaluation = {"layout": layout, "blocks": True}
    reports = rank_pool(2).run(scored, library, evaluation)
    assert reports[0] == reports[1]
    assert_same(reports[0], scored(ALONE, library, evaluation))


def test_a_split_of_single_tokens_has_no_metric(tmp_path: Path) -> None:
    document = make_document(0, 1)
    write_split([document], tmp_path / "test", name="x", split="test", tokenizer_fingerprint=TOKENIZER.fingerprint)
    assert scored(ALONE, tmp_path, {}).num_scored == 1
    with refused(EvaluationError, tmp_path / "test", "no token is scored"):
        scored(ALONE, tmp_path, {"blocks": True})


def test_an_evaluation_goes_by_the_training_unless_reported_otherwise() -> None:
    config = make_config(data={"blocks": True})
    assert protocol_of(config).blocks and tag_of(config) == ""
    assert str(protocol_of(config)) == "T 8, M 16, documents, blocks (their first tokens are not scored)"
    config = change_config(config, {"eval.blocks": False})
    assert not protocol_of(config).blocks and tag_of(config) == "blocks_false"
    config = for_evaluation(config)
    assert not config.data.blocks
    assert tag_of(make_config(eval={"blocks": True, "seg_len": 4})) == "T4-blocks_true"


def test_a_text_is_scored_in_blocks_too() -> None:
    config = make_config(data={"blocks": True})
    checkpoint: Any = None
    trained = TrainedModel(make_model(), TOKENIZER, config, checkpoint, torch.device("cpu"), torch.float32)
    tokens = make_document(0, 41).tokens
    losses, is_target = plain_losses([tokens])
    nll = score_text(trained, TOKENIZER.decode(tokens)).nll
    assert torch.equal(nll.isnan(), torch.from_numpy(~is_target))
    assert nll.nan_to_num().tolist() == pytest.approx(losses.tolist(), rel=1e-5)


# GPT-2


def write_stream(folder: Path, split: str, lengths: tuple[int, ...]) -> Tensor:
    """A split of documents of random bytes; returns them end to end."""
    random = np.random.default_rng(len(lengths))
    documents = [
        TokenizedDocument(str(number), "A", None, length, length, random.integers(0, 256, length).astype(np.uint16))
        for number, length in enumerate(lengths)
    ]
    write_split(documents, folder / split, name="x", split=split, tokenizer_fingerprint=TOKENIZER.fingerprint)
    return torch.from_numpy(np.concatenate([document.tokens for document in documents]).astype(np.int64))


@pytest.mark.usefixtures("single_process")
def test_losses_are_those_of_transformers_block_after_block(tmp_path: Path) -> None:
    """The published evaluation: blocks of T tokens, labels that are the inputs, the mean of the blocks' losses."""
    pytest.importorskip("transformers", reason="transformers is not installed")
    save_tokenizer(TOKENIZER, tmp_path / "data")
    whole = write_stream(tmp_path / "data", "test", (203, 437))
    ragged = write_stream(tmp_path / "data", "validation", (203, 437, 5))
    theirs = save_random_gpt2(tmp_path / "gpt2", vocab_size=TOKENIZER.vocab_size)
    settings = gpt2_config(
        data={"path": str(tmp_path / "data"), "layout": "stream", "blocks": True},
        model={"pretrained": str(tmp_path / "gpt2")},
        train={"seg_len": 16},
        eval={"layout": "stream", "batch_size": 1},
    )
    save_config(settings, tmp_path / "run.yaml")
    zero_shot = tmp_path / "zero_shot"
    assert main(["export", str(tmp_path / "run.yaml"), "--out", str(zero_shot)]) == EXIT_DONE

    def evaluated(split: str, *overrides: str) -> tuple[Report, bool]:
        data = [f"data.path={tmp_path / 'data'}", "--split", split]
        assert main(["evaluate", str(zero_shot), *data, *overrides]) == EXIT_DONE
        tag = "-blocks_false" if overrides else ""
        named = f"x_{read_index(tmp_path / 'data' / split).fingerprint[:6]}"  # it has seen no data of its own
        path = zero_shot / "evaluations" / f"{split}-step-00000000-{named}-stream1{tag}.json"
        return read_report(path), json.loads(path.read_text())["protocol"]["blocks"]

    def loss_of(block: Tensor) -> float:
        with torch.no_grad():
            return float(theirs(block[None], labels=block[None]).loss)

    losses = [loss_of(block) for block in whole.split(16)]
    report, blocks = evaluated("test")
    assert (report.num_scored, blocks) == (40 * 15, True)
    assert report.nll / report.num_scored == pytest.approx(sum(losses) / len(losses), abs=1e-5)

    report, _ = evaluated("validation")  # they drop the last block, we score its 4 targets
    *losses, last = [loss_of(block) for block in ragged.split(16)]
    assert report.num_scored == 40 * 15 + 4
    assert report.nll == pytest.approx(15 * sum(losses) + 4 * last, rel=1e-6)

    report, blocks = evaluated("test", "eval.blocks=false")
    assert (report.num_scored, blocks) == (640, False)


# Generation


@pytest.mark.parametrize("case", [*memory_kinds(), "infinite over compressive"])
def test_generation_equals_reading_the_document_anew_without_bos(case: str) -> None:
    """Variants of memories read blocks as they read documents, for which test_generation.py has them."""
    check_reads_as_anew(trained_model(case, blocks=True))


def test_how_tokens_came_to_be_read_does_not_matter_and_nothing_read_is_reported() -> None:
    trained, prompt = trained_model(blocks=True), prompts()[-1]
    at_once, piecewise = read(trained, start(trained), [prompt]), read(trained, start(trained), [prompt[:0]])
    with refused(ValueError, "data.blocks", "eval.blocks"):
        next_log_probs(trained, piecewise)
    for token in prompt:
        piecewise = read(trained, piecewise, [token[None]])
    assert torch.equal(next_log_probs(trained, at_once), next_log_probs(trained, piecewise))
    assert torch.equal(at_once.open_tokens, piecewise.open_tokens)
    assert torch.equal(at_once.open_len, piecewise.open_len)


# Configuration


def load(*overrides: str) -> Config:
    return load_config([*overrides, "train.steps=1"], memory_options=memory_options)


def test_a_run_cannot_change_to_blocks_but_its_evaluation_can() -> None:
    with refused(ConfigError, "data.blocks"):
        check_changes(load(), load("data.blocks=true"), allowed=["data"])
    assert [change.key for change in check_changes(load(), load("eval.blocks=true"))] == ["eval.blocks"]


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (["data.blocks=true", "train.seg_len=1"], "data.blocks"),
        (["data.blocks=true", "eval.seg_len=1"], "eval.blocks"),
        (["eval.blocks=true", "train.seg_len=1"], "eval.blocks"),
    ],
)
def test_blocks_of_one_token_are_refused(overrides: list[str], key: str) -> None:
    with refused(ConfigError, key):
        load("memory.kind=none", *overrides)
    load("memory.kind=none", "train.seg_len=1")
    load("data.blocks=true", "eval.seg_len=1", "eval.blocks=false")


def test_the_papers_gpt2_is_read_in_blocks() -> None:
    config = load(str(ROOT / "configs" / "papers" / "gpt2.yaml"), "train.epochs=null")
    assert config.data.blocks and protocol_of(config).blocks
