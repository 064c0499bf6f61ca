"""What is printed: aligned, within one width, coloured on terminals only."""

from __future__ import annotations

import io

import pytest

from dist_mem.__main__ import main
from dist_mem.runtime.terminal import WIDTH, coloured, labelled, listed, table


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


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
        shown = coloured("error: a: is 1", stream)
        assert shown.endswith(" a: is 1")
        assert ("\x1b[" in shown) is expected
        assert coloured("step 3: saved", stream) == "step 3: saved"


def test_an_error_in_a_pipe_has_no_colour(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "train.stps=1"]) == 2
    assert "\x1b" not in capsys.readouterr().err


def test_figures_stand_to_the_right_and_texts_to_the_left() -> None:
    rows = [
        ("run", "word ppl", "each", "state"),
        ("a", "9.50 (1.2x)", "0:34", "ok"),
        ("b2", "n/a", "12:05", "1 broken x"),
    ]
    assert table(rows) == [
        "run     word ppl   each  state",
        "a    9.50 (1.2x)   0:34  ok",
        "b2           n/a  12:05  1 broken x",
    ]


def test_many_names_stand_in_columns_one_group_after_the_other() -> None:
    assert listed(["a", "b"]) == ": a, b"
    names = [*(f"first.name_{number:02}" for number in range(9)), *(f"second.{number}" for number in range(3))]
    lines = listed(names).splitlines()
    assert lines[0] == ":"
    assert [line.split() for line in lines[1:]] == [names[:6], names[6:9], names[9:]]
    assert len({line.find(" ", 3) for line in lines[1:]}) == 2  # by the length of the first name alone
    assert max(map(len, lines)) <= WIDTH


def test_a_long_text_continues_below_its_beginning() -> None:
    lines = labelled([("step", "3"), ("goodput", "useful 10.7%, " * 20)], indent="  ")
    assert lines[0] == "  step     3"
    assert all(line.startswith("           useful") for line in lines[2:])
    assert max(map(len, lines)) <= WIDTH
