"""A copy of the project in which the commands of its pages run in seconds: the same files, with small configurations.

The commands of the pages are changed only by `STAND_INS` and in their step numbers. Differences from a user's tree:

- `SMALLER`: models of one layer of 16, and few steps, in the copies of the configurations;
- step numbers in commands (`--checkpoint 400`, `--step 450`, `train.steps=2000`, `checkpoint.every=50`,
  `.../step-00000800`) are divided by 50, as the demo's are;
- `dist-mem` and `python -m dist_mem` are forked from a process that has imported everything (warm_programs.py).
"""

from __future__ import annotations

import os
import random
import re
import shutil
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import yaml
from omegaconf import OmegaConf

from dist_mem.errors import EXIT_REQUEUE
from dist_mem.runtime.network_interface import free_port
from tests.support.limits import limit
from tests.support.page_commands import ROOT
from tests.support.warm_programs import write_programs

STEPS = 50  # steps on a page for one step in the tree
_MODEL = ["model.num_layers=1", "model.d_model=16", "model.num_heads=2", "model.d_inner=16"]
_FEW = ["train.threads=1", "train.steps=4", "checkpoint.every=2", "schedule.warmup_steps=1"]
SMALLER: dict[str, Sequence[str]] = {
    "demo.yaml": [
        *_MODEL,
        *("train.threads=1", "train.steps=16", "schedule.warmup_steps=2"),
        *("checkpoint.every=4", "eval.every=4", "tracking.every=2"),
    ],
    "babilong_small.yaml": [
        *(*_MODEL, *_FEW, "eval.every=1"),
        "data.curriculum=[{path: data/babilong/qa1/62, until: 1}, {path: data/babilong/qa1/126, until: 3}]",
    ],
    **{f"{name}_small.yaml": [*_MODEL, *_FEW] for name in ("llama", "mqar", "pg19", "sorting", "cmu_dog")},
    **{
        f"{name}.yaml": ["memory.num_basis=16", "memory.num_samples=16"]
        for name in ("sorting_small/infinite", "memory/infinite", "papers/gpt2_infinite")
    },
    "papers/gpt2.yaml": [*_MODEL, "model.d_inner=64", "train.threads=1"],
}
# Text on a page -> replacement: the user's own folders, and sizes that are not set in a configuration.
STAND_INS = {
    "/new/place": "new_place",
    "/local/$USER": "local",
    "build sample --out data/sample": "build sample --out data/sample --size tiny --books 320",
    "--download --workers 8": "--vocab-size 2000",  # the network
    "--workers 8": "--workers 2",
    "--lengths 500 1000 2000": "--lengths 500 1000 2000 --train 64 --validation 8 --test 8",
    "--train 40000 --validation 200 --test 500": "--train 32 --validation 8 --test 8",
    "--train 16 --validation 8 --test 300": "--train 16 --validation 8 --test 8",
    "--train 8000 --validation 400 --test 400": "--train 128 --validation 8 --test 8",
    "reproduce lamemo.table3 ": "reproduce lamemo.table3 --rows lamemo train.steps=100 schedule.warmup_steps=1 ",
    "sweeps/memories.yaml": "sweeps/memories.yaml train.steps=100 schedule.warmup_steps=1",
    "tracking.uri=http://mlflow.example:5000": "tracking.uri=sqlite:///mlflow.db",
    "--tokenizer sentencepiece": "--tokenizer sentencepiece --vocab-size 2000",
}
_STEP = re.compile(
    r"(--checkpoint |--step |\btrain\.steps=|\bwarmup_steps=|\bdecay_steps=|\bcheckpoint\.(?:keep_)?every=)(\d+)"
)
_CHECKPOINT = re.compile(r"/step-(\d{8})\b")


def _move_files(database: Path, before: Path, after: Path) -> None:
    """Let MLflow's database find its files in another folder."""
    places = {"experiments": "artifact_location", "runs": "artifact_uri", "logged_models": "artifact_location"}
    with closing(sqlite3.connect(database)) as opened, opened:
        for table, column in places.items():
            opened.execute(f"UPDATE {table} SET {column} = replace({column}, ?, ?)", (str(before), str(after)))


class Tree:
    """A folder with everything that a clone of the project has, and an environment in `.venv`."""

    def __init__(self, folder: Path, warm_address: Path) -> None:
        self.folder = folder
        self.steps = STEPS
        for name in ("dist_mem", "docs", "shards", "launch", "examples", "benchmarks", "tests"):
            (folder / name).symlink_to(ROOT / name)
        for pattern in ("*.md", "*.toml", "*.txt", "Makefile", ".gitignore"):
            for path in ROOT.glob(pattern):
                shutil.copy2(path, folder / path.name)
        shutil.copytree(ROOT / "configs", folder / "configs")
        for name, changes in SMALLER.items():
            _change(folder / "configs" / name, changes)
        self._write_environment(warm_address)
        self.cloned = {path.name for path in folder.iterdir()}  # entries that exist before any command has run

    def _write_environment(self, warm_address: Path) -> None:
        """Link the programs of the tests' environment, and write those of warm_programs.py."""
        programs = self.folder / ".venv" / "bin"
        programs.mkdir(parents=True)
        for path in Path(sys.executable).parent.iterdir():
            if path.name not in ("dist-mem", "python"):
                (programs / path.name).symlink_to(path)
        write_programs(programs, warm_address)
        for stamp in (".demo", ".ready"):  # of the Makefile
            (self.folder / ".venv" / stamp).touch()

    def _start(self, command: str) -> subprocess.Popen[str]:
        for on_page, here in STAND_INS.items():
            command = command.replace(on_page, here)
        command = _STEP.sub(lambda found: f"{found[1]}{max(1, int(found[2]) // self.steps)}", command)
        command = _CHECKPOINT.sub(lambda found: f"/step-{int(found[1]) // self.steps:08d}", command)
        return subprocess.Popen(
            ["bash", "-euo", "pipefail", "-c", command],
            cwd=self.folder,
            env=self._environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )

    def interrupted(self, command: str) -> str:
        """Run a training, press Ctrl-C after its second logged step, and return its output, with ^C where it was."""
        lines = list[str]()
        with self._start(f"exec {command}") as running:  # no shell in between
            assert running.stdout is not None
            for line in running.stdout:
                lines.append(line)
                if sum(line.startswith("step ") for line in lines) == 2 and "^C\n" not in lines:
                    running.send_signal(signal.SIGINT)
                    lines.append("^C\n")
        output, code = "".join(lines), running.returncode
        assert code == EXIT_REQUEUE, f"$ {command}\nexit code {code}, not {EXIT_REQUEUE}\n{output[-4000:]}"
        return output

    def must(self, command: str, *, code: int = 0) -> str:
        """Run a command of a page in bash, assert that it ends with this exit code, and return its output."""
        running = self._start(command)
        try:
            output = running.communicate(timeout=limit(600))[0]
        except subprocess.TimeoutExpired:
            os.killpg(running.pid, signal.SIGKILL)  # the ranks too
            output = f"{running.communicate()[0]}\nended after 600 s"
        found = running.returncode
        assert found == code, f"$ {command}\nexit code {found}, not {code}\n{output[-4000:]}"
        return output

    def take_over(self, other: Tree) -> None:
        """Copy what commands have created in another tree."""
        for path in other.folder.iterdir():
            if path.name not in other.cloned:
                copy = shutil.copytree if path.is_dir() else shutil.copy2
                copy(path, self.folder / path.name)
        if (database := self.folder / "mlflow.db").exists():
            _move_files(database, other.folder, self.folder)

    def _environment(self) -> dict[str, str]:
        programs = self.folder / ".venv" / "bin"
        clean = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "MLFLOW_"))}
        return {
            **clean,
            "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "WARM_PROGRAMS": str(programs),
            "MASTER_PORT": str(free_port()),
            "PET_MASTER_PORT": str(free_port()),
            "DS_ACCELERATOR": "cpu",
            "TMPDIR": str(self.folder),
            "TORCHINDUCTOR_CACHE_DIR": str(programs.parent / "inductor"),  # torch makes it when it is imported
        }


def change_yaml(path: Path, **changes: object) -> None:
    """Replace values in a YAML file; `grid.optimizer.lr` is the key `optimizer.lr` of `grid`."""
    content = yaml.safe_load(path.read_text(encoding="utf-8"))
    for name, value in changes.items():
        block, _, key = name.partition(".")
        if key:
            content[block][key] = value
        else:
            content[block] = value
    path.write_text(yaml.safe_dump(content, sort_keys=False), encoding="utf-8")


def _change(path: Path, changes: Sequence[str]) -> None:
    config = OmegaConf.merge(OmegaConf.load(path), OmegaConf.from_dotlist(list(changes)))
    if "train.steps" in "".join(changes):
        config.train.pop("epochs", None)
    OmegaConf.save(config, path)


_SYLLABLES = [a + b for a in "bdfghjklmnprstvwz" for b in ("a", "e", "i", "o", "u", "an", "or", "es")]
_WORDS = [first + second for first in _SYLLABLES for second in ("", *_SYLLABLES[::2])]


def draw_words(draw: random.Random, count: int) -> str:
    """Draw words from a vocabulary of several thousand."""
    return " ".join(draw.choices(_WORDS, k=count))


def write_texts(folder: Path, counts: dict[str, int], *, num_words: int = 2_000) -> None:
    """Write a folder of .txt files for each split, one book per file."""
    draw = random.Random(7)
    for split, count in counts.items():
        (folder / split).mkdir(parents=True, exist_ok=True)
        for number in range(count):
            lines = [draw_words(draw, 10) for _ in range(num_words // 10)]
            (folder / split / f"{split}-{number}.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
