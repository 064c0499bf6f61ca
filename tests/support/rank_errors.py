"""Errors of ranks, for tests that expect one: in a rank pool they would come with a traceback."""

from collections.abc import Callable
from typing import Any

from dist_mem.errors import RunError
from dist_mem.runtime.distributed import World
from tests.support.messages import described


def error_of(world: World, function: Callable[..., Any], *arguments: Any) -> str:
    """Return type, exit code and text of the error that a function of a rank raises, or what it returns."""
    try:
        return f"ended with {function(world, *arguments)}"
    except (RunError, ValueError, OSError) as error:
        return described(error)
