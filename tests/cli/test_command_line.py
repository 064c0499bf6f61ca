"""The command line: exit codes, one clear message, and ranks that would be idle."""

import math
import os
import re
import shlex
import signal
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from dist_mem.__main__ import main
from dist_mem.cli.arguments import divide_runs
from dist_mem.cli.parser import build_parser, parse
from dist_mem.config import Config, ConfigError, TrainConfig, change_config, load_config
from dist_mem.config.check import suggest
from dist_mem.config.load import known_keys
from dist_mem.config.other_names import OTHER_NAMES
from dist_mem.data import batch_plan
from dist_mem.data.plan import make_plan
from dist_mem.datasets.recipes import builder_names
from dist_mem.errors import EXIT_USAGE, UnusableError
from dist_mem.memory import memory_kinds, memory_options
from dist_mem.runtime.signals import StopSignal
from tests.support.limits import limit
from tests.support.messages import refused, said
from tests.support.paths import ROOT


@pytest.mark.parametrize(
    ("ranks", "wrong", "is_told"),
    [
        ({"WORLD_SIZE": "2", "RANK": "0"}, "train.stps=5", True),
        ({"WORLD_SIZE": "2", "RANK": "1"}, "train.stps=5", False),
        ({"WORLD_SIZE": "4", "RANK": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}, "absent.yaml", True),
    ],
)
def test_only_rank_0_tells_of_a_typo_and_each_node_of_its_own_missing_file(
    ranks: dict[str, str],
    wrong: str,
    is_told: bool,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in ranks.items():
        monkeypatch.setenv(name, value)
    assert main(["train", wrong]) == 2
    error = capsys.readouterr().err
    assert wrong.partition("=")[0] in error if is_told else not error


@pytest.mark.parametrize("is_agreed", [False, True])
def test_an_error_of_one_rank_alone_is_printed_by_it(
    is_agreed: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody printed it: rank 1 of a node counted on rank 0, which had none."""
    error = UnusableError("a file that one rank cannot read")
    error.is_agreed = is_agreed

    def run(*_: Any, **__: Any) -> int:
        raise error

    monkeypatch.setattr("dist_mem.evaluation.evaluate.run", run)
    for name, value in {"RANK": "1", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    assert main(["evaluate", "runs/a"]) == EXIT_USAGE
    assert capsys.readouterr().err == ("" if is_agreed else "error: a file that one rank cannot read\n")


def test_train_hands_on_the_configuration_an_early_signal_and_the_exit_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """A signal is noted from the first moment on, before torch is imported."""
    handed = []

    def run(config: Config, *, allowed: list[str], early: StopSignal, began: float) -> int:
        assert 0 <= time.time() - began < limit(60)
        os.kill(os.getpid(), signal.SIGTERM)
        handed.append((config.train.steps, allowed, early.received))
        return 85

    quick = ModuleType("run")  # in place of one that takes long to import
    vars(quick)["run"] = run
    monkeypatch.setitem(sys.modules, "dist_mem.training.run", quick)
    assert main(["train", "train.steps=5", "--allow", "optimizer.betas", "--allow", "model"]) == 85
    assert handed == [(5, ["optimizer.betas", "model"], "SIGTERM")]


def test_overrides_may_follow_options() -> None:
    assert parse(["train", "a.yaml", "--check", "b.yaml", "x.y=1"]).config == ["a.yaml", "b.yaml", "x.y=1"]
    assert parse(["train", "--check", "a.yaml", "--world", "4", "x.y=1"]).config == ["a.yaml", "x.y=1"]
    assert parse(["evaluate", "runs/x", "--split", "test", "eval.batch_size=2"]).overrides == ["eval.batch_size=2"]
    assert parse(["reproduce", "lamemo.table1", "--seeds", "0,1,2"]).seeds == [0, 1, 2]


@pytest.mark.parametrize("option", ["--rows", "--seeds"])
@pytest.mark.parametrize("value", ["", ","])
def test_an_empty_list_is_not_taken_for_all(option: str, value: str, capsys: pytest.CaptureFixture[str]) -> None:
    """As a variable of a script that is not set."""
    with pytest.raises(SystemExit) as ended:
        main(["sweep", "study.yaml", option, value])
    assert ended.value.code == 2
    said(capsys.readouterr().err, option, "names none")


@pytest.mark.parametrize("command", ["figure lamemo.fig1", "report --book 1"])
def test_runs_and_overrides_may_follow_options_and_a_run_may_have_any_name(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("runs/lr=0.1").mkdir(parents=True)
    name, *more = command.split()
    options = parse([name, *more, "runs/a", "--split", "test", "eval.blocks=true", "runs/lr=0.1"])
    assert divide_runs(options) == ([Path("runs/a"), Path("runs/lr=0.1")], ["eval.blocks=true"])


def test_every_help_has_an_example_that_parses(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    parser, commands = build_parser()
    assert max(map(len, parser.format_help().splitlines())) <= 100
    actions, builders = ("build", "verify", "show", "sample"), builder_names()
    words = [*([name] for name in commands), *(["data", name] for name in actions)]
    for command in [*words, *(["data", "build", name] for name in builders)]:
        with pytest.raises(SystemExit, match="0"):
            main([*command, "--help"])
        shown = capsys.readouterr().out
        _, *examples = re.findall(rf"\bdist-mem ({' '.join(command)}\b.*)$", shown, re.MULTILINE)  # the usage is first
        assert examples and max(map(len, shown.splitlines())) <= 100, command
        if command == ["data", "build"]:
            assert all(re.search(rf"^  {name} +\w.*\.$", shown, re.MULTILINE) for name in builders), shown
        if command[-1] not in builders:  # whose examples test_documentation.py parses
            assert parse(shlex.split(examples[-1])).command == command[0]


@pytest.mark.parametrize("command", ["train", "launch"])
def test_without_a_configuration_an_example_is_given(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command]) == 2
    error = capsys.readouterr().err
    assert f"error: {command}: no configuration: give YAML files and key=value overrides, as in: dist-mem" in error
    example, shipped = error.split("as in: ")[1].split("\nshipped configurations:\n")
    assert all((ROOT / name).is_file() for name in (example.split()[2], *shipped.split()))
    assert "configs/memory/infinite.yaml" in shipped.split()


@pytest.mark.parametrize("given", [[], ["train.steps=5", "name=other", "memory.kind=transformer_xl"]])
def test_a_printed_configuration_is_read_back_equal(
    given: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["config", *given]) == 0
    text = capsys.readouterr().out
    (tmp_path / "all.yaml").write_text(text)
    steps, options = ([], memory_options) if given else (["train.steps=1"], None)
    read = load_config([str(tmp_path / "all.yaml"), *steps], memory_options=options)
    assert read == load_config([*given, *steps], memory_options=options)
    assert "run_dir: runs/${name}\n" in text or not given


def test_names_of_other_libraries_lead_to_keys_that_exist() -> None:
    options = {f"memory.{name}" for kind in memory_kinds() for name in memory_options({"kind": kind})}
    assert set(OTHER_NAMES.values()) <= {*known_keys(), *options}


# Of several answers:
SEVERAL = {"adaptive", "head_dim", "num_v_heads", "norm_eps", "gradient_accumulation_steps"}


def test_an_unknown_key_is_answered_with_that_of_the_page_of_names() -> None:
    num_names = 0
    for line in (ROOT / "docs" / "reference" / "names.md").read_text(encoding="utf-8").splitlines():
        cells = [re.findall("`([^`]+)`", cell) for cell in line.split(" | ")]
        if len(cells) != 2 or len(cells[0]) != len(cells[1]):
            continue
        for name, ours in zip(*cells, strict=True):
            key = ours.partition(":")[0]
            if re.fullmatch(r"[\w-]+", name) and name not in SEVERAL and name not in known_keys():
                num_names += 1
                assert f"did you mean {key}?" in suggest(name, "", [], known_keys()) or key.endswith(f".{name}"), name
    assert num_names > 50


@pytest.mark.parametrize(
    ("given", "ours"),
    [("memory.reset", "train.reset"), ("train.tbptt", "train.bptt_segments"), ("bptt_depth", "train.bptt_segments")],
)
def test_what_others_call_a_window_or_a_reset_is_answered_with_our_key(given: str, ours: str) -> None:
    with refused(ConfigError, given, f"{ours}?"):
        load_config(["train.steps=1", f"{given}=3"], memory_options=memory_options)


def idle_lanes(lanes: int, micro_lanes: int, world: int) -> int:
    train = TrainConfig(global_batch_size=lanes, micro_batch_size=micro_lanes, segments_per_update=1)
    return batch_plan.batch_plan(train, world).idle_lanes


@pytest.mark.parametrize("world", [1, 2, 3, 5, 7, 16, 40, 63])
@pytest.mark.parametrize(("lanes", "micro_lanes"), [(16, 8), (12, 5), (64, 8), (1000, 16)])
def test_what_is_said_to_fit_leaves_nothing_idle(lanes: int, micro_lanes: int, world: int) -> None:
    train = TrainConfig(global_batch_size=lanes, micro_batch_size=micro_lanes, segments_per_update=1)
    found, waste = batch_plan.batch_plan(train, world), batch_plan.idle_work(train, world)
    assert found.lanes_per_rank == found.groups * micro_lanes == math.ceil(lanes / world / micro_lanes) * micro_lanes
    assert found.backwards == found.groups and found.idle_lanes == found.lanes_per_rank * world - lanes
    share = found.idle_lanes / (lanes + found.idle_lanes)
    assert (waste.label if waste else "") == ("warning" if share > 0.2 else "idle" if share else "")
    text = waste.text if waste else ""
    best = min(idle_lanes(lanes, micro, world) for micro in range(1, micro_lanes + 1))
    if 0 < best < found.idle_lanes:
        assert re.search(rf"=(\d+) it would be {best}\b", text)
    for micro in re.findall(r"micro_batch_size=(\d+)", text):
        assert idle_lanes(lanes, int(micro), world) == best
    for more in re.findall(r"global_batch_size=(\d+)", text):
        assert idle_lanes(int(more), micro_lanes, world) == 0
        fewer = batch_plan.idle_work(train, world, num_documents=int(more) - 1)
        assert fewer and "global_batch_size" not in fewer.text
    for ranks in re.findall(r"(\d+) ranks?$", text):
        assert idle_lanes(lanes, micro_lanes, int(ranks)) == 0
    assert not text or "none is idle with" in text


LAUNCHED = ["launch", "configs/demo.yaml", "launch/sites/generic.yaml", "--nodes", "2", "--dry-run", "name=new"]


def test_launch_warns_where_ranks_are_idle(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    absent = f"data.path={tmp_path / 'absent'}"
    assert main([*LAUNCHED, absent]) == 0
    assert "warning: with 16 ranks, 112 idle lanes, 87.5% of the work" in capsys.readouterr().err
    assert main([*LAUNCHED, absent, "train.global_batch_size=128"]) == 0
    assert capsys.readouterr().err == ""


def test_a_launch_of_more_lanes_than_documents_is_refused(
    books: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    overrides = [f"data.path={books}", f"run_dir={tmp_path}", "train.global_batch_size=128"]
    assert main([*LAUNCHED, *overrides]) == 2
    said(capsys.readouterr().err, "train.global_batch_size", "data.layout")


def test_epochs_come_to_steps_rounded_up() -> None:
    lengths = [100] * 8
    documents = make_plan(lengths, num_lanes=4, seg_len=30, seed=0)  # 4 segments a document
    for epochs, steps in ((1, 8), (0.5, 4), (0.51, 5)):
        config = load_config([f"train.epochs={epochs}", "train.global_batch_size=4", "train.micro_batch_size=2"])
        assert batch_plan.total_steps(config.train, config.schedule, documents) == steps
        config = change_config(config, {"schedule.warmup_steps": steps})
        assert batch_plan.total_steps(config.train, config.schedule, documents) == steps
        config = change_config(config, {"schedule.warmup_steps": steps + 1})
        with refused(ConfigError, f"schedule.warmup_steps: {steps + 1}"):
            batch_plan.total_steps(config.train, config.schedule, documents)
