"""Start or resume a run."""

from __future__ import annotations

import signal
import time
from argparse import ArgumentParser, Namespace
from pathlib import Path

from dist_mem.cli.arguments import CONFIG, add_allow, count
from dist_mem.cli.configuration import load_checked, require_config
from dist_mem.cli.standard_streams import note_lost_lines
from dist_mem.config.resume_rules import check_allowed
from dist_mem.errors import EXIT_FAILED, RunError, StoppedEarlyError, UnusableError
from dist_mem.runtime.extras import require
from dist_mem.runtime.ranks import note_exit_code
from dist_mem.runtime.signals import OF_SCHEDULERS, StopSignal
from dist_mem.runtime.terminal import label_lines

PLACE = ("train", 1)
EXAMPLE = "configs/demo.yaml memory/none.yaml train.steps=100"


def add_arguments(added: ArgumentParser) -> None:
    """Add the arguments of the command."""
    added.add_argument("config", nargs="*", default=[], help=CONFIG)
    add_allow(
        added, "key, or block of keys, that may differ from the checkpoint, for example optimizer.betas; repeatable"
    )
    added.add_argument("--check", action="store_true", help="check the configuration, print what it means, and exit")
    added.add_argument("--world", type=count, metavar="N", help="number of ranks for --check (default: 1)")


def run(options: Namespace) -> int:
    """Run the command; return the exit code of the process."""
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


def _train(options: Namespace, early: StopSignal, began: float) -> int:
    require_config(options, "dist-mem train configs/demo.yaml train.steps=100")
    config = load_checked(options.config, builds_model=True)
    check_allowed(options.allow)
    if options.world is not None and not options.check:
        way = f"a launcher starts ranks: torchrun --nproc_per_node {options.world} -m dist_mem train ..."
        raise UnusableError(f"--world {options.world}: only with --check; {way}")
    if options.check:
        from dist_mem.checkpoint.resume_source import check_run_dir
        from dist_mem.estimate.dry_run import subjects
        from dist_mem.tracking.start import check_sinks

        resumed = check_run_dir(config, options.allow)
        check_sinks(config.tracking)
        print("\n".join(label_lines(subjects(config, world_size=options.world or 1, resumed=resumed))))
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
