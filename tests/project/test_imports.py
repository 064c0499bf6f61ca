"""The import arrows of docs/explanation/design.md: one layer a folder, downward only, and one door per dependency."""

import ast
import re
import runpy
from functools import cache
from pathlib import Path

import pytest

from tests.support.paths import PACKAGE, ROOT

# Lowest first: a module may import its own folder, without cycles, and every folder before it.
LAYERS = [
    *("version", "errors", "runtime", "supervision", "config", "data", "datasets", "tracking", "nn", "memory"),
    *("block", "model", "hf", "contract", "engine", "checkpoint", "estimate", "doctor", "launch", "evaluation"),
    *("generation", "training", "lm_eval", "inspection", "recompute", "papers", "studies", "api", "__init__", "cli"),
    "__main__",
]
# library -> the folder that may import it, or the two
DOORS = {
    "deepspeed": ("engine",),
    "lm_eval": ("lm_eval",),
    "mlflow": ("tracking.mlflow",),
    "omegaconf": ("config",),
    "pyarrow": ("datasets",),
    "tensorboard": ("tracking",),
    "transformers": ("generation", "data.tokenizers.huggingface"),
    "wandb": ("tracking",),
    "webdataset": ("data",),
}
# attributes of DeepSpeed's objects that it does not document; they may stand in engine/ only
DEEPSPEED_ATTRIBUTES = {
    *("_reassign_or_swap_out_partitioned_parameters", "checkpoint_event_epilogue", "checkpoint_event_prologue"),
    *("ds_id", "ds_numel", "ds_shape", "ds_tensor", "fp16_groups", "fp32_groups", "fp32_partitioned_groups_flat"),
    *("partition_size", "refresh_fp32_params", "round_robin_bit16_groups", "round_robin_bit16_offsets"),
    *("single_partition_of_fp32_groups", "update_lp_params", "zero_optimization_stage"),
}
READ_ENVIRONMENT = {f"runtime.{name}" for name in ("compilers", "devices", "environment", "ranks", "slurm_variables")}
WITHOUT_TORCH = ("errors", "config", "launch", "runtime.signals", *READ_ENVIRONMENT)


def module_name(path: Path) -> str:
    name = ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
    return name.removesuffix(".__init__")


MODULES = {module_name(path): path for path in PACKAGE.rglob("*.py")}


def is_within(name: str, place: str) -> bool:
    return name == place or name.startswith(f"{place}.")


@cache
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
    names |= {"__init__"} & {name.replace("dist_mem", "__init__") for name in imported_names(path)}
    return {name for name in names if name in MODULES}


def layer_of(name: str) -> int:
    folder = name.partition(".")[0]
    assert folder in LAYERS, f"{folder} stands in no layer: add it to LAYERS in {__file__}"
    return LAYERS.index(folder)


def test_imports_point_to_lower_layers(subtests: pytest.Subtests) -> None:
    assert {name.partition(".")[0] for name in MODULES} == set(LAYERS)
    for name in sorted(MODULES):
        with subtests.test(name=name):
            mine = layer_of(name)
            upward = {other for other in own_imports(MODULES[name]) if layer_of(other) > mine}
            assert not upward, f"{name} imports {upward}, which stand above it"


def test_the_design_lists_the_layers_in_their_order() -> None:
    text = (ROOT / "docs" / "explanation" / "design.md").read_text(encoding="utf-8")
    table = text[text.index("## The layers") : text.index("## Beside")]
    rows = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    named = [name.removesuffix(".py").rstrip("/") for row in rows for name in re.findall(r"`([\w./]+)`", row)]
    assert [*named, "__main__"] == LAYERS
    modules = set(re.findall(r"`(\w+(?:\.py|/))`", table))
    assert not [name for name in modules if not {*PACKAGE.glob(name), *PACKAGE.glob(f"*/{name}")}]


def test_the_picture_shows_the_imports() -> None:
    drawing = runpy.run_path(str(ROOT / "docs" / "images" / "draw_layers.py"))
    shown = drawing["PICTURE"].read_text(encoding="utf-8")
    assert shown == drawing["drawn"](), "to accept the new imports: python docs/images/draw_layers.py"


def test_no_import_cycles() -> None:
    graph = {name: own_imports(path) - {name} for name, path in MODULES.items()}
    while graph:
        free = [name for name, needs in graph.items() if not needs & graph.keys()]
        assert free, f"these modules import each other in a circle: {sorted(graph)}"
        for name in free:
            del graph[name]


def test_each_library_has_one_door(subtests: pytest.Subtests) -> None:
    for library in sorted(DOORS):
        with subtests.test(library=library):
            users = {
                name
                for name, path in MODULES.items()
                if any(is_within(imported, library) for imported in imported_names(path))
            }
            assert users, f"nothing imports {library}: take it out of DOORS"
            strangers = {name for name in users if not any(is_within(name, door) for door in DOORS[library])}
            assert not strangers, f"{library} is imported by {strangers}; its door is {DOORS[library]}"


def test_attributes_of_deepspeed_have_one_door() -> None:
    used = {
        (name, attribute)
        for name, path in MODULES.items()
        for attribute in re.findall(r"\w+", path.read_text(encoding="utf-8"))
        if attribute in DEEPSPEED_ATTRIBUTES and not is_within(name, "engine")
    }
    assert not used, f"{used} belong into engine/, which alone knows DeepSpeed's layout"


def test_environment_variables_have_one_door() -> None:
    readers = {name for name, path in MODULES.items() if "os.environ" in path.read_text(encoding="utf-8")}
    assert readers == READ_ENVIRONMENT


def test_configuration_is_read_without_torch() -> None:
    for name in MODULES:
        if any(is_within(name, place) for place in WITHOUT_TORCH):
            assert not any(is_within(imported, "torch") for imported in imported_names(MODULES[name])), name


def test_no_configuration_is_annotated_with_any() -> None:
    """It would hide misspelled keys from mypy: annotate with dist_mem.config.Config, or the class of a block."""
    untyped = re.compile(r"config: Any\b|\bdef \w*config\([^)]*\) -> Any\b")
    assert [name for name, path in MODULES.items() if untyped.search(path.read_text(encoding="utf-8"))] == []
