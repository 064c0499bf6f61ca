"""Build a dataset, verify it, or show what it contains."""

from __future__ import annotations

import sys
from argparse import REMAINDER, ArgumentParser, Namespace
from typing import Any

from dist_mem.cli.arguments import count, output_folder, place, seed, split
from dist_mem.cli.help import HelpFormatter, Parser
from dist_mem.config.check import hint, stop_on
from dist_mem.config.text_checks import check_texts
from dist_mem.datasets.recipes import builder_names, builder_summaries, load_builder
from dist_mem.errors import EXIT_DONE, EXIT_FAILED, EXIT_INTERRUPTED, UnusableError, run_error
from dist_mem.runtime.extras import require
from dist_mem.runtime.locks import check_free
from dist_mem.runtime.terminal import count_noun, list_names

PLACE = ("start", 2)
EXAMPLE = "build sample --out data/sample"
_FORM: dict[str, Any] = {"allow_abbrev": False, "formatter_class": HelpFormatter}
_ACTIONS = {  # what it does, example
    "build": ("Build a dataset from its source.", "text --source books --out data/mine"),
    "verify": ("Compare every byte with its checksum.", "data/sample"),
    "show": ("Print splits, sizes and tokenizer.", "data/sample"),
    "sample": ("Print passages of random documents.", "data/sample --split validation --tokens 200"),
}


def add_arguments(added: ArgumentParser) -> None:
    """Add the arguments of the command."""
    actions = added.add_subparsers(dest="action", required=True, metavar="build|verify|show|sample")
    build, verify, show, sample = (
        actions.add_parser(name, description=summary, epilog=f"example: dist-mem data {name} {example}", **_FORM)
        for name, (summary, example) in _ACTIONS.items()
    )
    build.add_argument("dataset", metavar="DATASET", help="one of those below")
    of_dataset = "its options, which dist-mem data build DATASET --help lists"
    build.add_argument("arguments", nargs=REMAINDER, metavar="...", help=of_dataset)
    lines = [f"  {name:<12}{summary.removeprefix('Build ')}" for name, summary in builder_summaries().items()]
    build.epilog = "\n".join(["datasets:", *lines, "", str(build.epilog)])
    for action in (verify, show, sample):
        action.add_argument(
            "data", type=place, help="a data directory, or its URL; the files needed are fetched into the cache"
        )
        action.add_argument("--cache", type=place, metavar="FOLDER", help="data.cache: where to keep fetched files")
    usual = "default: all; for a URL train, validation, test"
    for action in (verify, show):
        action.add_argument(
            "--split", type=split, action="append", default=[], metavar="NAME", help=f"only this; repeatable ({usual})"
        )
    sample.add_argument("--split", type=split, default="train", metavar="NAME", help="split to read (default: train)")
    sample.add_argument("--documents", type=count, default=3, metavar="N", help="documents to show (default: 3)")
    sample.add_argument("--tokens", type=count, default=100, metavar="N", help="tokens of each (default: 100)")
    sample.add_argument("--seed", type=seed, default=0, help="the same seed chooses the same passages (default: 0)")


def run(options: Namespace) -> int:
    """Run the command; return the exit code of the process."""
    return {"build": _build, "verify": _verify, "show": _show, "sample": _sample}[options.action](options)


def builder_parser(name: str) -> ArgumentParser:
    """Return the parser of a builder; its help is the docstring of the builder."""
    builder = load_builder(name)
    summary, _, details = (builder.__doc__ or "").partition("\n")
    parser = Parser(f"dist-mem data build {name}", description=summary, epilog=details.strip("\n"), **_FORM)
    builder.add_arguments(parser)
    for action in parser._actions:
        if action.dest == "out":
            action.type = output_folder
    return parser


def _build(options: Namespace) -> int:
    """Run a builder."""
    name = options.dataset.replace("-", "_")
    if name not in builder_names():
        raise UnusableError(
            f"there is no builder {name}{hint(name, builder_names())}; there are{list_names(builder_names())}"
        )
    given = builder_parser(name).parse_args(options.arguments)  # first: --help needs no library
    require("webdataset", "building data")
    try:
        check_free(given.out, f"--out {given.out}")  # before it reads the source, which may take hours
        load_builder(name).build(given)
    except OSError as error:
        raise run_error(error, f"{error}; fix this, and the same command continues from what is finished") from error
    except ValueError as error:
        raise run_error(error) from error
    except KeyboardInterrupt:
        print("stopped by SIGINT; the same command continues from here", file=sys.stderr)
        return EXIT_INTERRUPTED
    return EXIT_DONE


def _verify(options: Namespace) -> int:
    from dist_mem.config import DataConfig
    from dist_mem.data.build_record import BUILD_NAME
    from dist_mem.data.remote.fetch import show
    from dist_mem.data.verify import unbound_splits, verify_dataset

    _check(options)
    problems = verify_dataset(options.data, cache=options.cache, splits=options.split)
    for problem in problems:
        document = f"document {problem.document}" if problem.document else ""
        print(": ".join(part for part in (problem.where, document, problem.message) if part), file=sys.stderr)
    if unbound := unbound_splits(DataConfig(path=options.data, cache=options.cache)):
        print(f"{show(options.data)}: without {BUILD_NAME}, splits may be of different builds{list_names(unbound)}")
    print(f"{show(options.data)}: {count_noun(len(problems), 'problem') if problems else 'all is well'}")
    return EXIT_FAILED if problems else EXIT_DONE


def _show(options: Namespace) -> int:
    from dist_mem.data.summary import summarize

    _check(options)
    for line in summarize(options.data, cache=options.cache, splits=options.split):
        print(line)
    return EXIT_DONE


def _sample(options: Namespace) -> int:
    from dist_mem.data.summary import passages

    _check(options)
    for title, text in passages(
        options.data,
        options.split,
        num_documents=options.documents,
        num_tokens=options.tokens,
        seed=options.seed,
        cache=options.cache,
    ):
        print(f"== {title}\n{text}\n")
    return EXIT_DONE


def _check(options: Namespace) -> None:
    given = {"data.path": options.data, "data.cache": options.cache}
    stop_on(problem._replace(where="command line") for problem in check_texts(given))
