"""The optimizer that ``prepare`` returns: a ``torch.optim.Optimizer`` whose step submits and returns."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, NoReturn

import torch

from outcore.core.errors import ConfigError, UnsupportedError
from outcore.runtime.engine import Engine
from outcore.runtime.recorder import Recorder, recording
from outcore.spec.model import ModelSpec
from outcore.spec.plan import Plan


class StreamedOptimizer(torch.optim.Optimizer):
    """Steps parameters wherever they live.

    ``param_groups`` is the user's own list, so schedulers built before ``prepare`` go on working. States are not in
    ``state``, which stays empty; ``state_dict`` reads them from their homes.
    """

    def __init__(self, engine: Engine, original: torch.optim.Optimizer) -> None:
        """Take over the groups of the user's optimizer, and states that it already has.

        Args:
            engine: Attached.
            original: Keeps its groups, which stay the same list; its states are written home and forgotten.
        """
        self.engine = engine
        self._original = original
        self._is_complete = False
        super().__init__(original.param_groups, dict(original.defaults))
        self.param_groups = engine.groups = original.param_groups
        self._is_complete = True
        self.step_was_skipped = False
        for param in list(original.state):  # one by one: they need not stand twice
            values = original.state.pop(param)
            if _has_begun(original, values):
                engine.load_state(param, values)

    @property
    def plan(self) -> Plan:
        """Where everything lives."""
        return self.engine.plan

    @property
    def model_spec(self) -> ModelSpec:
        """The model that the plan is for."""
        return self.engine.model_spec

    def traffic(self) -> dict[str, int]:
        """Bytes given to each lane since the run began."""
        return self.engine.traffic.totals()

    def exposed_s(self) -> dict[str, float]:
        """Seconds that compute waited for each lane since the run began.

        Does not block: on an accelerator they lag behind by what it was given and has not done.
        """
        return self.engine.device.recorder.exposed_s()

    def recording(self, *, num_steps: int = 16) -> AbstractContextManager[Recorder]:
        """Record what every lane does, and what compute waits for, while the block runs.

        Args:
            num_steps: The recorder keeps so many steps; ``timeline()`` returns them.

        Memory: host, a few hundred bytes per operation.
        """
        return recording(self.engine.model, self.engine.device.recorder, num_steps=num_steps)

    @torch._disable_dynamo  # type: ignore[attr-defined]
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Submit the update of every parameter that has a gradient and return; errors of earlier steps surface here."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with self.engine.device.recorder.step():
            self.engine.step(self.param_groups)
        self._original._opt_called = True  # type: ignore[attr-defined]  # a scheduler built on it warns otherwise
        return loss

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refuse once the model is prepared."""
        if not self._is_complete:
            super().add_param_group(param_group)
            return
        raise UnsupportedError(
            "expected all param groups before outcore.prepare(), which gives every trained parameter its memory, but "
            "one was added; "
            "build the optimizer completely first"
        )

    def state_dict(self) -> dict[str, Any]:
        """States in torch's format, in host memory; bf16 training adds ``master``.

        Memory: host, all states.
        """
        self.engine.refuse_if_closed()
        groups, state, index = [], {}, 0
        for group in self.param_groups:
            entry = {k: v for k, v in group.items() if k != "params"}
            entry["params"] = list(range(index, index + len(group["params"])))
            for param in group["params"]:
                values = self._state_of(param)
                if values:
                    state[index] = values
                index += 1
            groups.append(entry)
        return {"state": state, "param_groups": groups}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Write states home. Settings of the groups are taken over.

        Raises:
            ConfigError: Made for other groups, or a tensor of another shape.
        """
        self.engine.refuse_if_closed()
        groups = state_dict["param_groups"]
        sizes = [len(g["params"]) for g in self.param_groups]
        if [len(g["params"]) for g in groups] != sizes:
            raise ConfigError(
                f"optimizer.load_state_dict: expected groups of {sizes} parameters, but got "
                f"{[len(g['params']) for g in groups]}"
            )
        keys = [key for group in groups for key in group["params"]]
        params = [param for group in self.param_groups for param in group["params"]]
        values = [state_dict["state"].get(key, {}) for key in keys]
        for param, state in zip(params, values, strict=True):
            self.engine.check_state(param, state)
        for mine, theirs in zip(self.param_groups, groups, strict=True):
            mine.update({k: v for k, v in theirs.items() if k != "params"})
        for param, state in zip(params, values, strict=True):
            self.engine.load_state(param, state)

    def _state_of(self, param: torch.Tensor) -> dict[str, Any]:
        place = self.engine.places.get(id(param))
        if place is None:
            return {}
        unit, i = place
        if i >= unit.num_trainable:
            return {}
        has_states = unit.steps[i] or isinstance(self._original, torch.optim.Adagrad)  # which has them from the start
        if not has_states:
            return {}
        # torch.optim.SGD keeps no step
        values: dict[str, Any] = (
            {} if isinstance(self._original, torch.optim.SGD) else {"step": torch.tensor(float(unit.steps[i]))}
        )
        for name in unit.state_names:
            if name != "master" or unit.spec.params[i].dtype != unit.spec.params[i].update_dtype:
                values[name] = self.engine.access.read_state(unit, name, i)
        return values

    def close(self) -> None:
        """Give memory, files and threads back; see ``outcore.close``."""
        self.engine.close()

    def __getstate__(self) -> NoReturn:
        """Refuse."""
        raise UnsupportedError(
            "expected optimizer.state_dict() to save, but the prepared optimizer itself is being copied or pickled"
        )


def _has_begun(optimizer: torch.optim.Optimizer, values: Mapping[str, Any]) -> bool:
    """Whether states say more than that there were none.

    Adagrad has a sum before its first step, but rounded to the dtype that the weights had when it was built.
    """
    if "sum" not in values or float(values["step"]):
        return True
    total = values["sum"]
    initial = float(optimizer.defaults["initial_accumulator_value"])
    return not total.is_meta and bool((total != torch.full_like(total, initial)).any())
