"""The trainings whose memory benchmarks/estimate.py measures, and the published runs that it compares with."""

from __future__ import annotations

from lib.common import ROOT

VOCAB_SIZE = 16_384
BASE = [
    str(ROOT / "configs" / "demo.yaml"),
    *("model.num_layers=6", "model.d_model=256", "model.num_heads=8", "model.d_inner=1024", "model.dropout=0.1"),
    *("train.seg_len=256", "train.global_batch_size=4", "train.micro_batch_size=2", "train.steps=3", "train.threads=1"),
    *("eval.every=null", "tracking.mlflow=false", "schedule.warmup_steps=0", "optimizer.groups=[]"),
    *("deepspeed={zero_optimization: {stage: 1, reduce_bucket_size: 1000000, allgather_bucket_size: 1000000}}",),
]
CARRYING = ("infini", "linear", "rmt", "titans", "block_recurrent")  # gradients flow through their states
LONG = [
    *("model.num_layers=4", "model.d_model=512", "model.num_heads=8", "model.d_inner=2048"),
    *("train.seg_len=1024", "train.global_batch_size=1", "train.micro_batch_size=1"),
]


def memories(seg_len: int) -> dict[str, list[str]]:
    """Return overrides of every memory, with as many rows as a segment has tokens."""
    rows = f"mem_len: {seg_len}"
    signal = f"kind: infinite, num_basis: {seg_len}, num_samples: {seg_len}, basis_widths: [0.01, 0.05]"
    gpt2 = [f"model.num_positions={seg_len}", "model.kind=gpt2"]
    return {
        "none": ["memory={kind: none}"],
        "causal": ["memory={kind: causal}", *gpt2],
        "transformer_xl": [f"memory={{kind: transformer_xl, {rows}}}"],
        "compressive": [f"memory={{kind: compressive, {rows}, cmem_len: {seg_len}}}"],
        "lamemo": [f"memory={{kind: lamemo, {rows}}}"],
        "infinite": [f"memory={{{signal}}}"],
        "infinite over transformer_xl": [f"memory={{{signal}, over: {{kind: transformer_xl, {rows}}}}}"],
        "infinite over causal": [f"memory={{{signal}, over: {{kind: causal}}}}", *gpt2],
        "memorizing": [f"memory={{kind: memorizing, {rows}}}"],
        **{kind: [f"memory={{kind: {kind}}}"] for kind in CARRYING},
    }


def windows() -> dict[str, tuple[int, list[str]]]:
    """Return updates of four segments: windows of 1, 2 and 4 for one memory, of 4 for those that carry gradients."""
    window = ["train.precision=fp32", "train.segments_per_update=4"]
    return {
        f"{kind}, K {number}{', checkpointing' if saves == 'blocks' else ''}": (
            1,
            [*memories(256)[kind], *window, *keys],
        )
        for kind in CARRYING
        for number in ((1, 2, 4) if kind == "infini" else (4,))
        for saves in ("none", "blocks")
        if (keys := [f"train.bptt_segments={number}", f"train.activation_checkpointing={saves}"])
    }


def cases(name: str) -> dict[str, tuple[int, list[str]]]:
    """Return name -> (ranks, overrides) of one group of cases."""
    if name == "windows":
        return windows()
    if name == "long":
        chosen = {kind: memories(1024)[kind] for kind in ("causal", "transformer_xl", "lamemo", "infinite")}
        return {
            f"{kind}, {precision}": (1, [*LONG, *keys, f"train.precision={precision}"])
            for kind, keys in chosen.items()
            for precision in ("fp32", "bf16")
        }
    if name == "stages":
        zero = "deepspeed.zero_optimization"
        return {
            f"stage {stage}, {precision}": (2, ["model.d_model=512", "model.d_inner=2048", *keys])
            for stage in range(4)
            for precision in ("fp32", "bf16")
            if (keys := [f"{zero}.stage={stage}", f"train.precision={precision}"])
        }
    return {
        f"{kind}, {precision}{', checkpointing' if saves else ''}": (1, [*keys, f"train.precision={precision}", *extra])
        for kind, keys in memories(256).items()
        for precision in ("fp32", "bf16")
        for saves in (False, True)
        if (extra := [f"train.activation_checkpointing={'blocks' if saves else 'none'}"])
        if not saves or precision == "bf16"
    }


def published() -> dict[str, tuple[str, int, float, int, list[str]]]:
    """Return name -> (device, GPUs, published tokens/s of all GPUs, vocabulary, overrides for our model of it)."""
    adaptive = "model.adaptive={cutoffs: [19997, 39997, 199997]}"
    base = [
        *("model.num_layers=16", "model.d_model=512", "model.num_heads=8", "model.d_inner=2048", adaptive),
        *(
            "train.seg_len=192",
            "memory={kind: transformer_xl, mem_len: 192}",
            "train.global_batch_size=32",
            "train.micro_batch_size=32",
        ),
    ]
    large = [
        *("model.num_layers=18", "model.d_model=1024", "model.num_heads=16", "model.d_inner=4096", adaptive),
        *(
            "train.seg_len=384",
            "memory={kind: transformer_xl, mem_len: 384}",
            "train.global_batch_size=128",
            "train.micro_batch_size=8",
        ),
    ]
    gpt = [
        *("model.kind=gpt2", "memory={kind: causal}", "model.num_positions=2048", "train.seg_len=2048"),
        *("model.num_layers=32", "model.d_model=4096", "model.num_heads=32", "model.d_inner=16384", "model.dropout=0"),
        *("deepspeed.zero_optimization.stage=3", "train.activation_checkpointing=blocks"),
    ]
    # NVIDIA DeepLearningExamples, PyTorch/LanguageModeling/Transformer-XL; llm-foundry, scripts/train/benchmarking
    return {
        "Transformer-XL base, TF32": ("a100-40gb", 1, 41_527, 267_735, [*base, "train.precision=fp32"]),
        "Transformer-XL base, mixed": ("a100-40gb", 1, 59_961, 267_735, [*base, "train.precision=fp16"]),
        "Transformer-XL base, mixed, 8 GPUs": (
            *("a100-40gb", 8, 449_890, 267_735),
            [*base, "train.precision=fp16", "train.global_batch_size=256"],
        ),
        "Transformer-XL large, mixed": ("v100-32gb", 16, 211_387, 267_735, [*large, "train.precision=fp16"]),
        "MPT 7B (here: GPT-2), ZeRO-3": (
            *("h100-80gb", 8, 8 * 10_643, 50_368),
            [*gpt, "train.precision=bf16", "train.global_batch_size=64", "train.micro_batch_size=8"],
        ),
        "MPT 7B (here: GPT-2), ZeRO-3, 512 GPUs": (
            *("h100-80gb", 512, 512 * 9_670, 50_368),
            [*gpt, "train.precision=bf16", "train.global_batch_size=1024", "train.micro_batch_size=2"],
        ),
    }
