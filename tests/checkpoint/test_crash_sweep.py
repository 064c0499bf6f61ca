"""A rank is killed at each write of a save, or a file is damaged: the run goes on as if nothing had happened."""

import json
import shutil
from collections.abc import Callable, Iterable
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest

from dist_mem.__main__ import main
from dist_mem.checkpoint.manifest import list_steps, step_dir
from dist_mem.errors import EXIT_DONE, EXIT_USAGE
from dist_mem.runtime.distributed import World
from dist_mem.training import run
from tests.support.faults import assert_quoted, flip
from tests.support.fork_server import fork_server
from tests.support.forked_ranks import SIGKILLED, Ended, run_forked
from tests.support.jobs import build_books, checkpoint_content, difference, train_here, write_config
from tests.support.paths import EXAMPLES
from tests.support.ranks import Pools, RankPool
from tests.support.run_memories import small_memory
from tests.support.saving import newest_verified
from tests.support.write_points import WritePoints

AVERAGES = f"{EXAMPLES / 'averages.py'}:Averages"  # a file more in a checkpoint
BEFORE, LAST = 2, 4  # steps of the checkpoints before and after the one whose save is killed
RANKS = (0, 1)
BACKGROUND = {1: True, 3: False}  # ZeRO stage -> checkpoint.background


class Course(NamedTuple):
    """A run to be disturbed."""

    config: Path
    before: Path  # the run directory at step BEFORE, with what an earlier crash has left in it
    last: Path  # undisturbed, at step LAST
    points: list[list[str]]  # by rank: what it writes from the start to the end of the save of the step in between
    pool: RankPool  # to go on in

    def copy(self, of: Path, folder: Path) -> Path:
        """A run directory to spoil."""
        return Path(shutil.copytree(of, folder / "run"))


@pytest.fixture(scope="module")
def make_course(tmp_path_factory: pytest.TempPathFactory, rank_pool: Pools) -> Callable[[int], Course]:
    """`make_course(stage)`; made once for each ZeRO stage."""
    fork_server()
    folder = tmp_path_factory.mktemp("courses")
    books = build_books(folder)
    made: dict[int, Course] = {}

    def get(stage: int) -> Course:
        if stage not in made:
            (folder / str(stage)).mkdir()
            made[stage] = _course(folder / str(stage), books, stage, rank_pool(2))
        return made[stage]

    return get


def _course(folder: Path, books: Path, stage: int, pool: RankPool) -> Course:
    changes = {
        "checkpoint": {"every": 1, "keep_last": 2, "background": BACKGROUND[stage]},
        "schedule": {"kind": "constant"},
        "deepspeed": {"zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0}},
    }
    config = write_config(folder / "run.yaml", books, folder / "last", changes, memory=small_memory(AVERAGES))
    assert pool.run(train_here, config, [f"train.steps={BEFORE}"]) == [0, 0]
    before = Path(shutil.copytree(folder / "last", folder / "before"))
    assert pool.run(train_here, config, [f"train.steps={LAST}"]) == [0, 0]
    killed = (BEFORE + 1, 9)  # of these steps, the second is never saved again
    for name in (*(f".step-{step:08d}.partial" for step in killed), ".step-00000000.deleted.partial"):
        shutil.copytree(step_dir(before, BEFORE) / "ranks", before / "checkpoints" / name / "ranks")
    course = Course(config, before, folder / "last", [], pool)
    ended = train_watched(course, course.copy(before, folder))
    assert ended.codes == [0, 0], ended.texts
    for rank in RANKS:
        met = json.loads((folder / f"met-{rank}.json").read_text())
        course.points.append(list(takewhile(lambda point: f"{LAST:08d}" not in point, met)))
    return course


def watched_rank(arguments: list[str], checkpoints: Path, deadly: int | None, reported: Path) -> int:
    """`dist-mem train ARGUMENTS`; if it is not killed, its writes are in `reported`."""
    points = WritePoints(checkpoints, deadly)
    code = main(["train", *arguments])
    reported.write_text(json.dumps(points.met))
    return code


def train_watched(course: Course, run_dir: Path, *, victim: int | None = None, deadly: int | None = None) -> Ended:
    """Train to LAST in newly started ranks; the victim does not survive its write number `deadly`."""
    arguments = [str(course.config), f"run_dir={run_dir}", f"train.steps={LAST}"]
    reported = [run_dir.with_name(f"met-{rank}.json") for rank in RANKS]
    own = [(arguments, run_dir / "checkpoints", deadly if rank == victim else None, reported[rank]) for rank in RANKS]
    return run_forked(watched_rank, own, folder=run_dir.parent)


def resume_here(world: World, config_file: Path, run_dir: Path) -> int:
    """Train to LAST in a rank that is there already; returns the step at which it began."""
    began = list[int]()

    def open_run(*arguments: Any) -> Any:
        context, state = opened(*arguments)
        began.append(state.step)
        return context, state

    opened = run.open_run
    with patch.object(run, "open_run", open_run):
        assert train_here(world, config_file, [f"run_dir={run_dir}", f"train.steps={LAST}"]) == EXIT_DONE
    return began[0]


def assert_goes_on_exactly(course: Course, run_dir: Path, *, where: str = "") -> int:
    """Both ranks begin at the newest checkpoint that verifies and end in the bits of the undisturbed run.

    Returns:
        The step at which they began.
    """
    newest, _ = newest_verified(run_dir)
    began, other = course.pool.run(resume_here, course.config, run_dir)
    assert began == other, where
    assert newest == (step_dir(run_dir, began) if began else None), where
    ends = [checkpoint_content(step_dir(path, LAST)) for path in (run_dir, course.last)]
    assert difference(*ends) is None, where
    assert list_steps(run_dir) == list_steps(course.last), where
    assert not list((run_dir / "checkpoints").glob(".*")), where
    return began


def kill_and_go_on(course: Course, folder: Path, victim: int, points: Iterable[int]) -> set[int]:
    """One round for each of the points; returns the steps at which the runs went on."""
    began = set()
    for deadly in points:
        where = f"rank {victim} killed at write {deadly}, {course.points[victim][deadly]}"
        run_dir = course.copy(course.before, folder)
        ended = train_watched(course, run_dir, victim=victim, deadly=deadly)
        assert ended.codes[victim] == SIGKILLED, (where, ended)
        assert ended.codes[1 - victim] != EXIT_DONE, (where, ended)
        began.add(assert_goes_on_exactly(course, run_dir, where=where))
        shutil.rmtree(run_dir)
    return began


def test_a_kill_at_any_write_changes_nothing(tmp_path: Path, make_course: Callable[[int], Course]) -> None:
    """Some writes of each rank; `make nightly` takes all."""
    course = make_course(3)
    first, other = (len(points) for points in course.points)
    began = kill_and_go_on(course, tmp_path, 0, [3, first // 2 + 3, first - 3])
    assert began == {BEFORE, BEFORE + 1}, "no kill before the commit, or none after it: the test proves little"
    assert kill_and_go_on(course, tmp_path, 1, range(1, other, 4)) == {BEFORE}


@pytest.mark.nightly
@pytest.mark.parametrize("victim", RANKS)
@pytest.mark.parametrize("stage", BACKGROUND)
def test_a_kill_at_every_write_changes_nothing(
    tmp_path: Path, make_course: Callable[[int], Course], stage: int, victim: int
) -> None:
    course = make_course(stage)
    kill_and_go_on(course, tmp_path, victim, range(len(course.points[victim])))
    assert sum(len(points) for points in course.points) >= 16


def test_everything_is_flushed_before_the_name_is_given(make_course: Callable[[int], Course]) -> None:
    """No kill shows this: without a flush, a loss of power would damage a committed checkpoint."""
    first, other = make_course(1).points
    staging = f".step-{BEFORE + 1:08d}.partial"
    named = first.index(f"rename {staging}")
    flushed = [point.removeprefix("fsync ") for point in first[:named] if point.startswith("fsync ")]
    made = {
        point.partition(" ")[2] for point in first[:named] if point.startswith(("open ", "mkdir ")) and staging in point
    }
    assert len(made) > 8 and made <= set(flushed)
    assert flushed[-1] == staging, "the manifest's name is in it"
    assert first[named + 1] == "fsync .", "and then the checkpoint's own"
    assert [point.replace("open", "fsync") for point in other[::2]] == other[1::2]


def test_a_kill_in_the_very_first_save_starts_anew(tmp_path: Path, make_course: Callable[[int], Course]) -> None:
    course = make_course(1)
    run_dir = tmp_path / "run"
    ended = train_watched(course, run_dir, victim=1, deadly=1)
    assert ended.codes[1] == SIGKILLED, ended
    assert list((run_dir / "checkpoints").glob(".*.partial"))
    assert assert_goes_on_exactly(course, run_dir) == 0


def cut(path: Path) -> None:
    """Cut a file as a loss of power would if it was not flushed."""
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size // 2)


HARMS: dict[str, Callable[[Path], Any]] = {
    "byte flipped": lambda path: flip(path, path.stat().st_size // 2),
    "cut short": cut,
}
HARMS_OF_NIGHT: dict[str, Callable[[Path], Any]] = {
    "first byte flipped": lambda path: flip(path, 0),
    "last byte flipped": lambda path: flip(path, path.stat().st_size - 1, 128),
    "empty": lambda path: path.write_bytes(b""),
    "end missing": lambda path: path.write_bytes(path.read_bytes()[:-2]),  # the very last byte of JSON is a newline
    "missing": Path.unlink,
}
FILES = [
    "ranks/rank-00000.safetensors",
    "ranks/rank-00001.safetensors",
    "engine.json",
    "config.yaml",
    "memory/averages.py",
    "tokenizer/tokenizer.json",
    "manifest.json",
]


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("harm", [*HARMS, *(pytest.param(harm, marks=pytest.mark.nightly) for harm in HARMS_OF_NIGHT)])
def test_a_damaged_file_costs_one_checkpoint_and_no_bit(
    tmp_path: Path, make_course: Callable[[int], Course], name: str, harm: str
) -> None:
    course = make_course(1 if harm in HARMS else 3)
    run_dir = course.copy(course.last, tmp_path)
    assert {path.name for path in step_dir(run_dir, LAST).rglob("*.*")} == {Path(file).name for file in FILES}
    (HARMS | HARMS_OF_NIGHT)[harm](step_dir(run_dir, LAST) / name)
    assert assert_goes_on_exactly(course, run_dir) == LAST - 1
    kept = step_dir(run_dir, LAST).with_name(f"step-{LAST:08d}.broken")
    assert (kept / name).exists() == (harm != "missing"), "the damaged checkpoint is kept for inspection"


@pytest.mark.parametrize("harm", HARMS | {"missing": Path.unlink})
def test_nothing_hangs_on_the_pointer(tmp_path: Path, make_course: Callable[[int], Course], harm: str) -> None:
    course = make_course(1)
    run_dir = course.copy(course.last, tmp_path)
    (run_dir / "finished.json").unlink()  # with it, no job would be opened
    (run_dir / "config.yaml").write_text("edited: by hand")  # a record for people; the checkpoint has its own
    (HARMS | HARMS_OF_NIGHT)[harm](run_dir / "checkpoints" / "latest")
    assert assert_goes_on_exactly(course, run_dir) == LAST
    assert "seg_len: 16" in (run_dir / "config.yaml").read_text()


@pytest.mark.parametrize("names", [*zip(FILES[:4], FILES[:2:-1], strict=True)], ids=" and ".join)
def test_where_no_checkpoint_is_whole_the_run_is_refused(
    tmp_path: Path, make_course: Callable[[int], Course], names: tuple[str, str]
) -> None:
    course = make_course(1)
    run_dir = course.copy(course.last, tmp_path)
    harmed = [step_dir(run_dir, step) / name for step, name in zip(list_steps(run_dir), names, strict=True)]
    for path, harm in zip(harmed, HARMS.values(), strict=True):
        harm(path)
    before = {path: path.read_bytes() for path in run_dir.rglob("*") if path.is_file()}
    codes, texts = train_watched(course, run_dir)
    assert codes == [EXIT_USAGE] * 2, texts
    text = "".join(texts)
    assert_quoted(text, "no checkpoint verifies:")
    assert "Restore one of them, or give the run a new run_dir to start over" in text
    assert text.count("error: ") == 1
    assert all(str(path) in text for path in harmed)
    assert before == {path: path.read_bytes() for path in run_dir.rglob("*") if path.is_file()}
