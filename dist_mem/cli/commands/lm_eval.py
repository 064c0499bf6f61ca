"""Run tasks of lm-evaluation-harness on a trained model."""

from __future__ import annotations

import json
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from pathlib import Path
from typing import Any

from dist_mem.cli.arguments import MODEL, add_checkpoint, count, names, output_file, place
from dist_mem.runtime.extras import require

PLACE = ("use a trained model", 3)
_UNITS = {"k": 1 << 10, "M": 1 << 20}
EXAMPLE = "runs/demo --tasks lambada_openai --limit 100"


def add_arguments(added: ArgumentParser) -> None:
    """Add the arguments of the command."""
    added.add_argument("run", type=Path, help=MODEL)
    added.add_argument("overrides", nargs="*", help="key=value overrides, as for `dist-mem evaluate`")
    added.add_argument("--tasks", type=names, required=True, metavar="NAME,...", help="tasks, groups, or patterns")
    added.add_argument("--include-path", type=Path, metavar="FOLDER", help="folder with YAML files of your own tasks")
    added.add_argument(
        "--metadata", type=_json_object, default={}, metavar="JSON", help="for tasks that make their data, see the page"
    )
    added.add_argument(
        "--lengths", type=_lengths, default=(), metavar="N,...", help="tokens of the texts of such tasks: 4k,16k,1M"
    )
    added.add_argument(
        "--datasets", type=place, metavar="FOLDER", help="copies of datasets, FOLDER/OWNER/NAME: no network is needed"
    )
    added.add_argument("--limit", type=count, metavar="N", help="documents of each task (default: all)")
    added.add_argument("--output", type=output_file, metavar="FILE", help="also write the JSON of the results to FILE")
    add_checkpoint(added)


def run(options: Namespace) -> int:
    """Run the command; return the exit code of the process."""
    require("lm_eval", "`dist-mem lm-eval`")
    from dist_mem.runtime.distributed import choose_accelerator

    choose_accelerator()
    from dist_mem.lm_eval.run_tasks import LmEvalRequest
    from dist_mem.lm_eval.run_tasks import run as run_command

    request = LmEvalRequest(
        options.run,
        options.overrides,
        options.tasks,
        include_path=options.include_path,
        metadata=options.metadata,
        lengths=options.lengths,
        datasets=None if options.datasets is None else Path(options.datasets),
        limit=options.limit,
        output=options.output,
        checkpoint=options.checkpoint,
    )
    return run_command(request)


def _lengths(text: str) -> list[int]:
    """Parse numbers of tokens, in ascending order; k: 1,024, M: 1,048,576."""
    found = []
    for name in names(text):
        number, unit = (name[:-1], _UNITS[name[-1]]) if name[-1] in _UNITS else (name, 1)
        found.append(count(number) * unit)
    if len(set(found)) != len(found):
        raise ArgumentTypeError(f"{text} has a length twice")
    return sorted(found)


def _json_object(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except (RecursionError, ValueError) as error:
        raise ArgumentTypeError(f"{text} is not JSON ({error})") from error
    if not isinstance(found, dict):
        raise ArgumentTypeError(f"""{text} is no object, as '{{"max_seq_lengths": [4096]}}' is""")
    return found
