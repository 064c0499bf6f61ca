"""A function in a process of its own: for what torch cannot forget again."""

from __future__ import annotations

import multiprocessing
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
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
    ours, theirs = multiprocessing.Pipe(duplex=False)
    child = context.Process(target=reported, args=(theirs, function, *arguments))
    child.start()
    theirs.close()
    assert ours.poll(limit(120)), "the child does not answer"
    error = ours.recv()
    child.join()
    assert error == "", error


def reported(pipe: Connection, function: Callable[..., None], *arguments: Any) -> None:
    try:
        function(*arguments)
        pipe.send("")
    except BaseException:
        pipe.send(traceback.format_exc())
