"""Generation and scoring by transformers' GPT-2 and by x-transformers, as near to generate.py's cases as they allow.

Their context holds M + T tokens: a key and value of each are kept while a text is generated. To score a text without a
memory, every window of M + T tokens is read for its last T; x-transformers carries its memory of M rows instead.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from lib.peer_models import PEERS, decoder
from torch import Tensor

Calls = dict[str, Callable[[], Any]]


def peers(arguments: argparse.Namespace) -> dict[str, Calls]:
    """Return the calls of every peer that is installed: `prompt`, `prompt and late`, `scoring`."""
    found = {}
    if find_spec("transformers"):
        found["transformers, GPT-2"] = gpt2(arguments)
    if find_spec("x_transformers"):
        found["x-transformers, rotary, fused"] = x_transformers(arguments)
    return found


def gpt2(arguments: argparse.Namespace) -> Calls:
    """Return the calls of transformers' GPT-2."""
    from transformers import GPT2Config, GPT2LMHeadModel

    window = arguments.mem_len + arguments.seg_len
    torch.manual_seed(0)
    model = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=arguments.vocab,
            n_positions=window,
            n_embd=arguments.d_model,
            n_layer=arguments.num_layers,
            n_head=arguments.num_heads,
            n_inner=arguments.d_inner,
            bos_token_id=0,
            eos_token_id=None,
            pad_token_id=0,
        )
    ).eval()
    prompt = torch.randint(1, arguments.vocab, (arguments.lanes, arguments.mem_len))
    whole = torch.randint(1, arguments.vocab, (arguments.lanes, window))

    def write(length: int) -> Callable[[], Any]:
        options = {"max_new_tokens": length, "do_sample": True, "top_p": 0.95, "top_k": 0}
        return lambda: model.generate(prompt, attention_mask=torch.ones_like(prompt), **options)

    @torch.no_grad()
    def score() -> Tensor:
        hidden = model.transformer(whole).last_hidden_state[:, -arguments.seg_len :]
        return F.cross_entropy(model.lm_head(hidden).flatten(0, 1).float(), whole[:, -arguments.seg_len :].flatten())

    return {"prompt": write(1), "prompt and late": write(arguments.seg_len + 1), "scoring": score}


def x_transformers(arguments: argparse.Namespace) -> Calls:
    """Return the calls of x-transformers with rotary positions and fused attention, its fastest."""
    from x_transformers import AutoregressiveWrapper, TransformerWrapper

    torch.manual_seed(0)
    layers = decoder(PEERS["x-transformers, rotary, fused"], arguments)
    lengths = {"max_seq_len": arguments.mem_len + arguments.seg_len + 1, "max_mem_len": arguments.mem_len}
    model = TransformerWrapper(num_tokens=arguments.vocab, attn_layers=layers, tie_embedding=True, **lengths).eval()
    wrapped = AutoregressiveWrapper(model)
    prompt = torch.randint(1, arguments.vocab, (arguments.lanes, arguments.mem_len))
    tokens = torch.randint(1, arguments.vocab, (arguments.lanes, arguments.seg_len))
    memory: list[Any] = [None]

    def write(length: int) -> Callable[[], Any]:
        options = {"filter_logits_fn": "top_p", "filter_kwargs": {"thres": 0.95}, "cache_kv": True}
        return lambda: wrapped.generate(prompt, length, **options)

    @torch.no_grad()
    def score() -> Tensor:
        logits, memory[0] = model(tokens, mems=memory[0], return_mems=True)
        return F.cross_entropy(logits.flatten(0, 1).float(), tokens.flatten())

    for _ in range(4):  # fill the memory
        score()
    return {"prompt": write(1), "prompt and late": write(arguments.seg_len + 1), "scoring": score}
