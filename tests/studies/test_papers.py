"""The tables against the papers: figures, settings of every row, and the commands that make the data.

The values are those of Martins et al. 2022 (ACL) and Ji et al. 2022 (NAACL); docs/reference/papers.md has them with the
deviations. `at` is (table, row, point) at scale paper.
"""

from __future__ import annotations

import shlex
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from dist_mem.config import load_config
from dist_mem.memory import memory_options
from dist_mem.papers.figures import figures
from dist_mem.studies.runs import all_runs, rows_behind, train_words
from dist_mem.studies.study import FOLDER, Study, load_study, study_names
from tests.support.paths import ROOT
from tests.support.program_arguments import check_arguments

NAMES = study_names(ROOT / FOLDER)


@cache
def scales_of(name: str) -> dict[str, Study]:
    scales = load_study(name, folder=ROOT / FOLDER).scales
    return {scale: load_study(name, scale, folder=ROOT / FOLDER) for scale in scales}


def paper(name: str) -> Study:
    return scales_of(name)["paper"]


FIGURES: dict[str, dict[str, dict[str, float]]] = {
    "infinite.table1": {
        "gpt2": {"WikiText-103": 16.85, "PG-19": 33.44},
        "compressive": {"WikiText-103": 16.87, "PG-19": 33.09},
        "infinite": {"WikiText-103": 16.64, "PG-19": 32.61},
        "sticky": {"WikiText-103": 16.61, "PG-19": 32.48},
    },
    "infinite.table2": {
        row: dict(zip(("perplexity", "F1", "ROUGE-1", "ROUGE-L", "METEOR"), values, strict=True))
        for row, values in {
            "no_document": (19.43, 7.82, 12.18, 10.17, 6.10),
            "none": (18.53, 8.64, 14.61, 12.03, 7.15),
            "compressive": (18.02, 8.78, 14.74, 12.14, 7.29),
            "infinite": (18.02, 8.92, 15.28, 12.51, 7.52),
            "sticky": (18.04, 9.01, 15.37, 12.56, 7.55),
        }.items()
    },
    "infinite.table3": {
        "transformer_xl": {"test": 24.52},
        "compressive": {"test": 24.41},
        "infinite": {"test": 24.29},
        "sticky": {"test": 24.22},
    },
    "lamemo.table1": {
        "none": {"dev": 28.11, "test": 29.14},
        "transformer_xl": {"dev": 23.42, "test": 24.56},
        "compressive": {"test": 24.41},
        "infinite": {"test": 24.22},
        "lamemo": {"dev": 22.98, "test": 23.77},
    },
    "lamemo.table2": {
        row: dict(zip(("text8 dev", "text8 test", "enwik8 dev", "enwik8 test"), values, strict=True))
        for row, values in {
            "none": (1.232, 1.303, 1.253, 1.240),
            "transformer_xl": (1.172, 1.239, 1.150, 1.128),
            "lamemo": (1.128, 1.196, 1.129, 1.107),
        }.items()
    },
    "lamemo.table3": {
        "lamemo": {"dev": 22.98, "test": 23.77},
        "no_interpolation": {"dev": 23.67, "test": 24.90},
        "no_look_ahead": {"test": 24.56},
    },
}
SIZES = {  # LaMemo, table 1: millions of parameters and of "FLOPS"
    "none": (151, 148),
    "transformer_xl": (151, 157),
    "compressive": (161, 169),
    "infinite": (160, 235),
    "lamemo": (151, 191),
}

GPT2 = {
    "model.kind": "gpt2",
    "model.num_layers": 12,
    "model.num_heads": 12,
    "train.seg_len": 512,
    "train.global_batch_size": 1,
    "optimizer.lr": 5e-5,
    "optimizer.weight_decay": 0.0,
}
GPT2_LTM = {"memory.num_basis": 512, "memory.basis_widths": [0.005, 0.01], "memory.tau": 0.5, "memory.kl_weight": 1e-6}
GPT2_LTM |= {"memory.prior_std": 0.05}
PAPER_FORM = {
    "memory.prior_mean": None,  # eq. 20 regularises the variance only
    "memory.padding": "none",  # sec. 2.2: positions t = i / L, and no more
    "memory.projections": "heads",  # eq. 8
    "memory.density_bias": True,  # eqs 9 and 10
    "memory.kl_heads": "sum",  # eq. 20
    "memory.density": "affine",  # eqs 9 and 10
    "memory.gate": True,  # eq. 18
}
CODE_FORM = {
    "memory.padding": "published",
    "memory.projections": "full",
    "memory.density_bias": False,
    "memory.kl_heads": "mean",
}
SORTING = {
    "model.num_layers": 3,
    "model.num_heads": 6,
    "train.seg_len": 1024,
    "train.global_batch_size": 8,
    "train.steps": 20_000,  # 20 epochs of 8,000 sequences
    "optimizer.kind": "adam",
    "schedule.kind": "cosine",
    "schedule.end_factor": 0.0,
}
SORTING_LTM = {
    "memory.num_basis": 1024,
    "memory.basis_widths": [0.01, 0.05],
    "memory.tau": 0.75,
    "memory.kl_weight": 1e-5,
    "memory.prior_std": 0.05,
    "memory.over.kind": "transformer_xl",
    "memory.over.mem_len": 1024,
    **PAPER_FORM,
}
WORDS = {
    "model.num_layers": 16,
    "model.num_heads": 10,
    "model.d_model": 410,
    "model.d_inner": 2100,
    "train.seg_len": 150,
    "train.steps": 250_000,
    "optimizer.kind": "adam",
    "optimizer.lr": 2.5e-4,
    "optimizer.betas": [0.9, 0.999],
    "optimizer.eps": 1e-8,
    "schedule.kind": "cosine",
    "schedule.end_factor": 0.0,
    "schedule.warmup_steps": 0,
    "model.adaptive.cutoffs": [20000, 40000, 200000],
}
MARTINS_WORDS = WORDS | {"train.global_batch_size": 40}
MARTINS_LTM = {
    "memory.num_basis": 150,
    "memory.basis_widths": [0.01, 0.05],
    "memory.tau": 0.5,
    "memory.kl_weight": 1e-5,
    "memory.prior_std": 0.1,
    "memory.memory_threshold": 900,
    "memory.over.kind": "transformer_xl",
    "memory.over.mem_len": 150,
    **PAPER_FORM,
}
MARTINS_COMPRESSIVE = {"memory.mem_len": 150, "memory.cmem_len": 150, "memory.compression_rate": 4}
MARTINS_COMPRESSIVE |= {"memory.compression_loss": "attention", "memory.loss_weight": 1.0}
LAMEMO = {"memory.kind": "lamemo", "memory.epsilon": 1e-6}  # eq. 11, table 5
LAMEMO_TRAINING = {"train.max_grad_norm": 0.25, "model.dropout": 0.1, "model.attention_dropout": 0.0}
LAMEMO_WORDS = WORDS | LAMEMO_TRAINING | {"train.global_batch_size": 64, "model.d_head": 41}
CHARACTERS = LAMEMO_TRAINING | {
    "model.num_layers": 12,
    "model.num_heads": 8,
    "model.d_head": 64,
    "model.d_inner": 2048,
    "train.seg_len": 512,
    "train.steps": 100_000,
    "train.global_batch_size": 40,
    "optimizer.lr": 2.5e-4,
    "schedule.kind": "cosine",
    "schedule.warmup_steps": 0,
    "model.adaptive": None,
}
GPT2_COMPRESSIVE = {"memory.cmem_len": 512, "memory.compression_loss": "attention", "memory.positions": "alibi"}

SETTINGS: dict[tuple[str, str, str], dict[str, Any]] = {
    # Martins et al., sec. 4.2 and app. C.2
    **{
        ("infinite.table1", row, point): GPT2 | {"train.epochs": 1, "optimizer.kind": "adamw"} | own
        for point in ("wikitext103", "pg19")
        for row, own in {
            "gpt2": {"memory.kind": "causal"},
            "compressive": GPT2_COMPRESSIVE | {"memory.compression_rate": 4, "optimizer.groups.0.lr": 2.5e-4},
            "infinite": GPT2_LTM
            | PAPER_FORM
            | {"memory.memory_threshold": 2048, "memory.sampling": "linear", "optimizer.groups.0.lr": 2.5e-4},
            "sticky": GPT2_LTM | PAPER_FORM | {"memory.memory_threshold": 2048, "memory.sampling": "sticky"},
            "infinite_code": GPT2_LTM | CODE_FORM | {"memory.prior_mean": -1.0, "memory.memory_threshold": 2048},
        }.items()
    },
    ("infinite.table1", "infinite", "pg19"): {"data.path": "data/pg19-2000"},
    # sec. 4.3 and app. C.3
    **{
        ("infinite.table2", row, ""): GPT2
        | {"train.epochs": 5, "schedule.kind": "linear", "optimizer.groups": []}
        | own
        for row, own in {
            "no_document": {"memory.kind": "causal", "data.path": "data/cmu_dog_gpt2_bare"},
            "none": {"memory.kind": "causal", "data.path": "data/cmu_dog_gpt2"},
            "compressive": GPT2_COMPRESSIVE | {"memory.compression_rate": 3},
            "infinite": GPT2_LTM | PAPER_FORM | {"memory.memory_threshold": None},
            "sticky": GPT2_LTM | PAPER_FORM | {"memory.sampling": "sticky"},
        }.items()
    },
    ("infinite.table2", "infinite_code", ""): CODE_FORM
    | {"memory.kl_weight": 1e-5, "train.epochs": 3, "memory.store": "normed", "data.cut": "end"},
    # app. D
    ("infinite.table3", "transformer_xl", ""): MARTINS_WORDS | {"memory.kind": "transformer_xl", "memory.mem_len": 150},
    ("infinite.table3", "compressive", ""): MARTINS_WORDS | MARTINS_COMPRESSIVE,
    ("infinite.table3", "infinite", ""): MARTINS_WORDS | MARTINS_LTM | {"memory.sampling": "linear"},
    ("infinite.table3", "sticky", ""): MARTINS_WORDS | MARTINS_LTM | {"memory.sampling": "sticky"},
    # sec. 4.1 and app. C.1
    **{
        ("infinite.fig3", row, point): SORTING
        | {"optimizer.lr": 2e-4 if point == "16000" else 2.5e-4, "data.path": f"data/sorting/{point}"}
        | own
        for point in ("4000", "8000", "16000")
        for row, own in {
            "transformer_xl": {"memory.kind": "transformer_xl", "memory.mem_len": 2048},
            "infinite": SORTING_LTM,
            "attention2": {
                "memory.mem_len": 1024,
                "memory.cmem_len": 1024,
                "memory.compression_rate": 2,
                "memory.compression_loss": "attention",
                "memory.loss_weight": 1.0,
            },
            "no_loss2": {"memory.compression_rate": 2, "memory.loss_weight": 0.0},
        }.items()
    },
    ("infinite.fig3", "infinite_code", "8000"): CODE_FORM
    | {"memory.num_basis": 512, "memory.kl_weight": 1e-6, "optimizer.lr": 2e-4},
    **{
        ("infinite.fig3_basis", f"n{number}", ""): SORTING | {**SORTING_LTM, "memory.num_basis": number}
        for number in (64, 1024)
    },
    # Ji et al., app. C; the two rows whose figures are those of Martins et al. are trained as theirs.
    ("lamemo.table1", "none", ""): LAMEMO_WORDS | {"memory.kind": "none"},
    ("lamemo.table1", "transformer_xl", ""): LAMEMO_WORDS | {"memory.kind": "transformer_xl", "memory.mem_len": 150},
    ("lamemo.table1", "lamemo", ""): LAMEMO_WORDS
    | LAMEMO
    | {"memory.mem_len": 150, "memory.positions": "disentangled"},
    ("lamemo.table1", "lamemo_code", ""): {"model.adaptive": None, "train.max_grad_norm": 0.5},
    ("lamemo.table1", "compressive", ""): MARTINS_WORDS | MARTINS_COMPRESSIVE,
    ("lamemo.table1", "infinite", ""): MARTINS_WORDS | MARTINS_LTM | {"memory.sampling": "sticky"},
    **{
        ("lamemo.table2", row, corpus): CHARACTERS | {"data.path": f"data/{corpus}"} | own
        for corpus in ("text8", "enwik8")
        for row, own in {
            "none": {"memory.kind": "none"},
            "transformer_xl": {"memory.kind": "transformer_xl", "memory.mem_len": 512},
            "lamemo": LAMEMO | {"memory.mem_len": 512},
        }.items()
    },
    ("lamemo.table2", "lamemo_code", "text8"): {"train.steps": 50_000, "memory.window": "segment"},
    **{
        ("lamemo.table3", row, ""): LAMEMO_WORDS | LAMEMO | {"memory.mem_len": 150} | own
        for row, own in {
            "lamemo": {"memory.interpolation": True, "memory.look_ahead": True, "memory.positions": "disentangled"},
            "no_interpolation": {"memory.interpolation": False},
            "no_look_ahead": {"memory.look_ahead": False},
            "xl_rpe": {"memory.positions": "shared"},
        }.items()
    },
    ("lamemo.fig5", "transformer_xl", ""): LAMEMO_WORDS | {"memory.mem_len": 150},
    ("lamemo.fig5", "lamemo", ""): LAMEMO_WORDS | {"memory.mem_len": 150},
}


def resolved(study: Study, row: str, point: str) -> Any:
    (run,) = [run for run in all_runs(study, Path("out"), [0], [row]) if run.point == point]
    return load_config(train_words(study, run, []), memory_options=memory_options)


def value_at(config: Any, key: str) -> Any:
    for name in key.split("."):
        config = config[int(name)] if name.isdigit() else config[name]
    return config


def test_a_row_has_the_papers_settings(subtests: pytest.Subtests, monkeypatch: pytest.MonkeyPatch) -> None:
    for at in SETTINGS:
        with subtests.test(at=at):
            monkeypatch.chdir(ROOT)
            config = resolved(paper(at[0]), at[1], at[2])
            expected = SETTINGS[at]
            assert {key: value_at(config, key) for key in expected} == expected


def test_every_row_of_the_papers_is_audited() -> None:
    """Those of their tables; rows that stand beside the paper's for comparison need no values of it."""
    audited = {(name, row) for name, row, _ in SETTINGS}
    for name, rows in FIGURES.items():
        assert {(name, row) for row in rows if row in paper(name).trained} <= audited


@pytest.mark.parametrize("name", NAMES)
def test_the_papers_figures_are_all_there_and_no_others(name: str) -> None:
    rows = paper(name).rows if "paper" in scales_of(name) else {}
    assert {key: row.paper for key, row in rows.items() if row.paper} == FIGURES.get(name, {})
    sizes = {key: tuple(size * 1_000_000 for size in pair) for key, pair in SIZES.items()}
    found = {key: (row.sizes["parameters"], row.sizes["multiply_adds"]) for key, row in rows.items() if row.sizes}
    assert found == (sizes if name == "lamemo.table1" else {})
    assert all(row.paper.keys() <= paper(name).columns.keys() for row in rows.values())


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


@pytest.mark.parametrize("name", NAMES)
def test_data_that_a_table_cannot_make_come_with_their_command(name: str) -> None:
    assert set(scales_of(name)) in ({"tiny", "small", "paper"}, {"tiny", "small"}, {"tiny", "paper"})
    for scale in scales_of(name).values():
        for point in scale.points.values():
            assert point.build or point.made_by, f"{name}, {scale.scale}"
            commands = [command for command in (point.made_by or "").split(" && ") if command]
            for command in [*commands, *map(shlex.join, point.build)]:
                check_arguments(command)
            outs = [words[words.index("--out") + 1] for words in map(shlex.split, commands)]
            assert not outs or point.data in outs
