"""Evaluation reports: scores per document and in total, with the papers' perplexities, as a table, JSON and CSV.

Word-level perplexity is exp(total NLL / words), whatever the tokens are (Rae et al. 2020, sec. 4.1), so that models
with different tokenizers are comparable. Recall perplexity is the perplexity of tokens whose referent is a known
distance before them, and recall accuracy the share of them that were the most probable token. Both are stored by
distance, so that they can be computed for any band later.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from dist_mem.errors import UnusableError
from dist_mem.evaluation.protocol import PROTOCOL
from dist_mem.evaluation.report_names import WITHOUT_MEMORY, is_without_memory
from dist_mem.runtime.csv_text import csv_text
from dist_mem.runtime.figures import NO_FIGURE, exponential, is_figure, json_text
from dist_mem.runtime.file_schema import MAX_INTEGER, check, integer, leaf, metric, number, optional, read_json, record
from dist_mem.runtime.file_schema import list_of as rows_of
from dist_mem.runtime.file_schema import table as table_of
from dist_mem.runtime.file_schema import text as text_of
from dist_mem.runtime.files import write_text
from dist_mem.runtime.terminal import cut_short, table

FORMAT_VERSION = 5
TABLE_ROWS = 5  # documents in the printed table; the files contain all
_TITLE_CHARS = 32
_CSV_COLUMNS = ("id", "title", "num_scored", "words", "bytes", "nll", "hits", "depth")


class Band(NamedTuple):
    """Distances in tokens, above `low` and up to `high`."""

    low: int
    high: int | None  # None: no limit

    def __str__(self) -> str:
        return f"> {self.low}" if self.high is None else f"({self.low}, {self.high}]"


class RecallScore(NamedTuple):
    """The score of all recall tokens at one distance."""

    distance: int  # tokens back to the referent
    nll: float  # nats, sum
    num_scored: int
    hits: int | None = None  # scored tokens that were the most probable token; None: not known


class PositionScore(NamedTuple):
    """The score of one document's tokens at the positions of one bin (position.py)."""

    document: int  # place in `Report.documents`
    bin: int
    nll: float  # nats, sum
    num_scored: int


@dataclass(frozen=True)
class DocumentScore:
    """The score of one document; words and bytes count the scored tokens."""

    id: str
    title: str
    nll: float  # nats, sum
    num_scored: int
    words: int | None  # None: not known, because the unscored first token of a block may be a part of a word
    bytes: int
    hits: int | None = None  # scored tokens that were the most probable token; None: not known
    depth: float | None = None  # of what its answer recalls, from 0 to 1; None: it is no document of one answer


METRICS = ("word_perplexity", "token_perplexity", "bits_per_byte", "accuracy", "whole_answers")  # of a Report
RECALL_METRICS = ("recall_perplexity", "recall_accuracy")  # of a Report and a band
POSITION_METRIC = "position_perplexity"  # of a Report and a band of positions, which `evaluate --by position` has
BANDS = ("segment", "memory", "beyond")


@dataclass(frozen=True)
class Report:
    """The scores of one split."""

    split: str
    data_fingerprint: str
    tokenizer_fingerprint: str
    max_document_len: int | None  # tokens scored of each document; None: all
    seg_len: int  # T
    mem_len: int  # M, of the short-term memory; 0: none
    num_words: int | None  # the official count if the whole split is scored and has one, else the sum over documents
    documents: list[DocumentScore]
    recall: list[RecallScore]  # by increasing distance; empty if the data records none
    positions: list[PositionScore] = field(default_factory=list)  # empty unless they were asked for

    @property
    def nll(self) -> float:
        """Total, nats."""
        return math.fsum(document.nll for document in self.documents)

    @property
    def num_scored(self) -> int:
        return sum(document.num_scored for document in self.documents)

    @property
    def num_bytes(self) -> int:
        return sum(document.bytes for document in self.documents)

    @property
    def word_perplexity(self) -> float:
        return perplexity(self.nll, self.num_words)

    @property
    def token_perplexity(self) -> float:
        return perplexity(self.nll, self.num_scored)

    @property
    def bits_per_byte(self) -> float:
        return bits_per_byte(self.nll, self.num_bytes)

    @property
    def accuracy(self) -> float:
        """Share of the scored tokens that were the most probable token; nan if not known."""
        return accuracy(known_total(document.hits for document in self.documents), self.num_scored)

    @property
    def whole_answers(self) -> float:
        """Share of the documents whose scored tokens were all the most probable; nan unless all are recall tokens."""
        scored = [document for document in self.documents if document.num_scored]
        if not scored or sum(score.num_scored for score in self.recall) != self.num_scored:
            return math.nan
        right = [None if each.hits is None else int(each.hits == each.num_scored) for each in scored]
        return accuracy(known_total(right), len(scored))

    def recall_in(self, band: Band) -> tuple[float, int]:
        """Return the total NLL in nats and the number of the recall tokens in a band."""
        within = self._within(band)
        return math.fsum(score.nll for score in within), sum(score.num_scored for score in within)

    def at_positions(self, band: Band) -> Report:
        """Return the scores of the tokens at these positions alone, without words, bytes and recall.

        Args:
            band: its limits are 2^n - 1, the last positions of bins.
        """
        sums: dict[int, tuple[float, int]] = {}
        for score in self.positions:
            if band.low < 2**score.bin and 2 ** (score.bin + 1) - 1 <= (band.high or math.inf):
                nll, count = sums.get(score.document, (0.0, 0))
                sums[score.document] = nll + score.nll, count + score.num_scored
        documents = [
            DocumentScore(document.id, document.title, *sums.get(place, (0.0, 0)), words=None, bytes=0)
            for place, document in enumerate(self.documents)
        ]
        return replace(self, num_words=None, documents=documents, recall=[], positions=[])

    def position_perplexity(self, band: Band) -> float:
        """Return the perplexity of the tokens at these positions; nan if there are none, or none are known."""
        return self.at_positions(band).token_perplexity

    def recall_perplexity(self, band: Band) -> float:
        """Return the perplexity of the recall tokens in a band; nan if there are none."""
        return perplexity(*self.recall_in(band))

    def recall_accuracy(self, band: Band) -> float:
        """Return the accuracy of the recall tokens in a band; nan if there are none, or if it is not known."""
        within = self._within(band)
        return accuracy(known_total(score.hits for score in within), sum(score.num_scored for score in within))

    def _within(self, band: Band) -> list[RecallScore]:
        return [score for score in self.recall if band.low < score.distance <= (band.high or math.inf)]

    def metrics(self) -> dict[str, float]:
        """Return the metrics to track, "validation/word_perplexity" and so on, without those that are no figures."""
        found: dict[str, float] = {name: getattr(self, name) for name in METRICS}
        for name, band in recall_bands(self.seg_len, self.mem_len).items():
            found |= {f"{metric}_{name}": getattr(self, metric)(band) for metric in RECALL_METRICS}
        return {f"{self.split}/{name}": value for name, value in found.items() if is_figure(value)}


def recall_bands(seg_len: int, mem_len: int) -> dict[str, Band]:
    """Return the bands of referents within the segment, within the short-term memory, and beyond both."""
    bands = Band(0, seg_len), Band(seg_len, seg_len + mem_len), Band(seg_len + mem_len, None)
    return {name: band for name, band in zip(BANDS, bands, strict=True) if band.low != band.high}


def total_words(documents: Iterable[DocumentScore]) -> int | None:
    """Return the number of words of all documents; None if it is not known for one of them."""
    return known_total(document.words for document in documents)


def known_total(counts: Iterable[int | None]) -> int | None:
    """Return the sum of counts; None if one of them is not known."""
    total = 0
    for count in counts:
        if count is None:
            return None
        total += count
    return total


def perplexity(nll: float, count: int | None) -> float:
    """Return exp(nll / count), nll in nats; nan if count is 0 or None, or the result is too large for a float."""
    return exponential(nll / count) if count else math.nan


def bits_per_byte(nll: float, num_bytes: int) -> float:
    """Return the bits per byte, nll in nats; nan without bytes, or if a loss is not finite."""
    return nll / math.log(2) / num_bytes if num_bytes and math.isfinite(nll) else math.nan


def accuracy(hits: int | None, num_scored: int) -> float:
    """Return hits / num_scored; nan without scored tokens or if hits are not known."""
    return math.nan if hits is None or num_scored == 0 else hits / num_scored


def format_metric(value: float, form: str = ",.2f") -> str:
    """Format a metric in at most ten characters; n/a for what is no figure."""
    if not is_figure(value):
        return NO_FIGURE
    return f"{value:z{form}}" if value < 1e6 else f"{value:.3e}"  # z: no -0.0


def to_table(report: Report, *, rows: int = TABLE_ROWS) -> str:
    """Return the report as a table for a terminal: up to `rows` documents, and the total."""
    head = ("document", "title", "tokens", "words", "word ppl", "token ppl", "bits/byte", "accuracy")
    cells: list[Sequence[str]] = [head]
    for document in report.documents[:rows]:
        counts = (document.num_scored, document.words, document.bytes, accuracy(document.hits, document.num_scored))
        cells.append(_report_row(document.id[:10], cut_short(document.title, _TITLE_CHARS), document.nll, *counts))
    counts = (report.num_scored, report.num_words, report.num_bytes, report.accuracy)
    cells.append(_report_row("all", f"{len(report.documents)} documents", report.nll, *counts))
    lines = table(cells)
    left_out = len(report.documents) - rows
    if left_out > 0:
        lines.insert(-1, f"... {left_out} more documents, in the files")
    recall = [["recall, referent", "perplexity", "accuracy", "tokens"]]
    for name, band in recall_bands(report.seg_len, report.mem_len).items():
        nll, count = report.recall_in(band)
        if count:
            share = format_metric(report.recall_accuracy(band), ".2%")
            recall.append([f"{band} tokens back ({name})", format_metric(perplexity(nll, count)), share, f"{count:,}"])
    lines += ["", *table(recall)] if len(recall) > 1 else []
    if not math.isnan(report.whole_answers):
        lines += ["", f"whole answers: {report.whole_answers:.2%} of the documents"]
    return "\n".join(lines)


def _report_row(
    name: str, title: str, nll: float, num_scored: int, words: int | None, num_bytes: int, hit_share: float
) -> list[str]:
    return [
        name,
        title,
        f"{num_scored:,}",
        NO_FIGURE if words is None else f"{words:,}",
        format_metric(perplexity(nll, words)),
        format_metric(perplexity(nll, num_scored)),
        format_metric(bits_per_byte(nll, num_bytes), ".4f"),
        format_metric(hit_share, ".2%"),
    ]


def to_csv(documents: Iterable[DocumentScore]) -> str:
    """Return a CSV with one line per document."""
    rows: list[list[object]] = [[*_CSV_COLUMNS, "word_perplexity", "token_perplexity", "bits_per_byte", "accuracy"]]
    for document in documents:
        nll = document.nll
        derived = (
            perplexity(nll, document.words),
            perplexity(nll, document.num_scored),
            bits_per_byte(nll, document.bytes),
            accuracy(document.hits, document.num_scored),
        )
        rows.append([*(getattr(document, name) for name in _CSV_COLUMNS), *derived])
    return csv_text(rows)


def write_report(report: Report, directory: Path, name: str, *, metadata: dict[str, object]) -> list[Path]:
    """Write NAME.json and NAME.csv and return their paths; `metadata` is added to the JSON."""
    directory.mkdir(parents=True, exist_ok=True)
    body = {"format_version": FORMAT_VERSION, **metadata, "metrics": report.metrics(), "report": _as_json(report)}
    contents = {f"{name}.csv": to_csv(report.documents), f"{name}.json": json_text(body, indent=1) + "\n"}
    for file_name, text in contents.items():
        write_text(directory / file_name, text)
    return [directory / file_name for file_name in contents]


def _as_json(report: Report) -> dict[str, Any]:
    content = {**asdict(report), "recall": [list(score) for score in report.recall]}
    positions = content.pop("positions")
    return {**content, "positions": [list(score) for score in positions]} if positions else content


def _is_nll(value: Any) -> bool:
    """Return whether a value may be a total, null if it is no figure; above the limit, a sum could be no float."""
    return value is None or (type(value) in (int, float) and not (value < 0 or 1e300 < value < math.inf))


def _is_recall(value: Any) -> bool:
    if not isinstance(value, list) or not 3 <= len(value) <= len(RecallScore._fields):
        return False
    counts = [value[0], *value[2:]]
    has_counts = all(type(each) is int and 0 <= each <= MAX_INTEGER for each in counts if each is not None)
    return has_counts and None not in (value[0], value[2]) and value[0] > 0 and _is_nll(value[1])


def _is_position(value: Any) -> bool:
    if not isinstance(value, list) or len(value) != len(PositionScore._fields):
        return False
    counts = (value[0], value[1], value[3])
    return all(type(each) is int and 0 <= each <= MAX_INTEGER for each in counts) and _is_nll(value[2])


_NLL = leaf("a number from 0 to 1e300 or null", _is_nll)
_DOCUMENT = record(
    {
        "id": text_of,
        "title": text_of,
        "nll": _NLL,
        "num_scored": integer(),
        "words": optional(integer()),
        "bytes": integer(),
    },
    {"hits": optional(integer()), "depth": optional(number)},
    is_open=False,
)
_REPORT = record(
    {
        **{"split": text_of, "data_fingerprint": text_of, "tokenizer_fingerprint": text_of},
        **{"max_document_len": optional(integer(1)), "seg_len": integer(1), "mem_len": integer()},
        **{"num_words": optional(integer()), "documents": rows_of(_DOCUMENT)},
        "recall": rows_of(leaf("a list of distance, nats, tokens and hits", _is_recall)),
    },
    {"positions": rows_of(leaf("a list of document, bin, nats and tokens", _is_position))},
    is_open=False,
)
_BODY = record({"report": _REPORT}, {"metrics": table_of(optional(metric)), "step": integer()}, is_open=True)
_FILE = record({"protocol": PROTOCOL}, is_open=True)
_REMEDY = "; give a report of `dist-mem evaluate`, or evaluate again"


def read_report(path: Path, *, inside: Path | None = None) -> Report:
    """Read a report that `write_report` wrote.

    Args:
        inside: as for `open_regular`.

    Raises:
        UnusableError: the file is not a report, or has another format.
    """
    body = read_json(path, UnusableError, _REMEDY, inside=inside)
    report = report_from(body, path)
    check(body, _FILE, path, UnusableError, _REMEDY)
    protocol = body["protocol"]
    for key in ("seg_len", "mem_len", "max_document_len"):
        if (said := protocol[key]) != (scored := getattr(report, key)):
            raise UnusableError(f"{path} is damaged (protocol.{key} is {said}, but report.{key} {scored}){_REMEDY}")
    if protocol["without_memory"] != is_without_memory(path):
        raise UnusableError(
            f"{path} is damaged, or has another name than it was given: protocol.without_memory is "
            f"{str(protocol['without_memory']).lower()}, and names of reports with true, and no others, end with "
            f"-{WITHOUT_MEMORY}{_REMEDY}"
        )
    return report


def report_from(body: Any, path: Path) -> Report:
    """Return the report that a file contains. Raises UnusableError as `read_report`."""
    check(body, record({"format_version": integer()}, is_open=True), path, UnusableError, _REMEDY)
    if (version := body["format_version"]) != FORMAT_VERSION:
        raise UnusableError(f"{path}: format_version {version} is not {FORMAT_VERSION}, the one read here{_REMEDY}")
    check(body, _BODY, path, UnusableError, _REMEDY)
    content = dict(body["report"])
    documents = [DocumentScore(**document | {"nll": _nll(document["nll"])}) for document in content.pop("documents")]
    recall = [RecallScore(distance, _nll(nll), *rest) for distance, nll, *rest in content.pop("recall")]
    places = content.pop("positions", ())
    positions = [PositionScore(document, number, _nll(nll), count) for document, number, nll, count in places]
    return Report(**content, documents=documents, recall=recall, positions=positions)


def _nll(value: float | None) -> float:
    return math.nan if value is None else value


class Measure(NamedTuple):
    """How a metric of two reports is compared."""

    title: str
    short: str  # for the heads of tables
    form: str  # of its values
    is_ratio: bool  # perplexities are divided, bits subtracted


MEASURES = {
    "word_perplexity": Measure("word-level perplexity", "word ppl", ",.2f", is_ratio=True),
    "token_perplexity": Measure("token perplexity", "token ppl", ",.2f", is_ratio=True),
    "bits_per_byte": Measure("bits per byte", "bits per byte", ".3f", is_ratio=False),
}
MOST_PERPLEXITY = 1e4  # of a word that is shown


def measure_of(reports: Sequence[Report]) -> str:
    """Return the metric by which reports are printed, drawn and compared, whatever their order.

    It is word-level perplexity, or token perplexity if words are not known. It is bits per byte where tokenizers
    differ, and where a perplexity says nothing: above MOST_PERPLEXITY per word, or no figure.
    """
    if not same_tokenizer(reports):
        return "bits_per_byte"
    if any(not report.num_words for report in reports):
        found = "token_perplexity"
        is_shown = all(is_figure(report.token_perplexity) for report in reports)
    else:
        found = "word_perplexity"
        is_shown = all(report.word_perplexity <= MOST_PERPLEXITY for report in reports)
    return found if is_shown else "bits_per_byte"


def same_tokenizer(reports: Sequence[Report]) -> bool:
    """Return whether a token of one report is a token of all: figures per token are comparable."""
    return len({report.tokenizer_fingerprint for report in reports}) == 1


def same_text(reports: Sequence[Report]) -> bool:
    """Return whether all reports score the same documents with as many words, or bytes if words are not known."""

    def size(document: DocumentScore) -> tuple[str, int | None, int]:
        return document.id, document.words, document.bytes if document.words is None else 0

    return len({(report.num_words, *map(size, report.documents)) for report in reports}) == 1
