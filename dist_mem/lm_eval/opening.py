"""Load a run for lm-evaluation-harness, with the protocol that its requests are read with."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from dist_mem.config import Config
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
        config.eval.layout, config.eval.max_document_len = "documents", None
        protocol, tag = protocol_of(config), tag_of(config)
        if protocol.blocks:
            raise UnusableError(
                f"{path} reads in blocks (data.blocks), whose first tokens have no score: add eval.blocks=false"
            )
        if config.train.threads:
            torch.set_num_threads(config.train.threads)
        place = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        tokenizer = tokenizer_of_checkpoint(checkpoint)

        def see_that_it_fits(config: Config, vocab_size: int) -> None:
            config.train.micro_batch_size = config.eval.batch_size  # one forward pass reads all lanes
            refuse_what_cannot_fit(scoring_parts(config, vocab_size, num_lanes=config.eval.batch_size), place)

        trained = open_model(checkpoint, config, tokenizer, place, check=see_that_it_fits)
    except (OSError, ValueError) as error:
        raise run_error(error) from error
    return OpenRun(trained, protocol, tag)
