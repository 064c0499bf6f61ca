"""Folders with tokenizers as published models have them, of a few hundred tokens trained on README.md."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import sentencepiece
import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors, trainers

from dist_mem.data.tokenizers.fast import _merges, proto
from tests.support.paths import ROOT

NUM_TOKENS = 600  # before those that are added
_CUT = (  # of Llama 3; Qwen's has \p{N} alone
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"
    r"\s+(?!\S)|\s+"
)


def _texts() -> list[str]:
    return (ROOT / "README.md").read_text(encoding="utf-8").splitlines(keepends=True)


def _save(folder: Path, tokenizer: tokenizers.Tokenizer, model_type: str, config: dict[str, Any]) -> None:
    tokenizer.save(str(folder / "tokenizer.json"))
    _save_config(folder, tokenizer.get_vocab_size(), model_type, config)


def _save_config(folder: Path, num_tokens: int, model_type: str, config: dict[str, Any]) -> None:
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    sizes = {"model_type": model_type, "vocab_size": num_tokens}
    (folder / "config.json").write_text(json.dumps(sizes), encoding="utf-8")


def _byte_pairs(cut: str | None) -> tokenizers.Tokenizer:
    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if cut is not None:
        bytes_only = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        made.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(cut), "isolated"), bytes_only])
    made.decoder = decoders.ByteLevel()
    letters = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=NUM_TOKENS, initial_alphabet=letters, show_progress=False)
    made.train_from_iterator(_texts(), trainer)
    return made


def _llama3(folder: Path) -> None:
    made = _byte_pairs(_CUT)
    made.add_special_tokens(["<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>"])
    begin = ("<|begin_of_text|>", made.token_to_id("<|begin_of_text|>"))
    around = processors.TemplateProcessing(
        single=f"{begin[0]} $A", pair=f"{begin[0]} $A {begin[0]} $B", special_tokens=[begin]
    )
    made.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=True), around])
    names = {"bos_token": begin[0], "eos_token": "<|end_of_text|>", "tokenizer_class": "PreTrainedTokenizerFast"}
    chat = "{{ bos_token }}{% for m in messages %}{{ m['content'] }}<|eot_id|>{% endfor %}"
    _save(folder, made, "llama", {**names, "clean_up_tokenization_spaces": False, "chat_template": chat})


def _qwen(folder: Path) -> None:
    """NFC, no BOS, an added token that is not special, and more rows of the embedding than tokens."""
    made = _byte_pairs(_CUT.replace("{1,3}", ""))
    made.normalizer = normalizers.NFC()
    made.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    made.add_tokens([AddedToken("<think>", normalized=False, special=False)])
    made.post_processor = processors.ByteLevel(add_prefix_space=False, trim_offsets=False, use_regex=False)
    names = {"bos_token": None, "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "unk_token": None}
    _save(folder, made, "qwen2", {**names, "tokenizer_class": "Qwen2Tokenizer", "add_prefix_space": False})
    _save_config(folder, 640, "qwen2", json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8")))


def _gpt2(folder: Path) -> None:
    made = _byte_pairs(None)
    made.add_special_tokens(["<|endoftext|>"])
    made.post_processor = processors.ByteLevel(trim_offsets=False)
    names = dict.fromkeys(("bos_token", "eos_token", "unk_token"), "<|endoftext|>")
    _save(folder, made, "gpt2", {**names, "tokenizer_class": "GPT2Tokenizer"})


def _gpt2_in_two_files(folder: Path) -> None:
    """vocab.json and merges.txt alone."""
    _gpt2(folder)
    model = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))["model"]
    (folder / "tokenizer.json").unlink()
    ids = {**model["vocab"], "<|endoftext|>": len(model["vocab"])}
    (folder / "vocab.json").write_text(json.dumps(ids), encoding="utf-8")
    merges = "".join(f"{' '.join(merge)}\n" for merge in model["merges"])
    (folder / "merges.txt").write_text(f"#version: 0.2\n{merges}", encoding="utf-8")


_LLAMA2 = {
    **{"tokenizer_class": "LlamaTokenizer", "add_bos_token": True, "add_eos_token": False, "legacy": False},
    **{"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "clean_up_tokenization_spaces": False},
}


def _llama2_slow(folder: Path) -> None:
    """SentencePiece's tokenizer.model alone."""
    options: dict[str, Any] = dict.fromkeys(("byte_fallback", "split_digits", "allow_whitespace_only_pieces"), True)
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(_texts()),
        model_prefix=str(folder / "tokenizer"),
        vocab_size=NUM_TOKENS,
        model_type="bpe",
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        minloglevel=2,
        **options,
    )
    (folder / "tokenizer.vocab").unlink()
    _save_config(folder, NUM_TOKENS, "llama", _LLAMA2)


def _of_pieces(folder: Path) -> tokenizers.Tokenizer:
    _llama2_slow(folder)
    model = proto.ModelProto()
    model.ParseFromString((folder / "tokenizer.model").read_bytes())
    (folder / "tokenizer.model").unlink()
    normal = proto.ModelProto.SentencePiece.NORMAL
    scores = {entry.piece: entry.score for entry in model.pieces if entry.type == normal}
    merges = [pair for _, pair in sorted(_merges(scores), key=lambda merge: merge[0])]
    ids = {entry.piece: token for token, entry in enumerate(model.pieces)}
    made = tokenizers.Tokenizer(
        models.BPE(vocab=ids, merges=merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    parts = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    made.decoder = decoders.Sequence(parts)
    made.add_special_tokens(["<unk>", "<s>", "</s>"])
    made.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s>:1 $B:1", special_tokens=[("<s>", 1)]
    )
    return made


def _llama2(folder: Path) -> None:
    made = _of_pieces(folder)
    made.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    _save(folder, made, "llama", _LLAMA2)


def _mistral(folder: Path) -> None:
    made = _of_pieces(folder)
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    _save(folder, made, "mistral", _LLAMA2)


PUBLISHED: dict[str, Callable[[Path], None]] = {
    "llama3": _llama3,
    "qwen": _qwen,
    "gpt2": _gpt2,
    "gpt2, two files": _gpt2_in_two_files,
    "llama2": _llama2,
    "llama2, tokenizer.model alone": _llama2_slow,
    "mistral": _mistral,
}


def save_published(kind: str, folder: Path) -> Path:
    """Make a folder, which may exist, with a tokenizer of this kind, and with the config.json of its model."""
    folder.mkdir(parents=True, exist_ok=True)
    PUBLISHED[kind](folder)
    return folder
