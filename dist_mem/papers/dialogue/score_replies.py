"""The dialogue command: generate replies and compute the five metrics of the infinity-former's table 2.

    dist-mem dialogue runs/cmu_dog --split test
    dist-mem dialogue runs/cmu_dog --split test --limit 100 --turns 2 eval.batch_size=32

Perplexity covers every reply of the conversations read, in the model's tokens. The other metrics compare the model's
replies (replies.py) with those of people (metrics.py). RUN/evaluations/dialogue-<split>-step-<step>.json and .txt
contain the metrics and the replies. The metrics are added to the run in MLflow, except those of an export. Names of
files and metrics contain the settings that differ from the defaults, as in
dialogue-test-step-00000800-limit100-turns2.json.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from dist_mem.data.directory import open_index, refresh
from dist_mem.data.shard import Index
from dist_mem.errors import UnusableError
from dist_mem.evaluation.job import (
    StopCheck,
    data_tag,
    describe_evaluation,
    find_checkpoint_together,
    read_memory_file_of,
    run_on_ranks,
    track,
    use_threads,
)
from dist_mem.evaluation.kept_memory import states_and_inputs
from dist_mem.evaluation.memory_file import MemoryFile
from dist_mem.evaluation.protocol import protocol_of, tag_of
from dist_mem.evaluation.report_names import FOLDER, ReportName, join_parts
from dist_mem.evaluation.scoring import score_split
from dist_mem.evaluation.trained_model import TrainedModel, open_model, read_settings, tokenizer_of_data
from dist_mem.generation.generate import Sampling
from dist_mem.generation.text_memory import Memory
from dist_mem.papers.dialogue.metrics import make_scorer, open_wordnet
from dist_mem.papers.dialogue.replies import Conversation, answer_all, choose_replies, read_conversations
from dist_mem.papers.dialogue.scores import (
    FORMAT_VERSION,
    ScoredAnswer,
    group_scores,
    metrics,
    to_content,
    to_table,
    to_text,
)
from dist_mem.runtime.distributed import World
from dist_mem.runtime.figures import json_text
from dist_mem.runtime.files import write_text
from dist_mem.runtime.locks import hold_file
from dist_mem.runtime.progress import Progress
from dist_mem.runtime.signals import StopSignal

MIN_HISTORY = 2  # replies before the first one that the model generates, as in the published evaluation


@dataclass(frozen=True)
class DialogueRequest:
    """The settings of a dialogue evaluation."""

    split: str | None = None  # None: eval.split
    limit: int | None = None  # number of conversations, from the start of the split; None: all
    turns: int | None = None  # replies generated per conversation, spread over it; None: all from the third on
    num_tokens: int = 50  # maximum length of a reply
    sampling: Sampling = field(default_factory=lambda: Sampling(top_p=0.9))
    memory: Path | None = None  # memory file of a text that every conversation continues; None: each is a document
    wordnet: Path | None = None  # folder of WordNet; None: Debian's folder, if it exists


def settings_tag(settings: DialogueRequest) -> str:
    """Return the settings that differ from the defaults, for names of files and metrics: "limit100-turns2", or ""."""
    given, default = (
        {"limit": each.limit, "turns": each.turns, "tokens": each.num_tokens, **vars(each.sampling)}
        for each in (settings, DialogueRequest())
    )
    return "-".join(f"{name}{value}" for name, value in given.items() if value != default[name])


def settings_of(options: argparse.Namespace) -> DialogueRequest:
    """Return the settings of a command line.

    Raises:
        UnusableError: a number is out of range.
    """
    try:
        sampling = Sampling(temperature=options.temperature, top_p=options.top_p, seed=options.seed)
    except ValueError as error:
        raise UnusableError(f"--{str(error).replace('_', '-', 1)}") from error
    return DialogueRequest(
        split=options.split,
        limit=options.limit,
        turns=options.turns,
        num_tokens=options.tokens,
        sampling=sampling,
        memory=options.memory,
        wordnet=options.wordnet,
    )


def run(
    path: Path,
    settings: DialogueRequest,
    *,
    checkpoint: int | None = None,
    overrides: Sequence[str] = (),
    early: StopSignal | None = None,
) -> int:
    """Run the command on one process and return its exit code.

    Args:
        path: a run directory, one checkpoint in it, or an export.
        checkpoint: step of the checkpoint; None: the newest that verifies.
        overrides: `key=value`, for keys that an evaluation may set.
        early: as in `evaluate.run`.

    Raises:
        UnusableError: the checkpoint, the data or the overrides are invalid.
    """
    work = partial(_run, path=path, settings=settings, step=checkpoint, overrides=overrides)
    return run_on_ranks(work, overrides, early, alone="dialogue")


def _run(
    world: World, check: StopCheck, *, path: Path, settings: DialogueRequest, step: int | None, overrides: Sequence[str]
) -> None:
    found = find_checkpoint_together(path, step, world)
    whole = ["eval.layout=documents", "eval.max_document_len=null"]  # each conversation separately, to its end
    config = read_settings(found.directory, [*overrides, *whole], reads_data=True)
    if protocol_of(config).blocks:
        raise ValueError(
            "eval.blocks is in effect true, which leaves tokens of replies unscored: set eval.blocks=false"
        )
    use_threads(config.train)
    split = settings.split or config.eval.split
    before = read_memory_file_of(settings.memory, config.eval, world)
    open_wordnet(settings.wordnet)  # fail early if the folder is wrong
    refresh(config.data, [split])
    data = data_tag(found, config.data, split)
    tag = join_parts(data, tag_of(config), settings_tag(settings), before.tag if before else "")
    target = found.run_dir / FOLDER / str(ReportName(split, found.manifest["step"], tag, "dialogue"))
    with hold_file(target):
        index = first_documents(open_index(config.data, split), settings.limit)
        conversations = read_conversations(index)
        trained = open_model(found, config, tokenizer_of_data(found, config.data), world.device)
        trained.model.register_forward_pre_hook(check)
        report = score_split(
            trained.model,
            *states_and_inputs(trained, before),
            config=trained.config,
            index=index,
            tokenizer=trained.tokenizer,
            world=world,
        )
        answers = score_answers(trained, conversations, settings, before)
        groups = group_scores(report.documents, answers)
        protocol, sampling = protocol_of(config), settings.sampling
        print(
            f"{found.directory}, split {split}, {protocol}{f', {before}' if before else ''}, top-p {sampling.top_p}, "
            f"temperature {sampling.temperature}, seed {sampling.seed}"
        )
        print(to_table(groups))
        content = {
            "format_version": FORMAT_VERSION,
            **describe_evaluation(found, config.name, protocol, before),
            "settings": _described_settings(settings, split),
            "min_history": MIN_HISTORY,
            **to_content(groups, answers, split),
        }
        files = [target.with_name(f"{target.name}.{suffix}") for suffix in ("json", "txt")]
        write_text(files[0], json_text(content, indent=1) + "\n")
        write_text(files[1], to_text(conversations, answers, trained.tokenizer))
        # Their names contain the tag, so that a quick look at a few conversations does not replace the split's results.
        track(found, config.tracking, metrics(groups, join_parts(split, tag)), files, overrides)


def _described_settings(settings: DialogueRequest, split: str) -> dict[str, object]:
    places = {"memory": settings.memory and str(settings.memory), "wordnet": settings.wordnet and str(settings.wordnet)}
    return {**vars(settings), **places, "split": split, "sampling": vars(settings.sampling)}


def first_documents(index: Index, limit: int | None) -> Index:
    """Return the index of a split cut to its first `limit` documents."""
    documents = index.documents[:limit]
    return replace(index, documents=documents, num_tokens=int(documents.num_tokens.sum()))


def score_answers(
    trained: TrainedModel, conversations: Sequence[Conversation], settings: DialogueRequest, before: MemoryFile | None
) -> list[ScoredAnswer]:
    """Return the model's replies to the history of each chosen reply, with their metrics.

    Args:
        before: memory of a text that every conversation continues; None: each is a document.
    """
    score = make_scorer(settings.wordnet)
    chosen = [
        choose_replies(conversation.replies, first=MIN_HISTORY, num_chosen=settings.turns)
        for conversation in conversations
    ]
    answers = answer_all(
        trained,
        conversations,
        chosen,
        num_lanes=trained.config.eval.batch_size,
        num_tokens=settings.num_tokens,
        sampling=settings.sampling,
        after=before and Memory(before.texts, file=before).reading_of(trained),
    )
    scored = []
    with Progress(sum(map(len, chosen)), "writing replies", unit="replies") as progress:
        for answer in answers:
            scored.append(ScoredAnswer(answer, score(answer.text, answer.reference)))
            progress.add(1)
    return sorted(scored, key=lambda found: (found.answer.conversation.number, found.answer.place))
