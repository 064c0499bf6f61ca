"""The help of commands: its form,  and what is said about wrong arguments."""

from __future__ import annotations

import re
import shutil
import sys
from argparse import Action, ArgumentError, ArgumentParser, RawDescriptionHelpFormatter
from pathlib import Path
from typing import Any, NoReturn

from dist_mem.cli.arguments import place
from dist_mem.config.check import hint
from dist_mem.errors import EXIT_USAGE
from dist_mem.runtime.terminal import WIDTH, StyledText, colour_first_word, list_names


class HelpFormatter(RawDescriptionHelpFormatter):
    """Keeps the lines of a description, and is as wide as the terminal, at most 100 columns."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, width=min(WIDTH, shutil.get_terminal_size(fallback=(WIDTH, 24)).columns))


class Parser(ArgumentParser):
    """An argparse parser whose errors show an example of what is missing, and the choice that was probably meant.

    A leading `~` of every path is the home directory: shells do not expand it in `--out=~/x`.
    """

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.register("type", Path, lambda text: Path(place(text)))

    def _check_value(self, action: Action, value: Any) -> None:
        if action.choices is None or value in action.choices:
            return
        names = [str(name) for name in action.choices]
        raise ArgumentError(action, f"there is no {value!r}{hint(str(value), names)}; there are{list_names(names)}")

    def error(self, message: str) -> NoReturn:
        """Print the usage and the message on stderr, and end the process with the code for wrong input."""
        example = re.search("dist-mem .*", self.epilog or "")
        if "are required:" in message and example:
            message = f"{message}, as in: {example[0].partition('  #')[0].rstrip()}"
        self.print_usage(sys.stderr)
        self.exit(EXIT_USAGE, StyledText(f"{self.prog}: {colour_first_word(f'error: {message}', sys.stderr)}\n"))
