"""Comments, docstrings and pages name files and parameters that exist."""

import ast
import io
import re
import subprocess
import tokenize
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

import pytest

from tests.support.paths import ROOT

FILES = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
PARTS = {"/".join(path.split("/")[start:]) for path in FILES for start in range(path.count("/") + 1)}
# Files of users, of other programs, and of folders that dist_mem writes.
OF_OTHERS = {
    "train.py",
    "mine.py",
    "yours.py",
    "yaml.py",
    "eval.py",
    "run_clm.py",
    "modeling_dist_mem.py",
    "tokenization_dist_mem.py",
    "my_memory.py",
}
_NAME = re.compile(r"(?<![\w./-])((?:[\w-]+/)*[\w-]+\.py)\b(?!:[A-Z])")
_FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)


def prose_of(path: str) -> Iterator[tuple[int, str]]:
    """Yield line and text of the comments and docstrings of a program, or of a page without its commands."""
    text = (ROOT / path).read_text(encoding="utf-8")
    if path.endswith(".md"):
        yield 1, _FENCE.sub(lambda block: "\n" * block[0].count("\n"), text)
        return
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and (found := ast.get_docstring(node)):
            yield getattr(node, "lineno", 1), found


def is_known(name: str) -> bool:
    stem = PurePosixPath(name).stem
    return name in PARTS or stem == stem.upper() or "NAME" in stem or PurePosixPath(name).name in OF_OTHERS


def test_every_program_that_a_text_names_is_there() -> None:
    texts = [path for path in FILES if path.endswith((".py", ".md")) and not path.startswith(("docs/log", "CHANGELOG"))]
    gone = [
        f"{path}:{first + part[: found.start()].count(chr(10))}: {found[1]}"
        for path in texts
        for first, part in prose_of(path)
        for found in _NAME.finditer(part)
        if not is_known(found[1])
    ]
    assert gone == []


def described(docstring: str) -> Iterator[str]:
    """Yield the names under `Args:`."""
    block = re.split(r"\n\s*\n", docstring.partition("Args:\n")[2])[0]
    indent = " " * (len(block) - len(block.lstrip(" ")))
    for line in block.splitlines():
        if found := re.match(rf"{indent}(\*{{0,2}}\w+(?:, \*{{0,2}}\w+)*):", line):
            yield from (name.strip(" *") for name in found[1].split(","))


@pytest.mark.parametrize("folder", ["dist_mem", "tests"])
def test_every_parameter_that_a_docstring_describes_is_there(folder: str) -> None:
    gone = []
    for path in sorted(Path(ROOT / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                given = node.args
                each = [*given.posonlyargs, *given.args, *given.kwonlyargs, given.vararg, given.kwarg]
                names = {one.arg for one in each if one is not None}
                gone += [
                    f"{path.relative_to(ROOT)}:{node.lineno}: {node.name} has no {name}"
                    for name in described(ast.get_docstring(node) or "")
                    if name not in names
                ]
    assert gone == []
