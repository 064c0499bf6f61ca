"""A trained model with the methods that a notebook needs; `load` makes it.

    model = dist_mem.load("runs/demo")
    model.score(text).perplexity
    "".join(model.generate("It was", memory=model.read(book)))

The methods join functions that scripts may use too: dist_mem/generation/ has readings of several lanes, probabilities
and batches of generated texts. They take `Model.trained`. Every lane here is one text.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias, cast, overload

import numpy as np
import torch
from torch import Tensor

from dist_mem.config.memory_blocks import describe_memory
from dist_mem.data.tokenizers.base import Tokenizer
from dist_mem.evaluation.trained_model import TrainedModel, load_model
from dist_mem.generation.arguments import wrong_type
from dist_mem.generation.generate import NextTokens, Sampling, stream
from dist_mem.generation.reading import read
from dist_mem.generation.text import TextWriter
from dist_mem.generation.text_memory import Memory, begin, read_text, remember
from dist_mem.generation.text_scores import score
from dist_mem.inspection.reading import DocumentReading, pieces_of, read_document, text_document
from dist_mem.runtime.environment import settings_of
from dist_mem.runtime.figures import exponential
from dist_mem.runtime.shipped_files import example_model
from dist_mem.tracking.mlflow.client import MLFLOW_LOGGER
from dist_mem.tracking.mlflow.models import fetch_model, is_mlflow

Tokens: TypeAlias = Sequence[int] | np.ndarray | Tensor  # (num_tokens,) ids


@dataclass(frozen=True, eq=False)
class Scores:
    """The scores of a text; every entry is that of a token."""

    pieces: list[str]  # the text that each completes; a cut character is U+FFFD
    tokens: np.ndarray  # (num_tokens,) ids
    nll: Tensor  # (num_tokens,) float32, nats; nan for the first token of a block (data.blocks), which has no score
    memory: Memory  # after the text

    @property
    def mean(self) -> float:
        """Nats per scored token; nan without any."""
        return float(self.nll.double().nanmean())

    @property
    def perplexity(self) -> float:
        """The exponential of `mean`; nan if it is too large for a float."""
        return exponential(self.mean)

    def __repr__(self) -> str:
        return f"Scores({len(self.tokens):,} tokens, {self.mean:.4f} nats per token)"


class Model:
    """A trained model in evaluation mode, with its tokenizer, configuration and memory."""

    def __init__(self, trained: TrainedModel) -> None:
        self.trained = trained  # .model, .tokenizer, .config, .checkpoint, for functions of the package

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer: `encode(text)`, `decode(ids)`, `vocab_size`."""
        return self.trained.tokenizer

    @overload
    def score(self, texts: list[str] | tuple[str, ...], *, memory: Memory | None = None) -> list[Scores]: ...

    @overload
    def score(self, texts: str | Tokens, *, memory: Memory | None = None) -> Scores: ...

    def score(
        self, texts: str | Tokens | list[str] | tuple[str, ...], *, memory: Memory | None = None
    ) -> Scores | list[Scores]:
        """Return the negative log-likelihood of every token of a text, read segment by segment with memory.

        Args:
            texts: one text; or several, which are scored each on its own; or the token ids of one. A text that
                continues another one may be tokenized differently than both together; ids avoid this.
            memory: of what was read before each text; None: each is a document of its own, and begins after BOS.

        Raises:
            EvaluationError: a loss is not finite, because the model has diverged.
            TypeError, ValueError: an argument is invalid; the message names it.
            UnusableError: the memory is that of another model.

        >>> model = dist_mem.load("runs/demo")
        >>> first = model.score("It was the best of times, ")
        >>> first.nll.shape
        torch.Size([26])
        >>> rest = model.score("it was the worst of times.", memory=first.memory)
        >>> whole = model.score("It was the best of times, it was the worst of times.")
        >>> torch.equal(torch.cat([first.nll, rest.nll]), whole.nll)
        True
        """
        if isinstance(texts, list | tuple) and all(isinstance(text, str) for text in texts):
            return [self._score(text, memory) for text in texts]
        return self._score(cast("str | Tokens", texts), memory)

    def _score(self, text: str | Tokens, memory: Memory | None) -> Scores:
        found = score(self.trained, text, after=begin(self.trained, memory))
        content = text if isinstance(text, str) else self.tokenizer.decode(found.tokens)
        after = remember(self.trained, found.reading, content, len(found.tokens), name="text", after=memory)
        return Scores(pieces_of(self.trained, found.tokens), found.tokens, found.nll, after)

    def read(self, text: str, *, memory: Memory | None = None, name: str = "text") -> Memory:
        """Read a text from its first token and return the memory of it; this is faster than `score`.

        Args:
            memory: of the texts that it continues; None: an empty memory, and BOS.
            name: of the text, for messages and `dist-mem memory show`.

        Raises:
            TypeError, ValueError: an argument is invalid; the message names it.
            UnusableError: the memory is that of another model.
        """
        return read_text(self.trained, text, name=name, memory=memory)

    def generate(
        self, prompt: str = "", *, memory: Memory | None = None, num_tokens: int = 256, sampling: Sampling | None = None
    ) -> Iterator[str]:
        """Read a prompt, and yield its continuation piece by piece: each is the text that a new token completes.

        Args:
            prompt: "" begins a document, or continues `memory`.
            memory: of what was read before the prompt; None: the prompt is the beginning of a document.
            num_tokens: the length of the continuation, unless it ends before with EOS (`tokenizer.end_ids`).
            sampling: None: nucleus sampling with p = 0.95, as `dist-mem generate`.

        Raises:
            EvaluationError: a log-probability is nan, because the model has diverged.
            TypeError, ValueError: an argument is invalid; the message names it. Nothing is generated then.
            UnusableError: the memory is that of another model.

        >>> model = dist_mem.load("runs/demo")
        >>> sampling = dist_mem.Sampling(temperature=0.8, seed=1)
        >>> pieces = list(model.generate("It was the best", num_tokens=20, sampling=sampling))
        >>> memory = model.read("It was ")
        >>> pieces == list(model.generate("the best", memory=memory, num_tokens=20, sampling=sampling))
        True
        """
        if not isinstance(prompt, str):
            raise wrong_type("prompt", prompt, "a str")
        reading = read(self.trained, begin(self.trained, memory), [self.tokenizer.encode(prompt)])
        how = Sampling(top_p=0.95) if sampling is None else sampling
        return self._pieces(stream(self.trained, reading, num_tokens=num_tokens, sampling=how))

    def _pieces(self, steps: Iterator[NextTokens]) -> Iterator[str]:
        writer = TextWriter(self.tokenizer)
        for step in steps:
            if piece := writer.add(int(step.tokens[0])):
                yield piece
        if piece := writer.end():
            yield piece

    def inspect(self, text: str) -> DocumentReading:
        """Read a text with memory and without, and return what memory changed for every token and word.

        The result has `pieces`, `nll`, `windowed` and `gain` (nats, a row per token), `words()` with their gains, and
        `layers`: where each layer looked (docs/howto/inspect.md).

        Raises:
            EvaluationError: a loss is not finite, because the model has diverged.
            TypeError: the text is no str.
            UnusableError: the text is empty.

        >>> found = dist_mem.load("runs/demo").inspect("It was the best of times, it was the worst of times.")
        >>> torch.equal(found.gain, found.windowed.double() - found.nll.double())
        True
        >>> [word.word.text for word in found.words()][:3]
        ['It', 'was', 'the']
        """
        if not isinstance(text, str):
            raise wrong_type("text", text, "a str")
        return read_document(self.trained, text_document(self.trained, text))

    def __repr__(self) -> str:
        trained = self.trained
        number = sum(parameter.numel() for parameter in trained.model.parameters())
        step, memory = trained.checkpoint.manifest["step"], describe_memory(trained.config.memory)
        return f"Model({trained.config.name}, step {step}, {number:,} parameters, memory {memory})"


def load(source: Path | str, *overrides: str, step: int | None = None, device: torch.device | str = "cpu") -> Model:
    """Load the model of a run, of one checkpoint, of an export, or of MLflow. No data are needed.

    Args:
        source: a folder: a run, a checkpoint in it or an export; or the address of an export in MLflow,
            "runs:/ID/PATH" or "models:/NAME@ALIAS"; or "example", the model that comes with dist_mem, unless there is
            a folder of this name.
        overrides: `key=value`: "eval.mem_len=384", "eval.precision=bf16", "tracking.uri=URL" (of MLflow).
        step: step of the checkpoint in a run; None: the newest that verifies.

    Raises:
        CheckpointError: there is no such checkpoint or export, or it is damaged.
        TypeError: `source` is no path, or an override is not a string.
        UnfitError: MLflow cannot be reached now.
        UnusableError: MLflow is not installed, refuses the address, or has no export there.
        ValueError: an override is invalid; the message gives the reason.

    >>> dist_mem.load("runs/demo")
    Model(demo, step 8, 9,265 parameters, memory transformer_xl)
    >>> dist_mem.load("example")
    Model(demo, step 800, 462,336 parameters, memory transformer_xl)
    """
    if isinstance(source, str) and is_mlflow(source):
        with settings_of(MLFLOW_LOGGER):
            source = fetch_model(source, overrides)
    if source == "example" and not Path(source).exists():
        source = example_model()
    return Model(load_model(source, *overrides, step=step, device=device))
