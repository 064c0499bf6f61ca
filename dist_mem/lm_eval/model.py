"""A trained model as the model `dist_mem` of lm-evaluation-harness.

    lm_eval.simple_evaluate("dist_mem", "run=runs/demo,eval.precision=bf16", tasks=["lambada_openai"])

Importing this module registers the name. Every request is a document of its own, which begins with BOS; the memory is
carried over the whole of it, so no context is truncated. A context and a continuation become tokens as in the harness's
own model of Hugging Face, see `encode_pair`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from lm_eval.api.instance import Instance
from lm_eval.api.model import LM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import normalize_gen_kwargs

from dist_mem.block import ModelSpec
from dist_mem.config import change_config
from dist_mem.data.tokenizers.base import Tokenizer
from dist_mem.errors import UnusableError, run_error
from dist_mem.estimate.memory import refuse_what_cannot_fit, scoring_parts
from dist_mem.evaluation.protocol import Protocol, protocol_of, tag_of
from dist_mem.evaluation.trained_model import (
    TrainedModel,
    find_checkpoint,
    open_model,
    read_settings,
    tokenizer_of_checkpoint,
)
from dist_mem.generation.arguments import WRITING, is_neutral, refuse_what_is_asked
from dist_mem.generation.generate import Sampling
from dist_mem.lm_eval.answers import AnswerLog, request_key
from dist_mem.lm_eval.passages import ScoredText, ScoredTextScore, score_passages
from dist_mem.lm_eval.writing import Prompt, write_until
from dist_mem.runtime.file_schema import Schema, leaf, number, record
from dist_mem.runtime.gpu import present_device
from dist_mem.runtime.process_state import threads

_MAX_TOKENS = 256  # of a generated text, if the task does not say; as in the harness's model of Hugging Face
_LENGTH = leaf("an integer of at least 1", lambda value: type(value) is int and value >= 1)
_STOPS = leaf("a text or a list of texts", lambda value: all(isinstance(stop, str) for stop in _as_list(value)))
_TYPES: dict[str, Schema] = {  # of the entries of a task's generation_kwargs that are read
    "until": _STOPS,
    **dict.fromkeys(("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens"), _LENGTH),
    "do_sample": leaf("true or false", lambda value: isinstance(value, bool)),
    **dict.fromkeys(("temperature", "top_p"), number),
    "top_k": leaf("an integer", lambda value: type(value) is int),
}
Keep = Callable[[int, Any], None]  # is called with the number of a request and its answer


@register_model("dist_mem")
class DistMemLM(LM):
    """Answers the requests of tasks, `eval.batch_size` of them at a time."""

    def __init__(
        self,
        run: str | TrainedModel,
        checkpoint: int | None = None,
        batch_size: int | str | None = None,
        max_batch_size: int | None = None,
        device: str | None = None,
        **overrides: Any,
    ) -> None:
        """
        Args:
            run: a run directory, one checkpoint in it, or an export; or a model that is already loaded, which all
                other arguments are refused for.
            checkpoint: step; None: the newest that verifies.
            batch_size: requests at a time; None: eval.batch_size.
            max_batch_size: must be None; it is of the harness's search for a batch size.
            device: None: a GPU if there is one.
            overrides: values of keys, as `dist-mem evaluate` takes them: {"eval.precision": "bf16"}.

        Raises:
            UnusableError: the model or an argument is unusable; the message names it.
        """
        super().__init__()
        if max_batch_size is not None:
            raise UnusableError(f"max_batch_size is {max_batch_size}, but no batch size is searched for; omit it")
        given = [f"{key}={_as_yaml(value)}" for key, value in overrides.items()]
        if batch_size is not None:
            if not str(batch_size).isdecimal():
                raise UnusableError(f"batch_size is {batch_size}, but must be a number of requests")
            given.append(f"eval.batch_size={batch_size}")
        if isinstance(run, TrainedModel):
            loading = {"checkpoint": checkpoint, "batch_size": batch_size, "device": device, **overrides}
            for name, value in loading.items():
                if value is not None:
                    raise UnusableError(f"{name} is {value}, but the model is already loaded; give it when you load it")
            _check_blocks(protocol_of(run.config), "the model")
            self.trained = run
        else:
            self.trained = open_run(Path(run), given, checkpoint, device).trained
        self.num_lanes = self.trained.config.eval.batch_size
        self.answers: AnswerLog | None = None  # of an earlier command that was stopped; each new answer is added
        self._device = self.trained.device

    @property
    def tokenizer_name(self) -> str:
        """The fingerprint of the tokenizer, which distinguishes requests that the harness caches."""
        return self.trained.tokenizer.fingerprint

    def loglikelihood(self, requests: Sequence[Instance]) -> list[tuple[float, bool]]:
        """Return the log-probability in nats of each continuation, and whether greedy generation would write it.

        Raises:
            UnusableError: a continuation has no token.
        """

        def score(missing: Sequence[int], keep: Keep) -> None:
            passages = [_passage(self.trained.tokenizer, *requests[number].args) for number in missing]
            self._score(passages, lambda place, found: keep(missing[place], tuple(found)))

        return [tuple(answer) for answer in self._answer("loglikelihood", requests, score)]

    def loglikelihood_rolling(self, requests: Sequence[Instance]) -> list[float]:
        """Return the log-probability in nats of each whole text, as `dist-mem evaluate` scores a document."""

        def score(missing: Sequence[int], keep: Keep) -> None:
            texts = [self.trained.tokenizer.encode(requests[number].args[0]) for number in missing]
            passages = [ScoredText(tokens, first_scored=0) for tokens in texts]
            cut = self.trained.config.data.cut
            self._score(passages, lambda place, found: keep(missing[place], found.log_prob), cut=cut)

        return self._answer("loglikelihood_rolling", requests, score)

    def generate_until(self, requests: Sequence[Instance]) -> list[str]:
        """Return the text that continues each context, up to a stop string, without it.

        Raises:
            UnusableError: a task's generation_kwargs have an entry that this model does not know, or a wrong value.
        """

        def generate(missing: Sequence[int], keep: Keep) -> None:
            prompts = {number: _prompt(self.trained.tokenizer, *requests[number].args) for number in missing}
            write_until(self.trained, prompts, num_lanes=self.num_lanes, shown=True, finished=keep)

        return self._answer("generate_until", requests, generate)

    def _score(
        self, passages: Sequence[ScoredText], finished: Callable[[int, ScoredTextScore], None], cut: str = "start"
    ) -> None:
        score_passages(self.trained, passages, num_lanes=self.num_lanes, cut=cut, shown=True, finished=finished)

    def _answer(
        self, kind: str, requests: Sequence[Instance], compute: Callable[[Sequence[int], Keep], None]
    ) -> list[Any]:
        """Return the answers to requests: those that `self.answers` has, and what `compute` finds for the others."""
        known: dict[int, Any] = {}
        if self.answers is not None:
            # the number of a request decides what is drawn for it
            keys = [request_key(kind, request.args, number) for number, request in enumerate(requests)]
            known = {number: self.answers.found[key] for number, key in enumerate(keys) if key in self.answers.found}

        def keep(number: int, answer: Any) -> None:
            known[number] = answer
            self.cache_hook.add_partial(kind, requests[number].args, answer)
            if self.answers is not None:
                self.answers.add(keys[number], answer)

        with threads(self.trained.config.train.threads):
            compute([number for number in range(len(requests)) if number not in known], keep)
        return [known[number] for number in range(len(requests))]


def encode_pair(tokenizer: Tokenizer, context: str, continuation: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the tokens of a context and of its continuation, as the harness's model of Hugging Face makes them.

    White space at the end of the context moves to the continuation, because many tokenizers join it to the next word.
    Then the context is encoded, and the continuation is what the whole text has after as many tokens.
    """
    kept = context.rstrip()
    before = tokenizer.encode(kept)
    return before, tokenizer.encode(context + continuation)[len(before) :]


def _passage(tokenizer: Tokenizer, context: str, continuation: str) -> ScoredText:
    before, after = encode_pair(tokenizer, context, continuation)
    if not len(after):
        raise UnusableError(
            f"the continuation {continuation!r} of {context[-40:]!r} has no token of its own with this model's "
            "tokenizer: begin it with white space (target_delimiter), or leave it out of the task"
        )
    return ScoredText(np.concatenate([before, after]), first_scored=len(before))


def read_generation(options: Mapping[str, Any]) -> Prompt:
    """Return what a task's generation_kwargs ask for, as a prompt without tokens.

    The temperature of a sampled text is 1 unless it is given, as in transformers.

    Raises:
        UnusableError: an entry has a wrong type or value, or is not known.
    """
    given = {name: value for name, value in options.items() if value is not None}
    problem = next(record({}, _TYPES, is_open=True)("", given), None)
    if problem is not None:
        raise UnusableError(f"generation_kwargs: {problem}")
    if given.get("do_sample"):
        given.setdefault("temperature", 1.0)
    given = normalize_gen_kwargs(given, _MAX_TOKENS)
    try:
        refuse_what_is_asked(
            {name: value for name, value in given.items() if name not in _TYPES}, WRITING, "a model of dist_mem"
        )
        top_k = given.get("top_k")
        sampling = Sampling(
            float(given["temperature"]) if given["do_sample"] else 0.0,
            None if is_neutral("top_k", top_k, WRITING) else top_k,
            given.get("top_p"),
        )
    except (TypeError, ValueError) as error:
        raise UnusableError(f"generation_kwargs: {error}") from error
    return Prompt(np.zeros(0, dtype=np.int64), tuple(filter(None, given["until"])), given["max_gen_toks"], sampling)


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _prompt(tokenizer: Tokenizer, context: str, options: Mapping[str, Any]) -> Prompt:
    return read_generation(options)._replace(tokens=tokenizer.encode(context))


def _as_yaml(value: Any) -> str:
    """Return a value that the harness has parsed as text that the configuration parses to the same value."""
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _check_blocks(protocol: Protocol, name: str) -> None:
    """Raise UnusableError if a model reads in blocks."""
    if protocol.blocks:
        raise UnusableError(
            f"{name} reads in blocks (data.blocks), whose first tokens have no score: add eval.blocks=false"
        )


class OpenRun(NamedTuple):
    """A model with its protocol."""

    trained: TrainedModel
    protocol: Protocol
    tag: str  # how the protocol differs from that of training, for names of files


def open_run(path: Path, overrides: Sequence[str], step: int | None, device: str | None = None) -> OpenRun:
    """Load the model of a run, a checkpoint or an export, to read texts of which each is a document.

    `eval.layout` and `eval.max_document_len` are about the documents of a split and have no effect.

    Args:
        device: None: a GPU if there is one.

    Raises:
        UnusableError: as `load_model`, or the model reads in blocks, which leave tokens without a score.
        UnfitError: the machine cannot load it now.
    """
    try:
        checkpoint = find_checkpoint(path, step)
        config = read_settings(checkpoint.directory, overrides)
        lanes = config.eval.batch_size  # one forward pass reads all
        own = {"eval.layout": "documents", "eval.max_document_len": None, "train.micro_batch_size": lanes}
        config = change_config(config, own)
        protocol, tag = protocol_of(config), tag_of(config)
        _check_blocks(protocol, str(path))
        place = present_device(device or ("cuda" if torch.cuda.is_available() else "cpu"), "device")
        tokenizer = tokenizer_of_checkpoint(checkpoint)

        def see_that_it_fits(spec: ModelSpec) -> None:
            parts = scoring_parts(spec, config.eval, num_lanes=lanes, on_gpu=place.type == "cuda")
            refuse_what_cannot_fit(parts, place)

        trained = open_model(checkpoint, config, tokenizer, place, check=see_that_it_fits)
    except (OSError, ValueError) as error:
        raise run_error(error) from error
    return OpenRun(trained, protocol, tag)
