"""A path that is not there is the user's input: exit code 2 and its name, in every command and every builder."""

from __future__ import annotations

from pathlib import Path

import pytest

from dist_mem.__main__ import main
from dist_mem.cli.datasets import builder_parser
from dist_mem.cli.parser import build_parser
from dist_mem.datasets import gpt2_tokenizer
from dist_mem.datasets.recipes import builder_names
from tests.support.data_builders import build_data
from tests.support.paths import ROOT

_, COMMANDS = build_parser()
MISSING = "nowhere/absent"
CALLS: dict[str, list[list[str]]] = {
    "train": [[f"{MISSING}.yaml"], [f"{MISSING}.yaml", "--check"], ["train.steps=1", f"deepspeed={MISSING}.json"]],
    "launch": [[f"{MISSING}.yaml"], [f"{MISSING}.yaml", "--dry-run"], [f"{MISSING}.yaml", "--script", "train"]],
    "status": [[MISSING], [MISSING, "--json"]],
    "logs": [[MISSING]],
    "cancel": [[MISSING], [MISSING, "--now"]],
    "estimate": [[f"{MISSING}.yaml", "--gpu", "h100-80gb"]],
    "doctor": [[f"{MISSING}.yaml"], ["--drill", f"{MISSING}.yaml"]],
    "evaluate": [[MISSING], [MISSING, "--checkpoint", "5"], [MISSING, "--sweep", "mem_len=1", "--also", "other"]],
    "export": [[MISSING, "--out", "out"], [f"{MISSING}.yaml", "--out", "out"]],
    "checkpoints": [["list", MISSING], ["verify", MISSING], ["show", MISSING]],
    "compare": [[MISSING], [MISSING, "--split", "test"], [f"{MISSING}.json"], [MISSING, "--plot", "x.png"]],
    "lm-eval": [[MISSING, "--tasks", "a"], ["run", "--tasks", "a", "--include-path", MISSING]],
    "generate": [
        [MISSING, "--prompt", "a"],
        ["--compare", MISSING, MISSING, "--prompt", "a"],
        ["run", "--prompt-file", MISSING],
    ],
    "reproduce": [[MISSING]],
    "sweep": [[f"{MISSING}.yaml"], [f"{MISSING}.yaml", "--slurm"]],
    "arena": [[f"{MISSING}.yaml"], [f"{MISSING}.yaml", "--slurm"], [f"{MISSING}.yaml", "--plan"]],
    "dialogue": [[MISSING], [MISSING, "--wordnet", "other"]],
    "inspect": [[MISSING], [MISSING, "--book", "1"], ["run", "--text", MISSING]],
    "report": [[MISSING, "--book", "1"], ["run", "--text", MISSING]],
    "figure": [["lamemo.fig1", MISSING]],
    "read": [[MISSING, "--run", "run", "--out", "out"], [str(ROOT / "README.md"), "--run", MISSING, "--out", "out"]],
    "memory": [["show", MISSING]],
    "batch": [[MISSING, "--step", "1"]],
    "recompute": [[MISSING, "--step", "1"]],
    "data": [
        ["build", MISSING],
        ["verify", MISSING],
        ["verify", MISSING, "--split", "train"],
        ["show", MISSING],
        ["sample", MISSING],
    ],
    "track": [["sync", MISSING]],
    "check-memory": [[f"{MISSING}.py:Memory"]],
    "config": [[f"{MISSING}.yaml"], [f"{MISSING}.yaml", "--get", "run_dir"]],
}
WRITTEN = {
    ("init", "folder"),
    ("export", "out"),
    ("generate", "out"),
    ("compare", "plot"),
    ("lm-eval", "output"),
    ("reproduce", "out"),
    ("sweep", "out"),
    ("arena", "out"),
    ("report", "out"),
    ("figure", "out"),
    ("read", "out"),
    ("config", "snapshot"),
}
# Looked for after the run, see test_evaluate.py, test_keep_memory.py, ...
ELSEWHERE = {("evaluate", "also"), ("dialogue", "wordnet")}
ELSEWHERE |= {(command, "memory") for command in ("evaluate", "generate", "dialogue", "read")}


@pytest.fixture(autouse=True)
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, single_process: None) -> None:
    monkeypatch.chdir(tmp_path)


def test_every_command_and_every_path_it_takes_is_here() -> None:
    assert CALLS.keys() == COMMANDS.keys() - {"init"}  # which reads nothing
    for command, parser in COMMANDS.items():
        for action in parser._actions:
            if action.type is not Path or (command, action.dest) in WRITTEN | ELSEWHERE:
                continue
            given = [call for call in CALLS[command] if not action.option_strings or action.option_strings[0] in call]
            assert given, f"{command}: no call gives {action.dest} a path that is not there"


@pytest.mark.parametrize("call", [[command, *call] for command, calls in CALLS.items() for call in calls], ids=" ".join)
def test_a_missing_path_ends_with_code_2_and_its_name(call: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(call) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert MISSING in error


def path_options(builder: str) -> list[list[str]]:
    """Options of a builder with a path to read, that is not there."""
    actions = [each for each in builder_parser(builder)._actions if each.type is Path or each.dest == "source"]
    found = {action.option_strings[0] for action in actions} - {"--out"}
    source = ["--source", "."] if "--source" in found else []
    return [[*(source if option != "--source" else []), option, MISSING] for option in sorted(found)]


@pytest.mark.parametrize("builder", builder_names())
def test_a_builder_without_its_source_ends_with_code_2(builder: str, capsys: pytest.CaptureFixture[str]) -> None:
    for call in path_options(builder):
        assert build_data(builder, *call, "--out", "out") == 2, call
        assert capsys.readouterr().err == f"error: there is no {MISSING}\n"
        assert not Path("out").exists(), "something was begun"


@pytest.mark.parametrize("more", [[], ["--train"]])
def test_a_tokenizer_without_its_folder_ends_with_code_2(more: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert gpt2_tokenizer.main([MISSING, "--out", "out", *more]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert MISSING in error
