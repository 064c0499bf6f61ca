"""Convert weights between Hugging Face's names and ours.

Parameters that the published model does not have, of a long-term memory or a compression, are named `memory.` and our
name.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import cast

import torch
from torch import Tensor

from dist_mem.hf.gpt2 import GPT2
from dist_mem.hf.layout import Layout, Pair
from dist_mem.hf.llama import LLAMA
from dist_mem.memory.base import Memory
from dist_mem.model import MemoryLM
from dist_mem.nn.low_rank import NAME, low_ranks

LAYOUTS: dict[str, Layout] = {"gpt2": GPT2, "llama": LLAMA}  # by model.kind
OWN = "memory."  # prefix of parameters that the published model does not have
SOFTMAX = "lm_head.weight"
TAPS = ".attention.convolution.taps"  # ends our names of them
_WEIGHT_TYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def full_name(layout: Layout, name: str) -> str | None:
    """Return a name of a file with the prefix that it may lack; None if it is no weight."""
    full = name if name.startswith((layout.prefix, OWN, SOFTMAX)) else f"{layout.prefix}{name}"
    return None if re.fullmatch(layout.ignored, full) else full


def check_types(dtypes: Mapping[str, torch.dtype], where: str) -> None:
    """Raise ValueError for weights that are not floating point of 16 bits or more: copying would convert them."""
    for name, dtype in dtypes.items():
        if dtype not in _WEIGHT_TYPES:
            found, *wanted = (str(each).removeprefix("torch.") for each in (dtype, *_WEIGHT_TYPES))
            raise ValueError(f"{where}: {name} is {found}, but weights must be one of {', '.join(wanted)}")


def host_path(model: MemoryLM, layer_index: int) -> str:
    """Return the path of a block's lowest memory, which has the attention: `blocks.0.memory.over`.

    Raises:
        ValueError: its attention is not of the model's kind.
    """
    layout = LAYOUTS[model.kind]
    memory, path = model.memories()[layer_index], f"blocks.{layer_index}.memory"
    while isinstance(getattr(memory, "over", None), Memory):
        memory, path = cast(Memory, memory.over), f"{path}.over"
    if not isinstance(getattr(memory, "attention", None), layout.attention):
        key = "memory" + path.partition(".memory")[2]
        if hasattr(memory, "over"):
            fix = f"set {key}.over.kind={layout.plain[0]}, the attention beside which it stands"
            raise ValueError(f"{key} has no place for the attention of {layout.name}: {fix}")
        raise ValueError(f"{key} has {layout.fix.format(key=key)}")
    return path


def host_paths(model: MemoryLM) -> list[str]:
    """Return `host_path` of every block. Raises ValueError as it does."""
    return [host_path(model, index) for index in range(len(model.blocks))]


def published_pairs(model: MemoryLM) -> Iterator[Pair]:
    """Yield which of our parameters are which published tensors."""
    return LAYOUTS[model.kind].pairs(model, host_paths(model))


def to_published(model: MemoryLM) -> dict[str, Tensor]:
    """Return the model's weights by published names; a softmax that shares the embedding's is left out.

    What LoRA adds to a weight (`model.lora`) is in it.
    """
    remaining = {name: parameter.detach() for name, parameter in model.named_parameters()}
    for name, low_rank in low_ranks(model).items():
        weight = remaining[f"{name}.weight"]
        remaining[f"{name}.weight"] = (weight + low_rank.product()).to(weight.dtype)
        for part in ("down", "up"):
            del remaining[f"{name}.{NAME}.{part}"]
    published = {}
    for ours, theirs, transposed in published_pairs(model):
        stacked = torch.cat([remaining.pop(name) for name in ours])
        for name, tensor in zip(theirs, stacked.chunk(len(theirs)), strict=True):
            published[name] = (tensor.T if transposed else tensor).contiguous()
    return published | {f"{OWN}{name}": tensor.contiguous() for name, tensor in remaining.items()}


@torch.no_grad()
def take_published(model: MemoryLM, weights: Mapping[str, Tensor], where: str) -> list[str]:
    """Copy published weights into the model.

    Args:
        weights: by published names, with or without the prefix.
        where: the file, for messages.

    Returns:
        Our names of the parameters that `weights` lacks: a long-term memory's, unless it is in the file too.

    Raises:
        ValueError: a weight is missing, has another shape or is no floating point number, or is not in this model; or
            the model has a convolution that was not trained with these weights.
    """
    layout = LAYOUTS[model.kind]
    given = {full: tensor for name, tensor in weights.items() if (full := full_name(layout, name)) is not None}
    check_types({name: tensor.dtype for name, tensor in given.items()}, where)
    pairs, remaining = list(published_pairs(model)), dict(model.named_parameters())
    if not any(SOFTMAX in pair.theirs for pair in pairs):
        given.pop(SOFTMAX, None)  # the embedding, repeated
    for ours, theirs, transposed in pairs:
        targets = [remaining.pop(name) for name in ours]
        num_rows = sum(len(target) for target in targets)
        tensors = [_take(given, name, transposed, layout, where) for name in theirs]
        wanted = (num_rows // len(theirs), *targets[0].shape[1:])
        for name, tensor in zip(theirs, tensors, strict=True):
            if tuple(tensor.shape) != wanted:
                raise ValueError(f"{where}: {name} is for {tuple(tensor.shape)}, the model for {wanted}")
        rows = torch.cat(tensors).split([len(target) for target in targets])
        for target, part in zip(targets, rows, strict=True):
            target.copy_(part)
    for name in [name for name in remaining if f"{OWN}{name}" in given]:
        remaining.pop(name).copy_(given.pop(f"{OWN}{name}"))
    if given:
        raise ValueError(
            f"{where} has {len(given)} tensors that this model has no place for, as {next(iter(given))}: give model "
            "and memory the sizes and the memory of the one it was written from"
        )
    for name in remaining:
        if name.endswith(TAPS):
            key = "memory" + name.removesuffix(TAPS).partition(".memory")[2]
            raise ValueError(
                f"{where} has no weights of a convolution, and with new ones the attention would no longer be the one "
                f"that was trained: leave {key}.kernel out"
            )
    return list(remaining)


def _take(given: dict[str, Tensor], name: str, transposed: bool, layout: Layout, where: str) -> Tensor:
    if name not in given:
        raise ValueError(f"{where} has no {name}: it is not {layout.name}, or one with fewer layers")
    tensor = given.pop(name)
    return tensor.T if transposed else tensor
