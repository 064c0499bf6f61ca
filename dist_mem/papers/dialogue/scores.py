"""Scores of replies, over all conversations and separately for leaked ones, as a table, JSON and readable text."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from dist_mem.data.tokenizers.base import Tokenizer
from dist_mem.evaluation.scores import DocumentScore, format_metric, perplexity, total_words
from dist_mem.papers.dialogue.metrics import METRICS, REMEDY, mean_scores
from dist_mem.papers.dialogue.replies import Answer, Conversation, is_leaked
from dist_mem.runtime.terminal import table

FORMAT_VERSION = 1
_GROUPS = ("all", "leaked", "others")
DIALOGUE_METRICS = tuple(
    f"dialogue_{'' if group == 'all' else f'{group}_'}{name}"
    for group in _GROUPS
    for name in ("perplexity", "word_perplexity", *METRICS)
)


class ScoredAnswer(NamedTuple):
    """A reply of the model with its metrics in [0, 1]; None for a metric that is not available."""

    answer: Answer
    scores: dict[str, float | None]


@dataclass(frozen=True)
class GroupScore:
    """The scores of a group of conversations."""

    name: str  # all | leaked | others
    num_conversations: int
    num_replies: int  # generated and compared
    perplexity: float  # per token, over every reply of these conversations
    word_perplexity: float  # the same nats, per word
    scores: dict[str, float | None]  # percent, mean over the generated replies


def group_scores(documents: Sequence[DocumentScore], answers: Sequence[ScoredAnswer]) -> list[GroupScore]:
    """Return the scores of all conversations, of those leaked into the released train split, and of the others."""
    leaked = {document.id for document in documents if is_leaked(document.title)}
    everything = {document.id for document in documents}
    members = zip(_GROUPS, (everything, leaked, everything - leaked), strict=True)
    return [_group(name, ids, documents, answers) for name, ids in members if ids]


def _group(name: str, ids: set[str], documents: Sequence[DocumentScore], answers: Sequence[ScoredAnswer]) -> GroupScore:
    members = [document for document in documents if document.id in ids]
    scores = [scored.scores for scored in answers if scored.answer.conversation.id in ids]
    nll = math.fsum(document.nll for document in members)
    return GroupScore(
        name,
        len(members),
        len(scores),
        perplexity(nll, sum(document.num_scored for document in members)),
        perplexity(nll, total_words(members)),
        mean_scores(scores),
    )


def to_table(groups: Sequence[GroupScore]) -> str:
    """Return the groups as a table for a terminal."""
    titles = {"f1": "F1", "rouge1": "ROUGE-1", "rougeL": "ROUGE-L", "meteor": "METEOR"}
    rows = [["conversations", "replies", "ppl", "word ppl", *(titles[metric] for metric in METRICS)]]
    for group in groups:
        name = f"{group.num_conversations} {group.name}"
        perplexities = format_metric(group.perplexity), format_metric(group.word_perplexity)
        scores = (_percent(group.scores[metric]) for metric in METRICS)
        rows.append([name, f"{group.num_replies:,}", *perplexities, *scores])
    lines = table(rows)
    if any(group.num_replies and group.scores["meteor"] is None for group in groups):
        lines.append(f"METEOR needs WordNet: {REMEDY}")
    return "\n".join(lines)


def _percent(value: float | None) -> str:
    return "n/a" if value is None else f"{value:.2f}"


def metrics(groups: Sequence[GroupScore], split: str) -> dict[str, float]:
    """Return the metrics to track, "test/dialogue_f1", "test/dialogue_leaked_f1" and so on, without those n/a."""
    found: dict[str, float] = {}
    for group in groups:
        prefix = f"{split}/dialogue_" + ("" if group.name == "all" else f"{group.name}_")
        values = {"perplexity": group.perplexity, "word_perplexity": group.word_perplexity, **group.scores}
        found |= {prefix + name: value for name, value in values.items() if value is not None}
    return found


def to_content(groups: Sequence[GroupScore], answers: Sequence[ScoredAnswer], split: str) -> dict[str, Any]:
    """Return the content of the JSON: the metrics, the groups, and every reply with its reference and scores."""
    return {
        "metrics": metrics(groups, split),
        "groups": [asdict(group) for group in groups],
        "replies": [
            {
                "conversation": answer.conversation.id,
                "title": answer.conversation.title,
                "turn": answer.conversation.replies.index(answer.place) + 1,
                "reply": answer.text,
                "reference": answer.reference,
                **scores,
            }
            for answer, scores in answers
        ],
    }


def to_text(conversations: Sequence[Conversation], answers: Sequence[ScoredAnswer], tokenizer: Tokenizer) -> str:
    """Return the original conversations as text; below a reply, after ">", is the model's reply in its place."""
    written = {(scored.answer.conversation.id, scored.answer.place): scored.answer.text for scored in answers}
    lines = []
    for conversation in conversations:
        lines += [f"== {conversation.title} ({conversation.id})"]
        before = 0
        for place in conversation.replies:
            tag = tokenizer.decode(conversation.tokens[before : place.start]).rsplit("\n", 1)[-1]
            lines.append(f"  {tag}{tokenizer.decode(conversation.tokens[place.start : place.stop])}".rstrip())
            if (conversation.id, place) in written:
                lines.append(f"> {tag} {written[conversation.id, place]}")
            before = place.stop
        lines.append("")
    return "\n".join(lines)
