"""Runs with `train.compile`: Inductor compiles before the first step, and a resumed run equals one that was not."""

import re
from pathlib import Path

import pytest

from dist_mem.checkpoint.manifest import step_dir
from dist_mem.training.compiling import describe_compilation
from tests.support.jobs import checkpoint_content, difference, losses, run_ranks, write_config
from tests.support.paths import ROOT

# A memory whose forward looks at a value, which no graph can contain.
UNTRACEABLE = """
from dist_mem.memory.transformer_xl import TransformerXL

class Looks(TransformerXL):
    def forward(self, x, state, valid_len):
        if float(x.sum()) > 1e9:
            x = x + 1.0
        return super().forward(x, state, valid_len)
"""


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_a_compiled_run_resumes_bitwise_and_learns_as_one_that_is_not_compiled(tmp_path: Path, books: Path) -> None:
    """ZeRO-3 on two ranks, dropout off so that the losses can be compared."""
    changes = {
        "train": {"steps": 6, "compile": True},
        "model": {"dropout": 0.0},
        "checkpoint": {"every": 3},
        "deepspeed": {"zero_optimization": {"stage": 3}},
    }
    straight, resumed, written = (tmp_path / name for name in ("straight", "resumed", "written"))
    config = write_config(tmp_path / "run.yaml", books, straight, changes)
    codes, text = run_ranks(["train", str(config)], world_size=2, cwd=tmp_path)
    assert codes == [0, 0], text
    assert "compiled the blocks in" in text and "took 0.88 to 0.99 of the time of an update" in text
    again = [f"run_dir={resumed}", f"resume={step_dir(straight, 3)}"]
    assert run_ranks(["train", str(config), *again], world_size=2, cwd=tmp_path)[0] == [0, 0]
    assert losses(straight)[3:] == losses(resumed)
    assert difference(*(checkpoint_content(step_dir(run_dir, 6)) for run_dir in (straight, resumed))) is None
    plain = [f"run_dir={written}", "train.compile=false"]
    codes, text = run_ranks(["train", str(config), *plain], world_size=2, cwd=tmp_path)
    assert codes == [0, 0], text
    assert "train.compile" not in text
    assert losses(straight) == pytest.approx(losses(written), rel=1e-5)


def test_a_memory_that_cannot_be_compiled_is_refused_by_key_before_the_first_step(tmp_path: Path, books: Path) -> None:
    (tmp_path / "looks.py").write_text(UNTRACEABLE, encoding="utf-8")
    changes = {"train": {"compile": True}}
    config = write_config(tmp_path / "run.yaml", books, tmp_path / "run", changes)
    arguments = ["train", str(config), f"memory.kind={tmp_path / 'looks.py'}:Looks", "memory.mem_len=24"]
    codes, text = run_ranks(arguments, world_size=1, cwd=tmp_path)
    assert codes == [2], text
    assert "train.compile: torch.compile cannot compile the blocks; set train.compile=false, or fix this:" in text
    assert "Traceback" not in text


def test_a_start_says_the_figures_of_the_tables() -> None:
    page = (ROOT / "docs" / "howto" / "performance.md").read_text(encoding="utf-8")
    table = page[page.index("| memory, ZeRO-2, one rank, one thread |") :].partition("\n\n")[0]
    rows = [line.split("|")[2:4] for line in table.splitlines()[2:]]
    ratios = sorted(float(ratio.split()[0]) for ratio, _ in rows)
    times = sorted(int(cold.split("/")[0]) for _, cold in rows)
    message = describe_compilation(82.4, "cpu")
    assert f"took {ratios[0]:.2f} to {ratios[-1]:.2f} of the time of an update" in message
    assert f"{times[0]} to {times[-1]} s to compile" in message
    assert message.startswith("compiled the blocks in 82 s; on CPUs, ")
    results = (ROOT / "docs" / "results" / "gpu.md").read_text(encoding="utf-8")
    (written,) = re.findall(r"\| 125m gated_deltanet \| ([\d,]+) \|", results)
    (faster,) = re.findall(r"Compiled blocks help it\s+most: ([\d,]+) tokens/s", results)
    assert 2 * int(written.replace(",", "")) < int(faster.replace(",", ""))
    assert "Gated DeltaNet took less than half of the time" in describe_compilation(82.4, "cuda")
