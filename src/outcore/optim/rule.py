"""Optimizers by rule: a step as a function of tensors, on flat pieces of a parameter or on a whole parameter.

[Note: rules] A rule gets a weight, a gradient and states, and changes weight and states in place. A rule that works
element by element gets flat pieces, cut wherever the plan cuts them, so an element must not depend on its neighbours. A
rule that needs whole parameters (``is_whole``) gets them in their shape. The caller does the rest: casts, factors and
placement. So ``outcore`` can run a rule under any plan, and ``step`` can run it in a plain loop.
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

LAST_STEP = 2**24  # torch counts steps in fp32 by adding 1, which changes nothing from here on
Settings = Mapping[str, Any]
"""Settings of a param group as plain numbers, by name."""


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class State:
    """One state of one parameter, as a ``Rule`` declares it.

    ``initial`` is the initial value of every element. ``shape`` is its shape if that is not the parameter's, and
    ``dtype`` its dtype if that is not the dtype in which the parameter is updated. ``is_unsigned`` says that the state
    is never negative, so that its 8-bit codes are finer.
    """

    initial: float = 0.0
    """Initial value of every element."""
    shape: tuple[int, ...] | None = None
    """Shape of the state; None: the parameter's. ``()`` is a single number. If the rule works by element, the number is
    on the CPU, and all pieces of the parameter must read and set the same value. If the rule needs whole parameters, it
    is on the parameter's device. Only rules that need whole parameters may declare other shapes."""
    dtype: torch.dtype | None = None
    """Dtype of the state; None: the dtype in which the parameter is updated."""
    is_unsigned: bool = False
    """Whether the state is never negative: with ``state_format="8bit"``, all codes then stand for numbers from 0 on."""


RESERVED = ("step", "master", CODES)
"""Names that a state may not have, because they have another meaning."""
SCALE = "_absmax"
"""Suffix of the name of the scales of a state in 8 bits."""


def name_of(dtype: torch.dtype) -> str:
    """Return the name of a dtype as specs write it."""
    return str(dtype).removeprefix("torch.")


class Rule(torch.optim.Optimizer):
    """Base class for optimizers of your own whose updates ``outcore.prepare`` can run in pieces.

    A subclass defines ``states`` and ``update``. ``step`` follows from them, so it is an ordinary optimizer, too. If
    ``update`` needs whole parameters, the class sets ``is_whole = True``. If it makes more than six tensors of a
    weight's size at a time, ``temporaries`` gives their number. ``cost`` is its rough time as a multiple of AdamW's.
    """

    is_whole: ClassVar[bool] = False
    """Whether ``update`` needs whole parameters in their shape. If not, it gets flat pieces, and must work element by
    element."""
    temporaries: ClassVar[float] = 6.0
    """Peak memory of tensors that ``update`` makes, as a multiple of its weight's memory. Plans leave room for it."""
    cost: ClassVar[float] = 3.0
    """Rough time of ``update`` on the CPU, as a multiple of AdamW's fused kernel's. Plans reckon with it."""

    def states(self, shape: tuple[int, ...], settings: Mapping[str, Any]) -> Mapping[str, State]:
        """Return the states of a parameter, by name, in the order of ``state_dict``.

        Args:
            shape: Shape of the parameter.
            settings: Settings of its group; lists became tuples, and tensors numbers.
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
        """Change ``weight`` and ``states`` in place. Must only read the gradient. Runs under ``no_grad``.

        Args:
            weight: A flat piece of a parameter, or a whole parameter in its shape.
            grad: Gradient of the same shape and dtype.
            states: States as pieces of the same shape, or whole; a single number is a 0-dim tensor (see ``State``).
            step: Number of this step of the parameter, from 1.
            settings: Settings of its group.
        """
        raise NotImplementedError

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Do one step in a plain loop, over whole parameters."""
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
        """Load as any optimizer does, but cast states that declare their own dtype to it, not to their parameter's.

        Memory: host or device, all states that declare their own dtype.
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
    """Return the rule's ``states``.

    Raises:
        ConfigError: A state that no plan could store: a reserved name, or a dtype or shape that is not supported.
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
            raise ConfigError(f"optimizer: expected state '{name}' of {type(rule).__name__} to have {expected}")
    return states


def settings_of(
    group: Settings, names: Mapping[str, Any], of_tensor: Callable[[Tensor], Any] = Tensor.item
) -> tuple[tuple[str, Any], ...]:
    """Return the settings of a group that a step needs, as plain hashable values.

    They are a snapshot: a scheduler cannot change an update under way.

    Args:
        group: All settings.
        names: Names of the settings that a step needs.
        of_tensor: Returns the value that replaces a tensor among the settings.

    Raises:
        ConfigError: A setting is not hashable.
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

    Works element by element, with one state. The equations are those of the paper's program 1 with decoupled weight
    decay.
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
        """Set the default settings, for groups that do not set their own.

        Args:
            params: As for any ``torch.optim.Optimizer``.
            lr: About a tenth to a third of AdamW's.
            betas: Coefficients of the interpolation whose sign the step takes, and of the momentum.
            weight_decay: Decoupled weight decay, multiplied by ``lr``.
            maximize: Whether to ascend instead of descend.
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
