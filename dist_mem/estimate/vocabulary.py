"""The size of a job's vocabulary before and after its data are built."""

from __future__ import annotations

from pathlib import Path

from dist_mem.config import DataConfig, ModelConfig
from dist_mem.data.directory import local_dir
from dist_mem.data.tokenizers.registry import JSON_NAME, read_tokenizer_metadata
from dist_mem.hf.folder import CONFIG, read_published_config
from dist_mem.hf.names import LAYOUTS
from dist_mem.runtime.files import is_missing

ASSUMED_VOCAB_SIZE = 32_000  # the builders' default, used if the data is not built yet


def data_is_built(data: DataConfig) -> bool:
    """Return whether the data directory has its tokenizer."""
    return not is_missing(local_dir(data) / JSON_NAME)


def vocab_size_of(data: DataConfig, model: ModelConfig) -> int:
    """Return the tokenizer's size; before the data are built that of `model.pretrained`, or an assumed one."""
    if data_is_built(data):
        return int(read_tokenizer_metadata(local_dir(data))["vocab_size"])
    if model.pretrained is not None and (folder := Path(model.pretrained) / CONFIG).is_file():
        return int(read_published_config(folder.parent, LAYOUTS[model.kind])["vocab_size"])
    cutoffs = [] if model.adaptive is None else list(model.adaptive.cutoffs)
    return max([ASSUMED_VOCAB_SIZE, *(2 * cutoff for cutoff in cutoffs)])
