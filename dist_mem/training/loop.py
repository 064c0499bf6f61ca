"""The training loop: `train` makes the updates of a run; between them it reports, evaluates and saves what is due."""

from __future__ import annotations

from collections.abc import Callable

from dist_mem.errors import EXIT_DONE, EXIT_REQUEUE
from dist_mem.runtime.distributed import announce
from dist_mem.supervision.watchdog import begin_step
from dist_mem.training.agreement import Flags, RankMessage
from dist_mem.training.context import Context
from dist_mem.training.divergence import ROLLBACK
from dist_mem.training.evaluation import Evaluation
from dist_mem.training.resume import carry_out
from dist_mem.training.state import TrainState
from dist_mem.training.step import train_step
from dist_mem.training.stopping import Stopping


def train(
    context: Context, state: TrainState, stopping: Stopping, after_step: Callable[[int], object] = lambda step: None
) -> tuple[TrainState, int]:
    """Train to the last step, or until any rank must stop or has failed; return the final state and an exit code.

    Args:
        after_step: called with the number of each step that was made, the same on all ranks.

    Raises:
        RunError: on every rank, once the last step is saved.
    """
    feed, reporting, saving, last = context.feed, context.reporting, context.saving, context.total_steps
    evaluation, failure = Evaluation(context, stopping), reporting.failure
    if evaluation.due(state):  # of a job that was stopped before it
        state = evaluation.run(state)
        if not evaluation.due(state):
            saving.add_evaluation(state)
    saving.log_start(state, context.run_dir)
    is_over = state.step >= last or evaluation.due(state)  # still due: it was cut short
    if not is_over:
        with announce("reading the first segments"):
            feed.read_first()
        reporting.meter.begin()
    elif not evaluation.due(state):
        reporting.tracker.message(f"step {state.step} of {last}: nothing is left to train")
    while not is_over:
        with reporting.meter.pause():
            reporting.profile.begin_if_due(state.step)
        begin_step(state.step)
        next_scored = feed.read_ahead() if state.step + 1 < last else feed.no_targets()
        flags = Flags(stopping.is_asked_for() or failure.is_set, saving.saver.is_due(), saving.saver.has_failed())
        state, outcome = train_step(
            context,
            state,
            feed.update,
            feed.scored,
            RankMessage(flags, next_scored, reporting.own_slots(state.step + 1)),
            is_logged=reporting.due(state.step + 1),
            asks_to_stop=lambda: stopping.has_reason() or failure.is_set,
        )
        if outcome.decision is not None:
            state = carry_out(context, state, outcome.decision)
            if outcome.decision.action == ROLLBACK:
                with reporting.meter.pause():
                    feed.read_first()
                continue
        after_step(state.step)
        if reporting.due(state.step):
            reporting.meter.note(feed.use_of_sources(state.step))
        reporting.run(state.step, outcome, epoch=feed.update.epoch)
        stops = outcome.flags.stop and state.step < last
        if evaluation.due(state) and not stops:
            state = evaluation.run(state)
        is_over = stops or state.step == last or evaluation.due(state)
        if saving.due(state, outcome.flags, ends=is_over):
            saving.run(state)
        saving.report(waits=is_over)
        with reporting.meter.pause():
            reporting.profile.end_if_due(state.step, ends=is_over)
        if state.step < last:
            with saving.keep_state(state):  # after the end of a stage it reads
                feed.advance(outcome.next_scored)
    failure.raise_on_all_ranks()
    if state.step >= last and not evaluation.due(state):
        return state, EXIT_DONE
    reporting.tracker.message(
        f"step {state.step}: {stopping.describe()}; everything is saved; run the same command to continue"
    )
    return state, EXIT_REQUEUE
