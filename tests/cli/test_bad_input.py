"""Bad input ends with exit code 2 and one error that names key, value and fix, before anything is allocated or made."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.support.asked_programs import Asked, running_programs
from tests.support.jobs import write_config

HUGE = 10**20
LONG = "x" * 300
INFINITE = "memory={{kind: infinite, {}}}"


class Made(NamedTuple):
    """What commands are given: a trained run, and the configuration of another one in the folder they start in."""

    run: Path
    config: Path
    data: Path


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Asked]:
    with running_programs(tmp_path_factory.mktemp("asked")) as programs:
        yield programs


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


def refused(asked: Asked, made: Made, arguments: list[str], *named: str) -> None:
    """Give the arguments, with {run}, {config} and {data} in them, and see that they are refused as they should be."""
    before = content(made.run.parent)
    answer = asked([text.format(**made._asdict()) for text in arguments])
    assert answer.code == 2, answer.text
    assert "Traceback" not in answer.text
    assert len(re.findall(r"^(?:dist-mem [\w -]+: )?error: ", answer.text, re.MULTILINE)) == 1, answer.text
    for text in named:
        assert text in answer.text
    assert answer.left == []
    assert content(made.run.parent) == before


TRAIN = {
    f"train.steps={HUGE}": ["train.steps", f"{HUGE}"],
    "train.segments_per_update=1000000000": ["train.segments_per_update: is 1000000000", "at most 65,536"],
    "model.d_model=1000000000000": ["model.d_model: is 1000000000000", "at most 1,048,576"],
    "model.num_layers=1000000000": ["model.num_layers: is 1000000000", "at most 4,096"],
    INFINITE.format("num_basis: 100000000"): ["memory.num_basis: is 100000000", "at most 2,048"],
    INFINITE.format("kl_weight: -1"): ["memory.kl_weight: is -1", "at least 0"],
    INFINITE.format("kl_weight: .nan"): ["memory.kl_weight: is nan", "finite"],
    "memory={kind: compressive, mem_len: 16, loss_weight: -1}": ["memory.loss_weight: is -1", "at least 0"],
    "memory.mem_len=10000000000": ["memory.mem_len: is 10000000000", "at most"],
    "memory.mem_len=0": ["memory.mem_len: is 0", "memory.kind=none"],
    "train.threads=100000": ["train.threads: is 100000", "at most 4,096"],
    "train.global_batch_size=99999999": ["train.global_batch_size: is 99999999", "at most 1,048,576"],
    "train.seg_len=1000000000000": ["train.seg_len: is 1000000000000", "at most"],
    "data.prefetch=1000000000000": ["data.prefetch: is 1000000000000", "at most 10,000"],
    "eval.batch_size=99999999": ["eval.batch_size: is 99999999", "at most 1,048,576"],
    "watchdog.seconds=1e300": ["watchdog.seconds: is 1e+300", "at most 1,000,000"],
    "tracking.experiment=''": ["tracking.experiment: is ''", "must be a text"],
    "name=''": ["name: is ''"],
    "data.path=''": ["data.path: is ''"],
    "data.path='pipe:'": ["data.path", "pipe:"],
    "data.path='http://['": ["data.path", "http://["],
    "data.path=nowhere": ["nowhere/tokenizer.json", "data.path"],
    "data.train_split=nosplit": ["nosplit", "train, validation"],
    "train.global_batch_size=400": ["train.global_batch_size = 400", "at most 12"],
    "resume=3": ["resume = 3"],
    "resume=nowhere": ["resume = nowhere"],
    "model.adaptive.cutoffs=[1000]": ["model.adaptive.cutoffs: is [1000]"],
    "optimizer.groups=[{param_regex: nothing_like_it}]": ["nothing_like_it"],
    f"run_dir={LONG}": ["run_dir: is 'xxx", "300 bytes"],
    f"name={LONG}": ["name: is 'xxx", "300 bytes"],
    f"run_dir={'x/' * 3000}": ["run_dir: is 'x/x", "6,000 bytes"],
    'run_dir="a\\0b"': ["run_dir: is 'a\\x00b'", "'\\x00'"],
    f"data.path={LONG}": ["data.path: is 'xxx", "300 bytes"],
    f"train.global_batch_size={'9' * 5000}": ["train.global_batch_size", "4300 digits"],
    f"train.global_batch_size=0x{'f' * 5000}": ["train.global_batch_size", "write it as a decimal number"],
    f"optimizer.lr=1{'0' * 400}": ["optimizer.lr", "400 digits"],
    f"launch.env={'[' * 3000}": ["launch.env", "cannot be read as YAML"],
    f"launch.env={'[' * 3000}{']' * 3000}": ["launch.env", "nested too deeply"],
}


@pytest.mark.parametrize("override", TRAIN, ids=lambda text: text[:60])
def test_a_training_is_refused_and_leaves_nothing(asked: Asked, made: Made, override: str) -> None:
    refused(asked, made, ["train", "{config}", override.replace("{", "{{").replace("}", "}}")], *TRAIN[override])


TOO_LARGE = {
    "train {config} preflight=false model.d_model=131072": "model.d_model = 131072",
    "train {config} preflight=false memory.mem_len=16000000 model.d_model=1024": "memory.mem_len = 16000000",
    "train {config} preflight=false train.seg_len=16000000": "train.seg_len = 16000000",
    "train {config} preflight=false model.num_layers=64 model.d_inner=4194304": "model.d_inner = 4194304",
    "evaluate {run} eval.seg_len=16000000": "seg_len = 16000000",
    "generate {run} --prompt a --samples 10000 eval.mem_len=200000": "--samples = 10000",
}


@pytest.mark.parametrize("command", TOO_LARGE)
def test_what_no_machine_can_hold_is_refused_by_the_key(asked: Asked, made: Made, command: str) -> None:
    """Each key is below its own bound; the machine here has less than a hundred gibibytes."""
    refused(asked, made, command.split(), "this needs about", "GiB", TOO_LARGE[command])


REFUSED_BY_THE_MODEL = {
    "memory: {kind: compressive, mem_len: 20, cmem_len: 8}": "memory.mem_len: is 20, but must be a multiple of",
    "memory: {kind: infinite, over: {kind: transformer_xl, mem_len: 7}}": "memory.over.mem_len: is 7, but must be",
    "data: {cut: end}": "data.cut: is end, but memory.kind = transformer_xl keeps whole segments",
    "model: {adaptive: {cutoffs: [1000]}}": "model.adaptive.cutoffs: is [1000], but must be",
}


@pytest.mark.parametrize("block", REFUSED_BY_THE_MODEL)
@pytest.mark.parametrize("command", ["train", "launch", "doctor"])
def test_what_the_model_refuses_is_named_with_its_file(
    asked: Asked, made: Made, tmp_path: Path, command: str, block: str
) -> None:
    mine = tmp_path / "mine.yaml"
    mine.write_text(f"{block}\n", encoding="utf-8")
    refused(asked, made, [command, "{config}", str(mine)], f"error: {mine}: {REFUSED_BY_THE_MODEL[block]}")


OTHERS: list[tuple[list[str], list[str]]] = [
    (["train", LONG], ["xxx", "no such file"]),
    (
        ["train", "{config}", "train.steps=null", "train.epochs=9e7"],
        ["train.epochs is 90000000.0", "at most 99,999,999"],
    ),
    (
        ["train", "{config}", "train.steps=null", "train.epochs=1", "schedule.warmup_steps=100000"],
        ["schedule.warmup_steps: 100000 is more than the ", " of train.epochs = 1; give less, or more epochs"],
    ),
    (
        ["train", "{config}", "train.steps=0010"],
        ["train.steps: is '0010', but must be an integer or null; write it as"],
    ),
    (["train", "{config}", "name=???"], ["name: is ???, which asks for a value"]),
    (["train", "{config}", "data.path=~ada/x"], ["data.path: is '~ada/x', but ~ stands for no home directory here"]),
    (["export", "{run}", "--out=~ada/x"], ["--out: '~ada/x': ~ stands for no home directory here"]),
    (["train", "/etc"], ["/etc", "is a folder"]),
    (["train", "/etc/nowhere.yaml"], ["/etc/nowhere.yaml", "no such file"]),
    (["config", LONG], ["xxx", "no such file"]),
    (["train", "{config}", "--check", "--world", f"{HUGE}"], ["--world", f"{HUGE}"]),
    (["evaluate", LONG], ["xxx"]),
    (["evaluate", "{run}", "eval.batch_size=99999999"], ["eval.batch_size: is 99999999"]),
    (["evaluate", "{run}", "eval.seg_len=99999999999"], ["eval.seg_len: is 99999999999"]),
    (["evaluate", "{run}", "eval.mem_len=99999999999"], ["eval.mem_len: is 99999999999"]),
    (["evaluate", "{run}", f"eval.clamp_len={HUGE}"], ["eval.clamp_len", f"{HUGE}"]),
    (["evaluate", "{run}", f"eval.max_document_len={HUGE}"], ["eval.max_document_len", f"{HUGE}"]),
    (["evaluate", "{run}", "train.threads=100000"], ["train.threads: is 100000"]),
    (["evaluate", "{run}", "--sweep", "seg_len=99999999999"], ["seg_len", "99999999999"]),
    (["evaluate", "{run}", "--sweep", ""], ["--sweep"]),
    (["evaluate", "{run}", "--split", ""], ["--split"]),
    (["checkpoints", "verify", LONG], ["xxx"]),
    (["compare", LONG], ["xxx"]),
    (["export", "{run}", "--out", LONG], ["xxx", "File name too long"]),
    (["export", "{run}", "--out", "/proc/x"], ["--out", "/proc/x"]),
    (["check-memory", f"{LONG}.py:A"], ["xxx"]),
    (["generate", "{run}", "--prompt", "a", "--samples", "99999999"], ["--samples", "99999999"]),
    (["generate", "{run}", "--prompt", "a", "--tokens", f"{HUGE}"], ["--tokens", f"{HUGE}"]),
    (["generate", "{run}", "--prompt", "a", "--seed", "-1"], ["--seed", "-1", "at least 0"]),
    (["generate", "{run}", "--prompt", "a", "--top-k", f"{HUGE}"], ["--top-k", f"{HUGE}"]),
    (["dialogue", "{run}", "--seed", "-1"], ["--seed", "-1"]),
    (["reproduce", LONG + ".yaml"], ["xxx"]),
    (["doctor", "{config}", "memory.mem_len=0"], ["memory.mem_len: is 0"]),
    (["launch", "{config}", "--nodes", "99999999999", "--dry-run"], ["launch.nodes: is '99999999999'"]),
    (["launch", "{config}", "--gpus-per-node", "99999999999", "--dry-run"], ["launch.gpus_per_node: is '99999999999'"]),
    (["data", "verify", "/etc"], ["/etc", "no data directory"]),
    (["data", "verify", "/etc/passwd"], ["/etc/passwd"]),
    (["data", "verify", ""], ["data.path: is ''"]),
    (["data", "verify", LONG], ["xxx"]),
    (["data", "verify", "pipe:"], ["pipe:"]),
    (["data", "verify", "http://["], ["http://["]),
    (["data", "verify", "http://"], ["http://"]),
    (["data", "verify", "{data}", "--split", ""], ["--split"]),
    (["data", "verify", "{data}", "--split", "../train"], ["--split", "../train"]),
    (["track", "sync", "{run}", "tracking.uri=???"], ["tracking.uri"]),
    (["track", "sync", "{run}", "tracking.uri=nonsense://x"], ["tracking.uri", "nonsense://x"]),
    (["track", "sync", "{run}", "tracking.experiment=''"], ["tracking.experiment: is ''"]),
    (["track", "sync", LONG], ["xxx"]),
]


@pytest.mark.parametrize(("arguments", "named"), OTHERS, ids=lambda value: " ".join(value)[:60])
def test_a_command_is_refused_and_leaves_nothing(
    asked: Asked, made: Made, arguments: list[str], named: list[str]
) -> None:
    refused(asked, made, arguments, *named)
