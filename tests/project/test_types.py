"""Configurations have types: an annotation `config: Any` hides misspelled keys from mypy."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest

from tests.project.test_imports import LAYERS, MODULES, is_within


def annotations(tree: ast.AST) -> Iterator[tuple[str, ast.expr | None]]:
    """Yield name and annotation of all arguments, annotated variables and results of functions."""
    for node in ast.walk(tree):
        if isinstance(node, ast.arg):
            yield node.arg, node.annotation
        elif isinstance(node, ast.AnnAssign):
            yield ast.unparse(node.target), node.annotation
        elif isinstance(node, ast.FunctionDef):
            yield node.name, node.returns


def test_no_configuration_is_annotated_with_any(subtests: pytest.Subtests) -> None:
    for layer in LAYERS:
        with subtests.test(layer=layer):
            untyped = [
                f"{module}: {name}"
                for module in MODULES
                if is_within(module, layer)
                for name, annotation in annotations(ast.parse(MODULES[module].read_text(encoding="utf-8")))
                if name.endswith("config") and isinstance(annotation, ast.Name) and annotation.id == "Any"
            ]
            assert not untyped, "annotate them with dist_mem.config.Config, or the class of their block"
