"""The inspect command: what memory changed for every word of a text.

    dist-mem inspect runs/demo --book 0 --split test
    dist-mem inspect runs/demo runs/demo_none --text book.txt --passages

It reads one document on one process and prints the gain in nats over the same model without its memory, over another
run, over a memory emptied at one place, or over one without a passage; words are coloured by the last of these that is
asked for. RUN/evaluations/inspect-NAME-step-STEP.json has all metrics of every token.
"""

from __future__ import annotations

import re
import sys
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from dist_mem.errors import UnusableError
from dist_mem.evaluation.job import (
    StopCheck,
    data_tag,
    describe_evaluation,
    find_checkpoint_together,
    run_on_ranks,
    use_threads,
)
from dist_mem.evaluation.protocol import protocol_of, tag_of
from dist_mem.evaluation.report_names import FOLDER, ReportName, digest_part, join_parts
from dist_mem.generation.text import read_file
from dist_mem.inspection.aggregates import Aggregates, aggregate, word_gains
from dist_mem.inspection.content import content_of
from dist_mem.inspection.counterfactual import (
    MOST,
    Counterfactual,
    MostHarmful,
    TokenSpan,
    check_forgets,
    remove_passages,
)
from dist_mem.inspection.reading import DocumentReading, read_document
from dist_mem.inspection.request import InspectionRequest, InspectionSubject, open_other, open_subject, settings_of
from dist_mem.inspection.terminal_view import (
    colour_words,
    comparisons_key,
    gains_table,
    legend,
    names_line,
    passages_table,
    top_table,
)
from dist_mem.inspection.words import TextWord, words_of
from dist_mem.memory.parts.inspection import SUMMARY
from dist_mem.runtime.distributed import World
from dist_mem.runtime.figures import json_text
from dist_mem.runtime.files import write_text
from dist_mem.runtime.signals import StopSignal
from dist_mem.runtime.terminal import StyledText, span

WINDOWED = "in overlapping windows"
_MOST_BYTES = 80  # of a document or a run in the name of a file, which has at most 255
SHOWN = 300  # tokens of the text that are printed unless --show names others


class Comparison(NamedTuple):
    """What the losses with memory are compared with."""

    name: str
    gain: Tensor  # (N,) float64, nats; nan where a token is not scored


def run(request: InspectionRequest, *, early: StopSignal | None = None) -> int:
    """Run the command on one process and return its exit code.

    Args:
        early: as in `evaluate.run`.

    Raises:
        UnusableError: a checkpoint, the data, the document or an option is invalid.
    """
    return run_on_ranks(partial(_run, request=request), request.overrides, early, alone="inspect")


def _run(world: World, check: StopCheck, *, request: InspectionRequest) -> None:
    text = None if request.text is None else read_file(request.text, "--text")  # before checkpoints are verified
    found = find_checkpoint_together(request.run, request.checkpoint, world)
    config = settings_of(request, found)
    use_threads(config.train)
    protocol, tag = protocol_of(config), tag_of(config)
    subject = open_subject(request, found, world, text)
    subject.trained.model.register_forward_pre_hook(check)
    length = len(subject.document.tokens)
    for option, given in (("--without", request.without), ("--show", request.show)):
        if given is not None and given.begin >= length:
            raise UnusableError(f"{option} {given.begin}:{given.end}: the document has the tokens 0:{length}")
    removes = request.without is not None or request.passages is not None
    if removes:
        check_forgets(subject.trained)  # before the document is read for hours
    other = None
    if request.against is not None:
        other = open_other(request, find_checkpoint_together(request.against, None, world), world)
        other.model.register_forward_pre_hook(check)
    reading = read_document(subject.trained, subject.document, other=other, empty_at=request.empty_at)
    removed = None
    if removes:
        asked = None if request.without is None else [request.without]
        removed = remove_passages(subject.trained, subject.document, asked, most=request.passages or MOST)
    comparisons = _comparisons(request, reading, removed)
    words = words_of(reading.pieces)
    aggregates = aggregate(words, comparisons[-1].gain)
    content = {
        **describe_evaluation(found, subject.trained.config.name, protocol),
        "title": subject.title,
        **content_of(reading, removed, words, {each.name: each.gain for each in comparisons}, aggregates),
    }
    data = "" if request.book is None else data_tag(found, config.data, request.split or config.eval.split)
    tag = join_parts(data, tag)
    target = found.run_dir / FOLDER / f"{_file_name(request, subject, int(found.manifest['step']), tag)}.json"
    try:
        target.parent.mkdir(exist_ok=True)
        write_text(target, json_text(content) + "\n")  # before anything can fail to be shown
    finally:  # a run that only others may write into: what was found is shown all the same
        print(f'{found.directory}, "{subject.title}", {protocol}')
        _show(request, reading, removed, comparisons, words, aggregates, protocol.seg_len)
    print(f"written: {target}", file=sys.stderr)


def _file_name(request: InspectionRequest, subject: InspectionSubject, step: int, tag: str) -> str:
    """Return the name of the JSON; what is compared is a part of it, so that no other result is replaced."""
    other = request.against.resolve() if request.against else None
    asked = [
        f"against-{_plain(other.name)}_{digest_part(str(other))}" if other else "",
        "" if request.empty_at is None else f"empty-at-{request.empty_at}",
        f"without-{request.without.begin}-{request.without.end}" if request.without else "",
        "" if request.passages is None else f"passages-{request.passages}",
    ]
    return str(ReportName(_plain(subject.name), step, join_parts(tag, *asked), "inspect"))


def _plain(name: str) -> str:
    """Return a part of the name of a file that stands for a name, however long; two names have two parts."""
    plain = re.sub(r"[^\w.-]", "_", name).encode()[:_MOST_BYTES].decode(errors="ignore")
    return plain if plain == name else f"{plain}_{digest_part(name)}"


def _comparisons(
    request: InspectionRequest, reading: DocumentReading, removed: Counterfactual | None
) -> list[Comparison]:
    """Return the comparisons that are asked for; the last one is shown in detail."""
    nll = reading.nll.double()
    found = [
        Comparison("memory off", reading.without.double() - nll),
        Comparison(f"memory off, {WINDOWED}", reading.gain),
    ]
    if reading.other is not None:
        found.append(Comparison(f"{request.against}", reading.other.double() - nll))
    if reading.other_windowed is not None:
        found.append(Comparison(f"{request.against}, {WINDOWED}", reading.other_windowed.double() - nll))
    if reading.emptied is not None:
        found.append(Comparison(f"memory emptied at {request.empty_at}", reading.emptied.double() - nll))
    if request.without is not None and removed is not None:
        rise = removed.without(request.without).double()
        rise = torch.where(rise.isnan(), 0.0, rise).masked_fill(nll.isnan(), torch.nan)
        found.append(Comparison(f"memory without {request.without.begin}:{request.without.end}", rise))
    return found


def _show(
    request: InspectionRequest,
    reading: DocumentReading,
    removed: Counterfactual | None,
    comparisons: list[Comparison],
    words: list[TextWord],
    aggregates: Aggregates,
    seg_len: int,
) -> None:
    rows = [(name, float(gain.nansum()), int((~gain.isnan()).sum())) for name, gain in comparisons]
    print("\n".join([*gains_table(rows), comparisons_key(seg_len)]))
    print(f"\nby word, gain over {comparisons[-1].name}:")
    if aggregates.top:
        print(names_line(aggregates))
        _show_top(reading, removed, comparisons[-1].gain, aggregates)
    else:
        print("none: this text has no words")
    if removed is not None:
        print()
        print("\n".join(passages_table(removed, words, reading.pieces)))
    passage = request.show or _largest(comparisons[-1].gain)
    end = min(passage.end, len(reading.pieces))
    print(StyledText(f"\ntokens {span(passage.begin, end)}; {legend(with_colour=request.with_colour)}\n"))
    found = word_gains(words, comparisons[-1].gain)
    print(colour_words(found, reading.pieces, TokenSpan(passage.begin, end), with_colour=request.with_colour))


def _show_top(reading: DocumentReading, removed: Counterfactual | None, gain: Tensor, aggregates: Aggregates) -> None:
    needed = None if removed is None else removed.most_harmful()
    reasons = [_reason(reading, needed, each.word, gain) for each in aggregates.top]
    print(top_table(aggregates.top, reading.pieces, reasons, is_removed=removed is not None))


def _largest(gain: Tensor) -> TokenSpan:
    """Return the SHOWN tokens in a row with the largest gain in all."""
    if len(gain) <= SHOWN:
        return TokenSpan(0, len(gain))
    sums = gain.nan_to_num(0.0).unfold(0, SHOWN, 1).sum(dim=1)
    begin = int(sums.argmax())
    return TokenSpan(begin, begin + SHOWN)


def _reason(
    reading: DocumentReading, needed: MostHarmful | None, word: TextWord, gain: Tensor
) -> tuple[TokenSpan, float] | None:
    """Return the passage that a word needs most, and its nats; without a search, the one it read most, and its mass."""
    position = word.first + int(gain[word.first : word.end].argmax())
    if needed is not None and not needed.rise[position].isnan():
        return TokenSpan(int(needed.begin[position]), int(needed.end[position])), float(needed.rise[position])
    looked = [found for layer in reading.layers for kind, found in layer.items() if kind != SUMMARY]
    most = max(looked, key=lambda found: float(found.shares[position, 0]), default=None)
    if most is None or not most.shares[position, 0]:
        return None
    return TokenSpan(int(most.begin[position, 0]), int(most.end[position, 0])), float(most.shares[position, 0])
