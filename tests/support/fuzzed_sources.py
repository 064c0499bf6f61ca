"""Damaged and odd corpora, drawn from a seed, and the number of texts that Python's own libraries find in them."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import random
import tarfile
from collections.abc import Callable
from pathlib import Path

import pyarrow
from pyarrow import ipc, parquet

Draw = random.Random
WORDS = ["river", "lamp", "old", "Käfer", "\u200b", "\0", "水", "\u2028", '"', "\\", "a" * 300, "\r\n", "\t"]
STEMS = ["a", "b", "c", "v1.0", "v1.1", "Dr. A", "d/a", "d/b.c", "./e", ".hidden", "train/x", "s", "s.meta", "s.seg"]
SUFFIXES = [".txt", ".txt", ".txt", ".json", ".TXT", ".jpg", "", ".jsonl", ".txt.gz"]


def text_of(draw: Draw) -> str:
    return " ".join(draw.choices(WORDS, k=draw.randrange(12)))


def rows_of(draw: Draw) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = [{"id": f"r{number}", "text": text_of(draw)} for number in range(draw.randrange(9))]
    for row in rows:
        match draw.randrange(200):
            case 0:
                row["text"] = draw.choice([None, 1, [], {"text": "x"}, True])
            case 1:
                del row[draw.choice(["id", "text"])]
            case 2:
                row["id"] = draw.choice([7, "r0", "", None, 1.5, "x/y.z", "é"])
    return rows


def lines_of(draw: Draw) -> bytes:
    lines = [
        json.dumps(row, ensure_ascii=draw.random() < 0.5).encode("utf-8", "surrogatepass") for row in rows_of(draw)
    ]
    ends = [b"\n", b"\n", b"\r\n", b"\n\n", b" \n"]
    return b"".join(line + draw.choice(ends) for line in lines)


def tar_bytes(draw: Draw) -> bytes:
    stream = io.BytesIO()
    form = draw.choice([tarfile.GNU_FORMAT, tarfile.PAX_FORMAT, tarfile.USTAR_FORMAT])
    names = [draw.choice(STEMS) + draw.choice(SUFFIXES) for _ in range(draw.randrange(1, 9))]
    with tarfile.open(fileobj=stream, mode="w", format=form) as tar:
        for name in sorted(set(names)) if draw.random() < 0.7 else names:
            row = {"text": text_of(draw), **({"id": name} if draw.random() < 0.7 else {})}
            content = (json.dumps(row) if name.endswith("json") else text_of(draw)).encode()
            entry = tarfile.TarInfo(name if draw.random() < 0.95 or form == tarfile.USTAR_FORMAT else "é" * 60 + name)
            kinds = [tarfile.DIRTYPE, tarfile.SYMTYPE, tarfile.FIFOTYPE, tarfile.CONTTYPE]
            entry.type = tarfile.REGTYPE if draw.random() < 0.99 else draw.choice(kinds)
            entry.size = len(content) if entry.isreg() else 0
            tar.addfile(entry, io.BytesIO(content))
    return stream.getvalue()


def cut_in_two(draw: Draw, content: bytes) -> tuple[bytes, bytes]:
    place = draw.randrange(len(content) + 1)
    return content[:place], content[place:]


COMPRESS: dict[str, Callable[[Draw, bytes], bytes]] = {
    "plain": lambda draw, content: content,
    "gzip": lambda draw, content: gzip.compress(content, mtime=0),
    "gzips": lambda draw, content: b"".join(gzip.compress(part, mtime=0) for part in cut_in_two(draw, content)),
    "bz2": lambda draw, content: b"".join(map(bz2.compress, cut_in_two(draw, content))),
    "xz": lambda draw, content: b"".join(map(lzma.compress, cut_in_two(draw, content))),
}


def table_of(draw: Draw) -> pyarrow.Table:
    rows = rows_of(draw)
    texts = [row["text"] if isinstance(row.get("text"), str) else None for row in rows]
    ids = [None if row.get("id") is None else str(row["id"]) for row in rows]
    return pyarrow.table({"id": pyarrow.array(ids, pyarrow.string()), "text": pyarrow.array(texts, pyarrow.string())})


def parquet_bytes(draw: Draw) -> bytes:
    sink = io.BytesIO()
    parquet.write_table(table_of(draw), sink, row_group_size=draw.randrange(1, 5))
    return sink.getvalue()


def arrow_bytes(draw: Draw) -> bytes:
    table, sink = table_of(draw), io.BytesIO()
    with draw.choice([ipc.new_stream, ipc.new_file])(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=3)
    return sink.getvalue()


def text_bytes(draw: Draw) -> bytes:
    return text_of(draw).encode(
        draw.choice(["utf-8", "utf-8", "utf-8", "utf-8-sig", "utf-16-le", "utf-16", "latin-1"]), "replace"
    )


FORMS: dict[str, tuple[Callable[[Draw], bytes], list[str]]] = {
    "x.tar": (tar_bytes, list(COMPRESS)),
    "x.tar.gz": (tar_bytes, ["gzip", "gzips", "gzips", "plain"]),
    "x.jsonl": (lines_of, ["plain"]),
    "x.jsonl.gz": (lines_of, ["gzip", "gzips"]),
    "x.parquet": (parquet_bytes, ["plain"]),
    "x.arrow": (arrow_bytes, ["plain"]),
    "x.txt": (text_bytes, ["plain"]),
    "metadata.csv": (
        lambda draw: "".join(f"{number},{text_of(draw)},18{number},u\n" for number in range(3)).encode(),
        ["plain"],
    ),
}


def mutated(draw: Draw, content: bytes) -> bytes:
    """Change some bytes, or none."""
    for _ in range(draw.choice([0, 0, 0, 1, 1, 3])):
        begin = draw.randrange(len(content) + 1)
        end = min(len(content), begin + draw.choice([1, 2, 8, 512, 1024, 10_000]))
        other = draw.randrange(len(content) + 1)
        match draw.randrange(7):
            case 0:
                content = content[:begin]
            case 1:
                content = content[:begin] + content[end:]
            case 2:
                content = content[:begin] + draw.randbytes(end - begin) + content[end:]
            case 3:
                content = content[:begin] + bytes(end - begin) + content[end:]
            case 4:
                content = content[:other] + content[begin:end] + content[other:]
            case 5:
                content = (
                    content[:begin]
                    + draw.choice([b"\0", b"\xff", b"\n", b"-1", b"9" * 11, b'"', b"\xef\xbb\xbf"])
                    + content[end:]
                )
            case 6 if begin < len(content):
                content = content[:begin] + bytes([content[begin] ^ 1 << draw.randrange(8)]) + content[begin + 1 :]
    return content


def write_source(draw: Draw, folder: Path) -> Path:
    """Write a corpus of one damaged or odd file; return the file."""
    name = draw.choice(list(FORMS))
    make, compressions = FORMS[name]
    content = make(draw)
    if draw.random() < 0.3:
        content = mutated(draw, content)
    content = mutated(draw, COMPRESS[draw.choice(compressions)](draw, content))
    folder.mkdir()
    (folder / name).write_bytes(content)
    if name == "metadata.csv":
        (folder / "train").mkdir()
        for number in range(3):
            (folder / "train" / f"{number}.txt").write_text(f"Book {number}.")
    return folder / name


def number_of_texts(path: Path) -> int:
    """Return how many documents Python's libraries find in a file that a builder has accepted."""
    if path.name == "metadata.csv":
        return 3
    if path.suffix == ".txt":
        return 1
    if path.suffix == ".parquet":
        return int(parquet.read_table(path).num_rows)
    if path.suffix == ".arrow":
        with path.open("rb") as file:
            is_file = file.read(6) == b"ARROW1"
        with (ipc.open_file if is_file else ipc.open_stream)(path) as table:
            return int(table.read_all().num_rows)
    if ".tar" in path.name:
        return _number_in_tar(path)
    content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    return sum(1 for line in content.split(b"\n") if line.strip())


def _number_in_tar(path: Path) -> int:
    with tarfile.open(path) as tar:
        names = [member.name for member in tar if member.isfile()]
    shown = [name for name in names if not any(part.startswith(".") for part in name.split("/") if part != ".")]
    texts = {name[:-4] for name in shown if name.lower().endswith(".txt")}
    rows = {name[:-5] for name in shown if name.lower().endswith(".json")}
    return len(texts) + sum(1 for name in rows - texts if "." not in name.rpartition("/")[2])
