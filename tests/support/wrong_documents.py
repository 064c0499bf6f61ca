"""Wrong YAML documents, made by seeded changes of those that come with dist_mem."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import yaml

from tests.support.paths import ROOT

_ODD: tuple[Callable[[], Any], ...] = (
    lambda: None,
    lambda: "",
    lambda: [],
    lambda: {},
    lambda: [1],
    lambda: {"a": 1},
    lambda: 10**25,
    lambda: -(10**400),
    lambda: -1,
    lambda: 0.1,
    lambda: float("nan"),
    lambda: True,
    lambda: "???",
    lambda: "${nowhere}",
    lambda: "${oc.env:DIST_MEM_NEVER_SET}",
    lambda: "${",
    lambda: "$HOME/x",
    lambda: "a\0b",
    lambda: "\u202e\U0001f600\ud800".encode("utf-8", "replace").decode(),
    lambda: "x" * 20_000,
    lambda: "..",
    lambda: "2024-01-01",
    lambda: [[[[]]]],
    lambda: {"a": {"b": {"c": [1, {"d": None}]}}},
)
_TEXTS: tuple[Callable[[str, random.Random], str], ...] = (
    lambda text, draw: text[: draw.randrange(len(text))],
    lambda text, draw: text.replace(": ", ":\t", 1 + draw.randrange(3)),
    lambda text, draw: text.replace("\n", "\n\t", 1),
    lambda text, draw: "[" * 2_000 + text,
    lambda text, draw: f"- 1\n{text}",
    lambda text, draw: f"{text}\n---\n{text}",
    lambda text, draw: f"a: &a [*a]\n{text}",
    lambda text, draw: f"a: &a [1]\nb: &b [{'*a,' * 9}]\nc: &c [{'*b,' * 9}]\nd: &d [{'*c,' * 9}]\n{text}",
    lambda text, draw: f"{text}\n<<: {{zz: 1}}",
    lambda text, draw: f"{text}\n{text}",
    lambda text, draw: "5",
    lambda text, draw: text.replace(
        ": ", f": !!{draw.choice(['python/object:os.system', 'binary', 'int', 'set'])} ", 1
    ),
    lambda text, draw: "".join(
        chr(draw.choice([0, 7, 9, 0x85, 0x2028, 0xFEFF, 0x1F600])) if draw.random() < 0.01 else letter
        for letter in text
    ),
    lambda text, draw: "? [a, b]\n: c\n" + text,
)


def shipped() -> list[Path]:
    """Return every YAML file that comes with dist_mem."""
    return sorted(path for folder in ("configs", "launch", "examples") for path in (ROOT / folder).rglob("*.yaml"))


def changed(path: Path, draw: random.Random) -> bytes:
    """Return a document with one to three values replaced, removed or renamed, or with its text spoilt."""
    text = path.read_text(encoding="utf-8")
    if draw.random() < 0.3:
        return draw.choice(_TEXTS)(text, draw).encode("utf-8", "surrogatepass")
    tree = copy.deepcopy(yaml.safe_load(text)) or {}
    for _ in range(draw.randint(1, 3)):
        places = list(_places(tree))
        if places:
            block, name = draw.choice(places)
            _change(block, name, draw)
    return yaml.safe_dump(tree, allow_unicode=True, sort_keys=False).encode("utf-8", "surrogatepass")


def _places(tree: Any) -> Iterator[tuple[Any, Any]]:
    for name, child in list(tree.items() if isinstance(tree, dict) else enumerate(tree)):
        yield tree, name
        if isinstance(child, dict | list):
            yield from _places(child)


def _change(block: Any, name: Any, draw: random.Random) -> None:
    what = draw.random()
    if what < 0.7:
        block[name] = draw.choice(_ODD)()
    elif what < 0.85 and isinstance(block, dict):
        block[f"{name}x"] = block.pop(name)
    else:
        block.pop(name)
