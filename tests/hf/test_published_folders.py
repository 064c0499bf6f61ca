"""Folders in Hugging Face's layout that others made: every wrong file is refused by its name, and the key."""

import itertools
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file

from dist_mem.__main__ import main
from dist_mem.config import Config, change_config, load_config, save_config
from dist_mem.errors import UnusableError
from dist_mem.estimate.dry_run import check_model
from dist_mem.hf.folder import check_sizes, load_pretrained, read_published_config
from dist_mem.hf.llama import ROPE_NAMES
from dist_mem.hf.names import LAYOUTS
from dist_mem.memory import memory_class, memory_kinds, memory_options
from tests.support.configs import config_from
from tests.support.gpt2_models import LTM, SEG_LEN, VOCAB, build, gpt2_config, save_random_gpt2
from tests.support.llama_models import PUBLISHED, llama_config, save_random_llama
from tests.support.messages import refused, said_line
from tests.support.paths import ROOT

WRONG: list[Any] = [
    *(None, True, "x", "", -1, 0, 0.0, 1.5, 10**400, -(10**400), float("nan"), float("inf")),
    *([], [1], [[]], {}, {"rope_theta": "x"}, {"rope_theta": 10**400}, {"rope_type": []}, {"type": 1}),
]
ROPE = {"rope_type": "default", "rope_theta": 10_000.0}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 2.0, "high_freq_factor": 4.0}
QWEN_WINDOW = {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 5}
OTHER: dict[str, list[tuple[dict[str, Any], str]]] = {  # what is not computed here, and what the configuration has not
    "gpt2": [
        ({"activation_function": "relu"}, "activation_function"),
        ({"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx"),
    ],
    "llama": [
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"attention_bias": True}, "attention_bias"),
        ({"model_type": "gemma"}, "model_type"),
        ({"rope_parameters": {**ROPE, "rope_type": "longrope", "factor": 8.0}}, "rope_parameters.rope_type"),
        ({"rope_parameters": {**ROPE, "rope_type": "llama3", "factor": 8.0}}, "rope_parameters.low_freq_factor"),
        ({"rope_parameters": {**ROPE, **LLAMA3, "high_freq_factor": 1.0}}, "rope_parameters.high_freq_factor"),
        ({"rope_parameters": {"full_attention": ROPE}}, "rope_parameters.full_attention"),
        ({"rope_parameters": {**ROPE, "partial_rotary_factor": 0.5}}, "rope_parameters.partial_rotary_factor"),
        ({"rope_parameters": None, "rope_scaling": {"type": "linear"}}, "rope_scaling.factor"),
        ({"layer_types": ["sliding_attention"]}, "layer_types"),
        ({**QWEN_WINDOW, "max_window_layers": 1}, "max_window_layers"),
        ({**QWEN_WINDOW, "layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"rope_parameters": {**ROPE, "rope_theta": 5e5}}, "model.rope_theta=500000.0"),
        ({"rope_parameters": None, "rope_theta": 5e5}, "model.rope_theta=500000.0"),
        ({"rms_norm_eps": 1e-5, "num_key_value_heads": 4}, "model.num_kv_heads=4 model.norm_eps=1e-05"),
        ({"tie_word_embeddings": True}, "model.tie_embeddings"),
        ({"model_type": "qwen2"}, "model.qkv_bias=true"),
        ({"model_type": "qwen3"}, "model.qk_norm=true"),
        ({"model_type": "mistral"}, "model.sliding_window=4096"),
        ({**QWEN_WINDOW, "max_window_layers": 0}, "model.qkv_bias=true model.sliding_window=5"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2}}, "model.rope.kind=dynamic model.rope.factor=2"),
        ({"rope_parameters": {**ROPE, **LLAMA3}}, "model.rope.kind=llama3"),
        ({"rope_parameters": {**ROPE, "rope_type": "yarn", "factor": 2.0}}, "model.rope.original_positions=64"),
    ],
}


class Published(NamedTuple):
    folder: Path
    config: Config
    content: dict[str, Any]  # of config.json

    def rewrite(self, name: str, content: Any) -> None:
        (self.folder / name).write_text(json.dumps(content), encoding="utf-8")

    def load(self, vocab_size: int = VOCAB, **blocks: Any) -> None:
        config = config_from(self.config.document, blocks)
        load_pretrained(build(config, vocab_size), config.model, vocab_size)


@pytest.fixture(params=LAYOUTS)
def published(request: pytest.FixtureRequest, tmp_path: Path) -> Published:
    pytest.importorskip("transformers", reason="transformers is not installed")
    folder = tmp_path / "folder"
    save: Callable[[Path], Any] = save_random_llama if request.param == "llama" else save_random_gpt2
    save(folder)
    config = (llama_config if request.param == "llama" else gpt2_config)(model={"pretrained": str(folder)})
    return Published(folder, config, json.loads((folder / "config.json").read_text(encoding="utf-8")))


def test_folders_of_another_computation_or_of_other_sizes_are_refused_by_key(published: Published) -> None:
    for change, named in OTHER[published.config.model.kind]:
        published.rewrite("config.json", {**published.content, **change})
        with refused(UnusableError, "config.json", named) as caught:
            published.load()
        if named.startswith("model."):
            follow_remedy(published, str(caught.value))
    published.rewrite("config.json", published.content)
    with refused(UnusableError, "model.num_layers", "model.d_inner"):
        published.load(model={"num_layers": 2, "d_inner": 64})
    with refused(UnusableError, "vocab_size"):
        published.load(vocab_size=VOCAB - 1)


def follow_remedy(published: Published, message: str) -> None:
    """Set on the command line what a message says; then the sizes are those of the folder."""
    path = published.folder.parent / "run.yaml"
    save_config(published.config, path)
    overrides = message.partition(": set ")[2].split()
    model = load_config([str(path), *overrides], memory_options=memory_options).model
    check_sizes(model, VOCAB)
    if model.rope is not None:  # and back
        save_config(load_config([str(path), *overrides], memory_options=memory_options), path)
        published.rewrite("config.json", {**published.content})
        with refused(UnusableError, "config.json", "model.rope=null") as caught:
            check_sizes(load_config([str(path)], memory_options=memory_options).model, VOCAB)
        overrides = str(caught.value).partition(": set ")[2].split()
        check_sizes(load_config([str(path), *overrides], memory_options=memory_options).model, VOCAB)


def test_files_of_transformers_4_are_read_alike(tmp_path: Path) -> None:
    """Rotary positions under other keys."""
    pytest.importorskip("transformers", reason="transformers is not installed")
    layout = LAYOUTS["llama"]
    for number, kind in enumerate(PUBLISHED):
        folder = tmp_path / str(number)
        save_random_llama(folder, kind)
        sizes = layout.sizes(read_published_config(folder, layout))
        content = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        rope = content.pop("rope_parameters")
        content["rope_theta"], name = rope.pop("rope_theta"), rope.pop("rope_type")
        content["rope_scaling"] = None if name == "default" else {"type": name, **rope}
        (folder / "config.json").write_text(json.dumps(content), encoding="utf-8")
        assert layout.sizes(read_published_config(folder, layout)) == sizes


@pytest.mark.parametrize("published", ["llama"], indirect=True)
def test_a_memory_that_hides_rows_behind_the_window_or_has_none_ends_with_code_2(
    published: Published, single_process: None, capsys: pytest.CaptureFixture[str]
) -> None:
    """So does a rope type that is unknown; before anything is written."""
    path = published.folder.parent / "run.yaml"
    places = {"run_dir": str(published.folder.parent / "run"), "data.path": str(published.folder.parent / "no_data")}
    save_config(change_config(published.config, places), path)
    published.rewrite("config.json", {**published.content, "model_type": "mistral", "sliding_window": 30})
    check = ["train", str(path), "--check", "model.sliding_window=30"]
    compressive = ["memory.kind=compressive", "memory.mem_len=12", "memory.cmem_len=12"]
    assert main([*check, *compressive]) == 2
    said_line(capsys.readouterr().err, "model.sliding_window", "30", "memory.cmem_len", "transformer_xl")
    assert main([*check, "memory.kind=compressive", "memory.mem_len=12", "memory.cmem_len=6"]) == 0
    assert main([*check, "memory.kind=linear"]) == 2
    said_line(capsys.readouterr().err, "model.sliding_window", "30", "memory.kind")
    assert main([*check, "memory.kind=transformer_xl"]) == 0
    published.rewrite("config.json", {**published.content, "rope_parameters": {"rope_type": "x"}})
    assert main(["train", str(path), "--check"]) == 2
    said_line(capsys.readouterr().err, str(published.folder), "rope_parameters.rope_type", "'x'", "llama3")
    assert not (published.folder.parent / "run").exists()


def test_a_check_refuses_a_memory_without_a_place_for_the_weights_and_what_it_says_works(
    published: Published, single_process: None, capsys: pytest.CaptureFixture[str]
) -> None:
    """The remedies of every built-in memory that is refused, one after the other."""
    path, data = published.folder.parent / "run.yaml", f"data.path={published.folder.parent / 'no_data'}"
    save_config(published.config, path)
    num_refused = 0
    for kind in memory_kinds():
        small = {**memory_class(kind).small_options(SEG_LEN), "kind": kind}
        given = [f"memory.{name}={json.dumps(value)}" for name, value in small.items()]
        for number in range(4):
            code, message = main(["train", str(path), "--check", data, *given]), capsys.readouterr().err
            if code == 0:
                break
            num_refused += number == 0
            assert code == 2
            first = re.search(
                r"(memory\.[a-z.]+)=([a-z]+)|(?<=set )(memory\.\w+) to (?:at most )?(\d+|[a-z_]+)", message
            )
            assert first is not None, message
            key, value = filter(None, first.groups())
            given = [*(given if key != "memory.kind" else []), f"{key}={value}"]
        assert code == 0, (kind, message)
    assert num_refused > 3


@pytest.mark.parametrize("memory", [{"kind": "none"}, {**LTM, "over": {"kind": "none"}}])
@pytest.mark.parametrize("published", ["gpt2"], indirect=True)
def test_a_memory_with_relative_positions_is_refused_with_weights_of_gpt2(published: Published, memory: Any) -> None:
    with refused(UnusableError, "model.pretrained", "has relative positions"):
        published.load(memory=memory)


def test_a_group_by_pretrained_is_refused_of_a_model_that_has_no_place_for_such_weights() -> None:
    groups = "optimizer.groups=[{pretrained: false, lr: 1e-3}]"
    words = [str(ROOT / "configs" / "gpt2_small.yaml"), "memory={kind: none}", groups]
    with refused(UnusableError, "optimizer.groups", "has relative positions"):
        check_model(load_config(words, memory_options=memory_options), 300)


@pytest.mark.parametrize("over", [True, False])
def test_a_convolution_is_refused_with_weights_that_were_trained_without(published: Published, over: bool) -> None:
    """In the long-term memory's `over`, and alone."""
    below = {"kind": "causal", "kernel": 4}
    with refused(UnusableError, "memory.over.kernel" if over else "memory.kernel"):
        published.load(memory={**LTM, "over": below} if over else below)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_missing_or_damaged_file_is_named(published: Published, name: str) -> None:
    path = published.folder / name
    path.write_bytes(path.read_bytes()[:100])
    with refused(UnusableError, name):
        published.load()
    path.unlink()
    with refused(UnusableError, name):
        published.load()


def test_values_of_every_type_are_read_or_refused_by_key(published: Published) -> None:
    path, family = published.folder / "config.json", LAYOUTS[published.config.model.kind]
    for key in {**published.content, **family.types}:
        for value in WRONG:
            published.rewrite("config.json", {**published.content, key: value})
            try:
                family.sizes(read_published_config(published.folder, family))
            except UnusableError as error:
                assert str(path) in str(error) and key in str(error) and len(str(error)) < 400
    ropes = [{**LLAMA3, "rope_type": kind} for kind in ("dynamic", "yarn")] if family is LAYOUTS["llama"] else []
    for rope, name in itertools.product(
        ropes, {*ROPE_NAMES.values(), "factor", "rope_type", "mscale", "mscale_all_dim"}
    ):
        for value in WRONG:
            published.rewrite("config.json", {**published.content, "rope_parameters": {**rope, name: value}})
            try:
                family.sizes(read_published_config(published.folder, family))
            except UnusableError as error:
                assert f"rope_parameters.{name}" in str(error) and len(str(error)) < 400
    without = {name: value for name, value in published.content.items() if name != "vocab_size"}
    for content, reason in ((without, "vocab_size"), (WRONG, "an object"), ("x", "an object"), (None, "an object")):
        published.rewrite("config.json", content)
        with refused(UnusableError, reason):
            published.load()
    path.write_text("[", encoding="utf-8")
    with refused(UnusableError, "config.json is damaged"):
        published.load()


def test_names_in_an_index_are_files_of_the_folder(published: Published) -> None:
    """A file elsewhere is not opened, whatever is in it."""
    tensors = load_file(published.folder / "model.safetensors")
    save_file(tensors, published.folder.parent / "outside.safetensors")
    (published.folder / "model.safetensors").rename(published.folder / "model-1.safetensors")
    index = "model.safetensors.index.json"
    for name in ("../outside.safetensors", "a/../../x", ".x", ""):
        published.rewrite(index, {"weight_map": {next(iter(tensors)): name, "more": "model-1.safetensors"}})
        with refused(UnusableError, index, "weight_map"):
            published.load()
    for name in (str(published.folder.parent / "outside.safetensors"), *(value for value in WRONG if value != "x")):
        published.rewrite(index, {"weight_map": {next(iter(tensors)): name, "more": "model-1.safetensors"}})
        with pytest.raises(UnusableError, match=rf"{index} is damaged \(weight_map"):
            published.load()
    for content in (*WRONG, {"weight_map": 1}, {"weight_map": ["x"]}):
        published.rewrite(index, content)
        with pytest.raises(UnusableError, match=index):
            published.load()
    *others, last = tensors
    files = {**dict.fromkeys(others, "model-1.safetensors"), last: "model-2.safetensors"}
    published.rewrite(index, {"weight_map": files})
    with refused(UnusableError, "model-2.safetensors"):
        published.load()
    published.rewrite(index, {"weight_map": dict.fromkeys(tensors, "model-1.safetensors")})
    published.load()


def test_an_index_that_was_left_beside_weights_in_one_file_is_not_read(published: Published) -> None:
    """transformers reads the one file, as whoever saved it last meant."""
    published.rewrite("model.safetensors.index.json", {"weight_map": {"wte.weight": "model-1.safetensors"}})
    published.load()


def test_weights_that_are_no_floating_point_numbers_are_refused(published: Published) -> None:
    """Copying converts them without a word: integers are quantised weights without their scales."""
    path = published.folder / "model.safetensors"
    tensors = load_file(path)
    name = next(iter(tensors))
    for dtype in (torch.int64, torch.int8, torch.bool, torch.complex64, torch.float8_e4m3fn):
        save_file({**tensors, name: tensors[name].to(dtype)}, path)
        with refused(UnusableError, name, str(dtype).removeprefix("torch.")):
            published.load()
    save_file({key: tensor.to(torch.float16) for key, tensor in tensors.items()}, path)
    published.load()
