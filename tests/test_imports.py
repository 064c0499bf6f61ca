"""The import arrows of docs/design.md: one way only, and one door per dependency."""

from __future__ import annotations

import ast
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "dist_mem"

# Lower layers first; a module may import modules of lower layers, and of its own layer where no cycle results.
LAYERS: list[set[str]] = [
    {
        "errors",
        "names",
        "file_schema",
        "environment",
        "network_interface",
        "files",
        "build_lock",
        "stop_signal",
        "shared_memory",
        "unread_output",
    }
    | {"checkpoint", "tracking", "evaluation", "launch"},
    {"config", "config.*", "distributed", "launch.*"},
    {"layers", "layer_spec", "memory.parts", "memory.parts.*", "memory.base", "flops"},
    {"data.batch", "data.facts", "data.index_schema", "data.shard", "data.tar"},
    {"memory", "memory.*", "outside_memory", "vocabulary", "gpt2", "gpt2.parts", "gpt2.token_types"},
    {"data", "data.*", "checkpoint.manifest", "checkpoint.schemas", "optimizer", "checkpoint.lease"},
    {"engine", "gradient_shares", "model", "tracking.provenance", "gpt2.names", "gpt2.folder", "gpt2.modeling_dist_mem"}
    | {f"checkpoint.{name}" for name in ("zero_*", "engine_files", "lanes", "resume_choice", "resumption")},
    {f"checkpoint.{name}" for name in ("tensor_file", "snapshot", "retention", "commit", "saver")}
    | {"checkpoint.listing", "checkpoint.finished"},
    {"contract", "contract.*"},
    {f"tracking.{name}" for name in ("sinks", "journal", "run_id", "stores", "refusals", "branches", "mlflow_tables")},
    {f"tracking.{name}" for name in ("mlflow_run", "rollback", "delivery", "progress", "tracker", "system_metrics")},
    {"tracking.start", "tracking.run_facts", "tracking.journal_sinks", "tracking.preflight"}
    | {"tracking.completeness"},
    {"evaluation.*", "meter", "divergence", "plan", "hang_report", "watchdog", "stragglers"},
    {"generation", "generation.*"},
    {"dialogue", "dialogue.*"},
    {"reproduce", "reproduce.*"},
    {"job", "restore", "between_steps", "update", "stopping", "train", "tracking.sync", "doctor", "doctor.*"},
    {"__main__", "commands"},
]
OF_LEAVES = {
    "errors",
    "layer_spec",
    "environment",
    "files",
    "file_schema",
    "names",
    "data.facts",
    "data.index_schema",
    "data.tar",
}
LEAVES = {"layers", "distributed", "files", "data.facts", "data.shard", "data.batch", "memory.base"}
DOORS = {
    "deepspeed": {"engine"},
    "mlflow": {"tracking.mlflow_run", "tracking.mlflow_tables"},
    "webdataset": {"data.*"},
}


def module_name(path: Path) -> str:
    name = ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
    return name.removesuffix(".__init__")


MODULES = {module_name(path): path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py"}


def imported_names(path: Path) -> set[str]:
    """Absolute names of everything a file imports, at top level or inside functions."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            full_names = {f"{node.module}.{alias.name}" for alias in node.names}
            names |= full_names
            if not all(name.removeprefix("dist_mem.") in MODULES for name in full_names):  # else the package is a path
                names.add(node.module or "")
    return names


def own_imports(path: Path) -> set[str]:
    names = {name.removeprefix("dist_mem.") for name in imported_names(path) if name.startswith("dist_mem.")}
    return {name for name in names if name in MODULES}


def matches(name: str, patterns: set[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def layer_of(name: str) -> int:
    for number, members in enumerate(LAYERS):
        if name in members:
            return number
    for number, members in enumerate(LAYERS):
        if matches(name, members):
            return number
    pytest.fail(f"{name} stands in no layer: add it to LAYERS in {__file__}")


@pytest.mark.parametrize("name", sorted(MODULES))
def test_imports_point_to_lower_layers(name: str) -> None:
    mine = layer_of(name)
    upward = {other for other in own_imports(MODULES[name]) if layer_of(other) > mine}
    assert not upward, f"{name} imports {upward}, which stand above it"


@pytest.mark.parametrize("name", sorted(LEAVES))
def test_leaves_import_nothing_of_ours(name: str) -> None:
    assert own_imports(MODULES[name]) <= OF_LEAVES


def test_no_import_cycles() -> None:
    graph = {name: own_imports(path) - {name} for name, path in MODULES.items()}
    while graph:
        free = [name for name, needs in graph.items() if not needs & graph.keys()]
        assert free, f"these modules import each other in a circle: {sorted(graph)}"
        for name in free:
            del graph[name]


@pytest.mark.parametrize("library", sorted(DOORS))
def test_each_library_has_one_door(library: str) -> None:
    users = {
        name
        for name, path in MODULES.items()
        if any(imported == library or imported.startswith(f"{library}.") for imported in imported_names(path))
    }
    strangers = {name for name in users if not matches(name, DOORS[library])}
    assert not strangers, f"{library} is imported by {strangers}; its door is {DOORS[library]}"


def test_environment_variables_have_one_door() -> None:
    readers = {name for name, path in MODULES.items() if "os.environ" in path.read_text(encoding="utf-8")}
    assert readers <= {"environment"}


def test_configuration_is_read_without_torch() -> None:
    for name in MODULES:
        if matches(name, {"config", "config.*", "environment", "errors", "stop_signal"}):
            assert not any(imported.split(".")[0] == "torch" for imported in imported_names(MODULES[name])), name
