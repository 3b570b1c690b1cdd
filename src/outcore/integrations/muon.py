"""Muon by name: ``torch.optim.Muon`` for the matrices of blocks, ``torch.optim.AdamW`` for all else."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from typing import Any, final

import torch
from torch import nn

from outcore.core.errors import ConfigError, UnsupportedError
from outcore.model.unit_modules import output_embeddings
from outcore.optim.joined import Joined

_DEFAULTS = {"adjust_lr_fn": "match_rms_adamw"}
"""Default of Muon with which a learning rate for AdamW suits both."""
_WORDS = {"true": True, "false": False}


@final
class MuonBesideAdamW(Joined):
    """Muon and AdamW as one. As Muon's documentation asks, embeddings, heads and whatever is no matrix go to AdamW."""

    def __init__(self, params: Any, *, within: nn.Module | None, muon: Mapping[str, Any], **adamw: Any) -> None:
        """Divide the parameters.

        Args:
            params: As for any optimizer.
            within: The model that has them; None: Muon takes all matrices.
            muon: Settings of Muon, which override those of param groups.
            **adamw: Settings of AdamW. Its ``lr`` is also Muon's unless ``muon`` has one.

        Raises:
            ConfigError: There is no matrix to train.
        """
        given = list(params)
        groups = given if given and isinstance(given[0], dict) else [{"params": given}]
        everything = [p for group in groups for p in group["params"]]
        chosen = set(map(id, everything if within is None else _matrices_of_blocks(within)))
        chosen &= {id(p) for p in everything if p.ndim == 2}
        if not chosen:
            raise ConfigError(
                f"optim 'muon': expected matrices to train in blocks of the model, but this {type(within).__name__} "
                "has none; choose another optimizer"
            )
        settings = {**_DEFAULTS, "lr": adamw["lr"], **muon}
        mine = list(_with_params(groups, chosen, inside=True, without=muon))
        rest = list(_with_params(groups, chosen, inside=False))
        super().__init__([torch.optim.Muon(mine, **settings), *([torch.optim.AdamW(rest, **adamw)] if rest else [])])


def _with_params(
    groups: list[dict[str, Any]], chosen: set[int], *, inside: bool, without: Mapping[str, Any] | None = None
) -> Iterator[dict[str, Any]]:
    for group in groups:
        params = [p for p in group["params"] if (id(p) in chosen) is inside]
        if params:
            yield {**{k: v for k, v in group.items() if k not in (without or ())}, "params": params}


def _matrices_of_blocks(model: nn.Module) -> Iterator[nn.Parameter]:
    """Yield weight matrices of layers in lists of modules, without embeddings and heads."""
    apart = [m for m in model.modules() if isinstance(m, nn.Embedding)]
    others = {id(p) for m in (*apart, *output_embeddings(model)) for p in m.parameters()}
    layers = {m: None for each in model.modules() if isinstance(each, nn.ModuleList) for m in each.modules()}
    for layer in layers:
        weight = layer._parameters.get("weight")
        if weight is not None and weight.ndim == 2 and id(weight) not in others:
            yield weight


def settings_of_muon(text: str | None) -> dict[str, Any]:
    """Read ``optim_args``, such as ``momentum=0.9,ns_steps=6``. Colons separate the numbers of ``ns_coefficients``.

    Raises:
        UnsupportedError: These are not settings of ``torch.optim.Muon``.
    """
    known = {p.name: p.default for p in inspect.signature(torch.optim.Muon).parameters.values() if p.name != "params"}
    read = {}
    for part in (text or "").replace(" ", "").split(",") if text else ():
        name, _, value = part.partition("=")
        try:
            read[name] = _read(value, known[name])
        except (KeyError, ValueError) as error:
            raise UnsupportedError(
                "training arguments: expected optim_args with optim 'muon' to be settings of torch.optim.Muon, such as "
                f"momentum=0.9,ns_steps=6 (there are {', '.join(known)}), but got '{part}'; correct it"
            ) from error
    return read


def _read(text: str, like: Any) -> Any:
    if isinstance(like, bool):
        return _WORDS[text.lower()]
    if isinstance(like, tuple):
        return tuple(float(each) for each in text.split(":"))
    return text if like is None else type(like)(text)
