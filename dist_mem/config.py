"""The configuration: every key of a run, its type, its default and what it means.

A run is described by YAML files merged left to right, then dotted overrides:

    dist-mem train configs/demo.yaml configs/memory/none.yaml train.steps=100

`load_config` refuses unknown keys at any depth and wrong values, all at once, each with its file and what was probably
meant. This module imports no torch, so that reading and checking a configuration is quick. The options of a memory are
declared by the memory itself (`Memory.Options`) and checked by `memory_options`, which `load_config` is given.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, cast

from omegaconf import DictConfig, OmegaConf

from dist_mem import deepspeed_keys
from dist_mem.config_check import ConfigError, Problem, all_keys, check_tree, flatten, located, optional_keys, stop_on
from dist_mem.config_rules import check_together, check_values
from dist_mem.config_sources import Source, merge, merge_source, plain_block, read_sources, resolve
from dist_mem.files import write_text

__all__ = [
    "Config",
    "ConfigError",
    "deepspeed_block",
    "load_config",
    "merge_checked",
    "read_config",
    "save_config",
    "to_yaml",
]


@dataclass
class DataConfig:
    path: str = "data/sample"  # directory made by a builder, or where it can be fetched: https:, s3:, gs:, hf:, pipe:
    cache: str | None = None  # directory for what is fetched, one a node; None: dist_mem in the user's cache directory
    train_split: str = "train"  # folder in data.path
    layout: str = "documents"  # documents: each lane reads whole documents | stream: the corpus as G contiguous lanes
    max_document_len: int | None = None  # tokens; longer documents are cut to their beginning
    seed: int = 0  # of the plan: which lane reads which document when
    on_corrupt: str = "stop"  # stop | skip: what to do with a document whose bytes are damaged
    prefetch: int = 4  # updates read ahead of the training step


@dataclass
class AdaptiveConfig:
    cutoffs: list[int] = field(default_factory=list)  # vocabulary bins: [0, c0), [c0, c1), ..., [c_last, V)
    div_val: int = 1  # bin i has width d_embed / div_val**i
    tie_projections: list[bool] | None = None  # one flag per bin; None: every projection tied to the embedding's


@dataclass
class ModelConfig:
    num_layers: int = 4  # blocks, each with a memory of its own
    d_model: int = 256  # D, width of the hidden states
    num_heads: int = 4  # H, of the attention
    d_head: int | None = None  # K, width of a head; None: d_model / num_heads
    d_inner: int = 1024  # feed-forward width
    d_embed: int | None = None  # width of embeddings, which are projected to d_model; None: d_model
    dropout: float = 0.1  # on embeddings, positions, sub-layers and the last hidden states
    attention_dropout: float = 0.0  # on attention probabilities
    norm: str = "pre"  # pre | post: layer norm before or after each sub-layer
    final_norm: bool = True  # layer norm before the softmax; the published Transformer-XL has none, also with pre-norm
    tie_embeddings: bool = True  # the softmax has the weights of the embedding
    adaptive: AdaptiveConfig | None = None  # narrow embeddings for rare tokens, in large vocabularies; None: all alike
    clamp_len: int | None = None  # tokens; larger distances are treated as this one
    same_length: bool = False  # every query sees exactly M keys once the memory is full
    init_std: float = 0.02  # standard deviation of the first weights


@dataclass
class TrainConfig:
    seed: int = 0  # of initialisation and dropout
    lanes: int = 16  # G, of the whole job, whatever the number of ranks
    micro_lanes: int = 8  # lanes in one forward on one rank
    seg_len: int = 64  # T, tokens
    segments_per_update: int = 1  # successive segments whose gradients make one update
    steps: int | None = None  # updates; give this or epochs
    epochs: float | None = None  # readings of every document; give this or steps
    precision: str = "bf16"  # fp32 | bf16 | fp16: of the model's weights and memories; the optimizer works on fp32
    max_grad_norm: float | None = 1.0  # global norm; None: no clipping
    activation_checkpointing: bool = False  # blocks are computed again in the backward pass: less memory, more time
    threads: int | None = None  # CPU threads of one rank; None: cores / ranks on the node (CPU only)


@dataclass
class ParameterGroupConfig:
    match: str = ""  # regular expression searched in the parameter's name; the first group that matches takes it
    lr: float | None = None  # None: optimizer.lr
    weight_decay: float | None = None  # None: optimizer.weight_decay
    trainable: bool = True  # false: these parameters stay as they are


@dataclass
class OptimizerConfig:
    kind: str = "adamw"  # adamw | adam | sgd: torch's own; adam puts the weight decay into the gradient
    lr: float = 1e-3  # at its peak, see schedule
    betas: list[float] = field(default_factory=lambda: [0.9, 0.999])  # adamw and adam only
    eps: float = 1e-8  # adamw and adam only
    momentum: float = 0.0  # sgd only
    weight_decay: float = 0.01  # applied to matrices only, unless a group says otherwise
    groups: list[ParameterGroupConfig] = field(default_factory=list)  # parameters that are treated apart


@dataclass
class ScheduleConfig:
    kind: str = "cosine"  # constant | linear | cosine: how lr goes from its peak to its end
    warmup_steps: int = 0  # in which lr rises to its peak in a straight line
    decay_steps: int | None = None  # after which lr stays at its end; None: all of the training after the warmup
    end_factor: float = 0.0  # lr at the end, as a share of the peak


@dataclass
class EvalConfig:
    every: int | None = None  # steps between evaluations during training; None: none
    split: str = "validation"  # folder in data.path
    lanes: int = 8  # of the whole job; the result does not depend on it
    seg_len: int | None = None  # None: train.seg_len
    max_document_len: int | None = None  # tokens; score only the beginning of each document
    precision: str = "fp32"  # fp32 | bf16 | fp16: of the evaluate command


@dataclass
class CheckpointConfig:
    every: int | None = None  # steps between checkpoints; None: only at the end and on a stop signal
    every_minutes: float | None = None  # minutes between checkpoints, besides `every`, by the clock of rank 0
    keep_last: int | None = None  # the newest checkpoints that are kept, older ones are deleted; None: all are kept
    keep_every: int | None = None  # steps; with keep_last, checkpoints at multiples of it are kept too
    keep_best: int | None = None  # with keep_last, the checkpoints with the lowest validation loss are kept too
    background: bool = True  # files are written while training goes on; false: training waits until they are


@dataclass
class DivergenceConfig:
    action: str = "stop"  # stop | skip | rollback: when a loss, memory or gradient is not finite, or a loss is a spike
    spike_z: float | None = None  # robust z-score above which a loss is a spike; None: no finite loss is
    window: int = 128  # updates whose losses a loss is compared with; until there are as many, none is a spike
    max_times: int = 3  # how often a run may skip or roll back; the next time it stops


@dataclass
class TrackingConfig:
    every: int = 10  # steps between two logged points
    mlflow: bool = True  # false: metrics.jsonl only
    uri: str | None = None  # None: MLFLOW_TRACKING_URI, else sqlite:///mlflow.db
    experiment: str | None = None  # None: MLFLOW_EXPERIMENT_NAME, else MLFLOW_EXPERIMENT_ID, else dist_mem
    run_name: str | None = None  # None: the name of the run
    system_metrics: bool = True  # MLflow's: use of CPU, memory, disk, network and GPUs, on the node of rank 0


@dataclass
class Config:
    name: str = "run"  # of the run directory, and of the run in MLflow
    run_dir: str = "runs/${name}"  # checkpoints, resolved config, metrics.jsonl
    resume: str = "auto"  # auto | never | a step | a path: from which checkpoint to go on, see docs/resume.md
    data: DataConfig = field(default_factory=DataConfig)  # what is read, and which lane reads what when
    model: ModelConfig = field(default_factory=ModelConfig)  # the transformer around the memory
    memory: Any = field(default_factory=lambda: {"kind": "transformer_xl"})  # kind, and the options of that memory
    train: TrainConfig = field(default_factory=TrainConfig)  # what an update is made of, and how many there are
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)  # its kind, and what it does to which parameter
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)  # the learning rate by step
    eval: EvalConfig = field(default_factory=EvalConfig)  # scoring whole documents, in training and after it
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)  # when all is saved, see docs/resume.md
    divergence: DivergenceConfig = field(default_factory=DivergenceConfig)  # what is done then, see docs/divergence.md
    tracking: TrackingConfig = field(default_factory=TrackingConfig)  # what is told of the run, see docs/tracking.md
    deepspeed: Any = field(default_factory=lambda: {"zero_optimization": {"stage": 2}})  # or path of a ds_config.json


MemoryOptions = Callable[[Any], tuple[str, Any]]  # dist_mem.memory.memory_options


@cache
def known_keys() -> tuple[str, ...]:
    """Full dotted keys of the schema and of the `deepspeed:` block."""
    return (*all_keys(Config), *(f"deepspeed.{key}" for key in all_keys(deepspeed_keys.SCHEMA)))


def load_config(arguments: Sequence[str], *, memory_options: MemoryOptions | None = None) -> Config:
    """Read, merge and check a configuration.

    Args:
        arguments: YAML files, merged left to right, and `a.b=c` overrides, which win wherever they stand. A file is
            looked up here, beside the first file, and under configs/.
        memory_options: checks the memory block, whose options are then written out; None leaves it unchecked.

    Returns:
        An OmegaConf structured config; interpolations like `${oc.env:HOME}` stay unresolved in it.

    Raises:
        ConfigError: everything that is wrong, one line each.
    """
    sources = read_sources(arguments)
    stop_on([problem._replace(where=source.where) for source in sources for problem in _check_source(source)])
    tree = cast(dict[str, Any], OmegaConf.to_container(OmegaConf.structured(Config)))
    origins: dict[str, str] = {}
    for source in sources:
        tree = _merged(tree, source)
        origins.update(dict.fromkeys(flatten(source.tree), source.where))
    tree["deepspeed"] = deepspeed_keys.without_defaults(tree["deepspeed"])
    try:
        config = cast(DictConfig, OmegaConf.merge(OmegaConf.structured(Config(memory={}, deepspeed={})), tree))
        stop_on(_check_merged(config))
        if memory_options is not None:
            _write_out_memory(config, memory_options)
    except ConfigError as error:
        raise ConfigError([located(problem, origins) for problem in error.problems]) from None
    return cast(Config, config)


def _check_source(source: Source) -> Iterable[Problem]:
    yield from check_tree(Config, source.tree, everywhere=known_keys())
    block = source.tree.get("deepspeed", {})
    if isinstance(block, Mapping):
        yield from deepspeed_keys.check_block(block, key="deepspeed", everywhere=known_keys())
    else:
        yield Problem("deepspeed", f"is {block!r}, but must be a block or the path of a ds_config.json")


def _merged(tree: dict[str, Any], source: Source) -> dict[str, Any]:
    try:
        return merge_source(tree, source)
    except ConfigError as error:
        raise ConfigError([problem._replace(where=source.where) for problem in error.problems]) from None


def _check_merged(config: DictConfig) -> list[Problem]:
    """What shows only in the whole: interpolated values, ranges, and what must fit together."""
    resolved = resolve(config)
    memory = resolved["memory"]
    if not isinstance(memory, Mapping) or not isinstance(memory.get("kind"), str):
        return [Problem("memory", f"is {memory!r}, but must be a block with a kind")]
    problems = [
        *check_tree(Config, resolved),
        *deepspeed_keys.check_block(resolved["deepspeed"], key="deepspeed", everywhere=()),
    ]
    problems = problems or list(check_values(resolved, optional_keys(Config)))
    return problems or list(check_together(resolved))


def _write_out_memory(config: DictConfig, memory_options: MemoryOptions) -> None:
    try:
        kind, options = memory_options(config.memory)
    except ConfigError:
        raise
    except ValueError as error:
        # Messages of memories begin with the key; the file must come first.
        key, _, text = str(error).partition(" ") if str(error).startswith("memory.") else ("memory", "", str(error))
        raise ConfigError([Problem(key, text)]) from error
    given = cast(dict[str, Any], OmegaConf.to_container(config.memory))  # unresolved
    config.memory = merge({"kind": kind, **asdict(options)}, given)


def merge_checked(schema: type, node: Mapping[str, Any], where: str) -> DictConfig:
    """A block of keys checked against a dataclass and completed with its defaults.

    Args:
        node: the block, plain or part of a configuration.
        where: its key in the configuration, `memory`, for messages.

    Raises:
        ConfigError: unknown keys, with the nearest known ones, or wrong types.
    """
    tree = plain_block(node)
    stop_on(check_tree(schema, tree, key=where, everywhere=known_keys()))
    return cast(DictConfig, OmegaConf.merge(OmegaConf.structured(schema), tree))


def deepspeed_block(config: Config) -> dict[str, Any]:
    """The `deepspeed:` block as given, resolved, without "auto" values and without the keys dist_mem sets."""
    return plain_block(config.deepspeed)


def to_yaml(config: Config, *, resolve: bool = False) -> str:
    """The whole configuration; interpolations stay unresolved: no secret of the environment gets into a file."""
    return OmegaConf.to_yaml(config, resolve=resolve)


def save_config(config: Config, path: Path) -> None:
    """Write the configuration, as `to_yaml` has it, atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, to_yaml(config))


def read_config(path: Path) -> Config:
    """The configuration that `save_config` wrote. Raises ConfigError as `load_config` does."""
    return load_config([str(path)])
