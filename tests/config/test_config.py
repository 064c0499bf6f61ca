"""Configurations: merging, overrides, values, interpolation, and what is written back. Typos: test_config_typos.py."""

import itertools
import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from dist_mem.config import (
    Config,
    ConfigError,
    DataConfig,
    build_block,
    deepspeed_block,
    load_block,
    load_config,
    read_config,
    save_config,
    to_yaml,
)
from dist_mem.config.blocks import value_at
from dist_mem.config.check import block_of, is_optional, item_schema
from dist_mem.config.keys import keys_of
from dist_mem.memory import memory_options
from dist_mem.memory.none import NoMemory
from dist_mem.memory.transformer_xl import TransformerXL
from tests.support.configs import STEPS
from tests.support.messages import refused
from tests.support.paths import ROOT

CONFIGS = sorted(
    str(path.relative_to(ROOT))
    for path in (ROOT / "configs").glob("**/*.yaml")
    if path.parent.name not in ("tables", "sweeps", "arena")
)


@dataclass
class Mixed:
    size: int | str | None = None


def write(path: Path, text: str) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return str(path)


@pytest.mark.parametrize("name", CONFIGS)
def test_every_config_of_the_project_loads(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    # Others hold a memory and what it needs, or what is added to a pretrained model.
    is_run = "train" in yaml.safe_load(Path(name).read_text(encoding="utf-8")) and "/memory/" not in name
    model = ["configs/pretrained/llama_3.2_1b.yaml"] if "/pretrained/" in name and not is_run else []
    load_config([*model, name, *([] if is_run or model else [STEPS])], memory_options=memory_options)


def test_a_class_keeps_its_options_under_another_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So a run's own copy of the file has them too."""
    monkeypatch.chdir(tmp_path)
    source = "from dist_mem.memory.transformer_xl import TransformerXL\nclass Mine(TransformerXL): ...\n"
    copy = write(tmp_path / "memory" / "2-mine.py", source)
    write(tmp_path / "mine.py", source)
    mine = "{kind: mine.py:Mine, mem_len: 7}"
    for name, key, memory in (("all.yaml", "memory", mine), ("map.yaml", "memory.default", f"{{default: {mine}}}")):
        write(tmp_path / name, f"memory: {memory}\n")
        for path in ("./mine.py", copy):
            memories = load_config([name, STEPS, f"{key}.kind={path}:Mine"], memory_options=memory_options).memory
            assert memories.get("default", memories)["mem_len"] == 7
    with refused(ConfigError, "mine.py"):
        load_config(["all.yaml", STEPS, "memory.kind=mine.py:Other"], memory_options=memory_options)
    assert load_config(["all.yaml", STEPS, "memory.kind=transformer_xl"]).memory == {"kind": "transformer_xl"}


def test_later_files_and_then_overrides_win(tmp_path: Path) -> None:
    first = write(tmp_path / "first.yaml", "train: {steps: 1, global_batch_size: 4, micro_batch_size: 2}\nname: first")
    second = write(tmp_path / "second.yaml", "train: {steps: 2, global_batch_size: 8}")
    config = load_config(["train.steps=3", first, second])
    assert (config.train.steps, config.train.global_batch_size, config.train.micro_batch_size) == (3, 8, 2)
    assert config.name == "first"


def test_second_file_is_found_beside_the_first_and_under_configs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "elsewhere" / "first.yaml", "train: {steps: 1}")
    write(tmp_path / "elsewhere" / "memory" / "short.yaml", "memory: {kind: transformer_xl, mem_len: 3}")
    write(tmp_path / "configs" / "wide.yaml", "model: {d_model: 8}")
    config = load_config(["elsewhere/first.yaml", "memory/short.yaml", "wide.yaml"])
    assert (config.memory["mem_len"], config.model.d_model) == (3, 8)


def test_a_second_file_is_found_beside_a_first_one_in_the_home_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    write(tmp_path / "mine" / "run.yaml", "train: {steps: 1}")
    write(tmp_path / "mine" / "more.yaml", "name: more")
    assert load_config(["~/mine/run.yaml", "more.yaml"]).name == "more"


def test_missing_file_names_a_near_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "configs" / "memory" / "lamemo.yaml", "")
    (tmp_path / "run").mkdir()
    write(tmp_path / "run" / "config.yaml", "")
    lamemo = "did you mean configs/memory/lamemo.yaml?"
    for name, near in (("configs/memory/lamenmo.yaml", lamemo), ("lamemo", lamemo), ("run", "run/config.yaml")):
        with refused(ConfigError, near):
            load_config([name])
    os.mkfifo("pipe.yaml")
    with refused(ConfigError, "pipe.yaml", "a pipe"):
        load_config(["pipe.yaml"])
    for name in ("train.steps", "train.stps", "deepspeed=absent.json"):
        with refused(ConfigError, name.removeprefix("deepspeed=")):
            load_config([name, STEPS])


@pytest.mark.parametrize(
    ("override", "key", "value"),
    [
        ("train.epochs=null", "train.epochs", None),
        ("optimizer.betas=[0.5,0.6]", "optimizer.betas", [0.5, 0.6]),
        ("optimizer.betas.1=0.7", "optimizer.betas", [0.9, 0.7]),
        ("optimizer.betas[0]=0.7", "optimizer.betas", [0.7, 0.999]),
        ("model.adaptive.cutoffs=[20]", "model.adaptive.cutoffs", [20]),
        ("data.path=a=b", "data.path", "a=b"),
    ],
)
def test_override_is_read_as_yaml(override: str, key: str, value: Any) -> None:
    assert value_at(yaml.safe_load(to_yaml(load_config([STEPS, override]))), key) == value


def test_single_items_of_a_list_are_overridden(tmp_path: Path) -> None:
    base = write(
        tmp_path / "a.yaml",
        "optimizer: {groups: [{param_regex: u, lr: 1}, {param_regex: v, lr: 2}]}\ntrain: {steps: 1}",
    )
    config = load_config([base, "optimizer.groups.1.lr=3"])
    assert [(group.param_regex, group.lr) for group in config.optimizer.groups] == [("u", 1), ("v", 3)]
    with refused(ConfigError, "command line: optimizer.groups[2]"):
        load_config([base, "optimizer.groups.2.lr=3"])


NONE = {"kind": "none", **asdict(NoMemory.Options())}


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (["memory=none", "memory.mem_len=64"], "memory.mem_len"),
        (["memory=[none, infini]", "memory.default=none"], "memory.default"),
        (["optimizer=nonsense", "optimizer.lr=6"], "optimizer.lr"),
        (["optimizer.groups=[]", "optimizer.groups.lr=1"], "optimizer.groups.lr"),
        (["memory.default=none", "memory.²=infini"], "memory.²"),
        (["optimizer.groups.².lr=1"], "optimizer.groups"),
    ],
)
def test_no_override_is_dropped_for_another(overrides: list[str], key: str) -> None:
    with refused(ConfigError, "command line", key):
        load_config([STEPS, *overrides], memory_options=memory_options)


def test_another_memory_leaves_the_options_of_the_first_behind(tmp_path: Path) -> None:
    base = write(tmp_path / "a.yaml", "memory: {kind: transformer_xl, mem_len: 5}\ntrain: {steps: 1}")
    assert load_config([base, "memory.kind=none"], memory_options=memory_options).memory == NONE
    assert load_config([base, "memory.mem_len=6"]).memory == {"kind": "transformer_xl", "mem_len": 6}


def test_memory_options_are_written_out_with_their_defaults() -> None:
    config = load_config([STEPS, "memory.kind=transformer_xl"], memory_options=memory_options)
    assert config.memory == {"kind": "transformer_xl", **asdict(TransformerXL.Options())}
    linked = load_config([STEPS, "memory.mem_len=${train.seg_len}"], memory_options=memory_options)
    assert "mem_len: ${train.seg_len}" in to_yaml(linked)
    assert memory_options(linked.memory)["mem_len"] == linked.train.seg_len


def test_build_block_completes_and_checks_a_block() -> None:
    assert build_block(TransformerXL.Options, {"mem_len": 7}, "memory") == TransformerXL.Options(mem_len=7)
    with refused(ConfigError, "memory.mem_len"):
        build_block(TransformerXL.Options, {"mem_len": "long"}, "memory")
    assert build_block(Mixed, {"size": 3}, "memory").size == 3
    with refused(ConfigError, "memory.size"):
        build_block(Mixed, {"size": 1.5}, "memory")


# Each is refused with its key, or with that of the second table.
WRONG = [
    *(f"train.global_batch_size={value}" for value in ("many", "1.5", "1e3", "true", "null")),
    *("train=5", "memory=3", "train.activation_checkpointing=1"),
    *("optimizer.betas=0.9", "optimizer.lr=.nan", "optimizer.lr=.inf", "model.dropout=1.0", "train.threads=-1"),
    *("train.max_grad_norm=0", "eval.every=-1", "model.norm=prre", "train.precision=bf6", "optimizer.kind=adamW"),
    *("train.tf32=true", "train.micro_batch_size=17", "optimizer.momentum=0.9", "schedule.warmup_steps=11"),
    *("schedule.decay_share=0.1", "schedule.decay_shape=linear", "train.reset_steps=3"),
    "train.activation_checkpointing=segments",
    *("data.train_split=test", "memory.kind=transformer", "memory.mem_len=long"),
]
WRONG_TOGETHER = {
    "optimizer.betas=[0.9,x]": "optimizer.betas[1]",
    "train.epochs=2": "train.steps",
    "schedule={kind: wsd, warmup_steps: 3, decay_steps: 8}": "schedule.decay_steps",
    "schedule={kind: wsd, warmup_steps: 5, decay_share: 0.9}": "schedule.decay_share",
    "schedule={kind: wsd, warmup_steps: 9}": "schedule.decay_share",
    "schedule={kind: wsd, decay_share: 0.1, decay_steps: 8}": "schedule.decay_share",
    "train.steps=null": "train.epochs",
    "model.num_heads=3": "model.d_model",
    "optimizer.groups=[{param_regex: '('}]": "optimizer.groups[0].param_regex",
    "optimizer.groups=[{lr: 1}]": "optimizer.groups[0].param_regex",
    "optimizer.groups=[{pretrained: true}]": "optimizer.groups[0].pretrained",
    "optimizer.groups=[{param_regex: x, rule: muon}]": "optimizer.groups[0].rule",
    "optimizer.muon.lr=0.1": "optimizer.muon",
    "model.adaptive={cutoffs: [5, 3]}": "model.adaptive.cutoffs",
    "model.adaptive={cutoffs: [5], tie_projections: [true]}": "model.adaptive",
}


@pytest.mark.parametrize("override", [*WRONG, *WRONG_TOGETHER])
def test_wrong_value_is_refused_with_its_key(override: str) -> None:
    key = WRONG_TOGETHER.get(override, override.partition("=")[0])
    with refused(ConfigError, f"command line: {'' if override in WRONG_TOGETHER else key}", key) as caught:
        load_config([STEPS, override], memory_options=memory_options)
    assert "\n" not in str(caught.value)


def test_fp16_without_zero_is_refused() -> None:
    for block in ("{zero_optimization: {stage: 0}}", "{zero_optimization: {stage: auto}}"):
        with refused(ConfigError, "train.precision", "deepspeed.zero_optimization.stage=1"):
            load_config([STEPS, "train.precision=fp16", f"deepspeed={block}"])
    assert load_config([STEPS, "train.precision=fp16"]).train.precision == "fp16"


def test_the_test_split_is_not_for_training() -> None:
    with refused(ConfigError, "eval.split"):
        load_config([STEPS, "eval.split=test", "eval.every=5"])
    assert load_config([STEPS, "eval.split=test"]).eval.split == "test"


def test_all_problems_are_reported_at_once_each_with_its_file(tmp_path: Path) -> None:
    first = write(tmp_path / "first.yaml", "train: {global_batch_sise: 1}\nmodel: {d_model: wide}")
    second = write(tmp_path / "second.yaml", "optimizer: {groups: [{param_regex: u, Lr: 1}]}")
    with refused(ConfigError, first, second, "command line") as caught:
        load_config([first, second, "dat.path=x"])
    assert [str(problem.where) for problem in caught.value.problems] == [
        f"{first}:1",
        f"{first}:2",
        f"{second}:1",
        "command line",
    ]


def test_a_value_out_of_range_is_reported_with_the_file_that_set_it_last(tmp_path: Path) -> None:
    first = write(tmp_path / "first.yaml", "train: {steps: 5, seg_len: 8}")
    second = write(tmp_path / "second.yaml", "train: {seg_len: 0}")
    with refused(ConfigError, f"{second}: train.seg_len"):
        load_config([first, second])


@pytest.mark.parametrize(
    ("text", "named"),
    [
        (b"- a list", "must hold keys and values"),
        *((text, "cannot be read as YAML") for text in (b"train: [1", b"name: ${", b"name: run\xff\n")),
        (b"train: {steps: 1}\ntrain: {steps: 2}", "duplicate key train"),
    ],
)
def test_unreadable_file_is_named(tmp_path: Path, text: bytes, named: str) -> None:
    """Issue 5: of a checkpoint that a disk has damaged, rank 0 must not fail alone at it."""
    (tmp_path / "broken.yaml").write_bytes(text)
    with refused(ConfigError, f"{tmp_path / 'broken.yaml'}: ", named):
        load_config([str(tmp_path / "broken.yaml")])


def test_environment_is_read_but_never_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DIST_MEM_TEST_URI", "https://user:secret@host")
    monkeypatch.setenv("DIST_MEM_TEST_LANES", "12")
    monkeypatch.delenv("DIST_MEM_TEST_UNSET", raising=False)
    lanes, data = "${oc.env:DIST_MEM_TEST_LANES,4}", "${oc.env:DIST_MEM_TEST_UNSET,data/here}"
    uri = "tracking.uri=${oc.env:DIST_MEM_TEST_URI}"
    config = load_config([STEPS, uri, f"train.global_batch_size={lanes}", f"data.path={data}"])
    assert (config.tracking.uri, config.train.global_batch_size) == ("https://user:secret@host", 12)
    assert config.data.path == "data/here"
    saved = tmp_path / "run" / "config.yaml"
    save_config(config, saved)
    text = saved.read_text()
    assert "secret" not in text
    assert "uri: ${oc.env:DIST_MEM_TEST_URI}" in text and "run_dir: runs/${name}" in text
    assert read_config(saved) == config
    assert list(saved.parent.iterdir()) == [saved]


def test_a_block_that_another_block_refers_to_must_fit_it(tmp_path: Path, subtests: pytest.Subtests) -> None:
    """Every block for the next three, in a configuration and in what a run has saved."""
    blocks = {
        name: key.schema
        for name, key in keys_of(Config).items()
        if block_of(key.schema) and not item_schema(key.schema)
    }
    names = [*blocks]
    for (place, name), ahead in itertools.product(enumerate(names), (1, 2, 3)):
        other = names[(place + ahead) % len(names)]
        if is_optional(blocks[name]) and is_optional(blocks[other]):
            continue  # the other one is null, as this may be
        with subtests.test(name=name, other=other):
            (tmp_path / "config.yaml").write_text(f"{name.replace('.', ': {')}: ${{{other}}}{'}' * name.count('.')}\n")
            with refused(ConfigError, name):
                load_config([STEPS, f"{name}=${{{other}}}"])
            if "." not in name:
                with refused(ConfigError, name):
                    load_block(blocks[name], name, [], saved=tmp_path / "config.yaml")


def test_a_block_that_is_read_alone_may_refer_to_keys_that_nothing_gives(tmp_path: Path) -> None:
    """A study refused to build `data.path=data/${model.kind}`, which its trainings accept."""
    written = "data.path=data/${name}-${model.kind}-${train.seg_len}"
    path = load_config([STEPS, written]).data.path
    assert load_block(DataConfig, "data", [written]).path == path == "data/run-transformer-64"
    saved = tmp_path / "config.yaml"
    saved.write_text("data: {path: 'data/${name}'}\ntrain: {seed: {of: another version}}\n", encoding="utf-8")
    assert load_block(DataConfig, "data", [], saved=saved).path == "data/run"


def test_a_number_that_another_key_refers_to_has_the_type_of_that_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GIVEN", "2")
    given = ["model.num_layers=${oc.env:GIVEN}", "optimizer.weight_decay=${model.num_layers}", "name=${model.dropout}"]
    config = load_config([STEPS, *given, "launch.time=${model.num_layers}"])
    assert repr((config.optimizer.weight_decay, config.name, config.launch.time)) == "(2.0, '0.1', '2')"
    for key in ("preflight", "train.steps"):
        with refused(ConfigError, key):
            load_config([STEPS, f"{key}=${{model.dropout}}"])


def test_an_interpolation_of_nothing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DIST_MEM_TEST_UNSET", raising=False)
    for key, named in (("data.path", "oc.env:DIST_MEM_TEST_UNSET"), ("train.seg_len", "train.lens")):
        with refused(ConfigError, f"command line: {key}", named):
            load_config([STEPS, f"{key}=${{{named}}}"])


def test_deepspeed_block_may_be_a_file_beside_the_config(tmp_path: Path) -> None:
    zero = {"stage": 3, "reduce_bucket_size": 5e8}
    block = {"train_batch_size": "auto", "bf16": {"enabled": "auto"}}
    write(tmp_path / "ds_config.json", json.dumps({**block, "zero_optimization": {**zero, "overlap_comm": "auto"}}))
    base = write(tmp_path / "a.yaml", "deepspeed: ds_config.json\ntrain: {steps: 1}")
    config = load_config([base, "deepspeed.wall_clock_breakdown=true"])
    expected = {"zero_optimization": zero, "wall_clock_breakdown": True}
    assert deepspeed_block(config) == expected
    assert yaml.safe_load(to_yaml(config))["deepspeed"] == expected


def test_deepspeed_file_replaces_the_block_and_a_block_merges(tmp_path: Path) -> None:
    stage = {"zero_optimization": {"stage": 2}}
    for override, expected in (
        (f"deepspeed={write(tmp_path / 'ds.json', '{}')}", {}),
        ("deepspeed.dump_state=true", {**stage, "dump_state": True}),
        ("deepspeed.zero_optimization.offload_optimizer=null", stage),
    ):
        assert deepspeed_block(load_config([STEPS, override])) == expected


def test_overrides_win_over_a_deepspeed_file_of_the_same_command_line(tmp_path: Path) -> None:
    block = {"zero_optimization": {"stage": 3, "overlap_comm": True}}
    file = f"deepspeed={write(tmp_path / 'ds.json', json.dumps(block))}"
    for overrides in ([file, "deepspeed.zero_optimization.stage=1"], ["deepspeed.zero_optimization.stage=1", file]):
        zero = deepspeed_block(load_config([STEPS, *overrides]))["zero_optimization"]
        assert zero == {"stage": 1, "overlap_comm": True}


def test_problem_in_a_deepspeed_file_names_that_file(tmp_path: Path) -> None:
    wrong = str(tmp_path / "ds.json")
    for text, named in (
        ('{"data_types": {"buffer": "fp32"}}', f"{wrong}: deepspeed.data_types.buffer"),
        ('{"dump_state": true, "dump_state": false}', "dump_state"),
    ):
        write(Path(wrong), text)
        with refused(ConfigError, wrong, named):
            load_config([STEPS, f"deepspeed={wrong}"])
