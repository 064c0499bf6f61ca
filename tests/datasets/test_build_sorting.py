"""The sorting task: the published generator bit for bit, answers by rank, and documents that score them alone."""

from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from dist_mem.data.tokenizers.registry import load_tokenizer
from dist_mem.data.verify import verify_dataset
from dist_mem.datasets import sorting_baselines as baselines
from dist_mem.datasets.recipes import sorting
from tests.support import paths
from tests.support.data_builders import build_data, documents_of
from tests.support.messages import said

GOLDEN = paths.GOLDEN / "sorting" / "sorting_data_seed0.npz"  # of the authors' code: 6 x 500 tokens
SMALL = ("--train", "5", "--validation", "3", "--test", "2")


def build(out: Path, *options: str) -> int:
    return build_data("sorting", "--out", out, *SMALL, *options)


def test_sequences_and_answers_are_those_of_the_published_generator() -> None:
    draw = np.random.RandomState(0)
    tokenizer = sorting.sorting_tokenizer()
    for number, row in enumerate(np.load(GOLDEN)["rows"]):
        document = sorting.document(draw, 500, number, tokenizer)
        assert document.tokens.tolist() == row.tolist()


@pytest.mark.parametrize("seed", ["-1", str(2**32), "x"])
def test_a_seed_that_numpy_does_not_take_is_refused_by_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], seed: str
) -> None:
    with pytest.raises(SystemExit):
        build(tmp_path, "--seed", seed)
    said(capsys.readouterr().err, "--seed", seed)


def test_baselines_are_of_sorting_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert build_data("mqar", "--out", tmp_path, *SMALL, "--lengths", "64") == 0
    assert baselines.main([str(tmp_path / "64" / "test")]) == 2
    said(capsys.readouterr().err, tmp_path / "64" / "test", "sorting")


@pytest.mark.parametrize("length", [1, 7, 40])
def test_answers_are_ranked_by_count_then_appearance_then_number(length: int) -> None:
    draw = np.random.default_rng(length)
    for _ in range(50):
        sequence = draw.integers(0, 20, length)
        ranked = [symbol for symbol, _ in Counter(sequence.tolist()).most_common()]  # equal counts as first seen
        assert sorting.answers(sequence).tolist() == ranked + [s for s in range(20) if s not in ranked]


def test_only_the_twenty_answers_are_scored_and_no_two_sequences_are_alike(tmp_path: Path) -> None:
    assert build(tmp_path, "--lengths", "30", "44") == 0
    sequences = []
    for length in (30, 44):
        assert verify_dataset(tmp_path / str(length)) == []
        tokenizer = load_tokenizer(tmp_path / str(length))
        for split, count in (("train", 5), ("validation", 3), ("test", 2)):
            found = documents_of(tmp_path / str(length), split)
            assert len(found) == count
            for entry, text, tokens, mask, _ in found:
                sequences.append(tuple(tokens[:30].tolist()))
                assert np.flatnonzero(mask).tolist() == list(range(length + 1, length + 21))
                words = text.split()
                assert words[length] == "20"
                assert sorted(words[length + 1 :], key=int) == [str(symbol) for symbol in range(20)]
                assert entry.bytes == len(text)
    assert (tokenizer.vocab_size, tokenizer.bos_id) == (22, 21)
    assert len(set(sequences)) == len(sequences) == 20, "of other splits and lengths"


def test_baselines_are_those_of_the_published_task(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In percent at 4,000 tokens and segments of 1,024: over 300 sequences elsewhere, here over 60."""
    build_data("sorting", "--out", tmp_path, "--lengths", "4000", "--train", "1", "--validation", "1", "--test", "60")
    found = baselines.measure(tmp_path / "4000" / "test", seg_len=1024)
    expected = {"chance": 18.0, "last segment": 36.0, "1 more": 44.0, "2 more": 59.0, "all": 98.0}
    assert found.keys() == expected.keys()
    assert abs(100 * found["chance"] - 18.0) < 0.05  # exact: the mean of 1/20, ..., 1/1
    for name, percent in expected.items():
        assert abs(100 * found[name] - percent) < 3.0, (name, found[name])
    assert baselines.main([str(tmp_path / "4000" / "test"), "--seg-len", "1024"]) == 0
    assert "chance" in capsys.readouterr().out


@pytest.mark.parametrize(("seg_len", "first"), [(40, 0), (25, 24), (30, 0), (29, 28), (10, 19)])
def test_the_last_segment_begins_where_the_model_reads_it(seg_len: int, first: int) -> None:
    """A document of 9 + 1 + 20 tokens: input 0 is BOS, so input 25 is token 24."""
    assert baselines.first_input(30, seg_len=seg_len) == first


def test_counts_are_ranked_as_far_as_they_are_seen() -> None:
    sequence = np.repeat(np.arange(20), np.arange(40, 20, -1))  # 40 of 0, 39 of 1, ...: no two alike
    tokens = np.concatenate([sequence, [20], sorting.answers(sequence)])
    draw = np.random.default_rng(0)
    assert baselines.hits_of_counts(tokens, first=0, draw=draw) == 20
    # Without the 40 of symbol 0, it looks rarest and is guessed last: only from then on is every answer right.
    assert baselines.hits_of_counts(tokens, first=40, draw=draw) == 19
