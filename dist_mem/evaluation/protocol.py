"""How a trained model is asked: the lengths of an evaluation, on which no weight depends.

    dist-mem evaluate runs/wikitext103 eval.seg_len=64 eval.mem_len=640 eval.clamp_len=400 eval.same_length=true

with eval.layout=stream eval.lanes=10 is how Transformer-XL is scored on WikiText-103 (Dai et al. 2019, table 1; lengths
from the published script). An evaluation amid training is asked as it is trained; only `eval.layout`, `eval.blocks` and
`eval.max_document_len` hold there too.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from dist_mem.config import Config

WITHOUT_MEMORY = "without-memory"  # in names of files and figures


class Protocol(NamedTuple):
    """What the figures of a report depend on, besides weights and text."""

    seg_len: int  # T, tokens
    mem_len: int  # M, tokens; 0 for no short-term memory
    clamp_len: int | None  # tokens; None: distances are as they are
    same_length: bool
    layout: str  # documents | stream
    lanes: int | None  # of a stream, each of which begins with an empty memory; None: they change nothing
    blocks: bool = False  # the first token of each segment is read and not scored
    max_document_len: int | None = None  # tokens; None: documents are read to their end
    precision: str = "fp32"  # of the model
    without_memory: bool = False  # emptied at every segment

    def __str__(self) -> str:
        clamp = "" if self.clamp_len is None else f", clamp_len {self.clamp_len}"
        layout = self.layout if self.lanes is None else f"{self.layout} in {self.lanes} lanes"
        same_length = ", same_length" if self.same_length else ""
        blocks = ", blocks (their first tokens are not scored)" if self.blocks else ""
        first = "" if self.max_document_len is None else f", first {self.max_document_len:,} tokens of each document"
        precision = "" if self.precision == "fp32" else f", {self.precision}"
        emptied = ", memory emptied at every segment" if self.without_memory else ""
        return f"T {self.seg_len}, M {self.mem_len}{clamp}{same_length}, {layout}{blocks}{first}{precision}{emptied}"


def protocol_of(config: Config, *, without_memory: bool = False) -> Protocol:
    """The protocol of `dist-mem evaluate` with this configuration: `eval`, and for what it leaves open, as trained."""
    settings, model = config.eval, config.model
    return Protocol(
        seg_len=settings.seg_len or config.train.seg_len,
        mem_len=settings.mem_len or short_term_len(config.memory),
        clamp_len=model.clamp_len if settings.clamp_len is None else settings.clamp_len or None,
        same_length=model.same_length if settings.same_length is None else settings.same_length,
        layout=settings.layout,
        lanes=settings.lanes if settings.layout == "stream" else None,
        blocks=config.data.blocks if settings.blocks is None else settings.blocks,
        max_document_len=settings.max_document_len,
        precision=settings.precision,
        without_memory=without_memory,
    )


def report_name(*parts: str) -> str:
    """Parts of a name of a file or figure joined by hyphens; empty ones are left out."""
    return "-".join(part for part in parts if part)


def tag_of(config: Config, *, without_memory: bool = False) -> str:
    """What tells this protocol from that of the training, for names of files and figures: "M640-stream10"; or "".

    Of the training are whole documents in fp32, each with an empty memory, whatever the run's own evaluations are.
    To be asked before `apply_protocol`.
    """
    asked, model = protocol_of(config), config.model
    parts = [
        f"T{asked.seg_len}" if asked.seg_len != config.train.seg_len else "",
        f"M{asked.mem_len}" if asked.mem_len != short_term_len(config.memory) else "",
        f"clamp{asked.clamp_len or 0}" if asked.clamp_len != model.clamp_len else "",
        f"same_length_{str(asked.same_length).lower()}" if asked.same_length != model.same_length else "",
        f"stream{asked.lanes}" if asked.lanes is not None else "",
        f"blocks_{str(asked.blocks).lower()}" if asked.blocks != config.data.blocks else "",
        f"first{asked.max_document_len}" if asked.max_document_len is not None else "",
        asked.precision if asked.precision != "fp32" else "",
        WITHOUT_MEMORY if without_memory else "",
    ]
    return report_name(*parts)


def apply_protocol(config: Config) -> None:
    """Write what `eval` asks for over what the training had: lengths, from which a model is built, and blocks.

    Raises:
        ValueError: a length is given that the memory, or the model, has none of.
    """
    asked, settings = protocol_of(config), config.eval
    if settings.clamp_len is not None and config.model.kind == "gpt2":
        raise ValueError(f"eval.clamp_len is {settings.clamp_len}, but GPT-2 knows no distances: set it to null")
    config.train.seg_len = asked.seg_len  # what the memories are built for
    config.data.blocks = asked.blocks  # so a text is scored and written on
    config.model.clamp_len, config.model.same_length = asked.clamp_len, asked.same_length
    if settings.mem_len is None:
        return
    block = short_term_block(config.memory)
    if block is None:
        raise ValueError(
            f"eval.mem_len is {settings.mem_len}, but memory.kind {config.memory['kind']} has no short-term memory "
            "(no memory.mem_len): set eval.mem_len to null"
        )
    block["mem_len"] = settings.mem_len


def short_term_block(memory: Any) -> Any:
    """The memory block that has a mem_len: this one, or the one it lies over; None if neither has."""
    if "mem_len" in memory:
        return memory
    return short_term_block(memory["over"]) if "over" in memory else None


def short_term_len(memory: Mapping[str, Any]) -> int:
    """M of a memory block, or of the memory it lies over; 0 if it has no short-term memory."""
    block = short_term_block(memory)
    return 0 if block is None else int(block["mem_len"])


def in_terms_of_eval(message: str, config: Config) -> str:
    """What a model of this protocol says against being built, by the keys that were set for it."""
    settings = config.eval
    renamed = [
        (r"\bmemory\.(over\.)*mem_len\b", "eval.mem_len", settings.mem_len),
        (r"\btrain\.seg_len\b", "eval.seg_len", settings.seg_len),
        (r"\bmodel\.same_length\b", "eval.same_length", settings.same_length),
    ]
    for pattern, key, value in renamed:
        if value is not None:
            message = re.sub(pattern, key, message)
    return message
