"""A test kit for rules: checks what a rule declares, so that every plan gives the bits of the rule's plain step."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from outcore.core.errors import ConfigError
from outcore.optim.blocks import numbers_after, update_blocks
from outcore.optim.formats import format_of
from outcore.optim.piece import Piece
from outcore.optim.rule import Rule, name_of
from outcore.optim.rules import rule_for
from outcore.torch_private import TorchDispatchMode, pytree

_SHAPES = ((7, 33), (33, 7), (64,), (199,), (3, 5, 11), (), (67, 70))
_TRANSPOSED = ((33, 7), (7, 33), (67, 70))
_CUTS = (64, 192, 4096)
_STEPS = 3
_LEAST_BYTES = 8192
"""Least size of a weight at which temporaries are checked, so that single numbers do not matter."""
_EXPECTED = "optim.check: expected"


def check(
    make: Callable[[list[torch.nn.Parameter]], Rule],
    *,
    shapes: Sequence[tuple[int, ...]] = _SHAPES,
    dtypes: Iterable[torch.dtype] = (torch.float32, torch.bfloat16),
    device: torch.device | str = "cpu",
) -> None:
    """Compare a rule in pieces with its own step over whole parameters, bit for bit.

    Also checks that it only reads the gradient, and that its tensors take no more memory than ``temporaries`` declares.

    Args:
        make: Builds the optimizer over parameters.
        shapes: Shapes of parameters to try.
        dtypes: Dtypes in which parameters are updated.
        device: Device of the parameters.

    Raises:
        ConfigError: The rule fails a check; the message says which, with the shape and the dtype.
    """
    for dtype in dtypes:
        for shape in shapes:
            where = f"{dtype} of shape {shape}"
            for cut in _CUTS:
                _compare(make, shape, dtype, torch.device(device), cut, where)
                if shape in _TRANSPOSED:
                    where_else = f"{dtype} of shape {shape}, transposed in memory"
                    _compare(make, shape, dtype, torch.device(device), cut, where_else, is_transposed=True)


def _compare(
    make: Callable[[list[torch.nn.Parameter]], Rule],
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    cut: int,
    where: str,
    *,
    is_transposed: bool = False,
) -> None:
    def values(seed: int) -> Tensor:
        made = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)
        return made.t().contiguous().t() if is_transposed else made

    def flat(tensor: Tensor) -> Tensor:
        """Flatten a tensor in memory order."""
        return (tensor.t() if is_transposed and tensor.shape == shape else tensor).reshape(-1)

    plain, param = _plain(make, values(0))
    rule, group = rule_for(plain), plain.param_groups[0]
    if format_of(group) != "fp32":
        raise ConfigError(f"{_EXPECTED} no state_format in param groups, since it changes bits; leave it out")
    hyper, forms = rule.hyper(group), rule.kept([group])(param, name_of(dtype)).states
    dtypes = {"": dtype, **{form.name: getattr(torch, form.dtype) for form in forms}}
    target, states = flat(values(0)).clone(), dict[str, Tensor]()
    for form in forms:
        own = shape if form.shape is None else form.shape
        states[form.name] = torch.full(own, form.initial, dtype=dtypes[form.name], device=device).reshape(-1)
    numbers = {form.name: form.initial for form in forms if form.is_number and not plain.is_whole}
    likes = {"": values(0).to("meta")}
    likes |= {form.name: torch.empty(form.shape, device="meta") for form in forms if form.shape is not None}
    room = math.ceil(cut * dtype.itemsize * max(plain.temporaries, 1.0))  # see update_blocks
    scratch = torch.empty(room, dtype=torch.uint8, device=device)
    for step in range(1, _STEPS + 1):
        grad = values(step)
        param.grad = grad.clone()  # with its strides
        plain.step()
        given = flat(grad).clone()
        piece = Piece(
            target=target,
            grad=given,
            states=states,
            weights=None,
            step=step,
            hyper=hyper,
            numbers=dict(numbers),
            likes=likes,
        )
        numbers = numbers_after(hyper, numbers, dtypes, step)
        with _PeakMeter() as made:
            update_blocks([piece], scratch)
        _refuse_more(plain, made.peak_bytes, (target.numel() if plain.is_whole else cut) * dtype.itemsize, where)
        if not torch.equal(given, flat(grad)):
            raise ConfigError(f"{_EXPECTED} the gradient to be only read, but update() changed it ({where})")
        _same(plain, param, {"the weight": target, **states}, step, where, flat)


def _plain(make: Callable[[list[torch.nn.Parameter]], Rule], value: Tensor) -> tuple[Rule, torch.nn.Parameter]:
    param = torch.nn.Parameter(value)
    plain = make([param])
    if not isinstance(plain, Rule):
        raise ConfigError(f"{_EXPECTED} make() to build an outcore.optim.Rule, but got {type(plain).__name__}")
    return plain, param


class _PeakMeter(TorchDispatchMode):
    """Measures the peak bytes of all tensors that a block of code makes."""

    def __init__(self) -> None:
        super().__init__()
        self.peak_bytes = self._bytes = 0
        self._alive = set[int]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {t.untyped_storage()._cdata for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        result = func(*args, **(kwargs or {}))
        for tensor in pytree.tree_leaves(result):
            storage = tensor.untyped_storage() if isinstance(tensor, Tensor) else None
            if storage is not None and storage._cdata not in given and storage._cdata not in self._alive:
                self._alive.add(storage._cdata)
                self._bytes += storage.nbytes()
                self.peak_bytes = max(self.peak_bytes, self._bytes)
                weakref.finalize(storage, self._drop, storage._cdata, storage.nbytes())
        return result

    def _drop(self, key: int, nbytes: int) -> None:
        self._alive.discard(key)
        self._bytes -= nbytes


def _refuse_more(plain: Rule, made_bytes: int, weight_bytes: int, where: str) -> None:
    times = made_bytes / weight_bytes if weight_bytes >= _LEAST_BYTES else 0.0
    if times > plain.temporaries:
        raise ConfigError(
            f"{_EXPECTED} update() to make at most temporaries = {plain.temporaries:g} times the memory of the weight "
            f"that it is given at a time, for which plans leave room, but it made {times:.2f} times as "
            f"much ({where}); say so in the class, or make fewer tensors"
        )


def _same(
    plain: Rule,
    param: torch.nn.Parameter,
    got: Mapping[str, Tensor],
    step: int,
    where: str,
    flat: Callable[[Tensor], Tensor],
) -> None:
    want = {"the weight": param.detach(), **{n: plain.state[param][n] for n in got if n != "the weight"}}
    for name, tensor in got.items():
        if not torch.equal(tensor.nan_to_num(1.5), flat(want[name].to(tensor.device)).nan_to_num(1.5)):
            raise ConfigError(
                f"{_EXPECTED} the bits of step() over whole parameters, but {name} differs after step {step} in pieces "
                f"({where}): an element may depend on its own weight, gradient and states alone; set is_whole = True "
                "if it needs others"
            )
