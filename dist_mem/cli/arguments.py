"""Arguments of the command line: types of options, and suggestions for unknown commands, options and keys."""

from __future__ import annotations

import argparse
import os
import re
from argparse import ArgumentParser, Namespace
from collections.abc import Collection, Sequence
from pathlib import Path

from dist_mem.config.check import format_value, nearest
from dist_mem.config.keys import SEED, STEPS
from dist_mem.config.load import known_keys
from dist_mem.config.other_names import OTHER_NAMES
from dist_mem.runtime.files import at_home, check_replaceable, expansion_fault, is_dir
from dist_mem.runtime.names import is_plain

CONFIG = "YAML files, merged left to right, and key=value overrides"
MODEL = "a run directory, one checkpoint in it, or an export"  # in the help of commands

_MIN_SIMILARITY = 0.7  # at which an option or a key is suggested
_MAX_COUNT = 1_000_000
_MAX_SUGGESTIONS = 3


def unknown_command(name: str, commands: Sequence[str]) -> str:
    """Return the message for a command that does not exist."""
    close = nearest(name, commands)
    return f"there is no command {name!r}: {f'did you mean {close}?' if close else '`dist-mem --help` lists all'}"


def unknown_option(option: str, given: Sequence[str], *, options: Sequence[str], keys: Sequence[str]) -> str:
    """Return the message for an option that the command does not have.

    Args:
        given: the whole command line, which contains the value of the option.
        options: all options of the command.
        keys: configuration keys that the command takes as key=value; none if it takes no configuration.
    """
    name, _, value = option.partition("=")
    meant = [f"{key}={value or _value_after(option, given)}" for key in _keys_named(name, keys)]
    if not meant and (close := nearest(name, options, _MIN_SIMILARITY)):
        meant = [close]
    if not meant and (close := _similar_key(name, keys)):
        meant = [f"{close}={value or _value_after(option, given)}"]
    advice = f"; did you mean {' or '.join(meant[:_MAX_SUGGESTIONS])}?" if meant else ""
    if meant and "=" in meant[0]:
        advice += " (a key of the configuration is set with key=value)"
    return f"unrecognized option {name}{advice}"


def keys_of(command: str, memory_options: Collection[str]) -> list[str]:
    """Return the keys that a command takes, the likely ones first, without items of lists.

    Args:
        memory_options: names of the options of all memories, which the schema does not contain.
    """
    keys = [key for key in known_keys() if "[" not in key] + [f"memory.{name}" for name in sorted(memory_options)]
    trains = command in ("train", "launch", "reproduce", "config", "doctor", "estimate", "sweep", "arena")
    blocks = ["train", "memory", "model"] if trains else ["eval"]

    def rank(key: str) -> tuple[bool, int]:
        block = key.partition(".")[0]
        return block == "deepspeed", blocks.index(block) if block in blocks else len(blocks)

    return sorted(keys, key=rank)


def _keys_named(option: str, keys: Sequence[str]) -> list[str]:
    """Return the keys whose full name, last part or other name is the option's; DeepSpeed's only if none else is."""
    name = option.lstrip("-").replace("-", "_")
    if name in keys:
        return [name]
    other = OTHER_NAMES.get(name.lower())
    found = [key for key in keys if key.rpartition(".")[2] == name or key == other]
    return [key for key in found if not key.startswith("deepspeed.")] or found


def _similar_key(option: str, keys: Sequence[str]) -> str | None:
    name = option.lstrip("-").replace("-", "_")
    if "." in name:
        return nearest(name, keys, _MIN_SIMILARITY)
    parts = {key.rpartition(".")[2]: key for key in reversed(keys)}
    close = nearest(name, list(parts), _MIN_SIMILARITY)
    return parts[close] if close else None


def _value_after(option: str, given: Sequence[str]) -> str:
    following = given[given.index(option) + 1 : given.index(option) + 2] if option in given else []
    return following[0] if following and not following[0].startswith("-") else "VALUE"


def count(text: str, *, least: int = 1, most: int = _MAX_COUNT) -> int:
    """Parse a whole number from `least` to `most`, as of tokens or processes."""
    if not re.fullmatch(r"-?\d{1,4000}", text):  # Python does not parse longer ones
        raise argparse.ArgumentTypeError(f"{format_value(text)} is not a whole number")
    if int(text) < least:
        raise argparse.ArgumentTypeError(f"{text} must be at least {least}")
    if int(text) > most:
        raise argparse.ArgumentTypeError(f"{format_value(text)} must be at most {most:,}")
    return int(text)


def place(text: str) -> str:
    """Parse a path or an address: a leading `~` is the home directory."""
    found = at_home(text)
    if fault := expansion_fault(found):
        raise argparse.ArgumentTypeError(f"{format_value(text)}: {fault}")
    return found


def divide_runs(options: Namespace) -> tuple[list[Path], list[str]]:
    """Return the runs and the key=value overrides of a command, before and after its options."""
    words = [*options.runs, *options.overrides]
    overrides = [text for text in words if "=" in text and not Path(text).is_dir()]
    return [Path(text) for text in words if text not in overrides], overrides


def seed(text: str) -> int:
    """Parse a seed, with the bounds of `train.seed`."""
    return count(text, least=0, most=SEED)


def step(text: str) -> int:
    """Parse the step of a checkpoint."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(
            f"{format_value(text)} is not a step: give a number such as 400, or omit --checkpoint for the newest that "
            "verifies"
        )
    return count(text, least=0, most=STEPS)


def split(text: str) -> str:
    """Parse the name of a split, which is the name of one folder."""
    if not is_plain(text):
        raise argparse.ArgumentTypeError(f"{format_value(text)} is not the name of a split: give one, for example test")
    return text


def names(text: str) -> list[str]:
    """Parse names separated by commas, of which there is one at least: a variable of a script may be empty."""
    found = [name for name in text.split(",") if name]
    if not found:
        raise argparse.ArgumentTypeError(f"{format_value(text)} names none: leave the option out, or give one")
    return found


def seeds(text: str) -> list[int]:
    """Parse distinct whole numbers separated by commas."""
    if not all(name.isdecimal() for name in names(text)):
        raise argparse.ArgumentTypeError(f"{format_value(text)} is not a list of numbers such as 0,1,2")
    numbers = [seed(name) for name in names(text)]
    if len(set(numbers)) != len(numbers):
        raise argparse.ArgumentTypeError(f"{text} has a seed twice")
    return numbers


def position(text: str) -> int:
    """Parse the position of a token in a document; 0 is the first."""
    return count(text, least=0, most=10**9)


def span(text: str) -> tuple[int, int]:
    """Parse a range of tokens of a document, BEGIN:END, without END itself."""
    begin, colon, end = text.partition(":")
    if not colon:
        raise argparse.ArgumentTypeError(f"{format_value(text)} is not a range of tokens: give BEGIN:END, as 128:192")
    if position(begin) >= position(end):
        raise argparse.ArgumentTypeError(f"{format_value(text)}: the range is empty: END must be greater than BEGIN")
    return position(begin), position(end)


def output_file(text: str) -> Path:
    """Parse the path of a file to write. Of a link, the file that it leads to is written."""
    path = _output(text)
    try:
        path = Path(os.path.realpath(path)) if path.is_symlink() else path
        check_replaceable(path)
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{format_value(str(error.filename))}: {error.strerror}") from error
    return path


def output_folder(text: str) -> Path:
    """Parse the path of a folder to write into, which need not exist."""
    path = _output(text)
    if os.path.lexists(path) and not is_dir(path):
        raise argparse.ArgumentTypeError(f"{format_value(text)} is no folder: give a folder, or a new name")
    return path


def _output(text: str) -> Path:
    if not text:
        raise argparse.ArgumentTypeError("'' is no path: give the path to write to")
    path = Path(place(text))
    nearest = next((parent for parent in path.parents if os.path.lexists(parent)), None)
    if nearest is not None and not is_dir(nearest):
        raise argparse.ArgumentTypeError(f"{format_value(text)}: {nearest} is no folder: give a path in a folder")
    return path


def add_allow(added: ArgumentParser, help_text: str) -> None:
    """Add the option --allow of `dist-mem train`, which commands that take the arguments of a job have too."""
    added.add_argument("--allow", action="append", default=[], metavar="KEY", help=help_text)


def add_checkpoint(added: ArgumentParser) -> None:
    """Add the option that chooses a checkpoint of a run."""
    added.add_argument(
        "--checkpoint", type=step, metavar="STEP", help="which checkpoint (default: the newest that verifies)"
    )


def add_memory(added: ArgumentParser, what: str) -> None:
    """Add the option of commands that continue from a memory file."""
    added.add_argument("--memory", type=Path, metavar="FILE", help=f"`dist-mem read` wrote it; {what} its text")


def add_model(added: ArgumentParser, *, overrides: str = "key=value overrides of eval.* and data.path") -> None:
    """Add the arguments of commands that read one split with one trained model."""
    added.add_argument("run", type=Path, help=MODEL)
    added.add_argument("overrides", nargs="*", default=[], help=overrides)
    added.add_argument("--split", type=split, metavar="NAME", help="split to read (default: eval.split)")
    add_checkpoint(added)


def add_sampling(added: ArgumentParser, *, tokens: int, top_p: float) -> None:
    """Add the arguments of commands that generate text."""
    added.add_argument(
        "--tokens", type=count, default=tokens, metavar="N", help="tokens to generate, at most (default: %(default)s)"
    )
    added.add_argument("--temperature", type=float, default=1.0, help="0: always the likeliest token (default: 1.0)")
    added.add_argument(
        "--top-p", type=float, default=top_p, metavar="P", help="mass of the nucleus (default: %(default)s)"
    )
    added.add_argument("--seed", type=seed, default=0, help="the same seed generates the same text (default: 0)")


def add_step(added: ArgumentParser) -> None:
    """Add the arguments of commands about one step of a run."""
    added.add_argument("run", type=Path, help="a run directory")
    added.add_argument("overrides", nargs="*", default=[], help="data.path=FOLDER if the data have moved")
    added.add_argument("--step", type=count, required=True, metavar="S", help="as in metrics.jsonl")
