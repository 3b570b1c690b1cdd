"""``optimizer.state``: what a plain optimizer keeps there, read from its home and written to it on demand."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from functools import partial
from typing import Any

import torch

from outcore.core.errors import ConfigError, UnsupportedError
from outcore.engine.gradients.on_demand import DistantTensor
from outcore.engine.unit.live_port import Recovery
from outcore.engine.unit.unit import Unit
from outcore.engine.unit.views import torch_dtype
from outcore.engine.updates.unit_update import RuleSettings
from outcore.engine.values.access import shown_states
from outcore.engine.values.parameter_values import ParameterValues, let_masters_follow
from outcore.optim.rules import RuleKind


class StateTensor(DistantTensor):
    """One state of one parameter. See [Note: on demand]."""

    def __init__(
        self,
        like: torch.Tensor,
        device: torch.device,
        read: Callable[[], torch.Tensor],
        write: Callable[[torch.Tensor], None],
    ) -> None:
        """Args: read: Gives a copy in host memory. write: Replaces the state."""
        self._read, self._write = read, write

    def fetch(self) -> torch.Tensor:
        """Return the current value."""
        return self._read().to(self.device)

    def store(self, value: torch.Tensor) -> None:
        """Write it home."""
        self._write(value)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """Show the value, as a plain optimizer does."""
        return repr(self.fetch())


class LiveStates(MutableMapping[torch.Tensor, Any]):
    """States by parameter, as in ``torch.optim.Optimizer.state``.

    Attributes:
        groups: The param groups.
        num_replaced: How often all states of a parameter were replaced here, by its id.
    """

    def __init__(
        self, values: ParameterValues, settings: RuleSettings, run: Recovery, groups: list[dict[str, Any]]
    ) -> None:
        """Args: values: Reads and writes states. settings: Has the update rule. run: Whether it is open."""
        self._values, self._access, self._settings, self._run = values, values.access, settings, run
        self.groups, self._place = groups, values.place
        self.num_replaced = Counter[int]()

    def names(self, param: torch.Tensor) -> tuple[str, ...]:
        """Return the names of the states that a parameter has now."""
        unit, index = self._place(param) or (None, 0)
        has_begun = unit is not None and (unit.steps[index] or self.kind(param).initial_sum is not None)
        return self._all_names(param, unit, index) if unit is not None and has_begun else ()

    def names_to_save(self, param: torch.Tensor) -> tuple[str, ...]:
        """Return the names of the states to save: those of ``names``; before the first step the master, if any.

        The rounded weight cannot bring a master back. If there is a step count, all other states are saved beside it:
        a plain optimizer that loads first moments of 0 beside step 0 begins as without them.
        """
        unit, index = self._place(param) or (None, 0)
        if unit is None or self.names(param):
            return self.names(param)
        names = self._all_names(param, unit, index)
        if "master" not in names:
            return ()
        # SGD takes any momentum that is there for one that has begun.
        return names if self.kind(param).has_step else ("master",)

    def kind(self, param: torch.Tensor) -> RuleKind:
        """Return how a parameter is updated."""
        rule = self._settings.expect_rule()
        if len(rule.kinds) == 1:
            return rule.kinds[0]
        group = next((g for g in self.groups if any(p is param for p in g["params"])), self.groups[0])
        return rule.kind(group)

    def _all_names(self, param: torch.Tensor, unit: Unit, index: int) -> tuple[str, ...]:
        has_step = self.kind(param).has_step or unit.spec.params[index].is_coded  # noise depends on the step
        return (*(("step",) if has_step else ()), *(state.name for state, _ in shown_states(unit, index)))

    def read(self, param: torch.Tensor, name: str) -> torch.Tensor:
        """Return one state, in host memory."""
        unit, index = self._expect(param)
        if name == "step":
            return torch.tensor(float(unit.steps[index]), device="cpu")
        if name == "master":
            let_masters_follow(unit, self._access)
        return self._access.read_state(unit, name, index)

    def write(self, param: torch.Tensor, name: str, value: Any) -> None:
        """Replace one state."""
        unit, index = self._expect(param)
        if name == "step":
            unit.steps[index] = int(value)
            unit.states_version += 1
            return
        held = self._values.names(param) or []
        if name not in held:
            raise ConfigError(
                f"optimizer.state: expected one of step, {', '.join(held)} for "
                f"'{unit.spec.params[index].name}', but got '{name}', for which outcore.prepare() took no memory; "
                "keep values of your own elsewhere"
            )
        form = unit.ledger.state_specs[name].forms[index]
        if form is not None and form.format == "8bit":
            raise UnsupportedError(
                f"optimizer.state: expected codes of 8 bits to be left alone, whose 0 does not mean 0, but {name} of "
                f"'{unit.spec.params[index].name}' was written; change {name}_absmax, which scales it, replace all "
                "states of the parameter together, or let them begin anew: del optimizer.state[param]"
            )
        self._values.check(param, {name: value})
        if name != "master" and not unit.steps[index] and not self.kind(param).has_step:
            self._values.load(param, {name: value})  # it has begun: the next step takes the value
        else:
            self._access.write_state(unit, name, index, value)

    def tensor(self, param: torch.Tensor, name: str) -> StateTensor:
        """Return one state, as a tensor that is read when it is used."""
        unit, index = self._expect(param)
        like, device = torch.empty((), device="meta"), torch.device("cpu")
        if name != "step":
            state = unit.ledger.state_specs[name]
            shown = {each.name: dtype for each, dtype in shown_states(unit, index)}
            dtype = torch_dtype(shown.get(name, state.parts[index].dtype))
            form = state.described(unit.spec.params[index], index)
            like = torch.empty_like(unit.gradient_form.likes[index], dtype=dtype)
            if form is not unit.spec.params[index]:
                like = torch.empty(form.shape, dtype=dtype, device="meta")
            if form.shape == ():
                return StateTensor(like, device, partial(self.read, param, name), partial(self.write, param, name))
            device = self._access.device.torch_device
        return StateTensor(like, device, partial(self.read, param, name), partial(self.write, param, name))

    def replace(self, values: Mapping[torch.Tensor, Any]) -> None:
        """Replace the states of all parameters; a parameter without values begins anew."""
        params = [param for group in self.groups for param in group["params"] if self._place(param) is not None]
        for param in params:
            self._check(param, values.get(param, {}))
        for param in params:
            self._load(param, values.get(param, {}))

    def clear(self) -> None:
        """Let all states begin anew. Adagrad has states even then, so they are not popped until none is left."""
        self.replace({})

    def pop(self, param: torch.Tensor, *default: Any) -> Any:
        """Let the states of a parameter begin anew, and return what they were: values, not a view of those to come."""
        if param not in self:
            if not default:
                raise KeyError(param)
            return default[0]
        values = {name: state.clone() for name, state in self[param].items()}
        del self[param]
        return values

    def __getitem__(self, param: torch.Tensor) -> _StatesOfOne:
        return _StatesOfOne(self, param)

    def __setitem__(self, param: torch.Tensor, values: Any) -> None:
        self._expect(param)
        self._check(param, values)
        self._load(param, values)

    def __delitem__(self, param: torch.Tensor) -> None:
        self._expect(param)
        self._load(param, {})

    def __iter__(self) -> Iterator[torch.Tensor]:
        return (param for group in self.groups for param in group["params"] if self.names(param))

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __contains__(self, param: object) -> bool:
        return isinstance(param, torch.Tensor) and bool(self.names(param))

    def _check(self, param: torch.Tensor, values: Mapping[str, Any]) -> None:
        if isinstance(values, _StatesOfOne) and values.states is self and not values.is_current_of(param):
            unit, index = self._expect(param)
            raise UnsupportedError(
                f"optimizer.state: expected values for '{unit.spec.params[index].name}', but got a view of the states "
                "of another parameter, or of states that were replaced since; first copy them: "
                "{name: state.clone() for name, state in optimizer.state[param].items()}"
            )
        self._values.check(param, values)

    def _load(self, param: torch.Tensor, values: Mapping[str, Any]) -> None:
        if not (isinstance(values, _StatesOfOne) and values.states is self):  # else these are its states already
            self.num_replaced[id(param)] += 1
            self._values.load(param, values)

    def _expect(self, param: torch.Tensor) -> tuple[Unit, int]:
        self._run.refuse_if_closed()
        place = self._place(param)
        if place is None:
            raise ConfigError(
                "optimizer.state: expected a parameter that is trained by the prepared model, but one of shape "
                f"{tuple(param.shape)} is not"
            )
        return place


class _StatesOfOne(MutableMapping[str, Any]):
    """The states of one parameter, by torch's names."""

    def __init__(self, states: LiveStates, param: torch.Tensor) -> None:
        self.states, self._param, self._number = states, param, states.num_replaced[id(param)]

    def is_current_of(self, param: torch.Tensor) -> bool:
        """Return whether it shows a parameter's states, and has done so since they were replaced last."""
        return self._param is param and self._number == self.states.num_replaced[id(param)]

    def __getitem__(self, name: str) -> torch.Tensor:
        if name not in self.states.names(self._param):
            raise KeyError(name)
        return self.states.tensor(self._param, name)

    def __setitem__(self, name: str, value: Any) -> None:
        self.states.write(self._param, name, value)

    def __delitem__(self, name: str) -> None:
        raise UnsupportedError(
            f"expected a state to be replaced or zeroed, but '{name}' was to be deleted; 'del optimizer.state[param]' "
            "lets all states of a parameter begin anew"
        )

    def __iter__(self) -> Iterator[str]:
        return iter(self.states.names(self._param))

    def __len__(self) -> int:
        return len(self.states.names(self._param))

    def __repr__(self) -> str:
        return repr(dict(self))
