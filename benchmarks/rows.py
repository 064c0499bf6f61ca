"""Measure what every row of an arena takes: processor seconds of an update and of an evaluated token, beside its FLOPs.

    python benchmarks/rows.py --out rows.json                       # configs/arena/second_edition.yaml: five minutes
    python benchmarks/rows.py --out rows.json --rows none DeltaNet  # some; those of the file are not measured again
    python benchmarks/rows.py configs/arena/pg19.yaml --out pg19.json --vocab-size 4000

Every row is a process with one thread, which makes updates of the training loop's own step with DeepSpeed, on full
segments of random tokens, with full memories, and scores segments without gradients. The rows work in turn, in rounds,
so that a slow moment of the machine affects all alike. The seconds are medians of the process's own time. With a load
of 20 on two cores they were a fifth to a third above those of an idle core, as caches are shared: measure on an idle
machine. Reading data, saving and evaluating are no part of `training_seconds`, which is a row's updates times the
seconds of one. Needs 0.25 GB per row.

2026-11-28, load 20, six rounds, seconds of the training: none 262, Transformer-XL 245, DeltaNet 327. The logs of the
arena's trainings have 215, 208 and 264 to 270, on idle cores.
"""

from __future__ import annotations

import json
import multiprocessing
import statistics
from argparse import Namespace
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from lib.common import ROOT, arguments_of, load

from dist_mem.config import load_config
from dist_mem.memory import memory_options
from dist_mem.runtime.distributed import choose_accelerator
from dist_mem.runtime.files import write_text
from dist_mem.runtime.terminal import table
from dist_mem.studies.budget import HEADING, Costs, apply_budget
from dist_mem.studies.runs import all_runs, train_words
from dist_mem.studies.study import load_study

OPTIONS = {"rounds": 12, "updates": 4, "vocab_size": 1280}  # 1,280: of the sample library
Found = dict[str, dict[str, Any]]  # by row


def planned(arguments: Namespace) -> tuple[dict[str, list[str]], Found]:
    """Return the words of each row that is to be measured, and what each takes within its budget."""
    study = load_study(arguments.study)
    if unknown := sorted(set(arguments.rows) - set(study.trained_rows)):
        raise SystemExit(f"--rows: {arguments.study} has no row {unknown[0]!r}; it has {', '.join(study.trained_rows)}")
    if not study.budget:
        raise SystemExit(f"{arguments.study} has no budget: rows of an arena are measured")
    study.rows = {row: each for row, each in study.rows.items() if row in (arguments.rows or study.trained_rows)}
    costs = apply_budget(study, partial(load_config, memory_options=memory_options), arguments.vocab_size)
    words = {run.row: train_words(study, run, ()) for run in all_runs(study, Path("runs"), study.seeds[:1])}
    return words, {row: costs[row]._asdict() for row in words}


class Worker:
    """The process of a row."""

    def __init__(self, words: list[str], arguments: Namespace, context: Any) -> None:
        from lib.row_worker import serve

        self.connection: Connection
        self.connection, theirs = context.Pipe()
        given = (words, arguments.vocab_size, arguments.updates, theirs)
        self.process = context.Process(target=serve, args=given, daemon=True)
        self.process.start()
        theirs.close()
        self.connection.recv()  # it is warm
        self.times: list[float] = []
        self.scoring: list[float] = []

    def close(self) -> None:
        """End the process."""
        with suppress(BrokenPipeError):  # it has failed, and said why
            self.connection.send(False)
        self.process.join()

    def run(self) -> None:
        """Run a round."""
        self.connection.send(True)
        times, scoring = self.connection.recv()
        self.times += times
        self.scoring += scoring

    def medians(self) -> dict[str, float]:
        """Return the medians so far, and how far the middle half of all updates lies apart, as a share."""
        low, middle, high = statistics.quantiles(self.times, n=4)
        return {
            "update_seconds": middle,
            "update_spread": (high - low) / middle,
            "evaluated_token_seconds": statistics.median(self.scoring),
        }


def measure(words: dict[str, list[str]], arguments: Namespace) -> Iterator[Found]:
    """Yield the medians of every row after each round."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["dist_mem.training.step"])  # DeepSpeed, once: it takes seconds
    workers: dict[str, Worker] = {}
    try:
        for number, (row, given) in enumerate(words.items(), 1):
            print(f"starting {number} of {len(words)}: {row}", flush=True)
            workers[row] = Worker(given, arguments, context)
        for number in range(1, arguments.rounds + 1):
            print(f"round {number} of {arguments.rounds}, {load()}", flush=True)
            for worker in workers.values():
                worker.run()
            yield {row: {**worker.medians(), "rounds": number} for row, worker in workers.items()}
    finally:
        for worker in workers.values():
            worker.close()


def as_table(found: Found) -> str:
    """Return the table that is printed."""
    heading = ["row", *HEADING, "ms/update", "spread", "s of training", "evaluated tokens/s"]
    rows = [
        [
            *(row, *Costs(*(one[name] for name in Costs._fields)).texts()),
            *(f"{one['update_seconds'] * 1e3:.1f}", f"{one['update_spread']:.0%}", f"{one['training_seconds']:.0f}"),
            f"{1 / one['evaluated_token_seconds']:,.0f}",
        ]
        for row, one in found.items()
    ]
    return "\n".join(table([heading, *rows]))


def main() -> None:
    """Measure the rows that the file lacks, write it, and print all of it as a table."""
    parser = arguments_of(__doc__, **OPTIONS)
    parser.add_argument("study", nargs="?", default=str(ROOT / "configs" / "arena" / "second_edition.yaml"))
    parser.add_argument("--rows", nargs="+", default=[], help="default: all")
    parser.add_argument("--out", type=Path, required=True, help="JSON file, which is continued")
    arguments = parser.parse_args()
    choose_accelerator()  # before DeepSpeed is imported
    found: Found = json.loads(arguments.out.read_text(encoding="utf-8")) if arguments.out.exists() else {}
    words, costs = planned(arguments)
    for row in words.keys() & found.keys():
        if any(found[row][name] != value for name, value in costs[row].items()):
            raise SystemExit(f"{arguments.out}: row {row} is of another study or budget: give another --out")
    missing = {row: given for row, given in words.items() if found.get(row, {}).get("rounds", 0) < arguments.rounds}
    for medians in measure(missing, arguments) if missing else ():
        for row, each in medians.items():
            seconds = {"training_seconds": each["update_seconds"] * costs[row]["steps"]}
            found[row] = costs[row] | each | seconds | {"machine": load(), "torch": torch.__version__}
        write_text(arguments.out, json.dumps(found, indent=1) + "\n")
    print(as_table(found))


if __name__ == "__main__":
    main()
