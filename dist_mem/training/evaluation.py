"""Score the validation split during training, and what the memory reads of a passage of it."""

from __future__ import annotations

from typing import Any

import torch

from dist_mem.checkpoint.retention import Validation
from dist_mem.data.directory import open_index
from dist_mem.errors import CutShortError, RunError
from dist_mem.evaluation.job import stop_check
from dist_mem.evaluation.probe import PREFIX, PassageRead, open_passage, passage_metrics, write_passage_picture
from dist_mem.evaluation.protocol import protocol_of, short_term_len
from dist_mem.evaluation.scoring import score_split
from dist_mem.runtime.distributed import on_all_ranks
from dist_mem.supervision.watchdog import beat
from dist_mem.training.context import Context
from dist_mem.training.reporting import is_multiple
from dist_mem.training.step import TrainState
from dist_mem.training.stopping import Stopping

_DATA_CHARS = 12  # of a fingerprint


class Evaluation:
    """The evaluations of a run; every rank has one, and makes the same calls."""

    def __init__(self, context: Context, stopping: Stopping) -> None:
        self._context, self._stopping = context, stopping

    def due(self, state: TrainState) -> bool:
        """Return whether this step's evaluation is due and not done yet: a stop skips it to save without delay."""
        is_made = state.validation is not None and state.validation["step"] == state.step
        return state.step > 0 and is_multiple(state.step, self._context.config.eval.every) and not is_made

    def run(self, state: TrainState) -> TrainState:
        """Score the validation split, and record its metrics; a reason to stop leaves the evaluation due.

        Raises:
            RunError: on every rank, once the state is saved.
        """
        context = self._context
        try:
            with context.reporting.meter.pause():
                validation, metrics, read = self._evaluate(state.step)
                context.reporting.record(state.step, metrics | read.metrics | self._full_lanes(state))
                self._draw_passage(state.step, read)
        except CutShortError:
            return state
        except RunError:
            if not context.saving.is_saved(state):
                context.saving.run(state)
            raise
        return state._replace(validation=validation._asdict())

    def _evaluate(self, step: int) -> tuple[Validation, dict[str, float], PassageRead]:
        """Return loss and metrics of the validation split at this step, and what the memory read of its passage.

        Lanes are fresh, and the training's state is unaffected.

        Raises:
            CutShortError: on every rank; there is a reason to stop.
        """
        config, world, engine = self._context.config, self._context.world, self._context.engine
        tokenizer = self._context.feed.data.tokenizer
        beat("evaluating")
        engine.train(False)
        check = stop_check(self._stopping.has_reason, world)

        def forward(*tensors: Any, **state: Any) -> Any:
            beat("evaluating")
            check()
            return engine(*tensors, **state)

        index = open_index(config.data, config.eval.split)
        found = score_split(forward, engine.init_state, config=config, index=index, tokenizer=tokenizer, world=world)
        protocol = protocol_of(config)._replace(  # memory, model and precision are those that are trained
            mem_len=short_term_len(config.memory),
            clamp_len=config.model.clamp_len,
            same_length=config.model.same_length,
            precision=config.train.precision,
        )
        passage = on_all_ranks(
            lambda: open_passage(index, protocol, num_segments=config.eval.passage, bos_id=tokenizer.bos_id),
            f"opening {index.split_dir}",
        )
        read = passage_metrics(forward, engine.init_state, engine.module.memories(), passage, world.device)
        engine.train(True)
        measure = f"{index.split}, {protocol}; data {index.fingerprint[:_DATA_CHARS]}"
        return Validation(step, found.nll / found.num_scored, measure), found.metrics(), read

    def _draw_passage(self, step: int, read: PassageRead) -> None:
        """Draw where the layers looked, if `eval.figures`, and add the files to the MLflow run."""
        context = self._context
        if not context.config.eval.figures or context.world.rank != 0:
            return
        beat("drawing")
        with context.reporting.failure.keep_error():
            for path in write_passage_picture(read.layers, context.run_dir / "figures", step=step):
                context.reporting.tracker.log_artifact(str(path.relative_to(context.run_dir)))

    def _full_lanes(self, state: TrainState) -> dict[str, float]:
        """Return the share of the training's lanes that are so far into a document that their memory is full.

        There is none for a memory that holds no tokens. Every rank calls it.
        """
        world = self._context.world
        kept_len = max(memory.kept_len for memory in self._context.engine.module.memories())
        if not kept_len:
            return {}
        counts = torch.tensor([int((state.cursors[:, 2] >= kept_len).sum()), len(state.cursors)], dtype=torch.float64)
        full, lanes = world.sum(counts).tolist()
        return {f"{PREFIX}full_lanes": full / lanes}
