"""Evaluation protocol: the lengths and other settings of an evaluation on which no weight depends.

    dist-mem evaluate runs/wikitext103 eval.seg_len=64 eval.mem_len=640 eval.clamp_len=400 eval.same_length=true

with eval.layout=stream eval.batch_size=10 is the protocol of Transformer-XL on WikiText-103 (Dai et al. 2019, table 1;
lengths from the published script). An evaluation during training uses the training's protocol; only `eval.layout`,
`eval.blocks` and `eval.max_document_len` apply to it as well.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any, NamedTuple

from dist_mem.config import Config, EvalConfig, as_tree, change_config
from dist_mem.config.keys import TOKENS
from dist_mem.config.memory_blocks import describe_memory, memories_of
from dist_mem.errors import UnusableError
from dist_mem.evaluation.report_names import WITHOUT_MEMORY, join_parts
from dist_mem.runtime.file_schema import boolean, integer, one_of, optional, record, text


class Protocol(NamedTuple):
    """The settings that, besides weights and text, determine the metrics of a report."""

    seg_len: int  # T, tokens
    mem_len: int  # M, tokens; 0 for no short-term memory
    clamp_len: int | None  # tokens; None: no clamping of distances
    same_length: bool
    layout: str  # documents | stream
    lanes: int | None  # of a stream, each starting with an empty memory; None: documents, where lanes have no effect
    blocks: bool = False  # the first token of each segment is read but not scored
    max_document_len: int | None = None  # tokens; None: documents are read to their end
    precision: str = "fp32"  # of the model
    without_memory: bool = False  # the memory is emptied at every segment

    def __str__(self) -> str:
        clamp = "" if self.clamp_len is None else f", clamp_len {self.clamp_len}"
        layout = self.layout if self.lanes is None else f"{self.layout} in {self.lanes} lanes"
        same_length = ", same_length" if self.same_length else ""
        blocks = ", blocks (their first tokens are not scored)" if self.blocks else ""
        first = "" if self.max_document_len is None else f", first {self.max_document_len:,} tokens of each document"
        precision = "" if self.precision == "fp32" else f", {self.precision}"
        emptied = ", memory emptied at every segment" if self.without_memory else ""
        return f"T {self.seg_len}, M {self.mem_len}{clamp}{same_length}, {layout}{blocks}{first}{precision}{emptied}"


_LENGTH = integer(1, TOKENS)
PROTOCOL = record(  # of a protocol in a file
    {
        "seg_len": _LENGTH,
        "mem_len": integer(0, TOKENS),
        "clamp_len": optional(_LENGTH),
        "same_length": boolean,
        "layout": one_of("documents", "stream"),
        "lanes": optional(integer(1)),
        "blocks": boolean,
        "max_document_len": optional(integer(1)),
        "precision": text,
        "without_memory": boolean,
    },
    is_open=False,
)


def protocol_of(config: Config, *, without_memory: bool = False) -> Protocol:
    """Return the protocol of `dist-mem evaluate` with this configuration; keys not set in `eval` are as trained."""
    settings, model = config.eval, config.model
    return Protocol(
        seg_len=settings.seg_len or config.train.seg_len,
        mem_len=settings.mem_len or short_term_len(config.memory),
        clamp_len=model.clamp_len if settings.clamp_len is None else settings.clamp_len or None,
        same_length=model.same_length if settings.same_length is None else settings.same_length,
        layout=settings.layout,
        lanes=settings.batch_size if settings.layout == "stream" else None,
        blocks=config.data.blocks if settings.blocks is None else settings.blocks,
        max_document_len=settings.max_document_len,
        precision=settings.precision,
        without_memory=without_memory,
    )


def tag_of(config: Config, *, without_memory: bool = False) -> str:
    """Return the differences from the training's protocol, for names of files and metrics: "M640-stream10", or "".

    The training's protocol scores whole documents in fp32, each with an empty memory, whatever the evaluations during
    training do. `config` is that of the training.
    """
    wanted, model = protocol_of(config), config.model
    parts = [
        f"T{wanted.seg_len}" if wanted.seg_len != config.train.seg_len else "",
        f"M{wanted.mem_len}" if wanted.mem_len != short_term_len(config.memory) else "",
        f"clamp{wanted.clamp_len or 0}" if wanted.clamp_len != model.clamp_len else "",
        f"same_length_{str(wanted.same_length).lower()}" if wanted.same_length != model.same_length else "",
        f"stream{wanted.lanes}" if wanted.lanes is not None else "",
        f"blocks_{str(wanted.blocks).lower()}" if wanted.blocks != config.data.blocks else "",
        f"first{wanted.max_document_len}" if wanted.max_document_len is not None else "",
        wanted.precision if wanted.precision != "fp32" else "",
        WITHOUT_MEMORY if without_memory else "",
    ]
    return join_parts(*parts)


def for_evaluation(config: Config) -> Config:
    """Return a configuration whose lengths, from which a model is built, and blocks are those of `eval`.

    Raises:
        ValueError: a length is set that the memory or the model does not have.
    """
    wanted, settings = protocol_of(config), config.eval
    if settings.clamp_len is not None and config.model.kind != "transformer":
        kind = f"model.kind {config.model.kind} has no table of distances"
        raise ValueError(f"eval.clamp_len is {settings.clamp_len}, but {kind}: set it to null")
    memory = as_tree(config.memory)
    blocks = short_term_blocks(memory) if settings.mem_len is not None else []
    if settings.mem_len is not None and not blocks:
        raise ValueError(
            f"eval.mem_len is {settings.mem_len}, but memory.kind {describe_memory(config.memory)} has no short-term "
            "memory (no memory.mem_len): set eval.mem_len to null"
        )
    for block in blocks:
        block["mem_len"] = settings.mem_len
    if settings.seg_len is not None:
        for block in memories_of(memory).values():
            _fix_lengths(block, config.train.seg_len)
    changes = {
        "train.seg_len": wanted.seg_len,  # the length the memories are built for
        "data.blocks": wanted.blocks,  # also used to score and continue a text
        "model.clamp_len": wanted.clamp_len,
        "model.same_length": wanted.same_length,
        "memory": memory,
    }
    return change_config(config, changes)


def _fix_lengths(block: dict[str, Any], seg_len: int) -> None:
    """Write out the lengths of a memory, and of those below it, that are null and stand for `train.seg_len`."""
    from dist_mem.memory import convert_options, memory_class  # imports torch, which takes a second

    kind, options = convert_options(block)
    fixed = asdict(memory_class(kind).fix_lengths(options, seg_len))
    block |= {name: value for name, value in fixed.items() if name != "over"}
    if block.get("over"):
        _fix_lengths(block["over"], seg_len)


def short_term_blocks(memory: Mapping[str, Any]) -> list[Any]:
    """Return the blocks that have a short-term memory: of each memory its own, or that of the memory under `over`.

    Long-term stores are none, unless all are. A block trained with `mem_len: 0` has none.
    """
    found = []
    for block in memories_of(memory).values():
        while "mem_len" not in block and block.get("over"):
            block = block["over"]
        found += [block] if block.get("mem_len") else []
    if len({block["kind"] for block in found}) < 2:
        return found
    from dist_mem.memory import memory_class  # imports torch, which takes a second

    return [block for block in found if not memory_class(block["kind"]).is_store] or found


def short_term_len(memory: Mapping[str, Any]) -> int:
    """Return M, of the longest short-term memory of any block of the model; 0 if there is none."""
    return max((int(block["mem_len"]) for block in short_term_blocks(memory)), default=0)


@contextmanager
def lengths_named(settings: EvalConfig) -> Iterator[None]:
    """Put the keys of `eval` before the message of a ValueError about a model that is built with them.

    The message names the keys of the training for which they stand.
    """
    try:
        yield
    except UnusableError:
        raise
    except ValueError as error:
        values = {name: getattr(settings, name) for name in ("seg_len", "mem_len", "clamp_len", "same_length")}
        given = ", ".join(f"eval.{name}={str(value).lower()}" for name, value in values.items() if value is not None)
        raise ValueError(f"{given}: {error}" if given else str(error)) from error
