"""The titles of memories, by which tables and pictures name runs."""

from dist_mem.config import load_config
from dist_mem.config.memory_blocks import describe_memory
from dist_mem.memory import memory_class, memory_kinds, memory_options, memory_title
from tests.support.paths import ROOT

PRESETS = sorted((ROOT / "configs" / "memory").glob("*.yaml"))


def test_every_shipped_memory_has_a_title_of_its_own() -> None:
    """Six of them are `memory.kind: linear`, and every table called them so."""
    titles: dict[str, list[str]] = {}
    for path in PRESETS:
        config = load_config([str(ROOT / "configs" / "demo.yaml"), str(path)], memory_options=memory_options)
        titles.setdefault(memory_title(config.memory), []).append(path.stem)
    assert [names for names in titles.values() if len(names) > 1] == []
    assert titles["Gated DeltaNet"] == ["gated_deltanet"]


def test_every_memory_of_the_package_has_a_title() -> None:
    assert [kind for kind in memory_kinds() if not memory_class(kind).title] == []


def test_memories_of_blocks_of_others_and_of_later_versions_have_titles_too() -> None:
    memory = {"kind": "per_block", "default": {"kind": "none"}, "8": {"kind": "linear", "delta": False, "new": 1}}
    assert describe_memory(memory) == "default: none, 8: linear"
    assert memory_title(memory) == "default: no memory, 8: Mamba-2"
    assert memory_title({"kind": "no_such.py:Mine", "over": {"kind": "lamemo"}}) == "no_such.py:Mine over LaMemo"


def test_attention_below_that_remembers_nothing_is_named_at_most_once() -> None:
    own = {"infinite": "infinity-former", "infini": "Infini-attention over attention"}
    for kind, title in own.items():
        assert memory_title(memory_options({"kind": kind, "over": {"kind": "causal"}})) == title
