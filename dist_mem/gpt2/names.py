"""GPT-2's weights by the names that Hugging Face gives them, and by ours.

Its linear layers keep their matrices transposed, and one of them makes queries, keys and values; ours are two. What it
has no name for, a long-term memory or a compression, is `memory.` and our name.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import cast

import torch
from torch import Tensor

from dist_mem.memory.base import Memory
from dist_mem.model import MemoryLM
from dist_mem.nn.plain_attention import PlainAttention

OWN = "memory."  # prefix of what is not in GPT-2
_IGNORED = re.compile(r"h\.\d+\.attn\.(masked_)?bias|lm_head\.weight")  # masks that old files hold; the embedding again


def plain_name(name: str) -> str | None:
    """A published name without `transformer.`; None for what is no weight of its own."""
    short = name.removeprefix("transformer.")
    return None if _IGNORED.fullmatch(short) else short


def host_path(model: MemoryLM, layer_index: int) -> str:
    """Where the attention of a block is, below any memory that lies over it: `blocks.0.memory.over`.

    Raises:
        ValueError: that is no attention of GPT-2's kind.
    """
    memory, path = model.memories()[layer_index], f"blocks.{layer_index}.memory"
    while isinstance(getattr(memory, "over", None), Memory):
        memory, path = cast(Memory, memory.over), f"{path}.over"
    if not isinstance(getattr(memory, "attention", None), PlainAttention):
        key = "memory" + path.partition(".memory")[2]
        raise ValueError(
            f"{key} has relative positions, which no GPT-2 has weights for: set {key}.kind=causal, or compressive with "
            f"{key}.positions=alibi"
        )
    return path


def _modules(model: MemoryLM) -> Iterator[tuple[str, str]]:
    """Our name and the published one of every module with a weight and a bias, but of queries, keys and values."""
    yield "final_norm", "ln_f"
    for index in range(len(model.blocks)):
        host, block = host_path(model, index), f"blocks.{index}"
        yield f"{host}.norm", f"h.{index}.ln_1"
        yield f"{host}.attention.output", f"h.{index}.attn.c_proj"
        yield f"{block}.feed_forward_norm", f"h.{index}.ln_2"
        yield f"{block}.feed_forward.expand", f"h.{index}.mlp.c_fc"
        yield f"{block}.feed_forward.contract", f"h.{index}.mlp.c_proj"


def _pairs(model: MemoryLM) -> Iterator[tuple[tuple[str, ...], str]]:
    """Our names and the published one of every tensor; of several, the rows of the published one are ours in turn."""
    yield ("embedding.bins.0.weight",), "wte.weight"
    yield ("embedding.positions",), "wpe.weight"
    for own, published in _modules(model):
        for kind in ("weight", "bias"):
            yield (f"{own}.{kind}",), f"{published}.{kind}"
    for index in range(len(model.blocks)):
        attention = f"{host_path(model, index)}.attention"
        for kind in ("weight", "bias"):
            yield (f"{attention}.query.{kind}", f"{attention}.key_value.{kind}"), f"h.{index}.attn.c_attn.{kind}"


def _turned(name: str, tensor: Tensor) -> Tensor:
    return tensor.T if re.search(r"\.c_\w+\.weight$", name) else tensor


def to_published(model: MemoryLM) -> dict[str, Tensor]:
    """The model's weights by published names, as GPT2LMHeadModel has them; the softmax is the embedding."""
    own = {name: parameter.detach() for name, parameter in model.named_parameters()}
    published = {}
    for names, name in _pairs(model):
        tensors = [own.pop(part) for part in names]
        published[f"transformer.{name}"] = _turned(name, torch.cat(tensors)).contiguous()
    return published | {f"{OWN}{name}": tensor.contiguous() for name, tensor in own.items()}


@torch.no_grad()
def take_published(model: MemoryLM, weights: Mapping[str, Tensor], where: str) -> list[str]:
    """Give the model published weights.

    Args:
        weights: by published names, with or without `transformer.`.
        where: the file, for messages.

    Returns:
        Our names of the parameters that the weights say nothing of: a long-term memory's, unless it is there too.

    Raises:
        ValueError: one is missing, has another shape, or has no place in this model.
    """
    given = {short: tensor for name, tensor in weights.items() if (short := plain_name(name)) is not None}
    own = dict(model.named_parameters())
    for names, name in _pairs(model):
        if name not in given:
            raise ValueError(f"{where} has no {name}: it is no GPT-2, or one with fewer layers")
        targets = [own.pop(part) for part in names]
        tensor = _turned(name, given.pop(name))
        wanted = (sum(target.shape[0] for target in targets), *targets[0].shape[1:])
        if tuple(tensor.shape) != wanted:
            raise ValueError(f"{where}: {name} is for {tuple(tensor.shape)}, the model for {wanted}")
        for target, rows in zip(targets, tensor.split([len(target) for target in targets]), strict=True):
            target.copy_(rows)
    for name in [name for name in own if f"{OWN}{name}" in given]:
        own.pop(name).copy_(given.pop(f"{OWN}{name}"))
    if given:
        raise ValueError(
            f"{where} has {len(given)} tensors that this model has no place for, as {next(iter(given))}: give model "
            "and memory the sizes and the memory of the one it was written from"
        )
    return list(own)
