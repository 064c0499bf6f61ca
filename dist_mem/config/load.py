"""Read, merge, check and write a configuration.

`load_config` refuses unknown keys at any depth and wrong values. It reports all of them at once, each with its file and
a suggestion. Each memory declares its options (`Memory.Options`); `load_config` checks them with the `memory_options`
function that its caller passes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any, cast, get_type_hints

from omegaconf import DictConfig, OmegaConf

from dist_mem.config import deepspeed_keys
from dist_mem.config.bounds import check_bounds
from dist_mem.config.check import (
    ConfigError,
    Problem,
    all_keys,
    check_tree,
    flatten,
    located,
    optional_keys,
    shown,
    stop_on,
)
from dist_mem.config.constraints import CHOICES, check_together, check_values
from dist_mem.config.credentials import check_credentials
from dist_mem.config.environment_values import hide_all, replace_texts, watch_environment
from dist_mem.config.schema import Config
from dist_mem.config.sources import COMMAND_LINE, Source, merge, merge_source, plain_block, read_sources, resolve
from dist_mem.config.text_checks import check_texts
from dist_mem.runtime.files import write_text

COMMAND_LINE_ONLY = ("data.allow_pipe", "eval.allow_code")  # no file may permit the execution of foreign code
MemoryOptions = Callable[[Any], tuple[str, Any]]  # dist_mem.memory.memory_options


@cache
def known_keys() -> tuple[str, ...]:
    """Return the full dotted keys of the schema and of the `deepspeed:` block."""
    return (*all_keys(Config), *(f"deepspeed.{key}" for key in all_keys(deepspeed_keys.SCHEMA)))


def load_config(
    arguments: Sequence[str],
    *,
    memory_options: MemoryOptions | None = None,
    check: Callable[[Config], object] = lambda config: None,
) -> Config:
    """Read, merge and check a configuration.

    Args:
        arguments: YAML files, merged left to right, and `a.b=c` overrides, which win at any position. A file is
            looked up in the current directory, beside the first file, and under configs/.
        memory_options: checks the memory block and returns its options, which are merged in; None skips this check.
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
        tree = _merged(tree, source)
        origins.update(dict.fromkeys(flatten(source.tree), source.where))
    tree["deepspeed"] = deepspeed_keys.without_defaults(tree["deepspeed"])
    config = cast(DictConfig, OmegaConf.merge(OmegaConf.structured(Config(memory={}, deepspeed={})), tree))
    try:
        stop_on(_check_merged(config))
        if memory_options is not None:
            _write_out_memory(config, memory_options)
        _check_further(cast(Config, config), check)
    except ConfigError as error:
        problems = [problem._replace(text=hide_all(problem.text, config)) for problem in error.problems]
        raise ConfigError([located(problem, origins) for problem in problems]) from None
    return cast(Config, config)


def _check_source(source: Source) -> Iterable[Problem]:
    yield from check_tree(Config, source.tree, everywhere=known_keys())
    yield from check_credentials(source.tree)
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


def _merged(tree: dict[str, Any], source: Source) -> dict[str, Any]:
    try:
        return merge_source(tree, source)
    except ConfigError as error:
        raise ConfigError([problem._replace(where=source.where) for problem in error.problems]) from None


def _check_merged(config: DictConfig) -> list[Problem]:
    """Return the problems that only the merged tree shows: interpolated values, ranges and checks across keys."""
    resolved = resolve(config)
    memory = resolved["memory"]
    if not isinstance(memory, Mapping) or not isinstance(memory.get("kind"), str):
        return [Problem("memory", f"is {shown(memory)}, but must be a block with a kind")]
    problems = [
        *check_tree(Config, resolved),
        *deepspeed_keys.check_block(resolved["deepspeed"], key="deepspeed", everywhere=()),
    ]
    leaves = flatten(resolved)
    problems = problems or [*check_values(resolved, optional_keys(Config)), *check_bounds(leaves), *check_texts(leaves)]
    return problems or list(check_together(resolved))


def _write_out_memory(config: DictConfig, memory_options: MemoryOptions) -> None:
    try:
        kind, options = memory_options(config.memory)
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError([_begun_by_key(str(error)) or Problem("memory", str(error))]) from error
    given = cast(dict[str, Any], OmegaConf.to_container(config.memory))  # unresolved
    config.memory = merge({"kind": kind, **asdict(options)}, given)


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
    is_key = re.fullmatch(r"[a-z_]+(\.[a-z_]+|\[\d+\])+", key) and key.partition(".")[0] in get_type_hints(Config)
    return Problem(key, text) if is_key else None


def merge_checked(schema: type, node: Mapping[str, Any], where: str) -> DictConfig:
    """Check a block against a dataclass and return it completed with the defaults.

    Args:
        node: the block, a plain mapping or part of a configuration.
        where: key of the block in the configuration, `memory`, for messages.

    Raises:
        ConfigError: the block has unknown keys (the message suggests known ones) or wrong types.
    """
    tree = plain_block(node)
    stop_on(check_tree(schema, tree, key=where, everywhere=known_keys()))
    return cast(DictConfig, OmegaConf.merge(OmegaConf.structured(schema), tree))


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
        replace_texts(kept, but=lambda key: key in CHOICES or key.endswith(".kind"))
    return OmegaConf.to_yaml(kept, resolve=resolve)


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
