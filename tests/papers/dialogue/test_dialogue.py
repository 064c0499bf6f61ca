"""Replies of a model: written to the gold history alone, compared with the right ones, leaked conversations apart."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dist_mem.__main__ import main
from dist_mem.data.shard import read_index
from dist_mem.datasets.builder import build_dataset
from dist_mem.datasets.source import SourceDocument
from dist_mem.errors import EXIT_DONE, UnusableError
from dist_mem.evaluation import evaluate, job
from dist_mem.evaluation.memory_file import read_memory_file
from dist_mem.evaluation.trained_model import TrainedModel, load_model
from dist_mem.generation.generate import Sampling, generate
from dist_mem.generation.reading import Reading, read, start
from dist_mem.generation.text_memory import read_text
from dist_mem.papers.dialogue import score_replies as command
from dist_mem.papers.dialogue.metrics import DEBIAN_FOLDER, METRICS, f1, make_scorer, mean_scores, open_wordnet
from dist_mem.papers.dialogue.replies import (
    LEAKED,
    Answer,
    Conversation,
    Reply,
    answer_all,
    choose_replies,
    read_conversations,
)
from dist_mem.papers.dialogue.score_replies import DialogueRequest
from dist_mem.runtime import progress
from tests.support.messages import refused
from tests.support.scored_library import SEG_LEN, TOKENIZER, make_config, make_model, save_weights

pytestmark = pytest.mark.usefixtures("single_process")

SAMPLING = Sampling(top_p=0.9, seed=4)
NUM_TOKENS = 12  # more than a segment
TURNS = [
    ["Hello there", "Hi", "How was the shark?", "It bit me in the leg", "Ouch", "Yes"],
    ["Yo", "Yo yo", "Good film", "I do not think so"],
    ["One", "Two"],
]


def source_document(number: int, turns: Sequence[str]) -> SourceDocument:
    text, spans = f"Title: Jaws {number}\n\n", []
    for place, turn in enumerate(turns):
        text += "AB"[place % 2] + ":"
        spans.append((len(text), len(text) + len(turn) + 2))
        text += f" {turn}\n"
    return SourceDocument(f"talk{number}", "Jaws" + LEAKED * (number == 1), text, scored=spans)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three conversations, the second one leaked."""
    out = tmp_path_factory.mktemp("talks")
    documents = [source_document(number, turns) for number, turns in enumerate(TURNS)]
    build_dataset({"test": documents}, out, name="talks", tokenizer=TOKENIZER)
    return out


@pytest.fixture
def conversations(library: Path) -> list[Conversation]:
    return read_conversations(read_index(library / "test"))


@pytest.fixture(scope="module")
def trained() -> TrainedModel:
    model, checkpoint = make_model().double(), None
    return TrainedModel(model, TOKENIZER, make_config(), checkpoint, torch.device("cpu"), torch.float64)  # type: ignore[arg-type]


def answers(
    trained: TrainedModel, conversations: Sequence[Conversation], *, num_lanes: int = 3, after: Reading | None = None
) -> list[Answer]:
    chosen = [conversation.replies for conversation in conversations]
    given: dict[str, Any] = {"num_lanes": num_lanes, "num_tokens": NUM_TOKENS, "sampling": SAMPLING, "after": after}
    found = answer_all(trained, conversations, chosen, **given)
    return sorted(found, key=lambda answer: (answer.conversation.number, answer.place))


def written_alone(trained: TrainedModel, answer: Answer, before: Reading, history: np.ndarray) -> str:
    """What the model writes that was only ever given the text up to the tag."""
    reading, streams = read(trained, before, [history]), [answer.conversation.number * 2**32 + answer.place.start]
    written = generate(trained, reading, num_tokens=NUM_TOKENS, sampling=SAMPLING, stop_ids=[10], streams=streams)
    return TOKENIZER.decode(written.tokens[0].numpy()).split("\n")[0].strip()


@pytest.mark.parametrize("num_lanes", [1, 2, 3])
def test_a_reply_is_written_from_all_that_stands_before_it_and_nothing_else(
    trained: TrainedModel, conversations: list[Conversation], num_lanes: int
) -> None:
    """Neither its reference and what follows, nor the conversations beside it."""
    found = answers(trained, conversations, num_lanes=num_lanes)
    assert [answer.reference for answer in found] == [turn for turns in TURNS for turn in turns]
    assert len({answer.text for answer in found}) > 8  # drawn from a model, each by numbers of its own
    for answer in found:
        conversation, place = answer.conversation, answer.place
        assert TOKENIZER.decode(conversation.tokens[place.start : place.stop]) == f" {answer.reference}\n"
        assert place.start > SEG_LEN  # so there is a memory
        beginning = start(trained, document_ids=[conversation.number])
        assert answer.text == written_alone(trained, answer, beginning, conversation.tokens[: place.start].copy())


def test_conversations_continue_what_was_read_before(trained: TrainedModel, conversations: list[Conversation]) -> None:
    text = TOKENIZER.encode("A shark eats a swimmer.\n")
    found = answers(trained, conversations, after=read(trained, start(trained), [text]))
    for answer in found:
        history = np.concatenate([text, answer.conversation.tokens[: answer.place.start]])
        assert answer.text == written_alone(trained, answer, start(trained), history)
    assert {answer.text for answer in found} != {answer.text for answer in answers(trained, conversations)}


def test_chosen_replies_are_spread_over_the_conversation() -> None:
    replies = [Reply(number, number + 1) for number in range(12)]
    assert choose_replies(replies, first=2, num_chosen=None) == replies[2:]
    assert choose_replies(replies, first=2, num_chosen=2) == [replies[4], replies[9]]
    assert choose_replies(replies, first=2, num_chosen=99) == replies[2:]
    assert choose_replies(replies[:2], first=2, num_chosen=3) == []


@pytest.fixture
def run_dir(library: Path, tmp_path: Path) -> Path:
    config = make_config(data={"path": str(library)}, model={"init_std": 0.3})
    save_weights(tmp_path / "run", make_model(), config, step=3)
    return tmp_path / "run"


def test_the_command_reports_leaked_conversations_apart(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    reported: dict[str, Any] = {}
    monkeypatch.setattr(job, "log_to_run", lambda config, **given: reported.update(given))
    monkeypatch.setattr(progress, "LINE_SECONDS", 0.0)
    assert command.run(run_dir, DialogueRequest(split="test"), overrides=["tracking.mlflow=true"]) == 0
    name = run_dir / "evaluations" / "dialogue-test-step-00000003"
    facts = json.loads(name.with_suffix(".json").read_text())
    assert facts["settings"]["wordnet"] is None
    groups = {group["name"]: group for group in facts["groups"]}
    assert {name: (group["num_conversations"], group["num_replies"]) for name, group in groups.items()} == {
        "all": (3, 6),  # from the third reply on
        "leaked": (1, 2),
        "others": (2, 4),
    }
    assert [(reply["conversation"], reply["turn"]) for reply in facts["replies"]] == [
        *[("talk0", turn) for turn in (3, 4, 5, 6)],
        *[("talk1", turn) for turn in (3, 4)],
    ]
    assert reported["metrics"]["test/dialogue_leaked_perplexity"] == groups["leaked"]["perplexity"]
    assert reported["step"] == 3
    assert f"  A: {TURNS[0][2]}\n> A: {facts['replies'][0]['reply']}".rstrip() in name.with_suffix(".txt").read_text()
    output = capsys.readouterr()
    assert "3 all" in output.out
    assert "scoring test: " in output.err and "writing replies: 6 of 6 replies" in output.err


def test_perplexity_is_that_of_evaluation_and_of_the_conversations_read(run_dir: Path) -> None:
    from dist_mem.evaluation.scores import perplexity, read_report

    assert evaluate.run(run_dir, split="test") == 0
    documents = read_report(run_dir / "evaluations" / "test-step-00000003.json").documents
    assert [document.num_scored for document in documents] == [sum(len(t) + 2 for t in turns) for turns in TURNS]
    assert command.run(run_dir, DialogueRequest(split="test", limit=2, turns=1, num_tokens=1)) == 0
    facts = json.loads((run_dir / "evaluations" / "dialogue-test-step-00000003-limit2-turns1-tokens1.json").read_text())
    expected = perplexity(sum(d.nll for d in documents[:2]), sum(d.num_scored for d in documents[:2]))
    assert facts["groups"][0]["perplexity"] == pytest.approx(expected, rel=1e-6)
    assert len(facts["replies"]) == 2


def test_other_settings_leave_the_files_and_figures_of_the_usual_ones_alone(
    run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reported: list[dict[str, float]] = []
    monkeypatch.setattr(job, "log_to_run", lambda config, **given: reported.append(given["metrics"]))
    folder, other = run_dir / "evaluations", tmp_path / "other"
    build_dataset({"test": [source_document(0, TURNS[0])]}, other, name="more talks", tokenizer=TOKENIZER)
    drawn = "-limit1-temperature0.5-top_p0.8-seed1"
    cases: list[tuple[DialogueRequest, list[str], str]] = [
        (DialogueRequest(split="test"), [], ""),
        (DialogueRequest(split="test", limit=1, turns=2, num_tokens=3), [], "-limit1-turns2-tokens3"),
        (DialogueRequest(split="test", limit=1, sampling=Sampling(0.5, top_p=0.8, seed=1)), [], drawn),
        (DialogueRequest(split="test", limit=1), ["eval.mem_len=24", "eval.seg_len=4"], "-T4-M24-limit1"),
        (
            DialogueRequest(split="test"),
            [f"data.path={other}"],
            f"-more_talks_{read_index(other / 'test').fingerprint[:6]}",
        ),
    ]
    for settings, overrides, tag in cases:
        before = {path: path.read_bytes() for path in folder.glob("*")}
        assert command.run(run_dir, settings, overrides=["tracking.mlflow=true", *overrides]) == 0
        name = f"dialogue-test-step-00000003{tag}"
        assert {path.name for path in folder.glob("*")} - {path.name for path in before} == {
            f"{name}.json",
            f"{name}.txt",
        }
        assert all(path.read_bytes() == content for path, content in before.items())
        assert f"test{tag}/dialogue_f1" in reported[-1]
        assert "test/dialogue_f1" in json.loads((folder / f"{name}.json").read_text())["metrics"]
    assert not set(reported[0]) & set(reported[1])


def test_conversations_are_read_whole_and_one_by_one_whatever_the_run_evaluates_by(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    quick = DialogueRequest(split="test", limit=2, turns=1, num_tokens=1)
    assert command.run(run_dir, quick) == 0
    path = run_dir / "evaluations" / "dialogue-test-step-00000003-limit2-turns1-tokens1.json"
    facts = json.loads(path.read_text())
    path.unlink()
    cut = ["eval.layout=stream", "eval.batch_size=2", "eval.max_document_len=9"]
    capsys.readouterr()
    assert command.run(run_dir, quick, overrides=cut) == 0
    assert json.loads(path.read_text()) == facts  # under the same name
    assert ", documents, top-p" in capsys.readouterr().out
    assert command.run(run_dir, quick, overrides=["eval.precision=bf16"]) == 0
    assert path.with_name("dialogue-test-step-00000003-bf16-limit2-turns1-tokens1.json").exists()


def test_blocks_which_leave_out_tokens_of_replies_are_refused(run_dir: Path) -> None:
    with refused(UnusableError, "eval.blocks"):
        command.run(run_dir, DialogueRequest(split="test"), overrides=["eval.blocks=true"])


def test_without_wordnet_the_command_says_what_to_install(
    run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("dist_mem.papers.dialogue.metrics.DEBIAN_FOLDER", tmp_path)
    assert command.run(run_dir, DialogueRequest(split="test", num_tokens=1)) == 0
    reported = capsys.readouterr().out
    assert "n/a" in reported
    assert "METEOR needs WordNet: apt-get install wordnet-base" in reported
    facts = json.loads((run_dir / "evaluations" / "dialogue-test-step-00000003-tokens1.json").read_text())
    assert facts["groups"][0]["scores"]["meteor"] is None


def test_a_folder_without_wordnet_is_said_before_anything_is_scored(
    run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "score_split", lambda *_: pytest.fail("scored before the folder was looked at"))
    with refused(UnusableError, "data.noun"):
        command.run(run_dir, DialogueRequest(split="test", wordnet=tmp_path))


def test_data_without_replies_are_refused(tmp_path: Path) -> None:
    build_dataset({"test": [SourceDocument("book", "Book", "Once.")]}, tmp_path / "data", name="b", tokenizer=TOKENIZER)
    config = make_config(data={"path": str(tmp_path / "data")}, model={"init_std": 0.3})
    save_weights(tmp_path / "run", make_model(), config, step=3)
    with refused(UnusableError, "document book has no replies"):
        command.run(tmp_path / "run", DialogueRequest(split="test"))


def test_the_command_continues_the_memory_and_writes_apart(
    run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file was read a second time for the replies, after hours of scoring: another one by then, or none."""
    trained, score = load_model(run_dir), command.score_split
    memory = read_text(trained, "A shark eats a swimmer.", name="film.txt")
    memory.save(tmp_path / "film.mem")
    tag = read_memory_file(tmp_path / "film.mem").tag
    arguments = ["dialogue", str(run_dir), "--split", "test", "--limit", "1", "--turns", "1", "--tokens", "3"]
    assert main(arguments) == EXIT_DONE

    def score_and_remove(*given: Any, **options: Any) -> Any:
        (tmp_path / "film.mem").unlink()
        return score(*given, **options)

    monkeypatch.setattr(command, "score_split", score_and_remove)
    assert main([*arguments, "--memory", str(tmp_path / "film.mem")]) == EXIT_DONE
    assert ", documents, after film.txt (23 tokens), top-p" in capsys.readouterr().out
    name = "dialogue-test-step-00000003-limit1-turns1-tokens3"
    before, after = (json.loads((run_dir / "evaluations" / f"{name}{end}.json").read_text()) for end in ("", f"-{tag}"))
    assert before["groups"][0]["perplexity"] != after["groups"][0]["perplexity"]
    assert "memory_file" not in before
    assert after["memory_file"]["texts"][0]["name"] == "film.txt"
    assert after["settings"]["memory"] == str(tmp_path / "film.mem")


LONG, SHORT = "big red mat sat", "mat"
needs_wordnet = pytest.mark.skipif(
    not (DEBIAN_FOLDER / "data.noun").exists(), reason="no WordNet: apt-get install wordnet-base"
)


@pytest.mark.parametrize(
    ("reply", "reference", "expected"),
    [
        ("The cat, sat!", "a cat sat down", 0.8),  # two of two and three words: no articles, no punctuation
        ("no no no", "no", 0.5),  # a word counts as often as it stands in both:
        ("no no", "no no yes", 0.8),
        ("the", "", 1.0),  # nothing is left of either
        ("cat", "the", 0.0),
        ("It's", "its", 1.0),
    ],
)
def test_f1_is_that_of_squad(reply: str, reference: str, expected: float) -> None:
    assert f1(reply, reference=reference) == pytest.approx(expected)


@pytest.mark.parametrize(("reply", "reference"), [(SHORT, LONG), (LONG, SHORT)])
def test_rouge_is_the_f_measure_and_not_recall(reply: str, reference: str) -> None:
    scores = make_scorer()(reply, reference)
    assert scores["rouge1"] == pytest.approx(2 * 1 * 0.25 / 1.25)  # precision and recall are 1 and 1/4
    assert scores["rougeL"] == scores["rouge1"]


def test_rouge_l_minds_the_order_and_both_take_stems() -> None:
    scores = make_scorer()("movies like people", "people like movie")
    assert scores["rouge1"] == pytest.approx(1.0)
    assert scores["rougeL"] == pytest.approx(1 / 3)


@needs_wordnet
def test_meteor_weighs_recall_nine_times_as_much_as_precision() -> None:
    """Banerjee and Lavie 2005, with NLTK's weights: P R / (0.9 P + 0.1 R), halved where one match is one chunk."""
    score = make_scorer()
    assert score(SHORT, LONG)["meteor"] == pytest.approx(0.5 * 0.25 / (0.9 + 0.1 * 0.25))  # all said is right
    assert score(LONG, SHORT)["meteor"] == pytest.approx(0.5 * 0.25 / (0.9 * 0.25 + 0.1))  # all that is right is said


@needs_wordnet
def test_meteor_finds_stems_and_synonyms() -> None:
    score = make_scorer()
    chunk = 1 - 0.5 * (1 / 4) ** 3  # four matches in one chunk
    assert score("the cinema was great", "the film was great")["meteor"] == pytest.approx(chunk)
    assert score("the films was great", "the film was great")["meteor"] == pytest.approx(chunk)
    assert (score("The Dog was great", "the film was great")["meteor"] or 1.0) < chunk


@needs_wordnet
def test_the_names_of_wordnets_files_are_in_its_order() -> None:
    wordnet = open_wordnet()
    words = ["dog.n.01", "time.n.01", "run.v.01", "rain.v.01", "good.a.01", "quickly.r.01"]
    names = ["noun.animal", "noun.event", "verb.motion", "verb.weather", "adj.all", "adv.all"]
    assert [wordnet.synset(word).lexname() for word in words] == names


def test_means_are_percent_over_replies() -> None:
    scores: list[dict[str, float | None]] = [dict.fromkeys(METRICS, 0.25), dict.fromkeys(METRICS, 0.75)]
    assert mean_scores(scores) == dict.fromkeys(METRICS, 50.0)
    assert mean_scores([]) == dict.fromkeys(METRICS)
