"""Well-known models by name.

Shapes are those of the ``config.json`` on the hub under each name. Nothing is fetched.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from outcore.cli.train.model.source import ModelSource


@dataclass(frozen=True, kw_only=True)
class Known:
    """A well-known model."""

    name: str
    parameters: int
    """Number of parameters: tied ones count once, and those of all experts count."""
    config: Mapping[str, Any]

    @property
    def source(self) -> ModelSource:
        """The model as ``find_shapes`` would return it."""
        kind = CONFIG_MAPPING[self.config["model_type"]]
        config = kind(**{key: value for key, value in self.config.items() if key != "model_type"})
        return ModelSource(self.name, config, None, Path(self.name))


def known_models() -> list[Known]:
    """Return the known models, the largest first."""
    text = (files(__package__) / "known_models.json").read_text(encoding="utf-8")
    return sorted((Known(**row) for row in json.loads(text)), key=lambda known: -known.parameters)
