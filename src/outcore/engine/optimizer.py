"""The optimizer that ``prepare`` returns: a ``torch.optim.Optimizer`` whose step submits and returns."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, NoReturn

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from outcore.core.errors import ConfigError, UnsupportedError
from outcore.device.recorder import Recorder
from outcore.engine.engine import Engine
from outcore.engine.live_states import LiveStates
from outcore.engine.module.timing import recording
from outcore.optim.formats import NOT_TAKEN_OVER, format_of
from outcore.optim.joined import HOOKS, members
from outcore.optim.rules import RuleKind
from outcore.spec.model import ModelSpec
from outcore.spec.plan import Plan, shown_by
from outcore.spec.plan_table import plan_table
from outcore.torch_private import as_it_is


class StreamedOptimizer(torch.optim.Optimizer):
    """Steps parameters wherever they live.

    ``param_groups`` is the user's own list, so schedulers built before ``prepare`` go on working. The hooks are shared
    as well: it does not matter on which of the two optimizers one is registered, nor when. ``state`` reads states from
    their homes.
    """

    _step_supports_amp_scaling = True
    """Makes ``GradScaler`` call ``step`` whatever it found, as for a fused optimizer, instead of waiting to know it."""

    def __init__(self, engine: Engine, original: torch.optim.Optimizer) -> None:
        """Take over the groups and hooks of the user's optimizer, and states that it already has.

        Args:
            engine: The attached engine.
            original: It keeps its groups, which stay the same list. Its states are written home, and it refuses to step
                from now on.
        """
        self.engine = engine
        self._originals = (original, *members(original))  # twice the same if there is only one
        self._is_complete = False
        super().__init__(original.param_groups, dict(original.defaults))
        self._states = LiveStates(engine.values, engine.settings, engine.run, original.param_groups)
        self._follow(original.param_groups)
        self._is_complete = True
        self.step_was_skipped = False
        self.resumed: dict[str, Any] | None = None
        """What ``load_checkpoint`` would return for the checkpoint that ``prepare`` was given; None without one."""
        for param in list(original.state):  # one by one, so that not all states are in memory twice
            values = original.state.pop(param)
            for member in members(original):
                member.state.pop(param, None)
            if _has_begun(self._states.kind(param), values):
                engine.values.load(param, values)
        for name in HOOKS:
            setattr(self, name, getattr(original, name))
        refuse = _Refusal(self, original)
        for one in self._originals:
            one.state = self._states  # type: ignore[assignment]
        for one in members(original):
            one.register_state_dict_pre_hook(refuse, prepend=True)
            one.register_load_state_dict_pre_hook(refuse, prepend=True)
        weakref.finalize(self, register_optimizer_step_pre_hook(refuse).remove)

    @property  # type: ignore[override]
    def state(self) -> LiveStates:
        """States by parameter: read when they are used, written home when they are changed."""
        return self._states

    @state.setter
    def state(self, values: Mapping[torch.Tensor, Any]) -> None:
        if self._is_complete:  # else torch's own constructor sets it
            self._states.replace(values)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The user's own list of groups. Another one may be assigned, unless several optimizers share the model."""
        return self._groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        if not self._is_complete:  # torch's own constructor sets it
            self._groups = groups
            return
        if self._has_several and groups is not self._groups:
            raise ConfigError(
                "optimizer: expected the lists of groups of several optimizers to stay as they were at "
                "outcore.prepare(), but another list was assigned; change the groups themselves"
            )
        _refuse_other_params(groups, self.engine)
        self._follow(groups)

    def _follow(self, groups: list[dict[str, Any]]) -> None:
        """Let everything that reads groups read these; schedulers may have the user's optimizer."""
        self._groups = self.engine.settings.groups = self._states.groups = self._originals[0].param_groups = groups

    @property
    def _has_several(self) -> bool:
        return self._originals[0] is not self._originals[-1]

    @property
    def plan(self) -> Plan:
        """The plan: where everything lives. It prints as a table of all bytes."""
        plan = self.engine.opened.plan
        return shown_by(plan, partial(plan_table, self.model_spec, plan))

    @property
    def model_spec(self) -> ModelSpec:
        """The model that the plan is for."""
        return self.engine.opened.model

    def traffic(self) -> dict[str, int]:
        """Bytes given to each lane since the run began, without what was dropped before its turn."""
        return self.engine.opened.traffic.totals()

    def exposed_s(self) -> dict[str, float]:
        """Seconds that compute waited for each lane since the run began.

        Does not block. On an accelerator the numbers lag behind by the work that it was given and has not done.
        """
        return self.engine.device.recorder.exposed_s()

    def recording(self, *, num_steps: int = 16) -> AbstractContextManager[Recorder]:
        """Record what every lane does, and what compute waits for, while the block runs.

        Args:
            num_steps: How many steps the recorder keeps; ``timeline()`` returns them.

        Memory: host, a few hundred bytes per operation.
        """
        return recording(self.engine.model, self.engine.device.recorder, num_steps=num_steps)

    @as_it_is
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Submit the update of every parameter that has a gradient and return; errors of earlier steps surface here."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._refuse_new_groups()
        with self.engine.device.recorder.step():
            if not _is_infinite(self):
                _unscale(self)
                self.engine.step(self.param_groups)
        for one in self._originals:
            one._opt_called = True  # type: ignore[attr-defined]  # a scheduler built on it warns otherwise
        return loss

    def _refuse_new_groups(self) -> None:
        """Raise if groups came or went where that has no effect: in the lists of the optimizers that were given."""
        _refuse_other_params(self._groups, self.engine)
        mine = {id(group) for group in self._groups}
        given = [(one, id(group)) for one in self._originals[1:] for group in one.param_groups]
        if {group for _, group in given} == mine:
            return
        name = next((type(one).__name__ for one, group in given if group not in mine), None)
        came = f"one was added later to the {name} that prepare was given, and would not be trained"
        went = "one was taken from what prepare was given, and would still be trained"
        todo = "change param_groups of the optimizer that prepare returned instead"
        if self._has_several:
            todo = "leave it there, and freeze its parameters" if name is None else "add it before prepare"
        raise ConfigError(
            "optimizer: expected param groups that were there at outcore.prepare(), but "
            f"{went if name is None else came}; {todo}"
        )

    @as_it_is
    def zero_grad(self, set_to_none: bool = True) -> None:  # noqa: FBT001, FBT002  (torch's signature)
        """Zero gradients, as in torch, also those left incomplete by a backward that ended in an exception."""
        self.engine.run.notice()
        self.engine.gradients.zero()
        super().zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters that were trainable at ``prepare`` and that no group has yet.

        Raises:
            UnsupportedError: A parameter has no memory for gradients and states.
            ConfigError: There are several optimizers, so the group would belong to none of them.
        """
        if self._is_complete:
            self.engine.settings.expect_rule().kind(param_group)
            params = param_group["params"]
            params = [params] if isinstance(params, torch.Tensor) else list(params)
            param_group["params"] = params
            for param in params:
                _refuse_unknown(param[1] if isinstance(param, tuple) else param, self.engine)
        super().add_param_group(param_group)

    @as_it_is
    def state_dict(self) -> dict[str, Any]:
        """Return states in torch's format, in host memory; bf16 training adds ``master``, from the start.

        Memory: host, all states.
        """
        self.engine.run.refuse_if_closed()
        for pre_hook in self._optimizer_state_dict_pre_hooks.values():
            pre_hook(self)
        groups, state, index = [], {}, 0
        for group in self.param_groups:
            entry = {k: v for k, v in group.items() if k != "params"}
            entry["params"] = list(range(index, index + len(group["params"])))
            for param in group["params"]:
                values = {name: self._states.read(param, name) for name in self._states.names_to_save(param)}
                if values:
                    state[index] = values
                index += 1
            groups.append(entry)
        result: dict[str, Any] = {"state": state, "param_groups": groups}
        for post_hook in self._optimizer_state_dict_post_hooks.values():
            changed = post_hook(self, result)
            result = result if changed is None else changed
        return result

    @as_it_is
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Write states home, and replace the groups' settings, as in torch.

        Raises:
            ConfigError: The states are for other groups or of another format, or a tensor has another shape.
        """
        self.engine.run.refuse_if_closed()
        state_dict = state_dict.copy()
        for pre_hook in self._optimizer_load_state_dict_pre_hooks.values():
            changed = pre_hook(self, state_dict)
            state_dict = state_dict if changed is None else changed
        self._load(state_dict)
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)

    def _load(self, state_dict: dict[str, Any]) -> None:
        groups = copy.deepcopy(state_dict["param_groups"])
        _refuse_other_groups(groups, self.param_groups)
        keys = [key for group in groups for key in group["params"]]
        params = [param for group in self.param_groups for param in group["params"]]
        values = [state_dict["state"].get(key, {}) for key in keys]
        self._states.replace(dict(zip(params, values, strict=True)))
        self.replace_settings(groups)

    def replace_settings(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Replace settings of all groups by saved ones: those that were not saved are gone, or as torch sets them then.

        Groups are other dicts afterwards, as in torch.
        """
        fresh = {id(mine): _merged(mine, saved) for mine, saved in zip(self._groups, groups, strict=True)}
        if self._has_several:  # their lists stay: each group is known by the list that it is in
            for one in self._originals:
                one.param_groups[:] = [fresh.get(id(group), group) for group in one.param_groups]
        else:
            self.param_groups = list(fresh.values())
        for one in self._originals[1:]:
            one.__setstate__({"state": {}})
            one.state = self._states  # type: ignore[assignment]

    def close(self) -> None:
        """Give memory, files and threads back, those of the weights too; ``outcore.close(model)`` keeps the weights."""
        self.engine.close()

    def __getstate__(self) -> NoReturn:
        """Refuse to be copied or pickled."""
        raise UnsupportedError(
            "expected optimizer.state_dict() to save, but the prepared optimizer itself is being copied or pickled"
        )


def class_names(optimizer: StreamedOptimizer) -> list[str]:
    """Return the class name of the optimizer of each param group: torch's class, if it is a subclass of one."""
    rule = optimizer.engine.settings.expect_rule()
    return [rule.kind(group).name for group in optimizer.param_groups]


def _refuse_other_params(groups: Sequence[Mapping[str, Any]], engine: Engine) -> None:
    """Raise for parameters that a plain loop would train, but no step here."""
    params = [param for group in groups for param in group["params"]]
    seen = {id(param): param for param in params}
    other = next((param for key, param in seen.items() if key not in engine.places), None)
    if other is not None or len(seen) < len(params):
        what = "one twice" if other is None else f"one of shape {tuple(other.shape)} that is not in it"
        raise ConfigError(
            f"optimizer: expected param groups of parameters of the model, each once, but got {what}; build groups "
            "from model.parameters()"
        )


def _refuse_other_groups(groups: Sequence[Mapping[str, Any]], mine: Sequence[Mapping[str, Any]]) -> None:
    """Raise if saved groups are not like those of the optimizer."""
    sizes = [len(g["params"]) for g in mine]
    if [len(g["params"]) for g in groups] != sizes:
        raise ConfigError(
            f"optimizer.load_state_dict: expected groups of {sizes} parameters, but got "
            f"{[len(g['params']) for g in groups]}"
        )
    formats = [format_of(group) for group in groups]
    if formats != [format_of(group) for group in mine]:
        raise ConfigError(
            f"optimizer.load_state_dict: expected groups of state_format "
            f"{[format_of(group) for group in mine]}, but got {formats}; states of another format "
            "are not converted: set state_format (or a Trainer's optim) as in the run that saved them"
        )


def _merged(mine: Mapping[str, Any], saved: Mapping[str, Any]) -> dict[str, Any]:
    """Return a group with saved settings, in the order that they have here, so that a resumed run saves the same bytes.

    Parameters, and what else belongs to this run alone, stay.
    """
    kept = {name: mine[name] for name in NOT_TAKEN_OVER if name in mine}
    new = {**{name: value for name, value in saved.items() if name not in NOT_TAKEN_OVER}, **kept}
    if "param_names" in mine:
        new.setdefault("param_names", mine["param_names"])
    return {name: new[name] for name in (*mine, *new) if name in new}


def _is_infinite(optimizer: StreamedOptimizer) -> bool:
    """Whether ``GradScaler`` found infinities. Waits for the device if the host does not know."""
    found: torch.Tensor | None = getattr(optimizer, "found_inf", None)
    if found is None:
        return False
    known = optimizer.engine.gradients.homes.is_infinite
    return bool(found.item()) if known is None else known


@torch.no_grad()
def _unscale(optimizer: StreamedOptimizer) -> None:
    """Unscale gradients: ``GradScaler`` leaves that to a fused optimizer if its ``unscale_`` was not called."""
    scale: torch.Tensor | None = getattr(optimizer, "grad_scale", None)
    if scale is None:
        return
    inverse = scale.double().reciprocal().float()
    for group in optimizer.param_groups:
        for param in group["params"]:
            if param.grad is not None:
                param.grad.mul_(inverse.to(param.grad.device))


def _refuse_unknown(param: torch.Tensor, engine: Engine) -> None:
    """Raise for a parameter that has no memory for gradients and states."""
    if engine.values.place(param) is None:
        unit, index = engine.places.get(id(param), (None, 0))
        what = f"one of shape {tuple(param.shape)} that is not in the model"
        if unit is not None:
            what = f"'{unit.spec.params[index].name}', which was frozen then"
        raise UnsupportedError(
            "add_param_group: expected parameters that were trainable at outcore.prepare(), which gave each its "
            f"memory, but got {what}; prepare with everything that will ever be trained, and freeze it afterwards"
        )


def _has_begun(kind: RuleKind, values: Mapping[str, Any]) -> bool:
    """Whether states are more than the initial ones.

    Adagrad has a sum before its first step, but rounded to the dtype that the weights had when it was built.
    """
    if kind.initial_sum is None or "sum" not in values or float(values["step"]):
        return True
    total = values["sum"]
    return not total.is_meta and bool((total != torch.full_like(total, kind.initial_sum)).any())


class _Refusal:
    """A hook that makes every other optimizer refuse: parameters are elsewhere, and the original's states were taken.

    An optimizer that wraps the prepared one may go on.
    """

    def __init__(self, streamed: StreamedOptimizer, original: torch.optim.Optimizer) -> None:
        self._streamed, self._originals = weakref.ref(streamed), weakref.WeakSet((original, *members(original)))

    def __call__(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        """Run before ``step()`` of any optimizer, and before ``state_dict()`` and loading of the original one."""
        mine = self._streamed()
        if optimizer is mine or mine is None:
            return
        if optimizer in self._originals:
            raise UnsupportedError(
                "expected the optimizer that outcore.prepare() returned, but step(), state_dict() or "
                "load_state_dict() of the given one was called, which no longer has weights or states; "
                "write 'model, optimizer = outcore.prepare(model, optimizer)'"
            )
        places = {} if mine.engine.is_closed else mine.engine.places
        place = next((places[id(p)] for g in optimizer.param_groups for p in g["params"] if id(p) in places), None)
        if place is not None and not any(value is mine for value in vars(optimizer).values()):
            unit, index = place
            raise UnsupportedError(
                f"expected one optimizer for a prepared model, but step() of another {type(optimizer).__name__} was "
                f"called, which has '{unit.spec.params[index].name}'; give outcore.prepare() all of them, as one "
                "with a param group for each setting, or as a list"
            )
