"""The training loop: `train` makes the updates of a run, with the hooks between them."""

from __future__ import annotations

from dist_mem.errors import EXIT_DONE, EXIT_REQUEUE
from dist_mem.runtime.distributed import announced
from dist_mem.supervision.watchdog import begin_step
from dist_mem.training.agreement import Flags, Shared
from dist_mem.training.context import Context, TrainState
from dist_mem.training.divergence import ROLLBACK
from dist_mem.training.hooks import (
    carry_out,
    evaluate_if_owed,
    is_logged,
    owes_evaluation,
    own_slots,
    report,
    save_if_due,
)
from dist_mem.training.step import train_step
from dist_mem.training.stopping import Stopping


def train(context: Context, state: TrainState, stopping: Stopping) -> tuple[TrainState, int]:
    """Train to the last step, or until any rank must stop or has failed; return the last state, and a code.

    Raises:
        RunError: on every rank, once the last step is saved.
    """
    feed, failure, saver = context.feed, context.failure, context.saver
    state = evaluate_if_owed(context, state, stopping, is_saved=True)
    stops, is_last = owes_evaluation(context, state), state.step >= context.total_steps
    if is_last and not stops:
        context.tracker.message(f"step {state.step} of {context.total_steps}: nothing is left to train")
    elif not stops:
        with announced("reading the first segments"):
            feed.read_first()
    while not (stops or is_last):
        with context.meter.paused():
            context.profile.begin_if_due(state.step)
        begin_step(state.step)
        next_scored = feed.read_ahead() if state.step + 1 < context.total_steps else feed.nothing()
        flags = Flags(stop=stopping.is_asked_for() or failure.is_set, save=saver.is_due(), save_failed=saver.failed())
        state, outcome = train_step(
            context,
            state,
            feed.update,
            feed.scored,
            Shared(flags, next_scored, own_slots(context, state.step + 1)),
            is_logged=is_logged(context, state.step + 1),
            asks_to_stop=lambda: stopping.has_reason() or failure.is_set,
        )
        if outcome.decision is not None:
            state = carry_out(context, state, outcome.decision)
            if outcome.decision.action == ROLLBACK:
                feed.read_first()
                continue
        if outcome.is_made:
            report(context, state, outcome, epoch=feed.update.epoch)
        is_last = state.step == context.total_steps
        if is_last or not outcome.flags.stop:
            state = evaluate_if_owed(context, state, stopping, is_saved=False)
        stops = (outcome.flags.stop and not is_last) or owes_evaluation(context, state)
        save_if_due(context, state, outcome, is_last=is_last or stops)
        with context.meter.paused():
            context.profile.end_if_due(state.step, ends=is_last or stops)
        if not is_last:
            feed.advance(outcome.next_scored)
    failure.raise_on_all_ranks()
    if not stops:
        return state, EXIT_DONE
    context.tracker.message(f"step {state.step}: {stopping.describe()}; all is saved, start the same command to go on")
    return state, EXIT_REQUEUE
