"""Generation and scores of texts with memory: equal to reading the document anew from its start, for every memory."""

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from dist_mem.config import Config, TrainConfig
from dist_mem.config.memory_blocks import PER_BLOCK
from dist_mem.contract.subject import VOCAB, CheckedMemory, SubjectSize
from dist_mem.data.shard import TokenizedDocument, read_index, write_split
from dist_mem.data.tokenizers.single_bytes import BytesTokenizer
from dist_mem.evaluation.scoring import EvaluationError, score_split
from dist_mem.evaluation.trained_model import TrainedModel, init_state, read_lanes
from dist_mem.generation.generate import Sampling, choose, draw_uniform, generate, kept_probabilities, likeliest_first
from dist_mem.generation.reading import ROW_STEP, next_log_probs, num_rows, read, select, start, start_from
from dist_mem.generation.text import TextWriter, distinct, measure, rep
from dist_mem.generation.text_scores import score
from dist_mem.memory import memory_class
from dist_mem.model import MemoryLM
from dist_mem.runtime.terminal import make_printable
from tests.support.contract_cases import CASES, SEG_LEN, case_params, memories_of
from tests.support.generating import (
    BOS,
    NUM_TOKENS,
    PROMPT_LENS,
    SAMPLING,
    check_reads_as_anew,
    float32_model,
    prompts,
    same_reading,
    trained_model,
)
from tests.support.messages import refused
from tests.support.paths import EXAMPLES
from tests.support.scored_library import ALONE

# The published rule takes the length of a segment into account, so that scores change when the segment is completed.
DEPENDS_ON_LENGTH = "lamemo, published window"
GREEDY = Sampling(temperature=0.0)
CUT_FROM_END = ["none", "infinite over causal", "infinite, sticky"]


@pytest.mark.parametrize(
    ("case", "cut"),
    [
        *(pytest.param(*case.values, "start", marks=case.marks) for case in case_params()),
        *((case, "end") for case in CUT_FROM_END),
    ],
)
def test_generation_equals_reading_the_document_anew_at_every_token(case: str, cut: str) -> None:
    """Whatever `data.cut` says: where a text ends is not known, so generation reads from its start."""
    check_reads_as_anew(trained_model(case, cut=cut))


@pytest.mark.parametrize("case", [case for case in case_params() if case.values[0] != DEPENDS_ON_LENGTH])
def test_whole_answers_are_those_that_greedy_generation_writes(tmp_path: Path, case: str) -> None:
    """Of answers that the generator wrote, and of the same with one other token."""
    trained, documents = trained_model(case), list[TokenizedDocument]()
    generator = torch.Generator().manual_seed(4)
    texts = [torch.randint(0, BOS, (length,), generator=generator) for length in range(1, 4 * SEG_LEN)]
    reading = read(trained, start(trained, len(texts)), texts)
    answers = generate(trained, reading, num_tokens=3, sampling=GREEDY, stop_ids=[BOS]).tokens
    for number, (prompt, answer) in enumerate(zip(texts, answers, strict=True)):
        if BOS in answer:  # which no document contains
            continue
        other = answer.clone()
        other[number % 3] = (other[number % 3] + 1) % BOS
        for name, end in (("right", answer), ("wrong", other)):
            tokens = torch.cat([prompt, end]).numpy().astype(np.uint16)
            mask = np.arange(len(tokens)) >= len(prompt)
            recall = mask.astype(np.int32)
            documents.append(TokenizedDocument(f"{name}{number}", "", None, 1, 1, tokens, mask=mask, recall=recall))
    print_of = trained.tokenizer.fingerprint
    write_split(documents, tmp_path / "test", name="tiny", split="test", tokenizer_fingerprint=print_of)
    report = score_split(
        trained.model,
        lambda documents: init_state(trained, torch.zeros_like(documents)),  # one draw for all, as `start` has
        config=trained.config,
        index=read_index(tmp_path / "test"),
        tokenizer=trained.tokenizer,
        world=ALONE,
    )
    assert documents and report.whole_answers == 0.5
    assert all((entry.hits == 3) == entry.id.startswith("right") for entry in report.documents)


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(), Sampling(top_p=0.95), Sampling(top_k=3)], ids=repr)
def test_nothing_is_written_from_log_probabilities_that_are_nan(sampling: Sampling) -> None:
    """They gave token 0, or an IndexError."""
    trained = float32_model()
    reading = read(trained, start(trained, 2), [[1, 2, 3], [4]])
    with torch.no_grad():
        next(trained.model.blocks[0].parameters()).fill_(torch.nan)
    with refused(EvaluationError, "nan", "the model has diverged"):
        generate(trained, reading, num_tokens=6, sampling=sampling)


@pytest.mark.parametrize("case", case_params())
def test_how_tokens_came_to_be_read_does_not_matter_to_the_last_bit(case: str) -> None:
    trained = trained_model(case, torch.float32)
    prompt = prompts()[-1]
    at_once = read(trained, start(trained), [prompt])
    piecewise = read(trained, start(trained), [prompt[:0]])
    for token in prompt:
        piecewise = read(trained, piecewise, [token[None]])
    assert same_reading(at_once, piecewise)
    written = generate(trained, at_once, num_tokens=NUM_TOKENS, sampling=SAMPLING)
    read_after = read(trained, start(trained), [torch.cat([prompt, written.tokens[0]])])
    assert same_reading(written.reading, read_after)
    assert torch.equal(next_log_probs(trained, written.reading), next_log_probs(trained, read_after))
    assert same_reading(at_once, read(trained, start(trained), [prompt])), "generation has changed its argument"


def shapes_of_forwards(trained: TrainedModel) -> list[tuple[int, ...]]:
    """The shape of the tokens of every later forward of a model."""
    shapes: list[tuple[int, ...]] = []
    trained.model.embedding.register_forward_hook(lambda _, inputs, __: shapes.append(tuple(inputs[0].shape)))
    return shapes


def test_a_token_costs_one_forward_where_a_memory_cannot_step() -> None:
    trained = trained_model("block_recurrent")
    reading = read(trained, start(trained, len(PROMPT_LENS)), prompts())
    shapes = shapes_of_forwards(trained)
    generate(trained, reading, num_tokens=NUM_TOKENS, sampling=SAMPLING)
    assert len(shapes) == NUM_TOKENS
    shapes.clear()
    read(trained, start(trained, len(PROMPT_LENS)), prompts())
    assert len(shapes) == 3  # segments of the longest prompt that are complete and behind it; the last stays open


@pytest.mark.parametrize(("case", "openings"), [("transformer_xl", 0), ("lamemo", 1)])
def test_a_token_costs_one_row_where_every_memory_can_step(case: str, openings: int) -> None:
    """Besides the open segment of the prompt, and one forward of every segment that is then complete.

    With a stem, every segment is opened by a forward of its first token.
    """
    trained = trained_model(case)
    reading = read(trained, start(trained, len(PROMPT_LENS)), prompts())
    shapes = shapes_of_forwards(trained)
    generate(trained, reading, num_tokens=NUM_TOKENS, sampling=SAMPLING)
    lanes, longest = len(PROMPT_LENS), int(reading.open_len.max())
    opened, steps = shapes[:openings], shapes[openings:]
    assert opened == [(lanes, 1)] * openings and steps[0] == (lanes, longest)
    assert steps.count((lanes, 1)) == NUM_TOKENS - 1
    segments = [shape for shape in steps[1:] if shape[1] == SEG_LEN]
    assert sum(num for num, _ in segments) == ((reading.open_len + NUM_TOKENS - 1) // SEG_LEN).sum()
    assert len(steps) == NUM_TOKENS + (1 + openings) * len(segments)


def test_a_lane_ends_with_a_stop_token_and_reads_no_more() -> None:
    trained = trained_model("lamemo")
    reading = read(trained, start(trained, len(PROMPT_LENS)), prompts())
    free = generate(trained, reading, num_tokens=NUM_TOKENS, sampling=SAMPLING)
    stop = int(free.tokens[0][4])
    stopped = generate(trained, reading, num_tokens=NUM_TOKENS, sampling=SAMPLING, stop_ids=[stop])
    lengths = []
    for lane, (tokens, prompt) in enumerate(zip(free.tokens, prompts(), strict=True)):
        ends = (tokens == stop).nonzero().flatten().tolist()
        expected = tokens[: ends[0] + 1] if ends else tokens
        lengths.append(len(expected))
        assert torch.equal(stopped.tokens[lane], expected)
        alone = read(trained, start(trained), [torch.cat([prompt, expected])])
        assert torch.equal(stopped.reading.open_tokens[lane], alone.open_tokens[0])
        assert stopped.reading.open_len[lane] == alone.open_len[0]
        torch.testing.assert_close(
            next_log_probs(trained, select(stopped.reading, [lane])), next_log_probs(trained, alone), rtol=0, atol=1e-10
        )
    assert min(lengths) < max(lengths)


def test_a_second_call_goes_on_where_the_first_ended() -> None:
    trained = trained_model("compressive")
    reading = read(trained, start(trained), [prompts()[-1]])
    hot = Sampling(temperature=10.0)  # so that another draw is another token
    whole = generate(trained, reading, num_tokens=10, sampling=hot)
    begin = generate(trained, reading, num_tokens=6, sampling=hot)
    end = generate(trained, begin.reading, num_tokens=4, sampling=hot, first_step=6)
    assert torch.equal(torch.cat([begin.tokens[0], end.tokens[0]]), whole.tokens[0])


def test_tokens_without_text_are_written_only_to_stop() -> None:
    trained = trained_model("none")
    reading = start(trained, 64)
    hot = Sampling(temperature=100.0)
    written = generate(trained, reading, num_tokens=8, sampling=hot)
    assert len(torch.cat(written.tokens).unique()) == VOCAB - 1 and BOS not in torch.cat(written.tokens)
    stopped = generate(trained, reading, num_tokens=8, sampling=hot, stop_ids=[BOS])
    assert any(tokens[-1] == BOS for tokens in stopped.tokens)


# Open segments have fewer than T rows where their memories take them.

LONG = 3 * ROW_STEP


def model_of(block: dict[str, Any]) -> MemoryLM:
    return (
        CheckedMemory(lambda _: block, SubjectSize(lanes=2, seg_len=LONG, segments=4, layers=3)).model().double().eval()
    )


def blocks() -> dict[str, dict[str, Any]]:
    """The cases of the contract tests whose memories compute less than T rows, in the options that fit this segment."""
    longest = {name: max(memory.min_seg_len for memory in memories_of(name)) for name in CASES}
    return {name: fitted(CASES[name]) for name, length in longest.items() if length < SEG_LEN}


def fitted(block: dict[str, Any]) -> dict[str, Any]:
    if block["kind"] == PER_BLOCK:
        return {name: part if name == "kind" else fitted(part) for name, part in block.items()}
    small = memory_class(block["kind"]).small_options
    return {**block, **dict(small(LONG).items() - small(SEG_LEN).items())}  # what depends on the length


@pytest.mark.parametrize("case", case_params(blocks()))
@torch.no_grad()
def test_fewer_rows_give_the_same_outputs(case: str) -> None:
    model = model_of(blocks()[case])
    generator = torch.Generator().manual_seed(1)
    state = model.init_state(torch.arange(2), "cpu", torch.float64)
    for number in range(5):  # from empty memories to full ones
        tokens = torch.randint(0, VOCAB, (2, LONG), generator=generator)
        for longest in (2, ROW_STEP, ROW_STEP + 1):
            valid_len = torch.tensor([longest, 1])
            rows = num_rows(model, longest)
            assert longest <= rows < LONG
            whole = model.features(tokens, valid_len, state=state).hidden
            short = model.features(tokens[:, :rows], valid_len, state=state).hidden
            for lane, length in enumerate(valid_len.tolist()):
                torch.testing.assert_close(short[lane, :length], whole[lane, :length], rtol=0, atol=1e-11)
        state = model.features(tokens, torch.tensor([LONG, LONG if number else 0]), state=state).state


def test_an_open_segment_has_as_many_rows_as_its_memory_takes() -> None:
    """As many as one compressed row takes; a memory gets whole segments unless it says otherwise."""
    rows = [
        num_rows(model_of({"kind": "none"}), length) for length in (1, ROW_STEP, ROW_STEP + 1, 2 * ROW_STEP + 1, LONG)
    ]
    assert rows == [ROW_STEP, ROW_STEP, 2 * ROW_STEP, LONG, LONG]
    compressive = {"kind": "compressive", "mem_len": LONG, "cmem_len": 4, "compression_rate": ROW_STEP + 1}
    blocks: list[tuple[dict[str, Any], int]] = [
        (compressive, 2 * ROW_STEP),
        ({"kind": "transformer_xl", "mem_len": LONG}, ROW_STEP),
        ({"kind": str(EXAMPLES / "averages.py:Averages")}, LONG),
        (CASES["infinite"], LONG),
        ({"kind": "rmt", "num_tokens": 2}, ROW_STEP),
        ({"kind": "rmt", "num_tokens": 3}, LONG),
    ]
    assert [num_rows(model_of(block), 1) for block, _ in blocks] == [expected for _, expected in blocks]


DRAWS = 20_000


def log_rows(*probabilities: float, count: int = 1) -> Tensor:
    return torch.tensor(probabilities, dtype=torch.float64).log().expand(count, -1)


@pytest.mark.parametrize("options", [{}, {"top_p": 0.8}, {"top_k": 3, "temperature": 0.7}])
def test_tokens_are_drawn_as_often_as_they_should_be(options: dict[str, float]) -> None:
    probabilities = (0.05, 0.4, 0.0, 0.25, 0.3)
    sampling = Sampling(**options)  # type: ignore[arg-type]
    expected = kept_probabilities(log_rows(*probabilities), sampling)[0]
    for streams, step in ((torch.arange(DRAWS), 3), (torch.zeros(DRAWS, dtype=torch.int64), torch.arange(DRAWS))):
        draw = draw_uniform(sampling, stream=streams, step=step)
        share = choose(log_rows(*probabilities, count=DRAWS), sampling, draw=draw).bincount(minlength=5) / DRAWS
        assert (share - expected).abs().max() < 5 * math.sqrt(0.25 / DRAWS)
        assert (share[expected == 0] == 0).all()


def test_a_draw_depends_on_seed_stream_and_step_alone() -> None:
    log_probs = torch.randn(6, 50, generator=torch.Generator().manual_seed(0)).log_softmax(-1)
    streams, sampling = torch.tensor([4, 0, 9, 2, 7, 1]), Sampling(top_p=0.9, seed=3)
    together = choose(log_probs, sampling, draw=draw_uniform(sampling, stream=streams, step=11))
    for lane in range(6):
        row = slice(lane, lane + 1)
        alone = choose(
            log_probs[row], sampling, draw=draw_uniform(sampling, stream=streams[row], step=torch.tensor([11]))
        )
        assert torch.equal(alone, together[row])
    same = log_probs[:1].expand(200, -1)
    draws = [
        choose(same, each, draw=draw_uniform(each, stream=torch.arange(200), step=step))
        for each, step in ((sampling, 0), (sampling, 1), (Sampling(top_p=0.9, seed=4), 0))
    ]
    assert not torch.equal(draws[0], draws[1]) and not torch.equal(draws[0], draws[2])


def test_every_lane_is_another_text_with_every_seed() -> None:
    """A second sample that ignored the seed was a text of its own in each row of lanes."""
    trained = trained_model("none")
    texts = []
    for seed in range(3):
        found = generate(trained, start(trained, 4), num_tokens=40, sampling=Sampling(temperature=1.5, seed=seed))
        texts += [tuple(lane.tolist()) for lane in found.tokens]
    assert len(set(texts)) == len(texts) == 12
    draws = [
        draw_uniform(Sampling(seed=seed), stream=torch.arange(6)[:, None], step=torch.arange(20))
        for seed in (-1, 0, 1, 2**40)
    ]
    assert len({tuple(lane.tolist()) for draw in draws for lane in draw}) == 4 * 6


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_tokens_are_ranked_as_by_a_stable_sort(dtype: torch.dtype) -> None:
    """Whatever the signs, with ties, zeros of both signs, tiny numbers and minus infinity, in lanes with a stride."""
    generator = torch.Generator().manual_seed(2)
    values = torch.randn(6, 2, 3000, generator=generator).to(dtype)[:, 0] * torch.logspace(-45, 38, 3000)
    values[1] = values[1].abs()
    values[2] = torch.randint(-3, 3, (3000,), generator=generator) * 0.5
    values[3, ::2] = -math.inf
    values[4] = torch.where(torch.arange(3000) % 3 == 0, 0.0, -0.0)
    assert torch.equal(likeliest_first(values), values.argsort(dim=-1, descending=True, stable=True))


def test_greedy_takes_the_likeliest_token() -> None:
    log_probs = torch.randn(8, 50, generator=torch.Generator().manual_seed(1))
    tokens = choose(log_probs, Sampling(temperature=0.0, top_k=3, top_p=0.1), draw=torch.rand(8))
    assert torch.equal(tokens, log_probs.argmax(-1))


def test_settings_without_meaning_are_refused() -> None:
    bad: dict[str, list[float]] = {
        "temperature": [-0.1, math.nan, math.inf],
        "top_k": [0, -1],
        "top_p": [0.0, 1.01, -1.0, math.nan],
        "seed": [2**63],
    }
    for name, values in bad.items():
        for value in values:
            with refused(ValueError, f"{name} is "):
                Sampling(**{name: value})  # type: ignore[arg-type]


def test_bytes_of_a_cut_character_wait_until_it_is_whole() -> None:
    writer = TextWriter(BytesTokenizer())
    parts = [writer.add(byte) for byte in "a\u20acb".encode()]
    assert parts == ["a", "", "", "\u20ac", "b"]
    assert [writer.add(byte) for byte in "\u20ac".encode()[:2]] == ["", ""]
    assert writer.end() == "\ufffd" and writer.text == "a\u20acb\ufffd"
    again = TextWriter(BytesTokenizer())
    assert "".join(map(again.add, b"\xffok")) + again.end() == BytesTokenizer().decode(list(b"\xffok")) == "\ufffdok"


def test_nothing_that_steers_a_terminal_is_printed() -> None:
    assert make_printable("a\n\tb \x1b[2J\x07\r\u20ac") == "a\n\tb \ufffd[2J\ufffd\ufffd\u20ac"


def test_repetition_by_hand() -> None:
    text = "the cat saw the cat and the dog"  # 8 words, 5 different; bigrams: 7, "the cat" twice
    assert rep(text, 1) == pytest.approx(1 - 5 / 8)
    assert rep(text, 2) == pytest.approx(1 - 6 / 7)
    assert rep(text, 3) == 0.0
    assert rep("a a a", 4) is None
    assert distinct([text], 1) == pytest.approx(5 / 8)
    assert distinct([text], 2) == pytest.approx(6 / 8)  # by words, not by bigrams
    assert distinct([text, "the cat"], 2) == pytest.approx(6 / 10)  # counted over both, none across their border
    assert distinct(["", "a"], 2) is None
    both = measure([text, "b b b", ""])
    assert both.rep[1] == pytest.approx((3 / 8 + 2 / 3) / 2)
    assert both.rep[4] == 0.0 and both.distinct[1] == pytest.approx(6 / 11)


DYADIC = (0.125, 0.5, 0.25, 0.125)  # exact in binary, so that p can be met exactly


SKEWED = (0.4, 0.3, 0.2, 0.1)


KEPT: list[tuple[tuple[float, ...], dict[str, float], list[float]]] = [
    (DYADIC, {"top_p": 0.5}, [0, 1, 0, 0]),  # the first token that reaches p, and nothing after it
    (DYADIC, {"top_p": 0.51}, [0, 2 / 3, 1 / 3, 0]),
    (DYADIC, {"top_p": 0.8}, [1 / 7, 4 / 7, 2 / 7, 0]),
    (DYADIC, {"top_p": 1e-9}, [0, 1, 0, 0]),
    (DYADIC, {"top_p": 1.0}, list(DYADIC)),
    (SKEWED, {"top_k": 2}, [4 / 7, 3 / 7, 0, 0]),
    (SKEWED, {"top_k": 9}, list(SKEWED)),
    ((0.25,) * 4, {"top_k": 2}, [0.5, 0.5, 0, 0]),
    (SKEWED, {"top_k": 2, "top_p": 0.55}, [1, 0, 0, 0]),  # the nucleus is of what top_k left: 0.4 of 0.7 is 0.57
    (SKEWED, {"top_p": 0.55}, [4 / 7, 3 / 7, 0, 0]),
    (SKEWED, {"temperature": 0.5}, [0.16 / 0.3, 0.09 / 0.3, 0.04 / 0.3, 0.01 / 0.3]),
    (SKEWED, {"temperature": 0.5, "top_p": 0.53}, [1, 0, 0, 0]),  # temperature comes first: without it, two tokens
    (SKEWED, {"temperature": 1e-12}, [1, 0, 0, 0]),
]


def test_temperature_top_k_and_nucleus_keep_what_they_say_in_this_order() -> None:
    for probabilities, options, expected in KEPT:
        found = kept_probabilities(log_rows(*probabilities), Sampling(**options))[0]  # type: ignore[arg-type]
        assert found.tolist() == pytest.approx(expected)
        assert ((found == 0) == (torch.tensor(expected) == 0)).all()


LENGTH = 3 * SEG_LEN + 2
SPLITS = [0, 1, SEG_LEN - 1, SEG_LEN, SEG_LEN + 1, 3 * SEG_LEN - 1, LENGTH]


def random_ids() -> np.ndarray:
    return np.random.default_rng(3).integers(0, BOS, LENGTH)


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.nan_to_num(-1.0), other.nan_to_num(-1.0))


@pytest.mark.parametrize("blocks", [False, True])
@pytest.mark.parametrize("case", case_params())
def test_a_text_scored_in_parts_scores_as_the_whole_to_the_last_bit(case: str, blocks: bool) -> None:
    """Issue 15: a continued text lost the tokens of the open segment, and BOS was put before the rest."""
    trained, tokens = float32_model(case, blocks=blocks), random_ids()
    whole = score(trained, tokens)
    assert whole.nll.shape == (LENGTH,)
    assert whole.nll.isnan().sum() == (4 if blocks else 0), "the first token of a block has no score"
    for split in SPLITS:
        first = score(trained, tokens[:split])
        rest = score(trained, tokens[split:], after=first.reading)
        assert same(rest.nll, whole.nll[split:]), split
        num_same = split if case != DEPENDS_ON_LENGTH else split // SEG_LEN * SEG_LEN
        assert same(first.nll[:num_same], whole.nll[:num_same]), split
        assert same_reading(rest.reading, whole.reading)
        assert same_reading(first.reading, read(trained, start(trained), [tokens[:split]]))
    if case == DEPENDS_ON_LENGTH:
        return
    reading, parts = start(trained), []
    for token in tokens:
        scores = score(trained, [token], after=reading)
        reading = scores.reading
        parts.append(scores.nll)
    assert same(torch.cat(parts), whole.nll)


def test_a_text_is_encoded_and_may_be_empty() -> None:
    trained = float32_model()
    assert score(trained, "").nll.shape == (0,)
    assert score(trained, "w3 w1").tokens.tolist() == trained.tokenizer.encode("w3 w1").tolist()
    assert score(trained, "w3 w1", after=score(trained, "").reading).nll.shape == (2,)


@pytest.mark.parametrize("blocks", [False, True])
def test_a_bare_memory_goes_on_at_the_border_of_a_segment(blocks: bool) -> None:
    """A memory alone has no open segment: without blocks the next one begins with the last token read."""
    trained, tokens = float32_model(blocks=blocks), random_ids()
    border = 2 * SEG_LEN
    inputs = tokens[:border] if blocks else np.concatenate(([BOS], tokens[: border - 1]))
    state = init_state(trained)
    for begin in (0, SEG_LEN):
        part = torch.as_tensor(inputs[begin : begin + SEG_LEN])[None]
        full = torch.tensor([SEG_LEN])
        state = trained.model.features(part, full, state=state).state
    begun = start_from(trained, state, None if blocks else [tokens[border - 1]])
    rest = score(trained, tokens[border:], after=begun)
    assert same(rest.nll, score(trained, tokens).nll[border:])


def test_wrong_arguments_are_refused_by_name() -> None:
    """Issue 15: a text in place of ids failed inside NumPy."""
    t: Any = float32_model()
    one, two, state = start(t), start(t, 2), init_state(t, [0, 1])
    greedy: dict[str, Any] = {"num_tokens": 1, "sampling": GREEDY}
    shorter = t._replace(config=Config(train=TrainConfig(seg_len=SEG_LEN - 1)))
    no_rows: list[Any] = ["hello", b"hello", 3, ["hello"], [[0.5, 1.0]], np.array([1, 2])]
    wrong_rows: list[Any] = [[[1], [2]], [], [[[1, 2]]], [np.array([[1]])], [[1, VOCAB]], [np.array([-1])]]
    wrong: list[tuple[type[Exception], str, Callable[[], object]]] = [
        *((TypeError, "tokens", partial(read, t, one, tokens)) for tokens in no_rows),
        *((ValueError, "tokens", partial(read, t, one, tokens)) for tokens in wrong_rows),
        (TypeError, "text", lambda: score(t, b"w1")),
        (ValueError, "text", lambda: score(t, [VOCAB])),
        (ValueError, "after has 2 lanes", lambda: score(t, "w1", after=two)),
        (ValueError, "after is a reading in segments of", lambda: score(shorter, "w1", after=one)),
        (TypeError, "start_from", lambda: score(t, "w1", after=state)),  # type: ignore[arg-type]
        (TypeError, "trained", lambda: score("runs/demo", "w1")),  # type: ignore[arg-type]
        (TypeError, "reading", lambda: read(t, "w1", [])),  # type: ignore[arg-type]
        (TypeError, "num_lanes", lambda: start(t, "w1")),  # type: ignore[arg-type]
        (ValueError, "num_lanes", lambda: start(t, 0)),
        (TypeError, "document_ids", lambda: init_state(t, 3)),  # type: ignore[arg-type]
        (TypeError, "document_ids", lambda: init_state(t, ["a"])),  # type: ignore[list-item]
        (TypeError, "lane_ids", lambda: read_lanes(t, 3)),  # type: ignore[arg-type]
        (TypeError, "reading", lambda: next_log_probs(t, "w1")),  # type: ignore[arg-type]
        (TypeError, "reading", lambda: generate(t, "w1", **greedy)),  # type: ignore[arg-type]
        (TypeError, "num_tokens", lambda: generate(t, one, num_tokens="5", sampling=GREEDY)),  # type: ignore[arg-type]
        (ValueError, "num_tokens", lambda: generate(t, one, num_tokens=-1, sampling=GREEDY)),
        (TypeError, "sampling", lambda: generate(t, one, num_tokens=1, sampling=0.8)),  # type: ignore[arg-type]
        (ValueError, "stop_ids", lambda: generate(t, one, stop_ids=[VOCAB], **greedy)),
        (ValueError, "streams", lambda: generate(t, one, streams=[1, 2], **greedy)),
        (TypeError, "temperature", lambda: Sampling(temperature="0.8")),  # type: ignore[arg-type]
        (ValueError, "last_tokens", lambda: start_from(t, state)),
        (ValueError, "last_tokens", lambda: start_from(t, state, [3])),
        (ValueError, "last_tokens", lambda: start_from(float32_model(blocks=True), state, [3, 4])),
        (ValueError, "", lambda: start_from(float32_model("none"), init_state(float32_model("none")), [3])),
    ]
    for error, name, call in wrong:
        with refused(error, name):
            call()
