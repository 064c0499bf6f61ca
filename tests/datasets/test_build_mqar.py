"""Multi-query associative recall: the published generator, answers where keys are asked for, and disjoint splits."""

from itertools import combinations
from pathlib import Path

import numpy as np
import pytest

from dist_mem.data.verify import verify_dataset
from dist_mem.datasets.recipes import mqar
from dist_mem.datasets.recipes.mqar import RecallSizes
from tests.support.data_builders import build_data, build_refused, documents_of

SMALL = ("--train", "12", "--validation", "6", "--test", "6", "--vocab", "64", "--pairs", "4")


def build(out: Path, *options: str) -> int:
    return build_data("mqar", "--out", str(out), *SMALL, *options)


def published(sizes: RecallSizes, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Inputs and labels (-100: none) of one example as Arora et al. draw it, rewritten; 0 is to be filled."""
    draw = np.random.RandomState(seed)
    context = 2 * sizes.num_pairs
    keys = draw.choice(np.arange(1, sizes.vocab_size // 2), replace=False, size=sizes.num_pairs)
    values = draw.choice(np.arange(sizes.vocab_size // 2, sizes.vocab_size), replace=False, size=sizes.num_pairs)
    space = (sizes.length - context) // 2
    power = sizes.power_a * np.arange(1, space + 1) ** (sizes.power_a - 1)
    gaps = draw.choice(np.arange(space), replace=False, p=power / power.sum(), size=sizes.num_pairs)
    inputs, labels = np.zeros(sizes.length, dtype=np.int64), np.full(sizes.length, -100)
    inputs[:context:2], inputs[1:context:2] = keys, values
    inputs[context + 2 * gaps] = keys
    labels[context + 2 * gaps] = values  # of the key's own place: what is to be predicted after it
    return inputs, labels


@pytest.mark.parametrize("sizes", [RecallSizes(64, 8192, 8, 0.01, "zero"), RecallSizes(256, 512, 64, 0.3, "zero")])
def test_an_example_is_the_published_one_with_each_answer_after_its_key(sizes: RecallSizes) -> None:
    for seed in range(5):
        inputs, labels = published(sizes, seed)
        example = mqar.draw_example(np.random.RandomState(seed), sizes)
        answers = np.zeros(sizes.length, dtype=bool)
        answers[example.answers] = True
        assert (example.tokens[~answers] == inputs[~answers]).all()
        assert (np.append(example.tokens[1:], -1)[labels >= 0] == labels[labels >= 0]).all()
        assert (np.flatnonzero(labels >= 0) + 1 == np.flatnonzero(answers)).all()


def test_only_values_asked_for_are_scored_and_recall_leads_to_the_pair(tmp_path: Path) -> None:
    assert build(tmp_path, "--lengths", "16", "40") == 0
    for length in (16, 40):
        assert verify_dataset(tmp_path / str(length)) == []
        found = documents_of(tmp_path / str(length))
        assert len(found) == 12
        for entry, text, tokens, mask, recall in found:
            assert len(tokens) == length and mask.sum() == 4
            assert (mask == (recall > 0)).all()
            pairs = dict(zip(tokens[0:8:2].tolist(), tokens[1:8:2].tolist(), strict=True))
            for place in np.flatnonzero(mask):
                assert place >= 8
                assert pairs[int(tokens[place - 1])] == tokens[place] == tokens[place - recall[place]]
                assert place - recall[place] < 8
            assert text.split() == [str(token) for token in tokens]
            assert entry.bytes == len(text)


def test_a_low_power_asks_soon_and_one_anywhere() -> None:
    def mean_gap(power_a: float) -> float:
        sizes = RecallSizes(512, 128, 4, power_a, "random")
        draw = np.random.RandomState(0)
        return float(np.mean([mqar.draw_example(draw, sizes).answers.mean() for _ in range(200)]))

    assert mean_gap(0.01) < 150
    assert 230 < mean_gap(1.0) < 290


def test_no_pairs_of_one_split_are_in_another_even_if_there_are_few(tmp_path: Path) -> None:
    """Vocabulary 8 and one pair: 12 examples in all, so that each split has many of its own again and again."""
    sizes = ("--lengths", "4", "--vocab", "8", "--pairs", "1", "--train", "60", "--validation", "20", "--test", "20")
    assert build(tmp_path, *sizes, "--seed", "1") == 0
    pairs = [
        {tuple(document.tokens[:2].tolist()) for document in documents_of(tmp_path / "4", split)}
        for split in ("train", "validation", "test")
    ]
    assert all(pairs)
    assert not any(one & other for one, other in combinations(pairs, 2))


MISFITS = [("--lengths", "15"), ("--lengths", "14"), ("--lengths", "16", "15"), ("--vocab", "8"), ("--power-a", "0")]


@pytest.mark.parametrize("options", MISFITS)
def test_sizes_that_do_not_fit_are_refused(tmp_path: Path, options: tuple[str, ...]) -> None:
    build_refused("mqar", "--out", tmp_path, *SMALL, *options, named=options[:1])
    assert not list(tmp_path.iterdir())
