"""Makes the optimizers that training arguments name, with updates that can be streamed.

Names of bitsandbytes mean its storage (8 bits in blocks, embeddings in fp32) with torch's update. Where bitsandbytes
would page, the plan decides. ``muon`` is a name of our own, since Transformers has none for it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from outcore.core.errors import ConfigError, UnsupportedError
from outcore.integrations.muon import MuonBesideAdamW, settings_of_muon
from outcore.optim import Lion, Rule, State
from outcore.optim.formats import MASTER_FORMATS
from outcore.spec.model import StateFormat


class AdafactorOfTransformers(Rule):
    """``transformers.Adafactor`` with ``scale_parameter=False, relative_step=False``, as the Trainer makes it."""

    is_whole = True
    temporaries = 5.0
    cost = 10.0

    def __init__(self, params: Any, lr: float | Tensor = 1e-3, weight_decay: float = 0.0) -> None:
        """Args: params: As for any optimizer. lr: The absolute rate. weight_decay: Decoupled decay."""
        settings = {"eps": (1e-30, 1e-3), "clip_threshold": 1.0, "decay_rate": -0.8}
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, **settings})

    def states(self, shape: tuple[int, ...], settings: Mapping[str, Any]) -> Mapping[str, State]:
        """Return the states: means of rows and columns for a matrix, else one mean per element."""
        if len(shape) < 2:
            return {"exp_avg_sq": State(dtype=torch.float32)}
        row, col = shape[:-1], (*shape[:-2], shape[-1])
        return {name: State(shape=s, dtype=torch.float32) for name, s in _rows_and_columns(row, col)}

    def update(
        self, weight: Tensor, grad: Tensor, states: Mapping[str, Tensor], step: int, settings: Mapping[str, Any]
    ) -> None:
        """Make one step of a parameter."""
        grad, value, lr = grad.float(), weight.float(), settings["lr"]
        beta = 1.0 - math.pow(step, settings["decay_rate"])
        update = grad**2 + settings["eps"][0]
        if "exp_avg_sq" in states:
            states["exp_avg_sq"].mul_(beta).add_(update, alpha=1.0 - beta)
            update = states["exp_avg_sq"].rsqrt().mul_(grad)
        else:
            row, col = states["exp_avg_sq_row"], states["exp_avg_sq_col"]
            row.mul_(beta).add_(update.mean(dim=-1), alpha=1.0 - beta)
            col.mul_(beta).add_(update.mean(dim=-2), alpha=1.0 - beta)
            scale = (row / row.mean(dim=-1, keepdim=True)).rsqrt_().unsqueeze(-1)
            update = torch.mul(scale, col.unsqueeze(-2).rsqrt()).mul_(grad)
        rms = update.norm(2) / (update.numel() ** 0.5)
        update.div_((rms / settings["clip_threshold"]).clamp_(min=1.0)).mul_(lr)
        if settings["weight_decay"] != 0:
            value.add_(value, alpha=-settings["weight_decay"] * lr)
        value.add_(-update)
        if value is not weight:
            weight.copy_(value)


def _rows_and_columns(row: tuple[int, ...], col: tuple[int, ...]) -> Iterable[tuple[str, tuple[int, ...]]]:
    return ("exp_avg_sq_row", row), ("exp_avg_sq_col", col)


MUON = "muon"
"""No name of Transformers: its training arguments refuse it, so set it once they are made."""


class _Named(NamedTuple):
    kind: type[torch.optim.Optimizer]
    state_format: StateFormat = "fp32"
    options: Mapping[str, Any] = {}


_8BIT = _Named(torch.optim.AdamW, "8bit")
_NAMED = {
    "adamw_torch_fused": _Named(torch.optim.AdamW, options={"fused": True}),
    "adamw_torch": _Named(torch.optim.AdamW),
    "adamw_8bit": _8BIT,
    "adamw_bnb_8bit": _8BIT,
    "adamw_torch_8bit": _8BIT,
    "paged_adamw_32bit": _Named(torch.optim.AdamW),
    "paged_adamw_8bit": _8BIT,
    "lion_32bit": _Named(Lion),
    "lion_8bit": _Named(Lion, "8bit"),
    "paged_lion_32bit": _Named(Lion),
    "paged_lion_8bit": _Named(Lion, "8bit"),
    "adafactor": _Named(AdafactorOfTransformers),
    "sgd": _Named(torch.optim.SGD),
    "adagrad": _Named(torch.optim.Adagrad),
    "rmsprop": _Named(torch.optim.RMSprop),
    MUON: _Named(MuonBesideAdamW, options={"fused": True}),
}
_WITH_ARGS = ("sgd", "adagrad", "rmsprop")
"""Names for which Transformers uses ``optim_args``."""
OPTIMIZERS = tuple(_NAMED)
"""Names of ``TrainingArguments.optim`` with a streamed update, and ``MUON``."""


def optimizer_for(args: Any, model: nn.Module | None = None) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
    """Return class and keyword arguments of the named optimizer: the ``Trainer``'s, or equivalent ones.

    Args:
        args: Training arguments with one of ``OPTIMIZERS`` as ``optim``.
        model: The model. Its embeddings keep states in fp32, as with bitsandbytes.

    Raises:
        UnsupportedError: ``optim_args`` are wrong, or Transformers does not use them for this optimizer.
    """
    name = getattr(args.optim, "value", args.optim)
    if name in _WITH_ARGS:
        return _of_trainer(args, model)
    muon = settings_of_muon(args.optim_args) if name == MUON else {}
    if args.optim_args and name != MUON:
        raise UnsupportedError(
            f"training arguments: expected no optim_args with optim '{name}', for which Transformers does not use "
            f"them, but got {args.optim_args!r}; drop them, or choose one of {', '.join((*_WITH_ARGS, MUON))}"
        )
    named = _NAMED[name]
    options = {"lr": args.learning_rate, **named.options}
    if named.kind in (torch.optim.AdamW, Lion, MuonBesideAdamW):
        options["betas"] = args.adam_beta1, args.adam_beta2
    if named.kind in (torch.optim.AdamW, MuonBesideAdamW):
        options["eps"] = args.adam_epsilon
    return _for_model(named, options, model, muon)


def _for_model(
    named: _Named, options: dict[str, Any], model: nn.Module | None, muon: Mapping[str, Any]
) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
    if named.kind is MuonBesideAdamW:
        return named.kind, {**options, "within": model, "muon": muon}
    if named.state_format == "fp32":
        return named.kind, options
    modules = () if model is None else (m for m in model.modules() if isinstance(m, nn.Embedding))
    apart = frozenset(id(param) for module in modules for param in module.parameters())
    kind = _stored(named.kind)  # type: ignore[arg-type]
    return kind, {**options, "state_format": named.state_format, "apart": apart}


def _of_trainer(args: Any, model: nn.Module | None) -> tuple[Any, Any]:
    from transformers import Trainer  # here: its import takes a second, which a plan need not wait for

    return Trainer.get_optimizer_cls_and_kwargs(args, model)


def optimizer_named(name: str, model: nn.Module, master_format: str = "fp32") -> torch.optim.Optimizer:
    """Build an optimizer, to see what it keeps for each parameter.

    Raises:
        ConfigError: The name is not one of ``OPTIMIZERS``, or the format not one of ``MASTER_FORMATS``.
    """
    for flag, got, known in (("--optim", name, OPTIMIZERS), ("--master-format", master_format, MASTER_FORMATS)):
        if got not in known:
            raise ConfigError(f"{flag}: expected one of {', '.join(known)}, but got '{got}'")
    named = _NAMED[name]
    kind, options = _for_model(named, {"lr": 1e-3, **named.options}, model, {})
    optimizer = kind([param for param in model.parameters() if param.requires_grad], **options)
    for group in optimizer.param_groups:
        group["master_format"] = master_format
    return optimizer


def optimizer_or_other(args: Any, model: nn.Module | None = None) -> tuple[Any, Any]:
    """``optimizer_for`` for any name; the Trainer calls this."""
    is_ours = getattr(args.optim, "value", args.optim) in OPTIMIZERS
    return optimizer_for(args, model) if is_ours else _of_trainer(args, model)


@functools.cache
def _stored(kind: type[torch.optim.Optimizer]) -> type[torch.optim.Optimizer]:
    """Return the optimizer class with a state format in its param groups."""

    class Stored(kind):  # type: ignore[misc, valid-type]
        def __init__(self, params: Any, *, state_format: StateFormat, apart: frozenset[int], **options: Any) -> None:
            given = list(params)
            groups = given if given and isinstance(given[0], dict) else [{"params": given}]
            super().__init__([part for group in groups for part in _parts(group, state_format, apart)], **options)

    Stored.__name__ = Stored.__qualname__ = kind.__name__
    return Stored


def _parts(group: Mapping[str, Any], state_format: StateFormat, apart: frozenset[int]) -> list[dict[str, Any]]:
    params = list(group["params"])
    parts = {state_format: [p for p in params if id(p) not in apart], "fp32": [p for p in params if id(p) in apart]}
    return [{**group, "params": own, "state_format": chosen} for chosen, own in parts.items() if own or not params]
