"""What is printed: aligned, coloured on terminals only, and nothing in it steers a terminal; CSV has no formulas."""

import ast
import csv
import io
import math
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dist_mem.__main__ import main
from dist_mem.runtime.csv_text import csv_text
from dist_mem.runtime.figures import NO_FIGURE, is_figure
from dist_mem.runtime.terminal import (
    WIDTH,
    PlainStream,
    colour_first_word,
    label_lines,
    list_names,
    make_printable,
    table,
)
from tests.support.paths import PACKAGE
from tests.support.terminals import HOSTILE, Terminal, steering


def test_many_names_stand_in_columns() -> None:
    lines = list_names(f"a.{'x' * size}" for size in range(1, 13)).splitlines()[1:]
    assert {line.index("a.", 4) for line in lines if line.count("a.") > 1} == {2 + 14 + 2}


@pytest.mark.parametrize(
    ("variables", "terminal", "file"),
    [
        ({}, True, False),
        ({"NO_COLOR": "1"}, False, False),
        ({"NO_COLOR": ""}, True, False),
        ({"FORCE_COLOR": "1"}, True, True),
        ({"CLICOLOR_FORCE": "1"}, True, True),
        ({"CLICOLOR_FORCE": "0", "FORCE_COLOR": ""}, True, False),
        ({"FORCE_COLOR": "1", "NO_COLOR": "1"}, False, False),
        ({"TERM": "dumb"}, False, False),
    ],
    ids=str,
)
def test_colour_follows_the_stream_and_the_variables_that_users_set(
    variables: dict[str, str], terminal: bool, file: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("NO_COLOR", "FORCE_COLOR", "CLICOLOR_FORCE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    for stream, expected in ((Terminal(), terminal), (io.StringIO(), file)):
        shown = colour_first_word("error: a: is 1", stream)
        assert shown.endswith(" a: is 1")
        assert ("\x1b[" in shown) is expected
        assert colour_first_word("step 3: saved", stream) == "step 3: saved"


@settings(deadline=None)
@given(st.lists(st.text(st.one_of(st.characters(), st.sampled_from(HOSTILE)), max_size=20), max_size=4))
def test_no_text_but_a_styled_one_steers_the_terminal(texts: list[str]) -> None:
    stream = io.StringIO()
    for text in texts:
        print("a title:", text, file=PlainStream(stream))
        print(colour_first_word(f"error: {text}", Terminal()), file=PlainStream(stream))
        print("\n".join([*table([("a", text), (text, "b")]), *label_lines([("c", text)])]), file=PlainStream(stream))
    own = stream.getvalue().replace("\x1b[1;31m", "").replace("\x1b[0m", "")
    assert steering(own) == []
    lines = sum(5 + 2 * text.count("\n") + text.startswith("\r") for text in texts)
    assert len(own.splitlines()) == lines, "cells have one line"
    assert steering(make_printable(HOSTILE)) == []


def test_all_output_passes_through_the_streams_that_the_command_line_guards() -> None:
    """`print` and `write` reach `sys.stdout` and `sys.stderr`, where `PlainStream` is; no module goes around them."""
    around = []
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            is_around = isinstance(node, ast.Attribute) and node.attr in ("__stdout__", "__stderr__", "buffer")
            is_around |= isinstance(node, ast.Call) and ast.unparse(node.func) == "os.write"
            if path.name != "terminal.py":  # the only one that makes sequences
                is_around |= isinstance(node, ast.Constant) and isinstance(node.value, str) and "\x1b" in node.value
            if is_around and isinstance(node, ast.expr):
                around.append(f"{path.relative_to(PACKAGE)}:{node.lineno}")
    assert around == []


def test_an_error_about_a_hostile_name_is_plain(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["train"], ["evaluate"], ["status"], []):
        command = [*words, HOSTILE] if words != ["train"] else ["train", f"a={HOSTILE}"]
        try:
            assert main(command) == 2
        except SystemExit as ended:
            assert ended.code == 2
    printed = capsys.readouterr()
    assert printed.err.count("error:") == 4 and steering(printed.out + printed.err) == []


def test_figures_stand_to_the_right_and_texts_to_the_left() -> None:
    rows = [("run", "word ppl", "state"), ("a", "9.50 (1.2x)", "ok"), ("b2", "n/a", "1 broken x")]
    assert table(rows) == ["run     word ppl  state", "a    9.50 (1.2x)  ok", "b2           n/a  1 broken x"]
    lines = label_lines([("step", "3"), ("goodput", "useful 10.7%, " * 20)], indent="  ")
    assert lines[0] == "  step     3" and max(map(len, lines)) <= WIDTH
    assert all(line.startswith("           useful") for line in lines[2:]), "a long text continues below its beginning"


# CSV files

TITLES = st.text(st.sampled_from("=+-@\t\r\n '\",a1|.\x1b\u202e") | st.characters(codec="utf-8"), max_size=8)


@settings(deadline=None)
@given(cells=st.lists(TITLES | st.integers() | st.floats(allow_nan=False), min_size=1, max_size=4))
def test_no_cell_is_a_formula_and_every_cell_is_kept(cells: list[str | int | float]) -> None:
    [row] = csv.reader(io.StringIO(csv_text([cells]), newline=""))
    for cell, written in zip(cells, row, strict=True):
        shown = make_printable(str(cell)) if is_figure(cell) else NO_FIGURE
        assert written in (shown, f"'{shown}")
        if re.match(" *[=+@\t\r\n-]", written):
            assert not math.isnan(float(written))
