"""The common part of all builders: documents -> tokenizer -> tokens -> shards; parallel, and restartable after a kill.

A builder (datasets/*.py) lists its documents and calls `build_dataset`. A script of yours may do the same:

    if __name__ == "__main__":  # needed: worker processes import the builder's script
        documents = [SourceDocument(id="98", title="A Tale of Two Cities", source=Path("98.txt"), year=1859)]
        build_dataset({"train": documents}, "data/mine", name="mine", vocab_size=8000, workers=2)

The tokenizer is trained first, on the train split only. Then worker processes encode consecutive documents in pieces of
a few megabytes. Each piece is kept in `<out>/.build` under a name that is a checksum of its inputs. A builder that is
started again after a kill finds its finished pieces and makes only the others. Last, one process writes the pieces into
tars, in order; so the result does not depend on the number of workers. A build that overwrites another one is made in
`<out>/.build/new`, and takes its place when it is whole.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np

from dist_mem.data.build_record import BUILD_NAME, bind_splits, built_splits, note_texts, read_build
from dist_mem.data.index import DOCUMENTS_NAME, INDEX_NAME
from dist_mem.data.metadata import ShardError
from dist_mem.data.shard import MAX_SHARD_BYTES, TokenizedDocument, check_names, read_index, write_split
from dist_mem.data.tokenizers.base import Tokenizer
from dist_mem.data.tokenizers.registry import (
    FILE_NAMES,
    JSON_NAME,
    load_tokenizer,
    read_tokenizer_metadata,
    save_tokenizer,
    train_sentencepiece,
)
from dist_mem.data.tokenizers.sentencepiece import SentencePieceTokenizer
from dist_mem.data.tokenizers.single_bytes import BytesTokenizer
from dist_mem.datasets.source import SourceDocument, check_sources, encode_text, recall_distances, scored_tokens
from dist_mem.runtime.figures import json_text
from dist_mem.runtime.files import fsync_path, open_regular, read_regular, replacing
from dist_mem.runtime.locks import hold_folder
from dist_mem.runtime.progress import Progress, show_count
from dist_mem.runtime.terminal import count_noun, some
from dist_mem.runtime.workers import map_unordered

ReadT = TypeVar("ReadT")
WORK_DIR = ".build"
PIECE_FORMAT = 2
PIECE_BYTES = 4 * 2**20  # of source text; one document at least


class Piece(NamedTuple):
    """Consecutive documents that one worker encodes at once."""

    documents: list[SourceDocument]
    path: Path  # its tokens, named by a checksum of their inputs
    data_dir: Path  # contains the tokenizer
    fingerprint: str  # of the tokenizer
    num_bytes: int  # of source text


def build_dataset(
    splits: Mapping[str, Sequence[SourceDocument]],
    out: Path | str,
    *,
    name: str,
    tokenizer_kind: str = "sentencepiece",
    vocab_size: int = 32_000,
    tokenizer: Tokenizer | None = None,
    workers: int = 1,
    seed: int = 0,
    max_sentences: int = 2_000_000,
    official_words: Mapping[str, int] | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    piece_bytes: int = PIECE_BYTES,
    overwrite: bool = False,
) -> None:
    """Build a data directory: the tokenizer, and tars and an index of every split, documents in the order given.

    The same call always gives the same bytes, for any number of workers and after any interruption. An existing split
    made from the same documents is kept.

    Args:
        splits: split name -> documents; the tokenizer is trained on "train".
        name: of the dataset, part of the tars' names.
        tokenizer_kind: "sentencepiece" or "bytes".
        vocab_size, seed, max_sentences: of the SentencePiece model, see `train_sentencepiece`.
        tokenizer: is used instead, as one of `find_tokenizer`.
        workers: number of processes.
        official_words: split name -> published number of words, for splits that are complete.
        max_shard_bytes: size of a tar; piece_bytes: source text that one worker encodes at a time.
        overwrite: replace the result of another call in `out`, when this one is whole.

    Raises:
        ValueError: a document cannot be used, or `out` contains another build.
        WorkerKilledError: a worker process was killed.
    """
    out = Path(out)
    for split, documents in splits.items():
        check_names(name, split)
        check_sources(documents, split)
    training = {"vocab_size": vocab_size, "seed": seed, "max_sentences": max_sentences}

    def build(place: Path) -> None:
        other = sorted(set(built_splits(place)) - set(splits))
        if other:
            raise _other_build(place / other[0] / INDEX_NAME)
        if tokenizer is not None:
            used = tokenizer
        elif tokenizer_kind == SentencePieceTokenizer.kind:
            used = _train_tokenizer(splits.get("train", ()), place, training)
        elif tokenizer_kind == BytesTokenizer.kind:
            used = BytesTokenizer()
        else:
            raise ValueError(f"unknown tokenizer_kind {tokenizer_kind!r}: it is sentencepiece or bytes")
        check_tokenizer(used, place)
        options = {
            split: {
                "name": name,
                "split": split,
                "tokenizer_fingerprint": used.fingerprint,
                "official_words": (official_words or {}).get(split),
                "max_shard_bytes": max_shard_bytes,
            }
            for split in splits
        }
        missing = [split for split in splits if not _is_kept(splits[split], place / split, options[split])]
        place_tokenizer(used, place)
        for split in missing:
            pieces = _cut_pieces(splits[split], out / WORK_DIR, place, used.fingerprint, piece_bytes)
            _build_split(splits[split], pieces, place / split, workers=workers, shard_options=options[split])
        bind_splits(place, splits)

    build_into(out, build, overwrite=overwrite)


def build_into(out: Path, build: Callable[[Path], None], *, overwrite: bool) -> None:
    """Build a data directory at `out`, where no other command builds meanwhile.

    Args:
        build: builds what is missing in the directory that it gets.
        overwrite: it gets another directory, whose files replace those in `out` when it returns.

    Raises:
        ValueError: `out` contains another build.
    """
    with hold_folder(out, f"--out {out}"):
        if overwrite:
            new = out / WORK_DIR / "new" / out.name  # messages have the last part
            try:
                build(new)
            except OtherBuildError:  # another one was begun there, and stopped
                shutil.rmtree(new)
                build(new)
            _replace_dataset(out, new)
        else:
            build(out)
        shutil.rmtree(out / WORK_DIR, ignore_errors=True)


def _build_split(
    documents: Sequence[SourceDocument],
    pieces: Sequence[Piece],
    split_dir: Path,
    *,
    workers: int,
    shard_options: dict[str, Any],
) -> None:
    split = split_dir.name
    _encode_pieces(pieces, split=split, workers=workers)
    texts = hashlib.sha256()
    tokenized = show_count(_read_pieces(pieces, texts.update), f"{split}: tars", total=len(documents), unit="documents")
    index = write_split(tokenized, split_dir, recipe=_recipe_of(documents, shard_options), **shard_options)
    note_texts(split_dir, texts.hexdigest() if any(map(_is_file, documents)) else None)
    empty = [entry.id for entry in index.documents if entry.words == 0]
    if empty:
        print(f"{split}: {len(empty)} of {len(documents):,} documents have no words: {some(empty, 5)}")
    print(
        f"{split}: {len(documents):,} documents, {index.num_words:,} words, {index.num_tokens:,} tokens, "
        f"{len(index.shards)} {'tar' if len(index.shards) == 1 else 'tars'}",
        flush=True,
    )


def encode_piece(piece: Piece) -> int:
    """Encode the documents of a piece and write their tokens to `piece.path`; return the bytes of source text."""
    tokenizer = _cached_tokenizer(piece.data_dir, piece.fingerprint)
    arrays: dict[str, np.ndarray] = {}
    sizes, digests = [], []
    for number, document in enumerate(piece.documents):
        text = document.text()
        if document.recall is None and document.scored is None:
            tokens = tokenizer.encode(text)
        else:
            tokens, starts = tokenizer.encode_with_offsets(text)
        if document.recall is not None:
            arrays[f"recall{number}"] = recall_distances(document, text, starts)
        if document.scored is not None:
            arrays[f"scored{number}"] = scored_tokens(document, text, starts)
        arrays[f"tokens{number}"] = tokens
        content = encode_text(text)
        sizes.append((len(text.split()), len(content)))
        digests.append(hashlib.sha256(content).digest())
    arrays["texts"] = np.frombuffer(b"".join(digests), dtype=np.uint8).reshape(-1, 32)
    arrays["sizes"] = np.array(sizes, dtype=np.int64).reshape(-1, 2)
    with replacing(piece.path) as stream:
        np.savez(stream, allow_pickle=False, **arrays)
    return piece.num_bytes


def _encode_pieces(pieces: Sequence[Piece], *, split: str, workers: int) -> None:
    missing = [piece for piece in pieces if not piece.path.exists()]
    if len(missing) < len(pieces):
        print(f"{split}: {len(pieces) - len(missing)} of {len(pieces)} pieces kept from before", flush=True)
    for piece in missing[:1]:
        piece.path.parent.mkdir(parents=True, exist_ok=True)
    total = sum(piece.num_bytes for piece in missing)
    with (
        Progress(total, f"{split}: tokens", unit="bytes") as progress,
        map_unordered(encode_piece, missing, workers=workers) as finished,
    ):
        for num_bytes in finished:
            progress.add(num_bytes)


def _cut_pieces(
    documents: Sequence[SourceDocument], folder: Path, data_dir: Path, fingerprint: str, piece_bytes: int
) -> list[Piece]:
    groups: list[list[SourceDocument]] = []
    size = piece_bytes
    for document in documents:
        if size >= piece_bytes:
            groups.append([])
            size = 0
        groups[-1].append(document)
        size += document.num_bytes
    pieces = []
    for group in groups:
        recipe = _recipe([PIECE_FORMAT, fingerprint, [(doc.signature(), doc.modification_time) for doc in group]])
        num_bytes = sum(document.num_bytes for document in group)
        pieces.append(Piece(group, folder / f"{recipe}.npz", data_dir, fingerprint, num_bytes))
    return pieces


def _read_pieces(pieces: Iterable[Piece], note_digest: Callable[[bytes], object]) -> Iterator[TokenizedDocument]:
    for piece in pieces:
        with open_regular(piece.path) as file, np.load(file) as arrays:
            note_digest(arrays["texts"].tobytes())
            sizes = arrays["sizes"].tolist()  # each access reads the array from the file
            for number, (document, (words, num_bytes)) in enumerate(zip(piece.documents, sizes, strict=True)):
                yield TokenizedDocument(
                    document.id,
                    document.title,
                    document.year,
                    words,
                    num_bytes,
                    tokens=arrays[f"tokens{number}"],
                    mask=None if document.scored is None else arrays[f"scored{number}"],
                    recall=None if document.recall is None else arrays[f"recall{number}"],
                )


@lru_cache(maxsize=1)
def _cached_tokenizer(data_dir: Path, fingerprint: str) -> Tokenizer:  # the fingerprint is in the cache key
    return load_tokenizer(data_dir)


def _train_tokenizer(documents: Sequence[SourceDocument], out: Path, options: dict[str, Any]) -> Tokenizer:
    recipe = _recipe([options, [document.signature() for document in documents]])
    times = _recipe([recipe, [document.modification_time for document in documents]])
    mark = out / WORK_DIR / f"{times}.tokenizer"  # of one that was trained on texts as they are now
    if (out / JSON_NAME).exists():
        if _read_or_advise(lambda: read_tokenizer_metadata(out))["recipe"] != recipe:
            raise _other_build(out / JSON_NAME)
        if mark.exists() or built_splits(out):  # whose texts are compared
            return load_tokenizer(out)
    print(f"tokenizer: training a SentencePiece model of {options['vocab_size']:,} pieces", flush=True)
    bar = show_count(documents, "tokenizer: reading", total=len(documents), unit="documents")
    lines = (line for document in bar for line in document.text().split("\n") if line)
    tokenizer = train_sentencepiece(lines, out, recipe=recipe, **options)
    mark.parent.mkdir(exist_ok=True)
    mark.touch()
    return tokenizer


def check_tokenizer(tokenizer: Tokenizer, out: Path) -> None:
    """Raise ValueError if another tokenizer is in `out`."""
    path = out / JSON_NAME
    if path.exists() and _read_or_advise(lambda: read_tokenizer_metadata(out))["fingerprint"] != tokenizer.fingerprint:
        raise _other_build(path)


def place_tokenizer(tokenizer: Tokenizer, out: Path) -> None:
    """Save a tokenizer in `out`, unless it is there with the same settings, which are not in its fingerprint."""
    path = out / (tokenizer.file_name or JSON_NAME)
    is_there = (out / JSON_NAME).exists() and path.exists()
    if not is_there or (tokenizer.file_name is not None and read_regular(path) != tokenizer.content()):
        save_tokenizer(tokenizer, out)


def is_built(split_dir: Path, recipe: str, texts: Callable[[], str | None], where: str) -> bool:
    """Return whether a split is complete.

    Raises:
        ValueError: it is of other documents, also if their files have the same names and sizes (`texts`).
    """
    path = split_dir / INDEX_NAME
    if not path.exists():
        return False
    index, known = _read_or_advise(lambda: (read_index(split_dir), read_build(split_dir)))
    if index.recipe != recipe:
        raise _other_build(path, f"{index.recipe}; now {recipe}") if " " in recipe else _other_build(path)  # a checksum
    tars = {path.name: path.stat().st_size for path in split_dir.glob("*.tar")}
    if not all(tars.get(shard.name) == shard.bytes for shard in index.shards):
        return False
    if known is not None and known.texts is not None and known.texts != texts():
        raise _other_build(path)
    print(f"{where}: already built, kept, with its {count_noun(len(index.documents), 'document')}", flush=True)
    return True


def _is_kept(documents: Sequence[SourceDocument], split_dir: Path, shard_options: dict[str, Any]) -> bool:
    recipe, split = _recipe_of(documents, shard_options), split_dir.name
    return is_built(split_dir, recipe, lambda: _digest_of_texts(documents, split), split)


def _recipe_of(documents: Sequence[SourceDocument], shard_options: dict[str, Any]) -> str:
    return _recipe([shard_options, [document.signature() for document in documents]])


def _digest_of_texts(documents: Sequence[SourceDocument], split: str) -> str:
    texts = hashlib.sha256()
    for document in show_count(documents, f"{split}: comparing", total=len(documents), unit="documents"):
        texts.update(hashlib.sha256(encode_text(document.text())).digest())
    return texts.hexdigest()


def _is_file(document: SourceDocument) -> bool:
    return isinstance(document.source, Path)


class OtherBuildError(ValueError):
    """A folder contains another build, or a damaged one."""


def _read_or_advise(read: Callable[[], ReadT]) -> ReadT:
    """Return the result of reading a file in `out`; add the builder's fix to the error of a damaged one."""
    try:
        return read()
    except ShardError as error:
        raise OtherBuildError(f"{error}; here that is: give another --out, or --overwrite") from error


def _other_build(path: Path, why: str = "other documents, options or tokenizer") -> OtherBuildError:
    return OtherBuildError(f"{path} belongs to another build ({why}): give another --out, or --overwrite")


def _replace_dataset(out: Path, new: Path) -> None:
    """Remove the files that builders write in `out`, and move those of a whole build there, each index after its tars.

    A kill meanwhile leaves what the same call completes.
    """
    for index in out.glob(f"*/{INDEX_NAME}"):
        index.unlink()
        for name in (DOCUMENTS_NAME, BUILD_NAME):
            index.with_name(name).unlink(missing_ok=True)
        for shard in index.parent.glob(f"*-{index.parent.name}-[0-9][0-9][0-9][0-9][0-9].tar"):
            shard.unlink()
    for name in (JSON_NAME, *FILE_NAMES):
        (out / name).unlink(missing_ok=True)
    for split in built_splits(new):
        (out / split).mkdir(exist_ok=True)
        for path in sorted((new / split).iterdir(), key=lambda path: path.name == INDEX_NAME):
            path.replace(out / split / path.name)
        fsync_path(out / split)
    for name in (*FILE_NAMES, JSON_NAME):
        if (new / name).exists():
            (new / name).replace(out / name)
    fsync_path(out)


def _recipe(ingredients: Any) -> str:
    return hashlib.sha256(json_text(ingredients, sort_keys=True).encode()).hexdigest()
