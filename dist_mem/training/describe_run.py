"""Log the metadata of a run: its code, machine, model and data."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

from dist_mem.data.remote.fetch import show
from dist_mem.data.shard import Index
from dist_mem.estimate.counting import Flops
from dist_mem.runtime.distributed import World
from dist_mem.runtime.environment import slurm_job
from dist_mem.tracking.provenance import git_state, versions, who_runs_what
from dist_mem.tracking.tracker import Tracker

_DIGEST_CHARS = 12  # in the names of datasets; the checkpoints have the whole fingerprint
_GIT_DIFF = "git.diff"


def describe_run(
    tracker: Tracker,
    sizes: Mapping[str, int],
    paths: Sequence[str],
    evaluated: str,
    world: World,
    indexes: Sequence[Index],
    sources: Mapping[str, str],
    flops: Flops | None,
) -> None:
    """Log the metadata of a run: its code, machine, model and data; only for rank 0, because it runs git.

    Args:
        sizes: of the model, by name.
        paths: of the data of every stage or source, as written in the configuration.  evaluated: data.path, likewise.
        indexes: of the training split of every stage or source, then of those for evaluation.
        sources: of memories and sinks outside the package, name -> text.
        flops: None: they cannot be counted.
    """
    git = git_state()
    tracker.log_tags({**who_runs_what(), **git.tags, **versions(), "world_size": str(world.size), **slurm_job()})
    of_token = {} if flops is None else {f"{name}_flops_per_token": value for name, value in flops._asdict().items()}
    tracker.log_params({f"model.{name}": size for name, size in {**of_token, **sizes}.items()})
    tracker.log_artifact("config.yaml")
    if git.diff:
        tracker.log_text(git.diff, _GIT_DIFF)
    for name, text in sources.items():
        tracker.log_text(text, name)
        tracker.log_tags({f"dist_mem.sha256.{name}": hashlib.sha256(text.encode()).hexdigest()})
    contexts = ["training"] * len(paths) + ["validation"] * (len(indexes) - len(paths))
    of_indexes = [*paths, *[evaluated] * (len(indexes) - len(paths))]
    tracker.log_datasets(
        [
            _describe_dataset(index, show(path), context)
            for index, path, context in zip(indexes, of_indexes, contexts, strict=True)
        ]
    )


def _describe_dataset(index: Index, path: str, context: str) -> dict[str, Any]:
    return {
        "name": f"{index.name}/{index.split}",
        "digest": index.fingerprint[:_DIGEST_CHARS],
        "source": f"{path}/{index.split}",
        "context": context,
        "profile": {"documents": len(index.documents), "tokens": index.num_tokens, "words": index.num_words},
    }
