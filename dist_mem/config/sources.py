"""Configuration sources: YAML files, then `a.b=c` overrides, read into plain trees and merged.

This module checks only that files can be read and interpolations resolved, not keys and values. values.py says how a
text becomes a value.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, cast

from dist_mem.config.check import SURE, ConfigError, Problem, all_keys, fields_of, format_value, join, nearest
from dist_mem.config.deepspeed_keys import NULLABLE
from dist_mem.config.documents import UNREADABLE, YamlDocument, place_of, place_problems, read_document
from dist_mem.config.interpolations import check_grammar
from dist_mem.config.keys import with_homes
from dist_mem.config.memory_blocks import DEFAULT, PER_BLOCK, as_block, is_key, is_per_block, with_kinds
from dist_mem.config.schema import Config
from dist_mem.config.settings import metadata_of
from dist_mem.config.values import Letters, as_override, convert_letters, untyped_values, yaml_error
from dist_mem.runtime.environment import as_submitted
from dist_mem.runtime.files import WrongFileError, at_home, is_dir, is_file, open_regular
from dist_mem.runtime.ranks import is_rank0
from dist_mem.runtime.shipped_files import say_where_from, shipped_path, shipped_root

COMMAND_LINE = "command line"
SUFFIXES = (".yaml", ".yml", ".json")
_TYPES = {**(fields_of(Config) or {}), "deepspeed": NULLABLE}
_SAVED = "config.yaml"  # of a run
_GONE = (("tracking", "prometheus"),)  # keys of earlier releases, by block; runs have saved them


class ConfigSource(NamedTuple):
    """A file, or overrides of a command line."""

    tree: dict[str, Any]  # options of memories are `Letters`, as their types depend on the kind; all else is typed
    where: str  # the file, or COMMAND_LINE
    lines: Mapping[str, int] = MappingProxyType({})  # full key -> its line in the file
    is_whole_deepspeed: bool = False  # a ds_config.json, which replaces the block instead of merging into it

    def place(self, key: str) -> str:
        """Return the file with the line of a key, or `command line`."""
        return place_of(key, self.where, self.lines)


def read_sources(arguments: Sequence[str]) -> list[ConfigSource]:
    """Read the files in their order, then the overrides, at whatever position they are given.

    Raises:
        ConfigError: a file is missing (the message suggests a similar one) or is not YAML, or an override is not
            key=value.
    """
    names = [argument for argument in arguments if is_file_name(argument)]
    overrides = [argument for argument in arguments if not is_file_name(argument)]
    folders = [Path(), *([Path(at_home(names[0])).parent] if names else []), Path("configs")]
    paths = [find_file(name, folders) for name in names]
    sources = [_source(read_document(path)) for path in paths]
    sources += _read_overrides(overrides)
    sources = [source._replace(tree=_with_memory_block(source.tree)) for source in sources]
    return [part for source in sources for part in _with_deepspeed_file(source)]


def is_file_name(argument: str) -> bool:
    """Return whether an argument is the name of a file, and no override; a file may have a `=` in its name."""
    return "=" not in argument or is_file(as_submitted(Path(argument)))


def _source(document: YamlDocument) -> ConfigSource:
    with document.place_problems():
        tree = _convert(document.tree)
        if document.path.name == _SAVED:
            tree = _without_gone(tree, document.path)
        return ConfigSource(tree, str(document.path), document.lines)


def _without_gone(tree: dict[str, Any], path: Path) -> dict[str, Any]:
    """Return the tree of a run without `_GONE`, so that runs of earlier releases go on; a user's file is refused."""
    for block, name in _GONE:
        children = tree.get(block)
        if isinstance(children, Mapping) and name in children:
            if untyped_values(children[name]) is not None:
                _say_gone(join(block, name), path)
            tree = {**tree, block: {key: child for key, child in children.items() if key != name}}
    return tree


@cache
def _say_gone(key: str, path: Path) -> None:
    """Print once, on rank 0, that a key of a run has no effect any more."""
    if is_rank0():
        print(f"{path}: {key} is gone, and left out (CHANGELOG.md)", file=sys.stderr, flush=True)


def read_saved(path: Path) -> dict[str, Any]:
    """Return the tree of a run's config.yaml, unresolved, without checking it.

    Raises:
        RunError: as `read_document`.
    """
    return cast(dict[str, Any], untyped_values(_with_memory_block(_source(read_document(path)).tree)))


def _with_memory_block(tree: dict[str, Any]) -> dict[str, Any]:
    """Return a typed tree as `_make_plain` does, with its memories as a block with a kind."""
    tree = _make_plain(tree)
    return {**tree, "memory": as_block(tree["memory"])} if "memory" in tree else tree


def _make_plain(tree: dict[str, Any]) -> dict[str, Any]:
    """Return a typed tree in which only the options of memories are `Letters`, and no path begins with `~`."""
    plain = {name: child if name == "memory" else untyped_values(child) for name, child in tree.items()}
    return cast(dict[str, Any], with_homes(plain, lambda key: metadata_of(key).is_place))


def _convert(tree: Any) -> dict[str, Any]:
    """Return a tree of `parse` with the types of the schema; unknown keys and options of memories stay `Letters`."""
    found: dict[str, Any] = convert_letters(_TYPES, tree)
    if "memory" in found:
        found["memory"] = with_kinds(_with_blocks(found["memory"], "memory"))
    return found


def _with_blocks(memory: Any, key: str) -> Any:
    """Return the `memory` block with the blocks of its memories read as YAML, but not their options."""
    found = convert_letters(dict, memory, key) if isinstance(memory, Letters) else memory
    if isinstance(found, list):
        return [_with_blocks(child, f"{key}[{index}]") for index, child in enumerate(found)]
    if isinstance(found, Mapping):
        blocks = {name: child for name, child in found.items() if name == "over" or is_key(name)}
        return {**found, **{name: _with_blocks(child, join(key, name)) for name, child in blocks.items()}}
    return found


def files_of(arguments: Sequence[str]) -> list[Path]:
    """Return the files that `read_sources` reads."""
    return [Path(source.where) for source in read_sources(arguments) if source.where != COMMAND_LINE]


def find_file(name: str, folders: Sequence[Path]) -> Path:
    """Return the first of `folders` / `name` that is a file, else the file of that name that comes with dist_mem.

    Raises:
        ConfigError: none is a file; the message suggests a similar one of these folders, of the folder in `name`, or
            below configs/.
    """
    name = at_home(name)
    for folder in folders:
        if is_file(as_submitted(folder / name)):
            return folder / name
    for folder in (Path(), Path("configs")):
        if (shipped := shipped_path(str(folder / name))) and is_file(shipped):
            say_where_from()
            return shipped
    if os.path.lexists(name) and not is_dir(Path(name)):
        try:
            open_regular(Path(name)).close()
        except WrongFileError as error:
            raise ConfigError([Problem("", f"is {error.strerror}", name)]) from error
    if is_dir(Path(name)):
        inside = Path(name) / "config.yaml"
        meant = f"; did you mean {inside}?" if is_file(inside) else ""
        raise ConfigError([Problem("", f"is a folder: give a YAML file{meant}", name or "''")])
    if name in all_keys(Config):
        raise ConfigError([Problem("", f"is a key and no file: set it with {name}=VALUE", name)])
    close = _nearest_file(name, folders)
    meant = f"; did you mean {close}?" if close else ""
    hint = "" if Path(name).suffix in SUFFIXES else " (a key is set with key=value)"
    raise ConfigError([Problem("", f"no such file{hint}{meant}", format_value(name).strip("'"))])


def _nearest_file(name: str, folders: Sequence[Path]) -> str | None:
    """Return the file that was probably meant: one of the same name, or of a similar name, or of a similar path."""
    named = [folder / Path(name).parent for folder in folders]
    nearby = [path for folder in dict.fromkeys([*folders, *named]) for path in _config_files(folder)]
    paths = list(dict.fromkeys(map(str, [*nearby, *_shipped_files()])))
    same = [path for path in paths if Path(path).stem == Path(name).stem]
    stem = nearest(Path(name).stem, [Path(path).stem for path in paths], SURE)
    similar = next((path for path in paths if Path(path).stem == stem), None)
    return nearest(name, same, 0.0) or similar or nearest(name, paths)


def _config_files(folder: Path) -> Iterator[Path]:
    """Yield the configuration files of a folder; only configs/ is searched recursively, others may be a whole disk."""
    if is_dir(folder):
        for path in sorted(folder.glob("**/*" if folder.name == "configs" else "*")):
            if path.suffix in SUFFIXES:
                yield path


def _shipped_files() -> Iterator[Path]:
    """Yield the configurations that come with dist_mem, by the names under which they are found in any folder."""
    for path in _config_files(shipped_root() / "configs"):
        yield path.relative_to(shipped_root())


def _read_overrides(overrides: Sequence[str]) -> list[ConfigSource]:
    """Return the overrides as one source, and before it the file of `deepspeed=path`, over which the others win."""
    tree: dict[str, Any] = {}
    files: list[ConfigSource] = []
    for override in overrides:
        key, _, text = override.partition("=")
        names = re.split(r"[.\[]", key.replace("]", ""))
        if not all(names):
            raise ConfigError([Problem(key, f"{format_value(override)} is not key=value", COMMAND_LINE)])
        branch: Any = as_override(text)
        for name in reversed(names):
            branch = {name: branch}
        with place_problems(lambda key: COMMAND_LINE):
            branch = _convert(branch)
        try:
            check_grammar(untyped_values(branch))
        except UNREADABLE as error:
            problem = f"{format_value(text)} cannot be read as a value: {yaml_error(error)}"
            raise ConfigError([Problem(key, problem, COMMAND_LINE)]) from error
        if isinstance(branch.get("deepspeed"), str):
            files = [ConfigSource(branch, COMMAND_LINE)]
        else:
            tree = _without_other_kinds(tree, branch)
            with place_problems(lambda key: COMMAND_LINE):
                tree = merge(tree, branch)
    return [*files, ConfigSource(tree, COMMAND_LINE)]


def _with_deepspeed_file(source: ConfigSource) -> list[ConfigSource]:
    """Split off the file of `deepspeed: path` as a separate source, placed after the file that names it."""
    name = source.tree.get("deepspeed")
    if not isinstance(name, str):
        return [source]
    folders = [Path()] if source.where == COMMAND_LINE else [Path(), Path(source.where).parent]
    try:
        path = find_file(name, folders)
    except ConfigError as error:
        raise ConfigError([Problem("deepspeed", f"{name}: {error.problems[0].text}", source.where)]) from error
    block = _source(read_document(path).inside("deepspeed"))
    rest = {key: child for key, child in source.tree.items() if key != "deepspeed"}
    return [source._replace(tree=rest), block._replace(tree=_make_plain(block.tree), is_whole_deepspeed=True)]


def merge_source(tree: dict[str, Any], source: ConfigSource) -> dict[str, Any]:
    """Return `tree` with a later source merged into it.

    A changed kind of a memory, also of one block of the model or of one below, drops the options of the former kind,
    and a ds_config.json replaces the former block.
    """
    new = source.tree
    if isinstance(new.get("memory"), Mapping):
        tree = {**tree, "memory": _same_kind(tree["memory"], new["memory"])}
    if source.is_whole_deepspeed:
        tree = {**tree, "deepspeed": {}}
    with place_problems(source.place):
        return merge(tree, new) if new else tree


def _without_other_kinds(tree: dict[str, Any], branch: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tree without the options of memories of single blocks to which an override gives another kind."""
    old, new = tree.get("memory"), branch.get("memory")
    if not (isinstance(old, Mapping | list) and isinstance(new, Mapping) and any(map(is_key, new))):
        return tree

    def keep_options(name: Any, was: Any) -> Any:
        child = new.get(str(name))
        return _same_kind(was, child) if is_key(str(name)) and isinstance(child, Mapping) and "kind" in child else was

    if isinstance(old, list):
        return {**tree, "memory": [keep_options(*item) for item in enumerate(old)]}
    return {**tree, "memory": {name: keep_options(name, was) for name, was in old.items()}}


def _same_kind(old: Any, new: Mapping[str, Any]) -> Any:
    """Return the old memory block, emptied if the new one has another kind; likewise for the memories inside of it.

    Under a new map, one memory for all blocks is the old `default`.
    """
    if is_per_block(new) and DEFAULT in new and isinstance(old, Mapping) and not is_per_block(old):
        old = {"kind": PER_BLOCK, DEFAULT: old}
    if not isinstance(old, Mapping) or _class_of(new.get("kind", old.get("kind"))) != _class_of(old.get("kind")):
        return {}
    memories = {name for name in new if name == "over" or is_per_block(old)}
    inside = {name: child for name, child in new.items() if name in memories and isinstance(child, Mapping)}
    return {**old, **{name: _same_kind(old.get(name), child) for name, child in inside.items()}}


def _class_of(kind: Any) -> Any:
    """Return what decides about a memory's options: of PATH:CLASS the class, as a run has its own copy of the file."""
    path, colon, name = str(kind).rpartition(":")
    return f":{name}" if colon and path.endswith(".py") else kind


def merge(old: Any, new: Any, key: str = "") -> Any:
    """Merge blocks key by key; replace all else, including lists, except for single items as `groups.0.lr=1`.

    Raises:
        ConfigError: a list has no such item, or a key is given of what is not a block.
    """
    if not isinstance(new, Mapping) or not new:
        return new
    old = convert_letters(dict, old, key) if isinstance(old, Letters) else old
    if isinstance(old, list) and all(str(index).isdecimal() for index in new):
        items = list(old)
        for index, child in new.items():
            if int(index) >= len(items):
                raise ConfigError(
                    [Problem(f"{key}[{index}]", f"there are only {len(items)} items; give the whole list")]
                )
            items[int(index)] = merge(items[int(index)], child, f"{key}[{index}]")
        return items
    if isinstance(old, str | int | float | list):
        given = join(key, next(iter(new)))
        raise ConfigError([Problem(key, f"is {format_value(old)}, but {given} is given too; leave one of them out")])
    kept = old or {}
    return {**kept, **{name: merge(kept.get(name), child, join(key, name)) for name, child in new.items()}}
