"""The inspect command: the regression error of an infinity-former's long-term memory.

    dist-mem inspect runs/sorting --split test --limit 100

Documents are read one after another, and the rows that enter each layer's signal are recorded. After the last segment,
the signal is evaluated for each row at the position to which the contractions have moved it. The error is the sum of
squared differences divided by the sum of squares: 0 for a perfect memory, 1 for one whose signal is 0. Martins et al.
2022 plot an error of the regression in figure 3, right; this definition is ours. Shape letters: E rows that enter at
once, P rows in all, N basis functions, D model.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dist_mem.data.directory import open_index, refresh
from dist_mem.data.documents import Documents
from dist_mem.data.plan import cut_lengths
from dist_mem.evaluation.job import StopCheck, data_tag, find_checkpoint_together, run_on_ranks, use_threads
from dist_mem.evaluation.protocol import protocol_of, tag_of
from dist_mem.evaluation.report_names import FOLDER, ReportName, join_parts
from dist_mem.evaluation.trained_model import TrainedModel, open_model, read_settings, tokenizer_of_data
from dist_mem.inspection.walk import walk
from dist_mem.memory.base import MemoryOutput
from dist_mem.memory.infinite import Infinite
from dist_mem.memory.parts.basis import evaluate_at
from dist_mem.memory.parts.signal import SignalState
from dist_mem.memory.parts.signal_inspection import follow_rows
from dist_mem.runtime.distributed import World
from dist_mem.runtime.figures import json_text
from dist_mem.runtime.files import write_text
from dist_mem.runtime.locks import hold_file
from dist_mem.runtime.progress import Progress
from dist_mem.runtime.signals import StopSignal
from dist_mem.runtime.terminal import table

FORMAT_VERSION = 1
LIMIT = 100  # documents, unless given
METRICS = ("regression_error", "regression_error_newest")


class Errors(NamedTuple):
    """Relative errors of one layer over all documents."""

    all_rows: float
    newest: float  # of the rows that entered last and are not contracted yet
    num_documents: int  # documents from which rows have entered
    layer_index: int  # of the block of the model


class Watch:
    """Record the rows that enter the memory of one layer, for one document at a time in a batch of one lane."""

    def __init__(self, memory: Infinite) -> None:
        self.memory = memory
        self.sums = torch.zeros(2, 2, dtype=torch.float64)  # all rows, newest; squared error, squares
        self.num_documents = 0
        self._reset()

    def _reset(self) -> None:
        self.rows, self.places = torch.empty(0), torch.empty(0, dtype=torch.float64)  # (P, D), (P,)
        self.signal: Tensor | None = None  # (N, D)

    def __call__(self, _: Any, inputs: tuple[Any, SignalState, Tensor], output: MemoryOutput) -> None:
        """Record the rows that this segment has appended; a forward hook of the memory."""
        state: SignalState = inputs[1]
        if not state.has_pending[0]:
            return
        rows = self.memory.pending_input(state, state.pending.dtype)[0]
        if isinstance(state.pending_len, Tensor):
            rows = rows[: int(state.pending_len[0])]
        self.places = follow_rows(self.memory, state, 0, self.places)
        self.rows = rows if len(self.places) == len(rows) else torch.cat([self.rows, rows])
        self.signal = output.state.coefficients[0]

    def end_document(self) -> None:
        """Add the errors of the document to the sums."""
        if self.signal is not None:
            estimate = evaluate_at(self.memory.geometry, self.places, self.signal) @ self.signal
            true = self.rows.to(estimate)
            error, size = (estimate - true).square().sum(dim=1).double().cpu(), true.square().sum(dim=1).double().cpu()
            newest = slice(-self.memory.geometry.num_rows, None)
            self.sums += torch.stack([error.sum(), size.sum(), error[newest].sum(), size[newest].sum()]).view(2, 2)
            self.num_documents += 1
        self._reset()

    def errors(self) -> Errors:
        all_rows, newest = (self.sums[:, 0] / self.sums[:, 1]).tolist()
        return Errors(all_rows, newest, self.num_documents, self.memory.spec.layer_index)


@contextmanager
def attach_watches(model: torch.nn.Module) -> Iterator[list[Watch]]:
    """Attach a Watch to every infinite memory, in order from the embedding."""
    watches = [Watch(module) for module in model.modules() if isinstance(module, Infinite)]
    hooks = [watch.memory.register_forward_hook(watch) for watch in watches]
    try:
        yield watches
    finally:
        for hook in hooks:
            hook.remove()


@torch.no_grad()
def regression_errors(trained: TrainedModel, documents: Documents) -> list[Errors]:
    """Return the errors of every layer over whole documents.

    Raises:
        ValueError: the model has no infinite memory, or no document is long enough for a row to enter one.
    """
    with attach_watches(trained.model) as watches:
        if not watches:
            raise ValueError(f"memory.kind is {trained.config.memory['kind']!r}: only `infinite` has a regression")
        with Progress(int(documents.lengths.sum()), f"reading {documents.index.split}") as progress:
            for number in range(len(documents)):
                for step in walk(trained, documents.open(number)):
                    progress.add(step.num_inputs)
                for watch in watches:
                    watch.end_document()
    found = [watch.errors() for watch in watches]
    if empty := [str(layer.layer_index) for layer in found if not layer.num_documents]:
        where = f"the long-term memory of block {', '.join(empty)}"
        raise ValueError(f"no document is long enough for rows to enter {where}: use longer documents")
    return found


def run(
    path: Path,
    *,
    split: str | None = None,
    limit: int = LIMIT,
    checkpoint: int | None = None,
    overrides: Sequence[str] = (),
    early: StopSignal | None = None,
) -> int:
    """Run the command on one process and return its exit code.

    Args:
        path: a run directory, one checkpoint in it, or an export.
        split: None: eval.split.  limit: number of documents, from the start of the split.
        checkpoint: step of the checkpoint; None: the newest that verifies.
        overrides: `key=value`, for keys that an evaluation may set.
        early: as in `evaluate.run`.

    Raises:
        UnusableError: the checkpoint, the data or the overrides are invalid.
    """

    def work(world: World, check: StopCheck) -> None:
        found = find_checkpoint_together(path, checkpoint, world)
        settings = [*overrides, "eval.layout=documents"]  # independent of the run's evaluations
        config = read_settings(found.directory, settings, reads_data=True)
        use_threads(config.train)
        protocol, read, step = protocol_of(config), split or config.eval.split, int(found.manifest["step"])
        refresh(config.data, [read])
        limited = "" if limit == LIMIT else f"limit{limit}"
        tag = join_parts(data_tag(found, config.data, read), tag_of(config), limited)
        target = found.run_dir / FOLDER / f"{ReportName(read, step, tag, 'inspect')}.json"
        with hold_file(target):
            index = open_index(config.data, read)
            trained = open_model(found, config, tokenizer_of_data(found, config.data), world.device)
            trained.model.register_forward_pre_hook(check)
            lengths = cut_lengths(index.documents[:limit].num_tokens, config.eval.max_document_len)
            layers = regression_errors(trained, Documents(index, lengths, bos_id=trained.tokenizer.bos_id))
            metadata = {"format_version": FORMAT_VERSION, "step": step, "limit": limit, "protocol": protocol._asdict()}
            _publish(target, read, layers, metadata)

    return run_on_ranks(work, overrides, early, alone="inspect")


def _publish(target: Path, split: str, layers: list[Errors], metadata: Mapping[str, object]) -> None:
    mean = statistics.fmean(layer.all_rows for layer in layers)
    newest = statistics.fmean(layer.newest for layer in layers)
    total = f"{layers[0].num_documents} documents of {split}, step {metadata['step']}"
    print(f"relative squared error of the regression; {total}")
    errors = [(str(layer.layer_index), layer.all_rows, layer.newest) for layer in layers]
    cells = [(name, f"{everything:.4f}", f"{new:.4f}") for name, everything, new in [*errors, ("all", mean, newest)]]
    print("\n".join(table([("layer", "all rows", "newest"), *cells])))
    content = {
        **metadata,
        "metrics": {f"{split}/{name}": value for name, value in zip(METRICS, (mean, newest), strict=True)},
        "layers": [layer._asdict() for layer in layers],
    }
    write_text(target, json_text(content, indent=1) + "\n")
    print(f"written: {target}", file=sys.stderr)
