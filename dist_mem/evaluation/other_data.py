"""Results of data that a model was not trained on have names of their own, so that they replace none of the run's.

Data are those of the training if `data.path` is the one in the checkpoint, or if their training split has the
fingerprint of the training's: a folder may move. An address of a server is not opened for this.
"""

from __future__ import annotations

import re

from omegaconf import OmegaConf

from dist_mem.config import Config
from dist_mem.config.sources import read_saved
from dist_mem.data.directory import local_dir, open_index, refresh
from dist_mem.data.remote.fetch import is_remote
from dist_mem.data.shard import INDEX_NAME, read_index
from dist_mem.evaluation.trained_model import Checkpoint


def data_tag(checkpoint: Checkpoint, config: Config, split: str) -> str:
    """Return a part of names of results: "", or name and fingerprint of other data, as "mqar_b54a2c".

    Args:
        config: of the evaluation, with its data.

    Raises:
        RemoteError: the index of other data cannot be fetched, and is not in the cache.
        ValueError: an index is missing or damaged.
    """
    if _is_own(checkpoint, config):
        return ""
    refresh(config.data, [split])
    index = open_index(config.data, split)
    return f"{re.sub(r'[^a-zA-Z0-9_.]', '_', index.name)}_{index.fingerprint[:6]}"


def _is_own(checkpoint: Checkpoint, config: Config) -> bool:
    data = config.data
    if not checkpoint.is_export:  # which has no place of data
        saved = OmegaConf.create(read_saved(checkpoint.directory / "config.yaml"))
        if OmegaConf.select(saved, "data.path") == data.path:
            return True
    trained = checkpoint.manifest.get("data_fingerprint", "").split()[-1:]  # of the last stage of a curriculum
    folder = local_dir(data) / data.train_split
    if is_remote(data.path) or not (folder / INDEX_NAME).exists():
        return False
    return read_index(folder).fingerprint in trained
