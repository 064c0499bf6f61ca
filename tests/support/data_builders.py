"""Run `dist-mem data build` in this process, and read what it has built."""

import io
from contextlib import redirect_stderr
from pathlib import Path
from typing import NamedTuple

import numpy as np

from dist_mem.__main__ import main
from dist_mem.cli.commands.data import builder_parser
from dist_mem.data.index import DocumentEntry
from dist_mem.data.shard import read_index, read_mask, read_recall, read_tokens
from dist_mem.data.tokenizers.registry import load_tokenizer
from dist_mem.datasets.recipes import text
from dist_mem.datasets.source import SourceDocument
from tests.support.messages import said


class Built(NamedTuple):
    """A document of a built split; without a mask all its tokens are scored, without recall all distances are 0."""

    entry: DocumentEntry
    text: str
    tokens: np.ndarray
    mask: np.ndarray
    recall: np.ndarray


def build_data(name: str, *arguments: str | Path) -> int:
    """Run a builder and return its exit code."""
    return main(["data", "build", name, *map(str, arguments)])


def build_refused(
    name: str, *arguments: str | Path, named: tuple[object, ...], code: int = 2, unnamed: str | None = None
) -> None:
    """Run a builder that ends with this exit code and one line, which names these, and not a secret."""
    with redirect_stderr(io.StringIO()) as printed:
        assert build_data(name, *arguments) == code
    error = printed.getvalue()
    said(error, *named)
    assert unnamed is None or unnamed not in error
    assert error.startswith("error: ") and error.count("\n") == 1, error


def texts_of(*arguments: str | Path) -> dict[str, list[SourceDocument]]:
    """Return by split what `data build text` would build."""
    options = builder_parser("text").parse_args([*map(str, arguments), "--out", "none"])
    return {split: list(documents) for split, (documents, _) in text.read_splits(options).items()}


def documents_of(data_dir: Path, split: str = "train") -> list[Built]:
    """Return the documents of a split, with the text that the tokenizer of their directory decodes."""
    index, tokenizer = read_index(data_dir / split), load_tokenizer(data_dir)
    found = []
    for number, entry in enumerate(index.documents):
        tokens, mask, recall = read_tokens(index, number), read_mask(index, number), read_recall(index, number)
        mask = np.ones(len(tokens), bool) if mask is None else mask
        recall = np.zeros(len(tokens), np.int32) if recall is None else recall
        found.append(Built(entry, tokenizer.decode(tokens), tokens, mask, recall))
    return found


TRAIN = ("--split-by-hash", "train=1")
SMALL = ("--train", "8", "--validation", "4", "--test", "4")
BUILDERS = {
    "babilong": ("--lengths", "600"),
    "mqar": ("--lengths", "16", "--vocab", "64", "--pairs", "4"),
    "passkey": ("--lengths", "500"),
    "sorting": ("--lengths", "30"),
}
