"""docs/reference/config.md is what the program says of its keys, and it says something of each."""

import difflib
import re

import pytest

from dist_mem.__main__ import main
from dist_mem.config import Config
from dist_mem.config.check import all_keys, block_of, fields_of
from dist_mem.config.deepspeed_keys import HANDED_ON, REFUSED
from dist_mem.config.docs import meanings
from dist_mem.memory import describe_memories
from tests.support.paths import ROOT

PAGE = (ROOT / "docs" / "reference" / "config.md").read_text(encoding="utf-8")
ROWS = re.findall(r"^\| `([^`]+)` \| (.*) \| `[^`]*` \| .* \| (?:fixed|`--allow`|) \|$", PAGE, re.MULTILINE)


def test_page_in_docs_is_what_the_command_prints(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "--markdown"]) == 0
    printed = capsys.readouterr().out
    listed = "\n".join(difflib.unified_diff(PAGE.splitlines(), printed.splitlines(), lineterm="", n=0))
    assert printed == PAGE, f"{listed}\nto accept this: dist-mem config --markdown > docs/reference/config.md"


def test_every_key_has_a_row_with_a_meaning() -> None:
    """A comment that a formatter has moved off the line of its key would be lost without a word."""
    rows = dict(ROWS)
    blocks = {name for name, schema in (fields_of(Config) or {}).items() if block_of(schema)}
    keys = set(all_keys(Config)) - {"memory", "deepspeed"} - blocks
    options = {f"memory.{name}" for _, schema in describe_memories().values() for name in fields_of(schema) or {}}
    assert rows.keys() == keys | options
    assert [key for key, meaning in rows.items() if not meaning] == []
    assert [name for name, meaning in meanings(Config).items() if not meaning] == []


def test_every_key_of_deepspeed_is_yours_or_set_or_refused() -> None:
    section = PAGE.partition("\n## deepspeed\n")[2]
    assert [key for key in (*HANDED_ON, *REFUSED) if f"`{key}`" not in section] == []
