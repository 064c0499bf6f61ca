"""The configuration that a command is given: loaded with all checks, required, copied with the code."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dist_mem.config import Config, deepspeed_block, load_config
from dist_mem.errors import UnusableError
from dist_mem.runtime.extras import is_installed
from dist_mem.runtime.shipped_files import shipped_root
from dist_mem.runtime.terminal import list_names


def load_checked(
    arguments: Sequence[str], *, builds_model: bool = False, further: Callable[[Config], object] = lambda config: None
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


def require_config(options: Namespace, example: str) -> None:
    """Raise UnusableError with an example if the command line has no configuration."""
    if not options.config:
        given = f"{options.command}: no configuration: give YAML files and key=value overrides, as in: {example}"
        raise UnusableError(f"{given}\nshipped configurations{list_names(_shipped_configurations())}")


def _shipped_configurations() -> list[str]:
    root = shipped_root()
    files = [*sorted(root.glob("configs/*.yaml")), *sorted(root.glob("configs/memory/*.yaml"))]
    return [str(path.relative_to(root)) for path in files]
