"""A function in a process of its own: for what torch cannot forget again."""

import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any

from tests.support.fork_server import fork_server
from tests.support.limits import limit


def in_child(function: Callable[..., None], *arguments: Any) -> None:
    """Call a function in a new process, and raise what it raises; one forked from here inherits threads of autograd."""
    _call_in(fork_server(), function, *arguments)


def in_new_child(function: Callable[..., None], *arguments: Any) -> None:
    """The same in a process that has imported nothing yet: for what a library decides when it is imported."""
    _call_in(multiprocessing.get_context("spawn"), function, *arguments)


def _call_in(context: Any, function: Callable[..., None], *arguments: Any) -> None:
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        pool.submit(function, *arguments).result(timeout=limit(120))
