"""Every command and every Python program of every page runs, in the page's order, in a fresh tree.

Before a page is run, its tree has what the page takes as given (`PREPARED`): for most, what `make demo` leaves. What is
smaller than a user's, so that all pages take minutes, is said in scaled_tree.py; above all, the steps of each training.
What cannot run here is listed with the reason in `NOT_RUN` and checked in a cheaper way. Every other command must end
with exit code 0, or 2 where the page shows an error, and must not warn that ranks are idle. Where the page shows
output, the command's has the same form.
"""

from __future__ import annotations

import ast
import gzip
import json
import random
import re
import shlex
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from dist_mem.errors import EXIT_DONE, EXIT_USAGE
from tests.support.page_commands import PAGES, ROOT, Item, items_of
from tests.support.program_arguments import check_arguments
from tests.support.scaled_tree import Tree, draw_words, write_texts
from tests.support.shown_output import difference
from tests.support.warm_programs import running_server

pytestmark = pytest.mark.timeout(900)  # of one page; a free machine takes a minute for the longest
IDLE = re.compile(r"^warning.* idle lane", re.MULTILINE)  # of plan.idle_work


def parsed(_: Tree, command: str) -> None:
    """The programs take the arguments, and the configuration knows every file and key."""
    check_arguments(command)


def checked(*worlds: int) -> Callable[[Tree, str], None]:
    """Parsed, and `dist-mem train ... --check` for these numbers of ranks has no warning of idle ones."""

    def check(tree: Tree, command: str) -> None:
        parsed(tree, command)
        words = shlex.split(command, comments=True)
        first = next(index for index, word in enumerate(words) if word.endswith(".yaml"))
        for world in worlds:
            reported = tree.must(f"dist-mem train {shlex.join(words[first:])} --check --world {world}")
            assert not IDLE.search(reported), reported

    return check


def without_last(tree: Tree, command: str) -> None:
    """All but the last of the commands run, which is parsed."""
    first, _, last = command.rpartition(" && ")
    tree.must(first)
    parsed(tree, last)


def shell_syntax(tree: Tree, command: str) -> None:
    """bash can read the script."""
    tree.must(f"bash -n {shlex.split(command)[1]}")


def make_rules(tree: Tree, command: str) -> None:
    """make finds its way, without running anything."""
    tree.must(re.sub(r"\bmake ", "make --dry-run --always-make ", command))


def sweep(tree: Tree, _: str) -> None:
    """Every line of the file is a configuration that leaves no rank idle."""
    lines = (tree.folder / "sweep.txt").read_text(encoding="utf-8").splitlines()
    assert len(lines) == 6
    for line in lines:
        checked(8)(tree, f"dist-mem train {line}")


def dry_run(tree: Tree, command: str) -> None:
    """The script can be made, for ranks of which none is idle."""
    reported = tree.must(f"{shlex.join(shlex.split(command, comments=True))} --dry-run")
    assert "#SBATCH" in reported
    assert not IDLE.search(reported), reported


def sketch(_: Tree, program: str) -> None:
    """Python can read it."""
    ast.parse(program)


class NotRun(NamedTuple):
    """What cannot run here."""

    page: str
    begins: str  # the command
    reason: str
    check: Callable[[Tree, str], None]


NOT_RUN = [
    NotRun("README.md", "python3 -m venv", "the environment is the one that the tests run in", parsed),
    NotRun("README.md", ".venv/bin/pip install", "the network; CI installs from requirements.txt", parsed),
    NotRun("README.md", "make demo", "4 to 6 minutes; `after_demo` runs its commands", make_rules),
    NotRun("README.md", "make test", "is what runs this", make_rules),
    NotRun("README.md", ".venv/bin/mlflow ui", "a server, which does not end", parsed),
    NotRun("docs/start/install.md", "pip wheel", "test_wheelhouse.py", parsed),
    NotRun("docs/start/install.md", "python3 -m venv", "test_wheelhouse.py", parsed),
    NotRun("docs/start/install.md", "env/bin/pip install", "the network; test_wheelhouse.py", parsed),
    NotRun("docs/howto/tracking.md", ".venv/bin/mlflow ui", "a server, which does not end", parsed),
    NotRun("docs/howto/add_a_memory.md", "class State", "a sketch of the contract; the example beside it runs", sketch),
    NotRun("docs/howto/dialogue.md", "dist-mem train configs/papers", "the weights of GPT-2", parsed),
    NotRun("docs/howto/arena.md", "dist-mem arena", "hours, or a cluster; test_arena.py", parsed),
    NotRun("docs/howto/cluster.md", "torchrun --nnodes 2", "two nodes of 8 GPUs", checked(16)),
    NotRun("docs/howto/cluster.md", "srun", "two nodes of 8 GPUs", checked(16)),
    NotRun("docs/howto/cluster.md", "dist-mem status", "a cluster; test_slurm_commands.py", parsed),
    NotRun("docs/howto/cluster.md", "dist-mem logs", "a cluster; test_slurm_commands.py", parsed),
    NotRun("docs/howto/cluster.md", "dist-mem cancel", "a cluster; test_slurm_commands.py", parsed),
    NotRun("docs/howto/cluster.md", "first=", "a cluster; test_slurm_commands.py", parsed),
    NotRun("docs/howto/cluster.md", "dist-mem launch", "a cluster; test_slurm_commands.py", parsed),
    NotRun("docs/howto/cluster.md", "deepspeed --hostfile", "two nodes of 8 GPUs", checked(16)),
    NotRun(
        "docs/howto/data.md",
        "dist-mem train configs/pg19_small.yaml data.path=https:",
        "test_remote.py",
        parsed,
    ),
    NotRun("docs/howto/data.md", "dist-mem train configs/pg19_small.yaml data.path=s3:", "test_remote.py", parsed),
    NotRun("docs/howto/data.md", "dist-mem data verify https:", "test_remote.py", parsed),
    NotRun("docs/howto/data.md", "dist-mem evaluate runs/pg19_small data.path=gs:", "test_remote.py", parsed),
    NotRun(
        "docs/howto/data.md",
        "dist-mem train configs/pg19_small.yaml data.stage=m",
        "stays in /dev/shm; test_stage.py",
        parsed,
    ),
    NotRun("docs/howto/doctor.md", "srun", "two nodes of 8 GPUs; see test_slurm_jobs.py", parsed),
    NotRun("docs/howto/doctor.md", "dist-mem doctor --drill", "two minutes; test_drill.py", parsed),
    NotRun("docs/howto/figures.md", "dist-mem figure lamemo.fig6", "one layer has no alpha; test_figures.py", parsed),
    NotRun(
        "docs/howto/figures.md", "dist-mem figure infinite.fig8", "may predict no word better; test_figures.py", parsed
    ),
    NotRun("docs/howto/lm_eval.md", ".venv/bin/pip install", "the network; CI has it", parsed),
    NotRun("docs/howto/lm_eval.md", "dist-mem lm-eval runs/demo --tasks lambada", "the network", parsed),
    NotRun("docs/howto/offline.md", "bash launch/wheelhouse.sh", "test_wheelhouse.py", shell_syntax),
    NotRun("docs/howto/offline.md", "PIP_NO_INDEX=1", "needs the wheelhouse; test_wheelhouse.py", make_rules),
    NotRun("docs/howto/offline.md", "make test", "is what runs this", make_rules),
    NotRun("docs/howto/performance.md", "bash benchmarks/gpu.sh", "a GPU; test_gpu_benchmark.py", shell_syntax),
    NotRun("docs/howto/reproduce.md", "dist-mem reproduce lamemo.table3 --scale small", "hours", parsed),
    NotRun("docs/howto/reproduce.md", "dist-mem reproduce lamemo.table1 --scale paper", "days, on GPUs", parsed),
    NotRun("docs/howto/recall_tasks.md", "dist-mem sweep", "half an hour each; test_sweep.py", parsed),
    NotRun("docs/howto/sweep.md", "dist-mem sweep", "minutes, or a cluster; test_sweep.py, test_slurm_jobs.py", parsed),
    NotRun("docs/howto/tracking.md", "dist-mem track sync", "a server of the user's; test_tracking_outage.py", parsed),
    NotRun("docs/howto/tracking.md", "MLFLOW_TRACKING_URI=", "a server, which does not end; test_serving.py", parsed),
    NotRun("docs/tutorials/own_memory.md", "sed -i 's/last=x/last=x.d", "12 s; add_a_memory.md", without_last),
    NotRun("docs/tutorials/own_cluster.md", "srun", "two nodes; test_slurm_jobs.py", parsed),
    NotRun("docs/tutorials/own_cluster.md", "dist-mem launch configs", "a cluster; test_slurm_jobs.py", parsed),
    NotRun("docs/tutorials/own_cluster.md", "dist-mem status", "a cluster; test_slurm_commands.py", parsed),
    NotRun("docs/tutorials/own_cluster.md", "dist-mem logs", "a cluster; test_slurm_commands.py", parsed),
    NotRun("docs/tutorials/own_cluster.md", "dist-mem cancel", "a cluster; test_slurm_commands.py", parsed),
    NotRun("launch/README.md", "git clone", "the network, and an address of the user's", parsed),
    NotRun("launch/README.md", "sbatch --nodes=2 ", "a cluster; test_slurm_jobs.py", checked(16)),
    NotRun("launch/README.md", "sbatch --nodes=2-4", "a cluster; test_slurm_jobs.py", checked(16, 24, 32)),
    NotRun("launch/README.md", "dist-mem launch configs/demo.yaml", "a cluster; test_launch_script.py", dry_run),
    NotRun("launch/README.md", "sbatch --array", "a cluster; test_slurm_script.py", sweep),
]


@pytest.fixture(scope="module")
def warm_address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The server of warm_programs.py."""
    with running_server(tmp_path_factory.mktemp("warm")) as address:
        yield address


@pytest.fixture(scope="module")
def after_demo(tmp_path_factory: pytest.TempPathFactory, warm_address: Path) -> Tree:
    """What the commands of launch/demo.sh leave behind."""
    tree = Tree(tmp_path_factory.mktemp("demo"), warm_address)
    tree.must("python shards/build_sample.py --out data/sample")
    tree.must("RANKS=2 launch/local.sh configs/demo.yaml")
    tree.must("dist-mem train configs/demo.yaml memory/none.yaml name=demo_none")
    for run in ("demo_none", "demo"):
        tree.must(f"dist-mem evaluate runs/{run} --split test")
    tree.must("dist-mem compare runs/demo_none runs/demo --split test --plot runs/recall.png")
    return tree


def books(tree: Tree) -> None:
    write_texts(tree.folder / "FOLDER", {"train": 16, "validation": 3, "test": 3})


def book(tree: Tree) -> None:
    text = next((tree.folder / "data" / "sample" / "texts" / "test").glob("*.txt")).read_text(encoding="utf-8")
    (tree.folder / "book.txt").write_text(text[:4000], encoding="utf-8")


def twenty_books(tree: Tree) -> None:
    write_texts(tree.folder, {"books": 20})


def first_runs(tree: Tree) -> None:
    for name in ("demo", "demo_none"):
        first = f"runs/{name.replace('demo', 'first')}"
        shutil.copytree(tree.folder / "runs" / name, tree.folder / first)
        tree.must(f"dist-mem evaluate {first} --split test eval.max_document_len=2000")


def corpora(tree: Tree) -> None:
    write_texts(tree.folder / "corpus", {"train": 16, "validation": 3, "test": 3})
    write_texts(tree.folder, {"essays": 60, "letters": 60})
    draw = random.Random(7)
    rows = [json.dumps({"url": f"https://host/{number}", "body": draw_words(draw, 300)}) for number in range(600)]
    (tree.folder / "web.jsonl.gz").write_bytes(gzip.compress("\n".join(rows).encode()))
    (tree.folder / "local").mkdir()
    write_texts(tree.folder / "pg19", {"train": 16, "validation": 3, "test": 3}, num_words=500)
    tree.must("python shards/build_pg19.py --source pg19 --out data/pg19 --vocab-size 1000")


def dialogues(tree: Tree) -> None:
    from tests.support.cmu_dog_source import write_conversation, write_film

    source = tree.folder / "datasets-CMU_DoG"
    write_film(source)
    draw = random.Random(7)
    for folder, count in {"train": 24, "valid": 4, "test": 4}.items():
        for number in range(count):
            said = draw_words(draw, 300)
            turns = [
                ("user1", f"Did you see {folder} {number}? {said}"),
                ("user2", "I did."),
                ("user1", "Was it good?"),
            ]
            write_conversation(source, folder, f"{folder}{number}", [*turns, ("user2", "It was, the shark too.")])


def exported(tree: Tree) -> None:
    tree.must("dist-mem export runs/demo --out models/demo")


def moved(tree: Tree) -> None:
    for name in ("runs/demo", "data/sample"):
        shutil.copytree(tree.folder / name, tree.folder / "new_place" / Path(name).name)


def sorting_runs(tree: Tree) -> None:
    for item in items_of(ROOT / "docs" / "howto" / "sorting.md"):
        if re.search("build sorting|infinite-1000", item.text):
            tree.must(item.text)


def pretrained(tree: Tree) -> None:
    from dist_mem.data.tokenizers.byte_pairs import train_byte_pairs, write_byte_pairs
    from tests.support.gpt2_models import save_random_gpt2

    write_texts(tree.folder / "pg19", {"train": 3, "validation": 2, "test": 2}, num_words=600)
    texts = [path.read_text(encoding="utf-8") for path in sorted((tree.folder / "pg19" / "train").iterdir())]
    tokenizer, folder = train_byte_pairs(texts, vocab_size=600), tree.folder / "models" / "gpt2"
    save_random_gpt2(folder, vocab_size=tokenizer.vocab_size, n_layer=1, n_embd=16, n_head=2, n_positions=1024)
    write_byte_pairs(tokenizer, folder)


def corpora_of_papers(tree: Tree) -> None:
    write_texts(tree.folder / "pg19", {"train": 16, "validation": 3, "test": 3})
    text = "\n".join(path.read_text(encoding="utf-8") for path in sorted((tree.folder / "pg19" / "train").iterdir()))
    lines = "".join(f" {line} \n" for line in text.splitlines())
    for folder, splits in {"wikitext-103": ("train", "valid", "test"), "valid-and-test": ("valid", "test")}.items():
        (tree.folder / folder).mkdir()
        for split in splits:
            (tree.folder / folder / f"wiki.{split}.tokens").write_text(f" \n = Title = \n \n{lines}", encoding="utf-8")
    for name in ("enwik8", "text8"):
        (tree.folder / name).write_bytes((b"anarchism originated as a term " * 3_225_807)[:100_000_000])


DEMO = "after make demo"
PREPARED: dict[str, list[str | Callable[[Tree], None]]] = {
    "README.md": [DEMO, books],
    "docs/howto/add_a_memory.md": [DEMO],
    "docs/reference/config.md": [DEMO],
    "docs/howto/data.md": [corpora],
    "docs/howto/dialogue.md": [dialogues],
    "docs/howto/figures.md": [DEMO],
    "docs/howto/divergence.md": [DEMO],
    "docs/howto/doctor.md": [DEMO],
    "docs/howto/evaluate.md": [DEMO, exported, sorting_runs],
    "docs/howto/generate.md": [DEMO, book],
    "docs/howto/lm_eval.md": [DEMO],
    "docs/howto/loss_spike.md": [DEMO],
    "docs/howto/gpt2.md": [pretrained],
    "docs/howto/inspect.md": [DEMO, book],
    "docs/howto/llama.md": [DEMO],
    "docs/howto/memory_files.md": [DEMO, book],
    "docs/howto/performance.md": [DEMO],
    "docs/howto/transformers.md": [DEMO],
    "docs/start/python.md": [DEMO, book],
    "docs/howto/report.md": [DEMO, book],
    "docs/howto/reproduce.md": [DEMO],
    "docs/howto/resume.md": [DEMO, moved],
    "docs/howto/tracking.md": [DEMO],
    "docs/tutorials/own_corpus.md": [twenty_books],
    "docs/tutorials/own_memory.md": [DEMO, first_runs],
    "docs/tutorials/own_cluster.md": [DEMO],
    "shards/README.md": [corpora_of_papers],
}


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


WITH_COMMANDS = [page for page in PAGES if any(items_of(page))]
# The longest ones, whose commands have tests of their own.
OF_NIGHT = {
    f"docs/howto/{name}.md"
    for name in (
        *("add_a_memory", "arena", "dialogue", "evaluate", "figures", "gpt2", "inspect", "llama", "performance"),
        *("report", "reproduce", "sorting", "sweep", "transformers"),
    )
}
BY_DAY_OR_NIGHT = [
    pytest.param(page, marks=pytest.mark.nightly if name_of(page) in OF_NIGHT else pytest.mark.slow)
    for page in WITH_COMMANDS
]


def not_run(page: Path, item: Item) -> NotRun | None:
    return next(
        (entry for entry in NOT_RUN if entry.page == name_of(page) and item.text.startswith(entry.begins)), None
    )


def fresh_tree(folder: Path, warm_address: Path, demo: Tree) -> Tree:
    """A tree of its own, with what the demo left behind."""
    tree = Tree(folder, warm_address)
    tree.take_over(demo)
    return tree


def run_item(tree: Tree, item: Item, programs: list[str]) -> str:
    """What it printed; a Python block goes on from those before it on the page.

    A command that the page shows with an error, `error: ...` at the begin of a line, must end with exit code 2.
    """
    if not item.is_python:
        is_refused = re.search("^error: ", item.output or "", re.MULTILINE)
        return tree.must(item.text, code=EXIT_USAGE if is_refused else EXIT_DONE)
    (tree.folder / "page.py").write_text("\n".join([*programs, item.text]), encoding="utf-8")
    programs.append(item.text)
    return tree.must("python page.py")


@pytest.mark.parametrize("page", BY_DAY_OR_NIGHT, ids=name_of)
def test_everything_on_the_page_runs(
    page: Path, tmp_path: Path, warm_address: Path, request: pytest.FixtureRequest
) -> None:
    prepared = PREPARED.get(name_of(page), [])
    if DEMO in prepared:
        tree = fresh_tree(tmp_path, warm_address, request.getfixturevalue("after_demo"))
    else:
        tree = Tree(tmp_path, warm_address)
    for prepare in prepared:
        if callable(prepare):
            prepare(tree)
    failures, programs = [], list[str]()
    for item in items_of(page):
        entry = not_run(page, item)
        try:
            reported = run_item(tree, item, programs) if entry is None else entry.check(tree, item.text)
            assert reported is None or not IDLE.search(reported), f"$ {item.text}\n{reported}"
            if entry is None and item.output is not None and reported is not None:
                differs = difference(item.output, reported)
                assert differs is None, f"$ {item.text}\n{differs}"
        except AssertionError as error:
            failures.append(str(error))
    assert not failures, f"{len(failures)} of the commands:\n\n" + "\n\n".join(failures)


def test_what_is_not_run_stands_on_its_page() -> None:
    found = [entry for page in WITH_COMMANDS for item in items_of(page) if (entry := not_run(page, item))]
    assert [entry for entry in NOT_RUN if entry not in found] == []
    assert [name for name in [*PREPARED, *OF_NIGHT] if name not in map(name_of, WITH_COMMANDS)] == []


@pytest.mark.slow
def test_make_clean_removes_all_that_the_demo_made(tmp_path: Path, warm_address: Path, after_demo: Tree) -> None:
    tree = fresh_tree(tmp_path, warm_address, after_demo)
    made = {path.name for path in tmp_path.iterdir()} - tree.cloned
    assert made > {"runs", "data", "mlflow.db"}
    tree.must("make clean")
    left = {path.name for path in tmp_path.iterdir()} - tree.cloned
    assert left <= {"data"}, "the folder of the user's own data stays"
    assert not list((tmp_path / "data").iterdir())
