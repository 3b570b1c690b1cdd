"""The files, directories and data sets that rows come from, and which rows of each are drawn by weight."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from outcore.core.errors import ConfigError

SUFFIXES = (".txt", ".jsonl", ".csv", ".parquet")
"""Suffixes of the files that can be read."""
_HUB_NAME = re.compile(r"(?P<id>[\w.-]+(/[\w.-]+)?)(:((?P<config>[\w.-]+):)?(?P<split>\w+(\[.*\])?))?")


class DataSource(NamedTuple):
    """One of the things that rows come from."""

    name: str
    weight: float | None
    """None: all of its rows come, each once."""


def sources_of(names: Sequence[str]) -> list[DataSource]:
    """Read names as they were given: ``NAME`` or ``NAME:WEIGHT``. A path that is there is a path, whatever its name.

    Raises:
        ConfigError: A weight is not a number above 0, or some have a weight and others have none.
    """
    sources = [_source(name) for name in names]
    bare, weighted = (
        [source.name for source in sources if (source.weight is None) == is_bare] for is_bare in (True, False)
    )
    if bare and weighted:
        raise ConfigError(
            f"'{bare[0]}': expected a weight, as '{weighted[0]}' has one, but got none; give all of them a weight "
            f"({bare[0]}:1) or none"
        )
    return sources


def _source(name: str) -> DataSource:
    path, colon, text = name.rpartition(":")
    if not colon or os.path.lexists(os.path.expanduser(name)):
        return DataSource(name, None)
    weight = None
    with suppress(ValueError):
        weight = float(text)
    if weight is None and not os.path.lexists(os.path.expanduser(path)):
        return DataSource(name, None)  # the split of a data set on the hub
    if weight is None or not 0 < weight < math.inf:
        raise ConfigError(
            f"'{name}': expected a file or a directory, or a weight above 0 after the colon, but got '{text}'; "
            "correct it"
        )
    return DataSource(path, weight)


def refuse_absent(names: Sequence[str], flag: str) -> None:
    """Refuse what is neither there nor the name of a data set on the hub. Raises: ConfigError: One of the names is."""
    try:
        for source in sources_of(names):
            if not os.path.lexists(os.path.expanduser(source.name)):
                hub_name(source.name)
    except ConfigError as error:
        raise ConfigError(f"{flag} {error}") from error


def hub_name(name: str) -> re.Match[str]:
    """Take the name of a data set on the hub apart. Raises: ConfigError: It can be none."""
    found = _HUB_NAME.fullmatch(name)
    if found is None or os.path.lexists(found["id"]) or Path(name).suffix in SUFFIXES:
        raise ConfigError(f"'{name}': expected a file or a directory, but there is none; check the path")
    return found


def shares(counts: Sequence[int], weights: Sequence[float]) -> list[int]:
    """Divide as many rows as there are in all among sources, by weight."""
    total, scale = sum(counts), sum(weights)
    exact = [total * weight / scale for weight in weights]
    found = [math.floor(share) for share in exact]
    largest = sorted(range(len(exact)), key=lambda i: (found[i] - exact[i], i))
    for i in largest[: total - sum(found)]:
        found[i] += 1
    return found


def drawn(counts: Sequence[int], wanted: Sequence[int], seed: int) -> NDArray[np.int64]:
    """Draw rows. A source gives each of its rows once, in random order, before it gives any of them again.

    Args:
        counts: Rows of each source; these rows follow one another.
        wanted: Rows that each source gives.
        seed: All that the draw depends on besides these numbers.

    Returns:
        The numbers of the rows, sources mixed at random.
    """
    generator = np.random.default_rng(seed)
    begins = np.cumsum([0, *counts])
    rows = [
        begin + np.resize(generator.permutation(count), want)
        for begin, count, want in zip(begins, counts, wanted, strict=False)
    ]
    return generator.permutation(np.concatenate(rows)).astype(np.int64)
