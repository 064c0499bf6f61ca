"""A model out of a run, and its export: whole, by itself, nothing but data."""

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from safetensors.torch import load_file, save_file

from dist_mem.__main__ import main
from dist_mem.checkpoint.manifest import describe_file, files_in, read_manifest, step_dir, write_manifest
from dist_mem.checkpoint.rank_file import RankFile, rank_file
from dist_mem.data.remote import fetch
from dist_mem.errors import EXIT_FAILED, EXIT_USAGE, CheckpointError
from dist_mem.evaluation import export as export_module
from dist_mem.evaluation.evaluate import evaluate_checkpoint
from dist_mem.evaluation.scores import Report
from dist_mem.evaluation.trained_model import (
    TrainedModel,
    distinct_weights,
    find_checkpoint,
    init_state,
    load_exported,
    load_model,
    read_lanes,
    read_settings,
)
from dist_mem.generation.reading import start_from
from dist_mem.generation.text_scores import score
from dist_mem.memory import memory_class
from dist_mem.memory.base import named_tensors
from dist_mem.runtime.network_interface import free_port
from tests.support.contract_cases import small_model
from tests.support.faults import assert_says, flip, small_disk
from tests.support.jobs import build_books, train_here, write_config
from tests.support.messages import refused, said
from tests.support.own_process import in_child
from tests.support.paths import EXAMPLES
from tests.support.ranks import Pools, RankPool
from tests.support.scored_library import ALONE, make_config, make_model, save_weights

SEG_LEN = 16  # of the configurations of tests/support/jobs.py
EXAMPLE = EXAMPLES / "averages.py"
TEXT = "bako miru tensol " * 5


def make_run(folder: Path, books: Path, pool: RankPool, *overrides: dict[str, Any], memory: Any = None) -> Path:
    """A run of two ranks with checkpoints of steps 1 and 2."""
    changes = {"train": {"steps": 2}, "schedule": {"kind": "constant"}, "checkpoint": {"every": 1}}
    config = write_config(folder / "run.yaml", books, folder / "run", changes, *overrides, memory=memory)
    assert pool.run(train_here, config) == [0, 0]
    return folder / "run"


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory, books: Path, rank_pool: Pools) -> Path:
    return make_run(tmp_path_factory.mktemp("exported"), books, rank_pool(2))


@pytest.mark.parametrize("dtype", [torch.int32, torch.complex64])
def test_weights_of_another_type_are_not_converted(tmp_path: Path, dtype: torch.dtype) -> None:
    model = small_model("none")
    weights = distinct_weights(model)
    name = next(iter(weights))
    save_file({**weights, name: weights[name].to(dtype)}, tmp_path / "model.safetensors")
    with refused(CheckpointError, name):
        load_exported(model, tmp_path, is_published=False)


@pytest.mark.core
@pytest.mark.parametrize(
    ("precision", "dtype"), [("fp32", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)]
)
def test_an_export_has_the_weights_to_the_last_bit(
    library: Path, tmp_path: Path, single_process: None, precision: str, dtype: torch.dtype
) -> None:
    """Rounded through fp16 and stored as fp32, its scores were those of the run to three digits."""
    model = make_model()
    weights = {name: weight + 1e-6 for name, weight in distinct_weights(model).items()}  # no number of 16 bits
    model.load_state_dict(weights, strict=False)
    save_weights(tmp_path / "run", model, make_config(data={"path": str(library)}), step=3)
    out = export(tmp_path / "run", tmp_path / "out", "--precision", precision)
    stored, loaded = load_file(out / "model.safetensors"), distinct_weights(load_model(out).model)
    assert stored.keys() == loaded.keys() == weights.keys()
    for name, weight in weights.items():
        assert torch.equal(stored[name], weight.to(dtype)), name
        assert torch.equal(loaded[name], weight.to(dtype).to(loaded[name].dtype)), name


def export(run: Path, out: Path, *options: str) -> Path:
    assert main(["export", str(run), "--out", str(out), *options]) == 0
    return out


@pytest.fixture(scope="module")
def exported(run_dir: Path) -> Path:
    return export(run_dir, run_dir.parent / "exported")


def report_of(path: Path, books: Path, *overrides: str) -> Report:
    found = find_checkpoint(path)
    config = read_settings(found.directory, [f"data.path={books}", *overrides])
    return evaluate_checkpoint(found, config, split="test", world=ALONE)


WHERE_WEIGHTS_LIE = {
    "stage 0": {"deepspeed": {"zero_optimization": {"stage": 0}}},
    "stage 1, frozen": {
        "deepspeed": {"zero_optimization": {"stage": 1}},
        "optimizer": {"groups": [{"param_regex": "embedding", "trainable": False}]},
    },
    "stage 2, bf16, untied": {"train": {"precision": "bf16"}, "model": {"tie_embeddings": False}},
    "stage 3, bf16, adaptive": {
        "deepspeed": {"zero_optimization": {"stage": 3}},
        "train": {"precision": "bf16"},
        "model": {"adaptive": {"cutoffs": [100, 200], "div_val": 2}},
    },
}


@pytest.mark.parametrize("case", WHERE_WEIGHTS_LIE)
def test_an_export_scores_as_its_checkpoint_does(tmp_path: Path, books: Path, rank_pool: Pools, case: str) -> None:
    run_dir = make_run(tmp_path, books, rank_pool(2), WHERE_WEIGHTS_LIE[case])
    out = export(run_dir, tmp_path / "exported")
    assert report_of(out, books) == report_of(run_dir, books)
    trained, again = load_model(run_dir), load_model(out)
    for (name, mine), theirs in zip(trained.model.state_dict().items(), again.model.state_dict().values(), strict=True):
        assert torch.equal(mine, theirs), name
    stored = load_file(out / "model.safetensors")
    assert sum(part.numel() for part in stored.values()) == sum(part.numel() for part in trained.model.parameters())


def test_an_export_in_fp16_scores_as_the_checkpoint_in_it(tmp_path: Path, run_dir: Path, books: Path) -> None:
    half = export(run_dir, tmp_path / "half", "--precision", "fp16")
    assert report_of(half, books, "eval.precision=fp16") == report_of(run_dir, books, "eval.precision=fp16")


def test_values_that_fp16_cannot_hold_are_not_exported(tmp_path: Path, exported: Path, capsys: Any) -> None:
    large = tmp_path / "large"
    shutil.copytree(exported, large)
    weights = load_file(large / "model.safetensors")
    name = next(iter(weights))
    save_file({**weights, name: weights[name].fill_(1e5)}, large / "model.safetensors")
    manifest = read_manifest(large)
    manifest["files"]["model.safetensors"] = describe_file(large / "model.safetensors")
    write_manifest(large, manifest)
    assert main(["export", str(large), "--out", str(tmp_path / "half"), "--precision", "fp16"]) == EXIT_USAGE
    said(capsys.readouterr().err, name)
    assert not (tmp_path / "half").exists()


def test_an_export_needs_neither_run_nor_data_nor_pickle(
    tmp_path: Path, run_dir: Path, exported: Path, monkeypatch: pytest.MonkeyPatch, single_process: None
) -> None:
    moved = shutil.copytree(exported, tmp_path / "elsewhere")
    monkeypatch.chdir(tmp_path)
    for module in (torch, __import__("pickle"), __import__("_pickle")):
        for name in {"load", "loads", "Unpickler"} & vars(module).keys():
            monkeypatch.setattr(module, name, lambda *_, **__: pytest.fail("a pickle was loaded"))
    trained = load_model("elsewhere")
    assert torch.equal(score(trained, TEXT).nll, score(load_model(exported), TEXT).nll)
    with refused(CheckpointError, "elsewhere", "no memories of lanes"):
        read_lanes(trained, [0])
    assert main(["evaluate", str(moved)]) == 2
    assert not load_model(run_dir).checkpoint.remarks, "a checkpoint needs no pickle either"


def test_every_file_is_compared_with_its_sha256(tmp_path: Path, exported: Path, run_dir: Path, books: Path) -> None:
    files = [path for path in exported.rglob("*") if path.is_file()]
    names = {path.relative_to(exported).as_posix() for path in files}
    written = "".join(path.read_text() for path in files if path.suffix != ".safetensors")
    assert str(run_dir.parent) not in written and str(books) not in written, "of this machine"
    assert names == {*read_manifest(exported)["files"], "manifest.json"}
    for name in names:
        damaged = shutil.copytree(exported, tmp_path / "damaged")
        flip(damaged / name, 40)
        with refused(CheckpointError, damaged / name):
            load_model(damaged)
        shutil.rmtree(damaged)


ALLOWED = "eval.allow_code=true"


def test_a_memory_from_outside_goes_along_and_is_announced(tmp_path: Path, books: Path, rank_pool: Pools) -> None:
    mine = tmp_path / "mine.py"
    mine.write_text(EXAMPLE.read_text())
    memory = {"kind": f"{mine}:Averages", **memory_class(f"{mine}:Averages").small_options(SEG_LEN)}
    out = export(make_run(tmp_path, books, rank_pool(2), memory=memory), tmp_path / "out", ALLOWED)
    text = score(load_model(tmp_path / "run", ALLOWED), TEXT).nll
    mine.unlink()
    shutil.rmtree(tmp_path / "run")
    moved = out.rename(tmp_path / "moved")
    assert torch.equal(score(load_model(moved, ALLOWED), TEXT).nll, text)
    assert "`memory/` contains a program" in (moved / "README.md").read_text()
    assert str(tmp_path) not in (moved / "config.yaml").read_text()


def test_the_card_loads_the_model_it_describes(exported: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    card = (exported / "README.md").read_text()
    assert "trained with dist_mem for 2 steps" in card
    assert "All files are data" in card
    monkeypatch.chdir(exported.parent)
    (snippet,) = re.findall(r"```python\n(.*?)```", card, re.DOTALL)
    names: dict[str, Any] = {}
    exec(snippet, names)
    assert names["model"].trained.checkpoint.directory == Path("exported")


@pytest.mark.usefixtures("single_process")
def test_another_step_can_be_exported_and_the_report_lies_in_the_export(
    tmp_path: Path, run_dir: Path, books: Path
) -> None:
    early = export(run_dir, tmp_path / "early", "--checkpoint", "1")
    assert read_manifest(early)["step"] == 1
    assert main(["evaluate", str(early), f"data.path={books}", "eval.max_document_len=20"]) == 0
    assert [path.name for path in (early / "evaluations").glob("*.csv")] == ["validation-step-00000001-first20.csv"]
    assert load_model(early).checkpoint.manifest["step"] == 1, "and it is still whole"


UNUSABLE = {
    "name taken": (["--out", "taken"], " exists already; remove it, or give another name"),
    "no checkpoint": (["--checkpoint", "7"], "step-00000007: there is no such checkpoint"),
    "fixed key": (["model.d_model=8"], "model.d_model: is fixed by the checkpoint"),
    "no export's key": (["eval.seg_len=8"], "eval.seg_len=8: an export has the settings of its training"),
}


@pytest.mark.parametrize("fault", UNUSABLE)
def test_what_cannot_be_exported_leaves_no_trace(
    tmp_path: Path, run_dir: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], fault: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "taken").mkdir()
    options, message = UNUSABLE[fault]
    assert main(["export", str(run_dir), "--out", "new", *options]) == 2
    assert_says(capfd.readouterr().err, message)
    assert [path.name for path in tmp_path.iterdir()] == ["taken"]


def test_a_configuration_has_no_checkpoints_and_its_export_no_paths(
    tmp_path: Path, books: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    zero = {"stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": "/scratch/alice"}}
    changes = {"deepspeed": {"zero_optimization": zero, "tensorboard": {"enabled": True, "output_path": "/home/alice"}}}
    changes["eval"] = {"precision": "bf16"}
    config = write_config(tmp_path / "run.yaml", books, tmp_path / "run", changes)
    assert main(["export", str(config), "--out", str(tmp_path / "new"), "--checkpoint", "7"]) == 2
    assert_says(capfd.readouterr().err, f"--checkpoint 7: {config} is a configuration")
    assert main(["export", str(config), "--out", str(tmp_path / "new")]) == 0
    assert "alice" not in (tmp_path / "new" / "config.yaml").read_text(encoding="utf-8")
    loaded = load_model(tmp_path / "new")
    assert loaded.config.deepspeed["zero_optimization"]["stage"] == 3
    assert loaded.config.eval.precision == "bf16" and read_manifest(tmp_path / "new")["precision"] == "fp32"


def succeeds(command: list[str]) -> None:
    assert main(command) == 0


def test_of_two_exports_into_one_folder_the_first_to_end_wins_and_the_other_is_refused(
    tmp_path: Path, run_dir: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out, write_whole = tmp_path / "new", export_module.write_export
    command = ["export", str(run_dir), "--out", str(out)]

    def overtaken(*given: Any, **options: Any) -> None:
        monkeypatch.setattr(export_module, "write_export", write_whole)
        write_whole(*given, **options)
        in_child(succeeds, command)

    monkeypatch.setattr(export_module, "write_export", overtaken)
    assert main(command) == 2
    said(capfd.readouterr().err, "error: ", "--out", out)
    assert [path.name for path in tmp_path.iterdir()] == ["new"]
    load_model(out)


def test_a_full_disk_leaves_no_trace(tmp_path: Path, run_dir: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with small_disk(tmp_path / "small", "size=24k") as small:
        assert main(["export", str(run_dir), "--out", str(small / "new")]) == 1
        assert_says(capfd.readouterr().err, " cannot be written: ", "No space left on device")
        assert list(small.iterdir()) == []


def test_a_server_that_is_down_may_be_back_at_the_next_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The untrained model of a configuration has the tokenizer of its data."""
    monkeypatch.setattr(fetch, "RETRY_PAUSES", ())
    config = write_config(tmp_path / "run.yaml", Path("unused"), tmp_path / "run", {})
    data = f"data.path=http://127.0.0.1:{free_port()}/books"
    assert main(["export", str(config), "--out", str(tmp_path / "new"), data]) == EXIT_FAILED
    assert_says(capsys.readouterr().err, "(1 attempts)")


LANES = 8  # of the training, see jobs.write_config


@pytest.fixture(scope="module")
def bf16_run(tmp_path_factory: pytest.TempPathFactory, rank_pool: Pools) -> Path:
    """A run of two ranks in bf16, saved at steps 5 and 8; a linear memory keeps its matrices in fp32."""
    folder = tmp_path_factory.mktemp("trained")
    config = write_config(folder / "run.yaml", build_books(folder), folder / "run", {"train": {"steps": 8}})
    memory = "memory=[{kind: linear}, {kind: transformer_xl, mem_len: 24}]"
    rank_pool(2).run(train_here, config, ["train.precision=bf16", memory])
    return folder / "run"


@pytest.fixture(scope="module")
def trained(bf16_run: Path) -> TrainedModel:
    return load_model(bf16_run)


@pytest.fixture
def text(bf16_run: Path) -> str:
    return (bf16_run.parent / "texts" / "test" / "0.txt").read_text(encoding="utf-8")


def test_lanes_are_those_of_the_checkpoint(trained: TrainedModel, bf16_run: Path, text: str) -> None:
    saved = [RankFile(step_dir(bf16_run, 8) / rank_file(rank), "lanes").read() for rank in range(2)]
    hidden = {
        int(lane): part["blocks.1.hidden"][row] for part in saved for row, lane in enumerate(part["lane_ids"].tolist())
    }
    lanes = read_lanes(trained, [5, 2])
    assert torch.equal(lanes.blocks[1].hidden, torch.stack([hidden[5], hidden[2]]).float())
    one = start_from(trained, read_lanes(trained, [5]), [trained.tokenizer.bos_id])
    assert len(score(trained, text, after=one).nll) == len(text)
    assert init_state(trained, [5, 2]).blocks[1].hidden.shape == lanes.blocks[1].hidden.shape
    with refused(CheckpointError, f"lanes [{LANES}]"):
        read_lanes(trained, [LANES])


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_lanes_have_the_precision_that_the_memory_itself_chooses(bf16_run: Path, text: str, precision: str) -> None:
    model = load_model(bf16_run, f"eval.precision={precision}")
    lanes = read_lanes(model, [5, 2])
    chosen = {name: part.dtype for name, part in named_tensors(init_state(model, [5, 2])).items()}
    assert {name: part.dtype for name, part in named_tensors(lanes).items()} == chosen
    one = start_from(model, read_lanes(model, [5]), [model.tokenizer.bos_id])
    assert len(score(model, text, after=one).nll) == len(text)


def test_step_precision_and_settings_can_be_chosen(bf16_run: Path, text: str) -> None:
    early = load_model(bf16_run, "eval.precision=bf16", "eval.seg_len=8", step=5)
    assert early.checkpoint.manifest["step"] == 5
    assert next(early.model.parameters()).dtype == early.dtype == torch.bfloat16
    assert score(early, text[:8]).reading.state.blocks[1].length.tolist() == [8]
    with refused(ValueError, "model.d_model"):
        load_model(bf16_run, "model.d_model=8")
    with refused(CheckpointError, "step-00000006", "steps 5, 8"):
        load_model(bf16_run, step=6)
    for device in ("gpu", "cuda:99"):
        with refused(ValueError, "device", device):
            load_model(bf16_run, device=device)


def test_a_wrong_path_or_override_is_refused_by_name(bf16_run: Path, tmp_path: Path) -> None:
    wrong: list[Any] = [(tmp_path / "nope",), (tmp_path,), (3,), (bf16_run, 400)]
    for arguments in wrong:
        with refused(TypeError if isinstance(arguments[-1], int) else CheckpointError, arguments[-1]):
            load_model(*arguments)


def test_a_checkpoint_is_loaded_where_its_data_is_not(
    bf16_run: Path, trained: TrainedModel, text: str, tmp_path: Path
) -> None:
    """Issue 15: the tokenizer was asked of the data directory, which had to be built. A damaged one is refused."""
    copied = Path(shutil.copytree(step_dir(bf16_run, 8), tmp_path / "taken"))
    settings = OmegaConf.load(copied / "config.yaml")
    settings.data.path = str(tmp_path / "nothing")
    OmegaConf.save(settings, copied / "config.yaml")
    manifest = {key: value for key, value in read_manifest(copied).items() if key != "sha256"}
    files = {path.relative_to(copied).as_posix(): describe_file(path) for path in files_in(copied)}
    write_manifest(copied, {**manifest, "files": files})
    again = load_model(copied)
    assert again.tokenizer.fingerprint == trained.tokenizer.fingerprint
    assert torch.equal(score(again, text).nll, score(trained, text).nll)
    (copied / "tokenizer" / "tokenizer.json").write_text("{}")
    with refused(CheckpointError, "tokenizer/tokenizer.json: 2 bytes"):
        load_model(copied)
