"""Two ranks that open a run to continue it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from dist_mem.checkpoint.resume_source import find_resumption
from dist_mem.config import load_config
from dist_mem.errors import RunError
from dist_mem.memory import memory_options
from dist_mem.runtime.distributed import World
from dist_mem.runtime.signals import StopSignal
from dist_mem.tracking.tracker import Tracker
from dist_mem.training.context import Context
from dist_mem.training.opening import open_run
from dist_mem.training.state import TrainState
from tests.support.jobs import train_here
from tests.support.messages import described
from tests.support.ranks import Pools


def opened(
    world: World,
    config_file: Path,
    changes: tuple[str, ...],
    allowed: tuple[str, ...],
    look: Callable[[Context, TrainState, list[str]], Any],
) -> Any:
    """Return the result of `look` on a run as it is opened, with the messages of rank 0; or the error."""
    reported: list[str] = []
    say = Tracker.message
    Tracker.message = lambda self, text: (reported.append(text), say(self, text))[1]  # type: ignore[method-assign,func-returns-value]
    try:
        config = load_config([str(config_file), *changes], memory_options=memory_options)
        context, state = open_run(config, world, find_resumption(config, world, allowed), StopSignal([]))
    except RunError as error:
        return described(error)
    finally:
        Tracker.message = say  # type: ignore[method-assign]
    try:
        return look(context, state, reported)
    finally:
        context.saving.saver.close()
        context.feed.close()
        context.reporting.tracker.close("FINISHED")


def step_and_messages(context: Context, state: TrainState, reported: list[str]) -> tuple[int, str]:
    return state.step, "\n".join(reported)


def open_two(rank_pool: Pools, config: Path, *changes: str, allow: tuple[str, ...] = ()) -> tuple[int, str]:
    """Step and messages of a job on two ranks; both have the same step."""
    first, second = rank_pool(2).run(opened, config, changes, allow, step_and_messages)
    assert not isinstance(first, str), first
    assert first[0] == second[0]
    return first


def refusal(rank_pool: Pools, config: Path, *changes: str, allow: tuple[str, ...] = ()) -> str:
    """The error of a job on two ranks; both have the same."""
    first, second = rank_pool(2).run(opened, config, changes, allow, step_and_messages)
    assert isinstance(first, str), f"it was opened at step {first[0]}"
    assert first == second
    return first


class Leg(NamedTuple):
    """A part of a run, on its own number of ranks."""

    world: int
    stage: int
    micro_lanes: int = 2


def overrides_of(leg: Leg) -> tuple[str, str]:
    return f"train.micro_batch_size={leg.micro_lanes}", f"deepspeed.zero_optimization.stage={leg.stage}"


def train_leg(pool: Pools, config: Path, leg: Leg, *, steps: int, changes: tuple[str, ...] = ()) -> None:
    overrides = (f"train.steps={steps}", *overrides_of(leg), *changes)
    assert pool(leg.world).run(train_here, config, overrides) == [0] * leg.world


# Every memory meets every move and every change of stage in `make nightly`; here memories make two moves each, so that
# all pairs of worlds and of stages occur.
CHAINS = [
    [Leg(2, 2), Leg(3, 3, 1), Leg(1, 1, 4)],
    [Leg(2, 3), Leg(1, 0, 4), Leg(3, 2)],
    [Leg(3, 1), Leg(2, 2, 4), Leg(2, 3, 1)],
    [Leg(1, 0), Leg(2, 3), Leg(3, 0, 1)],
    [Leg(3, 3), Leg(1, 2), Leg(2, 1, 1)],
    [Leg(1, 1), Leg(3, 2), Leg(2, 0)],
    [Leg(2, 0), Leg(3, 1), Leg(1, 3)],
]
