"""Rules of the package's source that no linter knows."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from functools import cache

from tests.support.paths import PACKAGE


@cache
def nodes() -> Sequence[tuple[str, ast.AST]]:
    """Every node of the package's syntax trees, with its place."""
    return [
        (f"{path.relative_to(PACKAGE)}:{getattr(node, 'lineno', 0)}", node)
        for path in sorted(PACKAGE.rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if not isinstance(node, ast.expr_context | ast.operator)
    ]


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


# `variable`; what `${oc.env:NAME}` reads, and CUDA_VISIBLE_DEVICES, where empty has a meaning.
READERS = {"variable", "is_set", "visible_devices"}
READING = {"get", "setdefault", "__getitem__", "__contains__", "getenv"}


def _reads_one(node: ast.AST) -> bool:
    """Whether a node reads one variable of a mapping that is named `environ`, as os.environ is."""

    def is_environ(tree: ast.AST) -> bool:
        return ast.unparse(tree).rpartition(".")[2] == "environ"

    match node:
        case ast.Call(func=ast.Attribute(value=owner, attr=name)):
            return name in READING and (is_environ(owner) or name == "getenv")
        case ast.Subscript(value=owner, ctx=ast.Load()):
            return is_environ(owner)
        case ast.Compare(ops=[ast.In() | ast.NotIn()], comparators=[owner]):
            return is_environ(owner)
    return False


def test_a_variable_is_read_by_one_function_to_which_empty_is_not_set() -> None:
    found = {
        function.name
        for _, function in nodes()
        if isinstance(function, ast.FunctionDef)
        if any(_reads_one(node) for node in ast.walk(function))
    }
    assert found == READERS
