"""Every command and every Python program of every page runs, in the page's order, in a fresh tree.

Before a page is run, its tree has what the page takes as given (`PREPARED`): for most, what `make demo` leaves. What is
smaller than a user's, so that all pages take minutes, is said in scaled_tree.py; above all, the steps of each training.
What cannot run here is listed with the reason in pages_not_run.py. Every other command must end with exit code 0, or 2
where the page shows an error, and must not warn that ranks are idle.
"""

import gzip
import json
import random
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml

from dist_mem.errors import EXIT_DONE, EXIT_USAGE
from tests.support.page_commands import PAGES, ROOT, Item, items_of
from tests.support.pages_not_run import IDLE, NOT_RUN, NotRun
from tests.support.scaled_tree import Tree, change_yaml, draw_words, write_texts
from tests.support.warm_programs import running_server

pytestmark = [pytest.mark.pages, pytest.mark.timeout(900)]  # of one page; the longest takes a minute


@pytest.fixture(scope="module")
def warm_address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with running_server(tmp_path_factory.mktemp("warm")) as address:
        yield address


@pytest.fixture(scope="module")
def after_demo(tmp_path_factory: pytest.TempPathFactory, warm_address: Path) -> Tree:
    """What the commands of launch/demo.sh leave behind."""
    tree = Tree(tmp_path_factory.mktemp("demo"), warm_address)
    tree.must("dist-mem data build sample --out data/sample")
    tree.must("RANKS=2 launch/local.sh configs/demo.yaml")
    tree.must("dist-mem train configs/demo.yaml memory/none.yaml name=demo_none")
    for run in ("demo_none", "demo"):
        tree.must(f"dist-mem evaluate runs/{run} --split test")
    tree.must("dist-mem compare runs/demo_none runs/demo --split test --plot runs/recall.png")
    tree.must("dist-mem report runs/demo runs/demo_none --book 9003 --split test")
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
    tree.must("dist-mem data build pg19 --source pg19 --out data/pg19 --vocab-size 1000")


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


def sample(tree: Tree) -> None:
    tree.must("dist-mem data build sample --out data/sample")


def mixed(tree: Tree) -> None:
    """What the first block of the page leaves, which a test of its own compares (tests/training/test_mixture.py)."""
    sample(tree)
    sizes = "--train 64 --validation 8 --test 8"
    tree.must(f"dist-mem data build passkey --out data/passkey --lengths 800 {sizes} --tokenizer-from data/sample")
    sources = "[{path: data/sample, weight: 7}, {path: data/passkey/800, weight: 3, epochs: 2}]"
    tree.must(f'dist-mem train configs/demo.yaml name=mixed "data.mixture={sources}"')


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


def small_llama(tree: Tree) -> None:
    """A random one with a tokenizer as Llama 3 has it, under the name of the published one."""
    from tests.support.llama_models import SIZES, save_random_llama
    from tests.support.published_tokenizers import save_published

    folder, path = tree.folder / "models" / "llama_3.2_1b", tree.folder / "configs" / "pretrained" / "llama_3.2_1b.yaml"
    save_published("llama3", folder)
    size = json.loads((folder / "config.json").read_text(encoding="utf-8"))["vocab_size"]
    save_random_llama(folder, vocab_size=size, std=0.01)
    sizes = {**SIZES, "rope_theta": 10_000.0, "rope": None, "d_head": None}
    changes = {f"model.{key}": value for key, value in sizes.items()}
    few = {"train.threads": 1, "train.steps": 4, "checkpoint.every": 2, "schedule.warmup_steps": 1}
    change_yaml(
        path, **changes, **few, **{"train.seg_len": 32, "train.global_batch_size": 8, "train.segments_per_update": 4}
    )
    change_yaml(tree.folder / "configs" / "pretrained" / "memory" / "transformer_xl.yaml", **{"memory.mem_len": 32})


def smaller_sweep(tree: Tree) -> None:
    """One learning rate and one seed."""
    path = tree.folder / "configs/sweeps/rates.yaml"
    train = ["configs/demo.yaml", "train.steps=30", "eval.every=null"]
    change_yaml(path, train=train, seeds=[0], skip=[], **{"grid.optimizer.lr": [0.002]})


def smaller_arena(tree: Tree) -> None:
    """Two memories, one seed, a budget of a few updates, and no trials before."""
    path = tree.folder / "configs/arena/second_edition.yaml"
    arena = yaml.safe_load(path.read_text(encoding="utf-8"))
    two = {name: arena["rows"][name] for name in ("none", "Transformer-XL")}
    train = [word for word in arena["train"] if not word.startswith("schedule.")]  # of more updates
    change_yaml(path, train=train, rows=two, seeds=[0], budget={"tokens": 122_880}, tune={})


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
# Pages whose step numbers are not divided: what is shown happens between two steps.
ALL_STEPS = {"docs/tutorials/first_run.md"}
ONLY_DEMO = [
    *("explanation/lanes", "howto/add_a_memory", "reference/config", "howto/trouble"),
    *("howto/doctor", "howto/lm_eval", "howto/llama", "howto/performance"),
    *("howto/transformers", "howto/tracking", "tutorials/own_cluster"),
]
PREPARED: dict[str, list[str | Callable[[Tree], None]]] = {
    **{f"docs/{name}.md": [DEMO] for name in ONLY_DEMO},
    "README.md": [DEMO, books],
    "docs/howto/bptt.md": [sample],
    "docs/howto/mixtures.md": [mixed],
    "docs/howto/muon.md": [sample],
    "docs/memories/linear.md": [small_llama],
    "docs/howto/data.md": [corpora],
    "docs/howto/dialogue.md": [dialogues],
    "docs/howto/evaluate.md": [DEMO, exported, sorting_runs],
    "docs/howto/generate.md": [DEMO, book],
    "docs/howto/gpt2.md": [pretrained],
    "docs/howto/inspect.md": [DEMO, book],
    "docs/howto/memory_files.md": [DEMO, book],
    "docs/start/python.md": [DEMO, book],
    "docs/howto/resume.md": [DEMO, moved],
    "docs/howto/tables.md": [DEMO, smaller_sweep, smaller_arena],
    "docs/tutorials/own_corpus.md": [twenty_books],
    "docs/tutorials/own_memory.md": [DEMO, first_runs],
    "docs/tutorials/pretrained.md": [DEMO, books, small_llama, book],
    "shards/README.md": [corpora_of_papers],
}


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


WITH_COMMANDS = [page for page in PAGES if any(items_of(page))]
# The longest ones, whose commands have tests of their own.
OF_NIGHT = {
    f"docs/howto/{name}.md"
    for name in (
        *("add_a_memory", "babilong", "dialogue", "evaluate", "gpt2", "inspect", "llama", "performance"),
        *("sorting", "tables", "transformers"),
    )
} | {"docs/tutorials/pretrained.md"}
CORE = re.compile(r"README|docs/(start|tutorials)/")  # for those who begin


def mark_of(name: str) -> list[pytest.MarkDecorator]:
    return [pytest.mark.nightly] if name in OF_NIGHT else [pytest.mark.core] if CORE.match(name) else []


BY_DAY_OR_NIGHT = [pytest.param(page, marks=mark_of(name_of(page))) for page in WITH_COMMANDS]


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

    A command that the page shows with an error, `error: ...` at the begin of a line, must end with exit code 2; one
    that it shows with ^C gets a Ctrl-C after its second logged step.
    """
    if not item.is_python:
        if "^C" in (item.output or ""):
            return tree.interrupted(item.text)
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
    if name_of(page) in ALL_STEPS:
        tree.steps = 1
    for prepare in prepared:
        if callable(prepare):
            prepare(tree)
    failures, programs = [], list[str]()
    for item in items_of(page):
        entry = not_run(page, item)
        try:
            reported = run_item(tree, item, programs) if entry is None else entry.check(tree, item.text)
            assert reported is None or not IDLE.search(reported), f"$ {item.text}\n{reported}"
        except AssertionError as error:
            failures.append(str(error))
    assert not failures, f"{len(failures)} of the commands:\n\n" + "\n\n".join(failures)


def test_what_is_not_run_stands_on_its_page() -> None:
    found = [entry for page in WITH_COMMANDS for item in items_of(page) if (entry := not_run(page, item))]
    assert [entry for entry in NOT_RUN if entry not in found] == []
    assert [name for name in [*PREPARED, *OF_NIGHT, *ALL_STEPS] if name not in map(name_of, WITH_COMMANDS)] == []


def test_make_clean_removes_what_the_demo_made_and_no_other_run(
    tmp_path: Path, warm_address: Path, after_demo: Tree
) -> None:
    tree = fresh_tree(tmp_path, warm_address, after_demo)
    assert any((tmp_path / "runs").iterdir())
    assert any((tmp_path / "data").iterdir())
    (tmp_path / "runs" / "mine").mkdir()
    tree.must("make clean")
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["mine"]
    assert not any((tmp_path / "data").iterdir())
    assert (tmp_path / "mlflow.db").exists(), "other runs are in the store too"
