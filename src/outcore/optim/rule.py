"""Optimizers by rule: what a step does to flat pieces of a parameter, or to a whole one, as a function of tensors.

[Note: rules] A rule is given a weight, a gradient and states, and changes weight and states in place. One that works
element by element gets flat pieces, cut wherever the plan wants them: it must not look at neighbours. One that needs
whole parameters (``is_whole``) gets them in their shape. Whoever calls it does the rest: casts, factors, the places of
bytes. So ``outcore`` can run it under any plan, and ``step`` in a plain loop.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any, ClassVar, final

import torch
from torch import Tensor

from outcore.core.errors import ConfigError
from outcore.spec.layout import CODES
from outcore.spec.model import STORED_DTYPES

Settings = Mapping[str, Any]
"""What a param group says, as plain numbers."""


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class State:
    """One state of one parameter, as a ``Rule`` declares it.

    ``initial`` is what every element begins with, ``shape`` its shape if it is not the parameter's, and ``dtype`` its
    dtype if it is not the one in which the parameter is updated. ``is_unsigned`` says that it is never negative: then
    8 bits are finer.
    """

    initial: float = 0.0
    """What every element begins with."""
    shape: tuple[int, ...] | None = None
    """None: the parameter's. ``()`` is a number: of a rule by element it is on the CPU, and all pieces of the parameter
    read it and set it alike; of one that is whole it is where the parameter is. Only such a one has other shapes."""
    dtype: torch.dtype | None = None
    """None: that in which the parameter is updated."""
    is_unsigned: bool = False
    """It is never negative: with ``state_format="8bit"`` all codes are numbers from 0 on."""


RESERVED = ("step", "master", CODES)
"""Names that stand for something else beside the states."""
SCALE = "_absmax"
"""How the name ends of what belongs to a state in 8 bits."""


def name_of(dtype: torch.dtype) -> str:
    """As specs have it."""
    return str(dtype).removeprefix("torch.")


class Rule(torch.optim.Optimizer):
    """Base of optimizers of your own that ``outcore.prepare`` takes apart.

    A subclass has ``states`` and ``update``. ``step`` follows from them, so it is an ordinary optimizer, too. Where
    ``update`` needs whole parameters, the class says ``is_whole = True``; where it makes more than six tensors of a
    weight's size at a time, ``temporaries`` says how many. ``cost`` says about how slow it is, in times of AdamW.
    """

    is_whole: ClassVar[bool] = False
    """``update`` needs whole parameters in their shape. Else it is given flat pieces, and must work element by
    element."""
    temporaries: ClassVar[float] = 6.0
    """The most memory that tensors made by ``update`` take at a time, in times of the weight that it is given. Plans
    count it."""
    cost: ClassVar[float] = 3.0
    """About how long ``update`` takes on the CPU, in times of AdamW's fused kernel. Plans reckon with it."""

    def states(self, shape: tuple[int, ...], settings: Mapping[str, Any]) -> Mapping[str, State]:
        """The states of a parameter, by name, in the order in which ``state_dict`` has them.

        Args:
            shape: Of the parameter.
            settings: Of its group; lists are tuples, tensors numbers.
        """
        raise NotImplementedError

    def update(
        self,
        weight: torch.Tensor,
        grad: torch.Tensor,
        states: Mapping[str, torch.Tensor],
        step: int,
        settings: Mapping[str, Any],
    ) -> None:
        """Change ``weight`` and ``states`` in place. The gradient is only read. Runs under ``no_grad``.

        Args:
            weight: A flat piece of a parameter, or a whole one in its shape.
            grad: Of the same shape and dtype.
            states: Pieces of the same shape, or whole ones; numbers as tensors of no dimensions on the CPU.
            step: Of the parameter, from 1.
            settings: Of its group.
        """
        raise NotImplementedError

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step of a plain loop, over whole parameters."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            settings = dict(settings_of(group, self.defaults))
            for param in group["params"]:
                if param.grad is not None:
                    self._step(param, self.state[param], settings)
        return loss

    def _step(self, param: Tensor, held: MutableMapping[str, Any], settings: Settings) -> None:
        forms = checked_states(self, tuple(param.shape), settings)
        if not held:
            held["step"] = torch.tensor(0.0, dtype=torch.float32, device="cpu")
            held.update({name: self._begun(form, param) for name, form in forms.items()})
        held["step"] += 1
        states = {name: held[name] for name in forms}
        self.update(param, param.grad, states, int(held["step"]), settings)  # type: ignore[arg-type]

    def _begun(self, form: State, param: Tensor) -> Tensor:
        dtype, device = self._form(form, param)
        if form.shape is None:
            return torch.full_like(param, form.initial, dtype=dtype, memory_format=torch.preserve_format)
        return torch.full(form.shape, form.initial, dtype=dtype, device=device)

    def _form(self, form: State, param: Tensor) -> tuple[torch.dtype, torch.device]:
        is_on_cpu = form.shape == () and not self.is_whole
        return form.dtype or param.dtype, torch.device("cpu") if is_on_cpu else param.device

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As of any optimizer, which casts states to the dtype of their parameter, but for those that have their own.

        Memory: host or device, all states that have a dtype of their own.
        """
        seen = list[dict[str, Any]]()
        last = self.register_load_state_dict_pre_hook(lambda _, given: seen.append(given))
        try:
            super().load_state_dict(state_dict)
        finally:
            last.remove()
        saved = [key for group in seen[0]["param_groups"] for key in group["params"]]
        owners = [(param, group) for group in self.param_groups for param in group["params"]]
        for key, (param, group) in zip(saved, owners, strict=True):
            given = seen[0]["state"].get(key, {})
            forms = self.states(tuple(param.shape), dict(settings_of(group, self.defaults)))
            for name in forms.keys() & given.keys():
                dtype, device = self._form(forms[name], param)
                self.state[param][name] = given[name].to(device, dtype)


def checked_states(rule: Rule, shape: tuple[int, ...], settings: Settings) -> Mapping[str, State]:
    """What ``states`` says.

    Raises:
        ConfigError: What no plan could keep.
    """
    states = rule.states(shape, settings)
    for name, state in states.items():
        expected = None
        if name in RESERVED or name.endswith(SCALE):
            expected = f"a name other than {', '.join(RESERVED)}, and no '{SCALE}' at its end; give it another name"
        elif state.dtype is not None and name_of(state.dtype) not in STORED_DTYPES:
            expected = f"one of the dtypes {', '.join(STORED_DTYPES)}, but got {state.dtype}"
        elif state.shape and not rule.is_whole:
            expected = f"shape None or (), but got {state.shape}; set is_whole = True for others, and get whole weights"
        if expected is not None:
            raise ConfigError(f"optimizer: expected of the state '{name}' of {type(rule).__name__} {expected}")
    return states


def settings_of(
    group: Settings, names: Mapping[str, Any], of_tensor: Callable[[Tensor], Any] = Tensor.item
) -> tuple[tuple[str, Any], ...]:
    """What a step needs of a group, as plain and hashable values: no scheduler reaches an update under way.

    Args:
        group: All settings.
        names: Of those that a step needs.
        of_tensor: Gives what stands for a tensor among them.

    Raises:
        ConfigError: One is not hashable.
    """
    found = tuple((name, _plain(group[name], of_tensor)) for name in names if name in group)
    for name, value in found:
        try:
            hash(value)
        except TypeError as error:
            raise ConfigError(
                f"optimizer: expected settings of a param group to be hashable (numbers, strings, tuples or lists of "
                f"them), but '{name}' is a {type(value).__name__}: {error}; keep it on the optimizer itself"
            ) from error
    return found


def _plain(value: Any, of_tensor: Callable[[Tensor], Any]) -> Any:
    if isinstance(value, Tensor):
        return of_tensor(value)
    return tuple(_plain(v, of_tensor) for v in value) if isinstance(value, list | tuple) else value


@final
class Lion(Rule):
    """Lion (Chen et al., arXiv:2302.06675): the sign of an interpolation of momentum and gradient.

    Element by element, with one state. The equations are those of the paper's program 1 with decoupled weight decay.
    """

    temporaries = 3.0
    cost = 1.5

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
    ) -> None:
        """Settings of all groups that say nothing else.

        Args:
            params: As for any ``torch.optim.Optimizer``.
            lr: About a tenth to a third of AdamW's.
            betas: Of the interpolation that the step takes the sign of, and of the momentum.
            weight_decay: Decoupled: multiplied by ``lr``.
            maximize: Ascend.
        """
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay, "maximize": maximize})

    def states(self, shape: tuple[int, ...], settings: Settings) -> Mapping[str, State]:
        """The momentum."""
        return {"exp_avg": State()}

    def update(self, weight: Tensor, grad: Tensor, states: Mapping[str, Tensor], step: int, settings: Settings) -> None:
        """See the class."""
        (beta1, beta2), lr, momentum = settings["betas"], settings["lr"], states["exp_avg"]
        grad = -grad if settings["maximize"] else grad
        weight.mul_(1 - lr * settings["weight_decay"])
        weight.add_(momentum.lerp(grad, 1 - beta1).sign_(), alpha=-lr)
        momentum.lerp_(grad, 1 - beta2)
