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
    load_model   a trained model, its tokenizer and its configuration, from a run or a checkpoint
    score        the negative log-likelihood of every token of a text, read with memory
    start, read  texts read so far, one a lane; next_log_probs: probabilities of the next token
    generate     continue the text of all lanes, with a Sampling
    init_state   empty memories
    read_text    the memory of a whole text; save_memory, load_memory: in a file, to continue from at any time
    read_lanes   the memories that lanes carried at the checkpoint; start_from: texts that continue from these
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dist_mem.evaluation.trained_model import init_state, load_model, read_lanes
    from dist_mem.generation.generate import generate
    from dist_mem.generation.reading import next_log_probs, read, start, start_from
    from dist_mem.generation.sampling import Sampling
    from dist_mem.generation.text_memory import load_memory, read_text, save_memory
    from dist_mem.generation.text_scores import score

__version__ = "0.1.0"
__all__ = [
    "Sampling", "generate", "init_state", "load_memory", "load_model", "next_log_probs", "read", "read_lanes",
    "read_text", "save_memory", "score", "start", "start_from",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    """Import the names of `__all__` on first use: torch and DeepSpeed take seconds."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from dist_mem.runtime.distributed import choose_accelerator

    choose_accelerator()
    from dist_mem.evaluation import trained_model as trained
    from dist_mem.generation import generate, reading, sampling, text_memory, text_scores

    modules = (trained, generate, reading, sampling, text_memory, text_scores)
    return next(getattr(module, name) for module in modules if hasattr(module, name))
