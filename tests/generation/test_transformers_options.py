"""An export takes every option of transformers that its own models take, or says why it cannot."""

import inspect
import json
import re
from collections.abc import Callable
from functools import partial, reduce
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from dist_mem.evaluation.export import run as export
from tests.support.jobs import write_config
from tests.support.messages import refused
from tests.support.remote_code import open_hub

transformers: Any = pytest.importorskip("transformers", reason="transformers is not installed")
pytestmark = pytest.mark.usefixtures("own_modules")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, books: Path) -> Path:
    """An export of an untrained model with large weights, whose tokens are bytes."""
    root = tmp_path_factory.mktemp("models")
    config = write_config(root / "run.yaml", books, root / "run", {"model": {"init_std": 0.3}})
    assert export(config, out=root / "hub", layout="transformers") == 0
    return root / "hub"


def prompt(folder: Path) -> tuple[Any, Any]:
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
    return tokenizer, tokenizer(["The old man"], return_tensors="pt")


def taken(function: Callable[..., Any]) -> dict[str, Any]:
    """The options of a function of transformers with their defaults: named ones, and what it takes of its kwargs."""
    named = inspect.signature(function).parameters.values()
    found = {each.name: each.default for each in named if each.default is not each.empty}
    others = re.findall(r'kwargs\.pop\("(\w+)", ([^()\n]+)\)', inspect.getsource(function))
    return found | {name: eval(default) for name, default in others}


def test_every_option_of_loading_asks_for_nothing_by_its_default(folder: Path) -> None:
    options = taken(transformers.PreTrainedModel.from_pretrained)
    assert {"adapter_name", "generation_config", "use_kernels", "revision"} <= options.keys()
    del options["trust_remote_code"]
    model = open_hub(folder, **options)
    assert type(model).from_pretrained(folder, **options).dtype == model.dtype == torch.float32


NEUTRAL: dict[str, Any] = {
    **{"trust_remote_code": True, "revision": "main", "cache_dir": "cache", "torch_dtype": "auto"},
    **{"local_files_only": True, "low_cpu_mem_usage": True, "use_safetensors": True, "quantization_config": None},
}
ANSWERED: list[tuple[str, Any]] = [
    *(("attn_implementation", name) for name in ("eager", "sdpa")),
    *(("device_map", place) for place in ("auto", "balanced", "cpu", {"": "cpu"}, torch.device("cpu"))),
    *(("use_cache", True), ("use_cache", False), ("pad_token_id", 0), ("eos_token_id", 2), ("return_dict", False)),
]
ASKED = {
    **{"revision": "v2", "load_in_8bit": True, "use_safetensors": False, "dtpye": "bfloat16", "max_memory": {0: "1GB"}},
    **{"attn_implementation": "flash_attention_2", "hidden_size": 64, "tie_word_embeddings": True, "max_length": 9},
    **{"device_map": {"model.embedding": 0, "model.head": "cpu"}},
}
READ = {
    **{"output_hidden_states": True, "output_attentions": True},
    **{"inputs_embeds": torch.zeros(1, 1, 8), "position_ids": torch.zeros(1, 1)},
}


def test_options_that_a_model_can_answer_are_accepted_and_others_refused_with_a_reason(
    folder: Path, tmp_path: Path
) -> None:
    model, ids, of_class = open_hub(folder), torch.tensor([[5]]), type(open_hub(folder)).from_pretrained
    assert of_class(folder, **NEUTRAL).dtype == torch.float32
    for number, (name, value) in enumerate(ANSWERED):
        found = (open_hub, of_class)[number % 2](folder, **{name: value})
        assert getattr(found.config, name, value) == value
        assert torch.equal(found(ids, return_dict=True).logits, model(ids).logits)
    assert of_class(folder, torch_dtype=torch.bfloat16).dtype == torch.bfloat16
    assert open_hub(folder, dtype="bfloat16").dtype == torch.bfloat16
    model(ids, output_hidden_states=False, output_attentions=None)
    short = {"input_ids": torch.tensor([[5, 6, 7]]), "attention_mask": torch.ones(1, 2)}
    padded_right = {"input_ids": torch.tensor([[5, 6], [5, 0]]), "attention_mask": torch.tensor([[1, 1], [1, 0]])}
    refusals: list[tuple[str, Callable[[], object]]] = [
        *((option, partial(of_class, folder, **{option: value})) for option, value in ASKED.items()),
        *((option, partial(model, ids, **{option: value})) for option, value in READ.items()),
        ("int8", lambda: of_class(folder, dtype="int8")),
        ("hidden_size", lambda: open_hub(folder, hidden_size=64)),
        ("flash_attention_2", lambda: open_hub(folder, attn_implementation="flash_attention_2")),
        ("dist-mem export", lambda: model.save_pretrained(tmp_path / "saved")),
        ("attention_mask is (1, 2), but input_ids (1, 3)", lambda: model(**short)),
        ("attention_mask is (1, 2), but input_ids (1, 3)", lambda: model.generate(**short, max_new_tokens=1)),
        ("padding_side", lambda: model.generate(**padded_right, max_new_tokens=1)),
        ("new tokens", lambda: model.resize_token_embeddings(300)),
    ]
    for option, call in refusals:
        with refused(ValueError, option):
            call()
    model.config.output_hidden_states = True
    with refused(ValueError, "output_hidden_states"):
        model(ids)


def test_an_output_is_a_tuple_where_the_caller_or_the_configuration_says_so(folder: Path) -> None:
    model, ids = open_hub(folder, use_cache=False), torch.tensor([[5, 6]])
    (logits,) = model(ids, return_dict=False)
    assert torch.equal(logits, model(ids).logits)
    assert model(ids).past_key_values is None
    assert torch.equal(open_hub(folder, return_dict=False)(ids)[0], logits)


def test_the_configuration_has_what_all_models_of_transformers_have(folder: Path) -> None:
    """The length is None: a text may have any; lm-eval's model of Hugging Face then takes its own default."""
    kinds = ("GPT2", "Llama", "Qwen2", "Mamba", "Bloom", "GPTNeoX", "Mistral")
    configs = [getattr(transformers, f"{kind}Config")() for kind in kinds]
    usual = reduce(set.intersection, ({name for name in dir(each) if name[0] != "_"} for each in configs))
    usual -= {"initializer_range", "rope_scaling"}  # how weights are drawn; an older name that a base class has
    config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=True)
    assert {"eos_token_id", "pad_token_id", "use_cache", "vocab_size"} <= usual
    assert {name for name in usual if not hasattr(config, name)} == set()
    assert (config.eos_token_id, config.pad_token_id, config.max_position_embeddings) == (None, None, None)


def test_the_tables_of_the_tokens_are_those_of_the_model(folder: Path) -> None:
    model, ids = open_hub(folder), torch.tensor([[5, 6, 7]])
    table, size = model.get_input_embeddings(), model.config.vocab_size
    assert table.weight.shape == (size, model.config.hidden_size)
    assert model.get_output_embeddings().weight.shape == (size, model.config.hidden_size)
    assert model.resize_token_embeddings(size) is table
    before = model(ids).logits
    with torch.no_grad():
        table.weight[6] += 1
    assert not torch.equal(model(ids).logits[:, 1:], before[:, 1:])
    assert torch.equal(F.embedding(ids, table.weight), table(ids))


@pytest.mark.parametrize("options", [{}, {"torch_dtype": "auto"}, {"device_map": "auto"}, {"device": "cpu"}])
def test_a_pipeline_takes_the_folder(folder: Path, options: dict[str, Any]) -> None:
    """As with any model of the hub: the pipeline passes options on that are meant for downloads."""
    write = transformers.pipeline("text-generation", model=str(folder), trust_remote_code=True, **options)
    (found,) = write("It was", max_new_tokens=4, do_sample=False)
    assert found["generated_text"].startswith("It was")


def written(folder: Path, **options: Any) -> Tensor:
    _, given = prompt(folder)
    sequences: Tensor = open_hub(folder, **options).generate(**given)
    return sequences[0, given.input_ids.shape[1] :]


def test_a_generation_config_of_the_folder_or_of_the_call_is_used(folder: Path, tmp_path: Path) -> None:
    """As by every model of transformers; no manifest names the file, so that it may be put there and edited."""
    long = written(folder, generation_config=transformers.GenerationConfig(max_new_tokens=9, do_sample=False))
    assert len(long) == 9
    copied = tmp_path / "hub"
    copied.mkdir()
    for path in folder.rglob("*"):
        if path.is_file():
            (copied / path.relative_to(folder)).parent.mkdir(exist_ok=True)
            (copied / path.relative_to(folder)).write_bytes(path.read_bytes())
    settings = {"eos_token_id": int(long[4]), "pad_token_id": 0, "max_new_tokens": 9, "do_sample": False}
    (copied / "generation_config.json").write_text(json.dumps(settings), encoding="utf-8")
    first = long.tolist().index(int(long[4]))
    assert torch.equal(written(copied), long[: first + 1])
    assert len(written(copied, generation_config=transformers.GenerationConfig(max_new_tokens=9, do_sample=False))) == 9


# A value that asks for something, of every option of a generation that a model may have to do with.
GENERATED: dict[str, Any] = {
    **{"max_length": 14, "min_length": 13, "min_new_tokens": 3, "max_time": 60.0, "do_sample": True, "num_beams": 2},
    **{"use_cache": False, "cache_implementation": "static", "temperature": 0.7, "top_k": 5, "top_p": 0.9},
    **{"min_p": 0.1, "typical_p": 0.9, "repetition_penalty": 1.2, "no_repeat_ngram_size": 2, "bad_words_ids": [[5]]},
    **{"suppress_tokens": [5], "sequence_bias": [[[5], -3.0]], "guidance_scale": 1.5, "num_return_sequences": 1},
    **{"output_scores": True, "output_logits": True, "return_dict_in_generate": True, "pad_token_id": 0},
    **{"eos_token_id": 2, "bos_token_id": 1, "forced_eos_token_id": 3, "renormalize_logits": True},
    **{"prefill_chunk_size": 4, "watermarking_config": {"bias": 2.0}, "remove_invalid_values": True},
    **{"output_attentions": True, "output_hidden_states": True, "prompt_lookup_num_tokens": 2},
    **{"logits_to_keep": 1, "disable_compile": True, "stop_strings": ["e"], "token_healing": True},
}
REFUSED = {"output_attentions", "output_hidden_states", "prompt_lookup_num_tokens"}  # each with its reason


def outcome(model: Any, given: Any, options: dict[str, Any]) -> str:
    """The shape of what is written, or why nothing is."""
    torch.manual_seed(1)
    try:
        found = model.generate(**given, **options)
    except ValueError as error:
        return str(error)
    return str(tuple(getattr(found, "sequences", found).shape))


def test_a_generation_takes_what_a_model_of_transformers_takes(folder: Path) -> None:
    """Beside GPT2LMHeadModel with the same calls."""
    tokenizer, given = prompt(folder)
    config = transformers.GPT2Config(vocab_size=len(tokenizer), n_embd=8, n_layer=1, n_head=1, bos_token_id=1)
    config.eos_token_id = None
    model = open_hub(folder)
    assert GENERATED.keys() - {"logits_to_keep"} <= vars(transformers.GenerationConfig()).keys()
    differ = {}
    for name, value in {**GENERATED, "tokenizer": tokenizer, "assistant_tokenizer": tokenizer}.items():
        options = {"max_new_tokens": 4, "do_sample": False, "tokenizer": tokenizer, name: value}
        if name == "max_length":
            del options["max_new_tokens"]
        theirs = outcome(transformers.GPT2LMHeadModel(config).eval(), given, options)
        assert re.match(r"\(1, \d+\)", theirs), (name, theirs)
        ours = outcome(model, given, options)
        if not re.match(r"\(1, \d+\)", ours):
            differ[name] = ours
    assert differ.keys() == REFUSED
    assert not [reason for reason in differ.values() if "omit it" in reason]


def test_a_text_ends_at_its_stop_string(folder: Path) -> None:
    tokenizer, given = prompt(folder)
    model = open_hub(folder)
    options = {"max_new_tokens": 30, "do_sample": False, "tokenizer": tokenizer}
    begin = given.input_ids.shape[1]
    whole = model.generate(**given, **options)[0, begin:].tolist()
    stop = next(chr(token) for token in whole[3:] if chr(token).isascii() and chr(token).isprintable())
    ended = model.generate(**given, stop_strings=[stop], **options)[0, begin:].tolist()
    assert ended == whole[: whole.index(ord(stop)) + 1]
