"""A GPT-2 with memory for Hugging Face's transformers; `generate()` carries the memory.

`dist-mem export --format transformers` copies this file into every folder that it writes of such a model. The file
needs dist_mem installed; no module of dist_mem imports it.

    model = AutoModelForCausalLM.from_pretrained("models/mine", trust_remote_code=True)
    ids = AutoTokenizer.from_pretrained("models/mine")("<|endoftext|>It was", return_tensors="pt").input_ids
    model.generate(ids, max_new_tokens=50)

A text begins with the BOS token, may have any length, and is read in segments as in training. Shape letters: B lanes,
T segment, L given tokens, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor
from transformers import GenerationMixin, GPT2Config, PreTrainedModel
from transformers.modeling_outputs import ModelOutput

from dist_mem.config import Config, load_config
from dist_mem.config.sources import plain_block
from dist_mem.gpt2.names import take_published
from dist_mem.memory import memory_options
from dist_mem.memory.outside import files_of
from dist_mem.model import LMState, MemoryLM

# Options that `from_pretrained` of an Auto class passes on, and that are ignored here.
_PASSED_OVER = {"adapter_kwargs", "code_revision", "trust_remote_code", "_commit_hash", "_from_auto", "dtype"}


class Carried(NamedTuple):
    """State between two calls of the model, for every lane."""

    state: LMState  # memories after the last complete segment
    open_tokens: Tensor  # (B, less than T) int64, tokens read after it


@dataclass
class MemoryOutput(ModelOutput):
    loss: Tensor | None = None
    logits: Tensor | None = None  # (B, L, V) float32, log-probabilities
    carried: Carried | None = None


def _read_settings(path: Path) -> Config:
    """Read the configuration of a folder; its memory must be an installed one, as in every exported folder."""
    for program in files_of(plain_block(load_config([str(path)]).memory)):
        raise ValueError(f"{path}: memory names {program}: it is a program, and not run; export the model again")
    return load_config([str(path)], memory_options=memory_options)


class MemoryGPT2(PreTrainedModel, GenerationMixin):
    config_class = GPT2Config

    def __init__(self, config: GPT2Config, folder: Path) -> None:
        super().__init__(config)
        self.settings = _read_settings(folder / "config.yaml")
        self.seg_len = self.settings.train.seg_len
        self.model = MemoryLM(self.settings, config.vocab_size)
        self.post_init()

    @classmethod
    def from_pretrained(
        cls, pretrained_model_name_or_path: Any, *model_args: Any, config: Any = None, **options: Any
    ) -> MemoryGPT2:
        """Load the model of a folder, in evaluation mode; only the option `dtype` has an effect.

        Raises:
            ValueError: an unknown option, or weights that do not fit the model.
        """
        unknown = {name for name, value in options.items() if value is not None} - _PASSED_OVER
        if unknown:
            raise ValueError(f"a GPT-2 with memory takes no {', '.join(sorted(unknown))}; load it on a CPU, then .to()")
        folder = Path(pretrained_model_name_or_path)
        model = cls(config or GPT2Config.from_pretrained(folder), folder)
        weights = folder / "model.safetensors"
        if left := take_published(model.model, load_file(weights), str(weights)):
            raise ValueError(f"{weights} lacks {left[0]}")
        dtype = options.get("dtype")
        model.model.to(dtype if isinstance(dtype, torch.dtype) else torch.float32)
        return model.eval()

    def forward(
        self,
        input_ids: Tensor,
        carried: Carried | None = None,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        **_: Any,
    ) -> MemoryOutput:
        """Read L more tokens of every lane, (B, L) int64, after those in `carried`.

        Raises:
            ValueError: there is padding, which a memory would read as text.
        """
        if attention_mask is not None and not bool(attention_mask.all()):
            raise ValueError("a batch of texts of several lengths: a memory would take the padding for text")
        if carried is None:
            lanes = torch.arange(len(input_ids), device=input_ids.device)
            carried = Carried(self.model.init_state(lanes, input_ids.device, self.dtype), input_ids[:, :0])
        state, tokens, found = carried.state, torch.cat([carried.open_tokens, input_ids], dim=1), []
        while tokens.shape[1] >= self.seg_len:
            log_probs, state = self.read(tokens[:, : self.seg_len], state)
            found.append(log_probs)
            tokens = tokens[:, self.seg_len :]
        if tokens.shape[1]:
            found.append(self.read(tokens, state)[0])
        logits = torch.cat(found, dim=1)[:, carried.open_tokens.shape[1] :]
        loss = None if labels is None else F.cross_entropy(logits[:, :-1].mT, labels[:, 1:])
        return MemoryOutput(loss, logits, Carried(state, tokens))

    def read(self, tokens: Tensor, state: LMState) -> tuple[Tensor, LMState]:
        """Read one segment; an incomplete one leaves the memory unchanged."""
        length = tokens.shape[1]
        padded = F.pad(tokens, (0, self.seg_len - length))
        valid_len = torch.full((len(tokens),), length, device=tokens.device)
        log_probs, state = self.model.log_probs(padded, valid_len, state=state)
        return log_probs[:, :length], state

    def generate(self, *args: Any, **options: Any) -> Any:
        """Generate as the base class does.

        Raises:
            ValueError: more than one beam; the base class would continue beams with each other's memories.
        """
        settings = options.get("generation_config") or self.generation_config
        num_beams = options.get("num_beams") or getattr(settings, "num_beams", None) or 1
        if num_beams != 1:
            raise ValueError(f"num_beams is {num_beams}, but a GPT-2 with memory takes 1: beams would swap memories")
        # cast: transformers types `self` by a protocol that no model of its own fulfils
        return GenerationMixin.generate(cast(Any, self), *args, **options)

    def prepare_inputs_for_generation(self, input_ids: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Return all tokens at first, even if `carried` is given, then the newest; transformers requires `kwargs`."""
        new = input_ids[:, -1:] if kwargs.get("prompt_is_read") else input_ids
        return {"input_ids": new, "carried": kwargs.get("carried"), "attention_mask": kwargs.get("attention_mask")}

    def _update_model_kwargs_for_generation(self, outputs: Any, model_kwargs: Any, *args: Any, **options: Any) -> Any:
        updated = super()._update_model_kwargs_for_generation(outputs, model_kwargs, *args, **options)
        return {**updated, "carried": outputs.carried, "prompt_is_read": True}

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        return False
