"""The tables against the papers: settings of every row, scales, and the commands that make the data.

The values are those of Martins et al. 2022 (ACL) and Ji et al. 2022 (NAACL); docs/reference/papers.md has them with the
deviations. `at` is (table, row, point) at scale paper.
"""

import shlex
import subprocess
from collections.abc import Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest

from dist_mem.config import as_tree, load_config
from dist_mem.config.blocks import value_at
from dist_mem.data.tokenizers.registry import read_tokenizer_metadata
from dist_mem.memory import memory_options
from dist_mem.papers.figures import figures
from dist_mem.runtime.processes import own_command
from dist_mem.studies.runs import all_runs, rows_behind, train_words
from dist_mem.studies.study import FOLDER, GridPoint, Study, load_study, study_names
from tests.support.limits import limit
from tests.support.paths import ROOT
from tests.support.program_arguments import check_arguments

NAMES = study_names(ROOT / FOLDER)


@cache
def scales_of(name: str) -> dict[str, Study]:
    scales = load_study(name, folder=ROOT / FOLDER).scales
    return {scale: load_study(name, scale, folder=ROOT / FOLDER) for scale in scales}


def paper(name: str) -> Study:
    return scales_of(name)["paper"]


def keys_of(block: str, **values: Any) -> dict[str, Any]:
    return {f"{block}.{name}": value for name, value in values.items()}


data, model, memory, over = (partial(keys_of, block) for block in ("data", "model", "memory", "memory.over"))
train, optimizer, schedule = (partial(keys_of, block) for block in ("train", "optimizer", "schedule"))
FIRST_RATE = {"optimizer.groups[0].lr": 2.5e-4}
COMPRESSED = memory(compression_loss="attention")

GPT2 = (
    model(kind="gpt2", num_layers=12, num_heads=12)
    | train(seg_len=512, global_batch_size=1)
    | optimizer(lr=5e-5, weight_decay=0.0)
)
GPT2_COMPRESSIVE = COMPRESSED | memory(cmem_len=512, positions="alibi")
PAPER_FORM = memory(
    prior_mean=None,  # eq. 20 regularises the variance only
    padding="none",  # sec. 2.2: positions t = i / L, and no more
    projections="heads",  # eq. 8
    density_bias=True,  # eqs 9 and 10
    kl_heads="sum",  # eq. 20
    density="affine",  # eqs 9 and 10
    gate=True,  # eq. 18
)
CODE_FORM = memory(padding="published", projections="full", density_bias=False, kl_heads="mean")
GPT2_LTM = memory(num_basis=512, basis_widths=[0.005, 0.01], tau=0.5, kl_weight=1e-6, prior_std=0.05)
SORTING = (
    model(num_layers=3, num_heads=6)
    | train(seg_len=1024, global_batch_size=8, steps=20_000)  # 20 epochs of 8,000 sequences
    | optimizer(kind="adam")
    | schedule(kind="cosine", end_factor=0.0)
)
SORTING_LTM = (
    memory(num_basis=1024, basis_widths=[0.01, 0.05], tau=0.75, kl_weight=1e-5, prior_std=0.05)
    | over(kind="transformer_xl", mem_len=1024)
    | PAPER_FORM
)
WORDS = (
    model(num_layers=16, num_heads=10, d_model=410, d_inner=2100, **{"adaptive.cutoffs": [20000, 40000, 200000]})
    | train(seg_len=150, steps=250_000)
    | optimizer(kind="adam", lr=2.5e-4, betas=[0.9, 0.999], eps=1e-8)
    | schedule(kind="cosine", end_factor=0.0, warmup_steps=0)
)
MARTINS_WORDS = WORDS | train(global_batch_size=40)
MARTINS_LTM = (
    memory(num_basis=150, basis_widths=[0.01, 0.05], tau=0.5, kl_weight=1e-5, prior_std=0.1, memory_threshold=900)
    | over(kind="transformer_xl", mem_len=150)
    | PAPER_FORM
)
MARTINS_COMPRESSIVE = COMPRESSED | memory(mem_len=150, cmem_len=150, compression_rate=4, loss_weight=1.0)
LAMEMO = memory(kind="lamemo", epsilon=1e-6)  # eq. 11, table 5
LAMEMO_TRAINING = train(max_grad_norm=0.25) | model(dropout=0.1, attention_dropout=0.0)
LAMEMO_WORDS = WORDS | LAMEMO_TRAINING | train(global_batch_size=64) | model(d_head=41)
CHARACTERS = (
    LAMEMO_TRAINING
    | model(num_layers=12, num_heads=8, d_head=64, d_inner=2048, adaptive=None)
    | train(seg_len=512, steps=100_000, global_batch_size=40)
    | optimizer(lr=2.5e-4)
    | schedule(kind="cosine", warmup_steps=0)
)


def xl(mem_len: int) -> dict[str, Any]:
    return memory(kind="transformer_xl", mem_len=mem_len)


def settings(
    name: str, shared: dict[str, Any], points: Sequence[str] = ("",), **rows: dict[str, Any]
) -> dict[tuple[str, str, str], dict[str, Any]]:
    """The settings of rows of a table, at each of its points."""
    return {(name, row, point): shared | own for point in points for row, own in rows.items()}


SETTINGS: dict[tuple[str, str, str], dict[str, Any]] = {
    # Martins et al., sec. 4.2 and app. C.2
    **settings(
        "infinite.table1",
        GPT2 | train(epochs=1) | optimizer(kind="adamw"),
        ("wikitext103", "pg19"),
        gpt2=memory(kind="causal"),
        compressive=GPT2_COMPRESSIVE | memory(compression_rate=4) | FIRST_RATE,
        infinite=GPT2_LTM | PAPER_FORM | memory(memory_threshold=2048, sampling="linear") | FIRST_RATE,
        sticky=GPT2_LTM | PAPER_FORM | memory(memory_threshold=2048, sampling="sticky"),
        infinite_code=GPT2_LTM | CODE_FORM | memory(prior_mean=-1.0, memory_threshold=2048),
    ),
    # sec. 4.3 and app. C.3
    **settings(
        "infinite.table2",
        GPT2 | train(epochs=5) | schedule(kind="linear") | optimizer(groups=[]),
        no_document=memory(kind="causal") | data(path="data/cmu_dog_gpt2_bare"),
        none=memory(kind="causal") | data(path="data/cmu_dog_gpt2"),
        compressive=GPT2_COMPRESSIVE | memory(compression_rate=3),
        infinite=GPT2_LTM | PAPER_FORM | memory(memory_threshold=None),
        sticky=GPT2_LTM | PAPER_FORM | memory(sampling="sticky"),
    ),
    **settings(
        "infinite.table2",
        CODE_FORM,
        infinite_code=memory(kl_weight=1e-5, store="normed") | train(epochs=3) | data(cut="end"),
    ),
    # app. D
    **settings(
        "infinite.table3",
        MARTINS_WORDS,
        transformer_xl=xl(150),
        compressive=MARTINS_COMPRESSIVE,
        infinite=MARTINS_LTM | memory(sampling="linear"),
        sticky=MARTINS_LTM | memory(sampling="sticky"),
    ),
    # sec. 4.1 and app. C.1
    **{
        key: value
        for point, rate in (("4000", 2.5e-4), ("8000", 2.5e-4), ("16000", 2e-4))
        for key, value in settings(
            "infinite.fig3",
            SORTING | optimizer(lr=rate) | data(path=f"data/sorting/{point}"),
            (point,),
            transformer_xl=xl(2048),
            infinite=SORTING_LTM,
            attention2=COMPRESSED | memory(mem_len=1024, cmem_len=1024, compression_rate=2, loss_weight=1.0),
            no_loss2=memory(compression_rate=2, loss_weight=0.0),
        ).items()
    },
    **settings(
        "infinite.fig3", CODE_FORM, ("8000",), infinite_code=memory(num_basis=512, kl_weight=1e-6) | optimizer(lr=2e-4)
    ),
    **settings("infinite.fig3_basis", SORTING | SORTING_LTM, n64=memory(num_basis=64), n1024=memory(num_basis=1024)),
    # Ji et al., app. C; the two rows whose figures are those of Martins et al. are trained as theirs.
    **settings(
        "lamemo.table1",
        LAMEMO_WORDS,
        none=memory(kind="none"),
        transformer_xl=xl(150),
        lamemo=LAMEMO | memory(mem_len=150, positions="disentangled"),
    ),
    **settings(
        "lamemo.table1",
        MARTINS_WORDS,
        compressive=MARTINS_COMPRESSIVE,
        infinite=MARTINS_LTM | memory(sampling="sticky"),
    ),
    **settings("lamemo.table1", {}, lamemo_code=model(adaptive=None) | train(max_grad_norm=0.5)),
    **{
        key: value
        for corpus in ("text8", "enwik8")
        for key, value in settings(
            "lamemo.table2",
            CHARACTERS | data(path=f"data/{corpus}"),
            (corpus,),
            none=memory(kind="none"),
            transformer_xl=xl(512),
            lamemo=LAMEMO | memory(mem_len=512),
        ).items()
    },
    **settings("lamemo.table2", {}, ("text8",), lamemo_code=train(steps=50_000) | memory(window="segment")),
    **settings(
        "lamemo.table3",
        LAMEMO_WORDS | LAMEMO | memory(mem_len=150),
        lamemo=memory(interpolation=True, look_ahead=True, positions="disentangled"),
        no_interpolation=memory(interpolation=False),
        no_look_ahead=memory(look_ahead=False),
        xl_rpe=memory(positions="shared"),
    ),
    **settings("lamemo.fig5", LAMEMO_WORDS | memory(mem_len=150), transformer_xl={}, lamemo={}),
}
SETTINGS["infinite.table1", "infinite", "pg19"] |= data(path="data/pg19-2000")


def test_a_row_has_the_papers_settings(subtests: pytest.Subtests, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    for (name, row, point), expected in SETTINGS.items():
        with subtests.test(at=(name, row, point)):
            (run,) = [run for run in all_runs(paper(name), Path("out"), [0], [row]) if run.point == point]
            config = as_tree(load_config(train_words(paper(name), run, []), memory_options=memory_options))
            assert {key: value_at(config, key) for key in expected} == expected


def test_every_row_with_figures_of_a_paper_is_audited() -> None:
    """Rows that stand beside the paper's for comparison need no values of it."""
    audited = {(name, row) for name, row, _ in SETTINGS}
    for name in (name for name in NAMES if "paper" in scales_of(name)):
        study = paper(name)
        assert {(name, key) for key, row in study.rows.items() if row.paper and key in study.trained_rows} <= audited
        assert all(row.paper.keys() <= study.columns.keys() for row in study.rows.values())


def test_every_figure_is_made_by_a_table_from_as_many_rows_as_it_shows() -> None:
    made = {
        figure: rows for name in NAMES for study in scales_of(name).values() for figure, rows in study.figures.items()
    }
    assert set(made) == set(figures())
    for name, rows in made.items():
        assert figures()[name].least_runs <= len(rows) <= figures()[name].most_runs, name


@pytest.mark.parametrize(("point", "last"), [("4000", 2), ("8000", 6), ("16000", 12)])
def test_the_compressive_memory_is_chosen_among_the_papers_rates(point: str, last: int) -> None:
    expected = {f"{kind}{rate}" for kind in ("attention", "no_loss") for rate in range(2, last + 1)}
    assert set(rows_behind(paper("infinite.fig3"), "compressive", point)) == expected


def test_columns_of_figure_5_are_memories_of_1_to_10_segments() -> None:
    columns = paper("lamemo.fig5").columns
    assert {key: column.evaluate for key, column in columns.items()} == {
        str(64 * m): ["eval.seg_len=64", f"eval.mem_len={64 * m}"] for m in range(1, 11)
    }


def test_a_table_has_every_scale() -> None:
    """recall is of no paper."""
    others = {"recall": {"tiny", "small"}}
    assert {name: set(scales_of(name)) for name in NAMES} == {
        name: {"tiny", "small", "paper"} for name in NAMES
    } | others


@cache
def built_points() -> dict[str, GridPoint]:
    """Return, by data directory, the points of all studies whose data the study builds."""
    tables = [study for name in NAMES for study in scales_of(name).values()]
    others = [
        load_study(str(path)) for kind in ("sweeps", "arena") for path in (ROOT / "configs" / kind).glob("*.yaml")
    ]
    points = [point for study in (*tables, *others) for point in study.points.values()]
    return {point.data: point for point in points if point.build}


def test_a_study_builds_all_that_its_builds_read(subtests: pytest.Subtests) -> None:
    for data, point in built_points().items():
        with subtests.test(data=data):
            made = set[Path]()
            for words in point.build:
                out = Path(words[words.index("--out") + 1])
                read = [Path(word) for word in words if word.startswith("data/") and Path(word) != out]
                assert all(made & {path, *path.parents} for path in read)
                made.add(out)


def test_data_of_scale_tiny_are_built(tmp_path: Path) -> None:
    """Each command once; the test above has their order."""
    points = [point for name in NAMES for point in scales_of(name)["tiny"].points.values() if point.build]
    for words in dict.fromkeys(tuple(command) for point in points for command in point.build):
        subprocess.run(own_command(words), cwd=tmp_path, check=True, timeout=limit(120))
    for point in points:
        vocab_size = read_tokenizer_metadata(tmp_path / point.data)["vocab_size"]
        assert vocab_size == (point.vocab_size or vocab_size), point.data


@pytest.mark.parametrize("name", NAMES)
def test_data_that_a_table_cannot_make_come_with_their_command(name: str) -> None:
    for scale in scales_of(name).values():
        for point in scale.points.values():
            assert point.build or point.made_by, f"{name}, {scale.scale}"
            commands = [command for command in (point.made_by or "").split(" && ") if command]
            for command in [*commands, *map(shlex.join, point.build)]:
                check_arguments(command)
            outs = [words[words.index("--out") + 1] for words in map(shlex.split, commands)]
            assert not outs or point.data in outs
