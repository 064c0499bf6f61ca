"""A memory file continues as the reading that was saved, bit for bit, for every memory; and its commands."""

import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf
from safetensors.torch import load_file, save_file

from dist_mem.__main__ import main
from dist_mem.config import Config, DataConfig, EvalConfig, TrainConfig
from dist_mem.contract.subject import VOCAB
from dist_mem.data.tokenizers.words import WordTokenizer
from dist_mem.errors import EXIT_DONE, EXIT_USAGE, RunError, UnusableError
from dist_mem.evaluation.memory_file import OPEN_SEGMENT, read_memory_file, write_memory_file
from dist_mem.evaluation.trained_model import Checkpoint, TrainedModel, load_model
from dist_mem.generation.generate import Sampling, generate
from dist_mem.generation.reading import Reading, next_log_probs, read, select, start
from dist_mem.generation.text_memory import Memory, read_text
from dist_mem.generation.text_scores import score
from dist_mem.runtime.locks import hold_file
from tests.support import gpt2_models
from tests.support.contract_cases import CASES, SEG_LEN, case_params, small_block
from tests.support.evaluated_runs import MEMORIES, make_run
from tests.support.faults import flip
from tests.support.generating import same_reading, trained_model
from tests.support.messages import refused, said
from tests.support.paths import EXAMPLES

LENGTHS = [0, 1, SEG_LEN - 1, SEG_LEN, SEG_LEN + 1, 3 * SEG_LEN + 2]
SAMPLING = Sampling(temperature=1.3, seed=5)
OUTSIDE = {
    "outside": small_block(f"{EXAMPLES / 'averages.py'}:Averages"),
    "infinite over outside": small_block("infinite", over=small_block(f"{EXAMPLES / 'averages.py'}:Averages")),
}
EMPTIED = "infinite, emptied at a threshold"
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


def kept(trained: TrainedModel, text: str, path: Path) -> Memory:
    """The memory of a text after a journey through a file."""
    read_text(trained, text, name="book.txt").save(path)
    return Memory.load(path)


def loaded(trained: TrainedModel, path: Path | str) -> Reading:
    return Memory.load(path).reading_of(trained)


def check_continues(trained: TrainedModel, folder: Path, lengths: list[int]) -> None:
    """The memory of a text in a file continues as the text itself."""
    for length in lengths:
        text, path = words(length), folder / f"{length}.mem"
        memory = kept(trained, text, path)
        before = read(trained, start(trained), [trained.tokenizer.encode(text)])
        reading = memory.reading_of(trained)
        assert same_reading(reading, before), length
        assert [(read.name, read.num_tokens) for read in memory.texts] == [("book.txt", length)]
        rest = words(2 * SEG_LEN + 1, seed=length)
        one, other = (score(trained, rest, after=reading) for reading in (reading, before))
        assert torch.equal(one.nll.nan_to_num(-1), other.nll.nan_to_num(-1))
        assert same_reading(one.reading, other.reading)
        if int(before.open_len):  # in blocks, nothing can be generated before the first token
            assert torch.equal(next_log_probs(trained, reading), next_log_probs(trained, before))
        memory.save(folder / "again.mem")
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
    assert loaded(moved, tmp_path / f"{LENGTHS[-1]}.mem"), "a run keeps a copy of the file at another place"
    copy.write_text(copy.read_text() + "# another program\n")
    with refused(UnusableError, "dist_mem_outside_"):
        loaded(moved, tmp_path / f"{LENGTHS[-1]}.mem")


def test_gpt2_with_its_token_types_and_blocks_too(tmp_path: Path) -> None:
    check_continues(gpt2(), tmp_path, [0, 7, 3 * gpt2_models.SEG_LEN + 5])
    check_continues(model("infinite", blocks=True), tmp_path, LENGTHS)


@pytest.mark.parametrize("case", case_params())
def test_one_lane_read_is_continued_in_five(case: str, tmp_path: Path) -> None:
    trained = model(case)
    reading = kept(trained, words(LENGTHS[-1]), tmp_path / "book.mem").reading_of(trained)
    five = select(reading, [0] * 5)
    together = generate(trained, five, num_tokens=2 * SEG_LEN, sampling=SAMPLING)
    for lane, tokens in enumerate(together.tokens):
        alone = generate(trained, reading, num_tokens=2 * SEG_LEN, sampling=SAMPLING, streams=[lane])
        assert torch.equal(alone.tokens[0], tokens)
    assert len({tuple(tokens.tolist()) for tokens in together.tokens}) == 5


def test_a_long_text_is_read_in_parts_as_at_once() -> None:
    trained, text = model("compressive"), words(70 * SEG_LEN + 3)
    whole = read(trained, start(trained), [trained.tokenizer.encode(text)])
    assert same_reading(read_text(trained, text).reading_of(trained), whole)


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
        loaded(OTHERS[named](model("infinite")), path)


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
    write_memory_file(path, found.header, found.tensors)


WRONG: list[tuple[str, Callable[[Path], object]]] = [
    ("there is no", lambda path: path.unlink()),
    ("is not a memory file", lambda path: path.write_bytes(b"")),
    ("is not a memory file", lambda path: path.write_text("It was the best of times.\n" * 9)),
    ("cut short", lambda path: path.write_bytes(path.read_bytes()[:-1])),
    ("SHA-256", lambda path: flip(path, -1)),
    ("not a memory file", lambda path: save_file({"a": torch.zeros(1)}, path)),
    ("format_version", lambda path: save_file({"a": torch.zeros(1)}, path, {"dist_mem_memory": "[]"})),
    ("not JSON", lambda path: save_file({}, path, {"dist_mem_memory": "{"})),
    ("not JSON", lambda path: save_file({}, path, {"dist_mem_memory": "[" * 10**5})),
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
            loaded(trained, path)


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


def test_a_state_of_another_shape_is_refused(tmp_path: Path) -> None:
    """Whatever settings and weights say: a memory from outside may have changed its state."""
    trained = model()
    memory = read_text(trained, words(9))
    reading = memory.reading_of(trained)
    wider = reading._replace(state=reading.state._replace(types=(torch.zeros(1, 2),)))
    Memory(memory.texts, read=(trained, wider)).save(tmp_path / "book.mem")
    with refused(UnusableError, "book.mem", "types.0"):
        loaded(trained, tmp_path / "book.mem")


def test_wrong_arguments_are_refused_by_name(tmp_path: Path) -> None:
    trained: Any = model()
    memory, two = read_text(trained, "w1"), start(trained, 2)
    calls: list[tuple[type[Exception], str, Callable[[], object]]] = [
        (TypeError, "text", lambda: read_text(trained, b"w1")),  # type: ignore[arg-type]
        (TypeError, "memory", lambda: read_text(trained, "w1", memory=two)),  # type: ignore[arg-type]
        (UnusableError, "cannot be written", lambda: memory.save(tmp_path)),
        (UnusableError, "cannot be written", lambda: memory.save(tmp_path / "no" / "a")),
        (UnusableError, "there is no", lambda: Memory.load(tmp_path)),
    ]
    for error, named, call in calls:
        with refused(error, named):
            call()
    assert not list(tmp_path.iterdir())


def test_the_file_is_plain_safetensors(tmp_path: Path) -> None:
    """Other programs can read it: tensors by the names of the state, and one entry of JSON."""
    trained = model("infinite over transformer_xl")
    reading = kept(trained, words(9), tmp_path / "book.mem").reading_of(trained)
    tensors = load_file(tmp_path / "book.mem")
    assert tensors.pop("open_segment").tolist() == reading.open_tokens[0, : int(reading.open_len)].tolist()
    assert all(name.startswith("blocks.") and len(part) == 1 for name, part in tensors.items())
    assert header_of(tmp_path / "book.mem")["__metadata__"].keys() == {"dist_mem_memory"}
    assert OmegaConf.create(read_memory_file(tmp_path / "book.mem").header).model.step == 3


BOOK = "It was the best of times, it was the worst of times. \u20ac\n" * 3
OPTIONS = ["--tokens", "20", "--seed", "3"]


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory, library: Path) -> Path:
    return make_run(tmp_path_factory.mktemp("read"), library, MEMORIES["infinite_over_transformer_xl"])[0]


@pytest.fixture
def book(tmp_path: Path) -> Path:
    (tmp_path / "book.txt").write_text(BOOK, encoding="utf-8")
    return tmp_path / "book.txt"


def read_book(book: Path, run_dir: Path, *options: str | Path) -> Path:
    """The memory file of a book, beside it."""
    out = book.with_suffix(".mem")
    assert main(["read", str(book), "--run", str(run_dir), "-o", str(out), *map(str, options)]) == EXIT_DONE
    return out


def ask(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> tuple[int, str, str]:
    capsys.readouterr()
    code = main(["generate", *map(str, arguments)])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.mark.parametrize("overrides", [[], ["eval.seg_len=4", "eval.mem_len=24"], ["eval.blocks=true"]])
def test_a_book_read_before_is_continued_as_one_that_is_read_now(
    run_dir: Path, book: Path, overrides: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    memory, out_file = read_book(book, run_dir, *overrides), book.with_name("texts.json")
    options = [*overrides, *OPTIONS, "--samples", "2"]
    assert f"{len(BOOK.encode())} tokens read" in capsys.readouterr().out
    code, out, err = ask(capsys, run_dir, "--memory", memory, *options, "--out", out_file)
    assert (code, f"{memory}: {len(BOOK.encode())} tokens read before" in err) == (EXIT_DONE, True)
    assert out == ask(capsys, run_dir, "--prompt-file", book, *options)[1]
    (written,) = json.loads(out_file.read_text(encoding="utf-8"))["continuations"]
    assert written["memory_file"] == str(memory) and len(set(written["texts"])) == 2
    further = book.with_name("both.txt")
    further.write_text(f"{BOOK}We had everything", encoding="utf-8")
    out = ask(capsys, run_dir, *overrides, "--memory", memory, "--prompt", "We had everything", *OPTIONS)[1]
    assert out == ask(capsys, run_dir, *overrides, "--prompt-file", further, *OPTIONS)[1]


def test_a_second_volume_is_read_after_the_first(run_dir: Path, book: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = read_book(book, run_dir)
    second = book.with_name("second.txt")
    second.write_text("It was the age of wisdom.\n", encoding="utf-8")
    both = read_book(second, run_dir, "--memory", first)
    expected = [("book.txt", len(BOOK.encode())), ("second.txt", second.stat().st_size)]
    assert [(text.name, text.num_tokens) for text in read_memory_file(both).texts] == expected
    whole = book.with_name("whole.txt")
    whole.write_text(BOOK + second.read_text(), encoding="utf-8")
    text = ask(capsys, run_dir, "--memory", both, *OPTIONS)[1]
    assert text == ask(capsys, run_dir, "--prompt-file", whole, *OPTIONS)[1]


def test_a_memory_that_another_command_continues_is_left_to_it(
    run_dir: Path, book: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two that read the same file and replace it would lose the text of one."""
    memory = read_book(book, run_dir)
    before = memory.read_bytes()
    with hold_file(memory):
        command = ["read", str(book), "--run", str(run_dir), "--memory", str(memory), "-o", str(memory)]
        assert main(command) == EXIT_USAGE
        said(capsys.readouterr().err, str(memory), "another command")
    assert memory.read_bytes() == before
    assert main(command) == EXIT_DONE
    assert len(read_memory_file(memory).texts) == 2


def test_an_export_and_a_moved_run_take_the_memory_of_their_run(
    run_dir: Path, book: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    memory = shutil.move(read_book(book, run_dir), tmp_path / "moved.mem")
    exported, copy = tmp_path / "exported", shutil.copytree(run_dir, tmp_path / "copy")
    assert main(["export", str(run_dir), "--out", str(exported)]) == EXIT_DONE
    texts = {ask(capsys, place, "--memory", memory, *OPTIONS)[1] for place in (run_dir, exported, copy)}
    assert len(texts) == 1
    trained = load_model(exported)
    reading = loaded(trained, memory)
    assert torch.equal(
        score(trained, "We had", after=reading).nll, score(load_model(run_dir), BOOK + "We had").nll[-6:]
    )
    assert read_book(book, exported).read_bytes() == Path(memory).read_bytes()


def test_show_says_what_is_in_it_without_the_run(
    run_dir: Path, book: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    moved = shutil.copytree(run_dir, tmp_path / "gone")
    memory = read_book(book, moved)
    shutil.rmtree(moved)
    capsys.readouterr()
    assert main(["memory", "show", str(memory)]) == EXIT_DONE
    shown = " ".join(capsys.readouterr().out.split())  # long lines are wrapped
    num_tokens = len(BOOK.encode())
    for part in (
        f"book.txt, {num_tokens} tokens, SHA-256 ",
        f"{num_tokens} tokens read; inputs of the open segment: {num_tokens % 8 + 1} ",
        *("step 3, SHA-256 of the weights ", "eval.seg_len = 8", "memory.over.kind = transformer_xl", " (verified)"),
    ):
        assert part in shown, shown
    flip(memory, -1)
    assert main(["memory", "show", str(memory)]) == EXIT_USAGE


def test_what_cannot_be_done_is_said_in_one_line(
    run_dir: Path, book: Path, tmp_path: Path, library: Path, capsys: pytest.CaptureFixture[str], single_process: None
) -> None:
    memory = read_book(book, run_dir)
    other, _ = make_run(tmp_path / "other", library, MEMORIES["transformer_xl"])
    (tmp_path / "latin1.txt").write_bytes("caf\u00e9".encode("latin-1"))
    out: list[str | Path] = ["-o", tmp_path / "new.mem"]
    absent: list[str | Path] = ["--memory", tmp_path / "no.mem"]
    cases: list[tuple[list[str | Path], str]] = [
        (["generate", other, "--memory", memory], "another model"),
        (["generate", run_dir, "eval.mem_len=24", "--memory", memory], "eval.mem_len=16"),
        (["generate", run_dir, "--memory", book], "book.txt"),
        (["generate", run_dir, *absent], "no.mem"),
        (["generate", run_dir], "--memory"),
        (["generate", "--compare", run_dir, other, "--memory", memory], "--compare"),
        (["evaluate", run_dir, *absent], "no.mem"),
        (["evaluate", run_dir, "--memory", memory, "--without-memory"], "--without-memory"),
        (["read", tmp_path / "latin1.txt", "--run", run_dir, *out], "latin1.txt"),
        (["read", book, "--run", run_dir, "model.d_model=8", *out], "model.d_model"),
        (["read", book, "--run", run_dir, *absent, *out], "no.mem"),
        (["read", book, "--run", other, "--memory", memory, *out], "another model"),
        (["memory", "show", book], "book.txt"),
    ]
    for arguments, named in cases:
        capsys.readouterr()
        code = main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        assert (code, captured.out, captured.err.count("\n")) == (EXIT_USAGE, "", 1), (arguments, captured.err)
        said(captured.err, named)
    assert not (tmp_path / "new.mem").exists()


@pytest.mark.parametrize("case", [*case_params(), EMPTIED])
def test_a_count_that_no_reading_leaves_is_refused_whatever_the_hash(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file says how much was read, so every other value of a count, also a smaller one, is not what it says."""
    monkeypatch.setitem(CASES, EMPTIED, small_block("infinite", memory_threshold=2 * SEG_LEN + 1))
    trained, path = model(case), tmp_path / "book.mem"
    for length in (SEG_LEN - 2, 3 * SEG_LEN + 2, 9 * SEG_LEN):  # before, while and after memories fill
        kept(trained, words(length), path)
        found = read_memory_file(path)
        assert loaded(trained, path)
        for name, tensor in found.tensors.items():
            if tensor.dtype != torch.int64 or name == OPEN_SEGMENT:
                continue
            for value in (tensor - 1, tensor + 1, torch.full_like(tensor, -5), torch.full_like(tensor, 10**9)):
                write_memory_file(path, found.header, {**found.tensors, name: value})
                if name.endswith("document") and value >= 0:
                    assert loaded(trained, path), "any document may be read"
                    continue
                with pytest.raises(UnusableError, match=rf"{name} is .* after {length} tokens: read the text again"):
                    loaded(trained, path)


def test_an_open_segment_of_another_length_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "book.mem"
    kept(model(), words(9), path)
    found = read_memory_file(path)
    for inputs in (found.tensors[OPEN_SEGMENT][:-1], torch.zeros(SEG_LEN + 1, dtype=torch.int64)):
        write_memory_file(path, found.header, {**found.tensors, OPEN_SEGMENT: inputs})
        with refused(UnusableError, path, OPEN_SEGMENT, "dist-mem read TEXT"):
            loaded(model(), path)


def test_a_text_of_more_tokens_than_any_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "book.mem"
    kept(model(), words(9), path)
    found = read_memory_file(path)
    texts = [{**text, "num_tokens": 2**62} for text in found.header["texts"]]
    write_memory_file(path, {**found.header, "texts": texts}, found.tensors)
    with refused(UnusableError, path, "texts[0].num_tokens"):
        loaded(model(), path)
