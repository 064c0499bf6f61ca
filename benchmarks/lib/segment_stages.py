"""A trial of stages: one text read by two gloo ranks, each with half of the blocks, beside one process that reads it.

`run_rank` is what every rank runs for benchmarks/segment_pipeline.py. Rank 0 has the embedding and the first blocks,
rank 1 the others and the softmax. All forwards of a window come first, then all backwards, the last segment first: a
segment's graph begins at its input and at the state before it, whose gradients go to the rank below and into the
segment before, as in `dist_mem.engine.window`. Shape letters: B lanes (one), T segment, n segments.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from lib.common import ROOT
from torch import Tensor

from dist_mem.block import model_spec
from dist_mem.config import load_config
from dist_mem.engine.window import PlainAutograd, Text, read
from dist_mem.memory import memory_options
from dist_mem.memory.base import named_tensors
from dist_mem.model import LMState, MemoryLM
from dist_mem.nn.named_tuples import replace

NUM_STAGES = 2


class TrialSize(NamedTuple):
    layers: int
    width: int
    seg_len: int
    vocab: int
    segments: int
    rounds: int


class TrialRead(NamedTuple):
    """What one process, or one stage, gave for a text."""

    nll: Tensor | None  # (B, n T); None: the last stage has it
    state: dict[str, Tensor]  # after the text, of the own blocks
    gradients: dict[str, Tensor]  # of the own parameters
    seconds: tuple[float, float, float]  # wall; this process's own of the forwards, and of the backwards


class SegmentGraph(NamedTuple):
    """The graph of a segment in a stage, from its leaves to its roots."""

    x: Tensor  # from the rank below
    before: dict[str, Tensor]  # the state that it read
    y: Tensor  # to the rank above; of the last stage, the loss
    aux: Tensor  # () sum of the auxiliary losses
    after: dict[str, Tensor]  # the state that it left


def build_model(name: str, size: TrialSize) -> MemoryLM:
    """Return a model with this memory, the same in every process, without dropout."""
    sizes = [f"model.num_layers={size.layers}", f"model.d_model={size.width}", "model.num_heads=4", "model.dropout=0"]
    sizes += [f"model.d_inner={4 * size.width}", f"train.seg_len={size.seg_len}", "data.path=none"]
    run = ["train.precision=fp32", "train.steps=1", "train.micro_batch_size=1", "train.global_batch_size=1"]
    file = ROOT / "configs" / "memory" / f"{name}.yaml"
    config = load_config([str(file), *sizes, *run], memory_options=memory_options)
    torch.manual_seed(0)
    return MemoryLM(model_spec(config, size.vocab))


def random_text(size: TrialSize) -> tuple[Tensor, Tensor]:
    """Return tokens and targets, (B, n T) each."""
    shape, generator = (1, size.segments * size.seg_len + 1), torch.Generator().manual_seed(1)
    text = torch.randint(size.vocab, shape, generator=generator)
    return text[:, :-1].contiguous(), text[:, 1:].contiguous()


def first_state(model: MemoryLM) -> LMState:
    """Return the state of one lane at the begin of a document."""
    return model.init_state(torch.zeros(1, dtype=torch.int64), "cpu", next(model.parameters()).dtype)


def refusal(model: MemoryLM) -> str | None:
    """Return why segments cannot flow through the blocks of a model, or None."""
    spec, parameter = model.memories()[0].spec, next(model.parameters())
    rows, state = model.stem(parameter.new_zeros(1, spec.seg_len, spec.d_model), first_state(model).stem)
    if model.stem.read_top(rows, state, seg_len=spec.seg_len)[1] is state:
        return None
    return "refused: a segment begins with rows that the last block made of the segment before"


def take_gradients(model: MemoryLM) -> dict[str, Tensor]:
    """Return the gradients by name, and leave none."""
    gradients = {name: each.grad for name, each in model.named_parameters() if each.grad is not None}
    model.zero_grad()
    return gradients


def read_whole(model: MemoryLM, tokens: Tensor, targets: Tensor, num: int) -> TrialRead:
    """Read a text as one window, in one process."""
    began, own = time.perf_counter(), time.process_time()
    text = Text(tokens, targets, torch.full((1, num), tokens.shape[1] // num), [None] * num)
    found = read(PlainAutograd(model), text, first_state(model), recomputes=False)
    between = time.process_time()
    found.backward(lambda nll, aux: nll / tokens.numel() + aux)
    seconds = (time.perf_counter() - began, between - own, time.process_time() - between)
    return TrialRead(found.nll, named_tensors(found.state.blocks), take_gradients(model), seconds)


class PipelineStage:
    """The blocks of this rank, reading one text as one window."""

    def __init__(self, model: MemoryLM, blocks: range, num_tokens: int) -> None:
        self.model, self.blocks, self.num_tokens = model, blocks, num_tokens
        self.rank, self.is_last = dist.get_rank(), blocks.stop == len(model.blocks)
        self.scores, self.sends = list[Tensor](), list[Any]()

    def send(self, tensor: Tensor, rank: int) -> None:
        """Send without waiting; `read` waits at its end."""
        self.sends.append(dist.isend(tensor.detach().contiguous(), rank))

    def forward(self, tokens: Tensor, targets: Tensor, state: LMState) -> tuple[SegmentGraph, LMState]:
        """Read one segment, and send what the blocks made of it to the rank above."""
        model, before, valid_len = self.model, named_tensors(state), torch.tensor([tokens.shape[1]])
        if self.rank == 0:
            x, stem = model.stem(model.embed(tokens, valid_len, state.types)[0], state.stem)
            state = replace(state, stem=stem)
        else:
            below = model.memories()[self.blocks.start - 1]
            x = next(model.parameters()).new_empty(1, below.num_rows, below.spec.d_model)
            dist.recv(x, self.rank - 1)
            x.requires_grad_()
        y, parts, aux = x, list(state.blocks), x.new_zeros(())
        for index in self.blocks:
            output = model.blocks[index](y, parts[index], valid_len)
            y, parts[index] = output.y, output.state
            aux = torch.stack([aux, *(loss.sum() for loss in output.aux.values())]).sum()
        state = replace(state, blocks=tuple(parts))
        if self.is_last:
            top, _ = model.stem.read_top(model.final_norm(y), state.stem, seg_len=tokens.shape[1])
            self.scores.append(model.head(top, targets).nll)
            y = self.scores[-1].sum() / self.num_tokens
        else:
            self.send(y, self.rank + 1)
        return SegmentGraph(x, before, y, aux, named_tensors(state)), state

    def backward(self, graph: SegmentGraph, later: dict[str, Tensor]) -> None:
        """Run the backward of a segment; `later`: leaves of the state that the segment after it read."""
        given = None
        if not self.is_last:
            given = torch.empty_like(graph.y)
            dist.recv(given, self.rank + 1)
        roots = [(graph.y, given), (graph.aux, None)]
        roots += [(graph.after[name], leaf.grad) for name, leaf in later.items() if leaf.grad is not None]
        tensors, gradients = zip(*(each for each in roots if each[0].requires_grad), strict=True)
        torch.autograd.backward(tensors, gradients)
        if self.rank:
            assert graph.x.grad is not None
            self.send(graph.x.grad, self.rank - 1)

    def read(self, tokens: Tensor, targets: Tensor, num: int) -> TrialRead:
        """Read the text: all forwards, then all backwards."""
        began, own = time.perf_counter(), time.process_time()
        state, graphs = first_state(self.model), list[SegmentGraph]()
        for segment in zip(tokens.chunk(num, 1), targets.chunk(num, 1), strict=True):
            graph, state = self.forward(*segment, self.model.with_gradient(state) if graphs else state)
            graphs.append(graph)
        between, later = time.process_time(), dict[str, Tensor]()
        while graphs:
            graph = graphs.pop()
            self.backward(graph, later)
            later = graph.before
        for send in self.sends:
            send.wait()
        seconds = (time.perf_counter() - began, between - own, time.process_time() - between)
        nll = torch.cat(self.scores, 1).detach() if self.is_last else None
        found = named_tensors(state.blocks)
        kept = {name: part.detach() for name, part in found.items() if int(name.split(".")[0]) in self.blocks}
        return TrialRead(nll, kept, take_gradients(self.model), seconds)


def compare(whole: TrialRead, stages: Sequence[TrialRead]) -> float:
    """Return the largest difference of a gradient, summed over the stages, relative to the largest of its parameter.

    Raises:
        SystemExit: a loss or a state differs in a bit.
    """
    state = {name: part for stage in stages for name, part in stage.state.items()}
    assert whole.nll is not None and stages[-1].nll is not None and state.keys() == whole.state.keys()
    parts = all(torch.equal(part, state[name]) for name, part in whole.state.items())
    if not parts or not torch.equal(whole.nll, stages[-1].nll):
        raise SystemExit("a loss or a state of the stages differs from that of one process")
    furthest = 0.0
    for name, gradient in whole.gradients.items():
        summed = torch.stack([stage.gradients[name] for stage in stages if name in stage.gradients]).sum(0)
        largest = gradient.abs().max().clamp(min=torch.finfo(gradient.dtype).tiny)
        furthest = max(furthest, ((summed - gradient).abs().max() / largest).item())
    return furthest


class TrialFigures(NamedTuple):
    """What the trial of one memory found; seconds are medians."""

    float32: float  # as `compare` returns it, the largest of all rounds
    float64: float
    num_shared: int  # parameters that several stages use, so that their gradients have to be summed
    whole: float  # wall seconds of one process
    stages: float  # wall seconds of the slowest stage
    whole_own: float  # a process's own seconds
    forward_own: list[float]  # by stage
    backward_own: list[float]


def figures_of(wholes: Sequence[TrialRead], staged: Sequence[Sequence[TrialRead]]) -> TrialFigures:
    """Return the figures of all rounds; the first has no times, and the last is in float64."""
    differences = [compare(whole, stages) for whole, stages in zip(wholes, staged, strict=True)]
    names = [name for stage in staged[0] for name in stage.gradients]
    timed, timed_stages = wholes[1:-1], staged[1:-1]
    return TrialFigures(
        max(differences[:-1]),
        differences[-1],
        len(names) - len(set(names)),
        statistics.median(whole.seconds[0] for whole in timed),
        statistics.median(max(stage.seconds[0] for stage in stages) for stages in timed_stages),
        statistics.median(sum(whole.seconds[1:]) for whole in timed),
        *(
            [statistics.median(stages[rank].seconds[part] for stages in timed_stages) for rank in range(NUM_STAGES)]
            for part in (1, 2)
        ),
    )


def run_rank(rank: int, names: Sequence[str], size: TrialSize, folder: str, queue: Any) -> None:
    """Read a text as a stage, in turn with rank 0 reading it whole; rank 0 puts what it found into the queue.

    Of every memory: a reason for which it is refused, or its figures. After the rounds comes one in float64.
    """
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=NUM_STAGES)
    bounds = [size.layers * number // NUM_STAGES for number in range(NUM_STAGES + 1)]
    for name in names:
        model = build_model(name, size).train()
        if reason := refusal(model):
            if rank == 0:
                queue.put((name, reason))
            continue
        tokens, targets = random_text(size)
        wholes, staged = list[TrialRead](), list[list[Any]]()
        for number in range(size.rounds + 2):  # the first warms up
            model = model.double() if number == size.rounds + 1 else model
            dist.barrier()
            if rank == 0:
                wholes.append(read_whole(model, tokens, targets, size.segments))
            dist.barrier()
            stage = PipelineStage(model, range(bounds[rank], bounds[rank + 1]), tokens.numel())
            found: list[Any] = [None] * NUM_STAGES
            dist.all_gather_object(found, stage.read(tokens, targets, size.segments))
            staged.append(found)
        if rank == 0:
            queue.put((name, figures_of(wholes, staged)))
    dist.destroy_process_group()
