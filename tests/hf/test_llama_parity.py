"""Models of every kind with random weights: logits, gradients and segments equal those of transformers, both ways."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import RMSNorm

from dist_mem.config.schema import ROPE_KINDS
from dist_mem.hf import llama
from dist_mem.hf.folder import load_pretrained
from dist_mem.hf.names import LAYOUTS, to_published
from dist_mem.model import MemoryLM
from tests.support import gpt2_models
from tests.support.gpt2_models import build, fresh, gpt2_config, save_random_gpt2
from tests.support.llama_models import (
    CACHE,
    PUBLISHED,
    SEG_LEN,
    VOCAB,
    ExactRotary,
    llama_config,
    model_keys,
    save_random_llama,
)

transformers: Any = pytest.importorskip("transformers", reason="transformers is not installed")
KINDS = [*PUBLISHED, "GPT-2"]
PLAIN_ROPE = [kind for kind, (_, changes) in PUBLISHED.items() if "rope_parameters" not in changes]


def pair(folder: Path, kind: str = "Llama 2", memory: dict[str, Any] | None = None, **train: Any) -> Any:
    """Return a model of transformers and ours with its weights, read from several files."""
    if kind == "GPT-2":
        theirs, config = save_random_gpt2(folder), gpt2_config(memory, model={"pretrained": str(folder)}, train=train)
    else:
        theirs = save_random_llama(folder, kind, shard="10KB")
        assert len(list(folder.glob("*.safetensors"))) > 3
        config = llama_config(memory, model=model_keys(folder), train=train)
    ours = build(config)
    left = load_pretrained(ours, config.model, VOCAB)
    assert bool(left) == (memory is not None and memory["kind"] == "infinite")
    return theirs, ours, config


def exact(theirs: Any, ours: MemoryLM) -> None:
    """Turn both to float64; transformers computes angles and norms in float32 in every precision."""
    ours.double()
    width = theirs.config.head_dim if hasattr(theirs.config, "head_dim") else 6
    theirs.double().model.rotary_emb = ExactRotary(width, 10_000.0)
    for module in list(theirs.modules()):
        for name, norm in list(module.named_children()):
            if type(norm).__name__.endswith("RMSNorm"):
                setattr(module, name, RMSNorm(norm.weight.shape, eps=norm.variance_epsilon))
                getattr(module, name).weight = norm.weight


def some_tokens(num_tokens: int) -> Tensor:
    return torch.randint(0, VOCAB, (2, num_tokens), generator=torch.Generator().manual_seed(2))


@torch.no_grad()
def log_probs(model: MemoryLM, tokens: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Read tokens segment by segment, with the memory."""
    return gpt2_models.log_probs(model, tokens.split(SEG_LEN, dim=1), dtype)


@torch.no_grad()
def logits_of(theirs: Any, tokens: Tensor) -> Tensor:
    logits: Tensor = theirs(tokens).logits.log_softmax(-1)
    return logits


def assert_near(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_every_kind_of_model_and_of_rotary_positions_is_compared() -> None:
    assert {name.lower() for name, _ in PUBLISHED.values()} == set(llama.KINDS)
    ropes = {
        changes["rope_parameters"]["rope_type"] for _, changes in PUBLISHED.values() if "rope_parameters" in changes
    }
    assert ropes == set(ROPE_KINDS)


@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_those_of_transformers_both_ways(tmp_path: Path, kind: str) -> None:
    """1e-5 in float32: within a segment, over three with a memory that holds them, and of what is written back."""
    theirs, ours, config = pair(tmp_path / "theirs", kind, {"kind": "causal"})
    tokens = some_tokens(3 * SEG_LEN)
    assert_near(log_probs(ours, tokens[:, :SEG_LEN]), logits_of(theirs, tokens[:, :SEG_LEN]))
    if kind != "GPT-2":
        _, with_memory, _ = pair(tmp_path / "theirs", kind, CACHE)
        assert_near(log_probs(with_memory, tokens), logits_of(theirs, tokens))
    back = tmp_path / "back"
    back.mkdir()
    layout = LAYOUTS[config.model.kind]
    save_file(to_published(ours), back / "model.safetensors", metadata={"format": "pt"})
    content = {**layout.content(config.model), "vocab_size": VOCAB, "bos_token_id": 1, "eos_token_id": 1}
    (back / "config.json").write_text(json.dumps(content), encoding="utf-8")
    if kind != "GPT-2":
        assert {**model_keys(back), "pretrained": None} == {**model_keys(tmp_path / "theirs"), "pretrained": None}
    again = transformers.AutoModelForCausalLM.from_pretrained(back).eval()
    length = SEG_LEN if kind == "GPT-2" else len(tokens[0])
    wanted = "Llama" if kind == "Mistral, no window" else PUBLISHED.get(kind, ("GPT2LMHead", {}))[0]
    assert type(again).__name__.startswith(wanted)
    assert_near(logits_of(again, tokens[:, :length]), logits_of(theirs, tokens[:, :length]))


def stripped(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """Of the model without its softmax, as `LlamaModel` writes it; a softmax of its own stays."""
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}


FORMS: dict[str, Callable[[dict[str, Tensor], str], dict[str, Tensor]]] = {
    "bfloat16": lambda tensors, _: {name: tensor.bfloat16() for name, tensor in tensors.items()},
    "float16": lambda tensors, _: {name: tensor.half() for name, tensor in tensors.items()},
    "no prefix": stripped,
    "one file": lambda tensors, _: tensors,
}


@pytest.mark.parametrize("kind", KINDS)
def test_files_of_every_form_give_weights_in_float32(tmp_path: Path, kind: str) -> None:
    """Those of the file, bit for bit; a tied softmax that is in the file too is the embedding."""
    theirs, ours, config = pair(tmp_path, kind, {"kind": "causal"})
    tensors = {name: tensor for path in tmp_path.glob("*.safetensors") for name, tensor in load_file(path).items()}
    assert ("lm_head.weight" in tensors) != theirs.config.tie_word_embeddings
    embedding = theirs.get_input_embeddings().weight.detach()
    tensors = {"lm_head.weight": embedding.clone(), **tensors}
    for path in [*tmp_path.glob("*.safetensors"), *tmp_path.glob("*.index.json")]:
        path.unlink()
    published, layout = to_published(ours), LAYOUTS[config.model.kind]
    for name, form in FORMS.items():
        save_file(form(tensors, layout.prefix), tmp_path / "model.safetensors")
        model = build(config)
        assert load_pretrained(model, config.model, VOCAB) == []
        of_file = {key: form({key: tensor}, "")[key].float() for key, tensor in published.items()}
        for key, tensor in to_published(model).items():
            assert tensor.dtype == torch.float32 and torch.equal(tensor, of_file[key]), (name, key)


@pytest.mark.parametrize("kind", PLAIN_ROPE)
def test_gradients_are_those_of_transformers(tmp_path: Path, kind: str) -> None:
    """1e-10 in float64."""
    theirs, ours, _ = pair(tmp_path, kind, {"kind": "causal"})
    tokens = some_tokens(SEG_LEN)
    exact(theirs, ours)
    targets = some_tokens(SEG_LEN + 1)[:, 1:]
    expected = -theirs(tokens).logits.log_softmax(-1).gather(2, targets[..., None])[..., 0]
    found = ours(tokens, targets, torch.full((2,), SEG_LEN), state=fresh(ours, 2, torch.float64)).nll
    torch.testing.assert_close(found, expected.to(found.dtype), rtol=1e-6, atol=1e-6)  # losses are in float32
    state = fresh(ours, 2, torch.float64)
    mine = -ours.log_probs(tokens, torch.full((2,), SEG_LEN), state=state)[0].double().gather(2, targets[..., None])
    torch.testing.assert_close(mine[..., 0], expected, rtol=1e-10, atol=1e-10)
    for loss in (expected, mine):
        loss.sum().backward()
    with torch.no_grad():
        for parameter in ours.parameters():
            parameter.copy_(parameter.grad)
    gradients = to_published(ours)
    for name, parameter in theirs.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-9, atol=1e-10, msg=name)


def test_a_window_needs_a_cache_of_one_row_less_for_a_text_of_any_length(tmp_path: Path) -> None:
    theirs, ours, config = pair(tmp_path, "Mistral", {"kind": "transformer_xl", "mem_len": 4})
    assert config.model.sliding_window == 5
    exact(theirs, ours)
    tokens = some_tokens(5 * SEG_LEN)
    expected, found = logits_of(theirs, tokens), log_probs(ours, tokens, torch.float64)
    torch.testing.assert_close(found, expected.to(found.dtype), rtol=1e-10, atol=1e-10)


def test_a_place_in_the_document_changes_nothing(tmp_path: Path) -> None:
    """A cache of M rows in one block: the fifth segment is that of a text that begins M tokens before it."""
    _, ours, _ = pair(tmp_path, memory=CACHE)
    one_block = build(llama_config(CACHE, model={"num_layers": 1, "init_std": 0.5})).double()
    tokens = some_tokens(5 * SEG_LEN)
    whole = log_probs(one_block, tokens, torch.float64)[:, -SEG_LEN:]
    window = log_probs(one_block, tokens[:, -3 * SEG_LEN :], torch.float64)[:, -SEG_LEN:]
    deep = log_probs(ours, tokens)[:, -SEG_LEN:]
    shallow = log_probs(ours, tokens[:, -3 * SEG_LEN :])[:, -SEG_LEN:]
    torch.testing.assert_close(whole, window, rtol=1e-12, atol=1e-12)
    assert (deep - shallow).abs().max() > 1e-3, "through several blocks it sees further"
