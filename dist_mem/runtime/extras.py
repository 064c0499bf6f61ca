"""The optional libraries, and the error for one that is not installed.

A core installation (`pip install dist-mem`) loads models, scores and generates. All else belongs to an extra of
pyproject.toml, as `pip install 'dist-mem[train]'`.
"""

from __future__ import annotations

from importlib.util import find_spec

from dist_mem.errors import UnusableError

# name in `import` -> extra
EXTRA_OF = {
    "deepspeed": "train",
    "huggingface_hub": "train",
    "aiohttp": "train",
    "ninja": "train",
    "tqdm": "train",
    "webdataset": "train",
    "s3fs": "s3",
    "gcsfs": "gs",
    "pyarrow": "data",
    "mlflow": "mlflow",
    "pynvml": "mlflow",
    "wandb": "wandb",
    "tensorboard": "metrics",
    "matplotlib": "plots",
    "nltk": "dialogue",
    "rouge_score": "dialogue",
    "google.protobuf": "hf",
    "tokenizers": "hf",
    "transformers": "hf",
    "lm_eval": "harness",
    "wonderwords": "harness",
    "fla": "fla",
}


def is_installed(library: str) -> bool:
    """Return whether a library, by its name in `import`, can be imported; this does not import it."""
    try:
        return find_spec(library) is not None
    except ModuleNotFoundError:  # google, which contains google.protobuf
        return False


def require(library: str, purpose: str, otherwise: str = "") -> None:
    """Raise UnusableError if a library is not installed; this does not import it.

    Args:
        library: its name in `import`, a key of `EXTRA_OF`.
        purpose: what needs it, for the message: "training".
        otherwise: how to go without it, for the message: "set tracking.mlflow=false".
    """
    if not is_installed(library):
        raise not_installed(library, purpose, otherwise)


def not_installed(library: str, purpose: str = "this command", otherwise: str = "") -> UnusableError:
    """Return the error for a library of an extra; the arguments are those of `require`."""
    or_else = f", or {otherwise}" if otherwise else ""
    return UnusableError(
        f"{library} is not installed, and {purpose} needs it: pip install 'dist-mem[{EXTRA_OF[library]}]'{or_else}"
    )
