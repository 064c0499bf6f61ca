"""Show in a terminal what memory changed: tables, and the text with its words coloured by gain.

Without colour a word's gain stands behind it where it is large: `Holt[+3.2]`.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence

from dist_mem.evaluation.scores import format_metric
from dist_mem.inspection.aggregates import Aggregates, WordGain, word_gains
from dist_mem.inspection.counterfactual import Counterfactual, TokenSpan
from dist_mem.inspection.words import TextWord, words_of
from dist_mem.runtime.terminal import StyledText, cut_short, in_style, make_printable, table

LEVELS = (0.25, 1.0, 3.0)  # nats; from each on, another colour
_GAINS = ("48;5;153;38;5;16", "48;5;75;38;5;16", "48;5;25;38;5;231")  # light to dark blue
_LOSSES = ("48;5;223;38;5;16", "48;5;215;38;5;16", "48;5;130;38;5;231")  # light to dark orange
_MARKED = 1.0  # nats, from which on a gain is written without colour
PASSAGES, NEEDING = 10, 4  # lines of the table of passages, and words of each
_CONTEXT = 4  # tokens on both sides of a word
_WIDEST = 80  # letters of a word or its context in a table: a text without blanks is one word


def _table(columns: Sequence[Sequence[str]]) -> list[str]:
    return table(zip(*columns, strict=True))


def gains_table(comparisons: Sequence[tuple[str, float, int]]) -> list[str]:
    """Return the lines of a table with one comparison per line: its name, total gain in nats, and scored tokens."""
    names, totals, counts = zip(*comparisons, strict=True)
    means = [total / count if count else math.nan for total, count in zip(totals, counts, strict=True)]
    return _table(
        [
            ["gain over", *names],
            ["nats per token", *(format_metric(mean, ".4f") for mean in means)],
            ["nats", *(format_metric(total) for total in totals)],
            ["tokens", *(f"{count:,}" for count in counts)],
        ]
    )


def comparisons_key(seg_len: int) -> str:
    """Return what the comparisons with the same model without its memory mean."""
    emptied = f"memory off: the same model with its memory emptied before every segment of {seg_len} tokens;"
    return f"{emptied}\nin overlapping windows, every token still has {seg_len // 2} tokens before it, or more"


def names_line(found: Aggregates) -> str:
    """Return how many of the largest gains are names, and their share of the whole."""
    text = f"{found.names_in_top} of the {len(found.top)} largest gains are names"
    share = format_metric(100 * found.share_of_names, ".1f")
    return f"{text}; names have {share} % of the gain" if found.names_in_top else text


def top_table(
    top: Sequence[WordGain],
    pieces: Sequence[str],
    reasons: Sequence[tuple[TokenSpan, float] | None],
    *,
    is_removed: bool,
) -> str:
    """Return a table of the largest gains, under its key.

    Args:
        reasons: the passage that matters to each word, and how much.
        is_removed: passages were removed, so how much is the rise of the loss; else it is a share of attention.
    """
    matters = [_reason(each.word, reason, pieces) for each, reason in zip(top, reasons, strict=True)]
    much = "the share of attention of the layer that looked there most"
    if is_removed:
        much = f"the nats by which the loss rises without it; where nothing was removed, {much}"
    key = "largest gains (nats); passage that matters: its tokens BEGIN:END, as for --without, and in brackets"
    lines = _table(
        [
            ["position", *(str(each.word.first) for each in top)],
            ["gain", *(f"{each.gain:.2f}" for each in top)],
            ["class", *(each.word.kind for each in top)],
            ["word", *(cut_short(each.word.text, _WIDEST) for each in top)],
            ["in", *(text_around(each.word.first, each.word.end, pieces) for each in top)],
            ["passage that matters", *matters],
        ]
    )
    return "\n".join([key, much, "", *lines])


def _reason(word: TextWord, reason: tuple[TokenSpan, float] | None, pieces: Sequence[str]) -> str:
    if reason is None:
        return ""
    passage, value = reason
    return f"{passage.begin}:{passage.end} ({value:.2f}) {excerpt(word, passage, pieces)}"


def text_around(first: int, end: int, pieces: Sequence[str]) -> str:
    """Return some text around tokens [first, end), on one line."""
    return _on_one_line(pieces[max(0, first - _CONTEXT) : end + _CONTEXT])


def _on_one_line(pieces: Sequence[str]) -> str:
    return cut_short(" ".join("".join(pieces).split()), _WIDEST)


def excerpt(word: TextWord, passage: TokenSpan, pieces: Sequence[str]) -> str:
    """Return the part of a passage around its last mention of the word; its beginning if it has none."""
    begin = max(0, passage.begin)
    for found in reversed(words_of(pieces[begin : passage.end])):
        if found.text == word.text:
            return text_around(begin + found.first, begin + found.end, pieces)
    return _on_one_line(pieces[begin : min(passage.end, begin + 2 * _CONTEXT + 1)])


def colour_words(words: Sequence[WordGain], pieces: Sequence[str], span: TokenSpan, *, with_colour: bool) -> StyledText:
    """Return the text of tokens [begin, end), its words coloured, or marked, by gain."""
    parts, position = [], span.begin
    for word, gain, _ in words:
        if word.first < position or word.end > span.end:
            continue
        parts.append(make_printable("".join(pieces[position : word.first])))
        text = "".join(pieces[word.first : word.end])
        inner = text.lstrip()
        parts.append(make_printable(text[: len(text) - len(inner)]) + _mark_word(inner, gain, with_colour=with_colour))
        position = word.end
    return StyledText("".join([*parts, make_printable("".join(pieces[position : span.end]))]))


def _mark_word(text: str, gain: float, *, with_colour: bool) -> str:
    if not with_colour:
        return make_printable(f"{text}[{gain:+.1f}]" if abs(gain) >= _MARKED else text)
    level = sum(abs(gain) >= edge for edge in LEVELS)
    return in_style(text, (_GAINS if gain > 0 else _LOSSES)[level - 1]) if level else make_printable(text)


def legend(*, with_colour: bool) -> str:
    """Return the meaning of colours or marks."""
    if not with_colour:
        return f"gains and losses of {_MARKED:g} nat and more are marked [nats]"
    gains = " ".join(_mark_word(f" +{edge:g} ", edge, with_colour=True) for edge in LEVELS)
    losses = " ".join(_mark_word(f" -{edge:g} ", -edge, with_colour=True) for edge in LEVELS)
    return f"nats from: {gains}   {losses}"


def passages_table(removed: Counterfactual, words: Sequence[TextWord], pieces: Sequence[str]) -> list[str]:
    """Return the lines of a table of the passages that later tokens need most, and of what needs them."""
    totals = {passage: float(removed.rises(passage)[1].sum()) for passage in removed.passages()}
    largest = heapq.nlargest(PASSAGES, totals, key=totals.__getitem__)
    needing = []
    for passage in largest:
        found = sorted(word_gains(words, removed.without(passage)), key=lambda each: -each.gain)[:NEEDING]
        needing.append(
            ", ".join(f"{cut_short(each.word.text, _WIDEST)} at {each.word.first} ({each.gain:.2f})" for each in found)
        )
    return _table(
        [
            ["passage removed", *(f"{passage.begin}:{passage.end}" for passage in largest)],
            ["nats", *(f"{totals[passage]:.2f}" for passage in largest)],
            ["begins", *(text_around(max(0, passage.begin), max(0, passage.begin), pieces) for passage in largest)],
            ["later words that get worse", *needing],
        ]
    )
