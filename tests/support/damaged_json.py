"""JSON in which a value has another type."""

import json
import random
from typing import Any

from tests.support.terminals import HOSTILE

VALUES: list[Any] = [
    *(None, True, 0, -1, 7, 2**63, 10**400, 1.5, -0.0, 5e-324, 1e308, -1e308, float("nan"), float("inf")),
    *("", "x", "7", HOSTILE, [], [[]], {}, {"": {}}),
]


def places(tree: Any, *, most: int | None = None) -> list[tuple[Any, Any]]:
    """Every (container, key) of a JSON tree, of each list at most so many items."""
    pairs = tree.items() if isinstance(tree, dict) else list(enumerate(tree))[:most] if isinstance(tree, list) else ()
    return [place for key, child in pairs for place in [(tree, key), *places(child, most=most)]]


def changed(text: str, choose: random.Random) -> str:
    """The text of a JSON file, or of its first line, with a value of another type, or without a key."""
    first, end, rest = text.partition("\n") if text.count("\n") > 1 and not text.startswith("{\n") else (text, "", "")
    tree = json.loads(first)
    container, key = choose.choice(places(tree, most=1))
    value = choose.choice(VALUES)
    if choose.random() < 0.2:
        del container[key]
    else:
        container[key] = value
    return json.dumps(tree) + (end or "\n") + rest


# Interpolations, tags, anchors and unfinished pieces; nothing that opens a network or starts a program.
PIECES = [
    *("", "''", "null", "~", "true", "no", "[", "{", "}", "[]", "{}", "[[]]", "{a: 1}", "{a: {b: [c]}}", "- a", ": a"),
    *("&a [*a]", "*a", "!!python/object:os.system", "!!binary aaaa", "!!set {a}", "!!float x", "2020-01-01"),
    *("2020-13-45", "12:30:45", "0x10", "0o17", "1_000", ".nan", ".inf", "-.inf", "1e400", "-0.0", "5e-324", "|", ">"),
    *("${", "${name}", "${nothing}", "${..name}", "${oc.env:HOME}", "${oc.env:NOTHING_LIKE_IT}", "${oc.decode:[1}"),
    *("${oc.env:NOTHING_LIKE_IT,3}", "???", "%", "@", "/", "/etc", "/etc/passwd", "/proc/self/mem", "..", ".", "~/x"),
    *("a/../../b", "'a b'", '"\\0"', '"\\n"', '"\\ud800"'),
]
