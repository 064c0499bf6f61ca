"""Reports, and files of them as `dist-mem evaluate` writes them."""

from pathlib import Path

from dist_mem.evaluation.protocol import Protocol
from dist_mem.evaluation.report_names import is_without_memory
from dist_mem.evaluation.scores import DocumentScore, Report, write_report


def of_losses(*nlls: float, words: int | None = 100) -> Report:
    """Return a report of documents of 200 tokens with these losses."""
    documents = [DocumentScore(str(place), "", nll, 200, words, 600) for place, nll in enumerate(nlls)]
    return Report("test", "d", "t", None, 32, 32, None, documents, [])


def save_report(report: Report, directory: Path, name: str, **metadata: object) -> list[Path]:
    """Write NAME.csv and NAME.json, with the protocol of the report, and return their paths."""
    protocol = Protocol(
        seg_len=report.seg_len,
        mem_len=report.mem_len,
        clamp_len=None,
        same_length=False,
        layout="documents",
        lanes=None,
        max_document_len=report.max_document_len,
        without_memory=is_without_memory(Path(f"{name}.json")),
    )
    return write_report(report, directory, name, metadata={"protocol": protocol._asdict(), **metadata})
