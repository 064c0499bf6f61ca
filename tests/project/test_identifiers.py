"""Functions and classes are called by what they do and are: verbs or nouns, each term in the glossary's one meaning."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from functools import cache
from typing import NamedTuple

from tests.support.paths import ROOT

_IRREGULAR = (
    "begun|broken|built|chosen|done|drawn|found|given|gone|grown|held|hidden|kept|known|left|lost|made|met"
    "|said|seen|sent|shown|taken|told|thrown|written"
)
PARTICIPLE = re.compile(rf"(\w+(ed|ing|[ai]ble|ous)|{_IRREGULAR})")
PREPOSITIONS = {"after", "at", "before", "beside", "by", "for", "from", "in", "of", "on", "with"}
NOUNS = {
    *("beginning", "embedding", "finding", "heading", "meaning", "reading", "spelling", "warning"),
    *("distributed", "embed", "feed", "rendezvous", "seed", "speed", "table", "variable"),
}
# Classes of the contract that users' memories import, and nouns that look like participles.
CLASSES = {"Evicted", "Inspectable", "Memorizing", "Opened", "Reporting", "Sampling", "Saving", "Stopping", "Visible"}
DOCUMENTED = {"trained"}  # attributes that pages name
TWICE = {"Memory", "Options"}  # the contract and `dist_mem.Memory`; in every memory
HOMES = {  # a term of the glossary alone, as a name -> where that is its meaning; elsewhere a name says of what
    "block": ("block",),
    "job": ("launch",),
    "plan": ("data", "training.feed"),
    "point": ("tracking.log",),
    "row": ("memory",),
    "step": ("engine", "cli.arguments"),
    "window": (),
}


class Name(NamedTuple):
    module: str  # within dist_mem
    name: str
    is_class: bool
    is_context: bool

    @property
    def words(self) -> list[str]:
        return [word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z0-9]+", self.name)]


@cache
def names() -> list[Name]:
    found = []
    for path in sorted((ROOT / "dist_mem").rglob("*.py")):
        module = ".".join(path.relative_to(ROOT / "dist_mem").with_suffix("").parts)
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef | ast.FunctionDef) and not node.name.startswith("__"):
                decorators = {ast.unparse(each) for each in node.decorator_list}
                is_class = isinstance(node, ast.ClassDef)
                found.append(Name(module, node.name, is_class, "contextmanager" in decorators))
    return found


def is_participle(word: str) -> bool:
    """Whether a word has the form of a participle, or of an adjective, and is no noun."""
    return word not in NOUNS and PARTICIPLE.fullmatch(word) is not None


def test_no_name_is_a_bare_participle() -> None:
    """`with replacing(path):` reads well, as `contextlib.closing`; `settled(tree)` and `kept_by(rules)` say nothing."""
    bare = [
        f"{each.module}: {each.name}"
        for each in names()
        if is_participle(each.words[0])
        and (len(each.words) == 1 or (not each.is_class and each.words[1] in PREPOSITIONS))
        and each.name not in CLASSES | DOCUMENTED
        and not (each.is_context and each.words[0].endswith("ing"))
    ]
    files = {each.module for each in names() if re.search(r"(^|\.)(?!\w+ing$)\w+$", each.module)}
    assert bare + sorted(module for module in files if is_participle(module.rpartition(".")[2])) == []


def test_every_class_has_a_name_of_its_own() -> None:
    places = defaultdict(list)
    for each in names():
        if each.is_class and each.name not in TWICE:
            places[each.name].append(each.module)
    assert {name: modules for name, modules in places.items() if len(modules) > 1} == {}


def test_a_term_alone_has_the_meaning_of_the_glossary() -> None:
    page = (ROOT / "docs/start/glossary.md").read_text(encoding="utf-8")
    terms = set(re.findall(r"^\| (\w+)", page, re.MULTILINE))
    assert terms >= HOMES.keys()
    elsewhere = [
        f"{each.module}: {each.name}"
        for each in names()
        if len(each.words) == 1
        and (term := each.words[0].removesuffix("s")) in HOMES
        and not each.module.startswith(HOMES[term] or "-")
    ]
    assert elsewhere == []
