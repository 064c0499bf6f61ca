"""Schema of a run: every key, its type, default and meaning; docs/reference/config.md shows these comments."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class DataConfig:
    path: str = "data/sample"  # directory written by a builder, or its address: https:, s3:, gs:, hf:, pipe:
    allow_pipe: bool = False  # run the command of `pipe:`; accepted on the command line only, no file can set it
    cache: str | None = None  # directory for fetched data, one per node; None: dist_mem in the user's cache directory
    train_split: str = "train"  # folder in data.path
    layout: str = "documents"  # documents: each lane reads whole documents | stream: the corpus as G contiguous lanes
    blocks: bool = False  # inputs of a segment are its own tokens; the first is no target, as in Hugging Face's run_clm
    cut: str = "start"  # start | end: where the cutting of a document begins; end: its first segment is the short one
    max_document_len: int | None = None  # tokens; longer documents are truncated
    seed: int = 0  # of the plan, which decides which lane reads which document when
    on_corrupt: str = "stop"  # stop | skip: action for a document whose bytes are damaged
    prefetch: int = 4  # updates read ahead of the training step
    stage: str = "none"  # none | node | memory: copy the shards to each node's disk or memory before the first step
    stage_dir: str | None = None  # target of the copy; None: TMPDIR or /tmp for node, /dev/shm for memory


@dataclass
class AdaptiveConfig:
    cutoffs: list[int] = field(default_factory=list)  # vocabulary bins: [0, c0), [c0, c1), ..., [c_last, V)
    div_val: int = 1  # bin i has width d_embed / div_val**i
    tie_projections: list[bool] | None = None  # one flag per bin; None: every projection tied to the embedding's


@dataclass
class TokenTypeConfig:
    id: int = 0  # token whose embedding is added
    after: list[int] = field(default_factory=list)  # tokens that start this type; empty for the first, the document


@dataclass
class ModelConfig:
    kind: str = "transformer"  # transformer: relative positions, as Transformer-XL | gpt2: see docs/howto/gpt2.md
    pretrained: str | None = None  # folder of a GPT-2 in Hugging Face's layout that provides the initial weights
    num_layers: int = 4  # blocks, each with its own memory
    d_model: int = 256  # D, width of the hidden states
    num_heads: int = 4  # H, attention heads
    d_head: int | None = None  # K, width of a head; None: d_model / num_heads
    d_inner: int = 1024  # width of the feed-forward layers
    d_embed: int | None = None  # width of the embeddings, which are projected to d_model; None: d_model
    dropout: float = 0.1  # on embeddings, positions, sub-layers and the last hidden states
    attention_dropout: float = 0.0  # on attention probabilities
    norm: str = "pre"  # pre | post: layer norm before or after each sub-layer
    final_norm: bool = True  # layer norm before the softmax; the published Transformer-XL has none, even with pre-norm
    tie_embeddings: bool = True  # the softmax shares the weights of the embedding
    adaptive: AdaptiveConfig | None = None  # narrower embeddings for rare tokens of large vocabularies; None: all equal
    num_positions: int = 1024  # gpt2 only: learned positions of a segment, at least train.seg_len
    token_types: list[TokenTypeConfig] = field(default_factory=list)  # of gpt2: who speaks, see docs/howto/dialogue.md
    clamp_len: int | None = None  # tokens; larger distances are clamped to this one
    same_length: bool = False  # every query attends to exactly M keys once the memory is full
    init_std: float = 0.02  # standard deviation of the initial weights


@dataclass
class TrainConfig:
    seed: int = 0  # of initialisation and dropout
    lanes: int = 16  # G, of the whole job, independent of the number of ranks
    micro_lanes: int = 8  # lanes in one forward pass on one rank
    seg_len: int = 64  # T, tokens
    segments_per_update: int = 1  # successive segments whose gradients one update accumulates
    steps: int | None = None  # updates; give this or epochs
    epochs: float | None = None  # passes over all documents; give this or steps
    precision: str = "bf16"  # fp32 | bf16 | fp16: of the model's weights and memories; the optimizer uses fp32
    max_grad_norm: float | None = 1.0  # global norm; None: no clipping
    activation_checkpointing: bool = False  # recompute blocks in the backward pass: less memory, more time
    threads: int | None = None  # per rank, on CPUs; None: OMP_NUM_THREADS, SLURM_CPUS_PER_TASK, or cores / local ranks


@dataclass
class ParameterGroupConfig:
    match: str = ""  # regular expression searched in the parameter's name; the first matching group applies
    lr: float | None = None  # None: optimizer.lr
    weight_decay: float | None = None  # None: optimizer.weight_decay
    trainable: bool = True  # false: these parameters do not change


@dataclass
class OptimizerConfig:
    kind: str = "adamw"  # adamw | adam | sgd: torch's; adam adds the weight decay to the gradient
    lr: float = 1e-3  # peak learning rate, see schedule
    betas: list[float] = field(default_factory=lambda: [0.9, 0.999])  # adamw and adam only
    eps: float = 1e-8  # adamw and adam only
    momentum: float = 0.0  # sgd only
    weight_decay: float = 0.01  # applied to matrices only, unless a group sets it
    groups: list[ParameterGroupConfig] = field(default_factory=list)  # parameters with different settings


@dataclass
class ScheduleConfig:
    kind: str = "cosine"  # constant | linear | cosine: decay of lr from its peak to its final value
    warmup_steps: int = 0  # steps in which lr rises linearly to its peak
    decay_steps: int | None = None  # steps after which lr keeps its final value; None: all steps after the warmup
    end_factor: float = 0.0  # final lr, as a fraction of the peak


@dataclass
class EvalConfig:
    every: int | None = None  # steps between evaluations during training; None: none
    split: str = "validation"  # folder in data.path
    lanes: int = 8  # of the whole job; affects the result only in layout stream
    layout: str = "documents"  # documents: each with an empty memory | stream: the split as `lanes` contiguous lanes
    blocks: bool | None = None  # read the first token of a segment without scoring it; None: data.blocks
    seg_len: int | None = None  # None: train.seg_len
    mem_len: int | None = None  # M of the short-term memory in the evaluate command; None: as trained
    clamp_len: int | None = None  # of the evaluate command; None: model.clamp_len; 0: no clamping of distances
    same_length: bool | None = None  # of the evaluate command; None: model.same_length
    max_document_len: int | None = None  # tokens; score only the beginning of each document
    precision: str = "fp32"  # fp32 | bf16 | fp16: of the evaluate command
    allow_code: bool = False  # run memory/NAME.py of a checkpoint or export; on the command line only, as allow_pipe


@dataclass
class CheckpointConfig:
    every: int | None = None  # steps between checkpoints; None: only at the end and on a stop signal
    every_minutes: float | None = None  # minutes between checkpoints, in addition to `every`, by the clock of rank 0
    keep_last: int | None = None  # number of newest checkpoints to keep, older ones are deleted; None: keep all
    keep_every: int | None = None  # steps; with keep_last, also keep the checkpoints at multiples of it
    keep_best: int | None = None  # with keep_last, also keep this many with the lowest validation loss
    background: bool = True  # write files while training continues; false: training waits for them


@dataclass
class DivergenceConfig:
    action: str = "stop"  # stop | skip | rollback: action if a loss, memory or gradient is not finite, or a loss spikes
    spike_z: float | None = None  # robust z-score above which a loss is a spike; None: no finite loss is
    window: int = 128  # updates a loss is compared with; no loss is a spike before there are this many
    max_times: int = 3  # most skips and rollbacks of a run; the next one stops it


@dataclass
class TrackingConfig:
    every: int = 10  # steps between logged points
    mlflow: bool = True  # false: write metrics.jsonl only
    uri: str | None = None  # None: MLFLOW_TRACKING_URI, else sqlite:///mlflow.db
    experiment: str | None = None  # None: MLFLOW_EXPERIMENT_NAME, else MLFLOW_EXPERIMENT_ID, else dist_mem
    run_name: str | None = None  # None: the name of the run
    send: str = "auto"  # auto | always | never: send to MLflow during the job; auto: not to SQLite on a shared disk
    system_metrics: bool = True  # log MLflow's metrics of CPU, memory, disk, network and GPUs on the node of rank 0


@dataclass
class WatchdogConfig:
    join_seconds: float = 60.0  # at start, seconds without a new rank before the job ends and names the missing ranks
    seconds: float | None = 600.0  # seconds without progress before all ranks report their state and end; None: off
    straggler: float | None = 1.5  # report a rank this many times as slow as the median rank; None: off


@dataclass
class LaunchConfig:
    nodes: str = "1"  # number, or range as 60-64
    gpus_per_node: str = "8"  # number, or type and number as a100:4; 0: train on CPUs; --gres in directives goes before
    tasks_per_node: int | None = None  # ranks; None: one per GPU, or one on CPUs
    cpus_per_task: int | None = None  # None: the cluster's default
    memory: str | None = None  # of a node, as 64G; None: the cluster's default
    time: str = "24:00:00"  # of one start of the job, in quotes: YAML takes it for a number
    partition: str | None = None  # None: the cluster's default; so for the next two
    account: str | None = None  # who pays
    qos: str | None = None  # quality of service
    dependency: str | None = None  # jobs that the first start waits for, as afterok:1234; in sbatch's form
    directives: list[str] = field(default_factory=list)  # more options of sbatch, as --constraint=a100
    setup: list[str] = field(default_factory=list)  # shell lines before training: module load, activate
    env: list[str] = field(default_factory=list)  # NAME=VALUE, for all ranks; no secrets: they stand in the script
    interface: str | None = None  # network interface for NCCL and gloo, as ib0; None: they choose
    signal_seconds: int = 300  # before the end of the time, when all ranks are told to stop and save
    restart: str = "requeue"  # requeue | resubmit | chain | none: how a job that has not finished goes on
    chain: int = 10  # jobs of a chain, one after another
    max_stalled: int = 3  # starts without a new checkpoint after which the job is not started again
    snapshot: bool = True  # every start runs code and YAML as submitted, from a copy in the run directory
    exclude_failed: bool = False  # nodes that failed the preflight or hung are left out of the next start
    container: str = "none"  # none | apptainer | pyxis: what runs the ranks in an image
    image: str | None = None  # path of a .sif file; for pyxis also the name of an image
    mounts: list[str] = field(default_factory=list)  # PATH or PATH:PATH_INSIDE, beside the folder of the job


@dataclass
class Config:
    name: str = "run"  # name of the run directory, and of the run in MLflow
    run_dir: str = "runs/${name}"  # folder of checkpoints, config.yaml and metrics.jsonl
    resume: str = "auto"  # auto | never | a step | a path: the checkpoint to resume from, see docs/howto/resume.md
    data: DataConfig = field(default_factory=DataConfig)  # the data and the order in which lanes read it
    model: ModelConfig = field(default_factory=ModelConfig)  # the transformer around the memory
    memory: Any = field(default_factory=lambda: {"kind": "transformer_xl"})  # kind and options of the memory
    train: TrainConfig = field(default_factory=TrainConfig)  # the size of an update and the number of updates
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)  # the optimizer and its parameter groups
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)  # the learning rate by step
    eval: EvalConfig = field(default_factory=EvalConfig)  # scoring of documents, during and after training
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)  # see docs/howto/resume.md
    divergence: DivergenceConfig = field(default_factory=DivergenceConfig)  # see docs/howto/divergence.md
    tracking: TrackingConfig = field(default_factory=TrackingConfig)  # run logging, see docs/howto/tracking.md
    preflight: bool = True  # check nodes, network and ranks before the first step, see docs/howto/cluster.md
    watchdog: WatchdogConfig = field(default_factory=WatchdogConfig)  # handling of ranks that hang or are slow
    launch: LaunchConfig = field(default_factory=LaunchConfig)  # the Slurm job of the launch command
    deepspeed: Any = field(default_factory=lambda: {"zero_optimization": {"stage": 2}})  # or path of a ds_config.json
