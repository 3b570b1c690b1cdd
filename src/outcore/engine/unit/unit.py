"""A unit at run time: its module and parameters, the homes of its bytes, and what its parameters point at.

[Note: presence] Between calls the parameters of most units have no bytes. While a call runs they are views of a slot.
Parameters whose weights live on the device are views of their home, also between calls. For the length of a block
``gathered`` gives parameters tensors of their own. ``LEGAL`` lists all changes between these states; any other change
is a bug of outcore and raises at once.
Whether a *slot* holds the weights of a unit is a different question (``order.weights``): they are brought there before
the parameters are bound, and stay afterwards.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

import torch
from torch import nn
from torch.nn import Parameter

from outcore.device.lanes import Handle
from outcore.engine.unit.absent import AbsenceOwner, AbsentParameter, WatchedParameter, absent_class, of_kind
from outcore.engine.unit.views import GradientForm, Views, nothing, torch_dtype
from outcore.memory.arena import Buffer
from outcore.model.quantized import present_class
from outcore.order.ledger import Ledger
from outcore.spec.model import ParamSpec


class Unit:
    """The state of one unit that weights, gradients and updates share. Other classes move its bytes.

    Attributes:
        ledger: Homes of its bytes, with the operations that wrote and read them last.
        presence: State of its parameters.
        views: Tensors over its bytes.
        gradient_form: Dtypes of its gradients.
        steps: Number of updates so far, by trainable parameter.
        weights_version: Number of changes of its weights. A backward compares it with that of its forward.
        states_version: Number of changes of its states that were not made by an update.
    """

    def __init__(self, ledger: Ledger[Handle], module: nn.Module, params: list[Parameter], owner: AbsenceOwner) -> None:
        """Args: params: Parameters in the spec's order. owner: Answers for absent parameters."""
        self.ledger, self.module, self.params = ledger, module, params
        spec = self.spec = ledger.spec
        self.plan = ledger.plan
        self.name = spec.name  # fully qualified name of the module; "" for the root
        self.label = ledger.name  # for messages
        self.num_trainable = len(spec.trainable)  # they come first in ``params``
        self.views = Views(spec, ledger.state_specs, ledger.cut)
        self.presence = Presence(
            self.label,
            params,
            spec.params,
            absent_class(owner),
            is_resident=ledger.cut.is_resident,
            has_master=ledger.has_master,
        )
        self.gradient_form = GradientForm(params[: self.num_trainable], spec.trainable, is_cut=spec.is_cut)
        self.steps = [0] * self.num_trainable
        self.weights_version = 0
        self.states_version = 0

    @property
    def modules(self) -> list[nn.Module]:
        """The unit's module and those inside of it; none of the root."""
        return list(self.module.modules()) if self.name else []

    def device_buffer(self) -> Buffer | None:
        """Return where the weights are on the device now, or None if they are not."""
        ledger = self.ledger
        place = ledger.weights if ledger.cut.is_resident else ledger.slot
        return None if place is None else place.memory

    def show(self) -> None:
        """Make the parameters present, as views of the weights where they are on the device now."""
        buffer = self.device_buffer()
        if buffer is None:  # the unit has no bytes at all
            self.presence.show([torch.empty(p.shape, dtype=p.dtype, device=p.device) for p in self.params])
        else:
            self.presence.show(self.views.weights(buffer))

    def close(self) -> None:
        """Let go of all memory, so that it can be given back."""
        self.views.close()
        self.presence.close()
        self.ledger.close()


class Beneath(enum.Enum):
    """States of a unit's parameters, by what they are views of."""

    ABSENT = "absent"
    """Views of a NaN, or of a home on the device that is being written. Reading a parameter raises, or waits."""
    AT_HOME = "at home"
    """Views of their home on the device, which calls use and a user may edit."""
    BOUND = "bound"
    """Views of a slot on the device, while calls run."""
    GATHERED = "gathered"
    """Tensors of their own, until ``gathered`` ends. Calls use these."""


LEGAL: Final[Mapping[Beneath, Mapping[Beneath, str]]] = {
    Beneath.ABSENT: {
        Beneath.ABSENT: "the unit rests, or the engine closes",
        Beneath.AT_HOME: "the home is whole, or is waited for",
        Beneath.BOUND: "the first call begins",
        Beneath.GATHERED: "a block begins",
    },
    Beneath.AT_HOME: {
        Beneath.ABSENT: "an update elsewhere writes the home",
        Beneath.AT_HOME: "a user replaced the data of a parameter",
        Beneath.GATHERED: "a block begins",
    },
    Beneath.BOUND: {
        Beneath.ABSENT: "the last call is over",
        Beneath.GATHERED: "a block begins inside of a call",
    },
    Beneath.GATHERED: {
        Beneath.ABSENT: "the block is over",
    },
}
"""Legal changes, from -> to, each with its occasion."""


class Presence:
    """State of the parameters of one unit. See [Note: presence]."""

    def __init__(
        self,
        name: str,
        params: Sequence[Parameter],
        specs: Sequence[ParamSpec],
        absent_class: type[AbsentParameter],
        *,
        is_resident: bool,
        has_master: bool,
    ) -> None:
        """Nothing is taken over yet: the parameters still have the user's values.

        Args:
            name: Name of the unit, for messages.
            params: All parameters of the unit.
            specs: Their specs.
            absent_class: Class of parameters while they are absent.
            is_resident: Whether their home is the device.
            has_master: Whether an update starts from master weights instead of the weights.
        """
        self._name, self._params, self._specs = name, params, specs
        self.classes = [present_class(param) for param in params]
        """Classes of the parameters while they are present."""
        self._absent = [of_kind(absent_class, kind) for kind in self.classes]
        self.absent_class = absent_class
        self.now = Beneath.ABSENT
        self.num_calls = 0
        """Number of running calls; ``Weights`` counts them."""
        self.bound: list[torch.Tensor] | None = None
        """Tensors to which a running call had bound the parameters, while these have tensors of their own."""
        self.saved: Handle | None = None
        """Operation that copies the home on the device to a checkpoint. See [Note: weights that are saved]."""
        self.is_taken = False
        """Whether parameters that are at home are shown only to calls of their unit."""
        self._taken: list[type[Parameter]] = []
        """Classes of taken parameters while they are shown."""
        self.watch = EditWatch(params, is_resident=is_resident, has_master=has_master)
        self._nothing: dict[torch.device, list[torch.Tensor]] = {}

    def show(self, tensors: Iterable[torch.Tensor]) -> None:
        """Make the parameters views of their home on the device, or of the slot where calls use them."""
        visible = Beneath.AT_HOME if self.watch.is_resident else Beneath.BOUND
        self._check(visible)
        self.is_taken = False
        self._point_at(tensors)
        self.watch.begin()
        self.now = visible  # last, so that after an interruption the parameters are shown again

    def hide(self, *, device: torch.device | None = None) -> None:
        """Make the parameters absent. With ``device`` they become views of a NaN there; else their bytes stay."""
        self._check(Beneath.ABSENT)
        self.now, self.bound, self.is_taken = Beneath.ABSENT, None, False
        if device is not None:
            if device not in self._nothing:
                self._nothing[device] = [absent_view(spec, device) for spec in self._specs]
            self._point_at(self._nothing[device])
        for param, kind in zip(self._params, self._absent, strict=True):
            param.__class__ = kind

    def take(self) -> None:
        """Show parameters that are at home only to calls of their unit. Other readers must ask ``Weights``."""
        if self.now is Beneath.AT_HOME and not self.is_taken:
            self.is_taken, self._taken = True, [type(param) for param in self._params]
            for param, kind in zip(self._params, self._absent, strict=True):
                param.__class__ = kind

    def give_back(self) -> None:
        """Undo ``take``."""
        if self.is_taken:
            self.is_taken = False
            for param, kind in zip(self._params, self._taken, strict=True):
                param.__class__ = kind

    def gather(self, tensors: Iterable[torch.Tensor]) -> None:
        """Give each parameter a tensor of its own, until ``hide``."""
        self._check(Beneath.GATHERED)
        if self.now is Beneath.BOUND:
            self.bound = [param.detach() for param in self._params]
        self.now, self.is_taken = Beneath.GATHERED, False
        self._point_at(tensors)
        self.watch.note_gathered()

    def edits(self) -> tuple[int, ...]:
        """Return what differs after each edit of gathered parameters. Empty before the first one, and outside."""
        return self.watch.edits_since_gathered() if self.now is Beneath.GATHERED else ()

    def close(self) -> None:
        """Let go of all memory, so that it can be given back."""
        self._nothing.clear()

    def _check(self, beneath: Beneath) -> None:
        if beneath not in LEGAL[self.now]:
            legal = " or ".join(was.value for was, changes in LEGAL.items() if beneath in changes)
            raise AssertionError(
                f"unit '{self._name}': expected parameters that are {legal} before they are {beneath.value}, but they "
                f"are {self.now.value}"
            )

    def _point_at(self, tensors: Iterable[torch.Tensor]) -> None:
        for param, kind, tensor in zip(self._params, self.classes, tensors, strict=True):
            param.__class__ = kind
            param.data = tensor


class EditWatch:
    """Watches for edits by the user of parameters that are present. See [Note: edits]."""

    def __init__(self, params: Sequence[Parameter], *, is_resident: bool, has_master: bool) -> None:
        """Args: is_resident: The user may edit the home itself. has_master: A master must follow such edits."""
        self._params, self.is_resident = params, is_resident
        self.is_shared = False
        """True if parameters may change in place unseen: by the unit in forward, or by a caller that kept ``data``."""
        self.versions: list[int] = []
        self.touched: set[int] = set()
        self._is_on = has_master or not is_resident
        self._num_gathered, self._when_gathered = 0, list[int]()

    def begin(self) -> None:
        """Begin to watch parameters that have just become present with their own classes."""
        if self._is_on:
            for i, param in enumerate(self._params):
                if type(param) is Parameter:  # quantised ones must not be edited
                    param.__class__ = WatchedParameter
                    param.touched, param.place = self.touched, i  # type: ignore[attr-defined]
        self.note_versions()

    def note_versions(self) -> None:
        """Take all edits of the home so far as known."""
        if self.is_resident:
            self.touched.clear()
            self.versions = [p._version for p in self._params]

    def look(self) -> None:
        """Set ``is_shared`` if parameters of a resident unit were edited since ``note_versions``."""
        self.is_shared |= bool(self.touched or self.edited())

    def edited(self) -> list[int]:
        """Return the indices of a resident unit's parameters that were changed in place since ``note_versions``."""
        return [i for i, version in enumerate(self.versions) if self._params[i]._version != version]

    def note_gathered(self) -> None:
        """Note that parameters were gathered just now."""
        self._num_gathered, self._when_gathered = self._num_gathered + 1, [p._version for p in self._params]

    def edits_since_gathered(self) -> tuple[int, ...]:
        """Return the number of the block ``gathered`` and versions of parameters; empty if none was edited in it."""
        now = [p._version for p in self._params]
        return () if now == self._when_gathered else (self._num_gathered, *now)

    def note_change(self, index: int) -> None:
        """Tell autograd that a parameter's bytes were changed beneath it. It does not count as an edit by the user."""
        torch.autograd.graph.increment_version(self._params[index])
        if self.versions:
            self.versions[index] = self._params[index]._version


def absent_view(spec: ParamSpec, device: torch.device) -> torch.Tensor:
    """Return a view of one NaN with the parameter's shape and zero strides: a few bytes, whatever the shape."""
    with torch.inference_mode(mode=False):
        return nothing(torch_dtype(spec.dtype), device).as_strided(spec.shape, (0,) * len(spec.shape))
