"""Folders of models with their own code, as transformers opens them."""

from pathlib import Path
from typing import Any


def open_hub(folder: Path, **options: Any) -> Any:
    import transformers  # not on every machine: tests that use it skip without

    return transformers.AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, **options)
