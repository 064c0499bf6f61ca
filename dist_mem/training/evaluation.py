"""Score the validation split during training, the stage of a curriculum, and what the memory reads of a passage."""

from __future__ import annotations

import math
from typing import Any

from dist_mem.checkpoint.retention import Validation
from dist_mem.data.curriculum import Stage, answers_of, stage_number, stages_of, with_ends
from dist_mem.errors import CutShortError, UnusableError
from dist_mem.evaluation.job import stop_check
from dist_mem.evaluation.probe import PREFIX, PassageRead, open_passage, passage_metrics, write_passage_picture
from dist_mem.evaluation.protocol import protocol_of, short_term_len
from dist_mem.evaluation.scoring import Forward, score_split
from dist_mem.runtime.distributed import on_all_ranks
from dist_mem.supervision.watchdog import beat
from dist_mem.training.context import Context
from dist_mem.training.reporting import is_multiple
from dist_mem.training.state import TrainState
from dist_mem.training.step import reset_of
from dist_mem.training.stopping import Stopping

_DATA_CHARS = 12  # of a fingerprint
STAGE, ACCURACY = "curriculum/stage", "curriculum/accuracy"  # metrics


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

        With `data.until_accuracy`, the stage that is read may end here; then the feed begins the next one.

        Raises:
            RunError: on every rank, once the state is saved.
        """
        context = self._context
        try:
            with context.saving.keep_state(state), context.reporting.meter.pause():
                validation, metrics, read = self._evaluate(state.step)
                of_stage = self._score_stage(state)
                context.reporting.record(state.step, metrics | read.metrics | self._full_lanes(state))
                if of_stage:
                    context.reporting.record(state.step, of_stage)
                self._draw_passage(state.step, read)
        except CutShortError:
            return state
        state = state._replace(validation=validation._asdict())
        return self._end_stage(state, of_stage[ACCURACY]) if of_stage else state

    def _forward(self) -> Forward:
        """Return the forward of the engine in evaluation mode, which raises CutShortError at a reason to stop."""
        engine = self._context.engine
        beat("evaluating")
        engine.train(False)
        check = stop_check(self._stopping.has_reason, self._context.world)

        def forward(*tensors: Any, **state: Any) -> Any:
            beat("evaluating")
            check()
            return engine(*tensors, **state)

        return forward

    def _evaluate(self, step: int) -> tuple[Validation, dict[str, float], PassageRead]:
        """Return loss and metrics of the validation split at this step, and what the memory read of its passage.

        Lanes are fresh, and the training's state is unaffected.

        Raises:
            CutShortError: on every rank; there is a reason to stop.
        """
        config, world, engine = self._context.config, self._context.world, self._context.engine
        tokenizer = self._context.feed.data.tokenizer
        (index,), forward = self._context.feed.data.evaluated, self._forward()
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

    def _score_stage(self, state: TrainState) -> dict[str, float]:
        """Return the number of the stage that was read last, and its share of right answers, equal on all ranks.

        There are none without `data.until_accuracy`, and of data.path.

        Raises:
            RunError: on every rank; a reason to stop, no answer is scored, or a rank cannot open them.
        """
        config, engine = self._context.config, self._context.engine
        number, stage = self._stage_of(state)
        if config.data.until_accuracy is None or stage.until is None:
            return {}
        index = on_all_ranks(lambda: answers_of(stage, config.eval.split), "opening the answers of the stage")
        tokenizer = self._context.feed.data.tokenizer
        forward, world = self._forward(), self._context.world
        found = score_split(forward, engine.init_state, config=config, index=index, tokenizer=tokenizer, world=world)
        engine.train(True)
        if math.isnan(found.whole_answers):
            raise UnusableError(
                f"data.until_accuracy = {config.data.until_accuracy}: {index.split_dir} scores more than answers; give "
                "data of a recall task, or set data.until_accuracy to null"
            )
        return {STAGE: float(number), ACCURACY: found.whole_answers}

    def _stage_of(self, state: TrainState) -> tuple[int, Stage]:
        """Return number and stage of the update that was made last."""
        data = with_ends(self._context.config.data, state.stage_ends)
        number = stage_number(data, state.step - 1)
        return number, stages_of(data)[number]

    def _end_stage(self, state: TrainState, accuracy: float) -> TrainState:
        """End the stage here if it is accurate enough, and let the feed begin the next one."""
        context, (number, stage) = self._context, self._stage_of(state)
        wanted = context.config.data.until_accuracy
        if wanted is None or stage.until is None:
            return state
        found = f"{accuracy:.2%} of the answers are right"
        if accuracy < wanted:
            self._say_unlearned(state.step, number, stage.until, f"{found}, not {wanted:.2%}")
            return state
        if stage.until == state.step:
            return state
        before = [earlier.until for earlier in with_ends(context.config.data, state.stage_ends).curriculum[:number]]
        state = state._replace(stage_ends=[*before, state.step])
        message = f"data.curriculum[{number}] ends at step {state.step}: {found}"
        context.reporting.tracker.message(message)
        context.reporting.tag(f"curriculum.stage_{number}", message)
        with context.reporting.failure.keep_error():
            context.begin_part(state)
        with context.saving.keep_state(state):
            context.feed.restart(state)
        return state

    def _say_unlearned(self, step: int, number: int, until: int, found: str) -> None:
        """Say, at the last evaluation of a stage, that it ends before it is learned."""
        reporting = self._context.reporting
        if step + (self._context.config.eval.every or 0) > until:
            text = f"data.curriculum[{number}] ends at step {until}, its `until`: {found}"
            remedy = "later stages may not make up for it; raise its `until`, or try another optimizer.lr"
            reporting.tracker.message(f"{text}; {remedy}")
            reporting.tag(f"curriculum.stage_{number}", text)

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

        There is none for a memory that holds no tokens, or that `train.reset` empties on the way. Every rank calls it.
        """
        world, train = self._context.world, self._context.config.train
        kept_len = max(memory.kept_len for memory in self._context.engine.module.memories())
        if not kept_len or reset_of(train, state.step - 1) != "never":
            return {}
        is_read = self._context.feed.lane_ids < train.global_batch_size  # the others are idle
        full = world.sum(((state.cursors[:, 2] >= kept_len) & is_read).sum().double())
        return {f"{PREFIX}full_lanes": float(full) / train.global_batch_size}
