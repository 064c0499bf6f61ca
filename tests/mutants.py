"""Change the package a little, one place at a time, and ask whether the quick tests of its folders notice.

    python -m tests.mutants --number 40 --seed 0 --out mutants.csv --copy /tmp/mutants

A mutant is one changed comparison, arithmetic or boolean operator, condition, or small integer of memory/, checkpoint/,
data/ or training/, drawn evenly from the four. It is tested in a copy of the project: first by the tests of its own
folder, then by those of TESTED. A mutant that hangs, or does not import, is killed too. Some change nothing that
anybody could see; a person decides which survivors deserve a test. An interrupted command goes on where it was.
"""

import argparse
import ast
import csv
import os
import random
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from tests.support.paths import PACKAGE, ROOT

FOLDERS = ("memory", "checkpoint", "data", "training")
TESTED = (
    "training",
    "memory",
    "checkpoint",
    "data",
    "engine",
    "evaluation",
    "generation",
    "estimate",
    "contract",
    "config",
)
SECONDS = 900.0  # of the tests of one mutant
_SWAPPED: dict[type[Any], type[Any]] = {
    **{ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq},
    **{ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.And: ast.Or, ast.Or: ast.And},
    **{ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.FloorDiv: ast.Mult},
}


class Mutant(NamedTuple):
    path: str  # relative to the root
    line: int
    before: str
    after: str
    start: int  # bytes of the file that `before` takes
    stop: int


def changed(node: ast.AST) -> ast.AST | None:
    """Return a changed copy of an expression; None: it is not one that is changed."""
    match node:
        case ast.Compare(left, [operator], values):
            return ast.Compare(left, [_SWAPPED[type(operator)]()], values)
        case ast.BinOp(left, operator, right) if type(operator) in _SWAPPED:
            return ast.BinOp(left, _SWAPPED[type(operator)](), right)
        case ast.BoolOp(operator, values):
            return ast.BoolOp(_SWAPPED[type(operator)](), values)
        case ast.UnaryOp(ast.Not(), operand):
            return operand
        case ast.Constant(value) if type(value) is int:
            return ast.Constant(value + 1)
        case ast.Constant(value) if type(value) is bool:
            return ast.Constant(not value)
    return None


def mutants_of(path: Path) -> Iterator[Mutant]:
    """Yield all mutants of a file, without annotations and texts."""
    source = path.read_bytes()
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    tree = ast.parse(source)
    hidden = {
        id(inner) for node in ast.walk(tree) if isinstance(node, ast.AnnAssign) for inner in ast.walk(node.annotation)
    }
    hidden |= {id(inner) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for inner in ast.walk(node)}
    hidden |= {id(inner) for node in ast.walk(tree) if isinstance(node, ast.Raise) for inner in ast.walk(node)}
    for node in ast.walk(tree):
        after = None if id(node) in hidden else changed(node)
        if after is not None and isinstance(node, ast.expr) and node.end_lineno and node.end_col_offset is not None:
            start, stop = starts[node.lineno - 1] + node.col_offset, starts[node.end_lineno - 1] + node.end_col_offset
            name, before = path.relative_to(ROOT).as_posix(), source[start:stop].decode()
            yield Mutant(name, node.lineno, before, f"({ast.unparse(after)})", start, stop)


def drawn(number: int, seed: int) -> list[Mutant]:
    """Return mutants of the four folders in turn."""
    draw = random.Random(seed)
    by_folder = []
    for folder in FOLDERS:
        found = [mutant for path in sorted((PACKAGE / folder).rglob("*.py")) for mutant in mutants_of(path)]
        by_folder.append(draw.sample(found, min(len(found), number)))
    return [mutant for together in zip(*by_folder, strict=False) for mutant in together][:number]


def outcome(mutant: Mutant | None, copy: Path, options: list[str]) -> str:
    """Test one mutant in the copy, or the package as it is, and restore its file; return what happened."""
    folders = list(TESTED)
    if mutant is not None:
        path, source = copy / mutant.path, (ROOT / mutant.path).read_bytes()
        path.write_bytes(source[: mutant.start] + mutant.after.encode() + source[mutant.stop :])
        own = mutant.path.split("/")[1]
        folders.sort(key=lambda folder: folder != own)
    try:
        for tests in (folders[:1], folders[1:]):
            command = [sys.executable, "-m", "pytest", *options, "-x", "-q", "-p", "no:cacheprovider"]
            command += [f"tests/{folder}" for folder in tests]
            environment = {**os.environ, "PYTHONPATH": str(copy)}
            done = subprocess.run(command, cwd=copy, capture_output=True, text=True, timeout=SECONDS, env=environment)
            if done.returncode != 0:
                failed = re.findall(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
                return f"killed by {failed[0] if failed else f'exit code {done.returncode}'}"
    except subprocess.TimeoutExpired:
        return "killed: it hangs"
    finally:
        if mutant is not None:
            path.write_bytes(source)
    return "survived"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--number", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--copy", type=Path, required=True, help="an empty folder, or one of an earlier call")
    parser.add_argument("options", nargs="*", default=["--run", "quick"], help="of pytest, after --")
    arguments = parser.parse_args()
    rows = list(csv.reader(arguments.out.open())) if arguments.out.exists() else []
    ignored = shutil.ignore_patterns(".git", ".venv", "runs", "mlruns", "*.db", "site")
    shutil.copytree(ROOT, arguments.copy, ignore=ignored, dirs_exist_ok=True)  # a killed call leaves its mutant
    if not rows and (found := outcome(None, arguments.copy, arguments.options)) != "survived":
        raise SystemExit(f"the package as it is: {found}")
    for number, mutant in enumerate(drawn(arguments.number, arguments.seed)):
        if number < len(rows):
            continue
        found = outcome(mutant, arguments.copy, arguments.options)
        with arguments.out.open("a", newline="") as file:
            csv.writer(file).writerow([*mutant[:4], found])
        print(f"{number + 1}: {found}: {mutant.path}:{mutant.line}: {mutant.before} -> {mutant.after}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
