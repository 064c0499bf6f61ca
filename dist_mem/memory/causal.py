"""GPT-2's attention within the segment, which remembers nothing; a long-term memory may be built over it.

It adds no positions: in GPT-2 (model.kind: gpt2) the rows contain learned ones. In a Llama it has rotary positions, as
`none` has there. Source: Radford et al. 2019; Martins et al. 2022, "infinity-former", sec. 4.2. Alone, this memory is
the paper's GPT-2; `infinite` over it is the infinity-former.
"""

from __future__ import annotations

from dist_mem.memory.none import NoMemory
from dist_mem.nn.layers import RelativeAttention
from dist_mem.nn.plain_attention import PlainAttention
from dist_mem.nn.rotary_attention import RotaryAttention, attention_of


class Causal(NoMemory):
    """GPT-2's causal attention within the segment."""

    title = "no memory, causal attention"
    can_step = True
    model_keys = ("sliding_window",)

    def make_attention(self) -> RelativeAttention | RotaryAttention | PlainAttention:
        kernel = self.options.kernel
        is_llama = self.spec.llama is not None
        return attention_of(self.spec, kernel=kernel) if is_llama else PlainAttention(self.spec, kernel=kernel)
