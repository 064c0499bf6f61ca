"""A mixture of sources: their shares, their epochs, changed weights, and a plan that is the same for ever."""

from collections import Counter
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dist_mem.config import Config, ConfigError, SourceConfig, change_config, load_config
from dist_mem.data import mixture
from dist_mem.data import plan as plan_module
from dist_mem.data.curriculum import training_splits
from dist_mem.data.directory import open_index, open_tokenizer
from dist_mem.data.lanes import LaneReader, training_plan, training_reader
from dist_mem.data.mixture import (
    MixturePart,
    MixturePlan,
    describe_sources,
    mixture_parts,
    source_names,
    source_settings,
)
from dist_mem.data.plan import START
from dist_mem.data.tokenizers.registry import save_tokenizer
from dist_mem.data.tokenizers.words import count_words
from dist_mem.errors import UnusableError
from tests.support.curricula import make_data
from tests.support.lane_corpus import damage
from tests.support.messages import refused

SEG_LEN, LANES = 8, 4


def sizes(seed: int, *counts: int) -> list[np.ndarray]:
    numbers = np.random.default_rng(seed)
    return [numbers.integers(20, 100, count) for count in counts]


def plan_of(lengths: list[np.ndarray], parts: list[MixturePart], *, num_lanes: int = LANES) -> MixturePlan:
    return MixturePlan(lengths, parts, num_lanes=num_lanes, seg_len=SEG_LEN, seed=3)


def part(*weights: float, step: int = 0, epochs: list[int | None] | None = None, segments: int = 1) -> MixturePart:
    return MixturePart(step, segments, weights, epochs or [None] * len(weights))


def visits(plan: MixturePlan, num_rounds: int = 1) -> list[tuple[int, int, int]]:
    """(segments its lane has read before, lane, document) of everything in the first rounds, by beginning."""
    found = []
    for lane in range(plan.num_lanes):
        read = 0
        for number in (number for one in range(num_rounds) for number in plan.documents(one, lane)):
            found.append((read, lane, number))
            read += -(-int(plan.lengths[number]) // SEG_LEN)
    return sorted(found)


def shares(plan: MixturePlan, numbers: list[int]) -> np.ndarray:
    sources = plan.firsts.searchsorted(numbers, side="right") - 1
    tokens = np.bincount(sources, plan.lengths[numbers], len(plan.firsts) - 1)
    return tokens / tokens.sum()


@given(st.lists(st.floats(0.05, 1), min_size=2, max_size=5), st.integers(0, 99))
@settings(deadline=None, max_examples=10)
def test_every_source_has_its_share_of_the_tokens_after_a_thousand_documents(weights: list[float], seed: int) -> None:
    plan = plan_of(sizes(seed, *range(10, 10 + len(weights))), [part(*weights)])
    numbers = [number for _, _, number in visits(plan)][:1000]
    wanted = np.array(weights) / sum(weights)
    assert np.abs(shares(plan, numbers) - wanted).max() < 0.005


def test_a_source_gives_each_of_its_documents_once_an_epoch_and_not_soon_again() -> None:
    plan = plan_of(sizes(0, 40, 9), [part(1, 3)])
    numbers = [number for _, _, number in visits(plan)]
    for first, stop in pairwise(plan.firsts):
        own, size = [number for number in numbers if first <= number < stop], stop - first
        for epoch in range(5):
            assert sorted(own[epoch * size : (epoch + 1) * size]) == list(range(first, stop))
        for number in range(first, stop):
            places = np.flatnonzero(np.array(own[: 5 * size]) == number)
            assert np.diff(places).min() > min(LANES, size // 2) - 1


@pytest.mark.parametrize(("round_", "at_once"), [(1, 1), (7, 3), (64, 2**16)])
def test_the_order_does_not_depend_on_the_size_of_rounds(
    monkeypatch: pytest.MonkeyPatch, round_: int, at_once: int
) -> None:
    lengths, parts = sizes(1, 12, 30), [part(1, 2), part(5, 1, step=40, segments=2), part(0, 1, step=90)]
    expected = visits(plan_of(lengths, parts))[:400]
    monkeypatch.setattr(mixture, "ROUND", round_)
    monkeypatch.setattr(plan_module, "DEALT_AT_ONCE", at_once)
    assert visits(plan_of(lengths, parts), num_rounds=400 // round_ + 2)[:400] == expected


@given(st.integers(1, 200), st.floats(0, 1), st.integers(1, 3), st.integers(0, 9))
@settings(deadline=None, max_examples=10)
def test_new_weights_change_nothing_that_was_begun_and_hold_from_the_next_document_on(
    step: int, weight: float, segments: int, seed: int
) -> None:
    lengths = sizes(seed, 30, 20)
    before = [part(3, 1, segments=segments)]
    plan, changed = plan_of(lengths, before), plan_of(lengths, [*before, part(weight, 1 - weight, step=step)])
    read = plan.segments_read(step)
    assert read == step * segments == changed.segments_read(step)
    begun = [visit for visit in visits(plan) if visit[0] < read]
    after = visits(changed)
    assert after[: len(begun)] == begun
    later = [number for _, _, number in after[len(begun) :]][:1000]
    assert abs(shares(changed, later)[0] - weight) < 0.005
    cursors = [plan.advance(lane, START, read) for lane in range(LANES)]
    assert [changed.advance(lane, START, read) for lane in range(LANES)] == cursors
    for lane, cursor in enumerate(cursors):
        changed.check_cursor(lane, cursor)
        assert changed.epochs_done(lane, *cursor) == pytest.approx(read * LANES / changed.num_segments)


def test_the_same_weights_at_a_resume_change_nothing() -> None:
    lengths = sizes(2, 20, 20)
    parts = [part(1, 2), part(1, 2, step=10, segments=3), part(1, 2, step=20)]
    assert visits(plan_of(lengths, parts)) == visits(plan_of(lengths, parts[:1]))
    assert plan_of(lengths, parts).segments_read(25) == 10 + 30 + 5


def test_a_source_may_be_appended_at_a_resume() -> None:
    lengths, parts = sizes(4, 15, 15, 15), [part(1, 1), part(1, 1, 2, step=30)]
    plan, before = plan_of(lengths, parts), plan_of(lengths[:2], parts[:1])
    begun = [visit for visit in visits(before) if visit[0] < 30]
    assert visits(plan)[: len(begun)] == begun
    later = [number for _, _, number in visits(plan)[len(begun) :]][:1000]
    assert np.abs(shares(plan, later) - [0.25, 0.25, 0.5]).max() < 0.005


def test_a_source_that_has_given_its_epochs_leaves_its_part_to_the_others() -> None:
    lengths = sizes(5, 10, 300, 300)
    plan = plan_of(lengths, [part(2, 1, 3, epochs=[2, None, None])])
    numbers = [number for _, _, number in visits(plan)]
    counts = Counter(number for number in numbers if number < 10)
    assert set(counts.values()) == {2} and len(counts) == 10
    last = max(place for place, number in enumerate(numbers) if number < 10)
    assert np.abs(shares(plan, numbers[last + 1 :][:1000]) - [0, 0.25, 0.75]).max() < 0.005
    use = plan.use_of_sources(10_000)
    assert use[0].epochs == 2.0
    assert sum(each.share for each in use) == pytest.approx(1)
    lines = describe_sources(plan, ["chat", "books", "web"], 10_000)
    assert [line.split(":")[0] for line in lines] == ["chat", "books", "web"]
    assert "of at most 2; then the others share its part" in lines[0]
    assert not any("at most" in line for line in lines[1:])


def test_more_epochs_at_a_resume_go_on_where_the_sources_had_ended() -> None:
    lengths = sizes(8, 10, 12)
    once = part(1, 1, epochs=[1, 1])
    begun = visits(plan_of(lengths, [once]))
    plan = plan_of(lengths, [once, part(1, 1, epochs=[3, 3], step=begun[-1][0] + 1)])
    assert visits(plan)[:22] == begun
    assert Counter(number for _, _, number in visits(plan)) == dict.fromkeys(range(22), 3)


def test_a_run_that_outlives_all_epochs_is_refused_with_the_number_of_steps_that_there_are() -> None:
    plan = plan_of(sizes(6, 10, 12), [part(1, 1, epochs=[1, 3])])
    read = dict.fromkeys(range(LANES), 0)
    for _, lane, number in visits(plan):
        read[lane] += -(-int(plan.lengths[number]) // SEG_LEN)
    most = min(read.values())
    plan.check_steps(most)
    with refused(ValueError, "data.mixture", f"{most} steps"):
        plan.check_steps(most + 1)
    with refused(ValueError, "data.mixture"):
        plan.documents(1, 0)


def test_use_of_sources_counts_what_was_begun() -> None:
    lengths, parts = sizes(7, 10, 30), [part(1, 1), part(3, 1, step=60)]
    plan = plan_of(lengths, parts)
    for step in (0, 1, 59, 61, 2500):
        begun = [number for first, _, number in visits(plan) if first < step]
        use = plan.use_of_sources(step)
        expected = shares(plan, begun) if begun else np.zeros(2)
        assert np.allclose([each.share for each in use], expected)
        assert [each.epochs for each in use] == [
            sum(number < 10 for number in begun) / 10,
            sum(number >= 10 for number in begun) / 30,
        ]


def test_documents_of_sources_without_a_weight_are_none_for_a_lane() -> None:
    """Two lanes would read one document at the same time."""
    lengths = sizes(0, LANES - 1, 20)
    with refused(ValueError, "train.global_batch_size", LANES - 1, "data.mixture") as caught:
        plan_of(lengths, [part(1, 0)])
    assert "stream" not in str(caught.value)
    fewer = plan_of(lengths, [part(1, 0)], num_lanes=LANES - 1)
    assert all(number < LANES - 1 for _, _, number in visits(fewer))
    plan_of(lengths, [part(1, 0.1)])


@pytest.mark.parametrize(
    ("given_", "key"),
    [
        (["data.mixture=[{weight: 1}]"], "data.mixture[0].path"),
        (["data.mixture=[{path: a}, {path: 's3://bucket/a'}]"], "data.mixture[1].path"),
        (["data.mixture=[{path: a}, {path: a}]"], "data.mixture[1].path"),
        (["data.mixture=[{path: a}, {path: ./b/../a/}]"], "data.mixture[1].path"),
        (["data.mixture=[{path: a, weight: 0}]"], "data.mixture"),
        (["data.mixture=[{path: a, weight: -1}]"], "data.mixture[0].weight"),
        (["data.mixture=[{path: a, epochs: 0}]"], "data.mixture[0].epochs"),
        (["data.mixture=[{path: a}]", "data.layout=stream"], "data.mixture"),
        (["data.mixture=[{path: a}]", "data.curriculum=[{path: b, until: 3}]"], "data.mixture"),
        (["data.mixture=[{path: a}]", "train.steps=null", "train.epochs=2"], "data.mixture"),
    ],
)
def test_an_impossible_mixture_is_refused(given_: list[str], key: str) -> None:
    with refused(ConfigError, key):
        load_config(["train.steps=10", *given_])


@pytest.fixture
def config(tmp_path: Path) -> Config:
    folders = [make_data(tmp_path / name, [30 + 7 * number for number in range(8)]) for name in ("books", "chat")]
    sources = ", ".join(f"{{path: {folder}, weight: {weight}}}" for folder, weight in zip(folders, (1, 3), strict=True))
    changes = ["train.global_batch_size=4", "train.micro_batch_size=2", "train.steps=10", f"train.seg_len={SEG_LEN}"]
    return load_config([f"data.path={folders[0]}", f"data.mixture=[{sources}]", *changes])


def test_a_source_with_another_tokenizer_is_refused_by_name(config: Config) -> None:
    tokenizer, source = open_tokenizer(config.data), config.data.mixture[1].path
    assert len(training_splits(config.data, tokenizer)) == 2
    save_tokenizer(count_words(["a"]), source)
    with refused(UnusableError, "data.mixture[1].path", source, "--tokenizer-from"):
        training_splits(config.data, tokenizer)
    save_tokenizer(count_words(["a"]), config.data.path)  # that of both folders now, and of no shard
    parts = mixture_parts([], config.data, config.train, 0)
    with refused(ValueError, "its shards were made with tokenizer"):
        training_reader(config.data, config.train, world_size=1, rank=0, parts=parts)
    with refused(ValueError, "its shards were made with tokenizer"):
        training_splits(config.data, open_tokenizer(config.data))


def read(config: Config, num_updates: int) -> tuple[list[list[int]], LaneReader]:
    """The documents of each lane in the first updates."""
    reader = training_reader(config.data, config.train, world_size=1, rank=0)
    try:
        updates = [next(reader) for _ in range(num_updates)]
    finally:
        reader.close()
    return [[int(document) for batch in update.batches for document in batch.document] for update in updates], reader


def test_lanes_read_the_documents_of_all_sources_by_their_numbers(config: Config) -> None:
    numbers, reader = read(config, 200)
    assert isinstance(reader.plan, MixturePlan)
    assert {number for row in numbers for number in row} == set(range(16))
    assert reader.plan.skipped == []


def test_a_damaged_document_is_read_as_blanks_so_that_lanes_stay_level(config: Config) -> None:
    whole, _ = read(config, 100)
    damage(open_index(source_settings(config.data)[1], "train"), 3)
    damaged, _ = read(change_config(config, {"data.on_corrupt": "skip"}), 100)
    assert damaged == whole
    with refused(ValueError, "damaged"):
        read(config, 100)


@pytest.mark.parametrize(
    ("paths", "names"),
    [
        (["data/books"], ["books"]),
        (["data/books", "/mnt/data/books"], None),
        (["data/books", "data/passkey/800"], ["books", "passkey/800"]),
        (["data", "data/books"], ["data", "data/books"]),
    ],
)
def test_sources_have_names_of_their_own(paths: list[str], names: list[str] | None) -> None:
    data = load_config([f"data.mixture=[{', '.join(f'{{path: {path}}}' for path in paths)}]", "train.steps=1"]).data
    found = source_names(data)
    assert len(set(found)) == len(paths)
    assert names is None or found == names


def test_parts_of_a_run_follow_its_checkpoints(config: Config) -> None:
    first = mixture_parts([], config.data, config.train, 0)
    assert first == [MixturePart(0, 1, (1.0, 3.0), (None, None))]
    kept = [each._asdict() for each in first]
    assert mixture_parts(kept, config.data, config.train, 8) == first
    more = change_config(config, {"data.mixture": [*config.data.mixture[:1], SourceConfig("x", 9)]})
    changed = mixture_parts(kept, more.data, more.train, 8)
    assert [(each.step, each.weights) for each in changed] == [(0, (1.0, 3.0)), (8, (1.0, 9))]
    again = mixture_parts([each._asdict() for each in changed], config.data, config.train, 6)
    assert again == first, "resumed from a checkpoint before the change"
    splits = [open_index(one, one.train_split) for one in source_settings(config.data)]
    plan = training_plan(config.data, config.train, splits)
    assert isinstance(plan, MixturePlan) and plan.parts == first
