"""Check a memory against every rule, smallest sizes first, and report the rules it breaks and their usual causes.

dist-mem check-memory examples/averages.py:Averages
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from dist_mem.config import ConfigError
from dist_mem.config.check import Problem
from dist_mem.contract import gradient_rules, inspection_rules, rules
from dist_mem.contract.subject import BrokenRuleError, CheckedMemory, SubjectSize
from dist_mem.memory import memory_class
from dist_mem.runtime.outside_code import line_in


class ContractRule(NamedTuple):
    """One rule of the contract."""

    number: int  # as in dist_mem/memory/base.py
    statement: str
    check: Callable[[CheckedMemory], None]
    usual_cause: str


# In this order the first rule that a bug breaks usually describes the bug.
RULES = (
    ContractRule(
        2, "the state keeps its fields, shapes and dtypes", rules.state_keeps_its_form,
        "a state that grows, or that takes the dtype of the activations: cast to the dtype of the old state",
    ),
    ContractRule(
        2, "the state carries no gradient, unless carries_gradient says so", gradient_rules.gradient_flows_as_declared,
        "a missing .detach() where rows enter the state, or one too many in a memory with carries_gradient",
    ),
    ContractRule(
        1, "forward modifies none of its inputs", rules.changes_nothing_it_was_given,
        "an in-place operation (+=, copy_, indexed assignment) on the state, the input or a buffer",
    ),
    ContractRule(
        8, "no random generator is touched", rules.no_generator_is_touched,
        "torch.rand or torch.multinomial; use dist_mem.memory.parts.counter_hash with counters from the state",
    ),
    ContractRule(
        1, "the output depends on the arguments only", rules.is_a_function_of_its_arguments,
        "the module keeps something in an attribute from one call to the next; it belongs in the state",
    ),
    ContractRule(
        2, "the state is no view of the input", rules.state_is_no_alias,
        "a slice of x is stored without a copy; torch.cat or .clone() makes one",
    ),
    ContractRule(
        6, "nothing branches on data", rules.nothing_branches_on_data,
        "an if, a loop, .item(), .any() or boolean indexing on a tensor; use torch.where and masks of fixed shape",
    ),
    ContractRule(
        5, "lanes are independent", rules.lanes_are_independent,
        "a mean or a product over the lane axis, or a view that mixes lanes with another axis",
    ),
    ContractRule(
        5, "a reset lane equals a fresh one", rules.a_reset_lane_equals_a_fresh_one,
        "part of the memory is outside the state, or init_state does not return an empty memory",
    ),
    ContractRule(
        5, "a lane alone equals the lane in a batch", rules.a_lane_alone_equals_it_in_a_batch,
        "a computation that depends on the number of lanes, or on a lane's index",
    ),
    ContractRule(
        4, "no output depends on a later token", rules.no_output_depends_on_a_later_token,
        "a mask that lets a query see keys after itself, or a statistic over the whole segment",
    ),
    ContractRule(
        4, "padding changes no real token", rules.padding_changes_no_real_token,
        "rows beyond valid_len enter a mean, a norm or an auxiliary loss",
    ),
    ContractRule(
        4, "fewer rows give real tokens the same outputs", rules.fewer_rows_give_the_same_outputs,
        "`min_seg_len` is smaller than the number of rows that forward needs, or was inherited from another memory",
    ),
    ContractRule(
        4, "further rows are those of the whole segment", rules.further_rows_are_those_of_the_whole_segment,
        "`step_rows` attends to rows after its own, or lacks what `forward` reads of the memory; without it, set "
        "`can_step` to false",
    ),
    ContractRule(
        3, "only complete segments are committed", rules.incomplete_segments_are_not_committed,
        "the state is changed in place, or lanes are mixed if some segments are incomplete",
    ),
    ContractRule(
        3, "rows leave a memory when it is full", rules.rows_leave_it_when_it_is_full,
        "`kept_len` is missing or another number than that of the tokens whose rows a full memory holds",
    ),
    ContractRule(
        7, "parameters are used where they are registered", rules.parameters_are_used_where_they_are_registered,
        "layer.weight used outside layer.forward: ZeRO-3 gathers a parameter only there",
    ),
    ContractRule(
        6, "every parameter gets a gradient in every step", gradient_rules.every_parameter_gets_a_gradient,
        "a parameter that is not used for an empty memory or an idle lane: multiply by a 0/1 mask instead",
    ),
    ContractRule(
        1, "the forward may be computed twice", rules.may_be_computed_twice,
        "the backward recomputes the forward under activation checkpointing, and gets another result",
    ),
    ContractRule(
        3, "a later segment depends on an earlier one", rules.it_remembers,
        "the new state is not returned, or never read",
    ),
    ContractRule(
        10, "inspection changes nothing", inspection_rules.inspection_changes_nothing,
        "inspect changes its input in place, or keeps something in an attribute that forward reads",
    ),
    ContractRule(
        10, "what a query reads are shares of the past", inspection_rules.weights_are_shares_of_the_past,
        "weights after dropout, rows with another order than their spans, or spans that do not move with the segment",
    ),
    ContractRule(
        10, "forget takes out what is named, and nothing else", inspection_rules.forgetting_takes_out_what_is_named,
        "a mask that is not applied to every read, or that mixes lanes",
    ),
)  # fmt: skip

SIZES = (
    SubjectSize(lanes=2, seg_len=2, segments=3, layers=1),
    SubjectSize(lanes=3, seg_len=4, segments=4, layers=2),
    SubjectSize(lanes=4, seg_len=6, segments=6, layers=3),
)


class RuleFailure(NamedTuple):
    """A rule that a memory breaks, or that could not be checked, with the smallest case found."""

    rule: ContractRule
    size: SubjectSize
    norm: str
    message: str
    cause: str
    is_error: bool  # the memory raised an error that the rule does not expect


def failures(
    block: Callable[[int], dict[str, Any]],
    source: Path | None = None,
    sizes: Sequence[SubjectSize] = SIZES,
    rules: Sequence[ContractRule] = RULES,
) -> Iterator[RuleFailure]:
    """Yield the rules that a memory breaks.

    Args:
        block: segment length -> the `memory:` block of the configuration.
        source: the memory's file.
        sizes: smallest first.
    """
    for rule in rules:
        failure = _first_failure(rule, block, source, sizes)
        if failure is not None:
            yield failure


def _first_failure(
    rule: ContractRule, block: Callable[[int], dict[str, Any]], source: Path | None, sizes: Sequence[SubjectSize]
) -> RuleFailure | None:
    for size in sizes:
        for norm in ("pre", "post"):
            try:
                rule.check(CheckedMemory(block, size, norm))
            except BrokenRuleError as error:
                return RuleFailure(rule, size, norm, str(error), error.cause or rule.usual_cause, False)
            except Exception as error:  # any error of the memory
                return RuleFailure(rule, size, norm, _describe(error, source), rule.usual_cause, True)
    return None


def _describe(error: Exception, source: Path | None) -> str:
    """Return type and first line of an error, and the innermost line of the memory's file in its traceback."""
    line = line_in(source, error) if source else ""
    where = f" ({source.name}{line})" if source and line else ""
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}{where}"


def group_failures(found: Iterable[RuleFailure]) -> list[list[RuleFailure]]:
    """Group failures by error, or by rule, in order."""
    groups: dict[Any, list[RuleFailure]] = {}
    for failure in found:
        groups.setdefault(failure.message if failure.is_error else failure.rule, []).append(failure)
    return list(groups.values())


def to_text(group: Sequence[RuleFailure]) -> str:
    """Describe a failure, or several with the same error, in several lines."""
    first = group[0]
    size = first.size
    smallest = (
        f"  found: {first.message}\n"
        f"  smallest case: {size.lanes} lanes, segments of {size.seg_len} tokens, {size.segments} segments, "
        f"{size.layers} layers, norm {first.norm}\n"
    )
    if len(group) == 1:
        rule = first.rule
        cause = "cause" if first.cause != rule.usual_cause else "usual cause"
        return f"rule {rule.number} is broken: {rule.statement}\n{smallest}  {cause}: {first.cause}"
    not_checked = "; ".join(failure.rule.statement for failure in group)
    return (
        f"{len(group)} rules could not be checked: the memory raises an error\n{smallest}  not checked: {not_checked}"
    )


def run(kind: str) -> int:
    """Run the command; return the exit code: 0 if the memory keeps every rule, 1 if it breaks any.

    Raises:
        ConfigError: there is no such memory, or its file does not run.
    """
    try:
        chosen = memory_class(kind)
    except ValueError as error:
        raise ConfigError([Problem("", str(error))]) from error
    torch.set_num_threads(1)  # tensors are tiny: more threads only slow it down
    source = inspect.getsourcefile(chosen)
    found = failures(lambda seg_len: {"kind": kind, **chosen.small_options(seg_len)}, Path(source) if source else None)
    groups = group_failures(found)
    for group in groups:
        print(to_text(group))
    num_broken = sum(len(group) == 1 for group in groups)
    not_checked = sum(len(group) for group in groups if len(group) > 1)
    summary = f"breaks {num_broken} of" if groups else "keeps all"
    print(f"{kind} {summary} {len(RULES)} rules{f', {not_checked} could not be checked' if not_checked else ''}")
    return 1 if groups else 0
