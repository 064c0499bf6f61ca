"""How a text becomes a value: by the type of its key, the same in files, overrides, and configurations written back."""

import re
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml
from hypothesis import HealthCheck, assume, given, reject, settings
from hypothesis import strategies as st

from dist_mem.cli.arguments import place
from dist_mem.cli.commands.data import builder_parser
from dist_mem.cli.parser import build_parser, parse
from dist_mem.config import Config, ConfigError, load_config, read_config, to_yaml
from dist_mem.config.blocks import value_at
from dist_mem.config.check import check_tree, flatten, is_optional, item_schema
from dist_mem.config.docs import meanings
from dist_mem.config.keys import is_path, keys_of
from dist_mem.config.sources import read_saved, read_sources
from dist_mem.datasets.recipes import builder_names
from dist_mem.memory import memory_options
from dist_mem.studies.study import load_study
from tests.support.messages import refused

STEPS = "train.steps=10"
NULLS = ("null", "Null", "NULL", "~", "")
# What some parser takes for a number, a date, a word, a comment, a list or an interpolation.
WORDS = [
    *("0010", "2024_01_05", "1:30", "0777", "1e3", "1.50", "0x10", "0o17", "0b11", "+5", "-0", ".5", "1__0e3", "1_0e3"),
    *("yes", "No", "on", "true", "TRUE", "null", "Null", "~", "=", "<<", ".inf", "-.INF", ".nan", "2020-01-01"),
    *("a #b", "#a", "a: b", "a:", "- a", "[a]", "[a", "{a: b}", "'a'", '"a"', "!!int 3", "&a", "*a", "|", "%a", "@a"),
    *("12e03", "10", "-7", "1.5", "a\tb", " a", "a ", "5 # five", "\u0661", "1\u00b2", "\ufeffa", "\u2028"),
]
TEXTS = (
    st.sampled_from(WORDS)
    | st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
    | st.text("0123456789_:.eE+-x#~ ", max_size=8)
)
SETTINGS = settings(max_examples=100, suppress_health_check=list(HealthCheck), deadline=None)


def keys_with(*kinds: Any) -> list[str]:
    """The keys of the schema with these types, or lists of them, outside of lists of blocks."""
    wanted = {kind | None for kind in kinds} | set(kinds)
    found = {name: item_schema(key.schema) or key.schema for name, key in keys_of(Config).items() if "[" not in name}
    return [name for name, schema in found.items() if schema in wanted]


def is_list(key: str) -> bool:
    return item_schema(keys_of(Config)[key].schema) is not None


def read(*arguments: str) -> dict[str, Any]:
    return flatten(read_sources(arguments)[0].tree)


def as_plain(text: str) -> str | None:
    """The text as YAML without quotes; None if it needs some."""
    try:
        node = yaml.compose(f"k: {text}")
    except yaml.YAMLError:
        return None
    value = node.value[0][1] if isinstance(node, yaml.MappingNode) and len(node.value) == 1 else None
    return text if isinstance(value, yaml.ScalarNode) and (value.style, value.value) == (None, text) else None


def as_yaml(key: str, scalar: str) -> str:
    """A file that gives one key this scalar."""
    scalar = f"\n- {scalar}" if is_list(key) else f" {scalar}"
    *blocks, last = key.split(".")
    return (
        "".join(f"{'  ' * depth}{name}:\n" for depth, name in enumerate(blocks))
        + "  " * len(blocks)
        + (f"{last}:" + scalar.replace("\n", "\n" + "  " * len(blocks)) + "\n")
    )


@SETTINGS
@given(key=st.sampled_from(keys_with(str)), text=TEXTS)
def test_a_text_key_keeps_the_letters_that_were_written(key: str, text: str, tmp_path: Path) -> None:
    assume("${" not in text and not text.startswith("~") and text != "???")
    file, found = tmp_path / "a.yaml", f"{key}[0]" if is_list(key) else key
    is_null = is_optional(keys_of(Config)[key].schema) and text in NULLS
    file.write_text(as_yaml(key, yaml.safe_dump(text, default_style='"').strip()), encoding="utf-8")
    assert read(str(file))[found] == text
    plain = as_plain(text)
    if plain is not None:
        file.write_text(as_yaml(key, plain), encoding="utf-8")
        assert read(str(file))[found] == (None if is_null else text)
    if not is_list(key) and not re.fullmatch(r"'.*'|\".*\"", text, re.DOTALL):
        assert read(f"{key}={text}")[key] == (None if is_null else text)


def test_quotes_around_an_override_are_those_of_a_file() -> None:
    for text, expected in {"'00 #1'": "00 #1", '"a\\tb"': "a\tb", "'a'b": "'a'b", "'a": "'a", "''": ""}.items():
        assert read(f"name={text}")["name"] == expected


@SETTINGS
@given(key=st.sampled_from(keys_with(int, float)), text=TEXTS)
def test_a_number_key_takes_a_decimal_number_or_refuses_the_text(key: str, text: str) -> None:
    schema = item_schema(keys_of(Config)[key].schema) or keys_of(Config)[key].schema
    is_whole = re.fullmatch(r"[-+]?(0|[1-9][0-9]*)", text)
    is_number = re.fullmatch(r"[-+]?((0|[1-9][0-9]*)(\.[0-9]*)?|\.[0-9]+)([eE][-+]?[0-9]+)?", text)
    assume("${" not in text and text[:1] not in ("'", '"') and (is_number or not is_list(key)))
    value = read(f"{key}=[{text}]" if is_list(key) else f"{key}={text}")[f"{key}[0]" if is_list(key) else key]
    if is_whole or is_number:
        assert type(value) is (int if is_whole else float) and float(value) == float(text)
    elif isinstance(value, float):
        assert re.fullmatch(r"[-+]?\.inf|\.nan", text.lower())  # refused by the limits of every key
    else:
        assert value == (None if text in NULLS else {"true": True, "false": False}.get(text.lower(), text))
    is_accepted = not list(check_tree(schema, value))
    assert is_accepted == (
        (is_optional(schema) and text in NULLS)
        or (is_whole is not None and abs(int(text)) < 2**63)
        or (float in (schema, *get_args(schema)) and isinstance(value, float))
    )


@pytest.mark.parametrize("text", ["0010", "1_000", "1:30", "0x10", "-007", "0.1_0", "00.5", "5 # five"])
def test_a_refused_number_is_shown_as_written(text: str) -> None:
    for key in ("train.steps", "optimizer.lr", "train.max_grad_norm"):
        with refused(ConfigError, f"command line: {key}: is {text!r}"):
            load_config([STEPS, f"{key}={text}"])


@pytest.mark.parametrize(
    ("text", "advice"), [("'400'", "without quotes"), ("'0400'", "decimal"), ("1" * 5000, "characters")]
)
def test_a_text_in_place_of_a_number_is_refused_with_its_cause(text: str, advice: str, tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(f"train: {{steps: {text}}}", encoding="utf-8")
    for source in (f"train.steps={text}", str(tmp_path / "a.yaml")):
        with refused(ConfigError, "train.steps: is ", advice):
            load_config([source])


def is_usable(text: str) -> bool:
    """Whether no rule of all texts refuses or changes it; some keys have more, as those of names and paths."""
    wrong = r"\$\{|^\?\?\?$|^[~'\"]|[\x00-\x1f\x7f]"
    return bool(text.strip()) and text.isprintable() and not re.search(wrong, text)


@settings(SETTINGS, max_examples=8)
@given(texts=st.lists(TEXTS.filter(is_usable), min_size=8, max_size=8))
def test_a_configuration_that_is_written_reads_back_equal(texts: list[str], tmp_path: Path) -> None:
    """By the program, and by any parser of YAML."""
    keys = ["name", "data.path", *(f"tracking.{name}" for name in ("uri", "experiment", "run_name"))]
    keys += [f"launch.{name}" for name in ("partition", "account", "qos")]
    try:
        config = load_config([STEPS, *(f"{key}={text}" for key, text in zip(keys, texts, strict=True))])
    except ConfigError:
        reject()
    (tmp_path / "config.yaml").write_text(to_yaml(config), encoding="utf-8")
    assert read_config(tmp_path / "config.yaml") == config
    for written in (yaml.safe_load(to_yaml(config)), read_saved(tmp_path / "config.yaml")):
        found = flatten(written)
        for key, text in zip(keys, texts, strict=True):
            assert found[key] == (None if is_optional(keys_of(Config)[key].schema) and text in NULLS else text)


def test_options_of_a_memory_have_the_types_that_it_declares(tmp_path: Path) -> None:
    """Also of one outside of the package, below another memory, or of one block of the model."""
    (tmp_path / "mine.py").write_text(
        "from dataclasses import dataclass\nfrom dist_mem.memory.transformer_xl import TransformerXL\n"
        "class Mine(TransformerXL):\n"
        "    @dataclass\n    class Options(TransformerXL.Options):\n        word: str = 'a'\n"
    )
    mine = f"{tmp_path}/mine.py:Mine"
    blocks = {"memory": ("1e3", "null"), "memory.default": ("0010", "[a"), "memory.over": ("yes", "a #b")}
    for block, text in [(block, text) for block, texts in blocks.items() for text in texts]:
        over = ["memory.kind=infinite"] if block == "memory.over" else []
        given_words = [STEPS, *over, f"{block}.kind={mine}", f"{block}.word={text}"]
        config = load_config(given_words, memory_options=memory_options)
        assert value_at({"memory": config.memory}, f"{block}.word") == text
        (tmp_path / "config.yaml").write_text(to_yaml(config), encoding="utf-8")
        assert load_config([str(tmp_path / "config.yaml")], memory_options=memory_options) == config
    with refused(ConfigError, "memory.mem_len"):
        load_config([STEPS, f"memory.kind={mine}", "memory.mem_len=0010"], memory_options=memory_options)


def test_a_source_that_asks_for_a_value_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files with and without quotes, items of a list, overrides, and a variable of the environment."""
    asking = {"name: ???": "name", "name: '???'": "name", "launch:\n  setup:\n  - a\n  - ???": "launch.setup[1]"}
    asking |= {"memory:\n  mem_len: ???": "memory.mem_len", "deepspeed:\n  dump_state: ???": "deepspeed.dump_state"}
    for content, key in asking.items():
        (tmp_path / "a.yaml").write_text(content)
        with refused(ConfigError, f"a.yaml: {key}: is ???"):
            load_config([str(tmp_path / "a.yaml"), STEPS])
    monkeypatch.setenv("ASKED", "???")
    for value in ("???", "${oc.env:ASKED}"):
        with refused(ConfigError, "command line: name: "):
            load_config([STEPS, f"name={value}"])


@pytest.mark.parametrize(
    ("key", "text"),
    [
        ("train.threads", "0012"),
        ("train.threads", "many"),
        ("optimizer.lr", "1_0"),
        ("train.compile", "1"),
        ("train.max_grad_norm", "infinity"),
    ],
)
def test_a_variable_of_the_environment_is_read_by_the_same_rules(
    key: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GIVEN", text)
    with refused(ConfigError, f"command line: {key}: "):
        load_config([STEPS, f"{key}=${{oc.env:GIVEN}}"])
    assert load_config([STEPS, "name=${oc.env:GIVEN}"]).name == text


@pytest.mark.parametrize("text", ["1_0", "1e3", "TRUE", "0x1f", "1.50"])
def test_the_default_of_a_variable_keeps_its_letters_or_is_refused(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NOT_GIVEN", raising=False)
    assert load_config([STEPS, f"name=${{oc.env:NOT_GIVEN,'{text}'}}"]).name == text
    try:
        found = load_config([STEPS, f"name=a-${{oc.env:NOT_GIVEN,{text}}}"]).name
    except ConfigError as error:
        assert f"'{text}'" in str(error)
    else:
        assert found == f"a-{text}"


def test_sweeps_keep_the_letters_of_their_values(tmp_path: Path) -> None:
    (tmp_path / "sweep.yaml").write_text(
        "title: 0010\ntrain: [tracking.run_name=0010]\ndata: 0012\n"
        "grid: {data.path: [0777, 1e3], optimizer.lr: [1e-3, 0.002]}\n"
        "skip: [{data.path: 1e3, optimizer.lr: 0.001}]\nrows: {0010: [data.path=1_0]}\n"
    )
    study = load_study(str(tmp_path / "sweep.yaml"))
    assert (study.title, study.train, study.data) == ("0010", ["tracking.run_name=0010"], "0012")
    assert study.trained_rows == {
        "path0777-lr0.001": ["data.path=0777", "optimizer.lr=0.001"],
        "path0777-lr0.002": ["data.path=0777", "optimizer.lr=0.002"],
        "path1e3-lr0.002": ["data.path=1e3", "optimizer.lr=0.002"],
        "0010": ["data.path=1_0"],
    }


def test_files_with_a_byte_order_mark_are_read(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text('{"dump_state": true}', encoding="utf-8-sig")
    (tmp_path / "a.json").write_text('{"name": "0010", "deepspeed": "ds.json"}', encoding="utf-8-sig")
    (tmp_path / "b.yaml").write_text("train: {steps: 3}", encoding="utf-16")
    config = load_config([str(tmp_path / "a.json"), str(tmp_path / "b.yaml")])
    assert (config.name, config.deepspeed, config.train.steps) == ("0010", {"dump_state": True}, 3)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    return str(tmp_path / "home")


def test_a_path_begins_with_the_home_directory_where_a_tilde_is_written(tmp_path: Path, home: str) -> None:
    """In files and overrides, for every key of the schema that is a path, and for no other."""
    for key, found in keys_of(Config).items():
        if "[" in key or (item_schema(found.schema) or found.schema) not in (str, str | None):
            continue
        (tmp_path / "a.yaml").write_text(as_yaml(key, "~/${name}/x"))
        name = f"{key}[0]" if is_list(key) else key
        expected = f"{home if is_path(Config, key) else '~'}/${{name}}/x"
        assert read(str(tmp_path / "a.yaml"))[name] == expected
        assert read(f"{key}=['~/${{name}}/x']" if is_list(key) else f"{key}=~/${{name}}/x")[name] == expected
    stages = read("data.curriculum=[{path: ~/a, until: 3}]", "deepspeed.zero_optimization.offload_param.nvme_path=~/n")
    assert stages["data.curriculum[0].path"] == f"{home}/a"
    assert stages["deepspeed.zero_optimization.offload_param.nvme_path"] == f"{home}/n"
    assert read("memory.over.kind=~/m.py:Mine", "tracking.uri=sqlite:///~/m.db") == {
        "memory.over.kind": f"{home}/m.py:Mine",
        "tracking.uri": f"sqlite:///{home}/m.db",
    }


def test_every_key_that_names_a_place_is_marked_as_a_path() -> None:
    """A new key whose meaning speaks of a folder, a file, a path or an address is a path, or a name in one."""
    for key, found in keys_of(Config).items():
        meaning = meanings(found.owner)[found.field.name]
        if (item_schema(found.schema) or found.schema) in (str, str | None) and not found.metadata.choices:
            named = re.search(
                r"\b(director(y|ies)|folder|path|address|file|PATH|sqlite)\b",
                re.sub(r"docs/\S+|\S+\.yaml", "", meaning),
            )
            assert not named or is_path(Config, key) or found.metadata.in_path, key


def test_a_tilde_that_stands_for_no_home_is_refused(tmp_path: Path, home: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "a.yaml").write_text("train: {steps: 1}\nrun_dir: ~/runs/${name}\n")
    config = load_config(["~/a.yaml", "name=~x"])
    assert (config.run_dir, config.name) == (f"{home}/runs/~x", "~x")
    with refused(ConfigError, "data.path", "no home directory"):
        load_config([STEPS, "data.path=~nobody-here/x"])
    monkeypatch.setenv("PLACE", "~/books")
    with refused(ConfigError, "data.path", "oc.env"):
        load_config([STEPS, "data.path=${oc.env:PLACE}"])


def test_every_option_that_is_a_path_expands_a_tilde(home: str) -> None:
    """Also behind `=`, where no shell does."""
    _, commands = build_parser()
    parsers = [*commands.values(), *(builder_parser(name) for name in builder_names())]
    for parser in parsers:
        for action in parser._actions:
            if action.type in (Path, place):
                assert str(parser._get_value(action, "~/x")) == f"{home}/x", (parser.prog, action.dest)
    assert str(parse(["export", "runs/a", "--out=~/x"]).out) == f"{home}/x"
