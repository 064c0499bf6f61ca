"""The schema of a run: for every key its type, default, metadata (`keys.key`) and meaning.

docs/reference/config.md is generated from it. The comment beside or above a key is its meaning. A key without
`resume`, `affects` or `set_by` has those of its block. The keys of a Slurm job are in launch_schema.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dist_mem.config.blocks import as_tree
from dist_mem.config.keys import (
    ALLOWED,
    DATA,
    DRAW,
    EVALUATION,
    FREE,
    LANES,
    PLACE,
    RECOMPUTATION,
    RESULT,
    SCORE,
    SECONDS,
    SEED,
    SPEED,
    STEPS,
    TEXT,
    TOKENS,
    VOCABULARY,
    WIDTH,
    forbid,
    key,
)
from dist_mem.config.launch_schema import LaunchConfig

# Why keys must not change when a run is resumed. FREE are names, machine, supervision, saving and evaluation; the place
# of the data, whose fingerprints are compared; what every step reads, such as lr; and the division of lanes and state
# among ranks, which affects speed, not results. ALLOWED is what an update computes: the checkpoint still fits.
_PLAN = forbid("every lane is in the middle of a document that this would assign to another lane or cut differently")
_MODEL = forbid("the parameters of the checkpoint are those of that model")
_MEMORY = forbid("the lanes of the checkpoint carry memories of that kind and size")
_DRAWS = forbid("memories draw their random numbers from it")
_NUM_LANES = forbid(
    "a memory belongs to a lane, and the plan assigns the documents to that many lanes: with another number each lane "
    "would be in the middle of a document that is no longer its own (the number of ranks, train.micro_batch_size and "
    "train.segments_per_update may change)"
)
_SEGMENTS = forbid("memories are built for segments of that length, and lanes are between two of them")
_MOMENTS = forbid("the checkpoint holds the moments of that optimizer")
_ANY = EVALUATION | RECOMPUTATION
_IN_ENVIRONMENT = "write ${oc.env:NAME} in their place, which files contain unresolved"
_OF_STORE = (
    "set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD in the environment; for a database write "
    "${oc.env:NAME} in their place, or set MLFLOW_TRACKING_URI"
)
DOCUMENT = "_document"  # attribute of a configuration that load.py made
_PRECISIONS = ("fp32", "bf16", "fp16")
_LAYOUTS = ("documents", "stream")
DECAY_SHAPES = ("sqrt", "linear", "cosine")
# Of train.activation_checkpointing: what a block recomputes besides, where whole segments of a window are.
BY_SEGMENTS = {"segments": "none", "segments_and_blocks": "blocks"}
_RECOMPUTED = ("none", "blocks", "attention", "feed_forward", *BY_SEGMENTS)
ROPE_KINDS = {  # the keys of model.rope that each kind reads, besides factor
    "linear": (),
    "dynamic": (),
    "llama3": ("original_positions", "low_freq_factor", "high_freq_factor"),
    "yarn": ("original_positions", "beta_fast", "beta_slow", "truncate", "attention_factor"),
}


@dataclass(frozen=True)
class StageConfig:
    # directory on disk, as data.path
    path: str = key("", is_path=True, may_be_empty=True, per_node=True, resume=FREE, affects=DATA, set_by=RECOMPUTATION)
    until: int = key(0, at_least=1, at_most=STEPS)  # last step that reads it; later than that of the stage before


@dataclass(frozen=True)
class SourceConfig:
    # directory on disk, as data.path
    path: str = key("", is_path=True, may_be_empty=True, per_node=True, resume=FREE, affects=DATA, set_by=RECOMPUTATION)
    # its share of the tokens, relative to the weights of the others; 0: it gives no further document
    weight: float = key(1.0, at_least=0, resume=FREE)
    # after so many passes over its documents the others share its part; None: it never ends
    epochs: int | None = key(None, at_least=1, at_most=STEPS, resume=FREE)


@dataclass(frozen=True)
class DataConfig:
    # directory written by a builder, or its address: https:, s3:, gs:, hf:
    path: str = key(
        "data/sample", is_path=True, per_node=True, credentials=_IN_ENVIRONMENT, resume=FREE, affects=DATA, set_by=_ANY
    )
    # directory for fetched data, one per node; None: dist_mem in the user's cache directory
    cache: str | None = key(None, is_path=True, per_node=True, resume=FREE, affects=PLACE, set_by=_ANY)
    # directories that are read before data.path: see docs/howto/recall_tasks.md
    curriculum: list[StageConfig] = key([])
    # directories whose documents are read by weight, in place of those of data.path: see docs/howto/mixtures.md
    mixture: list[SourceConfig] = key([])
    # share of right answers in an evaluation of its own data at which a stage ends before its `until`; None: none
    until_accuracy: float | None = key(None, above=0, at_most=1, resume=ALLOWED)
    train_split: str = key("train", in_path=True)  # folder in data.path
    # documents: each lane reads whole documents | stream: the corpus as G contiguous lanes
    layout: str = key("documents", choices=_LAYOUTS)
    blocks: bool = False  # inputs of a segment are its own tokens; the first is no target, as in Hugging Face's run_clm
    # where the cutting of a document begins; end: its first segment is the short one
    cut: str = key("start", choices=("start", "end"))
    max_document_len: int | None = key(None, at_least=2, at_most=TEXT)  # tokens; longer documents are truncated
    # of the plan, which decides which lane reads which document when
    seed: int = key(0, at_least=0, at_most=SEED, affects=DRAW)
    # action for a document whose bytes are damaged
    on_corrupt: str = key("stop", choices=("stop", "skip"), resume=FREE)
    # updates read ahead of the training step
    prefetch: int = key(4, at_least=1, at_most=10_000, resume=FREE, affects=SPEED)
    # copy the shards to each node's disk or memory before the first step
    stage: str = key("none", choices=("none", "node", "memory"), resume=FREE, affects=SPEED, set_by=_ANY)
    # target of the copy; None: TMPDIR or /tmp for node, /dev/shm for memory
    stage_dir: str | None = key(None, is_path=True, per_node=True, resume=FREE, affects=PLACE, set_by=_ANY)


@dataclass(frozen=True)
class AdaptiveConfig:
    cutoffs: list[int] = key([], at_least=1, at_most=VOCABULARY)  # vocabulary bins: [0, c0), [c0, c1), ..., [c_last, V)
    div_val: int = key(1, at_least=1, at_most=1_024)  # bin i has width d_embed / div_val**i
    tie_projections: list[bool] | None = None  # one flag per bin; None: every projection tied to the embedding's


@dataclass(frozen=True)
class TokenTypeConfig:
    id: int = key(0, at_least=0, at_most=VOCABULARY)  # token whose embedding is added
    # tokens that start this type; empty for the first, the document
    after: list[int] = key([], at_least=0, at_most=VOCABULARY)


@dataclass(frozen=True)
class RopeConfig:
    # linear: all wavelengths are scaled | dynamic: theta grows with windows of more than num_positions tokens | llama3,
    # yarn: long wavelengths are scaled, as in Llama 3.1 and in YaRN
    kind: str | None = key(None, choices=tuple(ROPE_KINDS))
    factor: float | None = key(None, above=0)  # by which the texts are longer than those of the first training
    # of llama3 and yarn: longest text of the first training, in tokens; None: num_positions
    original_positions: int | None = key(None, at_least=1, at_most=TOKENS)
    low_freq_factor: float = key(1.0, above=0)  # of llama3: wavelengths with fewer turns there are scaled
    high_freq_factor: float = key(4.0, above=0)  # of llama3: wavelengths with more turns are not
    beta_fast: float = key(32.0, above=0)  # of yarn: wavelengths with more turns are not scaled
    beta_slow: float = key(1.0, above=0)  # of yarn: wavelengths with fewer turns are scaled
    truncate: bool = True  # of yarn: the limits between them are whole numbers of wavelengths
    # of yarn: factor of queries and keys; None: 0.1 ln(factor) + 1
    attention_factor: float | None = key(None, above=0)


@dataclass(frozen=True)
class LoraConfig:
    rank: int = key(16, at_least=1, at_most=WIDTH)  # r, width between the two matrices
    alpha: float = key(32.0, above=0)  # what they add is multiplied by alpha / rank
    dropout: float = key(0.0, at_least=0, below=1, resume=ALLOWED)  # of their input
    attention: bool = True  # beside queries, keys with values, and output
    feed_forward: bool = True  # beside the projections of the feed-forward layers


@dataclass(frozen=True)
class ModelConfig:
    # transformer: relative positions, as Transformer-XL | gpt2: see docs/howto/gpt2.md | llama: see docs/howto/llama.md
    kind: str = key("transformer", choices=("transformer", "gpt2", "llama"))
    # folder of a GPT-2, Llama, Qwen or Mistral in Hugging Face's layout that provides the initial weights
    pretrained: str | None = key(None, is_path=True, resume=FREE)
    num_layers: int = key(4, at_least=1, at_most=4_096)  # blocks, each with its own memory
    d_model: int = key(256, at_least=1, at_most=WIDTH)  # D, width of the hidden states
    num_heads: int = key(4, at_least=1, at_most=WIDTH)  # H, attention heads
    d_head: int | None = key(None, at_least=1, at_most=WIDTH)  # K, width of a head; None: d_model / num_heads
    d_inner: int = key(1024, at_least=1, at_most=4 * WIDTH)  # width of the feed-forward layers
    # width of the embeddings, which are projected to d_model; None: d_model
    d_embed: int | None = key(None, at_least=1, at_most=WIDTH)
    # on embeddings, positions, sub-layers and the last hidden states
    dropout: float = key(0.1, at_least=0, below=1, resume=ALLOWED)
    attention_dropout: float = key(0.0, at_least=0, below=1, resume=ALLOWED)  # on attention probabilities
    # how attention is computed, see docs/explanation/attention.md; auto chooses by device and length
    attention: str = key("auto", choices=("auto", "simple", "chunked", "sdpa", "triton"), resume=FREE, affects=SPEED)
    norm: str = key("pre", choices=("pre", "post"))  # layer norm before or after each sub-layer
    final_norm: bool = True  # layer norm before the softmax; the published Transformer-XL has none, even with pre-norm
    tie_embeddings: bool = True  # the softmax shares the weights of the embedding
    adaptive: AdaptiveConfig | None = None  # narrower embeddings for rare tokens of large vocabularies; None: all equal
    # gpt2: learned positions of a segment; llama: longest text, for transformers only; both: at least train.seg_len
    num_positions: int = key(1024, at_least=1, at_most=TOKENS)
    # of llama: heads of keys and values, which query heads share; None: num_heads
    num_kv_heads: int | None = key(None, at_least=1, at_most=WIDTH)
    rope_theta: float = key(10_000.0, above=0)  # of llama: base of the wavelengths of rotary positions
    # of llama: rotary positions for texts longer than those of the first training; None: as they are
    rope: RopeConfig | None = key(None, resume=ALLOWED)
    norm_eps: float = key(1e-5, above=0)  # of llama: added to the mean square in its norms
    qkv_bias: bool = False  # of llama: queries, keys and values have biases, as in Qwen2
    qk_norm: bool = False  # of llama: the queries and keys of every head are normed, as in Qwen3
    # of llama: newest tokens that a token attends to, itself included, as in Mistral; None: all
    sliding_window: int | None = key(None, at_least=1, at_most=TOKENS, resume=ALLOWED)
    # of gpt2 and llama: narrow matrices beside the projections of the blocks, for which optimizer.groups keeps the
    # others as they are (configs/pretrained/lora.yaml); None: none
    lora: LoraConfig | None = None
    token_types: list[TokenTypeConfig] = key([])  # of gpt2: who speaks, see docs/howto/dialogue.md
    clamp_len: int | None = key(None, at_least=1, at_most=TEXT)  # tokens; larger distances are clamped to this one
    same_length: bool = False  # every query attends to exactly M keys once the memory is full
    init_std: float = key(0.02, above=0)  # standard deviation of the initial weights


@dataclass(frozen=True)
class TrainConfig:
    seed: int = key(0, at_least=0, at_most=SEED, resume=_DRAWS, affects=DRAW)  # of initialisation and dropout
    # G, of the whole job, independent of the number of ranks
    global_batch_size: int = key(16, at_least=1, at_most=LANES, resume=_NUM_LANES)
    # lanes in one forward pass on one rank
    micro_batch_size: int = key(8, at_least=1, at_most=LANES, resume=FREE, affects=SPEED, set_by=EVALUATION)
    seg_len: int = key(64, at_least=1, at_most=TOKENS, resume=_SEGMENTS)  # T, tokens
    # successive segments whose gradients one update accumulates
    segments_per_update: int = key(1, at_least=1, at_most=65_536, resume=ALLOWED)
    # segments that gradients flow through where a memory carries them; divides segments_per_update: docs/howto/bptt.md
    bptt_segments: int = key(1, at_least=1, at_most=65_536, resume=ALLOWED)
    # what empties the memories of a training besides a document's start: segment: every segment | window: every
    # bptt_segments; the control of what a carried state is worth. Evaluations carry it
    reset: str = key("never", choices=("never", "window", "segment"), resume=ALLOWED)
    # updates after which `reset` ends, and memories are carried; None: at the end
    reset_steps: int | None = key(None, at_least=1, at_most=STEPS, resume=ALLOWED)
    steps: int | None = key(None, at_least=1, at_most=STEPS, resume=FREE)  # updates; give this or epochs
    # passes over all documents; give this or steps
    epochs: float | None = key(None, above=0, at_most=STEPS, resume=FREE)
    # of the model's weights and memories; the optimizer uses fp32
    precision: str = key("bf16", choices=_PRECISIONS, resume=ALLOWED)
    max_grad_norm: float | None = key(1.0, above=0, resume=FREE)  # global norm; None: no clipping
    # what the backward pass recomputes instead of keeping its activations: less memory, more time; segments: of the
    # bptt_segments of a window, one at a time, from the states between them
    activation_checkpointing: str = key("none", choices=_RECOMPUTED, resume=FREE, affects=SPEED)
    # share of the blocks, the first ones, that activation_checkpointing applies to
    activation_checkpointing_share: float = key(1.0, above=0, at_most=1, resume=FREE, affects=SPEED)
    # steps between garbage collections of Python, on all ranks at once; None: when each rank has enough objects
    gc_every: int | None = key(100, at_least=1, at_most=STEPS, resume=FREE, affects=SPEED)
    # compile the blocks by torch.compile, see docs/howto/performance.md; None: on GPUs, if the compiler accepts them
    compile: bool | None = key(None, resume=FREE, affects=SPEED)
    # two steps, as [10, 15]: rank 0 traces what happens between them, into RUN/profile; None: no trace
    profile: list[int] | None = key(None, at_least=0, at_most=STEPS, resume=FREE, affects=SPEED)
    # peak TFLOP/s of one rank's device in this precision, for the metric mfu; None: by the GPU's name, measured on CPUs
    peak_tflops: float | None = key(None, above=0, resume=FREE, affects=SPEED)
    # with fp32, on GPUs: products use TF32 (10 of 23 bits of the mantissa); refused for memories that compute in fp32
    tf32: bool = key(False, resume=ALLOWED)
    # on GPUs, run the threads of a rank only on the cores next to its GPU
    numa_binding: bool = key(True, resume=FREE, affects=SPEED)
    # per rank, on CPUs; None: OMP_NUM_THREADS, SLURM_CPUS_PER_TASK, or cores / local ranks
    threads: int | None = key(
        None, at_least=1, at_most=4_096, per_node=True, resume=FREE, affects=SPEED, set_by=EVALUATION
    )


@dataclass(frozen=True)
class ParameterGroupConfig:
    # regular expression searched in the parameter's name; the first matching group applies
    param_regex: str = key("", may_be_empty=True)
    # of gpt2 and llama: true: of these only the weights of the published model | false: only those that it lacks, of
    # memories and LoRA; None: all
    pretrained: bool | None = None
    lr: float | None = key(None, above=0)  # None: optimizer.lr
    weight_decay: float | None = key(None, at_least=0)  # None: optimizer.weight_decay
    trainable: bool = True  # false: these parameters do not change
    # of optimizer.kind=muon: adamw | muon, which takes matrices only; None: muon for weights of linear maps in blocks
    rule: str | None = key(None, choices=("adamw", "muon"))


@dataclass(frozen=True)
class MuonConfig:
    lr: float | None = key(None, above=0)  # of matrices; None: optimizer.lr
    weight_decay: float | None = key(None, at_least=0)  # of its matrices; None: optimizer.weight_decay
    momentum: float = key(0.95, at_least=0, below=1)  # share of the old momentum that a step keeps
    nesterov: bool = True  # the update looks ahead by one step of the momentum
    steps: int = key(5, at_least=1, at_most=100)  # of the Newton-Schulz iteration
    eps: float = key(1e-7, above=0)  # least norm that divides a matrix
    # what the step is multiplied by, from the shape: match_rms_adamw, 0.2 sqrt(max(rows, columns)), with which rates of
    # AdamW carry over | original, sqrt(max(1, rows / columns))
    scale: str = key("match_rms_adamw", choices=("match_rms_adamw", "original"))
    precision: str = key("fp32", choices=("fp32", "bf16"))  # of Newton-Schulz; published: bf16


@dataclass(frozen=True)
class OptimizerConfig:
    # torch's; adam adds the weight decay to the gradient; muon: of the weights of linear maps in blocks, adamw for all
    # else, docs/howto/muon.md
    kind: str = key("adamw", choices=("adamw", "adam", "sgd", "muon"), resume=_MOMENTS)
    lr: float = key(1e-3, above=0, resume=FREE)  # peak learning rate, see schedule
    betas: list[float] = key([0.9, 0.999], at_least=0, below=1)  # of adamw and adam, also beside muon
    eps: float = key(1e-8, above=0)  # adamw and adam only
    muon: MuonConfig | None = None  # of kind muon; None: its defaults
    momentum: float = key(0.0, at_least=0, below=1)  # sgd only
    weight_decay: float = key(0.01, at_least=0)  # of tensors of two or more dimensions but biases; a group may set it
    groups: list[ParameterGroupConfig] = key([])  # parameters with different settings


@dataclass(frozen=True)
class ScheduleConfig:
    # decay of lr from its peak to its final value; wsd: it holds its peak, and decays at the end of the training
    kind: str = key("cosine", choices=("constant", "linear", "cosine", "wsd"))
    warmup_steps: int = key(0, at_least=0, at_most=STEPS)  # steps in which lr rises linearly to its peak
    # steps after which lr keeps its final value; None: all steps after the warmup. Of wsd: the last steps, which decay
    decay_steps: int | None = key(None, at_least=1, at_most=STEPS)
    # of wsd: share of the training that decays, at its end; 0: lr holds; None: decay_steps, else 0.2
    decay_share: float | None = key(None, at_least=0, at_most=1)
    # of wsd: how lr falls with the square root of the steps that decay, linearly, or as a cosine; None: sqrt
    decay_shape: str | None = key(None, choices=DECAY_SHAPES)
    end_factor: float = key(0.0, at_least=0)  # final lr, as a fraction of the peak


@dataclass(frozen=True)
class EvalConfig:
    every: int | None = key(None, at_least=1, at_most=STEPS)  # steps between evaluations during training; None: none
    split: str = key("validation", in_path=True)  # folder in data.path
    batch_size: int = key(8, at_least=1, at_most=LANES)  # of the whole job; affects the result only in layout stream
    # documents: each with an empty memory | stream: the split as `batch_size` contiguous lanes
    layout: str = key("documents", choices=_LAYOUTS)
    blocks: bool | None = None  # read the first token of a segment without scoring it; None: data.blocks
    seg_len: int | None = key(None, at_least=1, at_most=TOKENS)  # None: train.seg_len
    # M of the short-term memory in the evaluate command; None: as trained
    mem_len: int | None = key(None, at_least=1, at_most=TOKENS)
    # of the evaluate command; None: model.clamp_len; 0: no clamping of distances
    clamp_len: int | None = key(None, at_least=0, at_most=TEXT)
    same_length: bool | None = None  # of the evaluate command; None: model.same_length
    # tokens; score only the beginning of each document
    max_document_len: int | None = key(None, at_least=1, at_most=TEXT)
    precision: str = key("fp32", choices=_PRECISIONS)  # of the evaluate command
    # segments of the passage that an evaluation during training also reads, to log metrics under memory/; 0: none
    passage: int = key(16, at_least=0, at_most=TOKENS)
    figures: bool = key(False, affects=PLACE)  # draw where every layer looked in it, into RUN/figures and MLflow
    # run memory/NAME.py of a checkpoint or export; accepted on the command line only
    allow_code: bool = key(False, command_line_only=True, affects=PLACE, set_by=_ANY)


@dataclass(frozen=True)
class CheckpointConfig:
    # steps between checkpoints; None: only at the end and on a stop signal
    every: int | None = key(None, at_least=1, at_most=STEPS)
    # minutes between checkpoints, in addition to `every`, by the clock of rank 0
    every_minutes: float | None = key(None, above=0, at_most=SECONDS)
    # number of newest checkpoints to keep, older ones are deleted; None: keep all
    keep_last: int | None = key(None, at_least=1, at_most=STEPS)
    # steps; with keep_last, also keep the checkpoints at multiples of it
    keep_every: int | None = key(None, at_least=1, at_most=STEPS)
    # with keep_last, also keep this many with the lowest validation loss of each measure (settings of `eval`, data)
    keep_best: int | None = key(None, at_least=1, at_most=STEPS)
    background: bool = True  # write files while training continues; false: training waits for them


@dataclass(frozen=True)
class DivergenceConfig:
    # action if a loss, memory or gradient is not finite, or a loss spikes
    action: str = key("stop", choices=("stop", "skip", "rollback"))
    spike_z: float | None = key(None, above=0)  # robust z-score above which a loss is a spike; None: no finite loss is
    # updates a loss is compared with; no loss is a spike before there are this many
    window: int = key(128, at_least=8, at_most=1_000_000)
    max_times: int = key(3, at_least=0, at_most=STEPS)  # most skips and rollbacks of a run; the next one stops it


@dataclass(frozen=True)
class TrackingConfig:
    every: int = key(10, at_least=1, at_most=STEPS)  # steps between logged points
    mlflow: bool = True  # false: write metrics.jsonl only
    # None: MLFLOW_TRACKING_URI, else sqlite:///mlflow.db
    uri: str | None = key(None, is_store=True, credentials=_OF_STORE)
    experiment: str | None = None  # None: MLFLOW_EXPERIMENT_NAME, else MLFLOW_EXPERIMENT_ID, else dist_mem
    run_name: str | None = None  # None: the name of the run
    # send to MLflow during the job; auto: not to SQLite on a shared disk
    send: str = key("auto", choices=("auto", "always", "never"))
    system_metrics: bool = True  # log MLflow's metrics of CPU, memory, disk, network and GPUs on the node of rank 0
    tensorboard: bool = False  # write event files for TensorBoard into tensorboard/ of the run directory
    wandb: bool = False  # write a W&B run into wandb/ of the run directory, for `wandb sync`
    # sinks and metrics of your own, as [FILE.py:CLASS]: see docs/howto/tracking.md
    sinks: list[str] = key([], is_path=True)


@dataclass(frozen=True)
class WatchdogConfig:
    # at start, seconds without a new rank before the job ends and names the missing ranks
    join_seconds: float = key(60.0, above=0, at_most=SECONDS, set_by=_ANY)
    # seconds without progress before all ranks report their state and end; None: off
    seconds: float | None = key(600.0, above=0, at_most=SECONDS)
    # report a rank that is this many times as slow as the median of the others; None: off
    straggler: float | None = key(1.5, above=1)


@dataclass(frozen=True)
class Config:
    # name of the run directory, and of the run in MLflow
    name: str = key("run", in_path=True, may_nest=True, resume=FREE, affects=PLACE)
    # folder of checkpoints, config.yaml and metrics.jsonl
    run_dir: str = key("runs/${name}", is_path=True, per_node=True, resume=FREE, affects=PLACE)
    # auto | never | a step | a path: the checkpoint to resume from, see docs/howto/resume.md
    resume: str = key("auto", is_path=True, resume=FREE, affects=PLACE)
    # the data and the order in which lanes read it
    data: DataConfig = key(DataConfig(), resume=_PLAN, affects=RESULT)
    model: ModelConfig = key(ModelConfig(), resume=_MODEL, affects=RESULT)  # the transformer around the memory
    # kind and options of the memory
    memory: Any = key({"kind": "transformer_xl"}, resume=_MEMORY, affects=RESULT)
    train: TrainConfig = key(TrainConfig(), affects=RESULT)  # the size of an update and the number of updates
    # the optimizer and its parameter groups
    optimizer: OptimizerConfig = key(OptimizerConfig(), resume=ALLOWED, affects=RESULT)
    schedule: ScheduleConfig = key(ScheduleConfig(), resume=FREE, affects=RESULT)  # the learning rate by step
    # scoring of documents, during and after training
    eval: EvalConfig = key(EvalConfig(), resume=FREE, affects=SCORE, set_by=EVALUATION)
    # see docs/howto/resume.md
    checkpoint: CheckpointConfig = key(CheckpointConfig(), resume=FREE, affects=PLACE)
    # see docs/howto/trouble.md
    divergence: DivergenceConfig = key(DivergenceConfig(), resume=FREE, affects=RESULT)
    # run logging, see docs/howto/tracking.md
    tracking: TrackingConfig = key(TrackingConfig(), resume=FREE, affects=PLACE, set_by=EVALUATION)
    # check nodes, network and ranks before the first step, see docs/howto/cluster.md
    preflight: bool = key(True, resume=FREE, affects=PLACE)
    # handling of ranks that hang or are slow
    watchdog: WatchdogConfig = key(WatchdogConfig(), resume=FREE, affects=PLACE)
    # the Slurm job of the launch command
    launch: LaunchConfig = key(LaunchConfig(), resume=FREE, affects=PLACE)
    # or path of a ds_config.json
    deepspeed: Any = key({"zero_optimization": {"stage": 2}}, resume=FREE, affects=SPEED)

    @property
    def document(self) -> dict[str, Any]:
        """The tree of config.yaml: that of these values, with interpolations where they were written."""
        found: dict[str, Any] | None = self.__dict__.get(DOCUMENT)
        return as_tree(self) if found is None else found
