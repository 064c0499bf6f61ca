"""dist_mem: train transformers that carry memory through whole books, with PyTorch and DeepSpeed.

Words
    document   a book, an article, a dialogue
    segment    T consecutive tokens of one document, the unit of one forward pass
    lane       one row of the global batch; it reads documents one after another
    memory     the state that a lane carries from one segment to the next
    STM, LTM   short-term memory (recent hidden states), long-term memory (older, compressed or continuous)
    rank       one process of the job; world: all ranks
    shard      one tar file of documents
    epoch      every document exactly once
    cursor     the position of a lane: epoch, place in the plan, token offset

Shape letters, used in every comment and docstring
    B lanes of a rank    T segment length      M short-term memory length    C compressed memory length
    N basis functions    D model width         H heads                       K head width
    V vocabulary         G global lanes        L layers

From Python (docs/start/python.md; `import dist_mem` itself loads nothing)
    load     a trained Model from a run, a checkpoint, an export or MLflow
    train    start or resume a run; returns its folder
    Model    score texts (Scores), read a text into a Memory, generate with a Sampling, inspect what memory changed
    Memory   what a model remembers of the texts it has read; save and load it
    RunError every error that names what to change; ValueErrors among them are about your input
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from dist_mem.version import __version__ as __version__

if TYPE_CHECKING:
    from dist_mem.api.model import Model, Scores, load
    from dist_mem.api.training import train
    from dist_mem.errors import RunError
    from dist_mem.generation.generate import Sampling
    from dist_mem.generation.text_memory import Memory

__all__ = ["Memory", "Model", "RunError", "Sampling", "Scores", "load", "train"]

_MODULES = {
    **{"Memory": "generation.text_memory", "Sampling": "generation.generate", "RunError": "errors"},
    **dict.fromkeys(("Model", "Scores", "load"), "api.model"),
    "train": "api.training",
}


def __getattr__(name: str) -> Any:
    """Import a name on first use, because torch takes seconds."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"dist_mem.{_MODULES[name]}"), name)
