"""The functions of the commands. Each imports what it needs when it runs, so that help and errors appear at once.

`dist-mem --help` prints their docstrings. The job commands are in jobs.py.
"""

from __future__ import annotations

import argparse
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from dist_mem.cli import inspecting
from dist_mem.cli.standard_streams import note_lost_lines
from dist_mem.config import Config, deepspeed_block, load_config, to_yaml, value_of
from dist_mem.config.docs import schema_as_yaml
from dist_mem.config.resume_rules import check_allowed
from dist_mem.errors import EXIT_FAILED, RunError, StoppedEarlyError, UnusableError
from dist_mem.runtime.environment import wants_colour
from dist_mem.runtime.extras import is_installed, require
from dist_mem.runtime.ranks import note_exit_code
from dist_mem.runtime.shipped import shipped_root
from dist_mem.runtime.signals import OF_SCHEDULERS, StopSignal
from dist_mem.runtime.terminal import listed


def load_checked(
    arguments: Sequence[str],
    *,
    builds_model: bool = False,
    further: Callable[[Config], object] = lambda config: None,
) -> Config:
    """Load a configuration and check it, including the memory block, which needs torch and is checked last.

    Args:
        builds_model: also build the model, without allocating it, to find errors of the model or its memory before
            anything is written.
        further: a check of the command, whose problems get the file and line of their key, as those of all others.

    Raises:
        UnusableError: as `load_config`, or data.path is an address that cannot be read.
    """
    from dist_mem.data.remote.fetch import check_address, is_remote  # imports fsspec, which help need not wait for

    def memory_options(block: Any) -> dict[str, Any]:
        from dist_mem.memory import memory_options as check

        return check(block)

    def check(config: Config) -> None:
        further(config)
        if is_remote(config.data.path):
            check_address(config.data.path)
        if builds_model:
            from dist_mem.estimate.dry_run import check_model

            check_model(config)
            _check_deepspeed(deepspeed_block(config))

    return load_config(arguments, memory_options=memory_options, check=check)


def _check_deepspeed(block: Mapping[str, Any]) -> None:
    """Check the blocks that DeepSpeed has models of; a machine that only plans or submits may lack DeepSpeed."""
    checked_already = {"zero_optimization", "stage"}  # loading DeepSpeed takes seconds
    if (block.keys() | block.get("zero_optimization", {}).keys()) - checked_already and is_installed("deepspeed"):
        from dist_mem.runtime.distributed import choose_accelerator

        choose_accelerator()
        from dist_mem.engine.start import check_blocks

        check_blocks(block)


def require_config(options: argparse.Namespace, example: str) -> None:
    """Raise UnusableError with an example if the command line has no configuration."""
    if not options.config:
        given = f"{options.command}: no configuration: give YAML files and key=value overrides, as in: {example}"
        raise UnusableError(f"{given}\nshipped configurations{listed(_shipped_configurations())}")


def _shipped_configurations() -> list[str]:
    root = shipped_root()
    files = [*sorted(root.glob("configs/*.yaml")), *sorted(root.glob("configs/memory/*.yaml"))]
    return [str(path.relative_to(root)) for path in files]


def train(options: argparse.Namespace) -> int:
    """Start or resume a run."""
    began = time.time()
    # Imports take seconds. Without a handler, a signal would end the process, or Ctrl-C leave a library half loaded.
    with StopSignal((*OF_SCHEDULERS, signal.SIGINT)) as early:
        code = EXIT_FAILED
        try:
            code = _train(options, early, began)
        except RunError as error:
            code = error.exit_code
            raise
        finally:
            note_exit_code(code)  # still inside the handler: srun sends a signal as soon as another rank has ended
        return code


def _train(options: argparse.Namespace, early: StopSignal, began: float) -> int:
    require_config(options, "dist-mem train configs/demo.yaml train.steps=100")
    config = load_checked(options.config, builds_model=True)
    check_allowed(options.allow)
    if options.check:
        from dist_mem.checkpoint.resume_source import check_run_dir
        from dist_mem.estimate import dry_run as plan
        from dist_mem.tracking.start import check_sinks

        check_run_dir(config, options.allow)
        check_sinks(config.tracking)
        print(plan.report(config, world_size=options.world))
        return 0
    note_lost_lines(Path(config.run_dir))
    require("deepspeed", "training")
    if config.tracking.mlflow:
        require("mlflow", "tracking.mlflow=true", "set tracking.mlflow=false")
    if config.eval.figures:
        require("matplotlib", "eval.figures=true", "set eval.figures=false")
    from dist_mem.runtime.distributed import choose_accelerator, print_on_rank0

    print_on_rank0(f"starting {config.run_dir}: loading torch and DeepSpeed")
    choose_accelerator()
    from dist_mem.training.run import run

    if early.received == "SIGINT":
        raise StoppedEarlyError(early.received)
    return run(config, allowed=options.allow, early=early, began=began)


def doctor(options: argparse.Namespace) -> int:
    """Check whether machines, network and ranks are fit to train."""
    from dist_mem.runtime.distributed import choose_accelerator

    choose_accelerator()  # as a run does: the doctor checks what a run will have
    from dist_mem.doctor import run_checks as run

    return run.run(load_checked(options.config, builds_model=True) if options.config else None)


def evaluate(options: argparse.Namespace) -> int:
    """Score a checkpoint on whole documents."""
    is_sweep = options.sweep is not None
    if options.also and not is_sweep:
        raise UnusableError(f"--also {options.also[0]}: only with --sweep; evaluate one run at a time otherwise")
    if options.without_memory and is_sweep:
        raise UnusableError("--without-memory: not with --sweep; evaluate one setting at a time")
    if options.memory is not None and (is_sweep or options.without_memory):
        other = "--sweep, because a memory is that of one setting" if is_sweep else "--without-memory, which empties it"
        raise UnusableError(f"--memory {options.memory}: not with {other}")
    with StopSignal(OF_SCHEDULERS) as early:  # before the imports, which take seconds
        from dist_mem.runtime.distributed import choose_accelerator

        choose_accelerator()
        settings = {"split": options.split, "checkpoint": options.checkpoint, "overrides": options.overrides}
        if is_sweep:
            from dist_mem.evaluation import sweep

            return sweep.run([options.run, *options.also], options.sweep, early=early, **settings)
        from dist_mem.evaluation.evaluate import run

        given = {"without_memory": options.without_memory, "memory": options.memory}
        return run(options.run, early=early, **given, **settings)


def export(options: argparse.Namespace) -> int:
    """Write a directory from which a trained model can be loaded anywhere."""
    if options.register is not None and not options.mlflow:
        raise UnusableError(f"--register {options.register}: only with --mlflow, which logs the export; add it")
    if options.alias is not None and options.register is None:
        raise UnusableError(f"--alias {options.alias}: only with --register NAME, whose new version gets it; add it")
    from dist_mem.runtime.distributed import choose_accelerator

    choose_accelerator()
    from dist_mem.evaluation.export import Registration, run

    return run(
        options.run,
        registration=Registration(options.register, options.alias) if options.mlflow else None,
        out=options.out,
        checkpoint=options.checkpoint,
        precision=options.precision,
        layout=options.format,
        overrides=options.overrides,
    )


def checkpoints(options: argparse.Namespace) -> int:
    """List, verify or show the checkpoints of a run."""
    from dist_mem.checkpoint.listing import run

    return run(options.action, options.path)


def compare(options: argparse.Namespace) -> int:
    """Compare the evaluations of several runs."""
    from dist_mem.evaluation.compare import run

    return run(options.runs, split=options.split, picture=options.plot)


def generate(options: argparse.Namespace) -> int:
    """Continue a prompt, or compare how several runs continue it."""
    from dist_mem.runtime.distributed import choose_accelerator

    choose_accelerator()
    from dist_mem.generation.continue_prompts import request_of, run

    return run(request_of(options))


def dialogue(options: argparse.Namespace) -> int:
    """Generate replies in the dialogues of a split, and score them."""
    with StopSignal(OF_SCHEDULERS) as early:
        from dist_mem.runtime.distributed import choose_accelerator

        choose_accelerator()
        from dist_mem.papers.dialogue.score_replies import run, settings_of

        settings = {"checkpoint": options.checkpoint, "overrides": options.overrides}
        return run(options.run, settings_of(options), early=early, **settings)


def inspect(options: argparse.Namespace) -> int:
    """Show what memory changed in a text, or how much an infinity-former's memory has kept."""
    has_document = inspecting.has_document(options)
    with StopSignal(OF_SCHEDULERS) as early:
        from dist_mem.runtime.distributed import choose_accelerator

        choose_accelerator()
        if has_document:
            from dist_mem.inspection import inspect_document
            from dist_mem.inspection.request import request_of

            return inspect_document.run(request_of(options, with_colour=wants_colour(options.color)), early=early)
        from dist_mem.papers.regression_error import run

        settings = {"split": options.split, "checkpoint": options.checkpoint, "overrides": options.overrides}
        return run(options.run, limit=options.limit, early=early, **settings)


def track(options: argparse.Namespace) -> int:
    """Send MLflow the data that it did not receive during a run."""
    from dist_mem.checkpoint.listing import newest_count
    from dist_mem.tracking.mlflow.sync import run

    overrides = [text for text in options.runs if text.startswith("tracking.")]
    files = [text for text in options.runs if text.endswith((".yaml", ".yml")) and text not in overrides]
    run_dirs = [Path(text) for text in options.runs if text not in (*overrides, *files)]
    return run(run_dirs, overrides, files, count=newest_count)


def check_memory(options: argparse.Namespace) -> int:
    """Check a memory against every rule of the contract."""
    from dist_mem.contract.check_memory import run

    return run(options.kind)


def config(options: argparse.Namespace) -> int:
    """Print a resolved configuration, or every key with its default."""
    if options.markdown:
        from dist_mem.config.docs import config_page
        from dist_mem.memory import described_memories

        print(config_page(described_memories()), end="")
        return 0
    if options.snapshot:
        make_snapshot(options.snapshot, options.config)
        return 0
    if options.get:
        print(value_of(load_checked(options.config), options.get))
        return 0
    print(to_yaml(load_checked(options.config)) if options.config else schema_as_yaml(), end="")
    return 0


def make_snapshot(folder: Path, arguments: Sequence[str]) -> None:
    """Copy the package and the files of a configuration; see launch/code_snapshot.py. Raises RunError."""
    from dist_mem.config.sources import files_of
    from dist_mem.launch import code_snapshot as snapshot
    from dist_mem.memory.outside import files_of as files_of_memory
    from dist_mem.runtime.outside_code import source_of
    from dist_mem.tracking.provenance import to_keep

    config = load_checked(arguments)
    sinks = map(source_of, config.tracking.sinks)
    snapshot.make(folder, [*files_of(arguments), *files_of_memory(config.memory), *sinks], to_keep())
