"""Rules of the package's source that no linter knows."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from tests.support.paths import PACKAGE


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def nodes() -> Iterator[tuple[str, ast.AST]]:
    """Yield every node of the package's syntax trees, with its place."""
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(tree_of(path)):
            yield f"{path.relative_to(PACKAGE)}:{getattr(node, 'lineno', 0)}", node


def calls() -> Iterator[tuple[str, str, ast.Call]]:
    """Yield every call, with its place and the dotted name of what is called, as far as that is one."""
    for place, node in nodes():
        if isinstance(node, ast.Call):
            yield place, ast.unparse(node.func), node


def test_a_mean_is_the_same_in_every_version_of_python() -> None:
    """`sum` of floats is compensated from Python 3.12 on: `statistics.fmean` and `math.fsum` are exact in all."""
    by_sum = [
        place
        for place, node in nodes()
        if isinstance(node, ast.BinOp)
        and isinstance(node.op, ast.Div)
        and ast.unparse(node.left).startswith("sum(")
        and "len(" in ast.unparse(node.right)
    ]
    assert by_sum == []
