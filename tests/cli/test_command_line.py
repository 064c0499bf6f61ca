"""The command line: exit codes, one clear message, and what `--check` says and how quickly."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from dist_mem.__main__ import main
from dist_mem.cli.help import EXAMPLES
from dist_mem.cli.parser import build_parser, parse
from dist_mem.config import ConfigError, TrainConfig, load_config
from dist_mem.config.load import known_keys
from dist_mem.config.other_names import OTHER_NAMES
from dist_mem.data import batch_plan
from dist_mem.data.plan import make_plan
from dist_mem.data.shard import TokenizedDocument, write_split
from dist_mem.data.tokenizers.registry import save_tokenizer
from dist_mem.data.tokenizers.single_bytes import BytesTokenizer
from dist_mem.datasets.recipes import builder_names
from dist_mem.errors import UnusableError
from dist_mem.estimate import dry_run as plan
from dist_mem.runtime.signals import StopSignal
from tests.support.limits import limit
from tests.support.messages import refused
from tests.support.paths import ROOT

HEAVY = ("deepspeed", "mlflow", "webdataset")  # torch._dynamo comes with the first operation on meta tensors
SMALL = ["model.num_layers=1", "model.d_model=8", "model.num_heads=2", "model.d_inner=8", "memory.mem_len=4"]


@pytest.fixture
def data_dir(tmp_path: Path) -> Path:
    """Twenty documents of 10 to 29 bytes."""
    tokenizer = BytesTokenizer()
    save_tokenizer(tokenizer, tmp_path / "data")
    documents = [
        TokenizedDocument(f"book{size}", "a book", None, 1, size, np.arange(size, dtype=np.uint16) + ord("a"))
        for size in range(10, 30)
    ]
    write_split(
        documents,
        tmp_path / "data" / "train",
        name="tiny",
        split="train",
        tokenizer_fingerprint=tokenizer.fingerprint,
    )
    return tmp_path / "data"


def test_typo_ends_with_code_2_and_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "train.stps=5"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == "error: command line: train.stps: unknown key; did you mean train.steps?\n"


def test_only_rank_0_of_a_job_tells_of_a_typo(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank, reported in (("0", True), ("1", False)):
        monkeypatch.setenv("RANK", rank)
        assert main(["train", "train.stps=5"]) == 2
        assert bool(capsys.readouterr().err) is reported


def test_each_node_tells_of_its_own_missing_file(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"WORLD_SIZE": "4", "RANK": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    assert main(["train", "absent.yaml"]) == 2
    assert "absent.yaml" in capsys.readouterr().err


def test_typo_in_the_memory_block_is_refused_before_anything_starts(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "dist_mem.training.run", None)  # importing it would fail
    assert main(["train", "train.steps=5", "memory.mem_lenn=5"]) == 2
    assert "memory.mem_lenn: unknown key; did you mean memory.mem_len?" in capsys.readouterr().err


def module_with(run: Callable[..., int]) -> ModuleType:
    """A module with one function, which replaces one that takes long to import."""
    module = ModuleType("module")
    vars(module)["run"] = run
    return module


def test_train_hands_on_the_configuration_and_the_exit_code(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def run(config: object, *, allowed: list[str], early: StopSignal, began: float) -> int:
        assert early.received is None
        assert 0 <= time.time() - began < limit(60)
        os.kill(os.getpid(), signal.SIGTERM)  # noted from the first moment on, before torch is imported
        assert early.received == "SIGTERM"
        seen.append((config, allowed))
        return 85

    monkeypatch.setitem(sys.modules, "dist_mem.training.run", module_with(run))
    assert main(["train", "train.steps=5", "--allow", "optimizer.betas", "--allow", "model"]) == 85
    config, allowed = seen[0]
    assert config.train.steps == 5
    assert allowed == ["optimizer.betas", "model"]
    assert main(["train", "train.steps=5", "--allow", "train.global_batch_size"]) == 2


def test_overrides_may_follow_options() -> None:
    assert parse(["train", "a.yaml", "--check", "b.yaml", "x.y=1"]).config == ["a.yaml", "b.yaml", "x.y=1"]
    assert parse(["train", "--check", "a.yaml", "--world", "4", "x.y=1"]).config == ["a.yaml", "x.y=1"]
    assert parse(["evaluate", "runs/x", "--split", "test", "eval.batch_size=2"]).overrides == ["eval.batch_size=2"]


@pytest.mark.parametrize("arguments", [["train", "--chek"], ["trian"], [], ["train", "--world", "0"], ["config", "-x"]])
def test_wrong_options_end_with_code_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert "dist-mem" in capsys.readouterr().err


def refusal(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The last line that argparse prints before it ends with code 2."""
    with pytest.raises(SystemExit) as caught:
        parse(arguments)
    assert caught.value.code == 2
    return capsys.readouterr().err.splitlines()[-1]


SET = "(a key of the configuration is set with key=value)"


@pytest.mark.parametrize(
    ("arguments", "reported"),
    [
        (["train", "--steps", "100"], f"unrecognized option --steps; did you mean train.steps=100? {SET}"),
        (["train", "a.yaml", "--steps=100"], f"--steps; did you mean train.steps=100? {SET}"),
        (["train", "a.yaml", "--train.steps", "100"], f"--train.steps; did you mean train.steps=100? {SET}"),
        (["train", "a.yaml", "--train.stps", "100"], f"--train.stps; did you mean train.steps=100? {SET}"),
        (["train", "a.yaml", "--mem-len", "8"], "did you mean memory.mem_len=8 or eval.mem_len=8?"),
        (["train", "a.yaml", "--optimizer.lr"], "did you mean optimizer.lr=VALUE?"),
        (["train", "a.yaml", "--lr", "1", "--check"], "did you mean optimizer.lr=1?"),
        (["launch", "a.yaml", "--seg_len", "9"], "did you mean train.seg_len=9 or eval.seg_len=9?"),
        (["train", "a.yaml", "--chekc"], "did you mean --check?"),
        (["evaluate", "runs/x", "--chekpoint", "4"], "unrecognized option --chekpoint; did you mean --checkpoint?"),
        (
            ["evaluate", "runs/x", "--checkpoint", "lates"],
            "--checkpoint: 'lates' is not a step: give a number",
        ),
        (["generate", "runs/x", "--prompt", "a", "--tokens", "many"], "--tokens: 'many' is not a whole number"),
        (["compare", "runs/x", "--spilt", "test"], "unrecognized option --spilt; did you mean --split?"),
        (["train", "--zzz"], "error: unrecognized option --zzz"),
        (["trian", "a.yaml"], "there is no command 'trian': did you mean train?"),
        (["chekpoints", "list", "x"], "did you mean checkpoints?"),
        (["x"], "there is no command 'x': `dist-mem --help` lists all"),
        ([], "give a command; `dist-mem --help` lists them"),
        (["evaluate"], "arguments are required: run, as in: dist-mem evaluate runs/demo --split test"),
        (
            ["train", "a.yaml", "--batch-size", "4"],
            f"did you mean train.global_batch_size=4 or eval.batch_size=4? {SET}",
        ),
        (["train", "a.yaml", "--learning-rate=3e-4"], "did you mean optimizer.lr=3e-4?"),
        (["--steps", "100"], "give the command before --steps, as in: dist-mem train "),
        (["data", "buld", "sample"], "there is no 'buld': did you mean build?; there are: build, verify, show, sample"),
        (["checkpoints", "lst", "x"], "argument action: there is no 'lst': did you mean list?"),
        (["reproduce", "recall", "--seeds", "a"], "--seeds: 'a' is not a list of numbers"),
        (["data", "verify"], "are required: data, as in: dist-mem data verify data/sample"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_arguments_are_answered_with_what_was_meant(
    arguments: list[str], reported: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert reported in refusal(arguments, capsys)


def test_help_of_every_command_has_an_example_that_parses(capsys: pytest.CaptureFixture[str]) -> None:
    assert EXAMPLES.keys() == build_parser()[1].keys()
    for command, arguments in EXAMPLES.items():
        assert parse([command, *shlex.split(arguments)]).command == command
        with pytest.raises(SystemExit):
            parse([command, "--help"])
        shown = capsys.readouterr().out
        assert f"dist-mem {command} {arguments}" in shown
        assert max(map(len, shown.splitlines())) <= 100


def help_of(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as caught:
        main([*arguments, "--help"])
    assert caught.value.code == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("action", ["build", "verify", "show", "sample"])
def test_help_of_every_action_of_data_has_an_example_that_parses(
    action: str, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = help_of(["data", action], capsys)
    (example,) = re.findall(r"^example: dist-mem (.*)$", shown, re.MULTILINE)
    assert parse(shlex.split(example)).action == action
    assert max(map(len, shown.splitlines())) <= 100


@pytest.mark.parametrize("name", builder_names())
def test_help_of_every_builder_has_examples_and_fits_100_columns(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    shown = help_of(["data", "build", name], capsys)
    assert re.search(f"^    dist-mem data build {name} ", shown, re.MULTILINE)  # test_documentation.py parses them
    assert 80 < max(map(len, shown.splitlines())) <= 100


def test_a_key_without_its_equals_sign_is_explained(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "configs/demo.yaml", "train.steps", "100"]) == 2
    assert "train.steps: is a key and no file: set it with train.steps=VALUE" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["train", "launch"])
def test_without_a_configuration_an_example_is_given(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command]) == 2
    error = capsys.readouterr().err
    assert f"error: {command}: no configuration: give YAML files and key=value overrides, as in: dist-mem" in error
    example, shipped = error.split("as in: ")[1].split("\nshipped configurations:\n")
    assert all((ROOT / name).is_file() for name in (example.split()[2], *shipped.split()))
    assert "configs/memory/infinite.yaml" in shipped.split()


def test_names_of_other_libraries_lead_to_keys_that_exist() -> None:
    assert set(OTHER_NAMES.values()) <= {*known_keys(), "memory.mem_len"}


def test_a_folder_in_place_of_a_file_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.yaml").write_text("name: x\n")
    assert main(["train", str(tmp_path)]) == 2
    assert f"is a folder: give a YAML file; did you mean {tmp_path / 'config.yaml'}?" in capsys.readouterr().err


def test_a_builder_without_its_options_is_answered_with_its_own_example(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["data", "build", "pg19"])
    assert caught.value.code == 2
    example = "dist-mem data build pg19 --source pg19 --out data/pg19 --download\n"
    assert f"are required: --source, --out, as in: {example}" in capsys.readouterr().err


def test_a_seed_given_twice_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """It would count twice in the mean, and make the spread look smaller."""
    assert parse(["reproduce", "lamemo.table1", "--seeds", "0,1,2"]).seeds == [0, 1, 2]
    with pytest.raises(SystemExit) as caught:
        parse(["reproduce", "lamemo.table1", "--seeds", "0,1,0"])
    assert caught.value.code == 2
    assert "argument --seeds: 0,1,0 has a seed twice" in capsys.readouterr().err


def test_config_prints_every_key_with_its_meaning(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config"]) == 0
    text = capsys.readouterr().out
    assert "  seg_len: 64  # T, tokens\n" in text
    assert "  #   cutoffs: []  # vocabulary bins" in text
    assert "  #   param_regex: ''  # regular expression" in text
    assert "deepspeed: {zero_optimization: {stage: 2}}  # or path of a ds_config.json\n" in text


def test_printed_schema_is_the_default_configuration(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["config"])
    (tmp_path / "all.yaml").write_text(capsys.readouterr().out)
    assert load_config([str(tmp_path / "all.yaml"), "train.steps=1"]) == load_config(["train.steps=1"])


def test_config_prints_what_would_be_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "train.steps=5", "name=other"]) == 0
    text = capsys.readouterr().out
    assert "name: other\nrun_dir: runs/${name}\n" in text
    assert "mem_len: 128" in text


def test_evaluate_and_compare_hand_on_what_they_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def run(*arguments: object, **options: object) -> int:
        calls.append((arguments, options))
        return 0

    for name in ("evaluate", "compare"):
        monkeypatch.setitem(sys.modules, f"dist_mem.evaluation.{name}", module_with(run))
    assert main(["evaluate", "runs/x", "--split", "test", "--checkpoint", "5", "eval.batch_size=3"]) == 0
    assert main(["compare", "runs/x", "runs/y"]) == 0
    expected: dict[str, object] = {"split": "test", "checkpoint": 5, "overrides": ["eval.batch_size=3"]}
    expected |= {"without_memory": False, "memory": None}
    assert isinstance(calls[0][1].pop("early"), StopSignal)
    assert calls == [
        ((Path("runs/x"),), expected),
        (([Path("runs/x"), Path("runs/y")],), {"split": None, "picture": None}),
    ]


def test_prepare_verify_tells_what_is_wrong(data_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "verify", str(data_dir)]) == 0
    assert capsys.readouterr().out == f"{data_dir}: all is well\n"
    next((data_dir / "train").glob("*.tar")).unlink()
    assert main(["data", "verify", str(data_dir)]) == 1
    assert "1 problem\n" in capsys.readouterr().out


def check(*arguments: str) -> str:
    return plan.report(load_config([*SMALL, *arguments]), world_size=2)


def test_check_tells_sizes_batch_and_steps(data_dir: Path) -> None:
    text = check(
        f"data.path={data_dir}",
        "train.epochs=2",
        "train.seg_len=5",
        "train.global_batch_size=3",
        "train.micro_batch_size=2",
    )
    assert "vocabulary  257\n" in text
    assert "transformer_xl (mem_len 4): 72 bytes a lane, 144 bytes a rank" in text  # 4 rows of 8 bf16 and a count
    assert "3 of 4 = 2 ranks x 1 micro-batch x 2 lanes\n" in text
    idle = "warning 1 idle lane, 25.0% of the work; none is idle with train.global_batch_size=4 (in a new run)"
    assert idle in " ".join(text.split())
    assert "3 lanes x 1 segment of 5: 15 tokens, 1 forward and backward a rank" in text
    assert "20 documents, 390 tokens, padding 9.30%" in " ".join(text.split())  # 86 segments of 5
    assert "28.7 steps" in text
    assert "58 steps = 2.02 epochs = 789 tokens" in text
    assert "ZeRO stage 2, bf16, adamw, clipped at norm 1" in text


def test_check_without_data_says_so(tmp_path: Path) -> None:
    text = check(f"data.path={tmp_path / 'absent'}", "train.steps=7")
    assert "vocabulary  32,000 (assumed: the data is not built yet)" in text
    assert "absent: not built yet training 7 steps; the data will give the epochs" in " ".join(text.split())


def test_check_refuses_more_lanes_than_documents(data_dir: Path) -> None:
    with refused(UnusableError, "train.global_batch_size", "data.layout"):
        check(f"data.path={data_dir}", "train.steps=7", "train.global_batch_size=21")


@pytest.mark.parametrize(
    ("lanes", "micro_lanes", "world", "expected", "better"),
    [
        (16, 8, 2, (8, 1, 1, 0), 8),
        (16, 8, 1, (16, 2, 2, 0), 8),
        (16, 8, 3, (8, 1, 1, 8), 6),  # two lanes stay idle whatever is done
        (1000, 16, 63, (16, 1, 1, 8), 16),
    ],
)
def test_lanes_are_divided_among_ranks(
    lanes: int, micro_lanes: int, world: int, expected: tuple[int, ...], better: int
) -> None:
    train = TrainConfig(global_batch_size=lanes, micro_batch_size=micro_lanes, segments_per_update=1)
    assert batch_plan.batch_plan(train, world)[1:] == expected
    assert batch_plan.best_micro_lanes(train, world) == better


def lanes_of_books(*, lanes: int = 16, micro_lanes: int = 8, segments_per_update: int = 1) -> TrainConfig:
    return TrainConfig(global_batch_size=lanes, micro_batch_size=micro_lanes, segments_per_update=segments_per_update)


@pytest.mark.parametrize(
    ("lanes", "micro_lanes", "world", "num_documents", "text"),
    [
        (
            16,
            8,
            16,
            None,
            "112 idle lanes, 87.5% of the work; none is idle with train.micro_batch_size=1 or train.global_batch",
        ),
        (16, 8, 16, 100, "112 idle lanes, 87.5% of the work; none is idle with train.micro_batch_size=1 or 2 ranks"),
        (
            16,
            8,
            3,
            None,
            "8 idle lanes, 33.3% of the work; with train.micro_batch_size=6 it would be 2; none is idle with ",
        ),
        (
            16,
            8,
            40,
            320,
            "304 idle lanes, 95.0% of the work; with train.micro_batch_size=1 it would be 24; none is idle with train",
        ),
    ],
)
def test_more_than_a_fifth_of_idle_work_is_a_warning_with_what_fits(
    lanes: int, micro_lanes: int, world: int, num_documents: int | None, text: str
) -> None:
    train = lanes_of_books(lanes=lanes, micro_lanes=micro_lanes)
    waste = batch_plan.idle_work(train, world, num_documents=num_documents)
    assert waste is not None
    assert waste.label == "warning"
    assert waste.text.startswith(text)


@pytest.mark.parametrize("world", [1, 2, 3, 5, 7, 16, 40, 63])
@pytest.mark.parametrize(("lanes", "micro_lanes"), [(16, 8), (12, 5), (64, 8), (1000, 16)])
def test_what_is_said_to_fit_leaves_nothing_idle(lanes: int, micro_lanes: int, world: int) -> None:
    waste = batch_plan.idle_work(lanes_of_books(lanes=lanes, micro_lanes=micro_lanes), world)
    for key, value in re.findall(r"train\.(\w+)=(\d+)\b(?! it would)", waste.text if waste else ""):
        changed = {"global_batch_size": lanes, "micro_batch_size": micro_lanes, key: int(value)}
        assert batch_plan.idle_work(TrainConfig(**changed, segments_per_update=1), world) is None
    for ranks in re.findall(r"(\d+) ranks?$", waste.text if waste else ""):
        assert batch_plan.idle_work(lanes_of_books(lanes=lanes, micro_lanes=micro_lanes), int(ranks)) is None


def test_a_small_waste_is_no_warning() -> None:
    waste = batch_plan.idle_work(lanes_of_books(lanes=1000, micro_lanes=16), 63)
    assert waste is not None
    assert waste.label == "idle"


LAUNCHED = ["launch", "configs/demo.yaml", "launch/sites/generic.yaml", "--nodes", "2", "--dry-run", "name=new"]


def test_launch_warns_where_ranks_are_idle(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    absent = f"data.path={tmp_path / 'absent'}"
    assert main([*LAUNCHED, absent]) == 0
    assert "warning: with 16 ranks, 112 idle lanes, 87.5% of the work" in capsys.readouterr().err
    assert main([*LAUNCHED, absent, "train.global_batch_size=128"]) == 0
    assert capsys.readouterr().err == ""


def test_launch_refuses_more_lanes_than_documents(data_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*LAUNCHED, f"data.path={data_dir}", "train.global_batch_size=128"]) == 2
    assert "train.global_batch_size = 128, but only 20 documents" in capsys.readouterr().err


def test_epochs_come_to_steps_rounded_up() -> None:
    lengths = [100] * 8
    documents = make_plan(lengths, num_lanes=4, seg_len=30, seed=0)  # 4 segments a document
    for epochs, steps in ((1, 8), (0.5, 4), (0.51, 5)):
        config = load_config([f"train.epochs={epochs}", "train.global_batch_size=4", "train.micro_batch_size=2"])
        assert batch_plan.total_steps(config, documents) == steps
        config.schedule.warmup_steps = steps
        assert batch_plan.total_steps(config, documents) == steps
        config.schedule.warmup_steps = steps + 1
        with pytest.raises(ConfigError, match=rf"schedule.warmup_steps: {steps + 1} is more than the {steps} steps of"):
            batch_plan.total_steps(config, documents)


def test_check_imports_nothing_heavy(data_dir: Path) -> None:
    code = (
        "import sys; from dist_mem.__main__ import main; code = main(sys.argv[1:]);"
        f"print([name for name in {HEAVY} if name in sys.modules]); sys.exit(code)"
    )
    arguments = ["train", "configs/pg19_small.yaml", f"data.path={data_dir}", "--check", "--world", "2"]
    command = [sys.executable, "-c", code, *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[-1] == "[]"


def test_help_and_typos_are_answered_without_torch() -> None:
    code = (
        "import sys; from dist_mem.__main__ import main\n"
        "try: main(sys.argv[1:])\n"
        "except SystemExit: pass\n"
        "assert 'torch' not in sys.modules"
    )
    for arguments in (["--help"], ["train", "--help"], ["config"]):
        subprocess.run([sys.executable, "-c", code, *arguments], cwd=ROOT, capture_output=True, check=True)
