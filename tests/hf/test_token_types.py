"""Token types of GPT-2: read off the text, the same for any segments, embedded as Hugging Face's GPT-2 does."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dist_mem.config import ConfigError, TokenTypeConfig, load_config
from dist_mem.contract.subject import CheckedMemory
from dist_mem.hf.folder import load_pretrained
from dist_mem.memory import memory_options
from dist_mem.nn.token_types import TokenTypes
from tests.support.contract_cases import SIZE, check_rules
from tests.support.generating import check_reads_as_anew, trained_model
from tests.support.gpt2_models import LTM, SEG_LEN, VOCAB, build, gpt2_config, save_random_gpt2
from tests.support.messages import refused
from tests.support.paths import ROOT

TYPES = [{"id": 9}, {"id": 3, "after": [1]}, {"id": 4, "after": [2, 0]}, {"id": 5, "after": [0, 1, 0]}]


def configured(types: list[dict[str, Any]] = TYPES) -> list[TokenTypeConfig]:
    return [TokenTypeConfig(**token_type) for token_type in types]


def looped(tokens: list[int]) -> list[int]:
    """The type of every token of a document; of markers that end at one token the last one listed counts."""
    found, current = [], TYPES[0]["id"]
    for place in range(len(tokens)):
        for token_type in TYPES[1:]:
            marker = token_type["after"]
            if tokens[max(0, place - len(marker) + 1) : place + 1] == marker:
                current = token_type["id"]
        found.append(current)
    return found


@pytest.mark.parametrize("sizes", [[24], [8, 8, 8], [1, 8, 8, 7], [5, 8, 8, 3], [5, 0, 8, 8, 3], [1] * 24])
def test_types_are_those_of_the_newest_marker_for_any_segments(sizes: list[int]) -> None:
    tokens = torch.randint(0, 4, (50, 24), generator=torch.Generator().manual_seed(0))
    types = TokenTypes(configured(), 12)
    state, found, begin = types.init_state(len(tokens), "cpu"), [], 0
    for size in sizes:
        segment = torch.full((len(tokens), 24), 1)  # of padding nothing is remembered
        segment[:, :size] = tokens[:, begin : begin + size]
        ids, state = types(segment, torch.full((len(tokens),), size), state)
        found.append(ids[:, :size])
        begin += size
    assert torch.cat(found, dim=1).tolist() == [looped(row) for row in tokens.tolist()]


def test_they_are_embedded_as_in_hugging_faces_gpt2(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed")
    theirs = save_random_gpt2(tmp_path)
    config = gpt2_config(model={"token_types": TYPES, "pretrained": str(tmp_path)})
    model = build(config)
    load_pretrained(model, config.model, VOCAB)
    tokens = torch.randint(0, 4, (3, SEG_LEN), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        state = model.init_state(torch.arange(3), "cpu", torch.float32)
        ours, _ = model.log_probs(tokens, torch.full((3,), SEG_LEN), state=state)
        types = torch.tensor([looped(row) for row in tokens.tolist()])
        expected = theirs(tokens, token_type_ids=types).logits.log_softmax(-1)
    torch.testing.assert_close(ours, expected, rtol=0, atol=2e-5)


def subject(cut: str = "start") -> CheckedMemory:
    """A small GPT-2 with token types around the memory."""
    keys = {"kind": "gpt2", "num_positions": 16, "d_head": None, "token_types": configured()}
    return CheckedMemory(lambda _: LTM, SIZE, cut=cut, keys=keys)


@pytest.mark.parametrize("cut", ["start", "end"])
def test_the_contract_holds_with_types(cut: str) -> None:
    check_rules(subject(cut))


def test_generation_equals_reading_the_document_anew() -> None:
    check_reads_as_anew(trained_model("none")._replace(model=subject().model().double().eval()))


def test_wrong_types_are_refused_by_name() -> None:
    given = ["train.steps=1", "model.kind=gpt2", "model.token_types=[{id: 3}]", "memory.kind=causal"]
    for override, key in (
        ("model.kind=transformer", "model.token_types"),
        ("model.token_types=[{id: 3, after: [1]}]", "model.token_types[0].after"),
        ("model.token_types=[{id: 3}, {id: 4}]", "model.token_types[1].after"),
        ("model.token_types=[{id: -3}]", "model.token_types[0].id"),
    ):
        with refused(ConfigError, key):
            load_config([*given, override])
    with refused(ValueError, "model.token_types"):
        TokenTypes(configured(), 9)


def test_the_dialogue_model_of_the_released_code_loads_and_reads_speakers() -> None:
    names = ["papers/cmu_dog.yaml", "papers/cmu_dog_infinite.yaml", "code/cmu_dog_infinite.yaml"]
    config = load_config([str(ROOT / "configs" / name) for name in names], memory_options=memory_options)
    assert (config.data.cut, config.memory["store"], config.memory["over"]["kind"]) == ("end", "normed", "causal")
    types = TokenTypes(config.model.token_types, 50_257)
    letters = {letter: ord(letter) - ord("!") for letter in "ABD:"}  # as the first ids of GPT-2's vocabulary
    text = [50_256, letters["D"], 198, letters["A"], letters[":"], 5, letters["B"], letters[":"], 7]
    ids: Tensor = types(torch.tensor([text]), torch.tensor([len(text)]), types.init_state(1, "cpu")).ids
    document, first, second = (letters[letter] for letter in "DAB")
    assert ids.tolist() == [[document] * 4 + [first] * 3 + [second] * 2]
