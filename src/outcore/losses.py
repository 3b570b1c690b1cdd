"""Losses that never hold all logits at once.

[Note: logits that stay away] A causal language model of Transformers calls its output embeddings and passes the result
to its loss. If labels are given, the output embeddings return an ``Unprojected`` here: hidden states that know how they
would be projected. It supports what Transformers does with logits on the way to ``cross_entropy`` (a cast, a shift, a
flat view), and computes that loss some rows at a time. Anything else that a model does with its logits is refused. So
shifting, ignored labels and the number of items stay the model's own code, and so do terms that it adds to its loss.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn, TypeVar

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from outcore.core.errors import ConfigError, UnsupportedError

_Model = TypeVar("_Model", bound=nn.Module)

_ROWS = 512
_MOST_CHUNKS = 32  # each chunk adds to the weight's gradient once, in its dtype
_SCALES = ("final_logit_softcapping", "logit_scale", "output_multiplier", "lm_head_multiplier", "logits_scaling")


def chunked(model: _Model) -> _Model:
    """Make a causal language model of Transformers compute its loss without all logits at once.

    With labels, its forward returns the same loss up to rounding, and no logits. Without labels, nothing changes. Call
    this before or after ``prepare``, on a model with or without adapters.

    Args:
        model: The model, which is changed in place.

    Returns:
        The same model.

    Raises:
        ConfigError: The model is of another kind, or chunked already.
        UnsupportedError: The model does more with its logits than pass them to its loss.

    Memory: device, from forward to backward the gradients of output embeddings and hidden states. In forward, also the
    logits of 512 rows, or of a 32nd of all if that is more, in fp32 and in the weights' dtype.
    """
    get_base = getattr(model, "get_base_model", None)
    owner = model if get_base is None else get_base()
    head = _head_of(owner)
    if "labels" not in inspect.signature(owner.forward).parameters:
        raise ConfigError(
            f"chunked: expected a causal language model of Transformers, but the forward of this "
            f"{type(owner).__name__} takes no labels; compute the loss yourself"
        )
    if isinstance(owner.__dict__.get("forward"), _Forward):
        raise ConfigError(
            f"chunked: expected a model once, but the loss of this {type(owner).__name__} is chunked already"
        )
    _refuse_changed_logits(owner)
    projection = _Projection(head)
    head.forward = projection  # type: ignore[assignment]
    owner.forward = _Forward(owner, projection)
    return model


def _head_of(model: nn.Module) -> nn.Linear:
    find = getattr(model, "get_output_embeddings", None)
    head = None if find is None else find()
    if type(head) is not nn.Linear:
        raise ConfigError(
            "chunked: expected a causal language model of Transformers whose output embeddings are a plain nn.Linear, "
            f"but those of this {type(model).__name__} are a {type(head).__name__}; leave adapters off them, or keep "
            "the plain loss"
        )
    return head


def _refuse_changed_logits(model: nn.Module) -> None:
    config: Any = model.config
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    for name in _SCALES:
        value = getattr(text, name, None)
        if value not in (None, 1, 1.0):
            raise UnsupportedError(_refusal(type(model).__name__, f"changes them by {name} {value}"))


def _refusal(model: str, found: str) -> str:
    return (
        f"chunked: expected a model that hands its logits to its loss as they are, but this {model} {found}; keep the "
        "plain loss"
    )


class _Projection:
    """Stands in for the forward of output embeddings."""

    def __init__(self, head: nn.Linear) -> None:
        self._head, self._forward = head, head.forward
        functools.update_wrapper(self, self._forward)
        self.owner: str | None = None
        """Class name of the model that is computing a loss now; None: no labels are given."""
        self.made: list[Unprojected] = []

    def __call__(self, hidden: torch.Tensor) -> Any:
        if self.owner is None:
            return self._forward(hidden)
        self.made.append(Unprojected(hidden, self._head, self.owner))
        return self.made[-1]


class _Forward:
    """Stands in for the forward of the model."""

    def __init__(self, model: nn.Module, projection: _Projection) -> None:
        self._forward, self._projection, self._name = model.forward, projection, type(model).__name__
        self._place = list(inspect.signature(model.forward).parameters).index("labels")
        functools.update_wrapper(self, self._forward)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        labels = args[self._place] if len(args) > self._place else kwargs.get("labels")
        if labels is None:
            return self._forward(*args, **kwargs)
        self._projection.owner = self._name
        try:
            result = self._forward(*args, **kwargs)
        finally:
            self._projection.owner, made = None, self._projection.made
            self._projection.made = []
        if not all(logits.is_used for logits in made):
            raise UnsupportedError(_refusal(self._name, "makes no loss of them"))
        return _without(result, made)


def _without(result: Any, logits: Sequence[Unprojected]) -> Any:
    """Return a model's output without its logits."""
    away = {id(value) for value in logits}
    if isinstance(result, Mapping):
        return type(result)(**{name: value for name, value in result.items() if id(value) not in away})
    return tuple(value for value in result if id(value) not in away)


class Unprojected:
    """Logits that are not computed: hidden states and their projection. See [Note: logits that stay away]."""

    def __init__(self, hidden: torch.Tensor, head: nn.Linear, model: str, origin: Unprojected | None = None) -> None:
        """Args: model: Its class, for errors. origin: The object of which this is a view."""
        self._hidden, self._head, self._model = hidden, head, model
        self._origin = self if origin is None else origin
        self.is_used = False

    @property
    def shape(self) -> torch.Size:
        """Shape of the logits."""
        return torch.Size((*self._hidden.shape[:-1], self._head.out_features))

    @property
    def device(self) -> torch.device:
        """Device on which the logits would be."""
        return self._hidden.device

    @property
    def dtype(self) -> torch.dtype:
        """Dtype that the logits would have."""
        return self._hidden.dtype

    def size(self, dim: int | None = None) -> Any:
        """Return the size, as of a tensor."""
        return self.shape if dim is None else self.shape[dim]

    def float(self) -> Unprojected:
        """Return self: the loss is computed in fp32 in any case."""
        return self

    def contiguous(self) -> Unprojected:
        """Return self: there is no memory to lay out."""
        return self

    def to(self, target: object) -> Unprojected:
        """Return self for the same device or fp32; refuse any other target."""
        return self if target in (self.device, torch.float32) else self.refuse(f"moves or casts them to {target}")

    def view(self, *shape: int) -> Unprojected:
        """Flatten all dimensions but the last; refuse any other shape."""
        if shape != (-1, self._head.out_features):
            self.refuse(f"gives them the shape {shape}")
        return self._like(self._hidden.reshape(-1, self._hidden.shape[-1]))

    reshape = view

    def __getitem__(self, index: Any) -> Unprojected:
        """Take some rows, each with its whole vocabulary."""
        parts = index if isinstance(index, tuple) else (index,)
        if Ellipsis in parts:
            at = parts.index(Ellipsis)
            parts = (*parts[:at], *[slice(None)] * (self._hidden.dim() - len(parts) + 1), *parts[at + 1 :])
        if len(parts) == self._hidden.dim() and parts[-1] != slice(None):
            self.refuse("leaves words out")
        return self._like(self._hidden[parts])

    def _like(self, hidden: torch.Tensor) -> Unprojected:
        return Unprojected(hidden, self._head, self._model, self._origin)

    def refuse(self, found: str) -> NoReturn:
        """Raise the error of a refusal. Args: found: What the model does with its logits."""
        raise UnsupportedError(_refusal(self._model, found))

    def __getattr__(self, name: str) -> NoReturn:
        """Refuse other attributes of tensors."""
        if name.startswith("__"):
            raise AttributeError(name)
        self.refuse(f"asks for their {name}")

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Compute ``cross_entropy``, and refuse everything else."""
        given = inspect.signature(functional.cross_entropy).bind_partial
        logits = next(a for a in (*args, *(kwargs or {}).values()) if isinstance(a, Unprojected))
        if func is not functional.cross_entropy:
            logits.refuse(f"computes {getattr(func, '__name__', func)} of them")
        options = given(*args, **(kwargs or {})).arguments
        return logits.loss(**{name: options[name] for name in options if name != "input"})

    def loss(
        self,
        target: torch.Tensor,
        ignore_index: int = -100,
        reduction: str = "mean",
        label_smoothing: object = 0.0,
        **more: object,
    ) -> torch.Tensor:
        """Return what ``cross_entropy`` would return for logits in fp32."""
        if any(v is not None for v in more.values()) or label_smoothing or reduction not in ("mean", "sum"):
            self.refuse("asks for a loss with weights of words, smoothed labels, or one per token")
        if self._hidden.dim() != 2:
            self.refuse(f"computes a loss of logits of shape {tuple(self.shape)}")
        self._origin.is_used = True
        tensors = [self._hidden, self._head.weight, *(() if self._head.bias is None else (self._head.bias,))]
        device = self._hidden.device.type
        if torch.is_autocast_enabled(device):
            tensors = [t.to(torch.get_autocast_dtype(device)) for t in tensors]
        needs_gradients = torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
        loss: torch.Tensor = _ChunkedLoss.apply(target, ignore_index, reduction == "mean", needs_gradients, *tensors)
        return loss


def _refuse_arithmetic(name: str) -> Callable[..., NoReturn]:
    def refuse(self: Unprojected, *_: object) -> NoReturn:
        self.refuse(f"computes with them ({name.strip('_')})")

    return refuse


for _name in "add radd sub rsub mul rmul truediv rtruediv pow neg matmul iadd isub imul itruediv setitem".split():
    setattr(Unprojected, f"__{_name}__", _refuse_arithmetic(_name))


class _ChunkedLoss(torch.autograd.Function):
    """Cross entropy of a linear layer's results. Forward computes gradients too, while it has some rows of logits."""

    @staticmethod
    def forward(
        ctx: Any,
        target: torch.Tensor,
        ignored: int,
        is_mean: bool,  # noqa: FBT001
        needs_gradients: bool,  # noqa: FBT001
        *tensors: torch.Tensor,
    ) -> torch.Tensor:
        """Compute the loss. Args: tensors: Hidden states, weight, and bias if there is one."""
        hidden, device = tensors[0], tensors[0].device
        wanted = [w and needs_gradients for w in ctx.needs_input_grad[4:]]
        ctx.grads = [torch.zeros_like(t) if w else None for t, w in zip(tensors, wanted, strict=True)]
        keeps = target != ignored
        total = torch.zeros((), device=device)
        one = torch.ones((), device=device)
        scale = keeps.sum().reciprocal() if is_mean else one
        # In fp16 the mean's small factor waits for backward, which brings that of a GradScaler: before it, gradients
        # would vanish.
        now, ctx.later = (one, scale) if hidden.dtype == torch.float16 else (scale, one)
        rows = max(_ROWS, -(-len(hidden) // _MOST_CHUNKS))
        with torch.autocast(device.type, enabled=False):
            for part in (slice(start, start + rows) for start in range(0, len(hidden), rows)):
                chosen, left_out = target[part].where(keeps[part], 0).unsqueeze(1), ~keeps[part].unsqueeze(1)
                logits = functional.linear(hidden[part], *tensors[1:]).float()
                total += _losses_of_rows(logits, chosen).masked_fill_(left_out, 0).sum()
                if any(wanted):
                    logits.scatter_(1, chosen, logits.gather(1, chosen) - 1)
                    of_logits = logits.mul_(now).masked_fill_(left_out, 0).to(hidden.dtype)
                    _add_gradients(ctx.grads, of_logits, tensors, part)
                    del of_logits
                del logits  # before the next rows are computed
        return total * scale

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        """Scale the gradients that forward has computed."""
        grads, ctx.grads = ctx.grads, None
        if grads is None:
            raise UnsupportedError(
                "expected one backward through the chunked loss, which uses up the gradients that its forward made, "
                "but it is the second; run forward again"
            )
        return (None, None, None, None, *[None if g is None else g.mul_(grad * ctx.later) for g in grads])


def _losses_of_rows(logits: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    """Return losses in a column. Logits become probabilities in place."""
    of_chosen, largest = logits.gather(1, chosen), logits.amax(1, keepdim=True)
    sums = logits.sub_(largest).exp_().sum(1, keepdim=True)
    logits.div_(sums)
    return sums.log_().add_(largest).sub_(of_chosen)


def _add_gradients(
    grads: Sequence[torch.Tensor | None], of_logits: torch.Tensor, tensors: Sequence[torch.Tensor], part: slice
) -> None:
    (of_hidden, of_weight, *of_bias), (hidden, weight, *_) = grads, tensors
    if of_hidden is not None:
        torch.mm(of_logits, weight, out=of_hidden[part])
    if of_weight is not None:
        of_weight.addmm_(of_logits.t(), hidden[part])
    for of_its_bias in of_bias:
        if of_its_bias is not None:
            of_its_bias += of_logits.sum(0)
