"""The progress of a run and of other work that a user sees."""

import io
import math
import sys
import time

import pytest

from dist_mem.runtime.progress import Progress
from dist_mem.tracking.log import Point
from dist_mem.tracking.progress import ProgressBar, ProgressLines
from tests.support.terminals import Terminal


def test_plain_lines_tell_loss_perplexity_speed_and_time_left() -> None:
    stream = io.StringIO()
    lines = ProgressLines(total_steps=100, first_step=0, every=10, stream=stream)
    for step in (10, 15, 100):
        lines.log(Point(step, 0.0, {"loss": 2.0, "perplexity": 7.389, "tokens_per_second": 12345.6}))
    lines.log(Point(100, 0.0, {"loss": 800.0, "perplexity": math.nan}))
    lines.log(Point(100, 0.0, {"validation/word_perplexity": 99.5, "validation/bits_per_byte": 1.25}))
    lines.log(Point(100, 0.0, {"test/loss": math.nan, "test/perplexity": 2.7e43, "memory/gain": math.inf}))
    ten, hundred, no_figure, evaluation, diverged = stream.getvalue().splitlines()
    assert ten.startswith("step  10/100  loss 2.0000  ppl     7.39   12,346 tokens/s  eta 0:00:0")
    assert hundred.endswith("eta 0:00:00")
    assert "loss 800.0000  ppl      n/a" in no_figure
    assert evaluation == "step 100: validation  word ppl 99.50  bits/byte 1.25"
    assert diverged == "step 100: test  loss n/a  ppl 2.70e+43  memory gain n/a"


def test_the_time_left_after_a_rollback_is_that_of_the_steps_made_since(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step takes a second: a rollback of 500 steps doubled the time left, and one before the start made it days."""
    now, stream = 0.0, io.StringIO()
    monkeypatch.setattr(time, "monotonic", lambda: now)
    lines = ProgressLines(total_steps=2000, first_step=600, every=10, stream=stream)
    for first, last in ((600, 1000), (500, 800)):
        lines.rewind(first)
        for step in range(first + 10, last + 1, 10):
            now += 10.0
            lines.log(Point(step, now, {"loss": 2.0}))
            minutes, seconds = divmod(2000 - step, 60)
            assert stream.getvalue().splitlines()[-1].endswith(f"eta 0:{minutes:02}:{seconds:02}")


def test_bar_shows_the_logged_step_and_messages_do_not_break_it() -> None:
    stream = io.StringIO()
    bar = ProgressBar(total_steps=100, first_step=40, stream=stream)
    bar.log(Point(50, 0.0, {"loss": 2.0, "perplexity": 7.389}))
    bar.message("saved")
    bar.close("FINISHED")
    last = stream.getvalue().split("\r")[-1]
    assert "50/100" in last and "loss 2.0000  ppl     7.39" in last
    assert "saved\n" in stream.getvalue()


@pytest.mark.parametrize("stream", [io.StringIO(), Terminal()])
def test_work_without_a_terminal_or_a_library_of_bars_is_a_line_now_and_then(
    stream: io.StringIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    """260,000 tokens were scored in 9 minutes without a line."""
    if stream.isatty():
        monkeypatch.setitem(sys.modules, "tqdm", None)
    now = 100.0
    with Progress(4000, "scoring test", share=0.5, stream=stream, clock=lambda: now) as progress:
        for seconds in (10.0, 20.0, 30.0, 31.0, 60.0):
            now = 100.0 + seconds
            progress.add(200)
    assert stream.getvalue().splitlines() == [
        "scoring test: 1,200 of 4,000 tokens  40.0 tokens/s  eta 0:01:10",  # half of the work is another rank's
        "scoring test: 2,000 of 4,000 tokens  33.3 tokens/s  eta 0:01:00",
    ]


def test_work_on_a_terminal_is_a_bar_that_goes_when_it_is_done_and_other_ranks_show_nothing() -> None:
    streams = Terminal(), Terminal()
    with Progress(4000, "scoring test", stream=streams[0]) as progress:
        progress.add(4000)
    with Progress(4000, "scoring test", shown=False, share=0.0, stream=streams[1]) as progress:
        progress.add(0)
    bar, last = streams[0].getvalue().split("\r")[1], streams[0].getvalue().split("\r")[-2:]
    assert "scoring test" in bar and "4.00k" in bar and "tokens" in bar
    assert not "".join(last).strip()
    assert streams[1].getvalue() == ""
