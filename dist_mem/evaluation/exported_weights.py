"""The weights of an export: every tensor once, by our names or, for a published kind of model, by Hugging Face's."""

from __future__ import annotations

from itertools import chain
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from safetensors.torch import load_model as load_into
from torch import Tensor, nn

from dist_mem.checkpoint.schemas import WEIGHTS
from dist_mem.errors import CheckpointError
from dist_mem.hf.names import check_types, take_published
from dist_mem.model import MemoryLM


def distinct_weights(model: nn.Module) -> dict[str, Tensor]:
    """Return the tensors of the model's state_dict, each under its first name only."""
    names = model.state_dict().keys()
    tensors = chain(model.named_parameters(), model.named_buffers())
    return {name: tensor.detach().contiguous() for name, tensor in tensors if name in names}


def load_exported(model: MemoryLM, directory: Path, *, is_published: bool) -> None:
    """Load the weights of an export.

    Args:
        is_published: they have Hugging Face's names.

    Raises:
        CheckpointError: the file cannot be read, or its names or shapes differ from the model's.
    """
    path = directory / WEIGHTS
    try:
        if not is_published:
            with safe_open(path, "pt") as file:
                check_types({name: file.get_tensor(name).dtype for name in file.keys()}, str(path))  # noqa: SIM118
            load_into(model, path)
        elif left := take_published(model, load_file(path), str(path)):
            raise ValueError(f"it has no {left[0]}")
    except (OSError, RuntimeError, SafetensorError, ValueError) as error:
        raise CheckpointError(f"{path} does not fit its config.yaml: {error}") from error
