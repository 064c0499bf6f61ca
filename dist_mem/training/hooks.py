"""Hooks between the steps of a run: report, evaluate, save, and act on a divergence.

Rank 0 alone records. An error in that is kept, stops all ranks after the next step, and is raised once that is saved.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import torch

from dist_mem.checkpoint.lane_states import Lanes
from dist_mem.checkpoint.manifest import TOKENIZER_DIR
from dist_mem.checkpoint.resume_choice import AUTO, choose_checkpoint
from dist_mem.checkpoint.resume_source import data_fingerprint, saved_config
from dist_mem.checkpoint.retention import Validation
from dist_mem.checkpoint.snapshot import Snapshot, take_snapshot
from dist_mem.config import to_yaml
from dist_mem.config.resume_rules import checksums_to_keep
from dist_mem.data.directory import open_index
from dist_mem.data.tokenizers.registry import tokenizer_files
from dist_mem.errors import CutShortError, DivergedError, RunError, TakenOverError
from dist_mem.evaluation.cut_short import stop_check
from dist_mem.evaluation.probe import PREFIX, PassageRead, open_passage, passage_figures
from dist_mem.evaluation.probe_picture import write_passage_picture
from dist_mem.evaluation.protocol import protocol_of_training
from dist_mem.evaluation.scoring import score_split
from dist_mem.runtime.distributed import on_all_ranks, sum_tensor
from dist_mem.supervision.watchdog import beat
from dist_mem.training.context import Context, TrainState
from dist_mem.training.divergence import METRICS, ROLLBACK, Decision
from dist_mem.training.history import begin_part
from dist_mem.training.meter import peak_memory_gb
from dist_mem.training.resume import load_checkpoint
from dist_mem.training.step import Outcome
from dist_mem.training.stopping import Stopping

_DATA_CHARS = 12  # of a fingerprint


def record(context: Context, step: int, figures: Mapping[str, float]) -> None:
    """Record metrics of a step."""
    beat("recording")
    with context.failure.kept():
        context.tracker.log(step, figures)


def tag(context: Context, name: str, message: str) -> None:
    """Tag the MLflow run with something that happened at a step."""
    with context.failure.kept():
        context.tracker.log_tags({f"dist_mem.{name}": message})


def is_multiple(step: int, every: int | None) -> bool:
    """Return whether something done every `every` steps is due at this step; None: never."""
    return every is not None and step % every == 0


def is_logged(context: Context, step: int) -> bool:
    """Return whether the metrics of training are logged at this step."""
    return step == context.total_steps or is_multiple(step, context.config.tracking.every)


def own_slots(context: Context, step: int) -> list[float]:
    """Return this rank's part of the all-reduce of `step`: its time, and its peak memory if the step is logged."""
    slots = context.stragglers.own_slots()
    if not is_logged(context, step):
        return slots
    memory = [0.0] * context.world.size
    memory[context.world.rank] = peak_memory_gb()
    return slots + memory


def report(context: Context, state: TrainState, outcome: Outcome, *, epoch: float) -> None:
    """Count the step just made, report ranks that became slow or recovered, and record metrics where they are due."""
    step, meter = state.step, context.meter
    if outcome.overflows:
        context.tracker.message(f"step {step}: {outcome.overflows} fp16 overflows; the loss scale is smaller now")
    meter.add(outcome.totals, epoch=epoch, logs=outcome.logs)
    is_due = is_logged(context, step)
    slots, num_ranks = list(outcome.slots), context.world.size
    if is_due:
        meter.note({"peak_memory_gb": max(slots[-num_ranks:])})
        slots = slots[:-num_ranks]
    messages = context.stragglers.update(slots)
    for message in messages:
        context.tracker.message(f"step {step}: {message}")
    if context.stragglers.worst is not None:
        meter.note({"straggler/ratio": context.stragglers.worst})
    if messages:
        tag(context, f"straggler.step_{step}", "; ".join(messages))
    if is_due:
        record(context, step, meter.read(context.engine) | context.goodput.figures())


def owes_evaluation(context: Context, state: TrainState) -> bool:
    """Return whether this step's evaluation is due and not done yet: a stop skips it to save without delay."""
    is_made = state.validation is not None and state.validation["step"] == state.step
    return state.step > 0 and is_multiple(state.step, context.config.eval.every) and not is_made


def evaluate_if_owed(context: Context, state: TrainState, stopping: Stopping, *, is_saved: bool) -> TrainState:
    """Score the validation split if it is due, and record its metrics; a stop leaves the evaluation pending.

    Args:
        is_saved: the current step is saved; if not, it is saved before an error in scoring is raised.

    Raises:
        RunError: on every rank.
    """
    if not owes_evaluation(context, state):
        return state
    with context.meter.paused():
        try:
            validation, figures, read = evaluate_now(context, state.step, stopping)
            figures |= read.figures | full_lanes(context, state)
        except CutShortError:
            return state
        except RunError:
            if not is_saved:
                save(context, state)
            raise
        record(context, state.step, figures)
        draw_passage(context, state.step, read)
    return state._replace(validation=validation._asdict())


def save(context: Context, state: TrainState) -> None:
    """Save a state, in the background or synchronously; every rank calls it.

    Raises:
        UnfitError, TakenOverError: on every rank, if this save or the previous one could not be written.
    """
    beat("saving")
    context.saver.wait()  # at most one save in flight, and one copy in memory
    began = time.perf_counter()
    context.saver.save(_snapshot(context, state), began=began)


def rehearse_save(context: Context, state: TrainState) -> None:
    """Try what the first save needs, without its tensors: that it fails is found here, and not hours later.

    Raises:
        UnfitError: on every rank, if any rank could not write its part.
    """
    beat("saving")
    context.saver.rehearse(_snapshot(context, state, is_rehearsal=True))


def _snapshot(context: Context, state: TrainState, *, is_rehearsal: bool = False) -> Snapshot:
    metadata = {
        "time": time.time(),
        "commit": context.commit,
        "zero_stage": context.engine.stage,
        "mlflow_run_id": context.tracker.run_id,
        "points": context.tracker.num_points,
        "data_fingerprint": data_fingerprint(context.splits),
        "tokenizer_fingerprint": context.tokenizer.fingerprint,
        "meter": context.meter.state(),  # the sums are equal on all ranks; the times are rank 0's
        "goodput": context.goodput.state(),
        "divergence": context.divergence.state(),
        "validation": state.validation,
        "environment": checksums_to_keep(context.config),
    }
    lanes = Lanes(context.lane_ids, state.cursors, state.memories)
    texts = {"config.yaml": to_yaml(context.config), **context.sources}
    small_files = {name: text.encode() for name, text in texts.items()}
    # In every checkpoint, not once per run, so that a checkpoint copied elsewhere can be loaded there.
    tokenizer = tokenizer_files(context.tokenizer)
    small_files |= {f"{TOKENIZER_DIR}/{name}": content for name, content in tokenizer.items()}
    return take_snapshot(
        step=state.step,
        engine=context.engine,
        lanes=lanes,
        small_files=small_files,
        metadata=metadata,
        is_rehearsal=is_rehearsal,
    )


def save_if_due(context: Context, state: TrainState, outcome: Outcome, *, is_last: bool) -> None:
    """Save the state if the run ends here or a save is due, and report the checkpoints that are written.

    A state that is saved already, as when no update was made since, is not saved again.
    """
    if outcome.flags.save_failed:
        context.saver.wait()  # raises on all ranks, as the flag is agreed
    is_due = is_last or outcome.flags.save or is_multiple(state.step, context.config.checkpoint.every)
    if is_due and state.step != context.saver.step:
        with context.meter.paused():
            save(context, state)
    if is_last:
        context.saver.wait()
    report_saved(context)


def report_saved(context: Context) -> None:
    """Report the checkpoints written since the last step, and those removed."""
    for saved in context.saver.finished():
        context.meter.note(saved.figures())
        with context.failure.kept():
            context.tracker.log_checkpoint(saved.step, saved.written.path)
        for message in (str(saved), *saved.written.messages):
            context.tracker.message(message)


def end_saving(context: Context) -> None:
    """Wait for pending saves at the end of a run; a failure is reported, and does not hide why the run ends."""
    beat("saving")
    try:
        context.saver.close()
    except TakenOverError:  # `run` reports it
        return
    except RuntimeError as error:  # a RunError, or the other ranks are gone
        context.tracker.message(f"error: {error}")
    report_saved(context)


def evaluate_now(context: Context, step: int, stopping: Stopping) -> tuple[Validation, dict[str, float], PassageRead]:
    """Return loss and metrics of the validation split at this step, and what the memory read of its passage.

    Lanes are fresh, and the training's state is unaffected.

    Raises:
        CutShortError: on every rank; there is a reason to stop.
    """
    engine = context.engine
    beat("evaluating")
    engine.train(False)
    check = stop_check(stopping.has_reason, context.world)

    def forward(*tensors: Any, **state: Any) -> Any:
        beat("evaluating")
        check()
        return engine(*tensors, **state)

    index = open_index(context.config.data, context.config.eval.split)
    found = score_split(
        forward,
        engine.init_state,
        config=context.config,
        index=index,
        tokenizer=context.tokenizer,
        world=context.world,
    )
    passage = on_all_ranks(
        lambda: open_passage(index, context.config, context.tokenizer.bos_id), f"opening {index.split_dir}"
    )
    memories = engine.module.memories()
    read = passage_figures(forward, engine.init_state, memories, passage, context.world.device)
    engine.train(True)
    measure = f"{index.split}, {protocol_of_training(context.config)}; data {index.fingerprint[:_DATA_CHARS]}"
    return Validation(step, found.nll / found.num_scored, measure), found.figures(), read


def draw_passage(context: Context, step: int, read: PassageRead) -> None:
    """Draw where the layers looked, if `eval.figures`, and add the files to the MLflow run."""
    if not context.config.eval.figures or context.world.rank != 0:
        return
    beat("drawing")
    with context.failure.kept():
        for path in write_passage_picture(read.layers, context.run_dir / "figures", step=step):
            context.tracker.log_artifact(str(path.relative_to(context.run_dir)))


def full_lanes(context: Context, state: TrainState) -> dict[str, float]:
    """Return the share of the training's lanes that are so far into a document that their memory is full.

    There is none for a memory that holds no tokens. Every rank calls it.
    """
    kept_len = max(memory.kept_len for memory in context.engine.module.memories())
    if not kept_len:
        return {}
    counts = torch.tensor([int((state.cursors[:, 2] >= kept_len).sum()), len(state.cursors)], dtype=torch.float64)
    if context.world.size > 1:
        counts = sum_tensor(counts, context.world.device)
    return {f"{PREFIX}full_lanes": float(counts[0] / counts[1])}


def carry_out(context: Context, state: TrainState, decision: Decision) -> TrainState:
    """Carry out and report the decision about a divergence; return the state to continue from.

    Raises:
        DivergedError: on every rank; there is no checkpoint to roll back to.
        RunError: on every rank; the checkpoint cannot be read.
    """
    context.tracker.message(decision.message)
    if decision.action == ROLLBACK:
        state = _roll_back(context, decision)
        with context.failure.kept():
            context.tracker.rewind(state.step)
            if context.world.rank == 0:
                first_trained = context.divergence.first_trained
                begin_part(context.config, context.world, state.step, first_trained=first_trained)
    record(context, state.step, {METRICS[decision.action]: context.divergence.counts[decision.action]})
    tag(context, f"divergence.step_{decision.step}", decision.message)
    return state


def _roll_back(context: Context, decision: Decision) -> TrainState:
    """Return the state of the newest checkpoint that verifies. The segments up to now are read, not trained on."""
    beat("restoring")
    context.saver.wait()
    choice = choose_checkpoint(AUTO, context.run_dir, context.world)
    if choice is None:
        raise DivergedError(f"{decision.message}, but there is no checkpoint yet", decision.step)
    state = load_checkpoint(
        choice, saved_config(choice.directory, context.config), context.config, context.world,
        engine=context.engine, lane_ids=context.lane_ids,
    )  # fmt: skip
    context.feed.restart(state.cursors, state.step)
    context.meter.load(choice.manifest["meter"])
    context.saver.set_aside(choice.broken)
    context.divergence.roll_back(choice.manifest.get("divergence", {}), first_trained=decision.step + 1)
    context.goodput.roll_back(choice.manifest.get("goodput", {}))
    for reason in choice.passed_over:
        context.tracker.message(f"passed over: {reason}")
    context.tracker.message(
        f"rolled back to {choice.directory}; the segments of steps {state.step} to {decision.step} are read, and not "
        "trained on"
    )
    return state
