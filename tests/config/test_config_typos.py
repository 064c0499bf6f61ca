"""Misspelled keys: thirty seeded ones at depths 1 to 4, and right keys in the wrong block."""

import random
import string
from dataclasses import fields
from itertools import zip_longest
from pathlib import Path

import pytest
import yaml

from dist_mem.config import ConfigError, known_keys, load_config
from dist_mem.memory import memory_class, memory_kinds, memory_options
from tests.support.configs import nested
from tests.support.messages import refused
from tests.support.paths import ROOT

NUM_BY_DEPTH = {1: 6, 2: 12, 3: 12}
MIN_RIGHT = 27


def memory_keys() -> list[str]:
    return [f"memory.{field.name}" for kind in memory_kinds() for field in fields(memory_class(kind).Options)]


def misspell(word: str, draw: random.Random) -> str:
    """Drop, double or replace a letter, or swap two neighbours."""
    mistake, place = draw.choice(["drop", "double", "swap", "replace"]), draw.randrange(len(word))
    if mistake == "drop":
        return word[:place] + word[place + 1 :]
    if mistake == "double":
        return word[:place] + word[place] + word[place:]
    if mistake == "replace":
        return word[:place] + draw.choice(string.ascii_lowercase) + word[place + 1 :]
    place = draw.randrange(len(word) - 1)
    return word[:place] + word[place + 1] + word[place] + word[place + 2 :]


def draw_typos(seed: int) -> list[tuple[str, str]]:
    """(key, key with its last part misspelled): our keys and DeepSpeed's in turn; one of a memory and the optimizer."""
    draw = random.Random(seed)
    of_a_model = "deepspeed.zero_optimization.stage"  # DeepSpeed checks what is beside it
    everything = [*(key for key in known_keys() if key != of_a_model), *memory_keys()]
    of_optimizer = [key for key in everything if key.startswith("optimizer.")]
    always = [draw.choice(memory_keys()), draw.choice(of_optimizer)]  # whichever keys there are
    shuffled = [*always, *draw.sample(everything, len(everything))]
    pairs: list[tuple[str, str]] = []
    for depth, number in NUM_BY_DEPTH.items():
        keys = [key for key in dict.fromkeys(shuffled) if key.count(".") + 1 == depth]
        deepspeed = [key for key in keys if key.startswith("deepspeed.")]
        ours = [key for key in keys if key not in deepspeed]
        in_turn = [key for pair in zip_longest(ours, deepspeed) for key in pair if key is not None]
        for key in in_turn[:number]:
            block, dot, name = key.rpartition(".")
            typo = key
            while typo in everything:  # a letter replaced by itself, or two equal ones swapped
                typo = f"{block}{dot}{misspell(name, draw)}"
            pairs.append((key, typo))
    return pairs


def refusal(key: str, path: Path) -> str:
    """What a file with this key is refused with; it must be refused, and named."""
    tree = nested(key, 1)
    train, memory = tree.get("train", {}), tree.get("memory", {})
    tree |= {"train": {"steps": 1, **train}, "memory": {"kind": "transformer_xl", **memory}}
    path.write_text(yaml.safe_dump(tree), encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        load_config([str(path)], memory_options=memory_options)
    message = str(caught.value)
    assert message.startswith(f"{path}:")
    assert f": {key.replace('[]', '[0]')}: unknown key; " in message
    return message.split("unknown key; ")[1]


def test_thirty_typos_are_refused_and_nearly_all_understood(tmp_path: Path) -> None:
    typos = draw_typos(seed=0)
    assert len(typos) == sum(NUM_BY_DEPTH.values()) == 30
    understood = [
        refusal(typo, tmp_path / "typo.yaml") == f"did you mean {key.replace('[]', '[0]')}?" for key, typo in typos
    ]
    assert sum(understood) >= MIN_RIGHT, list(zip(typos, understood, strict=True))
    assert {typo.split(".")[0] for _, typo in typos} >= {"memory", "deepspeed", "optimizer"}


MISPLACED = ["train.lr", "model.seg_len", "memory.global_batch_size", "lr", "stage", "zero_optimization.stage"]
MISPLACED += ["train.weigth_decay", "deepspeed.stage"]


@pytest.mark.parametrize(
    ("key", "said"), [*((key, "did you mean") for key in MISPLACED), ("checkpoint.qqqq", "known keys here")]
)
def test_right_key_in_the_wrong_block_is_found_or_else_the_keys_there_are(key: str, said: str) -> None:
    with refused(ConfigError, said):
        load_config([f"{key}=3", "train.steps=1"], memory_options=memory_options)


@pytest.mark.parametrize("path", sorted((ROOT / "configs" / "memory").glob("*.yaml")), ids=lambda path: path.stem)
def test_the_name_of_a_shipped_memory_leads_to_its_file(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`memory.kind=deltanet` suggested titans, and `memory/deltanet` nothing."""
    monkeypatch.chdir(ROOT)
    for words in ([f"memory/{path.stem}"], [path.stem], [f"confgs/memory/{path.name}"]):
        with pytest.raises(ConfigError, match=f"did you mean configs/memory/{path.name}"):
            load_config([*words, "train.steps=1"])
    if path.stem not in memory_kinds():
        with pytest.raises(ConfigError, match=f"did you mean the file configs/memory/{path.name}"):
            load_config([f"memory.kind={path.stem}", "train.steps=1"], memory_options=memory_options)
    with pytest.raises(ConfigError, match=f"give configs/memory/{path.name}"):
        load_config([f"memory={path.stem}", "train.steps=1"])


def test_a_name_that_is_no_memory_is_answered_with_the_memories() -> None:
    """`memory=NAME` of one that exists is answered with how to give it, which must be accepted."""
    with refused(ConfigError, "foo", "memorizing", "transformer_xl") as caught:
        load_config(["memory=foo", "train.steps=1"], memory_options=memory_options)
    assert "memory.kind=foo" not in str(caught.value) and "did you mean" not in str(caught.value)
    with refused(ConfigError, "memory.kind=causal"):
        load_config(["memory=causal", "train.steps=1"], memory_options=memory_options)
    load_config(["memory.kind=causal", "train.steps=1"], memory_options=memory_options)


@pytest.mark.parametrize("given", ["memory=LONG", "memory.kind=LONG", "memory.kind=LONG.py:Memory"])
def test_a_name_that_no_file_can_have_is_answered_by_its_key(given: str) -> None:
    """The file system's error named neither the key nor the user's file."""
    given = given.replace("LONG", 300 * "x")
    with refused(ConfigError, "command line", given.partition("=")[0]) as caught:
        load_config([given, "train.steps=1"], memory_options=memory_options)
    assert "None" not in str(caught.value)


def test_a_memory_of_twenty_thousand_letters_is_answered_shortly_with_its_file(tmp_path: Path) -> None:
    (tmp_path / "long.yaml").write_text("memory: " + 20_000 * "x" + "\ntrain: {steps: 1}\n", encoding="utf-8")
    with refused(ConfigError, "long.yaml", "memory") as caught:
        load_config([str(tmp_path / "long.yaml")], memory_options=memory_options)
    assert len(str(caught.value)) < 1000


def test_several_directories_as_one_path_are_answered_with_both_ways_to_read_them() -> None:
    with refused(ConfigError, "data.path", "data.curriculum", "data.mixture"):
        load_config(["data.path=[a,b]", "train.steps=1"])
