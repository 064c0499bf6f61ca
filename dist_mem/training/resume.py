"""Restore a job from a checkpoint, on any number of ranks, at any ZeRO stage, with any micro_batch_size.

    checkpoint/resume_source.py chooses and compares the checkpoint -> restore engine, lanes, random state

Each lane moves, with memory and cursor, to the rank that holds it now. Parameters and optimizer state are read by name
and range. The plan of the data does not depend on ranks. So every rank reads what it needs, and nothing is converted.
If the division of lanes is unchanged, the random generators are restored too, and the run continues bit for bit;
otherwise dropout uses new random numbers.
"""

from __future__ import annotations

import hashlib
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dist_mem.checkpoint.engine_files import EngineReader
from dist_mem.checkpoint.lane_states import Lanes, read_lanes, read_random_state, set_random_state
from dist_mem.checkpoint.manifest import run_of
from dist_mem.checkpoint.resume_choice import AUTO, ResumeChoice, choose_checkpoint
from dist_mem.checkpoint.resume_source import Resumption, check_data, saved_config
from dist_mem.config import Config, OptimizerConfig, ScheduleConfig, TrainConfig
from dist_mem.config.environment_values import hide
from dist_mem.config.keys import DATA, PLACE
from dist_mem.config.settings import metadata_of
from dist_mem.data.mixture import mixture_parts
from dist_mem.data.shard import Index
from dist_mem.engine.engine import Engine
from dist_mem.engine.optimizer import lr_factor
from dist_mem.errors import DivergedError
from dist_mem.nn.layers import Dropout
from dist_mem.runtime.distributed import World, on_all_ranks
from dist_mem.runtime.terminal import some
from dist_mem.runtime.versions import machine_of
from dist_mem.supervision.watchdog import beat
from dist_mem.tracking.provenance import code_differences
from dist_mem.training.context import Context
from dist_mem.training.divergence import METRICS, ROLLBACK, Decision
from dist_mem.training.state import TrainState

Rate = Callable[[int], float | None]  # steps -> the learning rate after them
_OF_MOVES = ("train.micro_batch_size", "deepspeed.zero_optimization.stage")  # `_moves` reports them


class StartState(NamedTuple):
    """The state that a job starts from."""

    state: TrainState
    metadata: Mapping[str, Any]  # the manifest of the checkpoint; empty at step 0
    messages: list[str]
    tags: dict[str, str]  # for MLflow
    superseded: list[Path]  # checkpoints to rename to `.superseded` now
    broken: list[Path]  # checkpoints to rename to `.broken` at the next save
    seconds: float  # that choosing and reading the checkpoint took


def dropout_seed(seed: int, step: int, rank: int) -> int:
    """Return a different seed for every (seed, step, rank); the constants are large odd numbers."""
    return (seed * 0x9E3779B97F4A7C15 + step * 0xBF58476D1CE4E5B9 + rank * 0x94D049BB133111EB + 1) % (1 << 63)


def empty_lanes(train: TrainConfig, engine: Engine, lane_ids: Tensor) -> Lanes:
    """Return these lanes with empty memories, at the beginning of their documents."""
    memories = [engine.init_state(group) for group in lane_ids.split(train.micro_batch_size)]
    return Lanes(lane_ids, torch.zeros(len(lane_ids), 3, dtype=torch.int64), memories)


def start(
    config: Config,
    world: World,
    resumption: Resumption | None,
    *,
    splits: Sequence[Index],
    engine: Engine,
    lane_ids: Tensor,
    sources: Mapping[str, str],
    commit: str | None,
) -> StartState:
    """Load the chosen checkpoint, or start at step 0; collective.

    Args:
        resumption: None: start at step 0.
        splits: as `Data.splits`.
        lane_ids: of this rank.
        sources: of memories outside the package, name -> text.
        commit: of the running code.

    Raises:
        RunError: on every rank.
    """
    run_dir = Path(config.run_dir)
    if resumption is None:
        lanes = empty_lanes(config.train, engine, lane_ids)
        torch.manual_seed(dropout_seed(config.train.seed, 0, world.rank))
        state = TrainState(0, lanes.states, lanes.cursors, mixture=mixture_parts([], config.data, config.train, 0))
        return StartState(state, {}, [f"starting {run_dir}"], {}, [], [], 0.0)
    began = time.perf_counter()
    choice, saved, changes, seconds = resumption
    directory, manifest = choice.directory, choice.manifest
    on_all_ranks(lambda: check_data(directory, manifest, splits, config.data), f"comparing the data of {directory}")
    state = load_checkpoint(choice, saved.train, config, world, engine=engine, lane_ids=lane_ids)
    is_own = run_of(directory).resolve() == run_dir.resolve()
    messages = [f"passed over: {reason}" for reason in choice.passed_over]
    messages += [f"resuming from {directory}{'' if is_own else ', a checkpoint of another run'}"]
    messages += [*_moves(choice, saved.train, config.train, engine, world), *_changed_sources(choice, sources)]
    messages += other_machine(manifest.get("machine", {}), machine_of(world.device))
    messages += _empty_moments_line(engine)
    changed = ", ".join(str(change) for change in changes if _is_reported(change.key))
    messages += [f"changed since then: {changed}"] if changed else []
    former, present = (partial(planned_rate, one.optimizer, one.schedule, one.train.steps) for one in (saved, config))
    messages += other_rate(former, present, manifest["step"])
    tags = {} if is_own else {"dist_mem.resumed_from": hide(os.fspath(directory.absolute()))}
    if other_code := code_differences(manifest["versions"], manifest.get("commit"), commit):
        messages.append(f"warning: {directory.name} was written by other code: {other_code}")
        tags[f"dist_mem.other_code.step_{manifest['step']}"] = other_code
    metadata = manifest if is_own else _of_a_branch(manifest)
    seconds += time.perf_counter() - began
    return StartState(state, metadata, messages, tags, choice.superseded, choice.broken, seconds)


def _of_a_branch(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Return the manifest of another run's checkpoint without what is its own: points, time, numbers of divergences."""
    kept = {name: value for name, value in manifest.get("divergence", {}).items() if name not in METRICS}
    return {**manifest, "points": 0, "goodput": {}, "divergence": kept}


def _is_reported(key: str) -> bool:
    """Return whether a changed key is reported; places are not, which may hold credentials."""
    return key not in _OF_MOVES and metadata_of(key).affects not in (DATA, PLACE)


def planned_rate(optimizer: OptimizerConfig, schedule: ScheduleConfig, steps: int | None, step: int) -> float | None:
    """Return the learning rate after so many steps; None if only the data say how many there will be."""
    return None if steps is None else optimizer.lr * lr_factor(step, schedule, steps)


def other_rate(former: Rate, present: Rate, step: int) -> list[str]:
    """Return one line if the next learning rate is another than the former schedule's, as after more train.steps."""
    planned, now = former(step), present(step)
    if planned is None or now is None or step == 0 or math.isclose(now, planned, rel_tol=1e-6):
        return []
    before = f"the former schedule gave {former(step - 1):.3g} at step {step}, and {planned:.3g} next"
    return [f"learning rate {now:.3g} at step {step + 1}: {before}"]


def load_checkpoint(
    choice: ResumeChoice, saved: TrainConfig, config: Config, world: World, *, engine: Engine, lane_ids: Tensor
) -> TrainState:
    """Load the engine, this rank's lanes and its random state from a checkpoint; collective.

    An update that is partly accumulated is dropped.

    Args:
        saved: `train` of the checkpoint.

    Raises:
        RunError: on every rank, if any cannot read its part.
    """
    directory, manifest, train = choice.directory, choice.manifest, config.train
    reader = on_all_ranks(lambda: EngineReader(directory), f"reading {directory}")
    engine.restore(reader.read, reader.counters)
    fresh = empty_lanes(train, engine, lane_ids)
    lanes = _read_lanes(choice, saved, train, world, fresh)
    step, validation, stage_ends = manifest["step"], manifest.get("validation"), manifest.get("stage_ends", ())
    mixture = mixture_parts(manifest.get("mixture", ()), config.data, train, step)
    return TrainState(step, lanes.states, lanes.cursors, validation, stage_ends, mixture)


def _is_same_division(choice: ResumeChoice, saved: TrainConfig, train: TrainConfig, world: World) -> bool:
    """Whether this rank holds the lanes that the rank of its number held, in the same micro-batches."""
    return choice.manifest["world_size"] == world.size and saved.micro_batch_size == train.micro_batch_size


def _read_lanes(choice: ResumeChoice, saved: TrainConfig, train: TrainConfig, world: World, fresh: Lanes) -> Lanes:
    """Read this rank's lanes; restore its random generators, or reseed them if the division of lanes changed."""
    directory, manifest = choice.directory, choice.manifest

    def read() -> tuple[Lanes, dict[str, Tensor] | None]:
        convert = saved.precision != train.precision
        lanes = read_lanes(
            directory, manifest, fresh.lane_ids, fresh.states, num_lanes=train.global_batch_size, convert=convert
        )
        is_same = _is_same_division(choice, saved, train, world)
        return lanes, read_random_state(directory, world) if is_same else None

    lanes, random_state = on_all_ranks(read, f"reading the lanes of {directory}")
    if random_state is None:
        torch.manual_seed(dropout_seed(train.seed, manifest["step"], world.rank))
    else:
        set_random_state(random_state, world)
    return lanes


def _moves(choice: ResumeChoice, saved: TrainConfig, train: TrainConfig, engine: Engine, world: World) -> list[str]:
    """Return one line that lists the changes in how the work is divided; no line without changes."""
    manifest = choice.manifest
    divisions = {
        "ranks": (manifest["world_size"], world.size),
        "ZeRO stage": (manifest["zero_stage"], engine.stage),
        "micro_batch_size": (saved.micro_batch_size, train.micro_batch_size),
    }
    moved = ", ".join(f"{name} {was} -> {now}" for name, (was, now) in divisions.items() if was != now)
    drops = any(isinstance(module, Dropout) and module.drops for module in engine.module.modules())
    is_same = _is_same_division(choice, saved, train, world)
    dropout = "; dropout uses new random numbers" if drops and not is_same else ""
    return [f"moved: {moved}{dropout}"] if moved else []


def other_machine(former: Mapping[str, str], present: Mapping[str, str]) -> list[str]:
    """Return one line if sums are added in another order than where the checkpoint was written, as on other threads."""
    pairs = {name: (former.get(name, "none"), present.get(name, "none")) for name in {**former, **present}}
    changed = [f"{name} {was} -> {now}" for name, (was, now) in pairs.items() if was != now]
    if not former or not changed:  # checkpoints of 0.1.0 do not have it
        return []
    return [f"{', '.join(changed)}: sums in another order, so the bits are not those of a run that stayed"]


def _empty_moments_line(engine: Engine) -> list[str]:
    """Return a line about trained parameters of which the checkpoint has no optimizer state; none if it has of none."""
    names = engine.restored_empty
    if not names or len(names) == sum(parameter.requires_grad for parameter in engine.module.parameters()):
        return []
    return [f"the moments of {some(names, 3)} start at zero: the checkpoint has none of them"]


def _changed_sources(choice: ResumeChoice, sources: Mapping[str, str]) -> list[str]:
    """Return a line for each file of a memory outside the package that differs from the checkpoint's."""
    entries = choice.manifest["files"]
    return [
        f"{name} differs from the file that the run was trained with so far: {choice.directory / name}"
        for name, text in sources.items()
        if hashlib.sha256(text.encode()).hexdigest() != entries.get(name, {}).get("sha256")
    ]


def carry_out(context: Context, state: TrainState, decision: Decision) -> TrainState:
    """Carry out and report the decision about a divergence; return the state to continue from.

    Raises:
        DivergedError: on every rank; there is no checkpoint to roll back to.
        RunError: on every rank; the checkpoint cannot be read.
    """
    reporting = context.reporting
    reporting.tracker.message(decision.message)
    if decision.action == ROLLBACK:
        state = _roll_back(context, decision)
        with reporting.failure.keep_error():
            reporting.tracker.rewind(state.step)
            context.begin_part(state)
    reporting.record(state.step, {METRICS[decision.action]: context.divergence.counts[decision.action]})
    reporting.tag(f"divergence.step_{decision.step}", decision.message)
    return state


def _roll_back(context: Context, decision: Decision) -> TrainState:
    """Return the state of the newest checkpoint that verifies. The segments up to now are read, not trained on."""
    beat("restoring")
    feed, reporting, saver = context.feed, context.reporting, context.saving.saver
    saver.wait()
    # One that was passed over may verify now; it is of steps that this job has made again, or has not reached.
    choice = choose_checkpoint(AUTO, context.run_dir, context.world, saver.broken)
    if choice is None:
        raise DivergedError(f"{decision.message}, but there is no checkpoint yet", decision.step)
    saved = saved_config(choice.directory, context.config.memory).train
    state = load_checkpoint(choice, saved, context.config, context.world, engine=context.engine, lane_ids=feed.lane_ids)
    saver.step = state.step  # later steps are saved when they are made again, also over a damaged checkpoint
    feed.restart(state)
    reporting.meter.load(choice.manifest["meter"])
    saver.set_aside(choice.broken)
    context.divergence.roll_back(choice.manifest.get("divergence", {}), first_trained=decision.step)
    reporting.goodput.roll_back(choice.manifest.get("goodput", {}))
    for reason in choice.passed_over:
        reporting.tracker.message(f"passed over: {reason}")
    reporting.tracker.message(
        f"rolled back to {choice.directory}; the segments of steps {state.step + 1} to {decision.step} are read, and "
        "not trained on"
    )
    return state
