"""README.md of an export: what the model is, how to load it, its data, metrics, limits and code."""

from __future__ import annotations

from dist_mem.config import Config
from dist_mem.config.memory_blocks import describe_memory
from dist_mem.data.tokenizers.base import Tokenizer
from dist_mem.data.tokenizers.byte_pairs import END_OF_TEXT, BytePairTokenizer
from dist_mem.data.tokenizers.huggingface import HuggingFaceTokenizer
from dist_mem.evaluation.report_names import join_parts, list_reports
from dist_mem.evaluation.scores import Report, format_metric, read_report
from dist_mem.evaluation.trained_model import Checkpoint, TrainedModel, name_data_of, tokens_read_by
from dist_mem.runtime import markdown

_FRONT = """---
library_name: transformers
pipeline_tag: text-generation
tags: [dist_mem]
---
"""  # what the Hugging Face Hub reads
_CARD = """# {name}

A language model that carries memory from one segment of a text to the next, trained with dist_mem for {step} steps:
memory `{memory}`, {num_layers} layers of width {d_model}, {num_parameters:,} parameters in {precision}, a vocabulary of
{vocab_size:,} ({tokenizer}), segments of {seg_len} tokens. `config.yaml` has the rest.

{loading}
To evaluate it on documents, name a data directory that was made with the same tokenizer:

```sh
dist-mem evaluate {name} --split test data.path=FOLDER
```

## Data

The run `{run}` {read}. {data}

## Metrics

{metrics}

## Limits

The model continues texts like those it was trained on; it follows no instructions, and what it writes may be false or
offensive. It remembers no more of a text than its memory keeps, and nothing of another text. Metrics depend on where
segments begin: a text is read from its first token on, in segments of {seg_len}.

## Code

{code} {trust}
"""
_DIST_MEM = """```python
import dist_mem

model = dist_mem.load("{name}")  # the path of this folder
print(model.score("It was the best of times.").nll)  # of every token, in nats
```
"""
_TRANSFORMERS = """```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("{name}", trust_remote_code=True)  # the path of this folder
tokenizer = AutoTokenizer.from_pretrained("{name}", trust_remote_code=True)
tokens = tokenizer("{bos}It was the best of times,", return_tensors="pt")
written = model.generate(**tokens, max_new_tokens=50, do_sample=True)  # carries the memory
```

It needs dist_mem installed. `dist_mem.load("{name}")` loads the same folder.
"""
_DATA_ONLY = "All files are data: loading runs no code from them. Each is compared with its SHA-256 in `manifest.json`."
_REMOTE = """\
`modeling_dist_mem.py` is a program of a few lines that imports dist_mem, and `tokenization_dist_mem.py`, where there is
one, imports transformers, which runs them only with `trust_remote_code=True`. All other files are data. Each is
compared with its SHA-256 in `manifest.json`."""
_CODE = """\
**`memory/` contains a program**: this memory is not part of dist_mem. Loading the model runs it, but only with
{allowed} as a further argument: read it first. Each file is compared with its SHA-256 in `manifest.json`."""


def card(trained: TrainedModel, config: Config, name: str, *, layout: str) -> str:
    """Return the text of README.md.

    Args:
        config: without places of the training machine.
        layout: dist_mem or transformers.
    """
    manifest, num_tokens = trained.checkpoint.manifest, tokens_read_by(trained.checkpoint)
    step = manifest["step"]
    is_hub = layout == "transformers"
    bos = "" if config.data.blocks else _missing_bos(trained.tokenizer, config.model.kind)
    commit = manifest.get("commit")
    text = _CARD.format(
        name=name,
        step=step,
        memory=describe_memory(config.memory),
        num_layers=config.model.num_layers,
        d_model=config.model.d_model,
        num_parameters=sum(parameter.numel() for parameter in trained.model.parameters()),
        precision=trained.config.eval.precision,
        vocab_size=trained.tokenizer.vocab_size,
        tokenizer=trained.tokenizer.kind,
        seg_len=config.train.seg_len,
        loading=(_TRANSFORMERS if is_hub else _DIST_MEM).format(name=name, bos=bos),
        run=config.name,
        read=f"made {step} steps" if num_tokens is None else f"read {num_tokens:,} tokens in {step} steps",
        data=_data(trained.checkpoint),
        metrics=_metrics(trained.checkpoint),
        code=f"The checkpoint was written by commit `{commit}`." if commit else "The commit is not known.",
        trust=_trust(trained.checkpoint, is_hub=is_hub),
    )
    return (_FRONT if is_hub else "") + text


def _data(checkpoint: Checkpoint) -> str:
    """Return which data the run read: their names, with those of a mixture their shares, and fingerprints."""
    fingerprints = checkpoint.manifest.get("data_fingerprint", "").split()
    if not fingerprints:
        return "Its weights have seen no data here."
    each = ", ".join(f"`{fingerprint}`" for fingerprint in fingerprints)
    names = name_data_of(checkpoint)
    named = "Its data" if names is None else f"Its data, {names},"
    return f"{named} have the {'fingerprint' if len(fingerprints) == 1 else 'fingerprints'} {each}."


def _missing_bos(tokenizer: Tokenizer, kind: str) -> str:
    """Return what stands before a text in transformers, because the exported tokenizer does not put BOS there."""
    if isinstance(tokenizer, HuggingFaceTokenizer):
        return tokenizer.missing_bos
    return END_OF_TEXT if kind == "gpt2" and isinstance(tokenizer, BytePairTokenizer) else ""


def outside_memories(checkpoint: Checkpoint) -> list[str]:
    """Return the names of the memories from outside the package that a checkpoint contains."""
    return [name for name in checkpoint.manifest["files"] if name.startswith("memory/")]


def _trust(checkpoint: Checkpoint, *, is_hub: bool) -> str:
    if outside_memories(checkpoint):
        return _CODE.format(allowed="`allow_code=True`" if is_hub else '`"eval.allow_code=true"`')
    return _REMOTE if is_hub else _DATA_ONLY


def _metrics(checkpoint: Checkpoint) -> str:
    """Return a table of the evaluations of this checkpoint that were made before the export."""
    found = _reports(checkpoint)
    validation = checkpoint.manifest.get("validation")
    loss = ""
    if validation is not None:
        measured = f"{validation['loss']:.4f} nats per token ({validation['measure']})"
        loss = f"\n\nValidation loss at step {validation['step']}: {measured}."
    if not found:
        return f"No evaluation of this step was made before the export (`dist-mem evaluate`).{loss}"
    titles = ("evaluation", "documents", "word-level perplexity", "perplexity per token", "bits per byte")
    columns = [
        [
            name,
            str(len(report.documents)),
            *map(format_metric, (report.word_perplexity, report.token_perplexity)),
            format_metric(report.bits_per_byte, ".3f"),
        ]
        for name, report in found.items()
    ]
    return "\n".join(markdown.table(titles, columns)) + loss


def _reports(checkpoint: Checkpoint) -> dict[str, Report]:
    """Return the reports of `dist-mem evaluate` on this checkpoint, by split and protocol."""
    found = list_reports(checkpoint.run_dir).items()
    mine = ((path, name) for path, name in found if name.step == checkpoint.manifest["step"])
    return {join_parts(name.split, name.tag): read_report(path) for path, name in mine}
