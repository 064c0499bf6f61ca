"""Functions of modules compiled by torch.compile, each as one graph without a break.

torch's compiler is imported by the first call only: it takes a second, which a start without it need not spend.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor

_ERRORS: ContextVar[list[Exception]] = ContextVar("errors")  # of `note_errors`
_reports: list[Callable[[], None]] = []  # called before a graph is compiled, which may take a minute
_MOST_GRAPHS = 64  # of one function; blocks of one structure share theirs, and each other structure has its own


@cache
def compile_once(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the compiled function, always the same one for the same function.

    Parameters of modules among its arguments are inputs of the graph, so modules of one structure share one graph.
    """
    return torch.compile(function, fullgraph=True, backend=_inductor)


def compile_or_note(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the compiled function. In `note_errors`, one that runs as written once an error is noted."""
    errors = _ERRORS.get(None)
    if errors is None:
        return compile_once(function)

    def run(*inputs: Any) -> Any:
        if not errors:
            try:
                return compile_once(function)(*inputs)
            except (RuntimeError, OSError) as error:
                errors.append(error)
        return function(*inputs)

    return run


def _inductor(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
    """Compile one graph, after reporting progress."""
    from torch._inductor.compile_fx import compile_fx

    for report in _reports:
        report()
    # Without `deterministic`, kernels for GPUs are chosen by their time in this process: a resumed run might differ.
    return cast(Callable[..., Any], compile_fx(graph, inputs, config_patches={"deterministic": True}))


def report_each_graph(report: Callable[[], None]) -> None:
    """Call `report` before each graph that this process compiles."""
    if report not in _reports:
        _reports.append(report)


@contextmanager
def compile_ahead() -> Iterator[None]:
    """Compile the backward with the forward, and one graph for modules that differ in a number, as a layer's index."""
    import torch._dynamo
    import torch._functorch.config

    with (
        torch._dynamo.config.patch(allow_unspec_int_on_nn_module=True, recompile_limit=_MOST_GRAPHS),
        torch._functorch.config.patch(force_non_lazy_backward_lowering=True),
    ):
        yield


@contextmanager
def note_errors() -> Iterator[list[Exception]]:
    """Raise the first error of the compiler at the end of the block only; yield the list in which errors are noted.

    So the whole forward runs on every rank: at ZeRO stage 3 the others gather the parameters of all blocks with it.
    """
    errors: list[Exception] = []
    token = _ERRORS.set(errors)
    try:
        yield errors
    finally:
        _ERRORS.reset(token)
    if errors:
        raise errors[0]
