"""Refusals of the command line: exit code 2 and one error, before anything is allocated or made.

The tables have a command -> what its error names.
"""

import os
import re
import resource
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from dist_mem.__main__ import main
from dist_mem.cli.commands.data import builder_parser
from dist_mem.cli.parser import build_parser
from dist_mem.datasets import gpt2_tokenizer
from dist_mem.datasets.recipes import builder_names
from dist_mem.runtime.network_interface import free_port
from tests.support.data_builders import build_data
from tests.support.forked_ranks import Program
from tests.support.jobs import write_config
from tests.support.limits import limit
from tests.support.messages import said
from tests.support.paths import ROOT
from tests.support.ranks import launcher_environment

ADDRESS_SPACE = 16 << 30  # bytes: a larger allocation fails instead of taking the machine down
HUGE = 10**20
LONG = "x" * 300
INFINITE = "memory={{kind: infinite, {}}}"
_, COMMANDS = build_parser()


class Made(NamedTuple):
    """What commands are given: a trained run, and the configuration of another one in the folder they start in."""

    run: Path
    config: Path
    data: Path

    def words(self, command: str) -> list[str]:
        """Return a command, with RUN, CONFIG and DATA in it, as a shell splits it."""
        return [str(getattr(self, word.lower())) if word.isupper() else word for word in shlex.split(command)]


class Answer(NamedTuple):
    """Result of a command."""

    code: int | None  # exit code; negative: the signal that killed it
    text: str  # standard output and standard error
    left: list[str]  # files and folders that it created


Asked = Callable[[list[str]], Answer]


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> Asked:
    """Runs `dist-mem ARGUMENTS` in an empty folder; it cannot allocate more than 16 GiB."""

    def ask(arguments: list[str]) -> Answer:
        here = tmp_path_factory.mktemp("asked")
        environment = {**os.environ, **launcher_environment(0, 1, free_port())}
        program = Program(arguments, cwd=here, environment=environment)
        resource.prlimit(program.pid, resource.RLIMIT_AS, (ADDRESS_SPACE, ADDRESS_SPACE))  # before it has parsed them
        text, _ = program.communicate(timeout=limit(180))
        return Answer(program.returncode, text, sorted(str(path.relative_to(here)) for path in here.rglob("*")))

    return ask


@pytest.fixture(scope="module")
def made(asked: Asked, books: Path, tmp_path_factory: pytest.TempPathFactory) -> Made:
    folder = tmp_path_factory.mktemp("made")
    few = {"train": {"steps": 1, "global_batch_size": 2, "micro_batch_size": 2}, "checkpoint": {"every": None}}
    reported = {"tracking": {"mlflow": True, "send": "never", "system_metrics": False}}
    answer = asked(["train", str(write_config(folder / "trained.yaml", books, folder / "trained", few, reported))])
    assert answer.code == 0, answer.text
    config = write_config(folder / "other.yaml", books, Path("other"), few)
    return Made(folder / "trained", config, books)


def content(folder: Path) -> dict[str, tuple[int, int]]:
    return {str(path): (path.stat().st_size, path.stat().st_mtime_ns) for path in folder.rglob("*") if path.is_file()}


def error_in(text: str) -> str:
    """Return the only error of an output, and what follows."""
    text = text.replace(LONG, "LONG")
    (error,) = re.findall(r"^(?:dist-mem[\w -]*: )?error: .*?\Z", text, re.MULTILINE | re.DOTALL)
    assert len(re.findall(r"^(?:dist-mem[\w -]*: )?error: |Traceback", text, re.MULTILINE)) == 1, text
    return str(error)


def error_of(asked: Asked, made: Made, arguments: list[str]) -> str:
    """Return the error of a command in a process of its own; it must leave everything as it was."""
    before = content(made.run.parent)
    answer = asked(arguments)
    assert answer.code == 2, answer.text
    assert answer.left == []
    assert content(made.run.parent) == before
    return error_in(answer.text)


TOO_LARGE = {
    "train CONFIG preflight=false model.d_model=131072": "model.d_model = 131072",
    "train CONFIG preflight=false memory.mem_len=16000000 model.d_model=1024": "memory.mem_len = 16000000",
    "train CONFIG preflight=false train.seg_len=16000000": "train.seg_len = 16000000",
    "train CONFIG preflight=false model.num_layers=64 model.d_inner=4194304": "model.d_inner = 4194304",
    "evaluate RUN eval.seg_len=16000000": "seg_len = 16000000",
    "generate RUN --prompt a --samples 10000 eval.mem_len=200000": "--samples = 10000",
}


@pytest.mark.parametrize("command", TOO_LARGE)
def test_what_no_machine_can_hold_is_refused_by_the_key(asked: Asked, made: Made, command: str) -> None:
    """Each key is below its own bound; the machine here has less than a hundred gibibytes."""
    error = error_of(asked, made, made.words(command))
    assert re.search("this needs about .* GiB", error) and TOO_LARGE[command] in error


REFUSED_BY_THE_MODEL = {
    "memory: {kind: compressive, mem_len: 20, cmem_len: 8}": "memory.mem_len",
    "memory: {kind: infinite, over: {kind: transformer_xl, mem_len: 7}}": "memory.over.mem_len",
    "data: {cut: end}": "data.cut",
    "model: {adaptive: {cutoffs: [1000]}}": "model.adaptive.cutoffs",
}


@pytest.mark.parametrize("block", REFUSED_BY_THE_MODEL)
@pytest.mark.parametrize("command", ["train", "launch", "doctor"])
def test_what_the_model_refuses_is_named_with_its_file(
    asked: Asked, made: Made, tmp_path: Path, command: str, block: str
) -> None:
    mine = tmp_path / "mine.yaml"
    mine.write_text(f"{block}\n", encoding="utf-8")
    error = error_of(asked, made, [command, str(made.config), str(mine)])
    said(error, f"{mine}: {REFUSED_BY_THE_MODEL[block]}")


OTHERS = {
    "train CONFIG data.path=nowhere": "nowhere/tokenizer.json",
    "train CONFIG data.train_split=nosplit": "nosplit",
    "train CONFIG train.global_batch_size=400": "train.global_batch_size = 400",
    "train CONFIG resume=3": "resume = 3",
    "train CONFIG resume=nowhere": "resume = nowhere",
    "train CONFIG model.adaptive.cutoffs=[1000]": "model.adaptive.cutoffs",
    "train CONFIG 'optimizer.groups=[{param_regex: nothing_like_it}]'": "optimizer.groups[0].param_regex",
    f"train {LONG}": "xxx",
    "train CONFIG train.steps=null train.epochs=9e7": "train.epochs",
    "train CONFIG train.steps=null train.epochs=1 schedule.warmup_steps=100000": "schedule.warmup_steps",
    "export RUN --out=~ada/x": "--out: '~ada/x'",
    "train /etc": "/etc",
    f"config {LONG}": "xxx",
    f"train CONFIG --check --world {HUGE}": "--world",
    f"evaluate {LONG}": "LONG",
    "evaluate RUN eval.seg_len=99999999999": "eval.seg_len",
    f"evaluate RUN eval.clamp_len={HUGE}": "eval.clamp_len",
    "evaluate RUN --split ''": "--split",
    f"checkpoints verify {LONG}": "LONG",
    f"compare {LONG}": "LONG",
    f"export RUN --out {LONG}": "File name too long",
    "export RUN --out /proc/x": "--out",
    f"check-memory {LONG}.py:A": "LONG",
    "generate RUN --prompt a --samples 99999999": "--samples",
    f"generate RUN --prompt a --tokens {HUGE}": "--tokens",
    "generate RUN --prompt a --seed -1": "--seed",
    f"generate RUN --prompt a --top-k {HUGE}": "--top-k",
    "dialogue RUN --seed -1": "--seed",
    f"reproduce {LONG}.yaml": "LONG",
    "doctor CONFIG memory.mem_len=0": "memory.mem_len",
    "launch CONFIG --nodes 99999999999 --dry-run": "launch.nodes",
    "launch CONFIG --gpus-per-node 99999999999 --dry-run": "launch.gpus_per_node",
    "data verify /etc": "/etc",
    "data verify /etc/passwd": "/etc/passwd",
    "data verify ''": "data.path: is ''",
    f"data verify {LONG}": "data.path",
    "data verify pipe:": "pipe:",
    "data verify http://[": "http://[",
    "data verify http://": "http://",
    "data verify DATA --split ''": "--split",
    "data verify DATA --split ../train": "--split",
    "track sync RUN tracking.uri=???": "tracking.uri",
    "track sync RUN tracking.uri=nonsense://x": "tracking.uri",
    "track sync RUN tracking.experiment=\"''\"": "tracking.experiment: is ''",
    f"track sync {LONG}": "LONG",
}


@pytest.mark.parametrize("command", OTHERS, ids=lambda text: text[:60])
def test_a_command_is_refused_and_leaves_nothing(asked: Asked, made: Made, command: str) -> None:
    said(error_of(asked, made, made.words(command)), OTHERS[command])


# In this process.


@pytest.fixture
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, single_process: None) -> None:
    """The folder in which a command runs that must not come as far as to a training."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setitem(sys.modules, "dist_mem.training.run", None)


def code_of(arguments: list[str]) -> object:
    try:
        return main(arguments)
    except SystemExit as ended:
        return ended.code


ANSWERED = {
    "train a.yaml --steps=100": "train.steps=100",
    "train a.yaml --train.stps 100": "train.steps=100",
    "train a.yaml --mem-len 8": "memory.mem_len=8 or eval.mem_len=8",
    "train a.yaml --optimizer.lr": "optimizer.lr=VALUE",
    "train a.yaml --lr 1 --check": "optimizer.lr=1",
    "launch a.yaml --seg_len 9": "train.seg_len=9 or eval.seg_len=9",
    "estimate a.yaml --gpu h100-80gb --seg_len 9": "train.seg_len=9 or eval.seg_len=9",
    "sweep a.yaml --precision bf16": "did you mean train.precision=bf16",
    "train a.yaml --chekc": "--check",
    "evaluate runs/x --chekpoint 4": "--checkpoint",
    "evaluate runs/x --checkpoint lates": "--checkpoint",
    "generate runs/x --prompt a --tokens many": "--tokens",
    "dialogue runs/none --top-p 2": "--top-p",
    "compare runs/x --spilt test": "--split",
    "train --zzz": "--zzz",
    "train --world 0": "--world",
    "config -x": "-x",
    "trian a.yaml": "train",
    "chekpoints list x": "checkpoints",
    "x": "dist-mem --help",
    "": "dist-mem --help",
    "evaluate": "dist-mem evaluate runs/demo --split test",
    "train a.yaml --batch-size 4": "train.global_batch_size=4 or eval.batch_size=4",
    "train a.yaml --learning-rate=3e-4": "optimizer.lr=3e-4",
    "--steps 100": "--steps",
    "data buld sample": "build",
    "data build nothing": "sample",
    "data build pg19": "dist-mem data build pg19 --source",
    "checkpoints lst x": "list",
    "reproduce recall --seeds a": "--seeds",
    "reproduce recall launch.time=1h": "launch.time=1h",  # nothing is submitted
    "reproduce lamemo.table1 --seeds 0,1,0": "--seeds",  # it would count twice in the mean, and make the spread smaller
    "data verify": "dist-mem data verify data/sample",
    "train train.steps=5 memory.mem_lenn=5": "memory.mem_len?",
    "train configs/demo.yaml train.steps 100": "train.steps=VALUE",
    "train train.steps=5 --allow train.global_batch_size": "train.global_batch_size",
}


@pytest.mark.parametrize("command", ANSWERED)
def test_wrong_arguments_are_answered_with_what_was_meant(
    command: str, capsys: pytest.CaptureFixture[str], empty_folder: None
) -> None:
    assert code_of(shlex.split(command)) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and not list(Path().iterdir())
    said(error_in(printed.err), ANSWERED[command])


# Each is refused with its key.
VALUES = [
    *(f"train.steps={HUGE}", "model.d_model=1000000000000", "memory.mem_len=10000000000", "memory.mem_len=0"),
    *(INFINITE.format(option) for option in ("num_basis: 100000000", "kl_weight: -1", "kl_weight: .nan")),
    *("memory={kind: compressive, mem_len: 16, loss_weight: -1}", "watchdog.seconds=1e300"),
    *("tracking.experiment=''", "name=''", "data.path=''", "data.path='pipe:'", "data.path='http://['"),
    *(f"run_dir={LONG}", f"name={LONG}", f"data.path={LONG}", f"run_dir={'x/' * 3000}", 'run_dir="a\\0b"'),
    *(f"train.global_batch_size=0x{'f' * 5000}", f"optimizer.lr=1{'0' * 400}"),
    *(f"launch.env={'[' * 3000}", f"launch.env={'[' * 3000}{']' * 3000}"),
]


@pytest.mark.parametrize("override", VALUES, ids=lambda text: text[:60])
def test_a_value_that_no_key_can_have_starts_nothing(
    override: str, capsys: pytest.CaptureFixture[str], empty_folder: None
) -> None:
    assert main(["train", "configs/demo.yaml", override]) == 2
    assert not list(Path().iterdir())
    said(error_in(capsys.readouterr().err), override.partition("=")[0])


MISSING = "nowhere/absent"
CALLS = [
    *(f"{name} {MISSING}" for name in ("status", "logs", "cancel", "evaluate", "compare", "dialogue", "inspect")),
    *(f"checkpoints {name} {MISSING}" for name in ("list", "verify", "show")),
    *(f"data {name} {MISSING}" for name in ("build", "verify", "show", "sample")),
    *(f"{name} {MISSING}" for name in ("reproduce", "memory show", "track sync", "figure lamemo.fig1")),
    *(f"{name} {MISSING} --step 1" for name in ("batch", "recompute")),
    *(f"{name} {MISSING}.yaml" for name in ("train", "train --check", "launch", "launch --script", "config")),
    *(f"{name} {MISSING}.yaml" for name in ("doctor", "sweep", "arena")),
    *(f"{name} {MISSING}.yaml --slurm" for name in ("sweep", "arena")),
    f"train train.steps=1 deepspeed={MISSING}.json",
    f"estimate {MISSING}.yaml --gpu h100-80gb",
    f"evaluate {MISSING}",
    *(f"export {MISSING}{suffix} --out out" for suffix in ("", ".yaml")),
    *(f"compare {MISSING}{suffix}" for suffix in (".json", " --plot x.png")),
    f"lm-eval {MISSING} --tasks a",
    f"lm-eval run --tasks a --include-path {MISSING}",
    f"generate {MISSING} --prompt a",
    f"generate --compare {MISSING} {MISSING} --prompt a",
    f"generate run --prompt-file {MISSING}",
    *(f"{name} run --text {MISSING}" for name in ("inspect", "report")),
    f"report {MISSING} --book 1",
    f"read {MISSING} --run run --out out",
    f"read {ROOT / 'README.md'} --run {MISSING} --out out",
    f"check-memory {MISSING}.py:Memory",
]
# Looked for after the run, see test_evaluate.py, test_memory_files.py, ...
ELSEWHERE = {("evaluate", "also"), ("dialogue", "wordnet")}
ELSEWHERE |= {(command, "memory") for command in ("evaluate", "generate", "dialogue", "read")}


def test_every_command_and_every_path_it_takes_is_here() -> None:
    calls = {name: [call for call in CALLS if call.startswith(f"{name} ")] for name in COMMANDS.keys() - {"init"}}
    for command in calls:  # but `init`, which reads nothing
        assert calls[command], command
        for action in COMMANDS[command]._actions:
            if action.type is Path and (command, action.dest) not in ELSEWHERE:
                option = action.option_strings[0] if action.option_strings else ""
                assert any(option in call for call in calls[command]), f"{command}: no call misses {action.dest}"


@pytest.mark.parametrize("call", CALLS)
def test_a_missing_path_is_named(call: str, capsys: pytest.CaptureFixture[str], empty_folder: None) -> None:
    assert main(call.split()) == 2
    said(error_in(capsys.readouterr().err), MISSING)


def path_options(builder: str) -> list[list[str]]:
    """Options of a builder with a path to read, that is not there."""
    actions = [each for each in builder_parser(builder)._actions if each.type is Path or each.dest == "source"]
    found = {action.option_strings[0] for action in actions} - {"--out"}
    source = ["--source", "."] if "--source" in found else []
    return [[*(source if option != "--source" else []), option, MISSING] for option in sorted(found)]


@pytest.mark.parametrize("builder", builder_names())
def test_a_builder_without_its_source_begins_nothing(
    builder: str, capsys: pytest.CaptureFixture[str], empty_folder: None
) -> None:
    for call in path_options(builder):
        assert build_data(builder, *call, "--out", "out") == 2, call
        said(capsys.readouterr().err, MISSING)
        assert not Path("out").exists(), "something was begun"


def test_a_tokenizer_needs_its_folder(capsys: pytest.CaptureFixture[str], empty_folder: None) -> None:
    assert gpt2_tokenizer.main([MISSING, "--out", "out"]) == 2
    said(capsys.readouterr().err, MISSING)
