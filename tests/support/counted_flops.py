"""FLOPs of small models, counted by torch."""

import torch
from torch.utils.flop_counter import FlopCounterMode

from dist_mem.block import model_spec
from dist_mem.contract import subject as contract
from dist_mem.contract.subject import CheckedMemory
from dist_mem.estimate.counting import Flops, flops_per_token
from dist_mem.model import MemoryLM

SEGMENTS_TO_FILL = 5


def torchs_count(model: MemoryLM, num_lanes: int, seg_len: int) -> Flops:
    """Return torch's count for a token of one segment of every lane, with full memories."""
    tokens, valid_len = torch.zeros(num_lanes, seg_len, dtype=torch.int64), torch.full((num_lanes,), seg_len)
    state = model.init_state(torch.arange(num_lanes), "cpu", torch.float32)
    with torch.no_grad():
        for _ in range(SEGMENTS_TO_FILL):
            state = model(tokens, tokens, valid_len, state=state).state
        with FlopCounterMode(display=False) as scoring:
            model(tokens, tokens, valid_len, state=state)
    with FlopCounterMode(display=False) as training:
        output = model(tokens, tokens, valid_len, state=state)
        (output.nll.mean() + sum(loss.sum() for loss in output.aux.values())).backward()
    return Flops(*(round(count.get_total_flops() / tokens.numel()) for count in (scoring, training)))


def check_small(small: CheckedMemory) -> None:
    """Compare the counts of one and of three lanes: tables of distances are made once for all lanes."""
    model, config, seg_len = small.model(), small.config(), small.size.seg_len
    for num_lanes in (1, 3):
        found = flops_per_token(model_spec(config, contract.VOCAB), num_lanes=num_lanes)
        assert found == torchs_count(model, num_lanes, seg_len), f"{num_lanes} lanes"
