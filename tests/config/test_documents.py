"""The one reader of YAML and JSON: its limits, its lines, and that nothing else in the package reads YAML."""

import ast
from pathlib import Path

import pytest

from dist_mem.config import ConfigError, load_config
from dist_mem.config.documents import MAX_BYTES, read_document
from dist_mem.config.sources import read_saved
from dist_mem.errors import RunError
from dist_mem.launch.status import read_state
from dist_mem.studies.study import Study, load_study
from tests.support.messages import refused
from tests.support.paths import ROOT

READERS = ("dist_mem/config/values.py", "dist_mem/config/documents.py")
_READS = ("load", "load_all", "safe_load", "full_load", "unsafe_load", "compose", "parse", "scan", "SafeLoader")


def bomb(levels: int = 9) -> str:
    """Return 600 bytes whose aliases stand for a thousand million values."""
    lines = ["a0: &a0 [x,x,x,x,x,x,x,x,x]"]
    lines += [f"a{level}: &a{level} [{','.join([f'*a{level - 1}'] * 9)}]" for level in range(1, levels + 1)]
    return "\n".join(lines)


def merges(levels: int = 20) -> str:
    lines = ["a0: &a0 {x: 1}"]
    lines += [f"a{level}: &a{level} {{<<: [{','.join([f'*a{level - 1}'] * 9)}]}}" for level in range(1, levels)]
    return "\n".join(lines)


LARGE = {
    "aliases of aliases": bomb(),
    "merges of merges": merges(),
    "an alias of what it stands in": "a: &a [*a]",
    "aliases that nest": "\n".join(["a0: &a0 [x]", *(f"a{n}: &a{n} [*a{n - 1}]" for n in range(1, 5000))]),
    "a long text many times": f"a: &a {'x' * 100_000}\nb: [{', '.join(['*a'] * 10_000)}]",
    "brackets": f"a: {'[' * 5000}",
    "blocks": "".join(f"{' ' * depth}a:\n" for depth in range(500)),
    "many bytes": f"# {'x' * MAX_BYTES}",
    "keys that are alike": "\n".join(f"a{number % 60_000}: 1" for number in range(60_001)),
}
NO_BLOCK = ["5", "a text", "- 1", "[]", "null: [", "~"]


@pytest.mark.parametrize("name", LARGE)
def test_a_document_of_no_reasonable_size_is_refused_at_once(name: str, tmp_path: Path) -> None:
    for suffix in (".yaml", ".json"):
        path = tmp_path / f"a{suffix}"
        path.write_text(LARGE[name] if suffix == ".yaml" else LARGE[name].replace("a: ", '{"a": ', 1))
        with pytest.raises(RunError) as caught:
            read_document(path)
        assert str(path) in str(caught.value)
        assert caught.value.exit_code == 2


def test_a_run_folder_of_others_cannot_hold_up_a_command(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(bomb(), encoding="utf-8")
    (tmp_path / "slurm").mkdir()
    assert read_state(tmp_path)["steps"] is None
    with refused(ConfigError, "config.yaml"):
        read_saved(tmp_path / "config.yaml")


def test_aliases_and_merges_of_usual_size_are_read(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text("a: &a {x: 1, y: 2}\nb: {<<: *a, y: 3}\nc: [*a, *a]\n", encoding="utf-8")
    one = {"x": "1", "y": "2"}
    assert read_document(path).tree == {"a": one, "b": {"x": "1", "y": "3"}, "c": [one, one]}


@pytest.mark.parametrize("text", NO_BLOCK)
def test_a_file_that_is_no_block_is_refused_everywhere_in_the_same_words(text: str, tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text(text, encoding="utf-8")
    said = set()
    for read in (lambda: load_config([str(path)]), lambda: load_study(str(path)), lambda: read_saved(path)):
        try:
            read()
            said.add("")
        except ConfigError as error:
            said.add(str(error))
            assert str(path) in str(error)
        except RunError as error:  # an empty study
            assert text == "~"
            assert str(path) in str(error)
    assert len(said) == 1 or text == "~"


def test_a_problem_has_the_line_of_its_key(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text("train:\n  steps: 1\noptimizer:\n  betas:\n  - 0.9\n  - b\n  groups: [{lr: 1, x: 2}]\n")
    with pytest.raises(ConfigError) as caught:
        load_config([str(path)])
    assert [(problem.where, problem.key) for problem in caught.value.problems] == [
        (f"{path}:6", "optimizer.betas[1]"),
        (f"{path}:7", "optimizer.groups[0].x"),
    ]
    path.write_text("train: {steps: 1}\n\nmodel:\n  num_heads: 3\n")
    with pytest.raises(ConfigError, match=r"a\.yaml:4: model.d_model"):
        load_config([str(path)])


WRONG_STUDIES = {
    "rows": ["rows: []", "rows: {none: 5}", "rows: 5"],
    "columns": ["columns: []", "columns: {bits: [1]}", "columns: {bits: x}", "columns: {bits: {}}"],
    "grid": ["grid: []", 'grid: {optimizer.lr: [0.001, "???"]}', "grid: {optimizer.lr: 1}"],
    "skip": ["skip: {a: 1}", "skip: [1]"],
    "points": ["points: [1]", "points: {a: {}}", "points: {a: {data: [x]}}"],
    "budget": ["budget: [1]", "budget: {tokens: x}", "budget: {tokens: []}"],
    "tune": ["tune: [1]", "tune: {grid: [1]}", "tune: {rows: {a: {b: 1}}}"],
    "scales": ["scales: {a: [1]}", "scales: [1]", "scales: {a: {rows: {b: {c: 1}}}}"],
    "build": ["build: {a: 1}", "build: [a]", "build: [[{a: 1}]]"],
    "figures": ["figures: [1]", "figures: {a: 1}"],
    "paired": ["paired: x", "paired: [1]"],
    "seeds": ["seeds: a", "seeds: [a]", "seeds: {a: 1}"],
    "data": ["data: ${HOME}/x", "data: ${oc.env:DIST_MEM_NEVER_SET}", "data: [a]"],
    "train": ['train: ["${a}"]', "train: {a: 1}"],
}


@pytest.mark.parametrize("key", WRONG_STUDIES)
def test_a_value_that_a_study_cannot_have_is_refused_with_its_file_line_and_key(key: str, tmp_path: Path) -> None:
    path = tmp_path / "one.yaml"
    for text in WRONG_STUDIES[key]:
        path.write_text(f"title: one\n\n{text}\n", encoding="utf-8")
        with refused(ConfigError, key) as caught:
            load_study(str(path))
        assert [(problem.where, problem.key.startswith(key)) for problem in caught.value.problems] == [
            (f"{path}:3", True)
        ]


def test_every_key_of_a_study_is_tried() -> None:
    unchecked = {"title", "source", "about", "x_axis", "y_axis", "notes", "path", "scale", "fit"}  # texts, or any value
    assert WRONG_STUDIES.keys() == Study.__dataclass_fields__.keys() - unchecked


def test_the_picture_of_what_is_no_yaml_has_line_and_column(tmp_path: Path) -> None:
    path = tmp_path / "one.yaml"
    path.write_text("title: a\ntrain: [a.yaml\n", encoding="utf-8")
    for read in (lambda: load_config([str(path)]), lambda: load_study(str(path))):
        with refused(ConfigError, path, "line 3, column 1"):
            read()


def test_nothing_else_reads_yaml() -> None:
    """A second reader lacks the limits and the messages of the first."""
    found = set()
    for path in sorted((ROOT / "dist_mem").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                reads_yaml = node.value.id == "yaml" and node.attr in _READS
                if reads_yaml or (node.value.id == "OmegaConf" and node.attr in ("load", "from_dotlist", "from_cli")):
                    found.add(str(path.relative_to(ROOT)))
            if isinstance(node, ast.ImportFrom) and node.module == "yaml":
                found.update(str(path.relative_to(ROOT)) for each in node.names if each.name in _READS)
    assert found <= set(READERS)
