"""Print a merged configuration, or every key with its default."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace

from dist_mem.cli.arguments import CONFIG, add_allow, output_folder
from dist_mem.cli.configuration import load_checked
from dist_mem.config import to_yaml, value_of
from dist_mem.config.docs import schema_as_yaml

PLACE = ("check", 1)
EXAMPLE = "configs/demo.yaml train.steps=100"


def add_arguments(added: ArgumentParser) -> None:
    """Add the arguments of the command."""
    added.add_argument("config", nargs="*", default=[], help=f"{CONFIG} (default: print every key)")
    added.add_argument("--markdown", action="store_true", help="print every key as docs/reference/config.md")
    added.add_argument(
        "--snapshot", type=output_folder, metavar="FOLDER", help="copy the code and this configuration to FOLDER"
    )
    add_allow(added, "no effect here; accepted because job scripts pass the arguments of `dist-mem train`")
    added.add_argument("--get", metavar="KEY", help="print only the resolved value of this key, for example run_dir")


def run(options: Namespace) -> int:
    """Run the command; return the exit code of the process."""
    if options.markdown:
        from dist_mem.config.docs import config_page
        from dist_mem.memory import describe_memories

        print(config_page(describe_memories()), end="")
        return 0
    if options.snapshot:
        from dist_mem.launch.code_snapshot import make_for

        make_for(options.snapshot, [options.config])
        return 0
    if options.get:
        print(value_of(load_checked(options.config), options.get))
        return 0
    print(to_yaml(load_checked(options.config)) if options.config else schema_as_yaml(), end="")
    return 0
