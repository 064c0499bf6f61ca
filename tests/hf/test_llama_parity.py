"""A Llama and a Qwen2 with random weights: logits, gradients and segments equal those of transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import RMSNorm

from dist_mem.hf.folder import load_pretrained
from dist_mem.hf.names import to_published
from dist_mem.model import MemoryLM
from tests.support.gpt2_models import build, fresh
from tests.support.llama_models import CACHE, LTM, SEG_LEN, VOCAB, ExactRotary, llama_config, save_random_llama

pytest.importorskip("transformers", reason="transformers is not installed")
QWEN = {"tie_embeddings": True, "qkv_bias": True}


def pair(folder: Path, memory: dict[str, Any] | None = None, *, qwen: bool = False, **model: Any) -> Any:
    """Return a model of transformers and ours with its weights, read from several files."""
    theirs = save_random_llama(folder, qwen=qwen, shard="10KB")
    assert len(list(folder.glob("*.safetensors"))) > 3
    keys = {**(QWEN if qwen else {}), **model}
    config = llama_config(memory, model={"pretrained": str(folder), **keys})
    ours = build(config)
    left = load_pretrained(ours, config.model, VOCAB)
    assert bool(left) == (memory is not None and memory["kind"] == "infinite")
    return theirs, ours


def exact(theirs: Any, ours: MemoryLM) -> None:
    """Turn both to float64; transformers computes angles and norms in float32 in every precision."""
    ours.double()
    theirs.double().model.rotary_emb = ExactRotary(6, 10_000.0)
    for module in theirs.modules():
        for name, norm in list(module.named_children()):
            if type(norm).__name__.endswith("RMSNorm"):
                setattr(module, name, RMSNorm(norm.weight.shape, eps=norm.variance_epsilon))
                getattr(module, name).weight = norm.weight


def some_tokens(num_tokens: int) -> Tensor:
    return torch.randint(0, VOCAB, (2, num_tokens), generator=torch.Generator().manual_seed(2))


def log_probs(model: MemoryLM, tokens: Tensor, dtype: torch.dtype) -> Tensor:
    """Read tokens segment by segment, with the memory."""
    state, found = fresh(model, 2, dtype), []
    for segment in tokens.split(SEG_LEN, dim=1):
        part, state = model.log_probs(segment, torch.full((2,), SEG_LEN), state=state)
        found.append(part)
    return torch.cat(found, dim=1)


@pytest.mark.parametrize(("qwen", "memory"), [(False, "none"), (False, "causal"), (True, "none")])
def test_logits_and_gradients_are_those_of_transformers(tmp_path: Path, qwen: bool, memory: str) -> None:
    """1e-5 in float32, with the default angles of transformers; 1e-10 in float64."""
    theirs, ours = pair(tmp_path, {"kind": memory}, qwen=qwen)
    tokens = some_tokens(SEG_LEN)
    with torch.no_grad():
        expected = theirs(tokens).logits.log_softmax(-1)
        torch.testing.assert_close(log_probs(ours, tokens, torch.float32), expected, rtol=1e-5, atol=1e-5)
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


def test_segments_with_a_cache_are_one_long_text(tmp_path: Path) -> None:
    """While the cache holds all that was read: three segments, at every depth, in every block."""
    theirs, ours = pair(tmp_path, CACHE)
    exact(theirs, ours)
    tokens = some_tokens(3 * SEG_LEN)
    with torch.no_grad():
        expected = theirs(tokens).logits.log_softmax(-1)
        found = log_probs(ours, tokens, torch.float64)
    torch.testing.assert_close(found, expected.to(found.dtype), rtol=1e-10, atol=1e-10)


def test_a_place_in_the_document_changes_nothing(tmp_path: Path) -> None:
    """A cache of M rows in one block: the fifth segment is that of a text that begins M tokens before it."""
    _, ours = pair(tmp_path, CACHE)
    one_block = build(llama_config(CACHE, model={"num_layers": 1, "init_std": 0.5})).double()
    tokens = some_tokens(5 * SEG_LEN)
    with torch.no_grad():
        whole = log_probs(one_block, tokens, torch.float64)[:, -SEG_LEN:]
        window = log_probs(one_block, tokens[:, -3 * SEG_LEN :], torch.float64)[:, -SEG_LEN:]
        deep = log_probs(ours, tokens, torch.float32)[:, -SEG_LEN:]
        shallow = log_probs(ours, tokens[:, -3 * SEG_LEN :], torch.float32)[:, -SEG_LEN:]
    torch.testing.assert_close(whole, window, rtol=1e-12, atol=1e-12)
    assert (deep - shallow).abs().max() > 1e-3, "through several blocks it sees further"


def test_a_long_term_memory_begins_beside_the_pretrained_weights(tmp_path: Path) -> None:
    """`output_init: 0`: the text is read as without it, bit for bit."""
    _, plain = pair(tmp_path, CACHE)
    _, ours = pair(tmp_path, {**LTM, "over": CACHE, "output_init": 0.0})
    tokens = some_tokens(4 * SEG_LEN)
    with torch.no_grad():
        assert torch.equal(log_probs(ours, tokens, torch.float32), log_probs(plain, tokens, torch.float32))
