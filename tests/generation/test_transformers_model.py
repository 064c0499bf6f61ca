"""An export for Hugging Face's transformers: our figures, our memories, our ids, and the same model back."""

import copy
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from dist_mem.__main__ import main
from dist_mem.data.tokenizers.sentencepiece import train_pieces
from dist_mem.datasets.builder import build_dataset
from dist_mem.datasets.source import SourceDocument
from dist_mem.evaluation.export import run as export
from dist_mem.evaluation.scores import DocumentScore, Report
from dist_mem.evaluation.trained_model import TrainedModel, init_state, load_model
from dist_mem.generation.reading import read, start_from
from dist_mem.generation.text_scores import score
from dist_mem.memory.base import named_tensors
from tests.support.contract_cases import CASES, SEG_LEN, case_params
from tests.support.jobs import write_config
from tests.support.messages import refused
from tests.support.paths import EXAMPLES
from tests.support.remote_code import open_hub
from tests.support.saved_reports import save_report

transformers: Any = pytest.importorskip("transformers", reason="transformers is not installed")
pytestmark = pytest.mark.usefixtures("own_modules")
VOCAB = 257  # of bytes
TEXT = "It was the best of times, it was the worst of times."
MODELS: dict[str, dict[str, Any]] = {
    "adaptive": {"model": {"adaptive": {"cutoffs": [100, 200], "div_val": 2}}},
    "post-norm, untied": {"model": {"norm": "post", "tie_embeddings": False}},
    "clamped": {"model": {"clamp_len": 5, "same_length": True, "d_head": 4}},
    "blocks": {"data": {"blocks": True}},
}
CLOSE = {"rtol": 0, "atol": 1e-5}


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory, books: Path) -> Callable[..., Path]:
    """Returns the folder of an untrained model with large weights, made once."""
    root, made = tmp_path_factory.mktemp("models"), dict[str, Path]()

    def folder(case: str, variant: str = "") -> Path:
        name = re.sub(r"\W+", "_", f"{case} {variant}")
        if name not in made:
            changes = {"model": {"init_std": 0.3}, "train": {"seg_len": SEG_LEN}}, MODELS.get(variant, {})
            config = write_config(root / f"{name}.yaml", books, root / name, *changes, memory=CASES[case])
            assert export(config, out=root / name, layout="transformers") == 0
            made[name] = root / name
        return made[name]

    return folder


def random_ids(lanes: int, length: int) -> Tensor:
    return torch.randint(VOCAB - 1, (lanes, length), generator=torch.Generator().manual_seed(5))


@torch.no_grad()
def by_segments(trained: TrainedModel, ids: Tensor) -> tuple[Tensor, Any]:
    """Our log-probabilities of complete and open segments, (B, L, V), and the memory after the complete ones."""
    state, found = init_state(trained, [0] * len(ids)), []
    for part in ids.split(SEG_LEN, dim=1):
        length = part.shape[1]
        padded, valid_len = F.pad(part, (0, SEG_LEN - length)), torch.full((len(ids),), length)
        log_probs, state = trained.model.log_probs(padded, valid_len, state=state)
        found.append(log_probs[:, :length])
    return torch.cat(found, dim=1), state


def padded_left(rows: list[Tensor]) -> dict[str, Tensor]:
    length = max(map(len, rows))
    ids = torch.stack([F.pad(row, (length - len(row), 0), value=VOCAB - 1) for row in rows])
    mask = torch.stack([F.pad(torch.ones_like(row), (length - len(row), 0)) for row in rows])
    return {"input_ids": ids, "attention_mask": mask}


def check_figures(folder: Path) -> None:
    """In one call, in calls of any length, and in a batch of texts of other lengths; the memories are ours."""
    model, trained = open_hub(folder), load_model(folder)
    for (name, ours), theirs in zip(trained.model.state_dict().items(), model.model.state_dict().values(), strict=True):
        assert torch.equal(ours, theirs), name
    ids = random_ids(2, 5 * SEG_LEN + 3)
    expected, state = by_segments(trained, ids)
    cache, parts = None, []
    with torch.no_grad():
        torch.testing.assert_close(model(ids).logits, expected, **CLOSE)
        for part in ids.split([1, 2 * SEG_LEN, 3, 2, 3 * SEG_LEN - 3], dim=1):
            output = model(part, past_key_values=cache)
            cache = output.past_key_values
            parts.append(output.logits)
        rows = [ids[0, : 2 * SEG_LEN + 1], ids[1], ids[0, :1], ids[1, : 3 * SEG_LEN]]
        together = model(**padded_left(rows)).logits
        alone = [model(row[None]).logits[0] for row in rows]
    for row, logits in zip(together, alone, strict=True):
        torch.testing.assert_close(row[len(row) - len(logits) :], logits, **CLOSE)
    if "published_window" not in folder.name:  # there, figures of an open segment change when it is completed
        torch.testing.assert_close(torch.cat(parts, dim=1), expected, **CLOSE)
    found = named_tensors(cache.reading.state)
    for name, tensor in named_tensors(state).items():
        torch.testing.assert_close(found[name], tensor, msg=name, **CLOSE)


@pytest.mark.parametrize("case", case_params())
def test_figures_and_memories_are_ours(exported: Callable[..., Path], case: str) -> None:
    check_figures(exported(case))


@pytest.mark.parametrize("variant", MODELS)
def test_figures_of_every_kind_of_model_are_ours(exported: Callable[..., Path], variant: str) -> None:
    check_figures(exported("transformer_xl", variant))


GREEDY = {"do_sample": False, "eos_token_id": None, "output_logits": True, "return_dict_in_generate": True}


@pytest.mark.parametrize("case", ["compressive", "transformer_xl"])
def test_prompts_of_several_lengths_are_continued_as_each_alone_with_its_memory(
    exported: Callable[..., Path], case: str
) -> None:
    """Every token is read once, and its figures are those of the whole text read at once."""
    model = open_hub(exported(case))
    long, short = random_ids(1, 4 * SEG_LEN + 1)[0], random_ids(1, 2)[0]
    widths: list[int] = []
    hook = model.register_forward_pre_hook(
        lambda _, __, given: widths.append(given["input_ids"].shape[1]), with_kwargs=True
    )
    together = model.generate(**padded_left([long, short]), max_new_tokens=2 * SEG_LEN, **GREEDY)
    hook.remove()
    assert widths == [len(long)] + [1] * (2 * SEG_LEN - 1)
    for lane, prompt in enumerate([long, short]):
        new = together.sequences[lane, len(long) :]
        alone = model.generate(prompt[None], max_new_tokens=2 * SEG_LEN, **GREEDY).sequences
        assert torch.equal(alone[0, len(prompt) :], new)
        with torch.no_grad():
            again = model(torch.cat([prompt, new])[None]).logits[0, len(prompt) - 1 : -1]
        torch.testing.assert_close(torch.stack(together.logits)[:, lane], again, **CLOSE)


@torch.no_grad()
def test_a_token_is_one_row_of_the_model_and_a_copied_cache_goes_on_by_itself(exported: Callable[..., Path]) -> None:
    model, ids = open_hub(exported("linear")), random_ids(2, 4 * SEG_LEN + 1)
    whole, begun = model(ids).logits, SEG_LEN + 2
    cache = model(ids[:, :begun]).past_key_values
    rows: list[int] = []
    hook = model.model.embedding.register_forward_hook(lambda _, inputs, __: rows.append(inputs[0].shape[1]))
    for place in range(begun, 3 * SEG_LEN):
        logits = model(ids[:, place : place + 1], past_key_values=cache).logits
        torch.testing.assert_close(logits[:, 0], whole[:, place], **CLOSE)
    hook.remove()
    assert sum(rows) == 3 * SEG_LEN - begun + 2 + SEG_LEN  # the tokens, those open before, and a complete segment
    copied = copy.deepcopy(cache)
    model(ids[:, :1], past_key_values=cache)
    for past, first in ((copied, 3 * SEG_LEN), (copied, 3 * SEG_LEN + 1)):
        logits = model(ids[:, first : first + 1], past_key_values=past).logits
        torch.testing.assert_close(logits[:, 0], whole[:, first], **CLOSE)
    assert copied.get_seq_length() == cache.get_seq_length() + 1


def test_a_cache_that_was_read_with_gradient_keeps_no_graph_and_can_be_copied(exported: Callable[..., Path]) -> None:
    output = open_hub(exported("linear"))(random_ids(1, 2 * SEG_LEN + 1))
    assert output.logits.requires_grad
    copied = copy.deepcopy(output.past_key_values)
    for cache in (output.past_key_values, copied):
        assert not any(tensor.requires_grad for tensor in named_tensors(cache.reading.state).values())


def test_every_beam_has_its_own_memory(exported: Callable[..., Path]) -> None:
    """The score of a beam is that of its text read from the start."""
    model, num_new = open_hub(exported("transformer_xl")), 2 * SEG_LEN
    ids = random_ids(2, SEG_LEN + 1)
    options = {"num_beams": 3, "num_return_sequences": 3, "length_penalty": 0.0, "output_scores": True}
    found = model.generate(ids, max_new_tokens=num_new, **{**GREEDY, **options})
    assert len(set(map(tuple, found.sequences.tolist()))) == 6
    with torch.no_grad():
        log_probs = model(found.sequences).logits[:, ids.shape[1] - 1 : -1]
    scores = log_probs.gather(2, found.sequences[:, ids.shape[1] :, None]).sum(dim=(1, 2))
    torch.testing.assert_close(found.sequences_scores, scores, rtol=0, atol=1e-4)


def test_a_reading_of_dist_mem_goes_on_in_transformers(exported: Callable[..., Path]) -> None:
    """Also what was read in transformers, given whole as is usual there; a copied cache is another one."""
    model = open_hub(exported("lamemo"))
    ids = random_ids(1, 5 * SEG_LEN + 2)
    empty = start_from(model.trained, init_state(model.trained), [int(ids[0, 0])])
    cache_class = type(model(ids[:, :1]).past_key_values)
    reading = read(model.trained, empty, [ids[0, 1 : 3 * SEG_LEN]])
    with torch.no_grad():
        whole = model(ids).logits
        cache = model(ids[:, : 3 * SEG_LEN]).past_key_values
        kept = copy.deepcopy(cache)
        for past in (cache_class(reading), cache, kept):
            rest = model(ids[:, 3 * SEG_LEN :], past_key_values=past, use_cache=False).logits
            torch.testing.assert_close(rest, whole[:, 3 * SEG_LEN :], **CLOSE)
    expected = model.generate(ids, max_new_tokens=3, **GREEDY).sequences
    assert torch.equal(model.generate(ids, past_key_values=cache, max_new_tokens=3, **GREEDY).sequences, expected)
    assert cache.get_seq_length() == ids.shape[1] + 2
    assert kept.get_seq_length() == 3 * SEG_LEN
    for length in (3 * SEG_LEN, SEG_LEN):  # nothing new
        with refused(ValueError, "past_key_values", "input_ids", f"{3 * SEG_LEN}"):
            model.generate(ids[:, :length], past_key_values=kept, max_new_tokens=1, **GREEDY)
    with refused(ValueError, "input_ids"):
        model(ids.repeat(2, 1), past_key_values=cache)
    with refused(ValueError, "cannot be cropped"):
        cache.crop(1)


def scored(rows: list[Tensor], side: str) -> dict[str, Tensor]:
    """A batch of texts padded on one side, all of whose tokens are labels, padding among them."""
    given = padded_left(rows)
    if side == "right":
        for row, text in enumerate(rows):
            given = {name: part.clone() for name, part in given.items()}
            for part in given.values():
                part[row] = part[row].roll(len(text) - part.shape[1])
    return {**given, "labels": given["input_ids"]}


@pytest.mark.parametrize("side", ["left", "right"])
def test_the_loss_of_a_batch_is_that_of_its_texts(exported: Callable[..., Path], side: str) -> None:
    """Wherever the padding is, every text has the labels that it has alone; the same holds for chosen columns."""
    model = open_hub(exported("transformer_xl"))
    rows = [random_ids(1, length)[0] for length in (2, 3 * SEG_LEN + 1, SEG_LEN)]
    with torch.no_grad():
        together = model(**scored(rows, side))
        losses = [float(model(row[None], labels=row[None]).loss) * (len(row) - 1) for row in rows]
        assert float(together.loss) == pytest.approx(sum(losses) / sum(len(row) - 1 for row in rows), abs=1e-5)
        columns = torch.tensor([-1, 3, 0, together.logits.shape[1] - 2])
        part = model(**scored(rows, side), logits_to_keep=columns)
        assert torch.equal(part.logits, together.logits[:, columns])
        newest = model(**scored(rows, side), logits_to_keep=5)
        assert torch.equal(newest.logits, together.logits[:, -5:])
        same = model(**scored(rows, side), logits_to_keep=torch.arange(-5, 0))
        assert newest.loss.equal(same.loss) and not newest.loss.equal(together.loss)


def test_a_folder_for_transformers_is_an_export_of_the_same_weights(
    exported: Callable[..., Path], tmp_path: Path
) -> None:
    folder = exported("infinite")
    assert export(folder, out=tmp_path / "ours") == 0
    ours, theirs = load_model(tmp_path / "ours"), load_model(folder)
    for (name, mine), other in zip(ours.model.state_dict().items(), theirs.model.state_dict().values(), strict=True):
        assert torch.equal(mine, other), name
    assert torch.equal(*(score(trained, "It was the best of times.").nll for trained in (ours, theirs)))


def test_the_card_and_the_tokenizer_of_a_folder(exported: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    folder = exported("transformer_xl")
    text = (folder / "README.md").read_text(encoding="utf-8")
    monkeypatch.chdir(folder.parent)
    (snippet,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    names: dict[str, Any] = {}
    exec(snippet, names)
    assert names["written"].shape == (1, 1 + len("It was the best of times,") + 50)
    for title in ("## Data", "## Metrics", "## Limits", "## Code"):
        assert title in text
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
    texts = ["a <s> \u2581b", "\u00e9t\u00e9 \n"]
    given = tokenizer(texts, padding=True, return_tensors="pt")
    ours = load_model(folder).tokenizer
    for row, mask, part in zip(given.input_ids, given.attention_mask, texts, strict=True):
        assert row[mask.bool()].tolist() == [ours.bos_id, *ours.encode(part).tolist()]
        assert tokenizer.decode(ours.encode(part)) == part


def test_a_memory_from_outside_runs_only_if_it_is_allowed(tmp_path: Path, books: Path) -> None:
    memory = {"kind": f"{EXAMPLES / 'averages.py'}:Averages"}
    config = write_config(tmp_path / "run.yaml", books, tmp_path / "run", memory=memory)
    assert export(config, out=tmp_path / "model", layout="transformers") == 0
    with refused(ValueError, "eval.allow_code"):
        open_hub(tmp_path / "model")
    assert open_hub(tmp_path / "model", allow_code=True)(random_ids(1, 3)).logits.shape == (1, 3, VOCAB)
    assert "`memory/` contains a program" in (tmp_path / "model" / "README.md").read_text(encoding="utf-8")


def test_a_tokenizer_without_a_fast_form_is_refused_and_nothing_is_written(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "book.txt").write_text(f"{TEXT}\n" * 9, encoding="utf-8")
    documents = [SourceDocument(id="1", title="t", source=tmp_path / "book.txt")]
    tokenizer = train_pieces([TEXT], vocab_size=280, model_type="unigram")
    build_dataset({"train": documents}, tmp_path / "data", name="x", tokenizer=tokenizer)
    config = write_config(tmp_path / "run.yaml", tmp_path / "data", tmp_path / "run")
    assert main(["export", str(config), "--out", str(tmp_path / "model"), "--format", "transformers"]) == 2
    assert "leave --format out" in capfd.readouterr().err
    assert not (tmp_path / "model").exists()


def test_the_card_has_the_figures_of_the_evaluations_made_before(exported: Callable[..., Path], tmp_path: Path) -> None:
    assert export(exported("none"), out=tmp_path / "first") == 0
    one = DocumentScore(id="1", title="t", nll=20.0, num_scored=10, words=5, bytes=40)
    report = Report("test", "data", "tokens", None, SEG_LEN, 0, 5, [one], [])
    save_report(report, tmp_path / "first" / "evaluations", "test-step-00000000")
    assert export(tmp_path / "first", out=tmp_path / "second", layout="transformers") == 0
    text = (tmp_path / "second" / "README.md").read_text(encoding="utf-8")
    assert "| test | 1 | 54.60 | 7.39 | 0.721 |" in text  # exp(20 / 5), exp(20 / 10), 20 / ln 2 / 40
