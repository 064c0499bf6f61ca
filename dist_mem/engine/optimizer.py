"""The optimizer: parameter groups by name pattern and origin, torch's Adam and SGD, and the learning-rate schedule.

The learning rate is a pure function of the step (`lr_factor`), written into the groups before every update. So there is
no scheduler state to save, and a resumed run cannot be off by one.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from dist_mem.config import OptimizerConfig, ScheduleConfig
from dist_mem.config.constraints import wsd_decay_steps
from dist_mem.config.schema import ParameterGroupConfig
from dist_mem.engine.muon import ADAMW, MUON, MuonAdamW, is_map, muon_settings
from dist_mem.hf.names import published_pairs
from dist_mem.model import MemoryLM
from dist_mem.runtime.terminal import count_noun

# Vectors in all but shape: the content and position biases u and v of relative attention are (H, K).
_NEVER_DECAYED = re.compile(r"(^|[._])(u|v|bias)$")


def _decays(name: str, parameter: nn.Parameter) -> bool:
    return len(_shape(parameter)) >= 2 and not _NEVER_DECAYED.search(name)


def freeze(model: nn.Module, groups: Sequence[ParameterGroupConfig]) -> None:
    """Let no parameter get a gradient whose group has `trainable: false`."""
    published = _published_names(model, groups)
    for name, parameter in model.named_parameters():
        _, group = _group_of(name, groups, published)
        if group is not None:
            parameter.requires_grad_(group.trainable)


def parameter_groups(model: nn.Module, config: OptimizerConfig) -> list[dict[str, Any]]:
    """Group parameters by rule, lr and weight decay; groups with `trainable: false` are frozen and left out.

    Args:
        config: a parameter belongs to the first entry of `config.groups` whose pattern is found in its name, and
            whose `pretrained` says where it comes from. Weight decay applies to tensors of two or more dimensions
            but biases (also to taps of convolutions and first rows of memories), unless that entry sets it.

    Raises:
        ValueError: a pattern matches no parameter, or nothing is left to train; Muon is to take what is no matrix; an
            entry has `pretrained`, but a memory no place for the published attention.
    """
    freeze(model, config.groups)
    taken: dict[tuple[str, float, float], list[nn.Parameter]] = {}
    owners = {parameter: module for module in model.modules() for parameter in module.parameters(recurse=False)}
    published = _published_names(model, config.groups)
    muon = muon_settings(config)
    matched = [0] * len(config.groups)
    for name, parameter in model.named_parameters():
        index, found = _group_of(name, config.groups, published)
        if found is not None:
            matched[index] += 1
        given = found or ParameterGroupConfig()
        rule = (given.rule or (MUON if is_map(name, owners[parameter]) else ADAMW)) if muon else ADAMW
        if rule == MUON and len(_shape(parameter)) != 2:
            shape = f"{name} has the shape {tuple(_shape(parameter))}"
            raise ValueError(f"optimizer.groups[{index}].rule is muon, which takes matrices only, but {shape}")
        usual = config.lr, config.weight_decay if rule == MUON or _decays(name, parameter) else 0.0
        of_rule = (muon.lr, muon.weight_decay) if muon and rule == MUON else (None, None)
        lr, weight_decay = map(_first_given, (given.lr, given.weight_decay), of_rule, usual)
        if parameter.requires_grad:
            taken.setdefault((rule, lr, weight_decay), []).append(parameter)
    for index, count in enumerate(matched):
        if count == 0:
            names = ", ".join(name for name, _ in list(model.named_parameters())[:5])
            group = config.groups[index]
            origin = "" if group.pretrained is None else f" with pretrained: {str(group.pretrained).lower()}"
            raise ValueError(
                f"optimizer.groups[{index}].param_regex is {group.param_regex!r}{origin}, but takes no parameter (did "
                f"an earlier group take them?); parameters are named like {names}"
            )
    if muon is not None and all(rule != MUON for rule, _, _ in taken):
        raise ValueError("optimizer.kind is muon, but no trained matrix is left for it: set optimizer.kind=adamw")
    if not taken:
        raise ValueError("optimizer.groups: every parameter has trainable: false; leave at least one to train")
    return [
        {"params": params, "lr": lr, "weight_decay": decay, **({} if muon is None else {"rule": rule})}
        for (rule, lr, decay), params in taken.items()
    ]


def _first_given(of_group: float | None, of_rule: float | None, usual: float) -> float:
    return next(value for value in (of_group, of_rule, usual) if value is not None)


def _published_names(model: nn.Module, groups: Sequence[ParameterGroupConfig]) -> frozenset[str]:
    """Return the parameters that the published model has, by our names, if a group asks for them."""
    if all(group.pretrained is None for group in groups):
        return frozenset()  # also of a model of which none is published
    assert isinstance(model, MemoryLM)
    try:
        return frozenset(name for pair in published_pairs(model) for name in pair.ours)
    except ValueError as error:
        raise ValueError(f"optimizer.groups: one has pretrained, but {error}") from error


def _group_of(
    name: str, groups: Sequence[ParameterGroupConfig], published: frozenset[str]
) -> tuple[int, ParameterGroupConfig | None]:
    """Return the first group that takes a parameter, and its place."""
    for index, group in enumerate(groups):
        if group.pretrained in (None, name in published) and re.search(group.param_regex, name):
            return index, group
    return -1, None


def _shape(parameter: nn.Parameter) -> torch.Size:
    shape: torch.Size = getattr(parameter, "ds_shape", parameter.shape)  # a partitioned parameter is empty
    return shape


def build_optimizer(model: nn.Module, config: OptimizerConfig, *, fused: bool = False) -> torch.optim.Optimizer:
    """Build AdamW, Adam (L2 in the gradient, as published with Transformer-XL), SGD or Muon over `parameter_groups`.

    Args:
        fused: Adam in one kernel, for GPUs; on CPUs it would change the last bits of runs.
    """
    groups = parameter_groups(model, config)
    if config.kind == "sgd":
        return torch.optim.SGD(groups, lr=config.lr, momentum=config.momentum)
    given = {"lr": config.lr, "betas": (config.betas[0], config.betas[1]), "eps": config.eps, "fused": fused}
    if muon := muon_settings(config):
        return MuonAdamW(groups, muon, **given)
    return {"adamw": torch.optim.AdamW, "adam": torch.optim.Adam}[config.kind](groups, **given)


def num_trained(optimizer: torch.optim.Optimizer) -> int:
    """Return the number of trained parameters, also of partitioned ones."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return sum(getattr(parameter, "ds_numel", parameter.numel()) for parameter in parameters)


def num_moments(config: OptimizerConfig, group: Mapping[str, Any] | None = None) -> int:
    """Return how many numbers the optimizer keeps of each trained parameter of a group; None: at most, of any."""
    if config.kind == "sgd":
        return int(config.momentum != 0)
    return 1 if group and group.get("rule") == MUON else 2


def describe_rules(optimizer: torch.optim.Optimizer) -> list[str]:
    """Return a message that says what Muon updates, and what AdamW."""
    counts = {rule: [0, 0] for rule in (MUON, ADAMW)}
    for group in optimizer.param_groups:
        for parameter in group["params"] if "rule" in group else ():
            counts[group["rule"]][0] += 1
            counts[group["rule"]][1] += getattr(parameter, "ds_numel", parameter.numel())
    if not counts[MUON][0]:
        return []
    (matrices, of_muon), (others, of_adamw) = counts.values()
    shown = f"Muon updates {count_noun(matrices, 'matrix', 'matrices')} of {of_muon:,} parameters"
    return [f"{shown}, AdamW {count_noun(others, 'other')} of {of_adamw:,}"]


def lr_factor(step: int, config: ScheduleConfig, total_steps: int) -> float:
    """Return the learning rate of update `step` (from 0) as a fraction of its peak.

    Linear warmup over `warmup_steps`, then constant, or linear or cosine decay over `decay_steps` (default: all
    remaining steps) to `end_factor`, and constant afterwards. With `wsd` (warmup, stable, decay) only the last steps
    decay, by default as 1 - sqrt(progress) (Haegele et al. 2024, arXiv 2405.18392).
    """
    if step < config.warmup_steps:
        return (step + 1) / config.warmup_steps
    if config.kind == "constant":
        return 1.0
    first, length, shape = config.warmup_steps, config.decay_steps, config.kind
    if config.kind == "wsd":
        length, shape = wsd_decay_steps(vars(config), total_steps), config.decay_shape or "sqrt"
        first = total_steps - length
    progress = min(1.0, max(0, step - first) / (length or max(1, total_steps - first)))
    left = {"linear": 1 - progress, "sqrt": 1 - math.sqrt(progress), "cosine": 0.5 * (1 + math.cos(math.pi * progress))}
    return config.end_factor + (1 - config.end_factor) * left[shape]
