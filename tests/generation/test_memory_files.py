"""A memory file continues as the reading that was saved, bit for bit, for every memory, found by file name."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf
from safetensors.torch import load_file, save_file

from dist_mem.config import Config, DataConfig, EvalConfig, TrainConfig
from dist_mem.contract.subject import VOCAB
from dist_mem.data.tokenizers.words import WordTokenizer
from dist_mem.errors import RunError, UnusableError
from dist_mem.evaluation.memory_file import read_memory_file, write_memory_file
from dist_mem.evaluation.trained_model import Checkpoint, TrainedModel
from dist_mem.generation.generate import Sampling, generate
from dist_mem.generation.reading import Reading, next_log_probs, read, select, start
from dist_mem.generation.text_memory import TextMemory, load_memory, read_text, save_memory
from dist_mem.generation.text_scores import score
from tests.generation.test_generation import same_reading, trained_model
from tests.support import gpt2_models
from tests.support.contract_cases import CASES, SEG_LEN, case_params, small_block
from tests.support.faults import flip
from tests.support.messages import refused
from tests.support.paths import EXAMPLES

LENGTHS = [0, 1, SEG_LEN - 1, SEG_LEN, SEG_LEN + 1, 3 * SEG_LEN + 2]
SAMPLING = Sampling(temperature=1.3, seed=5)
OUTSIDE = {
    "outside": small_block(f"{EXAMPLES / 'averages.py'}:Averages"),
    "infinite over outside": small_block("infinite", over=small_block(f"{EXAMPLES / 'averages.py'}:Averages")),
}
PLACE = Path("runs/small")


def model(case: str = "transformer_xl", *, blocks: bool = False, step: int = 3) -> TrainedModel:
    """The small model of the contract tests with the configuration and the checkpoint that it would have."""
    config = Config(memory=CASES[case], train=TrainConfig(seg_len=SEG_LEN), data=DataConfig(blocks=blocks))
    checkpoint = Checkpoint(PLACE / f"step-{step}", PLACE, {"step": step}, [])
    return trained_model(case, torch.float32)._replace(config=config, checkpoint=checkpoint)


def gpt2() -> TrainedModel:
    """A small GPT-2 with a long-term memory and token types."""
    types = [{"id": 1}, {"id": 2, "after": [5]}, {"id": 3, "after": [6, 7]}]
    config = gpt2_models.gpt2_config(gpt2_models.LTM, model={"token_types": types})
    tokenizer = WordTokenizer([f"w{number}" for number in range(gpt2_models.VOCAB - 1)])
    checkpoint = Checkpoint(PLACE, PLACE, {"step": 0}, [])
    device = torch.device("cpu")
    return TrainedModel(gpt2_models.build(config), tokenizer, config, checkpoint, device, torch.float32)


def words(count: int, seed: int = 3) -> str:
    return " ".join(f"w{number}" for number in np.random.default_rng(seed).integers(0, VOCAB - 1, count))


def kept(trained: TrainedModel, text: str, path: Path) -> TextMemory:
    """The memory of a text after a journey through a file."""
    save_memory(trained, read_text(trained, text, name="book.txt"), path)
    return load_memory(trained, path)


def check_continues(trained: TrainedModel, folder: Path, lengths: list[int]) -> None:
    """The memory of a text in a file continues as the text itself."""
    for length in lengths:
        text, path = words(length), folder / f"{length}.mem"
        memory = kept(trained, text, path)
        before = read(trained, start(trained), [trained.tokenizer.encode(text)])
        assert same_reading(memory.reading, before), length
        assert [(read.name, read.num_tokens) for read in memory.texts] == [("book.txt", length)]
        rest = words(2 * SEG_LEN + 1, seed=length)
        one, other = (score(trained, rest, after=reading) for reading in (memory.reading, before))
        assert torch.equal(one.nll.nan_to_num(-1), other.nll.nan_to_num(-1))
        assert same_reading(one.reading, other.reading)
        if int(before.open_len):  # in blocks, nothing can be generated before the first token
            assert torch.equal(next_log_probs(trained, memory.reading), next_log_probs(trained, before))
        save_memory(trained, memory, folder / "again.mem")
        assert path.read_bytes() == (folder / "again.mem").read_bytes(), "equal memories make equal files"


@pytest.mark.parametrize("case", case_params())
def test_a_memory_from_a_file_continues_as_the_text_to_the_last_bit(case: str, tmp_path: Path) -> None:
    check_continues(model(case), tmp_path, LENGTHS)


@pytest.mark.parametrize("case", OUTSIDE)
def test_memories_from_outside_the_package_too(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CASES, case, OUTSIDE[case])
    trained = model(case)
    check_continues(trained, tmp_path, LENGTHS[-2:])
    copy = tmp_path / "elsewhere.py"
    copy.write_text((EXAMPLES / "averages.py").read_text())
    block = json.loads(json.dumps(OUTSIDE[case]).replace(str(EXAMPLES / "averages.py"), str(copy)))
    moved = trained._replace(config=Config(memory=block, train=TrainConfig(seg_len=SEG_LEN)))
    assert load_memory(moved, tmp_path / f"{LENGTHS[-1]}.mem"), "a run keeps a copy of the file at another place"
    copy.write_text(copy.read_text() + "# another program\n")
    with refused(UnusableError, "dist_mem_outside_"):
        load_memory(moved, tmp_path / f"{LENGTHS[-1]}.mem")


def test_gpt2_with_its_token_types_and_blocks_too(tmp_path: Path) -> None:
    check_continues(gpt2(), tmp_path, [0, 7, 3 * gpt2_models.SEG_LEN + 5])
    check_continues(model("infinite", blocks=True), tmp_path, LENGTHS)


@pytest.mark.parametrize("case", case_params())
def test_one_lane_read_is_continued_in_five(case: str, tmp_path: Path) -> None:
    trained = model(case)
    memory = kept(trained, words(LENGTHS[-1]), tmp_path / "book.mem")
    five = select(memory.reading, [0] * 5)
    together = generate(trained, five, num_tokens=2 * SEG_LEN, sampling=SAMPLING)
    for lane, tokens in enumerate(together.tokens):
        alone = generate(trained, memory.reading, num_tokens=2 * SEG_LEN, sampling=SAMPLING, streams=[lane])
        assert torch.equal(alone.tokens[0], tokens)
    assert len({tuple(tokens.tolist()) for tokens in together.tokens}) == 5


def test_a_long_text_is_read_in_parts_as_at_once() -> None:
    trained, text = model("compressive"), words(70 * SEG_LEN + 3)
    whole = read(trained, start(trained), [trained.tokenizer.encode(text)])
    assert same_reading(read_text(trained, text).reading, whole)


def with_weight(trained: TrainedModel) -> TrainedModel:
    """The model after one more update."""
    with torch.no_grad():
        next(trained.model.parameters()).view(-1)[0] += 1e-6
    return trained._replace(checkpoint=Checkpoint(PLACE / "step-4", PLACE, {"step": 4}, []))


def in_bf16(trained: TrainedModel) -> TrainedModel:
    config = Config(memory=CASES["infinite"], train=TrainConfig(seg_len=SEG_LEN), eval=EvalConfig(precision="bf16"))
    return trained._replace(model=trained.model.bfloat16(), config=config, dtype=torch.bfloat16)


def sticky(trained: TrainedModel) -> TrainedModel:
    """The same weights with another option of the memory."""
    memory = {**CASES["infinite"], "sampling": "sticky"}
    return trained._replace(config=Config(memory=memory, train=TrainConfig(seg_len=SEG_LEN)))


OTHERS: dict[str, Callable[[TrainedModel], TrainedModel]] = {
    "another model": with_weight,
    "tokenizer": lambda t: t._replace(tokenizer=WordTokenizer([f"x{number}" for number in range(VOCAB - 1)])),
    "eval.precision=fp32": in_bf16,
    "eval.blocks=false": lambda t: t._replace(config=model("infinite", blocks=True).config),
    "memory.sampling": sticky,
}


@pytest.mark.parametrize("named", OTHERS)
def test_another_model_is_refused_with_what_differs_and_the_fix(named: str, tmp_path: Path) -> None:
    path = tmp_path / "book.mem"
    kept(model("infinite"), words(9), path)
    with refused(UnusableError, named, path, "dist-mem read TEXT --run runs/small -o"):
        load_memory(OTHERS[named](model("infinite")), path)


def header_of(path: Path) -> dict[str, Any]:
    content = path.read_bytes()
    (size,) = struct.unpack("<Q", content[:8])
    return dict(json.loads(content[8 : 8 + size]))


def with_header(path: Path, **changes: Any) -> None:
    """Write other values into the header, as another writer might, without a new SHA-256."""
    entry = json.loads(header_of(path)["__metadata__"]["dist_mem_memory"])
    save_file(load_file(path), path, {"dist_mem_memory": json.dumps({**entry, **changes})})


def diverged(path: Path, value: float) -> None:
    """Write a memory with one value that is not finite, and the SHA-256 of all of it."""
    found = read_memory_file(path)
    name = next(name for name, tensor in found.tensors.items() if tensor.is_floating_point())
    found.tensors[name].flatten()[-1] = value
    header = {key: value for key, value in found.header.items() if key not in ("format_version", "sha256")}
    write_memory_file(path, header, found.tensors)


WRONG: list[tuple[str, Callable[[Path], object]]] = [
    ("there is no", lambda path: path.unlink()),
    ("is not a memory file", lambda path: path.write_bytes(b"")),
    ("is not a memory file", lambda path: path.write_text("It was the best of times.\n" * 9)),
    ("cut short", lambda path: path.write_bytes(path.read_bytes()[:-1])),
    ("SHA-256", lambda path: flip(path, -1)),
    ("not a memory file", lambda path: save_file({"a": torch.zeros(1)}, path)),
    ("format_version", lambda path: save_file({"a": torch.zeros(1)}, path, {"dist_mem_memory": "[]"})),
    ("not JSON", lambda path: save_file({}, path, {"dist_mem_memory": "{"})),
    ("format_version 2", lambda path: with_header(path, format_version=2)),
    ("format_version 0", lambda path: with_header(path, format_version=0)),
    ("SHA-256", lambda path: with_header(path, texts=[])),
    ("finite", lambda path: diverged(path, float("nan"))),
    ("finite", lambda path: diverged(path, -float("inf"))),
]


def test_a_wrong_file_is_refused(tmp_path: Path) -> None:
    path, trained = tmp_path / "book.mem", model()
    for named, change in WRONG:
        kept(trained, words(9), path)
        change(path)
        with refused(UnusableError, path, "dist-mem read TEXT", named):
            load_memory(trained, path)


def test_every_changed_byte_is_noticed(tmp_path: Path) -> None:
    path, trained = tmp_path / "book.mem", model()
    kept(trained, words(9), path)
    content = path.read_bytes()
    for position in range(0, len(content), 5):
        flip(path, position)
        with pytest.raises(RunError):
            read_memory_file(path)
        path.write_bytes(content)
    assert read_memory_file(path).num_tokens == 9


def test_a_state_of_another_shape_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever settings and weights say: a memory from outside may have changed its state."""
    trained = model()
    memory = read_text(trained, words(9))
    wider = memory.reading.state._replace(types=(torch.zeros(1, 2),))
    save_memory(trained, memory._replace(reading=memory.reading._replace(state=wider)), tmp_path / "book.mem")
    with refused(UnusableError):
        load_memory(trained, tmp_path / "book.mem")


def test_wrong_arguments_are_refused_by_name(tmp_path: Path) -> None:
    trained: Any = model()
    memory, two = read_text(trained, "w1"), start(trained, 2)
    calls: list[tuple[type[Exception], str, Callable[[], object]]] = [
        (TypeError, "text", lambda: read_text(trained, b"w1")),  # type: ignore[arg-type]
        (TypeError, "after", lambda: read_text(trained, "w1", after=two)),  # type: ignore[arg-type]
        (TypeError, "memory", lambda: save_memory(trained, two, tmp_path / "a")),  # type: ignore[arg-type]
        (ValueError, "memory.reading", lambda: save_memory(trained, TextMemory(two, ()), tmp_path / "a")),
        (UnusableError, "cannot be written", lambda: save_memory(trained, memory, tmp_path)),
        (UnusableError, "cannot be written", lambda: save_memory(trained, memory, tmp_path / "no" / "a")),
        (UnusableError, "there is no", lambda: load_memory(trained, tmp_path)),
    ]
    for error, named, call in calls:
        with refused(error, named):
            call()
    assert not list(tmp_path.iterdir())


def test_the_file_is_plain_safetensors(tmp_path: Path) -> None:
    """Other programs can read it: tensors by the names of the state, and one entry of JSON."""
    trained = model("infinite over transformer_xl")
    reading: Reading = kept(trained, words(9), tmp_path / "book.mem").reading
    tensors = load_file(tmp_path / "book.mem")
    assert tensors.pop("open_segment").tolist() == reading.open_tokens[0, : int(reading.open_len)].tolist()
    assert all(name.startswith("blocks.") and len(part) == 1 for name, part in tensors.items())
    assert header_of(tmp_path / "book.mem")["__metadata__"].keys() == {"dist_mem_memory"}
    assert OmegaConf.create(read_memory_file(tmp_path / "book.mem").header).model.step == 3
