"""A start that is refused leaves the run directory as it was, whichever file of it is damaged."""

import os
import random
import shutil
from pathlib import Path

import pytest

from dist_mem.config import load_config
from dist_mem.errors import UnusableError
from dist_mem.runtime import distributed
from dist_mem.runtime.distributed import World
from dist_mem.training import run as run_module
from dist_mem.training.run_files import check_run_files
from tests.support.faults import CONTENTS, PLACES, Damage
from tests.support.jobs import finish, start_ranks, write_config
from tests.support.ranks import Pools


@pytest.fixture(scope="module")
def run(books: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of four steps that has written every file a start reads; beside it its configuration, job.yaml."""
    folder = tmp_path_factory.mktemp("files")
    changes = {"train": {"steps": 4}, "checkpoint": {"every": 2}, "tracking": {"tensorboard": True}}
    write_config(folder / "job.yaml", books, Path("run"), changes)
    codes, text = finish(start_ranks(["train", "job.yaml"], world_size=1, cwd=folder))
    assert codes == [0], text
    (folder / "run" / "mlflow_run_id").write_text("0123456789abcdef0123456789abcdef\n")
    return folder / "run"


def files_of(run: Path) -> list[Path]:
    return sorted(path.relative_to(run) for path in run.rglob("*") if path.is_file())


def content(folder: Path) -> dict[str, object]:
    """Everything in a folder: of a file its bytes, of a link where it leads, of anything else its kind."""
    found: dict[str, object] = {}
    for path in folder.rglob("*"):
        kind = path.lstat().st_mode >> 12
        what = path.readlink() if path.is_symlink() else path.read_bytes() if path.is_file() else kind
        found[str(path.relative_to(folder))] = what
    return found


def start_again(run: Path, to: Path, damaged: Path, damage: Damage) -> tuple[int, str, bool]:
    """Damage a file of a copy and start the run for two more steps: the code, the output, whether nothing changed."""
    shutil.copytree(run.parent, to)
    damage(to / "run" / damaged, random.Random(str(damaged)))
    before = content(to / "run")
    codes, text = finish(start_ranks(["train", "job.yaml", "train.steps=6"], world_size=1, cwd=to))
    return codes[0], text, content(to / "run") == before


def folders_looked_for(world: World, run_dir: Path) -> list[Path]:
    """What this rank looks for before rank 0 holds the run directory; the start ends there."""
    found: list[Path] = []

    def refuse(*_: object) -> None:
        raise UnusableError("held")

    def look(path: Path) -> list[Path]:
        found.append(path)
        return []

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run_module, "before_joining", lambda *_: None)
        patch.setattr(run_module, "missing_folders", look)
        patch.setattr(run_module, "hold_run_dir", refuse)
        patch.setattr(distributed, "initialize", lambda **_: world)
        patch.setattr(distributed, "shut_down", lambda **_: None)
        with pytest.raises(UnusableError, match="held"):
            run_module.run(load_config([f"run_dir={run_dir}", "train.steps=1", "memory.kind=none"]))
    return found


def test_no_rank_looks_for_the_run_directory_before_rank_0_has_made_it(tmp_path: Path, rank_pool: Pools) -> None:
    """The node of a rank that did would keep for half a minute that nothing is there, on NFS."""
    assert rank_pool(2).run(folders_looked_for, tmp_path / "run") == [[tmp_path / "run"], []]


EVERY = [*PLACES, *CONTENTS]
OF_THE_RUN = ("config.yaml", "finished.json", "history.jsonl", "metrics.jsonl", "mlflow_run_id", "starts.jsonl")


@pytest.mark.parametrize("damage", [pytest.param(each, id=each.__name__) for each in EVERY])
@pytest.mark.parametrize("name", [pytest.param(name, id=name) for name in OF_THE_RUN])
def test_a_refused_start_changes_nothing(run: Path, tmp_path: Path, name: str, damage: Damage) -> None:
    code, text, is_same = start_again(run, tmp_path / "again", Path(name), damage)
    assert code in (0, 2) and "Traceback" not in text, text
    assert code == 0 or (is_same and name in text), text
    assert code == 2 or damage not in PLACES or damage.__name__ == "as_link_out", "a start went on with no file"


@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_a_refused_start_changes_nothing_whichever_file_it_is(run: Path, tmp_path: Path) -> None:
    assert {path.name for path in files_of(run) if len(path.parts) == 1} == {*OF_THE_RUN}
    for number, path in enumerate(files_of(run)):
        for damage in EVERY:
            to = tmp_path / f"{number}-{damage.__name__}"
            code, text, is_same = start_again(run, to, path, damage)
            assert code in (0, 2) and (code == 0 or is_same), f"{path}, {damage.__name__}: {text}"
            shutil.rmtree(to)


def test_what_others_have_put_beside_the_files_refuses_no_start(tmp_path: Path) -> None:
    """An editor's lock that leads nowhere, a debugger's pipe, a link to a log that is gone."""
    (tmp_path / ".#config.yaml").symlink_to("user@host.4711:1764712345")
    (tmp_path / "job.log").symlink_to(tmp_path / "gone")
    os.mkfifo(tmp_path / "debugger")
    check_run_files(tmp_path)
