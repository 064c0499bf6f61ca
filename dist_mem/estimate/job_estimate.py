"""The estimate of a job as text and as data: `dist-mem estimate CONFIG --gpus 512 --gpu h100-80gb`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from dist_mem.config import Config, TrainConfig
from dist_mem.data.batch_plan import batch_plan, idle_work
from dist_mem.errors import UnusableError
from dist_mem.estimate.counting import count_micro_batch, flops_per_token
from dist_mem.estimate.likely_time import LikelySeconds, likely_seconds
from dist_mem.estimate.memory import MemoryPart, evaluated_memories, parts_at_peak, size, update_parts
from dist_mem.estimate.search import Candidate, Cluster, best, candidates, nearest
from dist_mem.estimate.step_time import CheckpointCost, StepTime, checkpoint_cost, peak_flops, step_time
from dist_mem.estimate.zero import job_of, sizes_of
from dist_mem.nn.kernel_shapes import planned_card
from dist_mem.nn.layers import DTYPES
from dist_mem.runtime.devices import Device
from dist_mem.runtime.terminal import count_noun, label_lines, table

MOST_SETTINGS = 3  # that are shown unless all are wanted
_WORTH_SAYING = 0.97  # a proposal is shown if its update takes less than this share of today's


class JobEstimate(NamedTuple):
    """What a job needs, and what would suit it better."""

    name: str
    cluster: Cluster
    parts: list[MemoryPart]
    time: StepTime
    likely: LikelySeconds | None  # None on CPUs, where nothing was measured
    steps: int | None  # updates of the whole training; None: only the data, which are not built yet, could say
    tokens: int  # of one update of the whole job
    mfu: float  # share of the data sheet's operations that the model itself needs, at most
    checkpoint: CheckpointCost
    candidates: list[Candidate]

    @property
    def speed(self) -> float:
        """Tokens per second of the whole job, at most."""
        return self.tokens / self.time.total

    @property
    def likely_speed(self) -> tuple[float, float] | None:
        """Tokens per second of the whole job, from and to."""
        return self.likely and (self.tokens / self.likely.high, self.tokens / self.likely.low)

    @property
    def likely_hours(self) -> tuple[float, float] | None:
        """Hours of all updates of the training, from and to."""
        if self.likely is None or self.steps is None:
            return None
        return self.steps * self.likely.low / 3600, self.steps * self.likely.high / 3600

    @property
    def num_bytes(self) -> int:
        return sum(part.num_bytes for part in self.parts)

    @property
    def fits(self) -> bool:
        return self.num_bytes <= self.cluster.capacity

    @property
    def proposal(self) -> Candidate | None:
        """The nearest change that fits, or the fastest settings if the job fits; None if there are none."""
        if not self.fits:
            return nearest(self.candidates, self.cluster)
        fastest = best(self.candidates, self.cluster)
        is_faster = fastest is not None and fastest.changes and fastest.time.total < _WORTH_SAYING * self.time.total
        return fastest if is_faster else None


def estimate_job(
    config: Config,
    vocab_size: int,
    cluster: Cluster,
    *,
    disk_rate: float,
    steps: int | None = None,
    report: Callable[[str], None] = lambda _: None,
) -> JobEstimate:
    """Predict memory, update and checkpoint of a job, also with other settings.

    Args:
        disk_rate: bytes/s at which all ranks together write.
        steps: updates of the whole training; None: not known.
        report: is called with what is counted next.

    Raises:
        UnusableError: the model cannot be built, or the device does not compute in `train.precision`.
    """
    train, device, world_size = config.train, cluster.device, cluster.world_size
    # The lanes of a split of documents are fewer if the split has fewer, which only the data says.
    eval_lanes = 0 if config.eval.every is None else config.eval.batch_size
    tokens = train.global_batch_size * train.seg_len * train.segments_per_update
    try:
        with planned_card(device.memory):
            job = job_of(config, vocab_size, world_size=world_size, on_gpu=device.name != "cpu")
            sizes = sizes_of(job.spec, DTYPES[train.precision], job.optimizer)
            report("the job as it is configured")
            of_batch = count_micro_batch(job.spec, on_gpu=job.on_gpu)
            time = step_time(job, sizes, of_batch, device, gpus_per_node=cluster.gpus_per_node)
            flops = flops_per_token(job.spec).training
            scored = evaluated_memories(job, sizes, config.eval, eval_lanes=eval_lanes)
            parts = parts_at_peak(update_parts(job, sizes, of_batch), scored)
            others = candidates(job, sizes, cluster, scored, report)
    except UnusableError:
        raise
    except ValueError as error:
        raise UnusableError(str(error)) from error
    mfu = flops * tokens / time.total / (world_size * peak_flops(train, device))
    checkpoint = checkpoint_cost(train, sizes, world_size=world_size, disk_rate=disk_rate)
    expected = likely_seconds(job.spec, time, device, world_size=world_size)
    return JobEstimate(config.name, cluster, parts, time, expected, steps, tokens, mfu, checkpoint, others)


def as_json(job: JobEstimate) -> dict[str, Any]:
    """Return the plan for machines: bytes, seconds, tokens; seconds under `update` are lower bounds."""
    proposal = job.proposal
    return {
        "name": job.name,
        "device": job.cluster.device.name,
        "gpus": job.cluster.world_size,
        "gpus_per_node": job.cluster.gpus_per_node,
        "memory": {
            "parts": {part.what: part.num_bytes for part in job.parts},
            "total": job.num_bytes,
            "available": job.cluster.capacity,
            "fits": job.fits,
        },
        "update": {**job.time._asdict(), "total": job.time.total},
        "update_likely": job.likely and {"low": job.likely.low, "high": job.likely.high, "origin": job.likely.origin},
        "tokens_per_update": job.tokens,
        "tokens_per_second_bound": job.speed,
        "tokens_per_second_likely": job.likely_speed,
        "mfu_bound": job.mfu,
        "steps": job.steps,
        "hours_likely": job.likely_hours,
        "checkpoint": job.checkpoint._asdict(),
        "proposal": proposal and _candidate_json(proposal),
        "settings": [_candidate_json(candidate) for candidate in job.candidates],
    }


def _candidate_json(candidate: Candidate) -> dict[str, Any]:
    return {
        "settings": candidate.settings,
        "changes": candidate.changes,
        "memory": candidate.num_bytes,
        "update": candidate.time.total,
    }


def as_text(train: TrainConfig, job: JobEstimate, *, shows_all: bool) -> str:
    """Return the plan for people.

    Args:
        shows_all: every setting, not only the fastest ones.
    """
    shown = _all_settings(train, job) if shows_all else _fastest_settings(train, job)
    return "\n".join([*label_lines(_lines(train, job)), "", *shown, *_propose(job)])


def refusal(job: JobEstimate) -> str:
    """Return why the job does not fit, and the nearest change that does."""
    device, proposal = job.cluster.device, job.proposal
    capacity = size(job.cluster.capacity)
    first = f"{job.name} needs {size(job.num_bytes)} per {_unit(job.cluster)}, but {device.name} has {capacity}"
    largest = max(job.parts, key=lambda part: part.num_bytes)
    keys = ", ".join(f"{key} = {value}" for key, value in largest.values.items())
    reason = f"the largest part is {largest.what} with {size(largest.num_bytes)}{f' ({keys})' if keys else ''}"
    if proposal is None:
        none = "no ZeRO stage, checkpointing or micro_batch_size fits: use more GPUs or a smaller model"
        return f"{first}; {reason}; {none}"
    return f"{first}; {reason}; it fits with {_changes(proposal)}: {size(proposal.num_bytes)}"


def _limits(train: TrainConfig, device: Device) -> str:
    """Return what the device can do, to compare with its data sheet."""
    rates = f"{device.bandwidth / 1e12:.3g} TB/s, {peak_flops(train, device) / 1e12:,.4g} TFLOP/s in {train.precision}"
    return f"{size(device.memory)}, {rates}"


def _unit(cluster: Cluster) -> str:
    """Return what one rank runs on."""
    return "process" if cluster.device.name == "cpu" else "GPU"


def _lines(train: TrainConfig, job: JobEstimate) -> Iterator[tuple[str, str]]:
    cluster, time, batch = job.cluster, job.time, batch_plan(train, job.cluster.world_size)
    nodes, unit = -(-cluster.world_size // cluster.gpus_per_node), _unit(cluster)
    yield "job", f"{job.name} on {cluster.world_size:,} x {cluster.device.name}, {count_noun(nodes, 'node')}"
    yield "device", _limits(train, cluster.device)
    yield "lanes", f"{count_noun(batch.lanes_per_rank, 'lane')} per {unit} in {count_noun(batch.groups, 'micro-batch')}"
    if waste := idle_work(train, cluster.world_size):
        unused = cluster.world_size - -(-train.global_batch_size // batch.lanes_per_rank)
        units = count_noun(cluster.world_size, unit, "processes" if unit == "process" else None)
        yield waste.label, (f"{unused:,} of {units} have no lane: " if unused else "") + waste.text
    verdict = "fits" if job.fits else "DOES NOT FIT"
    yield "memory", f"{size(job.num_bytes)} of {size(cluster.capacity)} per {unit}: {verdict}"
    for part in job.parts:
        yield "", f"{size(part.num_bytes):>12}  {part.what}"
    fused = sum(time.fused.values())
    kernels = f"products {time.products:.3g} s, fused attention {fused:.3g} s, other kernels {time.streams:.3g} s"
    communication = f"communication {time.communication:.3g} s, of which {time.exposed:.3g} s not hidden"
    yield "update", f"at least {time.total:.3g} s: {kernels}, optimizer {time.update:.3g} s; {communication}"
    yield "speed", f"{_speed(job.speed, cluster)}: a bound, at an MFU of {job.mfu:.1%}"
    if job.likely and job.likely_speed:
        low, high = job.likely_speed
        shares = job.mfu * low / job.speed, job.mfu * high / job.speed
        mfu = f"an MFU of {shares[0]:.0%} to {shares[1]:.0%}"
        update = f"{job.likely.low:.2g} to {job.likely.high:.2g} s an update"
        yield "", f"expected {_digits(low)} to {_digits(high)} tokens/s: {update}, {mfu}"
        yield from (("", sentence) for sentence in job.likely.origin)
    yield "training", _whole_training(train, job)
    saved = job.checkpoint
    written = f"training waits {saved.stall:.2g} s, written after {saved.seconds:.3g} s"
    yield "checkpoint", f"{saved.num_bytes / 1e9:,.2f} GB; {written}"


def _speed(speed: float, cluster: Cluster) -> str:
    each = f", {speed / cluster.world_size:,.0f} per {_unit(cluster)}" if cluster.world_size > 1 else ""
    return f"at most {speed:,.0f} tokens/s{each}"


def _whole_training(train: TrainConfig, job: JobEstimate) -> str:
    """Return the hours of the whole training."""
    if job.steps is None:
        return f"{train.epochs:g} epochs; hours are known once the data are built, or with train.steps"
    without = "without evaluations, checkpoints and restarts"
    if job.likely_hours is None:
        hours = f"at least {job.steps * job.time.total / 3600:.2g} hours; never measured on CPUs, so no range"
    else:
        hours = f"{job.likely_hours[0]:.2g} to {job.likely_hours[1]:.2g} hours"
    return f"{count_noun(job.steps, 'step')}: {hours}, {without}"


def _digits(speed: float) -> str:
    """Return a speed with two digits, as exact as it is known."""
    return f"{float(f'{speed:.1e}'):,.0f}"


def _same_lanes(train: TrainConfig, job: JobEstimate) -> list[Candidate]:
    return [each for each in job.candidates if each.settings["train.micro_batch_size"] == train.micro_batch_size]


def _fastest_settings(train: TrainConfig, job: JobEstimate) -> Iterator[str]:
    """Yield the fastest settings that fit; if none fits, those that need the least memory."""
    found = _same_lanes(train, job)
    fitting = [each for each in found if each.num_bytes <= job.cluster.capacity]
    best = sorted(fitting or found, key=lambda each: (each.time.total, each.num_bytes) if fitting else each.num_bytes)
    what = "fastest" if fitting else "smallest"
    yield f"the {what} settings with train.micro_batch_size={train.micro_batch_size}, all of them with --all:"
    yield from _settings_table(best[:MOST_SETTINGS], job)


def _all_settings(train: TrainConfig, job: JobEstimate) -> Iterator[str]:
    """Yield memory and time by stage and checkpointing with today's lanes."""
    yield f"with train.micro_batch_size={train.micro_batch_size}; at most, if an update is one micro-batch:"
    yield from _settings_table(_same_lanes(train, job), job)


def _settings_table(shown: Sequence[Candidate], job: JobEstimate) -> list[str]:
    rows = [("ZeRO stage", "checkpointing", "memory", "update, at least", "")]
    for candidate in shown:
        stage, recomputed, share, _ = candidate.settings.values()
        recomputed += f", {share:.0%}" if recomputed != "none" and share < 1.0 else ""
        fits = "" if candidate.num_bytes <= job.cluster.capacity else "does not fit"
        rows.append((str(stage), recomputed, size(candidate.num_bytes), f"{candidate.time.total:.3g} s", fits))
    return table(rows)


def _propose(job: JobEstimate) -> Iterator[str]:
    if proposal := job.proposal:
        kind = "faster" if job.fits else "it fits"
        yield f"{kind} with {_changes(proposal)}: {size(proposal.num_bytes)}, at least {proposal.time.total:.3g} s"


def _changes(candidate: Candidate) -> str:
    return " ".join(f"{key}={str(value).lower()}" for key, value in candidate.changes.items())
