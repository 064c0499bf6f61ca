"""Every JSON file of a run, changed by type: commands that read runs take it, or name file and key with code 2."""

from __future__ import annotations

import random
import shutil
from contextlib import closing
from pathlib import Path

import pytest

from dist_mem.__main__ import main
from dist_mem.checkpoint.finished_file import read_finished
from dist_mem.data.shard import write_split
from dist_mem.errors import UnusableError
from dist_mem.inspection.page.tables import find_evaluations, summary_table
from dist_mem.supervision.lease import sign_of_life
from dist_mem.supervision.timeline import beginning
from dist_mem.tracking.log import METRICS_FILE, Log
from dist_mem.tracking.tracker import LogSink
from dist_mem.training.goodput import note_start
from dist_mem.training.history import read_history
from tests.support.damaged_json import changed
from tests.support.evaluated_runs import MEMORIES, make_run
from tests.support.scored_library import TOKENIZER, make_document
from tests.support.terminals import steering
from tests.support.whole_folders import fill_run

pytestmark = pytest.mark.usefixtures("single_process")


@pytest.fixture(scope="module")
def whole(library: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with every kind of JSON file that a training and `evaluate` write into its directory."""
    data = Path(shutil.copytree(library, tmp_path_factory.mktemp("data") / "library"))
    documents, of = [make_document(number, 20) for number in range(8)], TOKENIZER.fingerprint
    write_split(documents, data / "train", name="tiny", split="train", tokenizer_fingerprint=of)
    folder, _ = make_run(tmp_path_factory.mktemp("whole"), data, MEMORIES["transformer_xl"])
    fill_run(folder)
    return folder


def json_files(run: Path) -> list[Path]:
    return sorted(path for path in run.rglob("*.json*") if "tokenizer" not in path.name)


COMMANDS = ["status RUN", "status RUN --json", "compare RUN RUN", "batch RUN --step 2", "logs RUN"]
COMMANDS.append("figure lamemo.fig8 RUN RUN tracking.mlflow=false")


def begin_job(path: Path) -> None:
    with closing(Log(path)) as log:
        LogSink(log, first_step=2, report=print).close("FINISHED")


def read_as_a_start(run: Path) -> None:
    """Read what a start of a training reads before it trains, and a report page before it reads a book."""
    for read in (
        lambda: read_finished(run),
        lambda: read_history(run),
        lambda: note_start(run, beginning()),
        lambda: begin_job(run / METRICS_FILE),
        lambda: sign_of_life(run),
        lambda: summary_table(find_evaluations(run, "run")),
    ):
        try:
            read()
        except UnusableError as error:
            assert str(run) in str(error)


def check_commands(run: Path, capsys: pytest.CaptureFixture[str]) -> list[int]:
    codes = []
    for name in COMMANDS:
        codes.append(main(name.replace("RUN", str(run)).split()))
        printed = capsys.readouterr()
        assert codes[-1] in (0, 2), (name, printed.err)
        assert steering(printed.out + printed.err) == [], name
        assert "Traceback" not in printed.err and printed.err.count("error:") == (codes[-1] == 2), (name, printed.err)
        assert codes[-1] == 0 or str(run) in printed.err, (name, printed.err)
    return codes


@pytest.mark.parametrize(
    "num_changes",
    [pytest.param(1, id="few"), pytest.param(12, id="many", marks=[pytest.mark.nightly, pytest.mark.timeout(1800)])],
)
def test_no_change_of_a_type_is_a_traceback_or_a_message_without_its_file(
    whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], num_changes: int
) -> None:
    refused, unhandled = 0, []
    for number, path in enumerate(json_files(whole)):
        for seed in range(num_changes):
            run = Path(shutil.copytree(whole, tmp_path / f"{number}-{seed}"))
            damaged = run / path.relative_to(whole)
            damaged.write_text(changed(path.read_text(encoding="utf-8"), random.Random(f"{path.name} {seed}")))
            try:
                refused += 2 in check_commands(run, capsys)
                read_as_a_start(run)
            except Exception as error:
                unhandled.append(f"{path.name}, seed {seed}: {type(error).__name__}: {error}"[:400])
            shutil.rmtree(run)
    assert unhandled == []
    assert refused > num_changes


def test_a_whole_run_is_read_by_every_command(whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = Path(shutil.copytree(whole, tmp_path / "run"))
    codes = dict(zip(COMMANDS, check_commands(run, capsys), strict=True))
    assert {name.split()[0] for name, code in codes.items() if code} <= {"figure", "logs"}
