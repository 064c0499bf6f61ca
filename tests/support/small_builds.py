"""A tiny build, whole or killed, and what is in a folder."""

import random
from pathlib import Path
from typing import Any

from dist_mem.datasets.builder import build_dataset
from dist_mem.datasets.source import RecallSpan, SourceDocument

PIECE_BYTES = 2000


def make_texts(num: int = 12) -> list[str]:
    draw = random.Random(0)
    words = ["the", "river", "of", "gold", "met", "an", "old", "mountain;", "she", "had", "never", "said", "where\n\n"]
    return ["  ".join(draw.choices(words, k=draw.randrange(20, 300))) for _ in range(num)]


def make_documents(num: int = 12) -> list[SourceDocument]:
    texts = [*make_texts(num - 1), ""]
    recall = [RecallSpan(8, 12, 0)]
    return [
        SourceDocument(f"{number:02d}", f"Book {number}", text, 1900 + number, recall if number == 3 else None)
        for number, text in enumerate(texts)
    ]


def make_splits() -> dict[str, list[SourceDocument]]:
    documents = make_documents()
    return {"train": documents[:9], "test": documents[9:]}


def build_tiny(out: Path, splits: dict[str, list[SourceDocument]] | None = None, **options: Any) -> dict[str, bytes]:
    options = {"name": "tiny", "vocab_size": 320, "piece_bytes": PIECE_BYTES, "max_shard_bytes": 2000, **options}
    build_dataset(splits or make_splits(), out, **options)
    return contents(out)


def contents(out: Path) -> dict[str, bytes]:
    return {str(path.relative_to(out)): path.read_bytes() for path in sorted(out.rglob("*")) if path.is_file()}


def kill_documents(fifo: Path) -> dict[str, list[SourceDocument]]:
    """The splits, with a last training document whose text comes from `fifo`."""
    splits = make_splits()
    splits["train"].append(SourceDocument("fifo", "The last one", fifo))
    return splits
