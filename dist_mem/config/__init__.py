"""Run configuration: every key (schema.py), and reading, merging and checking (load.py).

A run is described by YAML files merged left to right, then dotted overrides:

    dist-mem train configs/demo.yaml configs/memory/none.yaml train.steps=100

Nothing here imports torch, which keeps reading and checking a configuration fast.
"""

from dist_mem.config.blocks import as_tree
from dist_mem.config.check import ConfigError
from dist_mem.config.load import (
    build_block,
    change_config,
    deepspeed_block,
    known_keys,
    load_block,
    load_config,
    read_block,
    read_config,
    save_config,
    to_yaml,
    value_of,
)
from dist_mem.config.schema import (
    AdaptiveConfig,
    CheckpointConfig,
    Config,
    DataConfig,
    DivergenceConfig,
    EvalConfig,
    LaunchConfig,
    LoraConfig,
    ModelConfig,
    OptimizerConfig,
    ParameterGroupConfig,
    RopeConfig,
    ScheduleConfig,
    SourceConfig,
    StageConfig,
    TokenTypeConfig,
    TrackingConfig,
    TrainConfig,
    WatchdogConfig,
)
