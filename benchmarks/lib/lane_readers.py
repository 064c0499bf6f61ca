"""The readers that benchmarks/data.py compares: each an endless iterator of Batches from the same documents."""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from itertools import chain, repeat
from pathlib import Path
from typing import NamedTuple
from unittest.mock import patch

import numpy as np
import torch
import webdataset
from torch.utils.data import DataLoader, IterableDataset

from dist_mem.config import Config, changed
from dist_mem.data import documents as documents_module
from dist_mem.data.batch import IGNORE, Batch
from dist_mem.data.lanes import LaneReader, training_reader
from dist_mem.data.prefetch import Prefetcher
from dist_mem.data.tokenizers.single_bytes import BytesTokenizer

try:
    import streaming
except ImportError:
    streaming = None

BOS = BytesTokenizer().bos_id


class Reader(NamedTuple):
    name: str
    batches: Iterator[Batch]
    during: Callable[[], AbstractContextManager[object]] = nullcontext  # entered for every round
    close: Callable[[], None] = lambda: None


def fill_lanes(documents: Iterator[np.ndarray], num_lanes: int, seg_len: int) -> Iterator[Batch]:
    """The loop one writes around a loader of documents: a lane that ends its document takes the next."""
    current, offsets, numbers = [np.empty(0, np.uint16)] * num_lanes, [0] * num_lanes, [-1] * num_lanes
    count = 0
    while True:
        tokens = np.zeros((num_lanes, seg_len), dtype=np.int64)
        targets = np.full((num_lanes, seg_len), IGNORE, dtype=np.int64)
        lengths, is_new = [0] * num_lanes, [False] * num_lanes
        for lane in range(num_lanes):
            if offsets[lane] == len(current[lane]):
                current[lane], offsets[lane], numbers[lane] = next(documents), 0, count
                count += 1
            document, begin = current[lane], offsets[lane]
            stop = min(begin + seg_len, len(document))
            length = stop - begin
            targets[lane, :length] = document[begin:stop]
            if begin:
                tokens[lane, :length] = document[begin - 1 : stop - 1]
            else:
                tokens[lane, 0] = BOS
                tokens[lane, 1:length] = document[: stop - 1]
                is_new[lane] = True
            offsets[lane], lengths[lane] = stop, length
        yield Batch(
            torch.from_numpy(tokens),
            torch.from_numpy(targets),
            torch.tensor(lengths),
            torch.tensor(is_new),
            torch.tensor(numbers),
            None,
        )


def webdataset_documents(folder: Path, *, verify: bool = False) -> Iterator[np.ndarray]:
    """The tokens of all documents, epoch after epoch, through tarfile as webdataset reads it."""
    tars = [str(path) for path in sorted((folder / "train").glob("*.tar"))]
    while True:
        for sample in webdataset.WebDataset(tars, shardshuffle=False):
            tokens = np.load(io.BytesIO(sample["tokens.npy"]))
            if verify and hashlib.sha256(tokens.data).hexdigest() != json.loads(sample["json"])["sha256"]:
                raise ValueError(f"{sample['__key__']} is damaged")
            yield tokens


def streaming_documents(folder: Path) -> Iterator[np.ndarray]:
    """The same through mosaicml-streaming, which reads its MDS files as they lie there."""
    dataset = streaming.StreamingDataset(local=str(folder / "mds"), shuffle=False, batch_size=1)
    return chain.from_iterable((sample["tokens"] for sample in dataset) for _ in repeat(None))


def memory_map(folder: Path, num_lanes: int, seg_len: int) -> Iterator[Batch]:
    """No documents at all: one flat file cut into lanes. What the machine can do."""
    flat = np.memmap(folder / "flat.bin", dtype=np.uint16, mode="r")
    lanes = flat[: len(flat) // num_lanes * num_lanes].reshape(num_lanes, -1)
    full, no, zero = torch.full((num_lanes,), seg_len), torch.zeros(num_lanes, dtype=torch.bool), torch.zeros(num_lanes)
    while True:
        for begin in range(0, lanes.shape[1] - seg_len, seg_len):
            row = lanes[:, begin : begin + seg_len + 1]
            tokens, targets = row[:, :-1].astype(np.int64), row[:, 1:].astype(np.int64)
            yield Batch(torch.from_numpy(tokens), torch.from_numpy(targets), full, no, zero.long(), None)


class LaneLoop(IterableDataset[Batch]):
    """webdataset's loop for a DataLoader's worker process."""

    def __init__(self, folder: Path, num_lanes: int, seg_len: int) -> None:
        self.arguments = folder, num_lanes, seg_len

    def __iter__(self) -> Iterator[Batch]:
        folder, num_lanes, seg_len = self.arguments
        return fill_lanes(webdataset_documents(folder), num_lanes, seg_len)


def open_readers(folder: Path, num_lanes: int, seg_len: int) -> list[Reader]:
    """Everything that is compared; the first one's rate is 1."""

    def lanes(layout: str) -> LaneReader:
        config = Config()
        config = changed(config, {"data.path": str(folder), "data.layout": layout})
        config = changed(config, {"train.global_batch_size": num_lanes, "train.micro_batch_size": num_lanes})
        config = changed(config, {"train.seg_len": seg_len})
        return training_reader(config, world_size=1, rank=0)

    def inline(layout: str) -> Iterator[Batch]:
        reader = lanes(layout)
        reader.close()
        return (update.batches[0] for update in reader._read())  # what the thread runs, without the thread

    def unverified() -> AbstractContextManager[object]:
        return patch.object(documents_module, "check_document", lambda index, number: None)

    def loop(documents: Iterator[np.ndarray]) -> Iterator[Batch]:
        return fill_lanes(documents, num_lanes, seg_len)

    ahead = {layout: lanes(layout) for layout in ("documents", "stream")}
    thread = Prefetcher(loop(webdataset_documents(folder)), depth=Config().data.prefetch)
    worker = DataLoader(LaneLoop(folder, num_lanes, seg_len), batch_size=None, num_workers=1, prefetch_factor=4)
    readers = [
        Reader("webdataset loop", loop(webdataset_documents(folder))),
        Reader("webdataset loop, sha256 checked", loop(webdataset_documents(folder, verify=True))),
        Reader("dist_mem documents, sha256 checked", inline("documents")),
        Reader("dist_mem documents, unchecked", inline("documents"), unverified),
        Reader("dist_mem stream, sha256 checked", inline("stream")),
        Reader("memory map of one flat file", memory_map(folder, num_lanes, seg_len)),
        Reader("webdataset loop, our thread", iter(thread), close=thread.close),
        Reader("webdataset loop, DataLoader worker", iter(worker)),
    ]
    for layout, reader in ahead.items():
        batches = (update.batches[0] for update in reader)
        readers.append(Reader(f"dist_mem {layout}, its thread", batches, close=reader.close))
    if streaming is not None:
        readers.insert(2, Reader("mosaicml-streaming loop", loop(streaming_documents(folder))))
    return readers
