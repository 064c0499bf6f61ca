"""A curriculum: stages are read one after the other, each from its beginning, and from any step on."""

from contextlib import closing
from itertools import islice
from pathlib import Path

import pytest
import torch

from dist_mem.config import Config, ConfigError, StageConfig, change_config, load_config
from dist_mem.data.batch import Update
from dist_mem.data.curriculum import answers_of, curriculum_reader, stage_number, stages_of, training_splits, with_ends
from dist_mem.data.directory import open_tokenizer
from dist_mem.data.lanes import training_reader
from dist_mem.data.tokenizers.registry import save_tokenizer
from dist_mem.data.tokenizers.single_bytes import BytesTokenizer
from dist_mem.data.tokenizers.words import count_words
from dist_mem.errors import UnusableError
from tests.support.curricula import make_data
from tests.support.lane_corpus import LAYOUTS, assert_equal_updates
from tests.support.messages import refused

LENGTHS = {"short": [5, 9, 3, 4, 7], "longer": [21, 13, 30], "long": [40, 55]}


@pytest.fixture
def config(tmp_path: Path) -> Config:
    """Three updates of `short`, then two of `longer`, then `long`; two lanes."""
    paths = [str(make_data(tmp_path / name, lengths, answers=name == "short")) for name, lengths in LENGTHS.items()]
    config = Config()
    config = change_config(config, {"train.seg_len": 4, "train.segments_per_update": 2})
    config = change_config(config, {"train.global_batch_size": 2, "train.micro_batch_size": 2})
    config = change_config(config, {"data.path": paths[2]})
    return change_config(
        config, {"data.curriculum": [StageConfig(path=paths[0], until=3), StageConfig(path=paths[1], until=5)]}
    )


def updates(config: Config, count: int, *, step: int = 0, cursors: torch.Tensor | None = None) -> list[Update]:
    cursors = torch.zeros(2, 3, dtype=torch.int64) if cursors is None else cursors
    with closing(
        curriculum_reader(config.data, config.train, world_size=1, rank=0, cursors=cursors, step=step)
    ) as reader:
        return list(islice(reader, count))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_stage_is_read_from_its_beginning_and_any_step_resumes(config: Config, layout: str) -> None:
    config = change_config(config, {"data.layout": layout})
    straight, alone = updates(config, 9), list[Update]()
    for stage, count in zip(stages_of(config.data), (3, 2, 4), strict=True):
        with closing(training_reader(stage.data, config.train, world_size=1, rank=0)) as reader:
            alone += islice(reader, count)
    for one, other in zip(straight, alone, strict=True):
        assert_equal_updates(one, other)
    assert [stage_number(config.data, step) for step in range(7)] == [0, 0, 0, 1, 1, 2, 2]
    assert [(stage.key, stage.first, stage.until) for stage in stages_of(config.data)] == [
        ("data.curriculum[0].path", 0, 3), ("data.curriculum[1].path", 3, 5), ("data.path", 5, None)
    ]  # fmt: skip
    for first in (0, 3, 5):
        assert straight[first].batches[0].is_new_document.all(), "a lane enters the stage with a memory"
    assert straight[2].cursors.any() and straight[4].cursors.any()
    early = with_ends(config.data, [2])
    assert [stage_number(early, step) for step in range(7)] == [0, 0, 1, 1, 1, 2, 2]
    assert [(stage.first, stage.until) for stage in stages_of(early)] == [(0, 2), (2, 5), (5, None)]
    for step in range(1, 9):
        resumed = updates(config, 9 - step, step=step, cursors=straight[step - 1].cursors)
        for one, other in zip(straight[step:], resumed, strict=True):
            assert_equal_updates(one, other)


def test_only_answers_say_that_a_stage_may_end(config: Config) -> None:
    first, second, _ = stages_of(change_config(config, {"data.until_accuracy": 0.5}).data)
    assert answers_of(first, "validation").split == "validation"
    with refused(UnusableError, "data.until_accuracy", "data.curriculum[1].path", "does not score answers alone"):
        answers_of(second, "train")


def test_a_stage_with_another_tokenizer_or_too_few_documents_is_refused_by_name(config: Config) -> None:
    save_tokenizer(count_words(["a"]), config.data.curriculum[1].path)
    with refused(ValueError, "data.curriculum[1].path", "its shards were made with tokenizer"):
        updates(config, 1, step=3)
    save_tokenizer(BytesTokenizer(), config.data.curriculum[1].path)
    config = change_config(config, {"train.global_batch_size": 5, "train.micro_batch_size": 5})
    with refused(UnusableError, "data.curriculum", "train.global_batch_size"):
        updates(config, 1, cursors=torch.zeros(5, 3, dtype=torch.int64))
    other = open_tokenizer(config.data)
    assert [split.name for split in training_splits(config.data, other)] == [
        "short",
        "longer",
        config.data.path.rpartition("/")[2],
    ]
    other.fingerprint = "0123456789abcdef"
    with refused(UnusableError, "data.curriculum"):
        training_splits(config.data, other)


@pytest.mark.parametrize(
    ("curriculum", "key"),
    [
        ("[{path: a, until: 3}, {path: b, until: 3}]", "data.curriculum[1].until"),
        ("[{path: a}]", "data.curriculum[0].until"),
        ("[{until: 3}]", "data.curriculum[0].path"),
        ("[{path: 's3://bucket/a', until: 3}]", "data.curriculum[0].path"),
        ("[{path: a, until: 10}]", "data.curriculum[0].until"),
    ],
)
def test_an_impossible_curriculum_is_refused(curriculum: str, key: str) -> None:
    with refused(ConfigError, key):
        load_config([f"data.curriculum={curriculum}", "train.steps=10"])
    with refused(ConfigError, "train.epochs"):
        load_config(["train.steps=null", "train.epochs=2", "data.curriculum=[{path: a, until: 3}]"])


@pytest.mark.parametrize(
    ("given", "fix"),
    [
        (["data.curriculum=[]", "eval.every=2"], "give data.curriculum"),
        (["eval.every=null"], "set eval.every"),
        (["eval.every=8"], "set eval.every lower"),
    ],
)
def test_an_accuracy_that_no_evaluation_measures_is_refused(given: list[str], fix: str) -> None:
    stage = "data.curriculum=[{path: a, until: 8}]"
    with refused(ConfigError, "data.until_accuracy", fix):
        load_config([stage, "data.until_accuracy=0.9", "train.steps=10", *given])
