"""Training steps of x-transformers' models, as near to our Transformer-XL as its options allow (peers.py).

Equal are width, heads, layers, feed-forward with ReLU, post-norm, tied embeddings and softmax without another norm, no
dropout, a memory of the blocks' last M inputs, and the fp32 loss. Positions differ: T5's relative bias, or rotary.
"""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F
from lib.speed import Step
from torch import nn

PEERS = {  # x-transformers refuses its fused attention with a relative bias
    "x-transformers, relative bias": {"rel_pos_bias": True},
    "x-transformers, rotary": {"rotary_pos_emb": True},
    "x-transformers, rotary, fused": {"rotary_pos_emb": True, "attn_flash": True},
}


def decoder(options: dict[str, bool], arguments: argparse.Namespace) -> nn.Module:
    """Return x-transformers' layers."""
    from x_transformers import Decoder  # not at the top: peers.py runs without it

    layers: nn.Module = Decoder(
        dim=arguments.d_model,
        depth=arguments.num_layers,
        heads=arguments.num_heads,
        attn_dim_head=arguments.d_head,
        ff_mult=arguments.d_inner / arguments.d_model,
        ff_custom_activation=nn.ReLU(),
        pre_norm=False,
        verbose=False,
        **options,
    )
    return layers


def peer_step(options: dict[str, bool], dtype: torch.dtype, arguments: argparse.Namespace) -> tuple[Step, nn.Module]:
    """Return a function that runs forward and backward of all lanes, and its model."""
    from x_transformers import TransformerWrapper  # as in `decoder`

    torch.manual_seed(0)
    layers = decoder(options, arguments)
    lengths = {"max_seq_len": arguments.seg_len, "max_mem_len": arguments.mem_len}
    model = TransformerWrapper(num_tokens=arguments.vocab, attn_layers=layers, tie_embedding=True, **lengths).to(dtype)
    tokens = torch.randint(arguments.vocab, (arguments.lanes, arguments.seg_len))
    memory = [None]

    def step() -> None:
        logits, memory[0] = model(tokens, mems=memory[0], return_mems=True)
        F.cross_entropy(logits.flatten(0, 1).float(), tokens.flatten()).backward()
        model.zero_grad()

    for _ in range(4):  # fill the memory, warm up
        step()
    return step, model
