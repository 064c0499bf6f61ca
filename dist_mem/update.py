"""One update: forward and backward of every micro-batch, agreement of all ranks, then the step.

The order of decision matters. Every lane reads one segment (or `segments_per_update`); the gradients of all micro-
batches add up to that of one loss over all scored tokens of all ranks; all ranks learn in one small all-reduce whether
it is finite; only then parameters and memories move on.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from dist_mem.data.batch import Update
from dist_mem.distributed import gather_objects, sum_over_ranks
from dist_mem.memory.base import named_tensors
from dist_mem.meter import Totals
from dist_mem.model import reset_lanes
from dist_mem.optimizer import lr_factor

if TYPE_CHECKING:
    from dist_mem.job import Job


class DivergedError(RuntimeError):
    """A loss, a memory or a gradient is not finite; every rank raises it in the same step."""


class Forward(NamedTuple):
    """What one update's forwards and backwards left on this rank."""

    states: list[Any]  # memory after the update, one per lane group
    nll: Tensor  # () fp32, summed over the scored tokens of this rank, nats
    aux: Tensor  # () fp32, auxiliary losses summed over this rank's lanes and segments
    recall_nll: Tensor  # () fp32, the share of nll that is of recall tokens
    is_finite: Tensor  # () bool: nll, aux and every new state


class Outcome(NamedTuple):
    """What the ranks agreed on in one update."""

    applied: bool  # False: DeepSpeed skipped it (fp16 overflow); feed the same segments again
    stop: bool  # some rank was told to stop
    totals: Totals  # of this update
    next_scored: int  # targets of the next one, all ranks


def accumulate_gradients(job: Job, update: Update, num_scored: int) -> Forward:
    """Forward and backward of every micro-batch of one update.

    DeepSpeed averages gradients over ranks, hence the factor `world`; an update without targets runs without gradient.
    """
    world, train = job.world, job.config.train
    lanes_segments = train.lanes * train.segments_per_update
    states = list(job.states)
    nll_sum, aux_sum, recall_sum = torch.zeros(3, device=world.device)
    for index, host_batch in enumerate(update.batches):
        group = index % len(states)
        batch = host_batch.to(world.device)
        state = states[group]
        if host_batch.is_new_document.any():  # asked on the CPU, so that nothing waits for the device
            state = reset_lanes(state, job.engine.init_state(batch.document), batch.is_new_document)
        with torch.set_grad_enabled(num_scored > 0):
            output = job.engine(batch.tokens, batch.targets, batch.valid_len, state=state)
            nll = output.nll.sum()
            aux = torch.stack([nll.new_zeros(()), *(loss.sum() for loss in output.aux.values())]).sum()
        if num_scored > 0:
            job.engine.backward(world.size * (nll / num_scored + aux / lanes_segments))
            if index + 1 < len(update.batches):
                job.engine.end_micro_batch()
        nll_sum, aux_sum = nll_sum + nll.detach(), aux_sum + aux.detach()
        if batch.recall is not None:
            recall_sum = recall_sum + (output.nll.detach() * (batch.recall > 0)).sum()
        states[group] = output.state
    parts = [nll_sum, aux_sum, *(tensor for state in states for tensor in named_tensors(state).values())]
    is_finite = torch.stack([torch.isfinite(part).all() for part in parts]).all()
    return Forward(states, nll_sum, aux_sum, recall_sum, is_finite)


def _diverged(step: int, forward_is_finite: bool) -> DivergedError:
    """The error that every rank raises; it names the ranks whose own loss or memory it is."""
    ranks = [rank for rank, is_finite in enumerate(gather_objects(forward_is_finite)) if not is_finite]
    what = f"a loss or a memory is not finite on rank {ranks}" if ranks else "the gradient is not finite, every loss is"
    return DivergedError(f"step {step}: {what}; nothing was updated")


def train_step(job: Job, update: Update, num_scored: int, next_scored: int, *, stop: bool) -> Outcome:
    """One update: accumulate, agree, decide, step. Memories move on only if the update was applied.

    Raises:
        DivergedError: on every rank, before any parameter has changed.
    """
    forward = accumulate_gradients(job, update, num_scored)
    is_bad = not (bool(forward.is_finite) and (num_scored == 0 or job.engine.gradients_finite()))
    nll, aux, recall_nll = torch.stack([forward.nll, forward.aux, forward.recall_nll]).tolist()
    mine = Totals(
        nll=nll,
        aux=aux,
        recall_nll=recall_nll,
        num_scored=update.num_scored,
        num_recall=update.num_recall,
        documents=update.documents_started,
        documents_skipped=update.documents_skipped,
    )
    told = sum_over_ranks([is_bad, stop, next_scored, *mine], job.world.device)
    num_bad, num_stop, all_next_scored, *totals = told
    if num_bad:
        raise _diverged(job.step, bool(forward.is_finite))
    applied = num_scored == 0 or job.engine.step(lr_factor(job.step, job.config.schedule, job.total_steps))
    if not applied and job.config.train.precision != "fp16":
        raise _diverged(job.step, True)
    if applied:
        job.states = forward.states
        job.cursors = update.cursors
    return Outcome(applied, num_stop > 0, Totals(*totals), int(all_next_scored))
