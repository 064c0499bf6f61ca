"""Reports and their comparison: figures by their definitions, tables and files."""

import itertools
import json
import math
import re
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dist_mem.config import load_config, save_config
from dist_mem.errors import UnusableError
from dist_mem.evaluation import compare
from dist_mem.evaluation.protocol import Protocol
from dist_mem.evaluation.scores import (
    MEASURES,
    Band,
    DocumentScore,
    RecallScore,
    Report,
    format_metric,
    measure_of,
    read_report,
    recall_bands,
    to_csv,
    to_table,
)
from tests.support.messages import refused
from tests.support.saved_reports import of_losses, save_report


def make_report(*, split: str = "test", factor: float = 1.0, mem_len: int = 64) -> Report:
    documents = [DocumentScore(f"d{number}", "A title, " * 6, 100.0 * factor, 50, 20, 110) for number in range(25)]
    recall = [
        RecallScore(30, 10.0, 10, 4),
        RecallScore(32, 10.0, 10, 1),
        RecallScore(33, 40.0 * factor, 20, 6),
        RecallScore(96, 2.0, 1, 1),
    ]
    recall.append(RecallScore(97, 30.0, 10))  # its hits are not known
    return Report(split, "data", "tokens", None, 32, mem_len, 500, documents, recall)


def test_figures_are_those_of_the_definitions_and_bands_take_each_distance_once() -> None:
    report = make_report()
    segment, memory, beyond = recall_bands(32, 64).values()
    assert (segment, memory, beyond) == (Band(0, 32), Band(32, 96), Band(96, None))
    assert [report.recall_in(band) for band in (segment, memory, beyond)] == [(20.0, 20), (42.0, 21), (30.0, 10)]
    assert report.recall_perplexity(beyond) == pytest.approx(math.exp(3.0))
    assert [report.recall_accuracy(band) for band in (segment, memory)] == [5 / 20, 7 / 21]
    assert all(math.isnan(report.recall_accuracy(band)) for band in (beyond, Band(32, None), Band(97, None)))
    assert list(recall_bands(32, 0).values()) == [Band(0, 32), Band(32, None)]
    figures = report.metrics()
    assert figures["test/word_perplexity"] == pytest.approx(math.exp(2500 / 500))
    assert figures["test/token_perplexity"] == pytest.approx(math.exp(2500 / 1250))
    assert figures["test/bits_per_byte"] == pytest.approx(2500 / math.log(2) / 2750)
    assert figures["test/recall_perplexity_memory"] == pytest.approx(math.exp(2.0))


def test_an_answer_is_whole_if_all_its_tokens_are_right() -> None:
    documents = [DocumentScore("d", "", 1.0, 2, 1, 5, hits) for hits in (2, 1, 0, 2)]
    documents.append(DocumentScore("cut", "", 0.0, 0, 0, 0, 0))  # its answer is not scored
    report = replace(make_report(), documents=documents, recall=[RecallScore(30, 4.0, 8, 5)])
    assert report.whole_answers == 2 / 4
    assert report.metrics()["test/whole_answers"] == 2 / 4
    assert to_table(report).endswith("\n\nwhole answers: 50.00% of the documents")
    unknown = replace(report, documents=[*documents[1:], DocumentScore("old", "", 1.0, 2, 1, 5)])
    text = replace(report, recall=[RecallScore(30, 4.0, 7, 5)])  # one scored token is no answer
    for other in (unknown, text):
        assert math.isnan(other.whole_answers)
        assert "test/whole_answers" not in other.metrics()
        assert "whole" not in to_table(other)


def test_a_report_survives_its_file(tmp_path: Path) -> None:
    report = make_report()
    paths = save_report(report, tmp_path / "evaluations", "test-step-00000007", step=7)
    assert [path.name for path in paths] == ["test-step-00000007.csv", "test-step-00000007.json"]
    assert read_report(paths[1]) == report
    body = json.loads(paths[1].read_text())
    assert body["step"] == 7
    paths[1].write_text(json.dumps({**body, "format_version": 99}))
    with refused(ValueError, "format_version"):
        read_report(paths[1])
    paths[1].write_text("[]")
    with refused(ValueError, paths[1], "must be an object"):
        read_report(paths[1])


def test_a_protocol_that_no_evaluation_has_or_another_than_the_scores_is_refused(tmp_path: Path) -> None:
    report = make_report()
    protocol = Protocol(report.seg_len, report.mem_len, None, False, "documents", None, precision="fp32")._asdict()
    protocol["max_document_len"] = report.max_document_len
    (_, path) = save_report(report, tmp_path, "test-step-00000007", protocol=protocol)
    assert read_report(path) == report
    body = json.loads(path.read_text())
    wrong = {"mem_len": [1], "clamp_len": "/etc/passwd", "without_memory": 1, "seg_len": report.seg_len + 1, "lanes": 0}
    for key, value in wrong.items():
        path.write_text(json.dumps({**body, "protocol": {**protocol, key: value}}))
        with refused(UnusableError, path, f"protocol.{key}"):
            read_report(path)
    for name, emptied in ((path.name, True), (f"{path.stem}-without-memory.json", False)):
        other = path.with_name(name)
        other.write_text(json.dumps({**body, "protocol": {**protocol, "without_memory": emptied}}))
        with refused(UnusableError, other, "protocol.without_memory", str(emptied).lower()):
            read_report(other)
    path.write_text(json.dumps({key: value for key, value in body.items() if key != "protocol"}))
    with refused(UnusableError, path, "protocol"):
        read_report(path)
    for key in protocol:
        path.write_text(json.dumps({**body, "protocol": {name: protocol[name] for name in protocol if name != key}}))
        with refused(UnusableError, path, key):
            read_report(path)


def test_table_and_csv_show_documents_and_totals() -> None:
    report = make_report()
    table = to_table(report, rows=20).splitlines()
    assert len({len(line) for line in table[:21]}) == 1  # columns stand under each other
    assert "... 5 more documents" in table[21]
    assert "25 documents" in table[22] and "148.41" in table[22]
    assert table[26] == "(32, 96] tokens back (memory)        7.39    33.33%      21"
    assert table[27].split()[-3:] == ["20.09", "n/a", "10"]
    lines = to_csv(report.documents).splitlines()
    assert len(lines) == 26 and lines[1].startswith('d0,"A title, A title,')


def save_evaluation(run_dir: Path, report: Report, *, step: int = 5, tag: str = "") -> Path:
    save_report(report, run_dir / "evaluations", f"{report.split}-step-{step:08d}{tag}")
    return run_dir


def compared(capsys: pytest.CaptureFixture[str], *runs: Path) -> tuple[list[list[str]], str]:
    """The cells of every line that a comparison prints, and what it complains of."""
    assert compare.run(list(runs)) == 0
    output = capsys.readouterr()
    return [re.split(" {2,}", line) for line in output.out.splitlines()], output.err


def test_compare_shows_gains_over_common_bands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plain = save_evaluation(tmp_path / "none", make_report(factor=1.8, mem_len=0))
    save_evaluation(tmp_path / "xl", make_report(factor=9.0), step=4)
    memory = save_evaluation(tmp_path / "xl", make_report(factor=1.0), step=12)
    (_, *in_all, _, heading, columns, first, second), complaint = compared(capsys, plain, memory)
    assert in_all[:3] == [["run", "word ppl"], ["none", "8,103.08"], ["xl", "148.41 (54.60x lower)"]]
    assert "xl: 54.598 (95 % interval 54.598 to 54.598, bootstrap over 25 documents)" in " ".join(in_all[3])
    assert heading[0].endswith("to the referent; tokens: (0, 32] 20, (32, 96] 21, > 96 10")
    assert columns == ["run", "(0, 32]", "(32, 96]", "> 96"]
    assert first == ["none", "2.72", "33.91", "20.09"]
    assert second == ["xl", "2.72", "7.39 (4.59x lower)", "20.09"]
    assert "not measured: none, xl; run: dist-mem evaluate RUN --split test --without-memory" in complaint


def test_compare_shows_bits_per_byte_of_models_that_hardly_know_a_word(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = save_evaluation(tmp_path / "none", make_report(factor=2.0, mem_len=0))
    memory = save_evaluation(tmp_path / "xl", make_report(factor=1.5))
    lines, _ = compared(capsys, plain, memory)
    first, other = (make_report(factor=factor).bits_per_byte for factor in (2.0, 1.5))
    assert lines[1:4] == [
        ["run", "bits per byte"],
        ["none", f"{first:.3f}"],
        ["xl", f"{other:.3f} ({first - other:.3f} lower)"],
    ]
    gain = f"{first - other:.3f}"
    labels, reports = ["none", "xl", "xl"], [make_report(factor=factor) for factor in (2.0, 1.5, 1.5)]
    head, _, others = compare.seed_lines(labels, reports)[2:]
    assert re.split(" {2,}", head) == ["seeds together", "runs", "bits per byte", "accuracy", "none - it, 95 %"]
    assert f"{other:.3f} ± 0.000" in others and others.endswith(f"{gain} to {gain} (documents only)")
    assert lines[4] == [
        f"none - xl: {gain} bits per byte (95 % interval {gain} to {gain}, bootstrap over 25 documents)"
    ]


def test_compare_shows_what_a_run_gains_by_its_own_memory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Beside the gain over another run, whose weights have learnt to do without; of the same step and protocol."""
    plain = save_evaluation(tmp_path / "none", make_report(mem_len=0))
    save_evaluation(plain, make_report(mem_len=0), tag="-without-memory")
    memory = save_evaluation(tmp_path / "xl", make_report(factor=1.5), step=12)
    save_evaluation(memory, make_report(factor=9.0), step=4, tag="-without-memory")
    save_evaluation(memory, make_report(factor=9.0), step=12, tag="-M640-without-memory")
    lines, complaint = compared(capsys, plain, memory)
    assert lines[1:4] == [
        ["run", "word ppl", "memory gain"],
        ["none", "148.41", "0.0000 nats per token (1.00x)"],
        ["xl", "1,808.04 (12.18x higher)", "not measured"],
    ]
    assert "not measured: xl;" in complaint
    save_evaluation(memory, make_report(factor=2.0), step=12, tag="-without-memory")
    lines, complaint = compared(capsys, plain, memory)
    assert lines[3][-1] == "1.0000 nats per token (2.72x)"  # 3750 and 5000 nats over 1250 tokens
    assert complaint == ""


def test_two_reports_of_one_run_are_not_two_seeds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = save_evaluation(tmp_path / "one", make_report(factor=2.0), step=5)
    save_evaluation(first, make_report(factor=1.0), step=8)
    second = save_evaluation(tmp_path / "two", make_report(factor=1.0), step=8)
    for run, seed in ((first, 0), (second, 1)):
        save_config(load_config([f"train.seed={seed}"], trains=False), run / "config.yaml")
    reports = sorted((first / "evaluations").glob("*.json"))
    other_protocol = (
        save_evaluation(second, make_report(factor=3.0), step=8, tag="-M640")
        / "evaluations"
        / "test-step-00000008-M640.json"
    )
    assert "seeds" not in "\n".join(map(" ".join, compared(capsys, first, other_protocol)[0]))
    assert "seeds" not in "\n".join(map(" ".join, compared(capsys, *reports)[0]))
    assert "seeds together" in "\n".join(map(" ".join, compared(capsys, first, second)[0]))


def test_a_report_without_memory_is_never_a_run_s_own(tmp_path: Path) -> None:
    run = save_evaluation(tmp_path / "xl", make_report(), tag="-without-memory")
    with refused(UnusableError, run, "no evaluation of test"):
        compare.run([run])
    save_evaluation(run, make_report(factor=2.0))
    (entry,) = compare.find_reports([run], None)
    assert (entry.report.nll, entry.without_memory) == (5000.0, make_report())
    other = run / "evaluations" / "test-step-00000005-without-memory.json"
    assert compare.find_reports([other], None)[0].report == make_report()  # as it was asked for


@pytest.mark.parametrize("position", [0, 1, 2])
@pytest.mark.parametrize("exists", [False, True])
def test_the_run_that_lacks_an_evaluation_is_named_wherever_it_stands(
    tmp_path: Path, position: int, exists: bool
) -> None:
    runs = [save_evaluation(tmp_path / name, make_report(split="validation")) for name in ("one", "two")]
    nope = save_evaluation(tmp_path / "nope", make_report()) if exists else tmp_path / "nope"
    runs.insert(position, nope)
    with refused(UnusableError, nope) as caught:
        compare.run(runs)
    assert ("--split validation" in str(caught.value)) == exists, "the split that most runs have"


def test_compare_refuses_what_does_not_compare(tmp_path: Path) -> None:
    plain = save_evaluation(tmp_path / "none", make_report())
    with refused(UnusableError, "tset"):
        compare.run([plain], split="tset")
    report, blocks = make_report(), in_blocks(make_report())
    with refused(UnusableError, "validation", "--split"):
        compare.run([plain / "evaluations" / "test-step-00000005.json"], split="validation")
    checkpoint = plain / "checkpoints" / "step-00000005"
    checkpoint.mkdir(parents=True)
    with refused(UnusableError, checkpoint, plain):
        compare.run([checkpoint])
    others = {"other": replace(report, documents=report.documents[1:]), "blocks": blocks}
    runs = [save_evaluation(tmp_path / name, other) for name, other in others.items()]
    for pair in itertools.chain(*map(itertools.permutations, ([plain, runs[0]], [plain, runs[1]]))):
        with refused(UnusableError, runs[0].name if runs[0] in pair else runs[1].name):
            compare.run(pair)


def in_blocks(report: Report) -> Report:
    """The report as of blocks, whose words are not known."""
    return replace(report, num_words=None, documents=[replace(document, words=None) for document in report.documents])


def test_compare_goes_by_tokens_where_words_are_not_known(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plain = save_evaluation(tmp_path / "none", in_blocks(make_report(factor=2.0)))
    memory = save_evaluation(tmp_path / "xl", in_blocks(make_report()))
    lines, _ = compared(capsys, plain, memory)
    assert lines[1:4] == [["run", "token ppl"], ["none", "54.60"], ["xl", "7.39 (7.39x lower)"]]


def test_figures_that_are_not_known_or_too_large_are_shown_as_such(tmp_path: Path) -> None:
    """JSON knows no NaN, and no figure of a run is one."""
    empty = DocumentScore("e", "Nothing", 0.0, 0, None, 0, 0)
    report = replace(in_blocks(make_report()), documents=[empty], recall=[])
    assert report.metrics() == replace(report, num_words=0).metrics() == {}
    save_report(report, tmp_path, "test")
    assert "NaN" not in (tmp_path / "test.json").read_text()
    assert "nan" not in to_table(report) and format_metric(math.nan) == "n/a"
    known = make_report()
    assert replace(known, num_words=0).metrics().keys() == known.metrics().keys() - {"test/word_perplexity"}
    huge = compare.ComparedRun("huge", make_report(factor=1e6))
    assert "n/a" in to_table(huge.report)
    for entries in ([huge], [compare.ComparedRun("normal", known), huge]):
        assert "bits per byte" in compare.to_table(entries, compare.compare(entries))


NO_WORDS = replace(
    make_report(),  # as Chinese text, whose "words" are whole documents
    num_words=2,
    documents=[replace(document, words=0, nll=1e4) for document in make_report().documents],
)
LOST = replace(make_report(), documents=[replace(make_report().documents[0], nll=math.inf)], recall=[])


@pytest.mark.parametrize("report", [NO_WORDS, LOST, make_report(factor=1e6)], ids=["no words", "infinite", "huge"])
def test_what_is_no_figure_is_written_nowhere(report: Report, tmp_path: Path) -> None:
    """`inf` stood in tables, `Infinity` in JSON, which is none, and in MLflow 1.8e308."""
    paths = save_report(report, tmp_path, "test-step-00000001", other=math.nan)
    texts = [to_table(report), *(path.read_text(encoding="utf-8") for path in paths)]
    assert not re.search(r"\b(inf|nan|infinity)\b", "\n".join(texts), re.IGNORECASE)
    assert "n/a" in texts[0] and "n/a" in texts[1]
    assert all(math.isfinite(value) for value in report.metrics().values())
    again = read_report(paths[1])
    assert to_table(again) == to_table(report) and again.metrics() == report.metrics()


def other_tokens(report: Report, factor: float) -> Report:
    """The same text by another tokenizer, with `factor` times its tokens."""
    documents = [replace(each, num_scored=round(each.num_scored * factor)) for each in report.documents]
    recall = [score._replace(distance=round(score.distance * factor)) for score in report.recall]
    return replace(report, tokenizer_fingerprint=f"other {factor}", documents=documents, recall=recall)


def made(factor: float, mem_len: int, tokens: float) -> Report:
    report = make_report(factor=factor, mem_len=mem_len)
    return report if tokens == 1.0 else other_tokens(report, tokens)


REPORTS = st.builds(
    made, st.sampled_from([0.5, 1.0, 1.9, 2.0, 1e6]), st.sampled_from([0, 64]), st.sampled_from([1.0, 1.0, 1.0, 2.0])
)


@settings(max_examples=12, deadline=None)
@given(st.lists(REPORTS, min_size=2, max_size=3), st.booleans())
def test_a_comparison_says_the_same_in_every_order(reports: list[Report], is_blocks: bool) -> None:
    """The first run chose the unit for all; with other tokenizers one order was refused, the other gave nonsense."""
    reports = [in_blocks(each) for each in reports] if is_blocks else reports
    entries = [compare.ComparedRun(str(place), each, replace(each)) for place, each in enumerate(reports)]
    name = measure_of(reports)
    found = []
    for order in itertools.permutations(entries):
        rows = compare.compare(order)
        for row in rows[1:]:
            of_values = rows[0].value / row.value if MEASURES[name].is_ratio else rows[0].value - row.value
            assert row.gain == of_values
        own = {row.name: str((row.value, row.accuracy, row.memory, list(row.recall))) for row in rows}
        heading = re.split(" {2,}", compare.to_table(order, rows).splitlines()[1])
        found.append((heading, own))
    assert all(each == found[0] for each in found)


def test_tokens_of_two_tokenizers_are_not_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = save_evaluation(tmp_path / "one", make_report())
    two = save_evaluation(tmp_path / "two", other_tokens(make_report(factor=1.1), 2.0))
    for pair in itertools.permutations((one, two)):
        lines, complaint = compared(capsys, *pair)
        assert lines[1] == ["run", "bits per byte"] and complaint == ""
        assert "tokenizers differ" in lines[4][0]
        assert not any("recall tokens" in cell for line in lines for cell in line)
        with refused(UnusableError, "--plot", "tokenizers"):
            compare.run(pair, picture=tmp_path / "p.png")


def test_compare_takes_the_split_that_all_runs_have(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = save_evaluation(tmp_path / "one", make_report(split="validation"))
    two = save_evaluation(tmp_path / "two", make_report(split="validation"))
    save_evaluation(two, make_report(split="test"))
    assert compare.run([one, two]) == 0
    assert capsys.readouterr().out.startswith("split validation")


def test_compare_mixes_no_protocols(tmp_path: Path) -> None:
    """A later evaluation with other lengths does not take the place of the run's own; without it nothing compares."""

    def factors(*runs: Path) -> list[float]:
        return [entry.report.nll / 2500.0 for entry in compare.find_reports(list(runs), "test")]

    one = save_evaluation(tmp_path / "one", make_report(), step=4)
    save_evaluation(one, make_report(factor=9.0), step=12, tag="-M640-stream10")
    two = save_evaluation(tmp_path / "two", make_report(factor=2.0), step=5)
    assert factors(one, two) == [1.0, 2.0]
    three = save_evaluation(tmp_path / "three", make_report(factor=8.0), tag="-M640-stream10")
    assert factors(one, three) == [9.0, 8.0]
    with refused(UnusableError, "two", "three", "M640-stream10"):
        compare.run([two, three])
    four = save_evaluation(tmp_path / "four", make_report(factor=3.0), tag="-talks_data")  # has no data of its own
    save_evaluation(four, make_report(factor=4.0), tag="-talks_data-M640-stream10")
    assert (factors(two, four), factors(three, four)) == ([2.0, 3.0], [8.0, 4.0])
    save_evaluation(four, make_report(factor=5.0))
    assert factors(two, four) == [2.0, 5.0], "the own data first"
    report = three / "evaluations" / "test-step-00000005-M640-stream10.json"
    assert compare.run([two, report]) == 0  # as it was asked for


def test_a_missing_interval_has_a_reason() -> None:
    entries = [compare.ComparedRun("one", of_losses(100.0, 200.0)), compare.ComparedRun("two", of_losses(80.0, 200.0))]
    table = compare.to_table(entries, compare.compare(entries))
    assert "one / two: 1.051 (no interval: 2 documents; an interval needs at least 8)" in table
    labels, reports = ["a", "a", "b"], [of_losses(1.0, 2.0), of_losses(1.0, 2.5), of_losses(1.0, 3.0)]
    assert "none (2 documents; an interval needs at least 8)" in "\n".join(compare.seed_lines(labels, reports))


def test_runs_of_one_label_are_one_line_with_their_spread() -> None:
    reports = [of_losses(*losses * 3) for losses in ([500.0, 100.0, 900.0], [400.0, 0.0, 800.0], [380.0, 20.0, 800.0])]
    assert compare.seed_lines(["a", "b", "c"], reports) == []
    head, *rows = compare.seed_lines(["a", "b", "b"], reports)[2:]
    assert head.split("  ")[0] == "seeds together"
    first, other = (row.split() for row in rows)
    assert first == ["a", "1", "12.18", "n/a"]
    assert other[:5] == ["b", "2", "7.39", "±", "0.00"]  # exp((500 - 100) / 200) = exp(1200 / 600) = 7.39 of both
    low, _, high = other[-5:-2]  # of 9 documents with gains of 110, 90 and 100 nats in 200 tokens
    assert math.exp(0.45) < float(low) < 12.18 / 7.39 < float(high) < math.exp(0.55)


def test_compare_groups_runs_by_their_configurations(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, kind, seed in (("none", "none", 0), ("xl0", "transformer_xl", 0), ("xl1", "transformer_xl", 1)):
        save_report(
            of_losses(*[500.0, 100.0] * 4), tmp_path / name / "evaluations", "test-step-00000007", metadata={"step": 7}
        )
        config = f"name: {name}\nmemory: {{kind: {kind}}}\ntrain: {{seed: {seed}}}\ndata: {{seed: {seed}}}\n"
        (tmp_path / name / "config.yaml").write_text(config, encoding="utf-8")
    assert compare.run([tmp_path / name for name in ("none", "xl0", "xl1")]) == 0
    assert re.search(
        r"\nTransformer-XL +2 +4\.48 ± 0\.00 +n/a +1\.000 to 1\.000 \(documents only\)\n", capsys.readouterr().out
    )
    assert compare.run([tmp_path / name for name in ("none", "xl0")]) == 0
    assert "seeds together" not in capsys.readouterr().out
