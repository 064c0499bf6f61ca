"""The dialogues that we wrote in the layout of CMU-DoG: a model can only know an answer from the film's description."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random

from dist_mem.datasets.recipes import cmu_dog
from tests.support.film_dialogues import QUESTIONS, SIZES, TALKS, film, write_corpus


def test_every_fact_that_an_answer_names_is_in_the_description() -> None:
    draw = Random(0)
    for number in range(50):
        scenes, facts = film(draw, number)
        description = json.dumps(scenes)
        assert all(fact in description for fact in facts.values())
        assert len({facts["hero"], facts["thief"], facts["friend"]}) == 3, "one name has one role"
        assert all(answer.format(**facts) != answer for answer in QUESTIONS.values())


def test_the_builder_reads_them_and_no_film_is_in_two_splits(tmp_path: Path) -> None:
    write_corpus(tmp_path)
    films = cmu_dog.read_films(tmp_path / "WikiData")
    assert len(films) == sum(SIZES.values())
    seen: set[int] = set()
    for folder, size in SIZES.items():
        talks = cmu_dog.read_conversations(tmp_path / "Conversations" / folder, films)
        assert len(talks) == size * TALKS[folder]
        of_split = {talk.film for talk in talks}
        assert not of_split & seen
        seen |= of_split
        assert all(len(talk.turns) == 2 * len(QUESTIONS) for talk in talks)
