"""Every configuration key on one page: `dist-mem config --markdown > docs/reference/config.md`.

All of it is read off what the program itself goes by: the dataclasses and their comments, the choices and ranges, the
rules of resuming, the tables of DeepSpeed's keys, and the options of each memory, which the caller hands in.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import Field, fields
from typing import Any

from dist_mem.config.bounds import MOST
from dist_mem.config.check import describe_type, fields_of, is_optional, item_schema
from dist_mem.config.constraints import CHOICES, RANGES
from dist_mem.config.deepspeed_keys import HANDED_ON, OWNED, REMOVED, UNSUPPORTED
from dist_mem.config.help import as_yaml, block_of, default_of, meanings
from dist_mem.config.resume_rules import ALLOWED, RULES, SAME, rule_of
from dist_mem.config.schema import Config

INTRODUCTION = """\
# Every configuration key

<!-- Made by `dist-mem config --markdown > docs/reference/config.md`: change the comments in config/schema.py. -->

A run is described by YAML files, merged left to right, and by `key=value` overrides, which win:

    dist-mem train configs/demo.yaml memory/none.yaml name=short train.steps=100 tracking.uri=http://mlflow:5000

A file is looked up here, beside the first file, and under `configs/`. `${name}` stands for the value of another key,
`${oc.env:NAME}` for an environment variable, `null` for none. An unknown key is an error that names the nearest known
one. `dist-mem config` prints this page as YAML, `dist-mem config FILES OVERRIDES` what those come to, and
`dist-mem train FILES OVERRIDES --check` what it amounts to: parameters, lanes of a rank, steps of an epoch.

A key that is *fixed* must be on resume what it was when the run began; one with `--allow` may change where the command
says so (`--allow optimizer.betas`); the others may change ([resume.md](../howto/resume.md)).
"""
MEMORY = """\
The memory of every block of the model. `memory.kind` chooses it; the default is {default}. Each kind has options of its
own, and all are fixed on resume. How to add one: [add_a_memory.md](../howto/add_a_memory.md).
"""
DEEPSPEED = """\
What DeepSpeed is told: a block, or the path of a `ds_config.json`. The default is {default}. Stage 0 divides nothing
among the ranks, 1 the optimizer's states, 2 the gradients too, 3 the parameters too. All of it may change on resume,
the stage too; {asking} take `--allow`.

**Yours** is whatever else DeepSpeed 0.19.8 knows of {handed_on}.

**dist_mem sets** these, and refuses them here unless they are `"auto"`:
"""
_RULE_WORDS = {SAME: "fixed", ALLOWED: "`--allow`"}
_SIGNS = {"at least": ">=", "greater than": ">", "less than": "<"}  # there is little room in a column
_SIGN = re.compile("|".join(_SIGNS))
_BLOCKS = "|".join(fields_of(Config) or {})
_CODE = re.compile(rf"\b(?:{_BLOCKS})\.(?!md\b)(?:\w+|\*)|\bnull\b|\bdist-mem \w+")  # in comments and reasons


def config_page(memories: Mapping[str, tuple[str, type]]) -> str:
    """The page.

    Args:
        memories: kind -> what it is, in a line, and the dataclass of its options.
    """
    types, told = fields_of(Config) or {}, meanings(Config)
    plain = [field for field in fields(Config) if block_of(types[field.name]) is None and types[field.name] is not Any]
    parts = [INTRODUCTION, "## The run\n", _keys_table(_row(field.name, field, Config) for field in plain)]
    for name, schema in types.items():
        if name == "memory":
            parts += ["## memory\n", *_memory_parts(memories)]
        elif name == "deepspeed":
            parts += ["## deepspeed\n", *_deepspeed_parts()]
        elif block := block_of(schema):
            parts += [
                f"## {name}\n",
                f"{told[name][0].upper()}{_prose(told[name][1:])}.\n",
                _keys_table(_rows(block, f"{name}.")),
            ]
    return "\n".join(parts)


def _memory_parts(memories: Mapping[str, tuple[str, type]]) -> Iterator[str]:
    yield MEMORY.format(default=_code(Config().memory["kind"]))
    for kind, (summary, options) in memories.items():
        yield f"### memory.kind: {kind}\n\n{summary}\n"
        yield _keys_table(_rows(options, "memory.")) if fields(options) else "It has no options.\n"


def _deepspeed_parts() -> Iterator[str]:
    asking = [pattern for pattern, rule in RULES.items() if rule == ALLOWED and pattern.startswith("deepspeed.")]
    yield DEEPSPEED.format(
        default=_code(as_yaml(Config().deepspeed)),
        asking=_listed(pattern.removeprefix("deepspeed.").removesuffix(".*") for pattern in asking),
        handed_on=_listed(HANDED_ON),
    )
    yield _table(["key", "instead"], _by_reason(OWNED))
    yield "**Refused** are:\n"
    yield _table(["key", "because"], _by_reason({**UNSUPPORTED, **REMOVED}))


def _by_reason(reasons: Mapping[str, str]) -> Iterator[Sequence[str]]:
    """Keys that have the same reason share a row."""
    for reason in dict.fromkeys(reasons.values()):
        yield _listed(key for key, other in reasons.items() if other == reason), _prose(reason)


def _rows(schema: type, prefix: str) -> Iterator[Sequence[str]]:
    """A row for each key of a block; those of a block in it follow it, items of a list as `optimizer.groups[].lr`."""
    for field in fields(schema):
        key, kind = f"{prefix}{field.name}", (fields_of(schema) or {})[field.name]
        yield _row(key, field, schema)
        if block := block_of(kind):
            yield from _rows(block, f"{key}[]." if item_schema(kind) else f"{key}.")


def _row(key: str, field: Field[Any], schema: type) -> Sequence[str]:
    kind, comment = (fields_of(schema) or {})[field.name], meanings(schema)[field.name]
    choices = " | ".join(CHOICES.get(key, ()))  # a comment may begin with them; here they have a column of their own
    meaning = comment.removeprefix(f"{choices}: ").replace(" | ", "; ")
    rule = _RULE_WORDS.get(rule_of(key), "")
    return _code(key), _code(as_yaml(default_of(field))), _values(key, kind), rule, _prose(meaning)


def _values(key: str, kind: Any) -> str:
    """What may stand there: type and range, or the choices."""
    is_list = item_schema(kind) is not None
    number = f"{key}[]" if is_list else key
    limits, most = RANGES.get(number), MOST.get(number)
    if key in CHOICES:
        words = _listed(CHOICES[key])
    elif block_of(kind) and not is_list:
        words = "block"
    else:
        words = "block" if kind is Any else re.sub(r"^an? | or null$", "", describe_type(kind))
    words += ", each" if is_list and (limits or most) else ""
    if limits:
        words += f" {_SIGN.sub(lambda found: _SIGNS[found[0]], limits.words)}"
    if most is not None:
        words += f"{' and' if limits else ''} <= {most:,}"
    return f"{words} or `null`" if is_optional(kind) else words


def _keys_table(rows: Iterable[Sequence[str]]) -> str:
    return _table(["key", "default", "values", "resume", "meaning"], rows)


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *([cell.replace("|", r"\|") for cell in row] for row in rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _prose(text: str) -> str:
    """A comment as Markdown: keys and null as code, pages of docs/ as links."""
    text = re.sub(r"\bdocs/(\w+)/(\w+\.md)", r"[\2](../\1/\2)", text)
    return _CODE.sub(lambda found: _code(found[0]), text)


def _listed(names: Iterable[str]) -> str:
    return ", ".join(_code(name) for name in names)


def _code(text: str) -> str:
    return f"`{text}`"
