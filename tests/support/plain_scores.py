"""Scores of documents by the plainest loop."""

from pathlib import Path

import numpy as np
import torch

from dist_mem.evaluation.scores import Report
from dist_mem.model import MemoryLM
from tests.support.evaluated_runs import asked
from tests.support.scored_library import LENGTHS, SEG_LEN, TOKENIZER, make_document

DOCUMENTS = [make_document(number, length) for number, length in enumerate(LENGTHS)]


@torch.no_grad()
def read_plainly(
    model: MemoryLM, tokens: np.ndarray, inputs: np.ndarray | None = None, *, document: int = 0, forgets: bool = False
) -> np.ndarray:
    """NLL of every token, and whether it is the likeliest, (2, N): one lane, segment after segment, written plainly.

    Args:
        inputs: the token before each; without them the text begins a document.
        document: its number, which a memory may draw by.
        forgets: whether every segment is read with a fresh memory.
    """
    inputs = np.concatenate(([TOKENIZER.bos_id], tokens[:-1])) if inputs is None else inputs
    found = np.zeros((2, len(tokens)))
    state = fresh = model.init_state(torch.tensor([document]), "cpu", torch.float32)
    for begin in range(0, len(tokens), SEG_LEN):
        length = len(tokens[begin : begin + SEG_LEN])
        segment = torch.zeros(1, SEG_LEN, dtype=torch.int64)
        segment[0, :length] = torch.from_numpy(inputs[begin : begin + length].astype(np.int64))
        targets = torch.from_numpy(tokens[begin : begin + length].astype(np.int64))
        log_probs, read = model.log_probs(segment, torch.tensor([length]), state=state)
        found[0, begin : begin + length] = -log_probs[0, :length].gather(1, targets[:, None])[:, 0].numpy()
        found[1, begin : begin + length] = (log_probs[0, :length].argmax(-1) == targets).numpy()
        state = fresh if forgets else read
    return found


def emptied(run_dir: Path, *overrides: str) -> Report:
    return asked(run_dir, *overrides, without_memory=True)
