"""Keys that are paths or names of folders, found in the schema: no shell expands them, and no name leads elsewhere."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dist_mem.config import Config, ConfigError, load_config
from dist_mem.config.check import item_schema
from dist_mem.config.keys import find_key, keys_of
from dist_mem.runtime.files import expansion_fault
from tests.support.configs import STEPS
from tests.support.messages import refused
from tests.support.small_studies import STUDY, SWEEP, at_tiny, load

KEYS = keys_of(Config)
PLACES = [name for name, key in KEYS.items() if key.metadata.is_place]
NAMES = [name for name, key in KEYS.items() if key.metadata.in_path]
OTHERS = ["deepspeed.zero_optimization.offload_param.nvme_path", "deepspeed.tensorboard.output_path", "memory.kind"]


def given(name: str, text: str) -> str:
    """Return the override that gives a key this text."""
    if "[]" in name:
        listed, _, rest = name.partition("[].")
        until = ", until: 1" if listed == "data.curriculum" else ""
        return f"{listed}=[{{{rest}: '{text}'{until}}}]"
    found = find_key(Config, name)
    is_list = found is not None and item_schema(found.schema) is not None
    return f"{name}=['{text}']" if is_list else f"{name}={text}"


def problems(*overrides: str) -> dict[str, str]:
    try:
        load_config(["train.steps=2", *overrides])
    except ConfigError as error:
        return {problem.key: problem.text for problem in error.problems}
    return {}


@pytest.mark.parametrize("name", [*PLACES, *OTHERS])
def test_what_a_shell_would_have_expanded_is_no_folders_name(name: str) -> None:
    """sbatch --export, YAML and quotes pass `$HOME` on as it is: a run lay in a folder called `$HOME`."""
    key = KEYS.get(name)
    for text in ("$SCRATCH/x", "$SCRATCH", "~nosuchuser/x"):
        found = problems(given(name, text))
        if text[0] == "$" and key is not None and key.metadata.is_expanded:
            assert not any("SCRATCH" in each for each in found.values())  # the job's shell expands it
            continue
        assert len(found) == 1, found
        (text_of,) = found.values()
        assert "${oc.env:SCRATCH}" in text_of or "home directory" in text_of
    assert not any("expands" in each for each in problems(given(name, "a$SCRATCH")).values())


@pytest.mark.parametrize("name", PLACES)
def test_a_list_is_no_path(name: str) -> None:
    key = KEYS[name]
    if item_schema(key.schema) is None and key.metadata.is_path:
        assert [name.replace("[]", "[0]")] == list(problems(given(name, "[a,b]")))


NO_NAMES = ["..", ".", "../up", "a/..", "/a", "a//b", "a/", ".a", "a\\b", "a\0b", "a\nb", "a" * 231, " "]


@pytest.mark.parametrize("name", NAMES)
def test_a_name_in_a_path_stays_below_its_folder(name: str) -> None:
    """`name=..` made the working directory the run."""
    for text in NO_NAMES:
        assert name in problems(f"{name}={text}"), text
    for text in ("a", "a b", "a.b", "été", "a=b"):
        assert name not in problems(f"{name}={text}"), text
    assert (name not in problems(f"{name}=a/b")) == KEYS[name].metadata.may_nest


def test_every_key_of_a_splits_or_runs_name_is_a_name_in_a_path() -> None:
    assert [name for name in KEYS if name.rpartition(".")[2] in ("name", "split", "train_split")] == NAMES


def test_a_variable_of_the_environment_is_named_as_a_configuration_writes_it() -> None:
    for override in ("run_dir=$HOME/x", "data.path=${HOME}/x", "tracking.uri=sqlite:///$HOME/x", "data.path=[a, b]"):
        with refused(ConfigError, override.partition("=")[0]):
            load_config([STEPS, override])
    assert expansion_fault("a/$HOME") is None


def odd_names() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each place of a study where a name becomes that of a file, and a study with an odd one there."""
    tiny = STUDY["scales"]["tiny"]
    for odd in ("../x", "a/b", "x" * 200, "\0"):
        yield "row", {**STUDY, "rows": {**STUDY["rows"], odd: {}}}
        yield "scale", {**STUDY, "scales": {**at_tiny(), odd: tiny}}
        yield "figure", {**STUDY, "figures": {odd: ["xl"]}}
        yield "point", {**STUDY, "scales": at_tiny(points={**tiny["points"], odd: {"data": "d"}})}
        yield "column", {**STUDY, "scales": at_tiny(columns={odd: {"metric": "accuracy", "point": "a"}})}
        split = {"metric": "accuracy", "split": odd if len(odd) < 200 else "x" * 300}
        yield "split", {**SWEEP, "columns": {"a": split}}


def test_every_name_of_a_study_that_becomes_a_files_is_checked(tmp_path: Path) -> None:
    for what, content in odd_names():
        with refused(ValueError, "one.yaml", what):
            load(tmp_path, content)
