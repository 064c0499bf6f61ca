"""Every key of a run, its type, its default and its meaning; docs/reference/config.md shows the comments here."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class DataConfig:
    path: str = "data/sample"  # directory made by a builder, or where it can be fetched: https:, s3:, gs:, hf:, pipe:
    allow_pipe: bool = False  # run the command of `pipe:`; from the command line only, no file can set it
    cache: str | None = None  # directory for what is fetched, one a node; None: dist_mem in the user's cache directory
    train_split: str = "train"  # folder in data.path
    layout: str = "documents"  # documents: each lane reads whole documents | stream: the corpus as G contiguous lanes
    blocks: bool = False  # a segment's inputs are its own tokens: its first is no target, as in Hugging Face's run_clm
    cut: str = "start"  # start | end: from where documents are cut into segments; end: the first one is the short one
    max_document_len: int | None = None  # tokens; longer documents are cut to their beginning
    seed: int = 0  # of the plan: which lane reads which document when
    on_corrupt: str = "stop"  # stop | skip: what to do with a document whose bytes are damaged
    prefetch: int = 4  # updates read ahead of the training step
    stage: str = "none"  # none | node | memory: copy the shards to each node's disk, or memory, before the first step
    stage_dir: str | None = None  # where to; None: node: TMPDIR or /tmp, memory: /dev/shm


@dataclass
class AdaptiveConfig:
    cutoffs: list[int] = field(default_factory=list)  # vocabulary bins: [0, c0), [c0, c1), ..., [c_last, V)
    div_val: int = 1  # bin i has width d_embed / div_val**i
    tie_projections: list[bool] | None = None  # one flag per bin; None: every projection tied to the embedding's


@dataclass
class TokenTypeConfig:
    id: int = 0  # the token whose embedding is added
    after: list[int] = field(default_factory=list)  # the tokens with which it begins; none for the first: the document


@dataclass
class ModelConfig:
    kind: str = "transformer"  # transformer: relative positions, as Transformer-XL | gpt2: see docs/howto/gpt2.md
    pretrained: str | None = None  # folder of a GPT-2 in Hugging Face's layout whose weights a run begins with
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
    num_positions: int = 1024  # of gpt2 only: learned positions of a segment, at least train.seg_len
    token_types: list[TokenTypeConfig] = field(default_factory=list)  # of gpt2: who speaks, see docs/howto/dialogue.md
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
    threads: int | None = None  # of a rank, on CPUs; None: OMP_NUM_THREADS, SLURM_CPUS_PER_TASK, or cores / local ranks


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
    lanes: int = 8  # of the whole job; the result does not depend on it, but in layout stream
    layout: str = "documents"  # documents: each with an empty memory | stream: the split as `lanes` contiguous lanes
    blocks: bool | None = None  # the first token of a segment is read and not scored; None: data.blocks
    seg_len: int | None = None  # None: train.seg_len
    mem_len: int | None = None  # M of the short-term memory, of the evaluate command; None: as trained
    clamp_len: int | None = None  # likewise; None: model.clamp_len; 0: off, distances are as they are
    same_length: bool | None = None  # likewise; None: model.same_length
    max_document_len: int | None = None  # tokens; score only the beginning of each document
    precision: str = "fp32"  # fp32 | bf16 | fp16: of the evaluate command
    allow_code: bool = False  # run a checkpoint's or export's memory/NAME.py; from the command line only, as allow_pipe


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
    send: str = "auto"  # auto | always | never: to MLflow while the job runs; auto: not into SQLite on a shared disk
    system_metrics: bool = True  # MLflow's: use of CPU, memory, disk, network and GPUs, on the node of rank 0


@dataclass
class WatchdogConfig:
    join_seconds: float = 60.0  # of the start without a further rank, before the job ends and names who is missing
    seconds: float | None = 600.0  # that nothing may move before all ranks tell where they stand, and end; None: off
    straggler: float | None = 1.5  # times as slow as the median rank: such a rank is named; None: none is


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
    name: str = "run"  # of the run directory, and of the run in MLflow
    run_dir: str = "runs/${name}"  # checkpoints, resolved config, metrics.jsonl
    resume: str = "auto"  # auto | never | a step | a path: from which checkpoint to go on, see docs/howto/resume.md
    data: DataConfig = field(default_factory=DataConfig)  # what is read, and which lane reads what when
    model: ModelConfig = field(default_factory=ModelConfig)  # the transformer around the memory
    memory: Any = field(default_factory=lambda: {"kind": "transformer_xl"})  # kind, and the options of that memory
    train: TrainConfig = field(default_factory=TrainConfig)  # what an update is made of, and how many there are
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)  # its kind, and what it does to which parameter
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)  # the learning rate by step
    eval: EvalConfig = field(default_factory=EvalConfig)  # scoring whole documents, in training and after it
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)  # when to save, see docs/howto/resume.md
    divergence: DivergenceConfig = field(default_factory=DivergenceConfig)  # see docs/howto/divergence.md
    tracking: TrackingConfig = field(default_factory=TrackingConfig)  # run logging, see docs/howto/tracking.md
    preflight: bool = True  # look at nodes, network and ranks before the first step, see docs/howto/cluster.md
    watchdog: WatchdogConfig = field(default_factory=WatchdogConfig)  # what is done about ranks that hang or are slow
    launch: LaunchConfig = field(default_factory=LaunchConfig)  # what the launch command asks of Slurm
    deepspeed: Any = field(default_factory=lambda: {"zero_optimization": {"stage": 2}})  # or path of a ds_config.json
