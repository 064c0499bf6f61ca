"""The arena command: fit every memory to the budget, train and evaluate all, and write the page of the results."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from dist_mem.config import Config, load_config
from dist_mem.errors import EXIT_DONE
from dist_mem.estimate.dry_run import check_model
from dist_mem.memory import memory_options
from dist_mem.runtime.signals import StopSignal
from dist_mem.runtime.terminal import table
from dist_mem.studies.arena import SCALE, Arena, load_arena, memory_of_row
from dist_mem.studies.arena_page import write_page
from dist_mem.studies.budget import Costs, fitted
from dist_mem.studies.command import locked
from dist_mem.studies.fingerprint import keep_settings
from dist_mem.studies.job import Job
from dist_mem.studies.one_run import build
from dist_mem.studies.row_check import check_rows
from dist_mem.studies.runs import all_runs
from dist_mem.studies.sweep import run_job, submit_runs
from dist_mem.studies.tables import Table


def run(
    path: Path,
    *,
    out: Path | None,
    jobs: int,
    ranks: int,
    extra: Sequence[str],
    estimates: bool,
    only_estimate: bool,
    only_plan: bool,
    max_runs: int,
) -> int:
    """Run the arena of a file and return the exit code of the process; the same call continues a stopped one.

    Args:
        out, jobs, ranks, extra, max_runs, estimates, only_estimate: as `sweep.run`; out None: runs/arena/NAME.
        only_plan: print what every memory takes within the budget, and end.

    Raises:
        UnusableError: the arena or its configurations are invalid, a memory does not fit the budget, or a row cannot
            start.
    """
    arena, of_arena, folder = *load_arena(path, max_runs=max_runs), _folder(path, out)
    with locked(folder), StopSignal() as signal:
        job, costs = _job(arena, of_arena, folder, ranks, extra, signal)
        print(_plan(costs), flush=True)
        if only_plan:
            return EXIT_DONE
        page = partial(_write_page, job, list(arena.memories), costs)
        steps = {"estimates": estimates, "only_estimate": only_estimate}
        return run_job(job, name=path.stem, jobs=jobs, write_more=page, **steps)


def submit(path: Path, config: Config, *, out: Path | None, jobs: int, extra: Sequence[str], max_runs: int) -> int:
    """Submit all runs that are not finished as a job array; once they have ended, `run` measures them. See `sweep`."""
    arena, of_arena, folder = *load_arena(path, max_runs=max_runs), _folder(path, out)
    with locked(folder), StopSignal() as signal:
        job, costs = _job(arena, of_arena, folder, 1, extra, signal)
        print(_plan(costs), flush=True)
        return submit_runs(job, config, name=path.stem, at_once=jobs)


def _write_page(job: Job, memories: Sequence[str], costs: dict[str, Costs]) -> list[Path]:
    written = write_page(job, memories, costs)
    print(written[0].read_text(encoding="utf-8"))
    print(f"written: {', '.join(str(each) for each in written)}")
    return written


def _folder(path: Path, out: Path | None) -> Path:
    return out or Path("runs") / "arena" / path.stem


def _job(
    arena: Arena, of_arena: Table, folder: Path, ranks: int, extra: Sequence[str], signal: StopSignal
) -> tuple[Job, dict[str, Costs]]:
    """Return the job of an arena with the budget in its rows, and what every memory takes; build missing data."""
    scale = of_arena.scales[SCALE]
    keep_settings(of_arena, scale, folder, extra)
    runs = all_runs(scale, folder, scale.seeds, list(scale.rows))
    job = Job(of_arena, scale, folder, runs, ranks, list(extra), signal)
    build(job, runs[0], print)  # the sizes depend on the vocabulary

    def load(words: Sequence[str]) -> Config:
        return load_config([*scale.train, *words, f"data.path={arena.data}", *extra], memory_options=memory_options)

    found = {
        name: fitted(name, words, arena.budget, arena.fit, load, check_model) for name, words in arena.memories.items()
    }
    for row, words in scale.rows.items():
        words += found[memory_of_row(arena, row)][0]
    check_rows(of_arena, scale, extra)
    return job, {name: costs for name, (_, costs) in found.items()}


def _plan(costs: dict[str, Costs]) -> str:
    rows = [
        [name, *(f"{part:,}" for part in each[:4]), "n/a" if each.flops is None else f"{each.flops:.3g}"]
        for name, each in costs.items()
    ]
    return "\n".join(table([["memory", "parameters", "state bytes", "steps", "tokens", "FLOPs"], *rows]))
