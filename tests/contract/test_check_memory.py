"""`dist-mem check-memory` names the rule that a memory breaks; memories come from files and from other packages."""

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from dist_mem.__main__ import main
from dist_mem.config import load_config
from dist_mem.contract.check_memory import RULES, SIZES, ContractRule, RuleFailure, failures
from dist_mem.memory import memory_class, memory_options
from dist_mem.memory.outside import kept_kinds, sources
from dist_mem.runtime.outside_code import source_of
from tests.support.messages import refused, said
from tests.support.paths import EXAMPLES, SUPPORT

BROKEN = SUPPORT / "broken_memories.py"
EXAMPLE = EXAMPLES / "averages.py"

PLANTED = {
    "FutureLeak": "no output depends on a later token",
    "PaddingLeak": "padding changes no real token",
    "LoggedPadding": "padding changes no real token",
    "CountsRows": "fewer rows give real tokens the same outputs",
    "StepsWithoutMemory": "further rows are those of the whole segment",
    "StepsInOneLane": "further rows are those of the whole segment",
    "MutatedState": "forward modifies none of its inputs",
    "MutatedInput": "forward modifies none of its inputs",
    "LaneMixing": "lanes are independent",
    "ReadsInvalidRows": "lanes are independent",
    "ForgottenReset": "the output depends on the arguments only",
    "NotEmptyAtFirst": "a reset lane equals a fresh one",
    "BranchOnData": "nothing branches on data",
    "GradientThroughState": "the state carries no gradient, unless carries_gradient says so",
    "UnstableDtype": "the state keeps its fields, shapes and dtypes",
    "GrowingState": "the state keeps its fields, shapes and dtypes",
    "KeepsMoreThanItSays": "rows leave a memory when it is full",
    "AliasOfInput": "the state is no view of the input",
    "OwnRandomness": "no random generator is touched",
    "WeightElsewhere": "parameters are used where they are registered",
    "UnusedParameter": "every parameter gets a gradient in every step",
    "WritesGetNoGradient": "every parameter gets a gradient in every step",
    "ForgetsEverything": "a later segment depends on an earlier one",
    "InspectionChangesState": "inspection changes nothing",
    "SpansOfTheFuture": "what a query reads are shares of the past",
    "WeightsAreNoShares": "what a query reads are shares of the past",
    "ForgetsNothing": "forget takes out what is named, and nothing else",
    "ForgetsInAllLanes": "forget takes out what is named, and nothing else",
    "ForgetsInPlace": "forget takes out what is named, and nothing else",
}


def first_failure(name: str, rules: Sequence[ContractRule]) -> RuleFailure:
    kind = f"{BROKEN}:{name}"
    chosen = memory_class(kind)
    return next(failures(lambda seg_len: {"kind": kind, **chosen.small_options(seg_len)}, None, SIZES[:2], rules))


@pytest.mark.core
def test_every_planted_bug_breaks_its_rule(subtests: pytest.Subtests) -> None:
    for name, statement in PLANTED.items():
        with subtests.test(name=name):
            (rule,) = [rule for rule in RULES if rule.statement == statement]
            assert first_failure(name, [rule]).rule is rule


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_bug_is_named_by_its_rule_first(name: str) -> None:
    first = first_failure(name, RULES)
    assert first.rule.statement == PLANTED[name], first.message


@pytest.mark.parametrize(
    ("name", "times", "named"),
    [
        ("FutureLeak", 3, ["rule 4 is broken", "smallest case: 2 lanes, segments of 2 tokens, 3 segments, 1 layers"]),
        ("WritesGetNoGradient", 1, ["blocks.0.memory.write.weight has no gradient", "examples/infini_attention.py"]),
        # Issue 15: an error in `reset_parameters` was shown as 17 broken rules with 17 causes.
        ("RaisesInResetParameters", 1, [f"{len(RULES)} rules could not be checked", "broken_memories.py, line"]),
    ],
)
def test_the_command_tells_rule_smallest_case_and_usual_cause_once(
    capsys: pytest.CaptureFixture[str], name: str, times: int, named: list[str]
) -> None:
    assert main(["check-memory", f"{BROKEN}:{name}"]) == 1
    shown = capsys.readouterr().out
    assert shown.count("smallest case") == times
    said(shown, *named)


@pytest.mark.parametrize(
    ("name", "max_lines"), [("averages.py:Averages", 80), ("infini_attention.py:InfiniAttention", 100)]
)
def test_the_examples_keep_every_rule_and_are_short(
    capsys: pytest.CaptureFixture[str], name: str, max_lines: int
) -> None:
    kind = str(EXAMPLE.with_name(name))
    assert main(["check-memory", kind]) == 0
    assert "keeps all" in capsys.readouterr().out
    assert len(source_of(kind).read_text().splitlines()) <= max_lines


@pytest.mark.parametrize(
    ("text", "named"),
    [
        (None, "there is no file"),
        ("x = 1\n", "has no Mine"),
        ("Mine = 3\n", "dist_mem.memory.base.Memory"),
        ("a = 1\nb = a.nothing\n", "mine.py, line 2"),
        ("def f(:\n", "mine.py, line 1"),
        ((BROKEN.read_text() + "\nMine = ForgetsWithoutBeingAsked\n"), "Inspectable"),  # nobody would call its method
    ],
    ids=["no file", "no class", "no memory", "an error", "no Python", "a method that nobody would call"],
)
@pytest.mark.parametrize("folder", ["{}", "."], ids=["absolute", "relative"])
def test_a_file_that_gives_no_memory_is_refused_by_name(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    text: str | None,
    named: str,
    folder: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    if text is not None:
        (tmp_path / "mine.py").write_text(text)
    assert main(["check-memory", f"{folder.format(tmp_path)}/mine.py:Mine"]) == 2
    said(capsys.readouterr().err, named)


def test_the_sources_of_two_files_of_one_name_are_both_kept(tmp_path: Path) -> None:
    for folder in ("over", "under"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "mine.py").write_text(folder)
    over, under = (f"{tmp_path / folder / 'mine.py'}:Mine" for folder in ("over", "under"))
    block = {"kind": over, "over": {"kind": under, "over": {"kind": over}}}
    assert sources(block) == {"memory/mine.py": "over", "memory/2-mine.py": "under"}


@pytest.mark.parametrize("folder", ["a b", "x: y", "a#b", "[x]", "a${b}", "a=b", "a:b", "it's", 'a"b', "ü"])
def test_a_run_in_any_folder_reads_its_own_copy_of_a_memory(folder: str, tmp_path: Path) -> None:
    block = {"kind": f"{EXAMPLE}:Averages", "num_means": 3}
    run = tmp_path / folder
    (run / "memory").mkdir(parents=True)
    for name, text in sources(block).items():
        (run / name).write_text(text)
    given = ["train.steps=1", f"memory={json.dumps(block)}", *kept_kinds(block, run)]
    assert load_config(given, memory_options=memory_options).memory["kind"] == f"{run}/memory/averages.py:Averages"


def test_installed_packages_offer_memories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A real distribution on the path, with an entry point, as pip would leave it."""
    (tmp_path / "their_memory.py").write_text(EXAMPLE.read_text())
    info = tmp_path / "their_memory-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: their-memory\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[dist_mem.memories]\ntheirs = their_memory:Averages\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert memory_class("theirs").__name__ == "Averages"
    with refused(ValueError, "memory.kind is 'their'", "did you mean theirs?"):
        memory_class("their")


def test_a_memory_of_a_package_that_cannot_be_loaded_is_refused_by_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken_memory.py").write_text("x = undefined_name\n")
    offered = {
        "their": "broken = broken_memory:Mine\ngone = math:Gone\nother = math:pi\ntwice = a:A",
        "our": "twice = b:B",
    }
    for name, offers in offered.items():
        (info := tmp_path / f"{name}-1.0.dist-info").mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[dist_mem.memories]\n{offers}\n")
    monkeypatch.syspath_prepend(tmp_path)
    named = {"broken": "undefined_name", "gone": "math:Gone of their", "other": "math:pi of their", "twice": "our"}
    for kind, cause in named.items():
        with refused(ValueError, f"memory.over.kind is '{kind}'", "their", cause):
            memory_class(kind, "memory.over")


def test_the_loader_can_be_the_first_thing_imported() -> None:
    """Its package imports it, and it needs the package's base class: not at import."""
    subprocess.run([sys.executable, "-c", "import dist_mem.memory.outside"], check=True)
