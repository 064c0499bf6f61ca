"""Measure the speed of every part of building a data directory on this machine, in MB of text per second.

    python benchmarks/build.py                                                # the sample library, half a minute
    python benchmarks/build.py --source FOLDER --vocab-size 8000 --rounds 1   # every .txt of a folder, as one split

The table shows medians over the rounds. Encoding with workers includes starting them, as in a build.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from lib.common import arguments_of, interleaved, load

from dist_mem.data.shard import TokenizedDocument, write_split
from dist_mem.data.tokenizers import registry as tokenizer
from dist_mem.data.verify import verify_dataset
from dist_mem.datasets import source
from dist_mem.datasets.builder import build_dataset, map_unordered
from dist_mem.datasets.recipes.sample import SIZES
from dist_mem.datasets.recipes.sample import write_split as write_library
from dist_mem.datasets.source import SourceDocument

NUM_PIECES = 8  # pieces of the text; a worker encodes one at a time


def read_documents(folder: Path | None) -> list[SourceDocument]:
    """Return the books of the sample library, or the texts of a folder."""
    if folder is None:
        books = write_library("train", SIZES["demo"].books["train"], SIZES["demo"], seed=0)
        return [SourceDocument(id, book.title, book.text, book.year, book.recall) for id, book in books.items()]
    return [SourceDocument(path.stem, path.stem, path) for path in sorted(folder.rglob("*.txt"))]


def encode(piece: tuple[Path, list[str]]) -> int:
    """Encode some texts; return the number of tokens."""
    data_dir, texts = piece
    loaded = tokenizer.load_tokenizer(data_dir)
    return sum(len(loaded.encode(text)) for text in texts)


def encode_all(data_dir: Path, texts: Sequence[str], *, num_workers: int) -> int:
    """Encode texts in worker processes; return the number of tokens."""
    pieces = [(data_dir, list(texts[first::NUM_PIECES])) for first in range(NUM_PIECES)]
    with map_unordered(encode, pieces, workers=num_workers) as counts:
        return sum(counts)


def main() -> None:
    """Print the table."""
    parser = arguments_of(__doc__, vocab_size=1280, rounds=3)
    parser.add_argument("--source", type=Path, help="folder with texts (default: the sample library)")
    arguments = parser.parse_args()
    documents = read_documents(arguments.source)
    texts = [document.text() for document in documents]
    num_bytes = sum(len(text.encode()) for text in texts)
    lines = [line for text in texts for line in text.split("\n")]
    with tempfile.TemporaryDirectory() as folder:
        data_dir = Path(folder) / "data"
        trained = tokenizer.train_sentencepiece(lines, data_dir, vocab_size=arguments.vocab_size)
        encoded = [trained.encode_with_offsets(text) for text in texts]
        tokenized = [
            TokenizedDocument(document.id, "", None, len(text.split()), len(text.encode()), tokens)
            for document, text, (tokens, _) in zip(documents, texts, encoded, strict=True)
        ]
        recalling = [
            (document, text, starts)
            for document, text, (_, starts) in zip(documents, texts, encoded, strict=True)
            if document.recall
        ]

        def write() -> None:
            fingerprint = trained.fingerprint
            write_split(tokenized, data_dir / "train", name="bench", split="train", tokenizer_fingerprint=fingerprint)

        def build(num_workers: int) -> None:
            options = {"name": "bench", "vocab_size": arguments.vocab_size, "overwrite": True}
            build_dataset({"train": documents}, Path(folder) / "whole", workers=num_workers, **options)

        parts: dict[str, Callable[[], Any]] = {
            f"train SentencePiece, {arguments.vocab_size:,} pieces": lambda: tokenizer.train_sentencepiece(
                lines, Path(folder) / "again", vocab_size=arguments.vocab_size
            ),
            "encode": lambda: [trained.encode(text) for text in texts],
            "encode, 1 worker, tokenizer loaded": lambda: encode_all(data_dir, texts, num_workers=1),
            "encode, 2 workers, started": lambda: encode_all(data_dir, texts, num_workers=2),
            "place recall spans": lambda: [source.recall_distances(*parts) for parts in recalling],
            "write tars and index": write,
            "verify": lambda: verify_dataset(data_dir),
            "whole build, 1 worker": lambda: build(1),
            "whole build, 2 workers": lambda: build(2),
        }
        if not recalling:
            del parts["place recall spans"]
        times = interleaved(parts, arguments.rounds)
    num_tokens = sum(len(tokens) for tokens, _ in encoded)
    print(f"{len(texts)} documents, {num_bytes / 1e6:.1f} MB, {num_tokens:,} tokens; {load()}")
    print(f"{'':<40}{'seconds':>9}{'MB/s of text':>14}{'lowest to highest':>20}")
    for name, found in times.items():
        spread = f"{num_bytes / max(found) / 1e6:.1f} to {num_bytes / min(found) / 1e6:.1f}"
        median = statistics.median(found)
        print(f"{name:<40}{median:>9.2f}{num_bytes / median / 1e6:>14.1f}{spread:>20}")


if __name__ == "__main__":
    main()
