"""docs/reference/config.md is what the program says of its keys, and it says something of each."""

from __future__ import annotations

import difflib
import re

import pytest

from dist_mem.__main__ import main
from dist_mem.config import Config
from dist_mem.config.check import all_keys, block_of, fields_of
from dist_mem.config.deepspeed_keys import HANDED_ON, REFUSED
from dist_mem.config.docs import config_page, meanings
from dist_mem.memory import described_memories
from tests.support.paths import ROOT

PAGE = ROOT / "docs" / "reference" / "config.md"
ROW = re.compile(r"^\| `([^`]+)` \| (.*) \| `([^`]*)` \| (.*) \| (fixed|`--allow`|) \|$", re.MULTILINE)


@pytest.fixture(scope="module")
def page() -> str:
    return config_page(described_memories())


def test_page_in_docs_is_up_to_date(page: str) -> None:
    changes = difflib.unified_diff(PAGE.read_text(encoding="utf-8").splitlines(), page.splitlines(), lineterm="", n=0)
    listed = "\n".join(changes)
    assert not listed, f"{listed}\nto accept this: dist-mem config --markdown > docs/reference/config.md"


def test_command_prints_the_page(page: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "--markdown"]) == 0
    assert capsys.readouterr().out == page


def test_every_key_has_a_row_with_a_meaning(page: str) -> None:
    """A comment that a formatter has moved off the line of its key would be lost without a word."""
    rows = {key: meaning for key, meaning, *_ in ROW.findall(page)}
    blocks = {name for name, schema in (fields_of(Config) or {}).items() if block_of(schema)}
    keys = set(all_keys(Config)) - {"memory", "deepspeed"} - blocks
    options = {f"memory.{name}" for _, schema in described_memories().values() for name in fields_of(schema) or {}}
    assert rows.keys() == keys | options
    assert [key for key, meaning in rows.items() if not meaning] == []
    assert [name for name, meaning in meanings(Config).items() if not meaning] == []


def test_limits_that_only_bound_allocation_are_not_listed(page: str) -> None:
    values = {key: values for key, _, _, values, _ in ROW.findall(page)}
    assert values["train.seed"] == "integer >= 0"
    assert values["train.activation_checkpointing_share"] == "number > 0 and <= 1"
    assert [key for key, text in values.items() if re.search(r"<= [\d,]*,\d{3}", text)] == []


def test_every_key_of_deepspeed_is_yours_or_set_or_refused(page: str) -> None:
    section = page.partition("\n## deepspeed\n")[2]
    assert [key for key in (*HANDED_ON, *REFUSED) if f"`{key}`" not in section] == []
