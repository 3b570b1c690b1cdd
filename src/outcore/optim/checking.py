"""A test kit for rules: is one what it says, so that every plan gives the bits of its own plain step?"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor

from outcore.core.errors import ConfigError
from outcore.optim.blocks import Piece, numbers_after, update_blocks
from outcore.optim.rule import Rule, settings_of
from outcore.optim.rules import RuleHyper

_SHAPES = ((7, 33), (33, 7), (64,), (199,), (3, 5, 11), ())
_STEPS = 3
_EXPECTED = "optim.check: expected"


def check(
    make: Callable[[list[torch.nn.Parameter]], Rule],
    *,
    shapes: Sequence[tuple[int, ...]] = _SHAPES,
    dtypes: Iterable[torch.dtype] = (torch.float32, torch.bfloat16),
    device: torch.device | str = "cpu",
) -> None:
    """Compare a rule in pieces with its own step over whole parameters, bit for bit, and look at what it may not do.

    Args:
        make: Builds the optimizer over parameters.
        shapes: Of parameters to try.
        dtypes: In which parameters are updated.
        device: Where.

    Raises:
        ConfigError: What is wrong, with the shape and the dtype.
    """
    for dtype in dtypes:
        for shape in shapes:
            where = f"{dtype} of shape {shape}"
            for cut in (64, 128, 4096):
                _compare(make, shape, dtype, torch.device(device), cut, where)


def _compare(
    make: Callable[[list[torch.nn.Parameter]], Rule],
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    cut: int,
    where: str,
) -> None:
    def values(seed: int) -> Tensor:
        return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)

    plain, param = _plain(make, values(0))
    settings = settings_of(plain.param_groups[0], plain.defaults)
    hyper, forms = RuleHyper(plain, settings), plain.states(shape, dict(settings))
    target, states, numbers = values(0).reshape(-1), dict[str, Tensor](), dict[str, float]()
    for name, form in forms.items():
        own = shape if form.shape is None else form.shape
        states[name] = torch.full(own, form.initial, dtype=form.dtype or dtype, device=device).reshape(-1)
        if form.shape == () and not plain.is_whole:
            numbers[name] = form.initial
    likes = {"": torch.empty(shape, device="meta")}
    likes |= {n: torch.empty(f.shape, device="meta") for n, f in forms.items() if f.shape is not None}
    scratch = torch.empty(cut * dtype.itemsize, dtype=torch.uint8, device=device)
    for step in range(1, _STEPS + 1):
        grad = values(step)
        param.grad = grad.clone()
        plain.step()
        given = grad.reshape(-1).clone()
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
        dtypes = {name: states[name].dtype for name in numbers}
        numbers = numbers_after(hyper, numbers, dtypes, step)
        update_blocks([piece], scratch)
        if not torch.equal(given, grad.reshape(-1)):
            raise ConfigError(f"{_EXPECTED} the gradient to be only read, but update() changed it ({where})")
        _same(plain, param, {"the weight": target, **states}, step, where)


def _plain(make: Callable[[list[torch.nn.Parameter]], Rule], value: Tensor) -> tuple[Rule, torch.nn.Parameter]:
    param = torch.nn.Parameter(value)
    plain = make([param])
    if not isinstance(plain, Rule):
        raise ConfigError(f"{_EXPECTED} make() to build an outcore.optim.Rule, but got {type(plain).__name__}")
    return plain, param


def _same(plain: Rule, param: torch.nn.Parameter, got: Mapping[str, Tensor], step: int, where: str) -> None:
    want = {"the weight": param.detach(), **{n: plain.state[param][n] for n in got if n != "the weight"}}
    for name, tensor in got.items():
        if not torch.equal(tensor.nan_to_num(1.5), want[name].to(tensor.device).reshape(-1).nan_to_num(1.5)):
            raise ConfigError(
                f"{_EXPECTED} the bits of step() over whole parameters, but {name} differs after step {step} in pieces "
                f"({where}): an element may depend on its own weight, gradient and states alone; set is_whole = True "
                "if it needs others"
            )
