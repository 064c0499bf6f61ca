"""Bounds of numbers and rules of texts: which configurations are refused, and that no key is forgotten."""

from __future__ import annotations

import os
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from dist_mem.config import ConfigError, load_config
from dist_mem.config.bounds import MOST
from dist_mem.config.constraints import RANGES
from dist_mem.config.sources import find_file
from dist_mem.memory import described_memories
from tests.config.test_config import STEPS, error_of, leaves


def test_every_whole_number_has_an_upper_bound() -> None:
    """Also those of the memories that come with the package; a memory from outside is its author's."""
    of_memories = {
        f"memory.{field.name}"
        for _, options in described_memories().values()
        for field in fields(options)
        if "int" in str(field.type).split(" | ")
    }
    assert leaves((int,)) | of_memories <= set(MOST)
    assert set(MOST) <= set(RANGES) | of_memories


@pytest.mark.parametrize("key", sorted(set(MOST) & leaves((int,))))
def test_the_bound_itself_has_a_message_only_above_it(key: str) -> None:
    def told(value: int) -> str:
        try:
            load_config([STEPS, f"{key.replace('[]', '')}={[value] if key.endswith('[]') else value}"])
        except ConfigError as error:
            return str(error)
        return ""

    if "[]." not in key:  # blocks in a list need more than one key
        assert "must be at most" not in told(MOST[key])
        assert "must be at most" in told(MOST[key] + 1) or "at most 64 bits" in told(MOST[key] + 1)


def test_options_of_a_memory_below_another_are_bounded_too() -> None:
    over = "memory={kind: infinite, over: {kind: transformer_xl, mem_len: 99999999}}"
    assert "memory.over.mem_len: is 99999999, but must be at most" in error_of(STEPS, over)


def test_a_missing_file_is_not_looked_for_all_over_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "deep" / "folder").mkdir(parents=True)
    walked: list[str] = []
    scan: Any = os.scandir
    monkeypatch.setattr(os, "scandir", lambda path=".": (walked.append(str(path)), scan(path))[1])
    with pytest.raises(ConfigError, match="no such file"):
        find_file(str(tmp_path / "absent.yaml"), [Path(), tmp_path])
    assert not [path for path in walked if "deep" in path]
