"""Packages that commands and the mixin for Trainers need beside what the library needs: the extra ``train``."""

from __future__ import annotations

from importlib.util import find_spec

from outcore.core.errors import ConfigError

COMMAND_LINE = ("pydantic", "rich", "typer")
"""What every command needs, under the names that are imported."""
TRAINING = (*COMMAND_LINE, "accelerate", "datasets", "huggingface_hub", "peft", "transformers", "trl", "yaml")
"""What training needs."""
TRAINER = ("accelerate", "transformers")
"""What a Trainer needs."""


def refuse_missing(*packages: str, extra: str | None = "train") -> None:
    """Refuse to begin without packages, all of which are named. None is imported. Args: extra: That has them, if any.

    Raises:
        ConfigError: One is not installed.
    """
    missing = [name for name in packages if find_spec(name) is None]
    if missing:
        source = f"'outcore[{extra}]'" if extra else " ".join(missing)
        raise ConfigError(
            f"expected the {'package' if len(missing) == 1 else 'packages'} {', '.join(missing)}, "
            f"but {'it is' if len(missing) == 1 else 'they are'} not installed; pip install {source}"
        )
