"""Build shards of any folder of text: one document per file, split by folders or by shares.

    python shards/build_text.py --source corpus --out data/mine                      # corpus/{train,validation,test}
    python shards/build_text.py --source essays letters --out data/mine --validation 0.05 --test 0.05 --workers 8

Files are UTF-8 and end with .txt; folders are searched at any depth. Without shares, the folders directly under
--source are the splits train, validation and test. With shares, a checksum of a file's name (its path under --source)
determines its split, whatever other files are added or removed, and on every machine. Shares are approximate, and
count files, not bytes.
"""

from __future__ import annotations

import argparse
import hashlib
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from builder_options import builder_parser, exit_code

from dist_mem.data.builders.builder import build_dataset
from dist_mem.data.builders.source import SourceDocument

SPLITS = ("train", "validation", "test")
MAX_ID_LEN = 80  # characters, of a name in a tar


def main(arguments: Sequence[str] | None = None) -> int:
    """Build, report errors, and return the exit code."""
    options = parse_arguments(arguments)
    return exit_code(lambda: build(options), builder="build_text", reads=[*options.source, options.tokenizer_from])


def build(options: argparse.Namespace) -> None:
    """Find the files, assign them to splits, and build."""
    files = find_files(options.source)
    if options.validation or options.test:
        splits = by_share(files, validation=options.validation, test=options.test)
    else:
        splits = by_folder(files)
    build_dataset(
        {split: [document(name, path) for name, path in named.items()] for split, named in splits.items()},
        options.out,
        name=options.name,
        tokenizer_kind=options.tokenizer,
        vocab_size=options.vocab_size,
        tokenizer_from=options.tokenizer_from,
        workers=options.workers,
        seed=options.seed,
        overwrite=options.overwrite,
    )


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = builder_parser(__doc__, vocab_size=8_000)
    add = parser.add_argument
    add("--source", type=Path, required=True, nargs="+", help="folders, or .txt files")
    add("--out", type=Path, required=True, help="data directory to build: data.path of a configuration")
    add("--name", default="text", help="of the dataset, part of the tars' names (default: %(default)s)")
    add("--validation", type=share, default=0.0, metavar="SHARE", help="of all files, as 0.05 (default: by folder)")
    add("--test", type=share, default=0.0, metavar="SHARE", help="likewise")
    add("--tokenizer", choices=("sentencepiece", "bytes"), default="sentencepiece", help="default: %(default)s")
    add("--tokenizer-from", type=Path, metavar="DIR", help="take the tokenizer of this data directory instead")
    add("--seed", type=int, default=0, help="of the lines SentencePiece is trained on (default: %(default)s)")
    options = parser.parse_args(arguments)
    if options.validation + options.test >= 1:
        parser.error("--validation and --test leave nothing to train on: together they must be less than 1")
    return options


def share(text: str) -> float:
    """Parse an option's value, from 0 to less than 1."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no share: give a number from 0 to less than 1")
    return value


def find_files(sources: Sequence[Path]) -> dict[str, Path]:
    """Return the files by name, which is their path under the source with slashes, in the order of the names.

    Raises:
        ValueError: a source is neither a folder nor a .txt file, there are no files, or two files have the same name.
    """
    found: dict[str, Path] = {}
    for source in sources:
        if source.is_dir():
            paths = {path.relative_to(source).as_posix(): path for path in source.rglob("*.txt") if path.is_file()}
        elif source.is_file() and source.suffix == ".txt":
            paths = {source.name: source}
        else:
            raise ValueError(f"--source {source} is neither a folder nor a .txt file")
        shared = sorted(set(paths) & set(found))
        if shared:
            raise ValueError(f"{found[shared[0]]} and {paths[shared[0]]} have one name, {shared[0]}: rename one")
        found.update(paths)
    if not found:
        raise ValueError(f"--source {' '.join(map(str, sources))}: no .txt file there")
    return dict(sorted(found.items()))


def by_folder(files: dict[str, Path]) -> dict[str, dict[str, Path]]:
    """Return the files of each split, named by their path under its folder.

    Raises:
        ValueError: a file is in none of the three folders.
    """
    splits: dict[str, dict[str, Path]] = {split: {} for split in SPLITS}
    for name, path in files.items():
        folder, _, rest = name.partition("/")
        if folder not in splits or not rest:
            raise ValueError(
                f"{path} is in none of the folders {', '.join(SPLITS)}: put it there, or give --validation and --test, "
                "the shares that are dealt out"
            )
        splits[folder][rest] = path
    return {split: named for split, named in splits.items() if named}


def by_share(files: dict[str, Path], *, validation: float, test: float) -> dict[str, dict[str, Path]]:
    """Assign files to splits by a checksum of their names.

    Raises:
        ValueError: train, or a split with a share, gets no file.
    """
    splits: dict[str, dict[str, Path]] = {split: {} for split in SPLITS}
    for name, path in files.items():
        place = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") / 2**64  # [0, 1)
        split = "test" if place < test else "validation" if place < test + validation else "train"
        splits[split][name] = path
    for split, wanted in (("train", 1.0), ("validation", validation), ("test", test)):
        if wanted and not splits[split]:
            raise ValueError(
                f"of {len(files)} files none falls to {split}: give a larger share, or put the files into folders "
                f"named {', '.join(SPLITS)}"
            )
    return {split: named for split, named in splits.items() if named}


def document(name: str, path: Path) -> SourceDocument:
    """Return a file as a document: its name is the title and, as far as a tar allows, the id."""
    stem = name.removesuffix(".txt")
    plain = re.sub(r"[^0-9A-Za-z_-]+", "_", stem)
    if plain != stem or len(plain) > MAX_ID_LEN:  # maybe no longer unique: a checksum makes it so
        plain = f"{plain[: MAX_ID_LEN - 9]}-{hashlib.sha256(stem.encode()).hexdigest()[:8]}"
    return SourceDocument(plain, stem, path)


if __name__ == "__main__":
    sys.exit(main())
