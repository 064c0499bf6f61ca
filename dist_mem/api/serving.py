"""The model that MLflow serves: an export that `dist-mem export --mlflow` has logged.

    MLFLOW_TRACKING_URI=sqlite:///mlflow.db mlflow models serve -m models:/demo@champion --env-manager local

MLflow imports this module by its name (dist_mem/tracking/mlflow/models.py) and calls `_load_pyfunc`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dist_mem.api.model import Model, load
from dist_mem.generation.generate import Sampling
from dist_mem.tracking.mlflow.models import invalid_request

_MODES = ("generate", "score")


class ServedModel:
    """A model as MLflow calls it."""

    def __init__(self, model: Model) -> None:
        self.model = model

    def predict(self, model_input: Any, params: Mapping[str, Any] | None = None) -> list[dict[str, str | float]]:
        """Continue or score every prompt on its own, as `Model.generate` and `Model.score` do.

        Args:
            model_input: a table with the column `prompt`.
            params: `mode` ("generate" or "score"), and for generate `num_tokens`, `temperature`, `top_p` and `seed`.
                MLflow fills in the defaults of the signature.

        Returns:
            A row per prompt: `continuation`; or `num_tokens`, `nats_per_token` and `perplexity`.

        Raises:
            MlflowException: a parameter or a prompt is invalid, or has no token to score; a server answers with 400.
        """
        # MLflow makes numpy's numbers of those in the request.
        given = {name: getattr(value, "item", lambda value=value: value)() for name, value in (params or {}).items()}
        mode = given.pop("mode", "generate")
        try:
            if mode not in _MODES:
                raise ValueError(f"mode is {mode!r}, but must be one of {', '.join(_MODES)}")
            one = self._continue if mode == "generate" else self._score
            prompts = list(model_input["prompt"])
            for row, prompt in enumerate(prompts):
                if not isinstance(prompt, str):  # MLflow lets missing texts pass as None or nan
                    raise ValueError(f"prompt of row {row} is {prompt!r}, but must be a text")
            return [one(prompt, given) for prompt in prompts]
        except (TypeError, ValueError) as error:
            raise invalid_request(error) from error

    def _continue(self, prompt: str, params: Mapping[str, Any]) -> dict[str, str | float]:
        settings = {"top_p": 0.95, **params}
        num_tokens = settings.pop("num_tokens", 256)
        pieces = self.model.generate(prompt, num_tokens=num_tokens, sampling=Sampling(**settings))
        return {"continuation": "".join(pieces)}

    def _score(self, prompt: str, _: Mapping[str, Any]) -> dict[str, str | float]:
        scores = self.model.score(prompt)
        if scores.nll.isnan().all():
            raise ValueError(f"prompt is {prompt!r}, which has no token to score")
        return {"num_tokens": len(scores.tokens), "nats_per_token": scores.mean, "perplexity": scores.perplexity}


def _load_pyfunc(path: str) -> ServedModel:
    """Return the model of an export; MLflow calls this."""
    return ServedModel(load(Path(path)))
