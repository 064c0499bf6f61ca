"""Lanes: every token once, the same global batch for any number of ranks, a resume that no tensor can tell apart."""

from __future__ import annotations

from collections import Counter
from contextlib import closing
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from dist_mem.config import Config
from dist_mem.data.batch import IGNORE
from dist_mem.data.lanes import evaluation_batches, training_reader
from dist_mem.data.plan import busy_lanes, cut_lengths, evaluation_plan, forward_sizes
from dist_mem.data.shard import Index, TokenizedDocument, write_split
from dist_mem.data.tokenizers.registry import save_tokenizer
from dist_mem.data.tokenizers.single_bytes import BytesTokenizer
from tests.support.lane_corpus import (
    BOS,
    LAYOUTS,
    LENGTHS,
    ONE_TOKEN_DOCUMENT,
    SEG_LEN,
    STARTS,
    assert_equal_batches,
    assert_equal_updates,
    assert_resumes_everywhere,
    first_updates,
    global_steps,
    make_split,
    reader_of,
)
from tests.support.messages import refused


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Index:
    return make_split(tmp_path_factory.mktemp("plain"))


@pytest.fixture(scope="module")
def rich_index(tmp_path_factory: pytest.TempPathFactory) -> Index:
    return make_split(tmp_path_factory.mktemp("rich"), with_extras=True)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("num_lanes", [2, 4, 6])
def test_the_global_batch_of_a_step_does_not_depend_on_the_number_of_ranks(
    rich_index: Index, layout: str, num_lanes: int
) -> None:
    alone = global_steps(rich_index, 50, num_lanes=num_lanes, world_size=1, layout=layout)
    for world_size, micro_lanes in [(1, 2), (2, 1), (2, 2), (3, 1), (3, 2), (4, 1), (4, 2)]:
        options = {"num_lanes": num_lanes, "world_size": world_size, "micro_lanes": micro_lanes, "layout": layout}
        for one, other in zip(alone, global_steps(rich_index, 50, **options), strict=True):
            for first, second in zip(one, other, strict=True):
                assert_equal_batches(first, second)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("segments_per_update", [1, 2])
@pytest.mark.parametrize("num_lanes", [2, 3])
def test_resume_at_every_position_equals_the_straight_run(
    rich_index: Index, layout: str, segments_per_update: int, num_lanes: int
) -> None:
    assert_resumes_everywhere(
        rich_index, 40, num_lanes=num_lanes, segments_per_update=segments_per_update, micro_lanes=2, layout=layout
    )


@given(
    lengths=st.lists(st.integers(0, 20), min_size=3, max_size=12),
    num_lanes=st.integers(1, 3),
    position=st.integers(0, 30),
    seed=st.integers(0, 5),
    layout=st.sampled_from(LAYOUTS),
)
@settings(deadline=None, max_examples=40)
def test_any_corpus_resumes_anywhere(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[int], num_lanes: int, position: int, seed: int, layout: str
) -> None:
    assume(sum(length >= 2 for length in lengths) >= num_lanes)
    index = make_split(tmp_path_factory.mktemp("any"), lengths)
    options: dict[str, Any] = {"num_lanes": num_lanes, "seed": seed, "layout": layout}
    straight = first_updates(index, position + 4, **options)
    resumed = first_updates(index, 3, cursors=straight[position].cursors, **options)
    for one, other in zip(straight[position + 1 :], resumed, strict=True):
        assert_equal_updates(one, other)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("num_lanes", [1, 2, 5])
def test_every_token_is_a_target_once_an_epoch(index: Index, layout: str, num_lanes: int) -> None:
    seen: dict[int, Counter[int]] = {}
    with reader_of(index, num_lanes=num_lanes, layout=layout) as reader:
        previous = torch.zeros(num_lanes, 3, dtype=torch.int64)
        while int(previous[:, 0].min()) < 3:
            update = next(reader)
            for lane, batch in enumerate(update.batches):
                # the stream's cursor after an epoch's last segment is already the next epoch's first
                epoch = int((previous if layout == "stream" else update.cursors)[lane, 0])
                targets = batch.targets[batch.targets != IGNORE].tolist()
                seen.setdefault(epoch, Counter()).update(targets)
            previous = update.cursors
    num_tokens = sum(LENGTHS)
    expected = set(range(num_tokens)) - ({ONE_TOKEN_DOCUMENT} if layout == "documents" else set())
    for epoch in range(3):
        assert set(seen[epoch]) == expected
        assert set(seen[epoch].values()) == {1}


def test_inputs_are_bos_and_then_the_token_before_each_target(rich_index: Index) -> None:
    """Also where a target is not scored: its token is still read."""
    for update in first_updates(rich_index, 40):
        for batch, cursor in zip(update.batches, update.cursors.tolist(), strict=True):
            document, length = int(batch.document[0]), int(batch.valid_len[0])
            stop = LENGTHS[document] if cursor[2] == 0 else cursor[2]
            first = STARTS[document] + stop - length
            inputs = [BOS if first == STARTS[document] else first - 1, *range(first, first + length - 1)]
            assert batch.tokens[0].tolist() == inputs + [0] * (SEG_LEN - length)
            assert bool(batch.is_new_document[0]) == (inputs[0] == BOS)


def test_stream_lanes_read_contiguous_parts_of_the_corpus_from_bos(index: Index) -> None:
    num_tokens, num_lanes = sum(LENGTHS), 3
    for update in first_updates(index, 20, num_lanes=num_lanes, layout="stream"):
        for lane, batch in enumerate(update.batches):
            length = int(batch.valid_len[0])
            targets = batch.targets[0, :length].tolist()
            assert targets == list(range(targets[0], targets[0] + length))
            assert int(batch.tokens[0, 0]) == (targets[0] - 1 if targets[0] else BOS)
            assert batch.tokens[0, 1:length].tolist() == targets[:-1]
            start, stop = (round(edge * num_tokens / num_lanes) for edge in (lane, lane + 1))
            assert start <= targets[0] and targets[-1] < stop
            assert bool(batch.is_new_document[0]) == (targets[0] == start)


def test_masked_targets_are_ignored_and_recall_lies_on_its_target(rich_index: Index) -> None:
    for layout in LAYOUTS:
        seen = 0
        for update in first_updates(rich_index, 30, layout=layout):
            assert update.num_scored == sum(int((batch.targets != IGNORE).sum()) for batch in update.batches)
            for batch in update.batches:
                assert batch.recall is not None
                for column in range(int(batch.valid_len[0]) - 1):
                    token = int(batch.tokens[0, column + 1])  # the target of this column
                    document = int(np.searchsorted(STARTS, token, side="right")) - 1
                    offset = token - STARTS[document]
                    is_scored = document % 3 != 0 or offset % 2 == 1
                    assert int(batch.targets[0, column]) == (token if is_scored else IGNORE)
                    assert int(batch.recall[0, column]) == (offset if document % 2 == 0 else 0)
                    seen += 1
        assert seen > 100


def test_without_recorded_recall_there_is_none(index: Index) -> None:
    assert all(batch.recall is None for update in first_updates(index, 3) for batch in update.batches)


def test_tokens_of_four_bytes_are_read_as_well(tmp_path: Path) -> None:
    small, large = make_split(tmp_path / "2"), make_split(tmp_path / "4", dtype=np.uint32)
    for layout in LAYOUTS:
        for one, other in zip(*(first_updates(index, 20, layout=layout) for index in (small, large)), strict=True):
            assert_equal_updates(one, other)


def test_documents_are_cut_to_their_first_tokens(index: Index) -> None:
    for layout in LAYOUTS:
        updates = first_updates(index, 60, layout=layout, max_document_len=5, num_lanes=2)
        targets = {int(token) for update in updates for batch in update.batches for token in batch.targets.flatten()}
        first = {
            start + offset for start, length in zip(STARTS, LENGTHS, strict=False) for offset in range(min(length, 5))
        }
        assert targets - {IGNORE} == first - ({ONE_TOKEN_DOCUMENT} if layout == "documents" else set())


def test_a_document_longer_than_all_others_together_keeps_its_lane_while_the_others_roll_on(tmp_path: Path) -> None:
    index = make_split(tmp_path, [400, 5, 6, 7, 8])
    updates = first_updates(index, 99, num_lanes=3)
    documents = torch.stack([torch.cat([batch.document for batch in update.batches]) for update in updates])
    lane = int((documents == 0).any(dim=0).nonzero()[0, 0])
    steps = (documents[:, lane] == 0).nonzero().flatten().tolist()
    assert steps == list(range(steps[0], len(updates)))
    for update in updates:  # later epochs read it elsewhere meanwhile, but never at the same place
        assert len({tuple(batch.tokens[0].tolist()) for batch in update.batches}) == 3


def test_counts_of_an_epoch_add_up(index: Index) -> None:
    updates = first_updates(index, 200, num_lanes=1)
    one_epoch = next(number for number, update in enumerate(updates) if update.epoch >= 1)
    assert updates[one_epoch].epoch == 1
    assert sum(update.documents_started for update in updates[: one_epoch + 1]) == len(LENGTHS) - 2
    assert sum(update.num_scored for update in updates[: one_epoch + 1]) == sum(LENGTHS) - 1
    assert all(before.epoch < after.epoch for before, after in pairwise(updates))


@pytest.mark.parametrize("num_lanes", [1, 2, 3, 7, 20])
def test_evaluation_scores_every_token_once_for_any_lanes_and_ranks(rich_index: Index, num_lanes: int) -> None:
    lengths = [entry.num_tokens for entry in rich_index.documents]
    lanes = evaluation_plan(lengths, num_lanes=num_lanes, seg_len=SEG_LEN)
    inputs = Counter(
        (document, STARTS[document] + offset - 1 if offset else BOS)
        for document, length in enumerate(LENGTHS)
        for offset in range(length)
    )
    for world_size, micro_lanes in [(1, 1), (1, 3), (2, 2), (3, 1)]:
        read: Counter[tuple[int, int]] = Counter()
        new_documents: Counter[int] = Counter()
        for rank in range(world_size):
            steps = list(
                evaluation_batches(
                    rich_index,
                    lanes,
                    world_size=world_size,
                    rank=rank,
                    micro_lanes=micro_lanes,
                    seg_len=SEG_LEN,
                    bos_id=BOS,
                )
            )
            assert [[len(batch.tokens) for batch in batches] for batches in steps] == [
                forward_sizes(num_busy, world_size=world_size, rank=rank, micro_lanes=micro_lanes)
                for num_busy in busy_lanes(lanes, lengths, seg_len=SEG_LEN)
            ]
            for batch in (batch for batches in steps for batch in batches):
                for document, length, tokens in zip(
                    batch.document.tolist(), batch.valid_len.tolist(), batch.tokens, strict=True
                ):
                    read.update((document, int(token)) for token in tokens[:length])
                new_documents.update(batch.document[batch.is_new_document].tolist())
        assert read == inputs
        assert new_documents == Counter(document for document, length in enumerate(LENGTHS) if length)


def test_evaluation_reads_only_the_beginning_of_each_document_if_reported(index: Index) -> None:
    lengths = cut_lengths([entry.num_tokens for entry in index.documents], 6)
    lanes = evaluation_plan(lengths, num_lanes=2, seg_len=SEG_LEN)
    steps = evaluation_batches(
        index, lanes, world_size=1, rank=0, micro_lanes=2, seg_len=SEG_LEN, bos_id=BOS, max_document_len=6,
    )  # fmt: skip
    assert sum(int((batch.targets != IGNORE).sum()) for batches in steps for batch in batches) == lengths.sum()


def test_cursors_of_another_plan_are_refused(index: Index) -> None:
    with refused(ValueError):
        first_updates(index, 1, cursors=torch.zeros(2, 3, dtype=torch.int64))
    with refused(ValueError):
        first_updates(index, 1, cursors=torch.full((3, 3), 77))


def test_training_reader_opens_what_the_configuration_names(tmp_path: Path) -> None:
    save_tokenizer(BytesTokenizer(), tmp_path)
    text = np.frombuffer(b"It was a dark and stormy night.", dtype=np.uint8).astype(np.uint16)
    document = TokenizedDocument("a", "A", None, 7, 31, text)
    options = {"name": "tiny", "split": "train"}
    write_split([document], tmp_path / "train", tokenizer_fingerprint=BytesTokenizer().fingerprint, **options)
    config = Config()
    config.data.path, config.train.global_batch_size, config.train.micro_batch_size = str(tmp_path), 1, 2
    with closing(training_reader(config, world_size=1, rank=0)) as reader:
        update = next(reader)
    assert update.num_scored == len(text)
    assert update.batches[0].tokens[0, : len(text)].tolist() == [BytesTokenizer().bos_id, *text[:-1].tolist()]
    write_split([document], tmp_path / "train", tokenizer_fingerprint="another", **options)
    with refused(ValueError):
        training_reader(config, world_size=1, rank=0)
