"""Values of `${oc.env:...}` are used, and neither shown nor stored; a resume notices where they have changed."""

import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from dist_mem.config import ConfigError, as_tree, load_block, load_config, read_config, save_config, to_yaml
from dist_mem.config.check import block_of, fields_of, flatten, types_of
from dist_mem.config.environment_values import HidingStream, hide
from dist_mem.config.keys import FREE, keys_of
from dist_mem.config.resume_rules import changed_keys, check_changes, checksums_to_keep, rule_of
from dist_mem.config.schema import Config
from dist_mem.memory import memory_options
from dist_mem.runtime.network_interface import free_port
from dist_mem.tracking.mlflow.client import connect
from tests.support.forked_ranks import Program
from tests.support.jobs import finish, write_config
from tests.support.messages import refused
from tests.support.ranks import launcher_environment

SECRET = "c4n4ry-9"
ALL = flatten(as_tree(Config()))


def load(*arguments: str) -> Config:
    return load_config(["train.steps=5", *arguments], memory_options=memory_options)


@pytest.mark.parametrize("key", sorted(key for key in ALL if not key.startswith("memory.") or key == "memory.kind"))
def test_no_error_of_a_configuration_shows_a_value(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every key, with a text, a number and a block where they may not be; also of a block that is read alone."""
    name = key.partition(".")[0]
    schema = block_of((fields_of(Config) or {})[name])
    readers: list[Any] = [load, *([lambda word: load_block(schema, name, [word])] if schema else [])]
    for value, how in [(SECRET, "${oc.env:HIDDEN}"), ("-87", "${oc.decode:${oc.env:HIDDEN}}")]:
        monkeypatch.setenv("HIDDEN", value)
        for read in readers:
            try:
                read(f"{key}={how}")
            except ConfigError as error:
                assert value not in str(error) and "87" not in str(error)
                assert name in str(error)


@pytest.mark.parametrize(
    "arguments",
    [
        ["train.micro_batch_size=${oc.env:HIDDEN}", "train.global_batch_size=4"],
        ["train.seg_len=${oc.env:HIDDEN}", "eval.every=1", "eval.seg_len=3"],
        ["model.num_heads=${oc.env:HIDDEN}", "model.d_model=64"],
        ["memory.num_basis=${oc.env:HIDDEN}", "memory.kind=infinite"],
    ],
)
def test_a_message_about_two_keys_shows_the_interpolation(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HIDDEN", "87")
    with refused(ConfigError, arguments[0].partition("=")[0], "${oc.env:HIDDEN}") as caught:
        load(*arguments)
    assert "87" not in str(caught.value)


def test_output_shows_the_interpolation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HIDDEN", f"{SECRET}\nand 'more'")
    monkeypatch.setenv("COUNT", "1234")
    load("tracking.run_name=${oc.env:HIDDEN}", "train.global_batch_size=${oc.env:COUNT}")
    assert hide(f"a{SECRET}b, {'and ' + repr(chr(39))}") == f"a${{oc.env:HIDDEN}}b, {'and ' + repr(chr(39))}"
    assert hide(repr(f"{SECRET}\nand 'more'")) == '"${oc.env:HIDDEN}"'
    assert hide("1234 steps") == "1234 steps"  # a number is no secret
    monkeypatch.setenv("FOLDER", "data")
    load("tracking.run_name=${oc.env:FOLDER}")
    assert hide("no metadata in data/sample") == "no metadata in ${oc.env:FOLDER}/sample"
    assert HidingStream(sys.stdout).encoding == sys.stdout.encoding


def test_an_export_has_numbers_and_kinds_but_no_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HIDDEN", SECRET)
    monkeypatch.setenv("LANES", "12")
    monkeypatch.setenv("KIND", "compressive")
    text = to_yaml(
        load("name=${oc.env:HIDDEN}", "train.global_batch_size=${oc.env:LANES}", "memory.kind=${oc.env:KIND}"),
        resolve=True,
    )
    assert SECRET not in text and "oc.env" not in text
    assert "global_batch_size: 12" in text and "kind: compressive" in text and "name: '***'" in text


def test_an_export_can_be_read_whichever_texts_came_from_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HIDDEN", "abcd")
    groups = "optimizer.groups=[{param_regex: '${oc.env:HIDDEN}', lr: 1}]"
    keys = [key for key, found in keys_of(Config).items() if "[" not in key and str in types_of(found.schema)]
    free = [key for key in keys if not keys_of(Config)[key].metadata.choices and key != "model.pretrained"]
    config = load(groups, *(f"{key}=${{oc.env:HIDDEN}}" for key in free))
    (tmp_path / "config.yaml").write_text(to_yaml(config, resolve=True), encoding="utf-8")
    read = read_config(tmp_path / "config.yaml")
    assert read.optimizer.groups[0].param_regex == "abcd" and read.name == "***"


@pytest.mark.parametrize(
    ("key", "before", "after"),
    [
        ("train.seed", "87", "88"),
        ("train.segments_per_update", "87", "88"),
        ("model.dropout", "0.5", "0.25"),
        ("model.dropout", "0", "0.25"),
    ],
)
@pytest.mark.parametrize("is_default", [False, True])
def test_a_resume_notices_another_value_of_the_same_interpolation(
    key: str, before: str, after: str, is_default: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    how = f"${{oc.env:HIDDEN,{before}}}" if is_default else "${oc.env:HIDDEN}"
    if not is_default:
        monkeypatch.setenv("HIDDEN", before)
    config = load(f"{key}={how}")
    save_config(config, tmp_path / "config.yaml")
    saved, then = read_config(tmp_path / "config.yaml"), checksums_to_keep(config)
    others = {**then, "unheard.of": "0"}  # a checkpoint may come from anybody
    assert changed_keys(saved, load(f"{key}={how}"), others) == []
    monkeypatch.setenv("HIDDEN", after)
    assert changed_keys(saved, load(f"{key}={before}"), then) == []  # the same, otherwise written
    assert rule_of(key) != FREE
    with refused(ConfigError, f"{key}: is {how}") as caught:
        check_changes(saved, load(f"{key}={how}"), then=then)
    assert not re.search(f"{before}|{after}", str(caught.value).replace(how, ""))


def test_a_checkpoint_has_no_checksum_of_what_may_change(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HIDDEN", SECRET)
    config = load("tracking.uri=https://${oc.env:HIDDEN}@host", "data.path=https://host/?sig=${oc.env:HIDDEN}")
    assert checksums_to_keep(config) == {}


@pytest.mark.timeout(600)  # eight commands
def test_a_run_shows_and_stores_none_of_its_secrets(books: Path, tmp_path: Path) -> None:
    """Training with MLflow, a resume, an evaluation, an export; then all output and every byte of every file."""
    data = tmp_path / f"data-{SECRET}1"
    data.symlink_to(books)
    write_config(tmp_path / "c.yaml", Path("data-${oc.env:DATA}"), Path("run"), {"eval": {"every": 2}})
    keys = [
        *("tracking.mlflow=true", "tracking.uri=sqlite:///${oc.env:STORE}.db"),
        *("data.cache=${oc.env:CACHE}", "data.stage_dir=${oc.env:CACHE}", "watchdog.seconds=${oc.env:PATIENCE}"),
    ]
    secrets = {"DATA": f"{SECRET}1", "STORE": f"{SECRET}2", "CACHE": f"{tmp_path}/{SECRET}3", "PATIENCE": "300"}
    connect(f"sqlite:///{tmp_path}/{SECRET}2.db")  # its tables, which take longer than a short job waits
    (tmp_path / "t.txt").write_text("Snow fell all night on the mill.")
    reported: list[str] = []

    def run(*arguments: str, code: int = 0) -> None:
        environment = {**os.environ, **launcher_environment(0, 1, free_port()), **secrets}
        codes, text = finish([Program(arguments, cwd=tmp_path, environment=environment)])
        reported.append(text)
        assert codes == [code], text

    for steps in (2, 4):
        run("train", "c.yaml", *keys, f"train.steps={steps}")
    run("train", "c.yaml", *keys, "train.steps=4", "--check")
    run("evaluate", "run", "--split", "test")
    run("export", "run", "--out", "exported")
    run("report", "run", "--text", "t.txt", "--no-removals", "--out", "page.html")
    run("track", "sync", "run", keys[1])
    data.unlink()
    run("train", "c.yaml", *keys, "train.steps=6", code=2)
    assert "error: data-${oc.env:DATA}/tokenizer.json is missing" in reported[-1]
    assert SECRET not in "".join(reported)
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(files) > 20 and any(path.name == f"{SECRET}2.db" for path in files)
    assert [path for path in files if SECRET.encode() in path.read_bytes()] == []
