"""No call of the Python API changes the state of the process: random numbers, threads, environment, handlers."""

import inspect
import logging
import os
import random
import signal
import sys
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import dist_mem
from dist_mem.datasets.builder import build_dataset
from dist_mem.datasets.source import SourceDocument
from dist_mem.errors import RunError
from dist_mem.evaluation.export import run as export
from dist_mem.evaluation.trained_model import load_model
from dist_mem.runtime.environment import settings_of

CATCHABLE = signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}


def state() -> dict[str, Any]:
    """Everything of the process that another library or the caller's own code may rely on."""
    return {
        "torch's random numbers": torch.get_rng_state().tolist(),
        "numpy's random numbers": str(np.random.get_state()),
        "Python's random numbers": random.getstate(),
        "threads": (torch.get_num_threads(), torch.get_num_interop_threads()),
        "dtype": torch.get_default_dtype(),
        "device": torch.get_default_device(),
        "modes": (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_autocast_enabled("cpu")),
        "determinism": (torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.benchmark),
        "precision": (torch.get_float32_matmul_precision(), torch.backends.cuda.matmul.allow_tf32),
        "floating point": np.geterr(),
        "environment": dict(os.environ),
        "working directory": Path.cwd(),
        "signal handlers": {number: signal.getsignal(number) for number in CATCHABLE},
        "warnings": list(map(str, warnings.filters)),
        "logging": (logging.root.level, list(logging.root.handlers), logging.root.manager.disable),
        "hooks": (sys.excepthook, sys.unraisablehook, sys.gettrace()),
        "modules": list(sys.path),
        "umask": next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("Umask")),
    }


def changed_by(call: Callable[[], object]) -> list[str]:
    before = state()
    call()
    after = state()
    return [name for name, value in before.items() if after[name] != value]


def public_names() -> set[str]:
    """Every function of `dist_mem`, and every method and property of its classes."""
    found = set()
    for name in dist_mem.__all__:
        value = getattr(dist_mem, name)
        if not inspect.isclass(value):
            found.add(name)
        elif not issubclass(value, Exception):
            own = {
                attribute
                for attribute, member in vars(value).items()
                if callable(member) or isinstance(member, property)
            }
            own |= {attribute for attribute, member in vars(value).items() if isinstance(member, classmethod)}
            found |= {name, *(f"{name}.{attribute}" for attribute in own if not attribute.startswith("_"))}
    return found


def calls(folder: Path, out: Path) -> dict[str, Callable[[], object]]:
    """A call of each of them."""
    model = dist_mem.load(folder / "runs" / "demo")
    memory, text, scores = model.read("It was"), "It was the best of times.", model.score("It was")
    memory.save(out / "kept.mem")
    return {
        "load": lambda: [dist_mem.load(folder / "runs" / "demo"), dist_mem.load("example", "eval.precision=bf16")],
        "train": lambda: dist_mem.train(folder / "run.yaml", f"run_dir={out / 'run'}", "train.steps=1"),
        "Sampling": lambda: dist_mem.Sampling(temperature=0.5, seed=3),
        "Model": lambda: dist_mem.Model(model.trained),
        "Model.tokenizer": lambda: model.tokenizer.encode(text),
        "Model.score": lambda: model.score([text, text], memory=memory),
        "Model.read": lambda: model.read(text, memory=memory),
        "Model.generate": lambda: list(model.generate(text, num_tokens=3, sampling=dist_mem.Sampling(seed=1))),
        "Model.inspect": lambda: model.inspect(text),
        "Memory": lambda: dist_mem.Memory(memory.texts, read=(model.trained, memory.reading_of(model.trained))),
        "Memory.load": lambda: dist_mem.Memory.load(out / "kept.mem"),
        "Memory.save": lambda: memory.save(out / "again.mem"),
        "Memory.num_tokens": lambda: memory.num_tokens,
        "Memory.reading_of": lambda: dist_mem.Memory.load(out / "kept.mem").reading_of(model.trained),
        "Scores": lambda: dist_mem.Scores(scores.pieces, scores.tokens, scores.nll, memory),
        "Scores.mean": lambda: scores.mean,
        "Scores.perplexity": lambda: scores.perplexity,
    }


def test_no_function_of_the_api_changes_the_process(api_folder: Path, tmp_path: Path) -> None:
    every = calls(api_folder, tmp_path)
    assert every.keys() == public_names()
    assert {name: found for name, call in every.items() if (found := changed_by(call))} == {}


def test_the_first_use_of_a_name_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DS_ACCELERATOR", raising=False)
    assert changed_by(lambda: [getattr(dist_mem, name) for name in dist_mem.__all__]) == []


def test_a_call_that_is_refused_changes_nothing(api_folder: Path, tmp_path: Path) -> None:
    def refused() -> None:
        for source, *overrides in (("nowhere",), (api_folder / "runs" / "demo", "model.d_model=8")):
            with suppress(RunError):
                dist_mem.load(source, *overrides)

    assert changed_by(refused) == []


def test_functions_that_the_pages_show_change_nothing_either(api_folder: Path, tmp_path: Path) -> None:
    """An export of a run and of a configuration, data, the model of lm-evaluation-harness and that of transformers."""
    run, text = api_folder / "runs" / "demo", tmp_path / "text.txt"
    text.write_text("It was the best of times.\n" * 40, encoding="utf-8")
    document = SourceDocument(id="1", title="t", source=text)
    doors: dict[str, Callable[[], object]] = {
        "load_model": lambda: load_model(run),
        "export": lambda: export(run, out=tmp_path / "export"),
        "export of a configuration": lambda: export(api_folder / "run.yaml", out=tmp_path / "initial"),
        "build_dataset": lambda: build_dataset(
            {"train": [document]}, tmp_path / "data", name="x", tokenizer_kind="bytes"
        ),
    }
    with suppress(ImportError):
        from dist_mem.lm_eval.model import DistMemLM
        from tests.support.scored_library import Request

        lm = DistMemLM(str(run))
        doors["lm-eval"] = lambda: DistMemLM(str(run)).generate_until([Request(("It", {"max_gen_toks": 2}))])
        doors["lm-eval, scores"] = lambda: lm.loglikelihood([Request(("It", " was"))])
    with suppress(ImportError):
        from dist_mem.generation.transformers_model import MemoryConfig, MemoryForCausalLM

        config = MemoryConfig(vocab_size=257)
        doors["transformers"] = lambda: MemoryForCausalLM(config, load_model(run)).generate(
            torch.tensor([[5, 6]]), max_new_tokens=2, do_sample=False
        )
        doors["transformers"]()  # the first use imports parts of transformers
    assert {name: found for name, call in doors.items() if (found := changed_by(call))} == {}


def test_a_library_is_set_up_for_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """As MLflow, whose retries and warnings are the caller's again after `load("models:/...")`."""
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "7")
    log = logging.getLogger("a.library")

    def call() -> None:
        with pytest.raises(KeyError), settings_of("a.library"):
            os.environ.update({"MLFLOW_HTTP_REQUEST_TIMEOUT": "30", "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0"})
            log.setLevel(logging.ERROR)
            warnings.filterwarnings("ignore", message="anything")
            raise KeyError

    assert changed_by(call) == []
    assert log.level == logging.NOTSET


def test_a_model_that_mlflow_does_not_have_leaves_its_settings_as_they_were(tmp_path: Path) -> None:
    pytest.importorskip("mlflow", reason="mlflow is not installed")

    def ask() -> None:
        with suppress(RunError):
            dist_mem.load("models:/nothing@champion", f"tracking.uri=sqlite:///{tmp_path / 'mlflow.db'}")

    ask()  # imports MLflow, which has settings of its own
    assert changed_by(ask) == []
