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
from warnings import warn

from dist_mem.version import __version__ as __version__

if TYPE_CHECKING:
    from dist_mem.api.memory import Memory
    from dist_mem.api.model import Model, Scores, load
    from dist_mem.api.training import train
    from dist_mem.errors import RunError
    from dist_mem.generation.sampling import Sampling

__all__ = ["Memory", "Model", "RunError", "Sampling", "Scores", "load", "train"]

_MODULES = {
    **{"Memory": "api.memory", "Model": "api.model", "RunError": "errors", "Sampling": "generation.sampling"},
    **{"Scores": "api.model", "load": "api.model", "train": "api.training"},
}
_DEPRECATED = {  # former name -> its module, and what replaces it
    "generate": ("generation.generate", "Model.generate"),
    "init_state": ("evaluation.trained_model", "dist_mem.evaluation.trained_model.init_state"),
    "load_memory": ("generation.text_memory", "dist_mem.Memory.load"),
    "load_model": ("evaluation.trained_model", "dist_mem.load"),
    "next_log_probs": ("generation.reading", "dist_mem.generation.reading.next_log_probs"),
    "read": ("generation.reading", "Model.read"),
    "read_lanes": ("evaluation.trained_model", "dist_mem.evaluation.trained_model.read_lanes"),
    "read_text": ("generation.text_memory", "Model.read"),
    "save_memory": ("generation.text_memory", "Memory.save"),
    "score": ("generation.text_scores", "Model.score"),
    "start": ("generation.reading", "Model.read"),
    "start_from": ("generation.reading", "dist_mem.generation.reading.start_from"),
}


def __getattr__(name: str) -> Any:
    """Import a name on first use, because torch takes seconds; warn of a name that the next release leaves out."""
    if name not in _MODULES and name not in _DEPRECATED:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = _MODULES.get(name)
    if module is None:
        module, new = _DEPRECATED[name]
        warn(f"dist_mem.{name} will be removed: use {new} (docs/start/python.md)", DeprecationWarning, stacklevel=2)
    from dist_mem.runtime.distributed import choose_accelerator

    choose_accelerator()
    return getattr(import_module(f"dist_mem.{module}"), name)
