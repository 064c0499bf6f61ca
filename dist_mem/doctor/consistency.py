"""Have all ranks the same code, configuration and data? Names those that differ from most."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from dist_mem.config.check import flatten
from dist_mem.data.directory import local_dir
from dist_mem.data.remote.fetch import is_remote
from dist_mem.data.shard import INDEX_NAME, read_index_metadata
from dist_mem.data.tokenizers.registry import JSON_NAME, read_tokenizer_metadata
from dist_mem.runtime.files import sha256_of
from dist_mem.runtime.findings import Finding, Place, Remark, fail, ok, warning
from dist_mem.tracking.provenance import PACKAGE, running_commit, versions

MISSING = "missing"
_PLACES = ("run_dir", "data.path", "data.cache", "data.stage_dir", "train.threads")  # may be others on other nodes

Facts = dict[str, str]  # what is compared -> what this rank has
_FIXES = {
    "code": "install the same everywhere: one environment on a disk that all nodes share, or one image",
    "configuration": "give every rank the same files and overrides",
    "data": "copy the data there again, or build it there: dist-mem prepare verify",
}


def code_facts(*, with_commit: bool) -> Facts:
    """Versions, a checksum of the package's sources and, on request, the commit, for which git is asked."""
    found = {name.removeprefix("version."): text for name, text in versions().items()}
    digest = hashlib.sha256()
    for path in sorted(PACKAGE.rglob("*.py")):
        digest.update(f"{path.relative_to(PACKAGE)}\n".encode() + path.read_bytes())
    found["sources of dist_mem"] = digest.hexdigest()[:12]
    if with_commit:
        found["commit"] = running_commit() or "not known"
    return found


def config_facts(config: Any) -> Facts:
    """Every key and its value, as a checksum where it comes out of the environment: that may be a secret."""
    written = flatten(OmegaConf.to_container(config, resolve=False))
    values = flatten(OmegaConf.to_container(config, resolve=True))
    found = {}
    for key, value in values.items():
        is_open = "${" in str(written.get(key, "${"))
        text = hashlib.sha256(str(value).encode()).hexdigest()[:12] if is_open else repr(value)
        if key not in _PLACES:
            found[key] = text
    return found


def config_hash(facts: Mapping[str, str]) -> str:
    """Twelve digits for a whole configuration."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:12]


def data_facts(config: Any) -> Facts:
    """Checksums of tokenizer and indexes, and the sizes of all tars, as this node has them.

    Of a URL nothing: what is fetched is compared with its checksum anyway; so are the tars where they are staged.
    """
    data = config.data
    if is_remote(data.path):
        return {}
    found = {JSON_NAME: _fingerprint(local_dir(data) / JSON_NAME)}
    for split in _splits(config):
        split_dir = local_dir(data) / split
        found[f"{split}/{INDEX_NAME}"] = _fingerprint(split_dir / INDEX_NAME)
        for path in sorted(split_dir.glob("*.tar")) if data.stage == "none" else ():
            found[f"{split}/{path.name}"] = f"{path.stat().st_size:,} bytes"
    return found


def _fingerprint(path: Path) -> str:
    return sha256_of(path)[:12] if path.is_file() else MISSING


def check_tars(config: Any) -> Iterator[Remark]:
    """Whether the tars of the training split are as long as its index says, on this node."""
    data = config.data
    split_dir = local_dir(data) / data.train_split
    if is_remote(data.path) or data.stage != "none" or not (split_dir / INDEX_NAME).is_file():
        return  # fetched or staged, and compared then, or missing: the job says so
    for shard in read_index_metadata(split_dir / INDEX_NAME)["shards"]:
        path = split_dir / shard["name"]
        size = path.stat().st_size if path.exists() else None
        if size != shard["bytes"]:
            has = f"is {MISSING}" if size is None else f"has {size:,} bytes"
            told = f"{path} {has}; it had {shard['bytes']:,} when it was built"
            if data.on_corrupt == "skip":
                yield warning("data", f"{told}: its documents are skipped", _FIXES["data"])
            else:
                yield fail("data", told, _FIXES["data"], blames_node=True)


def check_data(config: Any) -> Iterator[Remark]:
    """Whether there are a tokenizer and the indexes that training opens; nothing of a URL is looked at.

    Raises:
        ValueError: one is missing or damaged; names the file and the fix.
    """
    data = config.data
    if not is_remote(data.path):
        read_tokenizer_metadata(local_dir(data))
        for split in _splits(config):
            read_index_metadata(local_dir(data) / split / INDEX_NAME)
    yield from ()


def _splits(config: Any) -> list[str]:
    return list(dict.fromkeys([config.data.train_split, *([config.eval.split] if config.eval.every else [])]))


def compare(what: str, places: Sequence[Place], facts: Sequence[Facts]) -> Iterator[Finding]:
    """Name the ranks, or whole nodes, that have something else than most; arguments in rank order.

    Args:
        what: code, configuration or data.
    """
    is_one = True
    for name in sorted(set().union(*facts)):
        values = [own.get(name, MISSING) for own in facts]
        usual = max(values, key=lambda value: (values.count(value), -values.index(value)))
        for value in dict.fromkeys(values):
            if value != usual:
                odd = [place for place, own in zip(places, values, strict=True) if own == value]
                told = f"{name}: {value}, but {usual} on {values.count(usual)} of {len(values)} ranks"
                is_one = False
                for place in _whole_nodes(odd, places):
                    yield fail(what, told, _FIXES[what], blames_node=what != "configuration").at(place)
    if is_one and MISSING not in facts[0].values():
        yield ok(what, _summary(what, facts[0])).at(None)


def _whole_nodes(odd: Sequence[Place], places: Sequence[Place]) -> list[Place]:
    """Ranks, but a node where all of its ranks are among them."""
    found = []
    for place in odd:
        is_whole = all(other in odd for other in places if other.node == place.node)
        found.append(Place(place.node) if is_whole else place)
    return list(dict.fromkeys(found))


def _summary(what: str, facts: Facts) -> str:
    if what == "code":
        return ", ".join(f"{name} {text}" for name, text in facts.items() if name != "sources of dist_mem")
    if what == "configuration":
        return f"{len(facts)} keys, {config_hash(facts)}"
    tars = sum(name.endswith(".tar") for name in facts)
    return f"{tars} tars, {', '.join(f'{name} {text}' for name, text in facts.items() if not name.endswith('.tar'))}"
