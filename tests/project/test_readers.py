"""One door to the files of folders: `open_regular`, which waits for no pipe and reads what it has checked."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from tests.support.paths import ROOT

PACKAGE = ROOT / "dist_mem"
DOORS = {"open_regular", "read_regular", "by_name", "read_at_most"}  # of dist_mem/runtime/files.py
MODULES = {"bz2", "codecs", "gzip", "io", "lzma", "os", "tarfile", "zipfile"}  # whose `open` opens a file
READERS = {"fromfile", "load_file", "load_model", "loadtxt", "memmap", "memory_map", "ParquetFile", "safe_open"}
READS = re.compile("r|a|.*[+]")  # modes: who appends can wait for a reader of a pipe
# Function -> why it opens a file by itself.
_KERNEL, _OWN = "a file of the kernel", "a file of this installation"
_TYPED = "a text that the user names; datasets/tree.py lists no pipes of a folder"
_MADE = "what this process has just made, in a folder of its own"
ALLOWED: dict[str, str] = {
    "runtime/files.py:fsync_path": "a file that was just written",
    "runtime/files.py:open_regular.opened": "the door",
    "runtime/files.py:_open_stream": "the output that the user names, which may be a pipe",
    "runtime/files.py:read_at_most": "a text that the user names, which may be a pipe: --prompt-file <(...)",
    "runtime/files.py:file_system_of": _KERNEL,
    "runtime/gpu.py:_read": _KERNEL,
    "runtime/machine_memory.py:_installed": _KERNEL,
    "runtime/machine_memory.py:_of_control_groups": _KERNEL,
    "runtime/machine_memory.py:_bytes_of": _KERNEL,
    "runtime/processes.py:boot_id": _KERNEL,
    "runtime/processes.py:process_stat": _KERNEL,
    "supervision/lease.py:_machine_id": "a file of the system",
    "doctor/disks.py:device_of": _KERNEL,
    "doctor/gpus.py:_is_active": _KERNEL,
    "doctor/machine.py:_check_umask": _KERNEL,
    "doctor/machine.py:_is_mapped": _KERNEL,
    "doctor/consistency.py:fingerprint_code": _OWN,
    "cli/commands/init.py:run": _OWN,
    "inspection/page/assemble.py:_file": _OWN,
    "launch/script.py:render": _OWN,
    "cli/standard_streams.py:_redirect_to_null": "the null device",
    "generation/continue_prompts.py:_print_now": "the null device",
    "data/remote/stage.py:_blocks": "a tar whose copying can be stopped; its tests hold it up with a pipe",
    "data/tar.py:write_tar": _MADE,
    "engine/cpu_op.py:_compilers": _KERNEL,
    "runtime/network_interface.py:_interface_of": _KERNEL,
    "runtime/ranks.py:_in_interactive_shell": "the terminal of this process",
    "datasets/recipes/wikitext.py:scan": _TYPED,
    "datasets/recipes/wikitext.py:lines_of": _TYPED,
    "datasets/rows.py:_open_lines": _TYPED,
    "datasets/rows.py:_read_parquet": _TYPED,
    "datasets/rows.py:_read_arrow": _TYPED,
    "datasets/source.py:FileSlice.read": _TYPED,
    "datasets/tar_source.py:_members": "what `_opened` has opened",
    "datasets/tar_source.py:_opened": _TYPED,
}


class Reads(ast.NodeVisitor):
    """Collects the calls that open or read a file, by the function that they are in."""

    def __init__(self) -> None:
        self.found: list[tuple[str, int, str]] = []
        self._where: list[str] = []
        self._opened: set[str] = set()  # names that a door has given
        self._names: dict[str, str] = {}  # imported from a library of tensors -> its name there

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        if (node.module or "").startswith(("safetensors", "torch", "numpy", "pyarrow")):
            self._names |= {alias.asname or alias.name: alias.name for alias in node.names}

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self._within(node)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        self._within(node)

    def _within(self, node: ast.ClassDef | ast.FunctionDef) -> None:
        self._where.append(node.name)
        self.generic_visit(node)
        self._where.pop()

    def visit_With(self, node: ast.With) -> None:
        for item in node.items:
            if isinstance(item.context_expr, ast.Call) and _name(item.context_expr.func) in DOORS:
                self._opened.add(_name(item.optional_vars))
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        self.generic_visit(node)
        if self._is_reader(node) and not any(_name(each) in self._opened for each in node.args):
            self.found.append((".".join(self._where), node.lineno, ast.unparse(node)[:80]))

    def _is_reader(self, node: ast.Call) -> bool:
        name = _name(node.func)
        if isinstance(node.func, ast.Name):
            return (name == "open" and _reads(node.args[1:])) or self._names.get(name) in READERS
        owner = _name(node.func.value) if isinstance(node.func, ast.Attribute) else ""
        if name == "open":
            others = {each.arg for each in node.keywords} - {"encoding", "errors", "newline", "mode", "buffering"}
            return owner in MODULES or (not others and _reads(node.args))
        return name in ("read_text", "read_bytes") or (name == "load" and owner in ("np", "torch")) or name in READERS


def _name(node: ast.AST | None) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _reads(arguments: list[ast.expr]) -> bool:
    """Whether a call of `open` with these arguments, the mode first, reads a file; it may open something else."""
    mode = arguments[0] if arguments else ast.Constant("r")
    return isinstance(mode, ast.Constant) and isinstance(mode.value, str) and READS.match(mode.value) is not None


def readers(folder: Path) -> Iterator[tuple[str, int, str]]:
    for path in sorted(folder.rglob("*.py")):
        reads = Reads()
        reads.visit(ast.parse(path.read_text(encoding="utf-8")))
        for where, line, text in reads.found:
            yield f"{path.relative_to(folder).as_posix()}:{where}", line, text


def test_files_are_opened_by_the_one_door_except_where_a_reason_is_given() -> None:
    found = list(readers(PACKAGE))
    assert [each for each in found if each[0] not in ALLOWED] == []
    assert {where for where, _, _ in found} == ALLOWED.keys(), "what opens no file needs no reason"
