"""Rules of the package's source that no linter knows.

Functions and classes are called by what they do and are: verbs or nouns, each term in the glossary's one meaning.
"""

import ast
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import cache
from typing import NamedTuple

from tests.support.paths import PACKAGE, ROOT

MOST_PLACES = 40  # it only shrinks


@cache
def nodes() -> Sequence[tuple[str, ast.AST]]:
    """Every node of the package's syntax trees, with its place."""
    return [
        (f"{path.relative_to(PACKAGE)}:{getattr(node, 'lineno', 0)}", node)
        for path in sorted(PACKAGE.rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if not isinstance(node, ast.expr_context | ast.operator)
    ]


def calls() -> Iterator[tuple[str, str, ast.Call]]:
    """Yield every call, with its place and the dotted name of what is called, as far as that is one."""
    for place, node in nodes():
        if isinstance(node, ast.Call):
            yield place, ast.unparse(node.func), node


def test_few_places_take_the_whole_configuration() -> None:
    """Those that open, compare, record or check a run; the others take blocks, or values made of some of them."""
    taking = [
        place
        for place, node in nodes()
        if isinstance(node, ast.arg | ast.AnnAssign) and node.annotation is not None and not place.startswith("config/")
        if "Config" in ast.unparse(node.annotation).split(" | ")
    ]
    assert len(taking) <= MOST_PLACES, "\n".join(taking)


def test_a_mean_is_the_same_in_every_version_of_python() -> None:
    """`sum` of floats is compensated from Python 3.12 on: `statistics.fmean` and `math.fsum` are exact in all."""
    by_sum = [
        place
        for place, node in nodes()
        if isinstance(node, ast.BinOp)
        and isinstance(node.op, ast.Div)
        and ast.unparse(node.left).startswith("sum(")
        and "len(" in ast.unparse(node.right)
    ]
    assert by_sum == []


# `variable`; what `${oc.env:NAME}` reads, and CUDA_VISIBLE_DEVICES, where empty has a meaning.
READERS = {"variable", "is_set", "visible_devices"}
READING = {"get", "setdefault", "__getitem__", "__contains__", "getenv"}


def _reads_one(node: ast.AST) -> bool:
    """Whether a node reads one variable of a mapping that is named `environ`, as os.environ is."""

    def is_environ(tree: ast.AST) -> bool:
        return ast.unparse(tree).rpartition(".")[2] == "environ"

    match node:
        case ast.Call(func=ast.Attribute(value=owner, attr=name)):
            return name in READING and (is_environ(owner) or name == "getenv")
        case ast.Subscript(value=owner, ctx=ast.Load()):
            return is_environ(owner)
        case ast.Compare(ops=[ast.In() | ast.NotIn()], comparators=[owner]):
            return is_environ(owner)
    return False


def test_a_variable_is_read_by_one_function_to_which_empty_is_not_set() -> None:
    found = {
        function.name
        for _, function in nodes()
        if isinstance(function, ast.FunctionDef)
        if any(_reads_one(node) for node in ast.walk(function))
    }
    assert found == READERS


def test_no_wait_for_a_lock_is_deaf_to_signals() -> None:
    """Python starts a system call again that a signal has ended: only `wait_for_lock`, which polls, hears a flag."""
    deaf = [
        place
        for place, name, call in calls()
        if name.rpartition(".")[2] in ("flock", "lockf")
        and not any(word in ast.unparse(call) for word in ("LOCK_NB", "LOCK_UN"))
    ]
    assert deaf == []


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
    for place, node in nodes():
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and not node.name.startswith("__"):
            module = place.partition(":")[0].removesuffix(".py").replace("/", ".")
            is_context = "contextmanager" in {ast.unparse(each) for each in node.decorator_list}
            found.append(Name(module, node.name, isinstance(node, ast.ClassDef), is_context))
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
