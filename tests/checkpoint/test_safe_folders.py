"""A folder of a model, a run or a checkpoint runs nothing, whatever its files say."""

import ast
import hashlib
import os
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf

from dist_mem.__main__ import main
from dist_mem.checkpoint.manifest import read_manifest
from dist_mem.config import load_config, read_config, save_config
from dist_mem.errors import CheckpointError, UnusableError
from dist_mem.evaluation.trained_model import load_model
from tests.support import paths
from tests.support.file_server import FileServer
from tests.support.messages import refused
from tests.support.paths import PACKAGE
from tests.support.saving import rewrite_manifest

pytestmark = [pytest.mark.servers, pytest.mark.usefixtures("single_process")]

GOLDEN = paths.GOLDEN / "formats"
DATA = f"data.path={GOLDEN / 'data'}"
UNPICKLERS = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}


class Marker:
    """Its pickle makes a folder when it is loaded."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.makedirs, (str(self.path), 0o777, True)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A checkpoint of somebody else, in the run directory run."""
    directory = tmp_path / "run" / "checkpoints" / "step-00000003"
    shutil.copytree(GOLDEN / "format-4" / "step-00000003", directory)
    return directory


def test_a_pickle_in_a_checkpoint_of_an_unknown_format_is_not_loaded(checkpoint: Path, tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    for name in ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_optim_states.pt"):
        torch.save({"module": {}, "optimizer": Marker(marker)}, checkpoint / "ranks" / name)
    rewrite_manifest(checkpoint, format_version=2)
    with suppress(Exception):  # whatever it ends with: first of all nothing may run
        load_model(checkpoint, DATA)
    assert not marker.exists(), "the pickle was loaded"
    with refused(CheckpointError, "manifest.json", "format_version"):
        load_model(checkpoint, DATA)


def test_nothing_in_the_package_can_load_a_pickle() -> None:
    for path in PACKAGE.rglob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            where = f"{path}:{getattr(node, 'lineno', 0)}"
            if isinstance(node, ast.Import | ast.ImportFrom):
                names = {alias.name for alias in node.names} | {getattr(node, "module", None)}
                assert not names & UNPICKLERS, where
            if isinstance(node, ast.Call):
                for keyword in node.keywords:
                    is_false = isinstance(keyword.value, ast.Constant) and keyword.value.value is False
                    assert keyword.arg != "weights_only" or not is_false, where
                    assert keyword.arg != "allow_pickle" or is_false, where
                called = ast.unparse(node.func)
                assert called not in {"torch.load", "yaml.load", "yaml.unsafe_load", "eval", "exec"}, where
                assert not called.endswith(".load_checkpoint"), where


def edit_config(directory: Path, *overrides: str) -> None:
    """Another configuration in a checkpoint or an export, whose manifest fits it."""
    path = directory / "config.yaml"
    settings = OmegaConf.merge(OmegaConf.load(path), OmegaConf.from_dotlist(list(overrides)))
    OmegaConf.save(settings, path)
    rewrite_manifest(directory)


@pytest.fixture
def exported(tmp_path: Path) -> Path:
    """An export of somebody else."""
    out = tmp_path / "export"
    golden = GOLDEN / "format-4" / "step-00000003"
    assert main(["export", str(golden), "--out", str(out), DATA]) == 0
    return out


def commands(folder: Path, tmp_path: Path) -> dict[str, list[str]]:
    return {
        "evaluate": ["evaluate", str(folder)],
        "generate": ["generate", str(folder), "--prompt", "a", "--tokens", "2"],
        "export": ["export", str(folder), "--out", str(tmp_path / "again")],
        "dialogue": ["dialogue", str(folder)],
        "inspect": ["inspect", str(folder)],
        "list": ["checkpoints", "verify", str(folder)],
    }


def pipes(marker: Path) -> list[str]:
    return [f"pipe:touch {marker} {{}}", f"PIPE:touch {marker} {{}}", f"pIpE://;touch {marker};{{}}"]


@pytest.mark.parametrize("kind", ["checkpoint", "export"])
def test_a_command_in_the_configuration_of_a_folder_never_runs(
    checkpoint: Path, exported: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.chdir(tmp_path)
    marker = tmp_path / "marker"
    folder = exported if kind == "export" else checkpoint
    usual, *spellings = pipes(marker)
    asked = commands(folder, tmp_path)
    for pipe, names in ((usual, list(asked)), *((spelling, ["evaluate"]) for spelling in spellings)):
        edit_config(folder, f"data.path={pipe}", f"data.cache={tmp_path / 'cache'}")
        for name in names:
            code = main(asked[name])
            assert not marker.exists(), (pipe, name)
            works = name in ("list", "generate", "export")  # which read no data
            assert code == (0 if works else 2), (pipe, name)


def test_what_allowed_foreign_code_is_not_kept(tmp_path: Path) -> None:
    """A file that a run has written is read again by others, and says nothing they have not said."""
    config = load_config(["train.steps=1", "eval.allow_code=true"])
    assert config.eval.allow_code
    save_config(config, tmp_path / "config.yaml")
    kept = read_config(tmp_path / "config.yaml")
    assert not kept.eval.allow_code


@pytest.mark.parametrize("arguments", [["train"], ["train", "--check"], ["launch", "--dry-run"], ["doctor"]])
def test_a_command_in_a_configuration_of_the_user_is_refused_with_the_fix(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    marker = tmp_path / "marker"
    (tmp_path / "mine.yaml").write_text(f"train: {{steps: 1}}\ndata: {{path: 'pipe:touch {marker} {{}}'}}\n")
    command, *options = arguments
    assert main([command, str(tmp_path / "mine.yaml"), *options, f"run_dir={tmp_path / 'run'}"]) == 2
    fix = "pipe: is not among gs, hf, http, https, s3: copy the data to a directory and give its path"
    assert fix in capsys.readouterr().err
    assert main(["data", "verify", f"pipe:touch {marker} {{}}", "--cache", str(tmp_path / "cache")]) == 2
    assert fix in capsys.readouterr().err
    assert not marker.exists()
    assert not (tmp_path / "run").exists()


def test_a_server_that_only_the_folder_names_gets_no_request(checkpoint: Path, exported: Path, tmp_path: Path) -> None:
    server = FileServer(GOLDEN / "data")
    try:
        for folder in (checkpoint, exported):
            edit_config(folder, f"data.path={server.url}/${{oc.env:HOME}}", f"data.cache={tmp_path / 'cache'}")
            for name in ("evaluate", "generate"):
                main(commands(folder, tmp_path)[name])
                assert not server.asked, (folder, name)
        main([*commands(checkpoint, tmp_path)["evaluate"], f"data.path={server.url}"])
        assert server.asked, "named by the user, it is asked"
    finally:
        server.close()


PROGRAM = """
from pathlib import Path
from dist_mem.memory.transformer_xl import TransformerXL
Path({marker!r}).touch()
class Mine(TransformerXL):
    pass
"""


@pytest.mark.parametrize("kind", ["checkpoint", "export"])
def test_a_memory_in_a_folder_is_not_run_unless_asked_for(
    checkpoint: Path, exported: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    marker, folder = tmp_path / "marker", exported if kind == "export" else checkpoint
    (folder / "memory").mkdir()
    (folder / "memory" / "mine.py").write_text(PROGRAM.format(marker=str(marker)))
    edit_config(folder, "memory.kind=/somewhere/mine.py:Mine")
    for name, arguments in commands(folder, tmp_path).items():
        assert main([*arguments, *([DATA] if name != "list" else [])]) == (0 if name == "list" else 2), name
        assert not marker.exists(), name
    assert f"{folder / 'memory' / 'mine.py'} is a program" in capsys.readouterr().err
    with refused(UnusableError, "eval.allow_code"):
        load_model(folder, DATA)
    assert not marker.exists()
    edit_config(folder, "memory.mem_len=5")
    assert load_model(folder, DATA, "eval.allow_code=true").config.memory["mem_len"] == 5, "as the folder has it"
    assert marker.exists(), "asked for, it runs"
    edit_config(folder, "eval.allow_code=true")
    with refused(UnusableError, "eval.allow_code"):
        load_model(folder, DATA)


@pytest.mark.parametrize("name", ["../../victim/x.py", "/etc/passwd", "memory/../../victim/x", "a//b", "memory/.x"])
def test_files_of_a_manifest_lie_in_its_folder(checkpoint: Path, tmp_path: Path, name: str) -> None:
    (tmp_path / "victim").mkdir()
    files = {**read_manifest(checkpoint)["files"], name: {"bytes": 0, "sha256": hashlib.sha256(b"").hexdigest()}}
    rewrite_manifest(checkpoint, files=files)
    assert main(["export", str(checkpoint), "--out", str(tmp_path / "out"), DATA]) == 2
    assert not list((tmp_path / "victim").iterdir())
    with refused(CheckpointError, f"a key of files is {name!r}"):
        read_manifest(checkpoint)


@pytest.mark.parametrize("over", [5, [], {"kind": 3}, {"kind": "causal", "over": None}])
def test_a_folder_whose_memory_lies_over_nonsense_is_refused(checkpoint: Path, over: Any) -> None:
    path = checkpoint / "config.yaml"
    settings = OmegaConf.load(path)
    settings.memory = {"kind": "infinite", "over": over}
    OmegaConf.save(settings, path)
    rewrite_manifest(checkpoint)
    with refused(UnusableError, "memory.over"):
        load_model(checkpoint, DATA)
