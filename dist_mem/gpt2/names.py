"""Convert GPT-2's weights between Hugging Face's names and ours.

Its linear layers store their matrices transposed, and one layer makes queries, keys and values; ours has two for them.
Parameters that GPT-2 does not have, of a long-term memory or a compression, are named `memory.` and our name.
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

OWN = "memory."  # prefix of parameters that GPT-2 does not have
_IGNORED = re.compile(r"h\.\d+\.attn\.(masked_)?bias|lm_head\.weight")  # masks in old files; the embedding, repeated


def plain_name(name: str) -> str | None:
    """Return a published name without `transformer.`; None for a mask or a repeated weight."""
    short = name.removeprefix("transformer.")
    return None if _IGNORED.fullmatch(short) else short


def host_path(model: MemoryLM, layer_index: int) -> str:
    """Return the path of a block's lowest memory, which has the attention: `blocks.0.memory.over`.

    Raises:
        ValueError: its attention is not of GPT-2's kind.
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
    """Yield our name and the published one of all modules with a weight and a bias, except queries, keys and values."""
    yield "final_norm", "ln_f"
    for index in range(len(model.blocks)):
        host, block = host_path(model, index), f"blocks.{index}"
        yield f"{host}.norm", f"h.{index}.ln_1"
        yield f"{host}.attention.output", f"h.{index}.attn.c_proj"
        yield f"{block}.feed_forward_norm", f"h.{index}.ln_2"
        yield f"{block}.feed_forward.expand", f"h.{index}.mlp.c_fc"
        yield f"{block}.feed_forward.contract", f"h.{index}.mlp.c_proj"


def _pairs(model: MemoryLM) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield our names and the published one of every tensor; a published tensor of several names stacks their rows."""
    yield ("embedding.bins.0.weight",), "wte.weight"
    yield ("embedding.positions",), "wpe.weight"
    for ours, published in _modules(model):
        for kind in ("weight", "bias"):
            yield (f"{ours}.{kind}",), f"{published}.{kind}"
    for index in range(len(model.blocks)):
        attention = f"{host_path(model, index)}.attention"
        for kind in ("weight", "bias"):
            yield (f"{attention}.query.{kind}", f"{attention}.key_value.{kind}"), f"h.{index}.attn.c_attn.{kind}"


def _transposed(name: str, tensor: Tensor) -> Tensor:
    """Transpose the matrices of linear layers, which are the only ones that GPT-2 stores transposed."""
    return tensor.T if re.search(r"\.c_\w+\.weight$", name) else tensor


def to_published(model: MemoryLM) -> dict[str, Tensor]:
    """Return the model's weights by published names, as in GPT2LMHeadModel; the embedding is also the softmax."""
    remaining = {name: parameter.detach() for name, parameter in model.named_parameters()}
    published = {}
    for names, name in _pairs(model):
        tensors = [remaining.pop(part) for part in names]
        published[f"transformer.{name}"] = _transposed(name, torch.cat(tensors)).contiguous()
    return published | {f"{OWN}{name}": tensor.contiguous() for name, tensor in remaining.items()}


@torch.no_grad()
def take_published(model: MemoryLM, weights: Mapping[str, Tensor], where: str) -> list[str]:
    """Copy published weights into the model.

    Args:
        weights: by published names, with or without `transformer.`.
        where: the file, for messages.

    Returns:
        Our names of the parameters that `weights` lacks: a long-term memory's, unless it is in the file too.

    Raises:
        ValueError: a weight is missing, has another shape, or is not in this model.
    """
    given = {short: tensor for name, tensor in weights.items() if (short := plain_name(name)) is not None}
    remaining = dict(model.named_parameters())
    for names, name in _pairs(model):
        if name not in given:
            raise ValueError(f"{where} has no {name}: it is no GPT-2, or one with fewer layers")
        targets = [remaining.pop(part) for part in names]
        tensor = _transposed(name, given.pop(name))
        wanted = (sum(target.shape[0] for target in targets), *targets[0].shape[1:])
        if tuple(tensor.shape) != wanted:
            raise ValueError(f"{where}: {name} is for {tuple(tensor.shape)}, the model for {wanted}")
        for target, rows in zip(targets, tensor.split([len(target) for target in targets]), strict=True):
            target.copy_(rows)
    for name in [name for name in remaining if f"{OWN}{name}" in given]:
        remaining.pop(name).copy_(given.pop(f"{OWN}{name}"))
    if given:
        raise ValueError(
            f"{where} has {len(given)} tensors that this model has no place for, as {next(iter(given))}: give model "
            "and memory the sizes and the memory of the one it was written from"
        )
    return list(remaining)
