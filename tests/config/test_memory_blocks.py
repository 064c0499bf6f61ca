"""A memory for each block of the model: as a map or a list, merged over files, and refused where it fits no model."""

import re
from itertools import permutations
from pathlib import Path

import pytest

from dist_mem.block import model_spec
from dist_mem.config import Config, ConfigError, docs, load_config
from dist_mem.estimate.dry_run import check_model
from dist_mem.memory import memory_class, memory_kinds, memory_options
from dist_mem.memory.base import Memory
from dist_mem.memory.infini import Infini
from dist_mem.memory.none import NoMemory
from dist_mem.memory.transformer_xl import TransformerXL
from dist_mem.model import MemoryLM
from tests.support.messages import refused
from tests.support.paths import EXAMPLES, ROOT

SIZES = ["train.steps=1", "train.seg_len=4", "model.num_layers=3", "model.d_model=8", "model.num_heads=2"]
MAP = "{default: none, 1: {kind: transformer_xl, mem_len: 8}}"


def load(*arguments: str) -> Config:
    return load_config([*SIZES, "model.d_inner=8", *arguments], memory_options=memory_options, check=check_model)


def kinds(config: Config) -> list[type]:
    return [type(memory) for memory in MemoryLM(model_spec(config, 16)).memories()]


@pytest.mark.parametrize(
    "given",
    [
        MAP,
        "{default: {kind: none}, '1': {kind: transformer_xl, mem_len: 8}}",
        "[none, {kind: transformer_xl, mem_len: 8}, none]",
        "{0: none, 1: {kind: transformer_xl, mem_len: 8}, 2: none}",
        "{kind: per_block, default: none, 1: {kind: transformer_xl, mem_len: 8}}",
    ],
)
def test_every_form_builds_the_same_blocks(given: str, tmp_path: Path) -> None:
    (tmp_path / "map.yaml").write_text(f"memory: {given}", encoding="utf-8")
    for argument in (f"memory={given}", str(tmp_path / "map.yaml")):
        config = load(argument)
        assert kinds(config) == [NoMemory, TransformerXL, NoMemory]
        assert MemoryLM(model_spec(config, 16)).memories()[1].options.mem_len == 8


def test_a_later_source_changes_one_block_or_all(tmp_path: Path) -> None:
    (tmp_path / "map.yaml").write_text(f"memory: {MAP}", encoding="utf-8")
    given = str(tmp_path / "map.yaml")
    assert MemoryLM(model_spec(load(given, "memory.1.mem_len=12"), 16)).memories()[1].options.mem_len == 12
    assert kinds(load(given, "memory.1=infini")) == [NoMemory, Infini, NoMemory]
    assert kinds(load(given, "memory.2.kind=infini")) == [NoMemory, TransformerXL, Infini]
    assert kinds(load(given, "memory.default=infini")) == [Infini, TransformerXL, Infini]
    assert kinds(load(given, "memory={kind: infini}")) == [Infini, Infini, Infini]


def test_one_memory_for_all_becomes_the_default_of_a_map_and_keeps_its_options(tmp_path: Path) -> None:
    (tmp_path / "one.yaml").write_text("memory: {kind: transformer_xl, mem_len: 8}", encoding="utf-8")
    given = str(tmp_path / "one.yaml")
    for default, mem_len in (("memory.default=transformer_xl", 8), ("memory.default.mem_len=12", 12)):
        first, other, _ = MemoryLM(model_spec(load(given, default, "memory.1=none"), 16)).memories()
        assert (first.options.mem_len, type(other)) == (mem_len, NoMemory)
    assert kinds(load(given, "memory.default=none", "memory.1=infini")) == [NoMemory, Infini, NoMemory]
    with refused(ConfigError, "memory.default"):
        load(given, "memory.1.mem_len=12")
    with refused(ConfigError, "memory.default"):
        load(given, "memory.1=none")


@pytest.mark.parametrize(
    ("overrides", "built"),
    [
        (["memory.default=infini", "memory.default.rule=linear"], [Infini, Infini, Infini]),
        (["memory.default.rule=linear", "memory.default=infini"], [Infini, Infini, Infini]),
        (["memory=[none, infini, none]", "memory.1.rule=linear"], [NoMemory, Infini, NoMemory]),
        (["memory={default: none, 1: infini}", "memory.1.rule=linear"], [NoMemory, Infini, NoMemory]),
        ([f"memory={MAP}", "memory.1=none"], [NoMemory, NoMemory, NoMemory]),
        ([f"memory={MAP}", "memory.1=infini"], [NoMemory, Infini, NoMemory]),
        (["memory=[none, {kind: transformer_xl, mem_len: 8}, none]", "memory.1=none"], [NoMemory, NoMemory, NoMemory]),
        ([f"memory={MAP}", "memory={default: infini, 1: none}"], [Infini, NoMemory, Infini]),
    ],
)
def test_a_memory_named_beside_its_options_is_the_one_that_is_built(overrides: list[str], built: list[type]) -> None:
    assert kinds(load(*overrides)) == built


def test_a_kind_on_the_command_line_replaces_that_of_a_file_and_takes_options(tmp_path: Path) -> None:
    (tmp_path / "map.yaml").write_text("memory: {default: none, 1: {kind: lamemo, mem_len: 32}}", encoding="utf-8")
    changed = load(str(tmp_path / "map.yaml"), "memory.1=transformer_xl", "memory.1.mem_len=16")
    assert kinds(changed) == [NoMemory, TransformerXL, NoMemory]


def test_a_file_of_a_memory_replaces_another_of_its_kind() -> None:
    """Options that the later one did not name stayed: gated_deltanet.yaml after deltanet.yaml trained DeltaNet."""
    demo = str(ROOT / "configs" / "demo.yaml")
    files = sorted(map(str, (ROOT / "configs" / "memory").glob("*.yaml")))
    memories = {file: load_config([demo, file], memory_options=memory_options).memory for file in files}
    pairs = [pair for pair in permutations(files, 2) if len({memories[file]["kind"] for file in pair}) == 1]
    assert len(pairs) >= 30
    for pair in pairs:
        assert load_config([demo, *pair], memory_options=memory_options).memory == memories[pair[1]], pair


def test_blocks_of_equal_memories_share_what_equal_blocks_share() -> None:
    alike = "{kind: transformer_xl, mem_len: 8}"
    first, other, last = MemoryLM(model_spec(load(f"memory=[{alike}, none, {alike}]"), 16)).memories()
    shared = {id(parameter) for parameter in first.parameters()} & {id(parameter) for parameter in last.parameters()}
    assert shared
    assert not shared & {id(parameter) for parameter in other.parameters()}


@pytest.mark.parametrize(
    ("given", "key"),
    [
        ("{default: none, 3: infini}", "memory.3"),
        ("{0: none, 1: none}", "memory.2"),
        ("{default: none, 1: {kind: transformr_xl}}", "memory.1.kind"),
        ("{default: none, 1: {kind: infini, mem_len: 3}}", "memory.1.mem_len"),
        ("{default: none, 1: {kind: transformer_xl, mem_len: 0}}", "memory.1.mem_len"),
        ("{default: none, 1: 5}", "memory.1"),
        ("{default: infini, 01: none}", "memory.01"),
        ("{default: none, mem_len: 5}", "memory.mem_len"),
        ("{kind: none, 1: infini}", "memory.1"),
        ("{default: none, 2: {kind: lamemo, mem_len: 8}}", "memory.2"),
    ],
)
def test_what_fits_no_model_is_refused_with_its_key(given: str, key: str) -> None:
    with refused(ConfigError, f"{key}: "):
        load(f"memory={given}")


@pytest.mark.parametrize(
    ("below", "key"),
    [
        ("{kind: transformer_xl, mem_len: 6}", "over.mem_len"),
        ("{kind: titans, variant: alone}", "over.variant"),
        ("{kind: linear, over: {kind: transformer_xl, mem_len: 6}}", "over.over.mem_len"),
        ("{kind: linear, over: {kind: linear, over: {kind: transformer_xl, mem_len: 6}}}", "over.over.over.mem_len"),
        ("{kind: linear, over: {kind: compressive, mem_len: 6, compression_rate: 4}}", "over.over.mem_len"),
        ("{kind: infinite, over: {kind: transformer_xl, mem_len: 6}}", "over.over.mem_len"),
    ],
)
@pytest.mark.parametrize("where", ["memory", "memory.1"])
def test_errors_of_memories_below_others_have_the_key_of_the_configuration(where: str, below: str, key: str) -> None:
    given = f"{{kind: infinite, over: {below}}}"
    with refused(ConfigError, f"{where}.{key}") as caught:
        load(f"memory={given if where == 'memory' else f'{{default: none, 1: {given}}}'}")
    keys = set(re.findall(r"memory[.\w]*\.(?:\w*mem_len|variant)\b", str(caught.value)))
    assert {each.rpartition(".")[0] for each in keys} == {f"{where}.{key}".rpartition(".")[0]}


@pytest.mark.parametrize("file", ["memory.py", "./memory.py"])
def test_a_file_named_memory_is_no_key(file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "memory.py").write_text((EXAMPLES / "averages.py").read_text(encoding="utf-8"), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    with refused(ConfigError, "data.cut", f"memory.1.kind = {file}:Averages"):
        load("data.cut=end", f"memory={{default: none, 1: {{kind: '{file}:Averages'}}}}")


def test_the_page_names_all_memories_that_must_be_in_every_block() -> None:
    """Those that `build` refuses in one block: whose class has a stem, or which stand over such a memory."""
    with_stem = {kind for kind in memory_kinds() if memory_class(kind).stem is not Memory.stem}
    for kind in sorted(with_stem - {"infinite"}):
        for block in (f"{{kind: {kind}}}", f"{{kind: infinite, over: {{kind: {kind}}}}}"):
            with refused(ConfigError, "memory.2", "give every block this memory"):
                load(f"memory={{default: none, 2: {block}}}")
    (sentence,) = re.findall(r"\.\s([^.]*must be in every block[^.]*)\.", docs.MEMORY)
    assert set(re.findall(r"`(\w+)`", sentence)) == with_stem - {"infinite"}
