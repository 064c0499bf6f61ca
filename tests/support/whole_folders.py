"""Every folder that a command reads, small and whole; the commands; and what can be wrong with a file of them."""

from __future__ import annotations

import json
import re
import shutil
import signal
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any, NamedTuple

from dist_mem.__main__ import main
from dist_mem.checkpoint.finished_file import mark_finished
from dist_mem.config import load_config
from dist_mem.data.shard import write_split
from dist_mem.evaluation.scores import write_report
from dist_mem.supervision.timeline import beginning
from dist_mem.tracking.log import METRICS_FILE, read_header, write_log
from dist_mem.training.goodput import note_start
from dist_mem.training.history import HISTORY
from tests.support.evaluated_runs import MEMORIES, asked, make_run
from tests.support.limits import limit
from tests.support.plain_scores import emptied
from tests.support.scored_library import TOKENIZER, make_document
from tests.support.tracked import log_points

SECONDS = 20.0  # a command that takes longer counts as one that does not end
# RUN, DATA, EXPORT, MEMORY and OUT are replaced. Each file of RUN, DATA and EXPORT is read by one of them.
FAST = [  # those that load no model
    *("status RUN", "status RUN --json", "compare RUN RUN", "logs RUN", "cancel RUN", "memory show MEMORY"),
    *("checkpoints list RUN", "checkpoints show RUN", "checkpoints verify RUN", "config RUN/config.yaml"),
    *("batch RUN --step 2", "data verify DATA", "data show DATA", "data sample DATA --split test --documents 2"),
]
COMMANDS = [
    *FAST,
    *("generate RUN --prompt a --tokens 3", "generate EXPORT --prompt a --tokens 3"),
    *("generate RUN --memory MEMORY --prompt a --tokens 3", "evaluate EXPORT --split test data.path=DATA"),
    *("inspect RUN --book doc5 --split test", "report RUN --book doc5 --split test -o OUT/p.html"),
    *("export RUN --out OUT/export", "figure lamemo.fig8 RUN RUN tracking.mlflow=false -o OUT", "track sync RUN URI"),
    *("train RUN/config.yaml --check run_dir=RUN", "train RUN/config.yaml --check data.path=DATA run_dir=OUT/run"),
]


class Folders(NamedTuple):
    """Where the folders of a copy are."""

    root: Path

    def arguments(self, command: str, uri: str = "") -> list[str]:
        """Return the arguments of one of `COMMANDS`."""
        out = self.root / "out"
        shutil.rmtree(out, ignore_errors=True)
        out.mkdir()
        names = {"RUN": "run", "DATA": "data", "EXPORT": "export", "MEMORY": "text.mem", "OUT": "out"}
        text = re.sub("|".join(names), lambda found: str(self.root / names[found[0]]), command)
        return text.replace("URI", f"tracking.uri={uri}").split()

    def files(self) -> list[Path]:
        """Return all files that somebody else may have made, relative to the root."""
        inside = [self.root / name for name in ("run", "data", "export")]
        found = [path for folder in inside for path in folder.rglob("*") if path.is_file()]
        return sorted(path.relative_to(self.root) for path in [*found, self.root / "text.mem"])


def make_folders(root: Path, library: Path) -> Folders:
    """Make a data directory, a run with every file that a command reads, its export, and a memory file."""
    data = Path(shutil.copytree(library, root / "data"))
    documents, of = [make_document(number, 20) for number in range(8)], TOKENIZER.fingerprint
    write_split(documents, data / "train", name="tiny", split="train", tokenizer_fingerprint=of)
    run, _ = make_run(root, data, MEMORIES["transformer_xl"])
    fill_run(run)
    add_jobs(run)
    text = root / "text.txt"
    text.write_text("The old man walked to the sea. " * 2, encoding="utf-8")
    for command in (f"export {run} --out {root / 'export'}", f"read {text} --run {run} -o {root / 'text.mem'}"):
        answer = run_command(command.split())
        assert answer.code == 0, answer
    return Folders(root)


def fill_run(folder: Path) -> None:
    """Write what a training and its evaluations leave in the directory of a run."""
    config = next(folder.glob("checkpoints/*/config.yaml")).read_text(encoding="utf-8")
    (folder / "config.yaml").write_text(config, encoding="utf-8")
    goodput = {f"goodput/{name}": 0.25 for name in ("useful", "other", "repeated", "down", "seconds")}
    points = [
        {"step": step, "time": 0.0, "metrics": {"loss": 5 / step, "step_seconds": 0.1, "mfu": 0.5, **goodput}}
        for step in (1, 2, 3)
    ]
    log_points(folder / METRICS_FILE, points)
    part = {"step": 0, "ranks": 1, "threads": 1, "device": "cpu", "first_trained": 0, "config": config}
    (folder / HISTORY).write_text(f"{json.dumps(part)}\n", encoding="utf-8")
    note_start(folder, beginning())
    mark_finished(folder, 3, load_config(["train.steps=3"]).train)
    lease = {"host": "h", "pid": 1, "started": 1.0, "started_ticks": "1", "sight": "", "machine": ""}
    (folder / "lease.json").write_text(json.dumps({**lease, "format_version": 1}), encoding="utf-8")
    for name, scored in (("test-step-00000003", asked(folder)), ("test-step-00000003-without-memory", emptied(folder))):
        write_report(scored, folder / "evaluations", name, metadata={"step": 3})


def add_jobs(folder: Path) -> None:
    """Write what MLflow's reader, Slurm's jobs and the watchdog leave there."""
    (folder / "mlflow").mkdir()
    write_log(folder / "mlflow" / "evaluation-1.jsonl", read_header(folder / METRICS_FILE))
    for name, text in {
        "mlflow_run_id": "0123456789abcdef0123456789abcdef\n",
        "slurm/jobs": "7 here\n",
        "slurm/cancelled": "7 here\n",
        "slurm/7/exit_code": "85\n",
        "slurm/7/node1.log": "step 1\n",
        "hangs/1/report.txt": "hang: nothing has moved\n",
    }.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")


class Answer(NamedTuple):
    """What a command has done; code None: it raised an error that is no answer."""

    code: int | None
    printed: str
    error: str


@contextmanager
def ending_within(seconds: float) -> Iterator[None]:
    """Raise TimeoutError in the block once `seconds` have passed; pytest's own limit goes on afterwards."""

    def end(*_: Any) -> None:
        raise TimeoutError(f"it has not ended after {seconds:.0f} s")

    handler, timer = signal.signal(signal.SIGALRM, end), signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.signal(signal.SIGALRM, handler)
        signal.setitimer(signal.ITIMER_REAL, *timer)


def run_command(arguments: list[str]) -> Answer:
    """Run a command in this process."""
    printed, errors = StringIO(), StringIO()
    try:
        with redirect_stdout(printed), redirect_stderr(errors), ending_within(limit(SECONDS)):
            code: int | None = main(arguments)
    except SystemExit as ended:
        code = int(ended.code or 0)
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        where = traceback.extract_tb(error.__traceback__)[-1]
        return Answer(None, printed.getvalue(), f"{type(error).__name__}: {error} ({where.filename}:{where.lineno})")
    return Answer(code, printed.getvalue(), errors.getvalue())


_opened: list[str] | None = None  # paths, while `opened_by` collects them


def _note(event: str, arguments: tuple[Any, ...]) -> None:
    if _opened is not None and event == "open" and isinstance(arguments[0], str):
        _opened.append(arguments[0])


def opened_by(folders: Folders, command: str, uri: str = "") -> tuple[Answer, set[Path]]:
    """Return what a command answers, and the files of the folders that it opens, relative to their root."""
    global _opened
    if not _hooked:
        sys.addaudithook(_note)  # for good: Python has no way to remove one
        _hooked.append(True)
    _opened = []
    answer = run_command(folders.arguments(command, uri))
    found, _opened = _opened, None
    root = f"{folders.root}/"
    return answer, {Path(path.removeprefix(root)) for path in found if path.startswith(root)}


_hooked: list[bool] = []
