"""Check that all ranks have the same code, configuration and data, and name those that differ from the majority."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from dist_mem.config import Config, DataConfig, EvalConfig, as_tree
from dist_mem.config.check import flatten
from dist_mem.config.settings import metadata_of
from dist_mem.data.curriculum import training_dirs
from dist_mem.data.directory import local_dir
from dist_mem.data.index import ShardEntry
from dist_mem.data.remote.fetch import is_remote
from dist_mem.data.shard import INDEX_NAME, read_index
from dist_mem.data.tokenizers.registry import JSON_NAME, read_tokenizer_metadata
from dist_mem.runtime.files import sha256_of
from dist_mem.runtime.terminal import count_noun, short_digest
from dist_mem.runtime.versions import code_versions
from dist_mem.supervision.findings import Finding, Place, Remark, fail, ok, warning
from dist_mem.tracking.provenance import PACKAGE, running_commit

MISSING = "missing"
_NAMED = 3  # tars of a split in a report: with another path, all are missing
_SOURCES = "sources of dist_mem"

Fingerprint = dict[str, str]  # item -> version, value or checksum on this rank
_FIXES = {
    "code": "install the same everywhere: one environment on a disk that all nodes share, or one image",
    "configuration": "give every rank the same files and overrides",
    "data": "copy the data there again, or build it there: dist-mem data verify",
}


def fingerprint_code(*, with_commit: bool) -> Fingerprint:
    """Return versions, a checksum of the package's sources and, if requested, the commit, for which git is run."""
    found = code_versions()
    digest = hashlib.sha256()
    for path in sorted(PACKAGE.rglob("*.py")):
        digest.update(f"{path.relative_to(PACKAGE)}\n".encode() + path.read_bytes())
    found[_SOURCES] = digest.hexdigest()[:12]
    if with_commit:
        found["commit"] = short_digest(running_commit() or "not known")
    return found


def fingerprint(config: Config) -> Fingerprint:
    """Return every key and its value, or a checksum of a value from the environment, which may be a secret."""
    written = flatten(config.document)
    values = flatten(as_tree(config))
    found = {}
    for key, value in values.items():
        is_interpolated = "${" in str(written.get(key, "${"))
        text = hashlib.sha256(str(value).encode()).hexdigest()[:12] if is_interpolated else repr(value)
        if not metadata_of(key).per_node:
            found[key] = text
    return found


def fingerprint_data(data_config: DataConfig, eval_config: EvalConfig) -> Fingerprint:
    """Return checksums of tokenizer and indexes on this node; `check_tars` adds the tars.

    For a URL the result is empty, because fetched files are compared with their checksums anyway.
    """
    found = {}
    for where, data, splits in _on_disk(data_config, eval_config):
        found[f"{where}{JSON_NAME}"] = _checksum(local_dir(data) / JSON_NAME)
        for split in splits:
            found[f"{where}{split}/{INDEX_NAME}"] = _checksum(local_dir(data) / split / INDEX_NAME)
    return found


def _checksum(path: Path) -> str:
    return sha256_of(path)[:12] if path.is_file() else MISSING


def check_tars(data_config: DataConfig, eval_config: EvalConfig, found: Fingerprint) -> Iterator[Remark]:
    """Check on this node that the tars have the sizes in their index, with one look at each.

    Args:
        found: gets number and bytes of the tars of each split: names and sizes of all would be too much to compare.
    """
    for where, data, splits in _on_disk(data_config, eval_config):
        for split in splits if data.stage == "none" else ():  # staged tars are compared later
            split_dir = local_dir(data) / split
            if not (split_dir / INDEX_NAME).is_file():
                continue  # the job reports it
            sizes = _tar_sizes(split_dir)
            shards = read_index(split_dir).shards
            there = [sizes[shard.name] for shard in shards if shard.name in sizes]
            found[f"{where}{split}/*.tar"] = f"{count_noun(len(there), 'tar')}, {sum(there):,} bytes"
            wrong = [shard for shard in shards if sizes.get(shard.name) != shard.bytes]
            for text in _describe(split_dir, wrong, sizes):
                if data.on_corrupt == "skip":
                    yield warning("data", f"{text}: its documents are skipped", _FIXES["data"])
                else:
                    yield fail("data", text, _FIXES["data"], blames_node=True)


def _tar_sizes(split_dir: Path) -> dict[str, int]:
    """Return the sizes of the tars in a folder, which one request to a network file system lists for many."""
    sizes = {}
    with os.scandir(split_dir) as entries:
        for entry in entries:
            if entry.name.endswith(".tar"):
                with suppress(FileNotFoundError):  # a link that leads nowhere
                    sizes[entry.name] = entry.stat().st_size
    return sizes


def _describe(split_dir: Path, wrong: Sequence[ShardEntry], sizes: Mapping[str, int]) -> Iterator[str]:
    """Yield a line for each of the first tars that are wrong, and one for all others."""
    for shard in wrong[:_NAMED]:
        has = f"has {sizes[shard.name]:,} bytes" if shard.name in sizes else f"is {MISSING}"
        yield f"{split_dir / shard.name} {has}; it had {shard.bytes:,} when it was built"
    if len(wrong) > _NAMED:
        yield f"{count_noun(len(wrong) - _NAMED, 'more tar')} of {split_dir}: {MISSING}, or of another size than built"


def check_data(data_config: DataConfig, eval_config: EvalConfig) -> tuple[()]:
    """Check that the tokenizer and the indexes that training opens exist, unless data.path is a URL; find nothing else.

    Raises:
        ValueError: one is missing or damaged; the message names the file and the fix.
    """
    for _, data, splits in _on_disk(data_config, eval_config):
        read_tokenizer_metadata(local_dir(data))
        for split in splits:
            read_index(local_dir(data) / split)
    return ()


def _on_disk(data: DataConfig, eval_config: EvalConfig) -> Iterator[tuple[str, DataConfig, list[str]]]:
    """Yield for every data directory that is no URL its name in a report, and the splits that training opens."""
    train, evaluated = data.train_split, [eval_config.split] if eval_config.every else []
    if not is_remote(data.path):
        yield "", data, list(dict.fromkeys([*([] if data.mixture else [train]), *evaluated]))
    for key, one in training_dirs(data).items():
        if key != "data.path":
            more = [eval_config.split] if data.until_accuracy else []
            name = key.removeprefix("data.").removesuffix(".path")
            yield f"{name}/", one, list(dict.fromkeys([train, *more]))


def compare(what: str, places: Sequence[Place], fingerprints: Sequence[Fingerprint]) -> Iterator[Finding]:
    """Yield the ranks, or whole nodes, that differ from the majority; arguments in rank order.

    Args:
        what: code, configuration or data.
    """
    is_equal = True
    for name in sorted(set().union(*fingerprints)):
        values = [of_rank.get(name, MISSING) for of_rank in fingerprints]
        usual = max(values, key=lambda value: (values.count(value), -values.index(value)))
        for value in dict.fromkeys(values):
            if value != usual:
                odd = [place for place, other in zip(places, values, strict=True) if other == value]
                text = f"{name}: {value}, but {usual} on {values.count(usual)} of {len(values)} ranks"
                is_equal = False
                for place in _whole_nodes(odd, places):
                    yield fail(what, text, _FIXES[what], blames_node=what != "configuration").at(place)
    if is_equal and MISSING not in fingerprints[0].values():
        yield ok(what, _summary(what, fingerprints[0])).at(None)


def _whole_nodes(odd: Sequence[Place], places: Sequence[Place]) -> list[Place]:
    """Return the ranks, with a node in place of its ranks if all of them are included."""
    found = []
    for place in odd:
        is_whole = all(other in odd for other in places if other.node == place.node)
        found.append(Place(place.node) if is_whole else place)
    return list(dict.fromkeys(found))


def _summary(what: str, fingerprint: Fingerprint) -> str:
    if what == "configuration":
        return f"{len(fingerprint)} keys"
    return ", ".join(f"{name} {text}" for name, text in fingerprint.items() if name != _SOURCES) or "none on disk"
