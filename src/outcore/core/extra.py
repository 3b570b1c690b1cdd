"""Packages that commands and the Trainer mixin need besides the library's own dependencies: the extra ``train``."""

from __future__ import annotations

from importlib.util import find_spec

from outcore.core.errors import ConfigError

COMMAND_LINE = ("pydantic", "rich", "typer")
"""Packages that every command needs, by their import names."""
TRAINING = (*COMMAND_LINE, "accelerate", "datasets", "huggingface_hub", "peft", "transformers", "trl", "yaml")
"""Packages that training needs."""
TRAINER = ("accelerate", "transformers")
"""Packages that a Trainer needs."""


def refuse_missing(*packages: str, extra: str | None = "train") -> None:
    """Refuse to begin if packages are missing; the error names all missing ones. Does not import any.

    Args:
        packages: Import names.
        extra: The extra of outcore that has them; None if there is none.

    Raises:
        ConfigError: A package is not installed.
    """
    missing = [name for name in packages if find_spec(name) is None]
    if missing:
        source = f"'outcore[{extra}]'" if extra else " ".join(missing)
        raise ConfigError(
            f"expected the {'package' if len(missing) == 1 else 'packages'} {', '.join(missing)}, "
            f"but {'it is' if len(missing) == 1 else 'they are'} not installed; pip install {source}"
        )
