"""Where a model is, and what its ``config.json`` says. Needs neither torch nor Transformers: it refuses at once."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from outcore.core.errors import ConfigError

CONFIG = "config.json"
_CONFIG_BYTES = 2**24  # a longer file is something else


class Place(NamedTuple):
    """A model's files."""

    config: Path
    is_bare: bool
    """Whether the user named the configuration itself."""
    source: str
    """What an adapter's base is called."""
    raw: dict[str, Any]
    """What the configuration says."""


def find_place(name: str, fetched: Sequence[str] = (CONFIG,)) -> Place:
    """Find a model's files and read its configuration.

    Args:
        name: A directory, a ``config.json``, or an ID on the hub.
        fetched: Patterns of the files that are fetched from the hub into its cache.

    Raises:
        ConfigError: There is no such model, or its configuration is no JSON object.
    """
    path = Path(os.path.expanduser(name))
    if name.strip() and os.path.lexists(path):
        is_bare = not path.is_dir()
        config, source = path if is_bare else path / CONFIG, str(path.absolute())
    else:
        is_bare, config, source = False, _from_hub(name, fetched) / CONFIG, name
    try:
        return Place(config, is_bare, source, _read(f"--model '{name}'", config))
    except OSError as error:
        raise unreadable(name, error, config) from error


def unreadable(name: str, error: OSError, config: Path) -> ConfigError:
    """Return the error for a model whose files cannot be read."""
    return ConfigError(
        f"--model '{name}': expected readable files, but got: {error.strerror or error} ({error.filename or config})"
    )


def one_line(error: BaseException) -> str:
    """Return an error's type and text on one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())


def _from_hub(name: str, fetched: Sequence[str]) -> Path:
    """Fetch a model's files into the hub's cache, or find them there."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )
    from huggingface_hub.utils import validate_repo_id

    where = f"--model '{name}'"
    try:
        validate_repo_id(name)
    except HFValidationError as error:
        raise ConfigError(
            f"{where}: expected a directory, a config.json, or a model's ID on the hub, but there is no such file or "
            "directory, and an ID is NAME or OWNER/NAME; check the path"
        ) from error
    nowhere = f"{where}: expected a directory, a config.json, or a model's ID on the hub, but there is no such file"
    try:
        return Path(snapshot_download(name, allow_patterns=list(fetched)))
    except GatedRepoError as error:
        raise ConfigError(
            f"{where}: expected a model that may be fetched, but it is gated; ask for access at "
            f"https://huggingface.co/{name} and run: hf auth login"
        ) from error
    except RepositoryNotFoundError as error:
        raise ConfigError(
            f"{nowhere}, and the hub has no such model, or hides it; check the name, or log in"
        ) from error
    except LocalEntryNotFoundError as error:
        raise ConfigError(
            f"{nowhere}, the hub cannot be reached, and its cache does not have all of that model; check the path, or "
            "be online once"
        ) from error
    except Exception as error:  # networks, proxies and disks fail in many ways
        raise ConfigError(f"{where}: expected to fetch it from the hub, but got: {one_line(error)}") from error


def _read(where: str, file: Path) -> dict[str, Any]:
    if not file.exists():
        if (file.parent / "adapter_config.json").exists():
            raise ConfigError(
                f"{where}: expected a whole model, but there is only an adapter; name the model that it was trained on"
            )
        raise ConfigError(f"{where}: expected {CONFIG} in it, but there is none; name a model's directory")
    if not file.is_file():
        raise ConfigError(f"{where}: expected a directory or a config.json, but it is a pipe, socket or device")
    advice = "name a model's directory or its config.json"
    if (size := file.stat().st_size) > _CONFIG_BYTES:
        raise ConfigError(f"{where}: expected a configuration in JSON, but got a file of {size:,} bytes; {advice}")
    try:
        raw = json.loads(file.read_bytes().decode())
    except (ValueError, RecursionError) as error:
        raise ConfigError(
            f"{where}: expected JSON in {file.name}, but it cannot be parsed: {error}; {advice}"
        ) from error
    if not isinstance(raw, dict):
        raise ConfigError(f"{where}: expected a JSON object in {file.name}, but got {raw!r:.60}; {advice}")
    return raw
