"""Read, merge, check and write a configuration.

`load_config` refuses unknown keys at any depth and wrong values. It reports all of them at once, each with its file and
a suggestion. Each memory declares its options (`Memory.Options`); `load_config` checks them with the `memory_options`
function that its caller passes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, cast, get_type_hints

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from dist_mem.config import deepspeed_keys
from dist_mem.config.check import (
    ConfigError,
    Problem,
    all_keys,
    check_tree,
    flatten,
    is_interpolation,
    located,
    shown,
    stop_on,
)
from dist_mem.config.constraints import check_together
from dist_mem.config.environment_values import from_environment, hide_all, watch_environment
from dist_mem.config.keys import check_values, find_key, is_path, with_homes
from dist_mem.config.schema import Config
from dist_mem.config.sources import COMMAND_LINE, Source, merge, merge_source, plain_block, read_sources, resolve
from dist_mem.config.text_checks import check_credentials, check_given, check_texts
from dist_mem.config.values import Letters, dump, parse, settled, typed
from dist_mem.runtime.files import read_regular, write_text

COMMAND_LINE_ONLY = ("eval.allow_code",)  # no file may permit the execution of foreign code
MemoryOptions = Callable[[Any], dict[str, Any]]  # dist_mem.memory.memory_options


@cache
def known_keys() -> tuple[str, ...]:
    """Return the full dotted keys of the schema and of the `deepspeed:` block."""
    of_deepspeed = (*all_keys(deepspeed_keys.SCHEMA), "zero_optimization.stage")
    return (*all_keys(Config), *(f"deepspeed.{key}" for key in of_deepspeed))


def load_config(
    arguments: Sequence[str],
    *,
    memory_options: MemoryOptions | None = None,
    check: Callable[[Config], object] = lambda config: None,
) -> Config:
    """Read, merge and check a configuration.

    Args:
        arguments: YAML files, merged left to right, and `a.b=c` overrides, which win at any position. A file is
            looked up in the current directory, beside the first file, under configs/, and among those that come with
            dist_mem.
        memory_options: checks the memory block and returns it with all options, which are merged in;
            None skips this check.
        check: raises ValueError for what only a model can refuse; its text begins with the key.

    Returns:
        An OmegaConf structured config; interpolations like `${oc.env:HOME}` stay unresolved in it.

    Raises:
        ConfigError: lists all problems, one per line, with interpolations in place of values from the environment.
    """
    watch_environment()
    sources = read_sources(arguments)
    stop_on([problem._replace(where=source.where) for source in sources for problem in _check_source(source)])
    tree = cast(dict[str, Any], OmegaConf.to_container(OmegaConf.structured(Config)))
    origins: dict[str, str] = {}
    for source in sources:
        tree = merge_source(tree, source)
        origins.update(dict.fromkeys(flatten(source.tree), source.where))
    tree["deepspeed"] = deepspeed_keys.without_defaults(tree["deepspeed"])
    config = cast(Config, OmegaConf.merge(OmegaConf.structured(Config(memory={}, deepspeed={})), settled(tree)))
    try:
        _check_merged(config, tree["memory"], memory_options)
        _check_further(config, check)
    except ConfigError as error:
        problems = [problem._replace(text=hide_all(problem.text, config)) for problem in error.problems]
        raise ConfigError([located(problem, origins) for problem in problems]) from None
    return config


def _check_source(source: Source) -> Iterable[Problem]:
    yield from check_tree(Config, source.tree, everywhere=known_keys())
    yield from check_credentials(source.tree)
    yield from check_given(settled(source.tree))
    if source.where != COMMAND_LINE:
        leaves = flatten(source.tree)
        for key in COMMAND_LINE_ONLY:
            if leaves.get(key, False) is not False:
                yield Problem(key, f"is accepted on the command line only: remove it here, and add {key}=true there")
    block = source.tree.get("deepspeed", {})
    if isinstance(block, Mapping):
        yield from deepspeed_keys.check_block(block, key="deepspeed", everywhere=known_keys())
    else:
        yield Problem("deepspeed", f"is {shown(block)}, but must be a block or the path of a ds_config.json")


def _check_merged(config: Config, written_memory: Any, memory_options: MemoryOptions | None) -> None:
    """Check what only the merged tree shows: interpolated values, limits, the memory's options, combinations.

    Args:
        written_memory: the `memory` block with its options as `Letters`.
    """
    resolved = resolve(config)
    memory = resolved["memory"]
    if not isinstance(memory, Mapping) or not isinstance(memory.get("kind"), str):
        stop_on([Problem("memory", f"is {shown(memory)}, but must be a block with a kind")])
    of_deepspeed = deepspeed_keys.check_block(resolved["deepspeed"], key="deepspeed", everywhere=())
    stop_on([*check_tree(Config, resolved), *of_deepspeed])
    written = _with_letters(memory, written_memory)
    of_memory = _write_out_memory(config, written, memory_options) if memory_options is not None else []
    stop_on([*check_values(Config, resolved), *check_texts(flatten(resolved)), *of_memory])
    stop_on(check_together(resolved))


def _with_letters(resolved: Any, written: Any) -> Any:
    """Return a resolved block with the `Letters` of its options, whose types only their memory knows."""
    if isinstance(written, Letters):
        return resolved if is_interpolation(written) else written
    if isinstance(written, Mapping):
        return {name: _with_letters(resolved[name], child) for name, child in written.items()}
    if isinstance(written, list):
        return [_with_letters(*pair) for pair in zip(resolved, written, strict=True)]
    return resolved


def _write_out_memory(config: Config, written: Mapping[str, Any], memory_options: MemoryOptions) -> Sequence[Problem]:
    """Complete the memory block with the types and defaults of its options, or return its problems."""
    try:
        completed = memory_options(written)
    except ConfigError as error:
        return error.problems
    except ValueError as error:
        return [_begun_by_key(str(error)) or Problem("memory", str(error))]
    given = cast(dict[str, Any], OmegaConf.to_container(config.memory))
    unresolved = _unresolved(given)
    config.memory = completed if unresolved is None else merge(completed, unresolved)
    return []


def _unresolved(tree: Any) -> Any:
    """Return the parts of a block that are interpolations, or lists with some; None if there are none."""
    if isinstance(tree, Mapping):
        found = {name: _unresolved(child) for name, child in tree.items()}
        return {name: child for name, child in found.items() if child is not None} or None
    return tree if any(map(is_interpolation, flatten(tree).values())) else None


def _check_further(config: Config, check: Callable[[Config], object]) -> None:
    try:
        check(config)
    except ConfigError:
        raise
    except ValueError as error:
        problem = _begun_by_key(str(error))
        if problem is None:
            raise
        raise ConfigError([problem]) from error


def _begun_by_key(message: str) -> Problem | None:
    """An error of a memory or a model, which begins with the key: the file must come first. None: it names no key."""
    key, _, text = message.partition(" ")
    is_key = re.fullmatch(r"[a-z_]+(\.[a-z_]+|\.\d+|\[\d+\])+", key) and key.partition(".")[0] in get_type_hints(Config)
    return Problem(key, text) if is_key else None


def merge_checked(schema: type, node: Mapping[str, Any], where: str) -> DictConfig:
    """Check a block against a dataclass and return it completed with the defaults.

    Args:
        node: the block, a plain mapping or part of a configuration.
        where: key of the block in the configuration, `memory`, for messages.

    Raises:
        ConfigError: the block has unknown keys (the message suggests known ones), wrong types, or values that the
            metadata of their keys excludes.
    """
    tree = with_homes(settled(typed(schema, plain_block(node), where)), lambda key: is_path(schema, key))
    stop_on(check_tree(schema, tree, key=where, everywhere=known_keys()))
    stop_on(check_values(schema, tree, where))
    return cast(DictConfig, OmegaConf.merge(OmegaConf.structured(schema), tree))


def read_block(schema: type, path: Path, settle: Callable[[Any], Any] = settled) -> Any:
    """Return a YAML file of another kind than a configuration, as a sweep, as an instance of its dataclass.

    Args:
        settle: gives the `Letters` of keys without a type their values.

    Raises:
        ConfigError: the file cannot be read, or does not fit the dataclass.
    """
    try:
        tree = settle(typed(schema, parse(read_regular(path)) or {}))
        found = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(schema), tree))
    except (OmegaConfBaseException, YAMLError, RecursionError, ValueError) as error:
        raise ConfigError([Problem("", str(error).splitlines()[0], str(path))]) from error
    stop_on([problem._replace(where=str(path)) for problem in check_tree(schema, tree)])
    return found


def deepspeed_block(config: Config) -> dict[str, Any]:
    """Return the `deepspeed:` block as given, resolved, without "auto" values and without the keys dist_mem sets."""
    return plain_block(config.deepspeed)


def to_yaml(config: Config, *, resolve: bool = False) -> str:
    """Return the whole configuration as YAML, interpolations unresolved, so that no secret gets into a file.

    The keys of `COMMAND_LINE_ONLY` are false in it.

    Args:
        resolve: resolve the interpolations, so that the file can be read without the environment. Texts that depend on
            the environment become `***`, except those with a fixed set of choices or under a key `kind`.
    """
    kept = cast(DictConfig, config).copy()
    for key in COMMAND_LINE_ONLY:
        OmegaConf.update(kept, key, False)
    if resolve:
        for key, found in from_environment(config).items():
            schema = find_key(Config, key)
            is_choice = key.endswith(".kind") or (schema is not None and schema.metadata.choices)
            if isinstance(found.value, str) and not is_choice:
                OmegaConf.update(kept, key, "***")
    return dump(OmegaConf.to_container(kept, resolve=resolve))


def value_of(config: Config, key: str) -> Any:
    """Return the resolved value of a dotted key. Raises ConfigError for an unknown key."""
    if key not in known_keys():
        stop_on([Problem(key, "is not a key; `dist-mem config` lists all keys")])
    return OmegaConf.select(cast(Any, config), key)


def save_config(config: Config, path: Path) -> None:
    """Write the configuration atomically, in the form of `to_yaml`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, to_yaml(config))


def read_config(path: Path) -> Config:
    """Read a configuration that `save_config` wrote. Raises ConfigError as `load_config` does."""
    return load_config([str(path)])
