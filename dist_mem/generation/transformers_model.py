"""A trained model for Hugging Face's transformers; `generate()` carries the memory in transformers' Cache.

    model = AutoModelForCausalLM.from_pretrained("models/mine", trust_remote_code=True)
    tokenizer = AutoTokenizer.from_pretrained("models/mine", trust_remote_code=True)
    model.generate(**tokenizer("It was", return_tensors="pt"), max_new_tokens=50)

The program in a folder of `dist-mem export --format transformers` imports these classes; no module of dist_mem does,
because transformers is no requirement. Texts are read in segments as by `generation.reading.read`, each lane from its
first token on, and padding is not read. Shape letters: B lanes, L given tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import (
    Cache,
    GenerationConfig,
    GenerationMixin,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.utils import can_return_tuple

from dist_mem.evaluation.trained_model import TrainedModel, init_state, load_model
from dist_mem.generation.arguments import (
    CONFIGURED,
    LOADING,
    READING,
    differing_entries,
    one_device,
    refuse_what_is_asked,
)
from dist_mem.generation.reading import Reading, select, with_open_segment
from dist_mem.generation.text_scores import read_with_log_probs
from dist_mem.generation.writing import SteppingWriter
from dist_mem.memory.base import detach_state
from dist_mem.nn.layers import DTYPES
from dist_mem.runtime.terminal import count_noun

_IGNORED = -100  # a label that is not scored
_GENERATION = "generation_config.json"
_UNKNOWN = "there is no such option and no such attribute of its configuration; generate() takes what is for it"


class MemoryConfig(PretrainedConfig):
    """What callers of transformers read of every model; the whole configuration is config.yaml in the folder."""

    model_type = "dist_mem"
    keys_to_ignore_at_inference = ("past_key_values",)  # Trainer gathers all else that forward returns

    vocab_size: int | None = None
    hidden_size: int | None = None
    num_hidden_layers: int | None = None
    num_attention_heads: int | None = None
    max_position_embeddings: int | None = None  # a text may have any length
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None  # None: no text ends by itself; generation_config.json may name others
    pad_token_id: int | None = None  # the tokenizer pads with BOS, which generate() would not read as a text's first
    use_cache: bool = True


class MemoryCache(Cache):
    """The memory of every lane and the tokens of its open segment, as a `Reading`.

    `past_key_values=MemoryCache(reading)` continues any reading of this model, such as that of a memory file; then
    `input_ids` are the tokens after it.
    """

    def __init__(self, reading: Reading) -> None:
        super().__init__(layers=[])
        self.reading = reading
        self.num_read = 0  # columns of input_ids, padding included
        self.stepped: SteppingWriter | None = None  # of an earlier reading, unless its reading is the one above

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy takes: not what refers to the model and is computed from the reading again."""
        return {**self.__dict__, "stepped": None}

    def read_token(self, trained: TrainedModel, tokens: Tensor) -> Tensor:
        """Read a token in every lane, (B,) int64 on the CPU; return the log-probabilities of the next one, (B, V)."""
        if self.stepped is None or self.stepped.reading is not self.reading:
            self.stepped = SteppingWriter(trained, self.reading)
        self.stepped.append(tokens, torch.ones_like(tokens, dtype=torch.bool))
        self.reading = self.stepped.reading
        return self.stepped.next_log_probs().clone()  # of inference mode, in which others may not change it

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the number of columns of input_ids that were read into this cache."""
        return self.num_read

    @property
    def batch_size(self) -> int:
        """Number of lanes."""
        return len(self.reading.open_len)

    @property
    def is_initialized(self) -> bool:
        """Whether it may be read from: always."""
        return True

    @property
    def is_croppable(self) -> bool:
        """Whether tokens can be taken back: never."""
        return False

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Keep these lanes, (B,) int64; one may be repeated: for beam search."""
        self.reading = select(self.reading, beam_idx.tolist())

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep these lanes, (B,) int64."""
        self.reorder_cache(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every lane, the copies side by side."""
        self.reorder_cache(torch.arange(self.batch_size).repeat_interleave(repeats))

    def crop(self, tokens_to_remove: int) -> None:
        """Refuse to take tokens back. Raises ValueError."""
        raise ValueError("a memory cannot be cropped: copy the cache before the tokens are read (copy.deepcopy)")

    def reset(self) -> None:
        """Refuse to empty the memory. Raises ValueError."""
        raise ValueError("a MemoryCache is not reset: leave past_key_values out, and a new one is made")


class MemoryForCausalLM(PreTrainedModel, GenerationMixin):
    """A model that `dist_mem.load` loads, as one of transformers."""

    config_class: type[PretrainedConfig] = MemoryConfig
    _is_stateful = True  # refuses what would take tokens back, as assisted generation
    _supports_sdpa = True  # of model.attention, which the folder chooses

    def __init__(self, config: PretrainedConfig, trained: TrainedModel) -> None:
        super().__init__(config)
        self.model = trained.model
        self._loaded = trained
        self.post_init()

    @property
    def trained(self) -> TrainedModel:
        """The model for functions of dist_mem, on its present device."""
        return self._loaded._replace(device=self.device, dtype=self.dtype)

    def _init_weights(self, module: torch.nn.Module) -> None:
        """Leave the weights as loaded."""

    @classmethod
    def from_pretrained(
        cls,
        pretrained_model_name_or_path: Any,
        *_: Any,
        config: PretrainedConfig | str | PathLike[Any] | None = None,
        dtype: torch.dtype | str | None = None,
        torch_dtype: torch.dtype | str | None = None,
        device_map: Any = None,
        generation_config: GenerationConfig | None = None,
        allow_code: bool = False,
        **options: Any,
    ) -> MemoryForCausalLM:
        """Load the model of a folder, in evaluation mode.

        Args:
            dtype: float32, the default, or bfloat16; "auto" is that of the file. `torch_dtype` is its older name.
            device_map: one device, or "auto": a GPU if there is one. None: the CPU.
            generation_config: None: generation_config.json of the folder, if there is one.
            allow_code: run `memory/NAME.py` of the folder, a memory from outside the package: read it first.
            options: attributes of the configuration, as `use_cache`, or what asks for nothing (arguments.py).

        Raises:
            ValueError: an option that asks for what is not done here, another dtype or device, or a folder that
                `dist_mem.load` refuses.
        """
        folder = Path(pretrained_model_name_or_path)
        if not folder.is_dir():
            raise ValueError(f"{folder} is no folder: download it first, by huggingface_hub.snapshot_download")
        config = cls._set_options(folder, config, options)
        dtype = torch_dtype if dtype is None else dtype
        precision = f"eval.precision={_precision(config.dtype if dtype == 'auto' else dtype)}"
        code = ["eval.allow_code=true"] if allow_code else []
        model = cls(config, load_model(folder, precision, *code, device=one_device(device_map))).eval()
        if generation_config is not None:
            model.generation_config = GenerationConfig.from_dict(generation_config.to_dict())
        elif (folder / _GENERATION).is_file():
            model.generation_config = GenerationConfig.from_pretrained(folder)
        return model

    @classmethod
    def _set_options(cls, folder: Path, given: Any, options: Mapping[str, Any]) -> PretrainedConfig:
        """Return the configuration with the options that are attributes of it. Raises ValueError for all others."""
        what = "from_pretrained of a model with memory"
        refuse_what_is_asked({name: options[name] for name in options.keys() & LOADING.keys()}, LOADING, what)
        others = {name: options[name] for name in options.keys() - LOADING.keys()}
        written = cls.config_class.from_pretrained(folder)
        config = given
        if not isinstance(given, PretrainedConfig):
            config, others = cls.config_class.from_pretrained(given or folder, return_unused_kwargs=True, **others)
        refuse_what_is_asked(others, {}, what, otherwise=_UNKNOWN)
        changed = differing_entries(config.to_dict(), written.to_dict())
        attention = {"attn_implementation": config._attn_implementation}  # absent from to_dict
        refuse_what_is_asked(
            {**changed, **attention}, CONFIGURED, what, otherwise="it follows from the weights; omit it"
        )
        return config

    def save_pretrained(self, *_: Any, **__: Any) -> None:
        """Refuse: the folder would lack what loading verifies. Raises ValueError."""
        raise ValueError("a model with memory is written by `dist-mem export`; copy the folder, or train with dist_mem")

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        past_key_values: MemoryCache | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        **options: Any,
    ) -> CausalLMOutputWithPast:
        """Read L more tokens of every lane, (B, L) int64, after those in `past_key_values`.

        Args:
            attention_mask: (B, L) or longer, whose last L columns count: 0 for padding, which is not read.
            labels: (B, L) int64, as input_ids, -100 where nothing is scored. Padding is not scored, nor is a label
                after padding, which nothing predicts.
            logits_to_keep: number of last columns to return logits for, 0: all; or their indices, (num_kept,) int64.

        Returns:
            Logits (B, num_kept, V) float32: log-probabilities, 0 at padding; and the cache, the one given if there is
            one. The loss is the mean of what is scored in these columns, nan if nothing is.

        Raises:
            ValueError: the cache or the mask is of other lanes, the mask is shorter than input_ids, or an option asks
                for what is not done here (arguments.py).
        """
        asked = {name: getattr(self.config, name) for name in ("output_attentions", "output_hidden_states")} | options
        refuse_what_is_asked(asked, READING, "a model with memory")
        lanes, length = input_ids.shape
        use_cache = self.config.use_cache if use_cache is None else use_cache
        cache = MemoryCache(self._nothing_read(lanes)) if past_key_values is None else past_key_values
        if cache.batch_size != lanes:
            raise ValueError(f"past_key_values has {cache.batch_size} lanes, but input_ids {lanes}")
        is_text = torch.ones(lanes, length, dtype=torch.bool)
        if attention_mask is not None:
            _check_mask(attention_mask, input_ids)
            is_text = attention_mask[:, -length:].bool().cpu()
        columns = _columns(logits_to_keep, length)
        if use_cache and labels is None and self._can_step(cache, is_text):
            logits = cache.read_token(self.trained, input_ids[:, 0].cpu())[:, None]
            cache.num_read += 1
            return CausalLMOutputWithPast(logits=logits[:, columns.to(logits.device)], past_key_values=cache)
        kept = is_text[:, int(columns.min()) :] if len(columns) else is_text[:, length:]  # all that are computed
        rows = [ids[mask] for ids, mask in zip(input_ids.cpu(), is_text, strict=True)]
        found, reading = read_with_log_probs(self.trained, cache.reading, rows, kept.sum(dim=1).tolist())
        packed = torch.cat(found)
        logits = packed.new_zeros(*kept.shape, packed.shape[1]).index_put((kept.to(packed.device),), packed)
        logits = logits[:, (columns - (length - kept.shape[1])).to(logits.device)]
        if use_cache:
            cache.reading = reading._replace(state=detach_state(reading.state))  # else it keeps what computed it
            cache.num_read += length
        loss = None
        if labels is not None:
            # Of each column, the label that it predicts.
            is_scored = is_text[:, :-1] & is_text[:, 1:]
            targets = F.pad(labels[:, 1:].cpu().masked_fill(~is_scored, _IGNORED), (0, 1), value=_IGNORED)
            loss = F.cross_entropy(logits.mT, targets[:, columns].to(logits.device), ignore_index=_IGNORED)
        return CausalLMOutputWithPast(loss=loss, logits=logits, past_key_values=cache if use_cache else None)

    def _can_step(self, cache: MemoryCache, is_text: Tensor) -> bool:
        """Return whether one more token in every lane, without gradient, is run as one row."""
        is_token = is_text.shape[1] == 1 and bool(is_text.all() and cache.reading.open_len.all())
        return is_token and self.model.can_step and not self.training and not torch.is_grad_enabled()

    def _nothing_read(self, lanes: int) -> Reading:
        trained = self.trained
        none = [torch.zeros(0, dtype=torch.int64)] * lanes  # not even BOS, which the tokenizer puts before a text
        return with_open_segment(init_state(trained, [0] * lanes), none, seg_len=trained.config.train.seg_len)

    def generate(self, inputs: Tensor | None = None, *args: Any, **options: Any) -> Any:
        """Generate as the base class does.

        Raises:
            ValueError: a text ends with padding, after which no token can be generated, the mask does not fit, or the
                cache has all of the text.
        """
        mask = options.get("attention_mask")
        ids = options.get("input_ids") if inputs is None else inputs
        if mask is not None and ids is not None:
            _check_mask(mask, ids)
        if mask is not None and not bool(mask[:, -1].all()):
            raise ValueError("a text of the batch ends with padding: pad on the left (tokenizer.padding_side='left')")
        cache = options.get("past_key_values")
        num_read = 0 if cache is None else cache.get_seq_length()
        if ids is not None and (mask is None or mask.shape == ids.shape) and 0 < ids.shape[1] <= num_read:
            raise ValueError(
                f"past_key_values has read {count_noun(num_read, 'column')}, but input_ids has {ids.shape[1]}: give "
                "those and at least one more, or leave past_key_values out"
            )
        options.pop("prefill_chunk_size", None)  # a prompt is read in segments in any case
        # cast: transformers types `self` by a protocol that no model of its own fulfils
        return GenerationMixin.generate(cast(Any, self), inputs, *args, **options)

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        return False

    def get_input_embeddings(self) -> torch.nn.Module:
        """Return the table of the tokens, whose `weight` is (V, D). Raises NotImplementedError if there are several."""
        return _only(self.model.embedding.bins)

    def get_output_embeddings(self) -> torch.nn.Module:
        """Return the softmax's table of the tokens. Raises NotImplementedError if there are several."""
        return _only(self.model.head.bins)

    def set_input_embeddings(self, value: torch.nn.Module) -> None:
        """Refuse another table. Raises ValueError."""
        raise ValueError("a model with memory keeps its tables: train one with dist_mem that has the new tokens")

    def set_output_embeddings(self, new_embeddings: torch.nn.Module) -> None:
        """Refuse another table. Raises ValueError."""
        self.set_input_embeddings(new_embeddings)

    def resize_token_embeddings(self, new_num_tokens: int | None = None, *args: Any, **options: Any) -> Any:
        """Return the table of the tokens. Raises ValueError for another number of tokens."""
        if new_num_tokens not in (None, self.config.vocab_size) or any((*args, options.get("pad_to_multiple_of"))):
            self.set_input_embeddings(self.get_input_embeddings())
        return self.get_input_embeddings()


def _with_memory(config: type[PretrainedConfig]) -> type[MemoryForCausalLM]:
    """Return the class of a published kind with memory, whose config.json is that of transformers."""
    kind = config.__name__.removesuffix("Config")
    members = {"config_class": config, "__module__": __name__, "__doc__": f"A {kind} with memory."}
    return type(f"Memory{kind}", (MemoryForCausalLM,), members)


MemoryGPT2 = _with_memory(GPT2Config)
MemoryLlama = _with_memory(LlamaConfig)
MemoryMistral = _with_memory(MistralConfig)
MemoryQwen2 = _with_memory(Qwen2Config)
MemoryQwen3 = _with_memory(Qwen3Config)


def _only(bins: torch.nn.ModuleList) -> torch.nn.Module:
    if len(bins) > 1:
        raise NotImplementedError(f"an adaptive vocabulary has {len(bins)} tables (model.adaptive), and not one")
    return bins[0]


def _check_mask(attention_mask: Tensor, input_ids: Tensor) -> None:
    """Raise ValueError unless a mask has the lanes of the tokens and a column for each of them, or more."""
    given, wanted = tuple(attention_mask.shape), tuple(input_ids.shape)
    if given[0] != wanted[0] or given[1] < wanted[1]:
        raise ValueError(f"attention_mask is {given}, but input_ids {wanted}; give a column per token")


def _columns(logits_to_keep: int | Tensor, length: int) -> Tensor:
    """Return the indices of the columns to keep, (num_kept,) int64 on the CPU, from 0 to `length`."""
    every = torch.arange(length)
    return every[logits_to_keep.cpu()] if isinstance(logits_to_keep, Tensor) else every[-logits_to_keep:]  # -0: all


def _precision(dtype: torch.dtype | str | None) -> str:
    """Return the name of a dtype in a configuration. Raises ValueError for one that the memories do not take."""
    names = {str(value).removeprefix("torch."): name for name, value in DTYPES.items()}
    found = names.get(str(dtype or torch.float32).removeprefix("torch."))
    if found is None:
        raise ValueError(f"dtype is {dtype}, but a model with memory takes {' or '.join(names)}")
    return found
