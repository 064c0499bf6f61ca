"""Whatever stands in the place of a file that somebody else has made: a command refuses it, and waits for nothing.

The files are found by walking a data directory, a run, an export and a memory file; which command reads which file is
found by watching what it opens.
"""

import contextlib
import json
import random
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

import pytest

from dist_mem.__main__ import main
from dist_mem.checkpoint.finished_file import mark_finished
from dist_mem.checkpoint.manifest import _fingerprint as manifest_fingerprint
from dist_mem.checkpoint.manifest import read_manifest, write_manifest
from dist_mem.config import load_config
from dist_mem.data.index import fingerprint_of
from dist_mem.data.shard import read_index, write_split
from dist_mem.evaluation.memory_file import read_memory_file, write_memory_file
from dist_mem.runtime.network_interface import free_port
from dist_mem.supervision.timeline import beginning
from dist_mem.tracking.log import METRICS_FILE, read_header, write_log
from dist_mem.training.goodput import note_start
from dist_mem.training.history import HISTORY
from tests.support.damaged_json import PIECES, changed
from tests.support.evaluated_runs import MEMORIES, asked, make_run
from tests.support.faults import CONTENTS, PLACES, Damage, as_pipe, flipped
from tests.support.limits import limit
from tests.support.plain_scores import emptied
from tests.support.ranks import launcher_environment
from tests.support.saved_reports import save_report
from tests.support.scored_library import TOKENIZER, make_document
from tests.support.terminals import steering
from tests.support.tracked import log_points

pytestmark = [pytest.mark.usefixtures("single_process"), pytest.mark.timeout(3600)]
# What a SHA-256 covers: it is used as it was written, or not at all.
HASHED = re.compile(r"data/(?!.*\.tar)|export/(?!README)|run/checkpoints/|text\.mem")
VARYING = re.compile(r"\d+\.\d+ s\b|[\d,.]+ tokens/s|\d:\d\d:\d\d|\S*/(whole|copy)\S*|.*(entries sent|MLflow has).*")


# Every folder that a command reads, small and whole, and the commands

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
    (checkpoint,) = run.glob("checkpoints/*")
    trained = {"data_fingerprint": read_index(data / "train").fingerprint}
    write_manifest(checkpoint, {**read_manifest(checkpoint), **trained})
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
        save_report(scored, folder / "evaluations", name, step=3)


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


class Whole(NamedTuple):
    """Whole folders, and what commands do with them."""

    folders: Folders
    uri: str  # of a store of MLflow
    answers: dict[str, Answer]
    readers: dict[Path, list[str]]  # file -> the commands that open it

    def watch(self, commands: list[str]) -> None:
        """Run these commands, unless they have run, and note what they open."""
        for command in (each for each in commands if each not in self.answers):
            copy = copied(self.folders, self.folders.root / "copy")
            self.answers[command], opened = opened_by(copy, command, self.uri)
            for path in opened & self.readers.keys():
                self.readers[path].append(command)


@pytest.fixture(scope="module")
def whole(library: Path, tmp_path_factory: pytest.TempPathFactory, sqlite_uri: str) -> Iterator[Whole]:
    """The folders; without programs on the PATH, so that no Slurm of this machine is asked."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {**launcher_environment(0, 1, free_port()), "PATH": "/nonexistent"}.items():
            patch.setenv(name, value)
        folders = make_folders(tmp_path_factory.mktemp("whole"), library)
        yield Whole(folders, sqlite_uri, {}, {path: [] for path in folders.files()})


def copied(folders: Folders, to: Path) -> Folders:
    shutil.rmtree(to, ignore_errors=True)
    to.mkdir()
    for name in ("run", "data", "export"):
        shutil.copytree(folders.root / name, to / name, symlinks=True)
    shutil.copy(folders.root / "text.mem", to / "text.mem")
    return Folders(to)


def faults(whole: Whole, path: Path, damage: Damage, command: str, seed: int) -> Iterator[str]:
    """Damage a file of a copy, run a command, and yield what is wrong with its answer."""
    copy, choose = copied(whole.folders, whole.folders.root / "copy"), random.Random(f"{path} {seed}")
    damage(copy.root / path, choose)
    answer = run_command(copy.arguments(command, whole.uri))
    text, allowed = answer.printed + answer.error, {0, 2}
    if command.startswith(("data verify", "checkpoints")):
        allowed.add(1)  # "something is damaged"
    if answer.code not in allowed or "Traceback" in text:
        yield f"code {answer.code}: {text[-300:]}"
    elif answer.code and path.name not in text and str(path.parent) not in text and not ALONE.search(text):
        yield f"code {answer.code} does not name the file: {text[-300:]}"
    elif steering(text):
        yield f"steers a terminal: {text[-300:]!r}"
    elif answer.code == 0 and damage in PLACES and not may_be_left(path, damage, command) and path.name not in text:
        yield "is used or left out without a word"
    elif answer.code == 0 and damage in CONTENTS and HASHED.match(str(path)) and path.name not in text:
        before = whole.answers[command].printed
        if VARYING.sub("", answer.printed) != VARYING.sub("", before):
            yield f"another result without a word: {answer.printed[-300:]}"


ALONE = re.compile(
    r"no Slurm|no squeue|no job and no log|train.steps and train.epochs: neither"
)  # true, whatever a line of the file says


def may_be_left(path: Path, damage: Damage, command: str) -> bool:
    """Whether a command may leave a file out that only makes its answer nicer, or that is a link to a regular file."""
    return damage.__name__ == "as_link_out" or command.startswith("checkpoints") or path.name == "report.txt"


def check(whole: Whole, damages: list[Damage], num: int | None) -> None:
    """Try `num` pairs of a file and a damage, chosen by chance, with one fast command each; None: all, with all."""
    whole.watch(COMMANDS if num is None else FAST)
    pairs = [(path, damage) for path, commands in whole.readers.items() if commands for damage in damages]
    chosen = pairs if num is None else random.Random(num).sample(pairs, num)
    wrong = {}
    for path, damage in chosen:
        fast = [command for command in whole.readers[path] if num is None or command in FAST]
        for command in fast if num is None else random.Random(f"{path}").sample(fast, min(1, len(fast))):
            for seed in range(1 if num or damage in PLACES else 6):
                if found := list(faults(whole, path, damage, command, seed)):
                    wrong[f"{path}, {damage.__name__}, {command}, seed {seed}"] = found
    assert wrong == {}


SOME = [pytest.param(40, id="some"), pytest.param(None, id="all", marks=pytest.mark.nightly)]


@pytest.mark.parametrize("num", SOME)
def test_no_pipe_folder_device_or_link_is_read_or_waited_for(whole: Whole, num: int | None) -> None:
    check(whole, PLACES, num)


@pytest.mark.nightly
def test_whole_folders_are_read_by_every_command_and_every_file_by_one(whole: Whole) -> None:
    whole.watch(COMMANDS)
    codes = {command: answer.code for command, answer in whole.answers.items()}
    assert {name for name, code in codes.items() if code} == {"cancel RUN"}, whole.answers
    unread = {path.name for path, commands in whole.readers.items() if not commands}
    read_by_a_start = {"starts.jsonl", "cancelled"}  # tests/training/test_run_files.py; by a cancel with Slurm
    assert {name for name in unread if not name.endswith(".csv")} <= read_by_a_start


# Values of other types, with the hashes that a writer of such values would have computed


def retyped(path: Path, choose: random.Random) -> None:
    """Change a value, or leave it out, in a file of keys and values; flip bits in others."""
    if path.suffix in (".json", ".jsonl"):
        path.write_text(signed(changed(path.read_text(encoding="utf-8"), choose)), encoding="utf-8")
    elif path.suffix == ".yaml":
        lines = path.read_text(encoding="utf-8").splitlines()
        place = choose.choice([number for number, line in enumerate(lines) if ":" in line])
        lines[place] = f"{lines[place].partition(':')[0]}: {choose.choice(PIECES)}"
        path.write_text("\n".join(lines), encoding="utf-8", errors="replace")
    elif path.suffix == ".mem":
        found = read_memory_file(path)
        with contextlib.suppress(ValueError):  # what no writer can sign
            header = json.loads(changed(json.dumps(found.header), choose))
            write_memory_file(path, {**header, "sha256": None}, found.tensors)
    else:
        flipped(path, choose)


def signed(text: str) -> str:
    """Return the text of a manifest or of an index with the hash of its content; any other as it is."""
    with contextlib.suppress(ValueError, TypeError, AttributeError):
        body = json.loads(text)
        if "files" in body:
            return json.dumps({**body, "sha256": manifest_fingerprint(body)})
        if "shards" in body:
            return json.dumps({**body, "fingerprint": fingerprint_of(body)})
    return text


@pytest.mark.parametrize("num", SOME)
def test_no_damage_is_a_traceback_a_hang_or_used_without_a_word(whole: Whole, num: int | None) -> None:
    check(whole, [*CONTENTS, retyped], num)


def test_a_check_refuses_a_run_whose_start_would_be_refused(whole: Whole) -> None:
    copy = copied(whole.folders, whole.folders.root / "copy")
    arguments = copy.arguments("train RUN/config.yaml --check run_dir=RUN")
    assert run_command(arguments).code == 0
    as_pipe(next(copy.root.glob("run/checkpoints/*/engine.json")), random.Random())
    answer = run_command(arguments)
    assert answer.code == 2 and "engine.json" in answer.error and "no checkpoint verifies" in answer.error
