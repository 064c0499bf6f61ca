"""Read, merge, check and write a configuration.

`load_config` refuses unknown keys at any depth and wrong values. It reports all of them at once, each with its file and
a suggestion. Each memory declares its options (`Memory.Options`); `load_config` checks them with the `memory_options`
function that its caller passes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any, TypeVar, cast

from dist_mem.config import deepspeed_keys
from dist_mem.config.blocks import add_defaults, as_tree, build, put, value_at
from dist_mem.config.check import (
    ConfigError,
    Problem,
    all_keys,
    check_tree,
    fields_of,
    flatten,
    format_value,
    is_interpolation,
    join,
    locate,
    stop_on,
)
from dist_mem.config.constraints import check_together
from dist_mem.config.documents import place_problems, read_document
from dist_mem.config.environment_values import from_environment, hide_all, watch_environment
from dist_mem.config.interpolations import resolve
from dist_mem.config.keys import Key, check_values, find_key, is_path, keys_of, type_of, with_homes
from dist_mem.config.schema import DOCUMENT, Config
from dist_mem.config.sources import COMMAND_LINE, ConfigSource, merge, merge_source, read_saved, read_sources
from dist_mem.config.text_checks import check_credentials, check_given, check_texts
from dist_mem.config.values import Letters, convert_letters, dump, untyped_values
from dist_mem.runtime.files import is_file, write_text
from dist_mem.runtime.shipped_files import shipped_root

BlockT = TypeVar("BlockT")
COMMAND_LINE_ONLY = tuple(name for name, found in keys_of(Config).items() if found.metadata.command_line_only)
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
    trains: bool = True,
    check: Callable[[Config], object] = lambda config: None,
) -> Config:
    """Read, merge and check a configuration.

    Args:
        arguments: YAML files, merged left to right, and `a.b=c` overrides, which win at any position. A file is
            looked up in the current directory, beside the first file, under configs/, and among those that come with
            dist_mem.
        memory_options: checks the memory block and returns it with all options, which are merged in;
            None skips this check.
        trains: it must say how long the training is, and have lanes for its micro-batches.
        check: raises ValueError for what only a model can refuse; its text begins with the key.

    Returns:
        The values; `Config.document` has them with interpolations like `${oc.env:HOME}`.

    Raises:
        ConfigError: lists all problems, one per line, with interpolations in place of values from the environment.
    """
    watch_environment()
    sources = read_sources(arguments)
    stop_on(
        [problem._replace(where=source.place(problem.key)) for source in sources for problem in _check_source(source)]
    )
    tree = as_tree(Config())
    origins: dict[str, str] = {}
    for source in sources:
        tree = merge_source(tree, source)
        origins.update((key, source.place(key)) for key in flatten(source.tree))
    tree["deepspeed"] = deepspeed_keys.without_defaults(tree["deepspeed"])
    document = add_defaults(Config, untyped_values(tree))
    try:
        with _hiding(document):
            config = _check_merged(document, tree["memory"], memory_options, trains=trains)
            _check_further(config, check)
    except ConfigError as error:
        raise ConfigError([locate(problem, origins) for problem in error.problems]) from None
    return config


@contextmanager
def _hiding(document: Mapping[str, Any]) -> Iterator[None]:
    """Replace values from the environment in errors about a document by their interpolations."""
    try:
        yield
    except ConfigError as error:
        problems = [problem._replace(text=hide_all(problem.text, document)) for problem in error.problems]
        raise ConfigError(problems) from None


def change_config(config: Config, changes: Mapping[str, Any]) -> Config:
    """Return a configuration with other values of some keys, which must be valid.

    What refers to a key by an interpolation changes with it.

    Args:
        changes: full dotted key -> value.

    Raises:
        KeyError: there is no such key.
    """
    document = as_tree(config.document)
    for key, value in changes.items():
        put(document, key, as_tree(value))
    return _from_document(add_defaults(Config, document))


def _from_document(document: dict[str, Any], values: Mapping[str, Any] | None = None) -> Config:
    config: Config = build(Config, resolve(document, partial(type_of, Config)) if values is None else values)
    config.__dict__[DOCUMENT] = document
    return config


def _check_source(source: ConfigSource) -> Iterable[Problem]:
    yield from check_tree(Config, source.tree, everywhere=known_keys())
    yield from check_credentials(source.tree)
    yield from check_given(untyped_values(source.tree))
    if source.where != COMMAND_LINE:
        leaves = flatten(source.tree)
        for key in COMMAND_LINE_ONLY:
            if leaves.get(key, False) is not False:
                yield Problem(key, f"is accepted on the command line only: remove it here, and add {key}=true there")
    block = source.tree.get("deepspeed", {})
    if isinstance(block, Mapping):
        yield from deepspeed_keys.check_block(block, key="deepspeed", everywhere=known_keys())
    else:
        yield Problem("deepspeed", f"is {format_value(block)}, but must be a block or the path of a ds_config.json")


def _check_merged(
    document: dict[str, Any], written_memory: Any, memory_options: MemoryOptions | None, *, trains: bool
) -> Config:
    """Check what only the merged tree shows: interpolated values, limits, the memory's options, combinations.

    Args:
        written_memory: the `memory` block with its options as `Letters`.

    Returns:
        The configuration, whose memory has all its options.
    """
    values = resolve(document, partial(type_of, Config))
    memory = values["memory"]
    if not isinstance(memory, Mapping) or not isinstance(memory.get("kind"), str):
        stop_on([_problem_without_kind(memory, memory_options)])
    of_deepspeed = deepspeed_keys.check_block(values["deepspeed"], key="deepspeed", everywhere=())
    stop_on([*check_tree(Config, values, everywhere=known_keys()), *of_deepspeed])
    values = add_defaults(Config, values)
    of_memory: Sequence[Problem] = ()
    completed = memory
    if memory_options is not None:
        try:
            completed = memory_options(_with_letters(memory, written_memory))
        except ConfigError as error:
            of_memory = error.problems
        except ValueError as error:
            of_memory = [_problem_of_message(str(error)) or Problem("memory", str(error))]
    stop_on([*check_values(Config, values), *check_texts(flatten(values)), *of_memory])
    stop_on(check_together(values, trains=trains))
    unresolved = _find_unresolved(document["memory"])
    written = completed if unresolved is None else merge(completed, unresolved)
    return _from_document({**document, "memory": written}, {**values, "memory": completed})


def _problem_without_kind(memory: Any, memory_options: MemoryOptions | None) -> Problem:
    """Return what to write in place of a memory that is no block with a kind, as its name alone."""
    wrong = f"is {format_value(memory)}, but must be a block with a kind"
    if not isinstance(memory, str):
        return Problem("memory", wrong)
    if memory.endswith(".yaml"):
        return Problem("memory", f"{wrong}; give the file as an argument")
    file = f"configs/memory/{memory}.yaml"
    if re.fullmatch(r"\w+", memory) and is_file(shipped_root() / file):
        return Problem("memory", f"{wrong}; give {file} as an argument")
    try:
        if memory_options is not None:
            memory_options({"kind": memory})
    except ValueError as error:  # there is no such memory: which there are
        return Problem("memory", f"{wrong}, and {error}")
    return Problem("memory", f"{wrong}; write memory.kind={memory}")


def _with_letters(resolved: Any, written: Any) -> Any:
    """Return a resolved block with the `Letters` of its options, whose types only their memory knows."""
    if isinstance(written, Letters):
        return resolved if is_interpolation(written) else written
    if isinstance(written, Mapping):
        return {name: _with_letters(resolved[name], child) for name, child in written.items()}
    if isinstance(written, list):
        return [_with_letters(*pair) for pair in zip(resolved, written, strict=True)]
    return resolved


def _find_unresolved(tree: Any) -> Any:
    """Return the parts of a block that are interpolations, or lists with some; None if there are none."""
    if isinstance(tree, Mapping):
        found = {name: _find_unresolved(child) for name, child in tree.items()}
        return {name: child for name, child in found.items() if child is not None} or None
    return tree if any(map(is_interpolation, flatten(tree).values())) else None


def _check_further(config: Config, check: Callable[[Config], object]) -> None:
    try:
        check(config)
    except ConfigError:
        raise
    except ValueError as error:
        problem = _problem_of_message(str(error))
        if problem is None:
            raise
        raise ConfigError([problem]) from error


def _problem_of_message(message: str) -> Problem | None:
    """An error of a memory or a model, which begins with the key: the file must come first. None: it names no key."""
    key, _, text = message.partition(" ")
    is_key = re.fullmatch(r"[a-z_]+(\.[a-z_]+|\.\d+|\[\d+\])+", key) and key.partition(".")[0] in known_keys()
    return Problem(key, text) if is_key else None


def build_block(schema: type[BlockT], node: Mapping[str, Any], where: str) -> BlockT:
    """Check a block against a dataclass and return it as an instance.

    Args:
        node: the block, a plain and resolved tree, with values or `Letters`.
        where: key of the block in the configuration, `memory`, for messages.

    Raises:
        ConfigError: the block has unknown keys (the message suggests known ones), wrong types, or values that the
            metadata of their keys excludes.
    """
    tree = with_homes(untyped_values(convert_letters(schema, node, where)), lambda key: is_path(schema, key))
    stop_on(check_tree(schema, tree, key=where, everywhere=known_keys()))
    paths = {key: value for key, value in flatten(tree).items() if is_path(schema, key)}
    of_paths = check_texts(paths, lambda key: cast(Key, find_key(schema, key)).metadata)
    stop_on([*check_values(schema, tree, where), *(each._replace(key=join(where, each.key)) for each in of_paths)])
    return cast(BlockT, build(schema, tree, where))


def load_block(schema: type[BlockT], name: str, arguments: Sequence[str], *, saved: Path | None = None) -> BlockT:
    """Read one block of a configuration; the others may need another environment, or another version of dist_mem.

    Args:
        arguments: as for `load_config`; they win over `saved`.
        saved: what `save_config` wrote. Keys that the block does not have are left out.

    Raises:
        ConfigError: as `load_config`, for this block alone.
        RunError: `saved` cannot be read.
    """
    watch_environment()
    tree = as_tree(Config())  # an interpolation may name a key that nothing gives
    if saved is not None:
        document = read_saved(saved)
        tree |= document | merge({name: tree[name]}, {key: child for key, child in document.items() if key == name})
        wrong = check_tree(schema, tree[name], key=name)
        stop_on([each._replace(where=str(saved)) for each in wrong if "unknown key" not in each.text])
        if isinstance(tree[name], Mapping):  # else an interpolation of another block
            tree[name] = {key: value for key, value in tree[name].items() if key in (fields_of(schema) or {})}
    for source in read_sources(arguments):
        given = {key: untyped_values(child) for key, child in source.tree.items() if key == name}
        found = [*check_tree(Config, given, everywhere=known_keys()), *check_given(given)]
        found += check_credentials(source.tree)
        stop_on([problem._replace(where=source.place(problem.key)) for problem in found])
        with place_problems(source.place):
            tree = merge(tree, untyped_values(source.tree)) if source.tree else tree
    with _hiding(tree):
        values = resolve(tree, partial(type_of, Config), name)[name]
        texts = check_texts(flatten(values, name))
        stop_on([*check_tree(schema, values, key=name), *check_values(schema, values, name), *texts])
        return cast(BlockT, build(schema, values, name))


def read_block(schema: type[BlockT], path: Path, settle: Callable[[Any], Any] = untyped_values) -> BlockT:
    """Return a YAML file of another kind than a configuration, as a sweep, as an instance of its dataclass.

    Args:
        settle: gives the `Letters` of keys without a type their values.

    Raises:
        RunError: the file cannot be read, or does not fit the dataclass.
    """
    document = read_document(path)
    with document.place_problems():
        tree = settle(convert_letters(schema, document.tree))
        stop_on([*check_tree(schema, tree), *check_given(tree)])
        values = resolve(tree, lambda key: Any)
        stop_on(check_tree(schema, values))
        return cast(BlockT, build(schema, values))


def deepspeed_block(config: Config) -> dict[str, Any]:
    """Return a copy of the `deepspeed:` block as given, without "auto" values and without the keys dist_mem sets."""
    return cast(dict[str, Any], as_tree(config.deepspeed))


def to_yaml(config: Config, *, resolve: bool = False) -> str:
    """Return the whole configuration as YAML, interpolations unresolved, so that no secret gets into a file.

    The keys of `COMMAND_LINE_ONLY` are false in it.

    Args:
        resolve: resolve the interpolations, so that the file can be read without the environment. Texts that depend on
            the environment become `***`, except those with a fixed set of choices, or a kind or regular expression.
    """
    kept = as_tree(config if resolve else config.document)
    for key in COMMAND_LINE_ONLY:
        put(kept, key, False)
    if resolve:
        for key, found in from_environment(config.document).items():
            schema = find_key(Config, key)
            is_choice = key.endswith((".kind", ".param_regex")) or (schema is not None and schema.metadata.choices)
            if isinstance(found.value, str) and not is_choice:
                put(kept, key, "***")
    return dump(kept)


_FULL_KEY = re.compile(r"[^.\[\]]+(\[\d+\])*(\.[^.\[\]]+(\[\d+\])*)*")


def value_of(config: Config, key: str) -> Any:
    """Return the value of a full key, also of a memory's options. Raises ConfigError for an unknown key."""
    tree = as_tree(config)
    is_found = _FULL_KEY.fullmatch(key) and value_at(tree, key) is not None
    if not is_found and key not in (*known_keys(), *flatten(tree)):
        stop_on([Problem(key, "is not a key; `dist-mem config` lists all keys")])
    return value_at(tree, key)


def save_config(config: Config, path: Path) -> None:
    """Write the configuration atomically, in the form of `to_yaml`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, to_yaml(config))


def read_config(path: Path) -> Config:
    """Read a configuration that `save_config` wrote. Raises ConfigError as `load_config` does."""
    return load_config([str(path)])
