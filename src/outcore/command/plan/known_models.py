"""Well-known models by name.

Shapes are those of the ``config.json`` on the hub under each name. Nothing is fetched.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from outcore.command.train.model.source import ModelSource


@dataclass(frozen=True, kw_only=True)
class KnownModel:
    """A well-known model."""

    name: str
    parameters: int
    """Number of parameters: tied ones count once, and those of all experts count."""
    config: Mapping[str, Any]

    @property
    def source(self) -> ModelSource:
        """The model as ``find_shapes`` would return it."""
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING

        from outcore.command.train.model.source import ModelSource

        kind = CONFIG_MAPPING[self.config["model_type"]]
        config = kind(**{key: value for key, value in self.config.items() if key != "model_type"})
        return ModelSource(self.name, config, None, Path(self.name))


def known_models() -> list[KnownModel]:
    """Return the known models, the largest first."""
    text = (files(__package__) / "known_models.json").read_text(encoding="utf-8")
    return sorted((KnownModel(**row) for row in json.loads(text)), key=lambda known: -known.parameters)


def known_named(name: str) -> KnownModel | None:
    """Return the known model of that name; None: there is none, or the name is that of a file."""
    if os.path.lexists(os.path.expanduser(name)):
        return None
    return next((known for known in known_models() if known.name == name), None)
