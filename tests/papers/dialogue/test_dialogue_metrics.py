"""F1, ROUGE and METEOR: known answers, and which argument is which."""

from __future__ import annotations

import pytest

from dist_mem.papers.dialogue.metrics import DEBIAN_FOLDER, METRICS, f1, make_scorer, mean_scores, open_wordnet

LONG, SHORT = "big red mat sat", "mat"
needs_wordnet = pytest.mark.skipif(
    not (DEBIAN_FOLDER / "data.noun").exists(), reason="no WordNet: apt-get install wordnet-base"
)


@pytest.mark.parametrize(
    ("reply", "reference", "expected"),
    [
        ("The cat, sat!", "a cat sat down", 0.8),  # two of two and three words: no articles, no punctuation
        ("no no no", "no", 0.5),  # a word counts as often as it stands in both:
        ("no no", "no no yes", 0.8),
        ("the", "", 1.0),  # nothing is left of either
        ("cat", "the", 0.0),
        ("It's", "its", 1.0),
    ],
)
def test_f1_is_that_of_squad(reply: str, reference: str, expected: float) -> None:
    assert f1(reply, reference=reference) == pytest.approx(expected)


@pytest.mark.parametrize(("reply", "reference"), [(SHORT, LONG), (LONG, SHORT)])
def test_rouge_is_the_f_measure_and_not_recall(reply: str, reference: str) -> None:
    scores = make_scorer()(reply, reference)
    assert scores["rouge1"] == pytest.approx(2 * 1 * 0.25 / 1.25)  # precision and recall are 1 and 1/4
    assert scores["rougeL"] == scores["rouge1"]


def test_rouge_l_minds_the_order_and_both_take_stems() -> None:
    scores = make_scorer()("movies like people", "people like movie")
    assert scores["rouge1"] == pytest.approx(1.0)
    assert scores["rougeL"] == pytest.approx(1 / 3)


@needs_wordnet
def test_meteor_weighs_recall_nine_times_as_much_as_precision() -> None:
    """Banerjee and Lavie 2005, with NLTK's weights: P R / (0.9 P + 0.1 R), halved where one match is one chunk."""
    score = make_scorer()
    assert score(SHORT, LONG)["meteor"] == pytest.approx(0.5 * 0.25 / (0.9 + 0.1 * 0.25))  # all said is right
    assert score(LONG, SHORT)["meteor"] == pytest.approx(0.5 * 0.25 / (0.9 * 0.25 + 0.1))  # all that is right is said


@needs_wordnet
def test_meteor_finds_stems_and_synonyms() -> None:
    score = make_scorer()
    chunk = 1 - 0.5 * (1 / 4) ** 3  # four matches in one chunk
    assert score("the cinema was great", "the film was great")["meteor"] == pytest.approx(chunk)
    assert score("the films was great", "the film was great")["meteor"] == pytest.approx(chunk)
    assert score("The Dog was great", "the film was great")["meteor"] < chunk


@needs_wordnet
def test_the_names_of_wordnets_files_are_in_its_order() -> None:
    wordnet = open_wordnet()
    words = ["dog.n.01", "time.n.01", "run.v.01", "rain.v.01", "good.a.01", "quickly.r.01"]
    names = ["noun.animal", "noun.event", "verb.motion", "verb.weather", "adj.all", "adv.all"]
    assert [wordnet.synset(word).lexname() for word in words] == names


def test_means_are_percent_over_replies() -> None:
    scores: list[dict[str, float | None]] = [dict.fromkeys(METRICS, 0.25), dict.fromkeys(METRICS, 0.75)]
    assert mean_scores(scores) == dict.fromkeys(METRICS, 50.0)
    assert mean_scores([]) == dict.fromkeys(METRICS)
