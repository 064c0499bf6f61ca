"""What a figure is, and what it is made from: a trained model and the documents of a split, every layer inspected.

Shape letters: B = 1 lane, T segment, R rows, H heads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import NamedTuple

from dist_mem.data.directory import open_index, refresh
from dist_mem.data.documents import Document, Documents
from dist_mem.data.plan import cut_lengths
from dist_mem.errors import UnusableError
from dist_mem.evaluation.job import StopCheck, use_threads
from dist_mem.evaluation.plotting.drawn_figure import DrawnFigure
from dist_mem.evaluation.trained_model import Checkpoint, TrainedModel, open_model, read_settings, tokenizer_of_data
from dist_mem.inspection.walk import SegmentReading, walk
from dist_mem.memory.parts.inspection import Inspection
from dist_mem.memory.parts.inspector import Inspector
from dist_mem.runtime.distributed import World
from dist_mem.runtime.terminal import some


class FigureSettings(NamedTuple):
    """The arguments of the command besides name and runs."""

    split: str | None = None  # None: eval.split
    document: str | None = None  # id; None: chosen by the figure
    num_tokens: int | None = None  # tokens to read; None: as many as the paper
    overrides: tuple[str, ...] = ()


class FigureSource:
    """A run to draw from; the model and the data are opened when they are first used."""

    def __init__(
        self, checkpoint: Checkpoint, label: str, settings: FigureSettings, world: World, check: StopCheck
    ) -> None:
        self.checkpoint = checkpoint
        self.label = label
        self.settings = settings
        self._world = world
        self._check = check
        whole = "eval.layout=documents"
        self.config = read_settings(checkpoint.directory, [*settings.overrides, whole], reads_data=True)
        self.split = settings.split or self.config.eval.split

    @property
    def kind(self) -> str:
        return str(self.config.memory["kind"])

    @cached_property
    def trained_model(self) -> TrainedModel:
        use_threads(self.config.train)
        refresh(self.config.data, [self.split])
        tokenizer = tokenizer_of_data(self.checkpoint, self.config.data)
        trained = open_model(self.checkpoint, self.config, tokenizer, self._world.device)
        trained.model.register_forward_pre_hook(self._check)
        return trained

    @cached_property
    def documents(self) -> Documents:
        bos_id = self.trained_model.tokenizer.bos_id  # also fetches the index
        index = open_index(self.config.data, self.split)
        lengths = cut_lengths(index.documents.num_tokens, self.config.eval.max_document_len)
        return Documents(index, lengths, bos_id=bos_id)

    def chosen_documents(self) -> Iterator[Document]:
        """Yield the document of the settings, or all of the split.

        Raises:
            UnusableError: the split has no such document.
        """
        wanted, entries = self.settings.document, self.documents.index.documents
        numbers = [number for number, entry in enumerate(entries) if wanted in (None, entry.id)]
        if not numbers:
            there = some((entry.id for entry in entries), 5)
            raise UnusableError(f"--document {wanted}: split {self.split} has no such document; it has {there}")
        for number in numbers:
            yield self.documents.open(number)

    def example(self, *, least: int, place: int = 0, why: str) -> Document:
        """Return the document to show: that of the settings, or the one at `place` among those of `least` tokens.

        Raises:
            UnusableError: none is long enough; `why` says what the tokens are needed for.
        """
        long_enough = [document for document in self.chosen_documents() if len(document.tokens) >= least]
        if not long_enough:
            longest = max(self.documents.lengths, default=0)
            raise UnusableError(
                f"split {self.split}: {why} takes a document of {least:,} tokens, the longest here has {longest:,}: "
                "give another --split or --document"
            )
        return long_enough[min(place, len(long_enough) - 1)]

    def id_of(self, document: Document) -> str:
        return str(self.documents.index.documents[document.number].id)

    def read(self, document: Document) -> Iterator[tuple[SegmentReading, list[Inspection]]]:
        """Yield the segments of a document, and what each layer read in it."""
        with Inspector(self.trained_model.model.memories()) as inspector:
            for step in walk(self.trained_model, document):
                yield step, inspector.layers
                if step.is_kept:
                    inspector.commit()

    def read_all(self) -> Iterator[tuple[SegmentReading, list[Inspection]]]:
        """Yield as `read` the segments of every document of `chosen_documents`."""
        for document in self.chosen_documents():
            yield from self.read(document)

    def missing_error(self, figure: str, what: str, fix: str) -> UnusableError:
        """Return the error of a run that cannot make a figure, because its memory does not give `what`."""
        return UnusableError(
            f"{self.checkpoint.run_dir}: memory.kind is {self.kind!r}, but {figure} shows {what}: {fix}"
        )


class Figure(NamedTuple):
    """A figure that can be made from runs."""

    names: Sequence[str]  # as in the papers: infinite.fig7
    title: str
    draw: Callable[[str, Sequence[FigureSource]], DrawnFigure]  # of the name, from the runs
    most_runs: int = 1
    least_runs: int = 1
    runs: str = "RUN"  # what they are, for help
