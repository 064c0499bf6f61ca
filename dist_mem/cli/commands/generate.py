"""Continue a prompt, or compare how several runs continue it."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from functools import partial
from pathlib import Path

from dist_mem.cli.arguments import MODEL, add_checkpoint, add_memory, add_sampling, count, output_file, place

PLACE = ("use a trained model", 7)
EXAMPLE = "runs/demo --prompt-file book.txt --tokens 500"


def add_arguments(added: ArgumentParser) -> None:
    """Add the arguments of the command."""
    added.add_argument("run", nargs="?", type=place, help=MODEL)
    added.add_argument("overrides", nargs="*", default=[], help="key=value overrides, as for `dist-mem evaluate`")
    added.add_argument(
        "--compare", nargs="+", type=place, default=[], metavar="RUN", help="compare these runs on the same prompt"
    )
    help_text = "the model that comes with dist_mem; without a prompt, on the first half of a book of its kind"
    added.add_argument("--example", action="store_true", help=help_text)
    prompt = added.add_mutually_exclusive_group()
    prompt.add_argument("--prompt", metavar="TEXT", help="text to continue; empty: begin a document")
    prompt.add_argument("--prompt-file", type=Path, metavar="FILE", help="UTF-8 file to continue, of any length")
    add_memory(added, "the prompt continues")
    add_sampling(added, tokens=256, top_p=0.95)
    added.add_argument("--top-k", type=count, metavar="K", help="draw from the K likeliest tokens (default: all)")
    added.add_argument(
        "--samples", type=partial(count, most=10_000), default=1, metavar="N", help="texts in one batch (default: 1)"
    )
    add_checkpoint(added)
    added.add_argument(
        "--out", type=output_file, metavar="FILE", help="also write the text to FILE; .json and .md: with all numbers"
    )


def run(options: Namespace) -> int:
    """Run the command; return the exit code of the process."""
    from dist_mem.runtime.distributed import choose_accelerator

    choose_accelerator()
    from dist_mem.generation.continue_prompts import request_of
    from dist_mem.generation.continue_prompts import run as run_command

    return run_command(request_of(options))
