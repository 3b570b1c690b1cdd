"""States stored in fewer bytes than their update dtype: decoded into fp32 for one block at a time, and encoded again.

[Note: bf16 weights] With ``pure_bf16`` there are no fp32 masters. If the group names a format, the weight is decoded
into fp32 like its states, and rounded to the nearest bf16 number after the update, as bitsandbytes and torchao do. The
gradient is the plain loop's: in bf16, also after clipping. Where a format leaves states in fp32, they are fp32 here,
too (``WIDE``). A group without a format is updated in bf16 by torch's kernel.

[Note: stochastic rounding] A moment in bf16 mostly moves by less than half a step of bf16, so rounding to nearest would
leave it where it is. Here it is rounded up with the probability that makes the mean right. The noise is a function of
the parameter's name, the element and the step. So it does not depend on the plan, and a resumed run draws the same
noise as an uninterrupted one.

[Note: 8 bits] Each block of 256 elements has one scale, its largest magnitude. Each element divided by the scale is
stored as the nearest of 256 numbers between -1 and 1 (between 0 and 1 if the state is never negative). These numbers
are the dynamic maps of bitsandbytes (arXiv:2110.02861), so codes and scales are the same as in bitsandbytes. The upper
half of a float's bits is the index of a table of codes. All floats with the same upper half have at most one boundary
between codes among them, so one comparison decides.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple, get_args

import torch
from torch import Tensor

from outcore.core.errors import ConfigError, UnsupportedError
from outcore.core.quantities import align_up
from outcore.optim.rule import SCALE
from outcore.spec.layout import CODES, NOISE_BYTES, ROW_NUMEL
from outcore.spec.model import WIDE, MasterFormat, ParamSpec, StateForm, StateFormat, StoredFormat

FORMATS: tuple[StateFormat, ...] = get_args(StateFormat)
MASTER_FORMATS: tuple[MasterFormat, ...] = get_args(MasterFormat)
NOT_TAKEN_OVER = ("params", "master_format")
"""Keys of a param group that loading does not overwrite; masters are converted to the group's ``master_format``."""
SCALED_NUMEL = 256
"""Number of elements that share a scale."""
LEAST_8BIT_NUMEL = 4096
"""Least number of elements for 8 bits; smaller parameters keep states in fp32, as in bitsandbytes."""
CODING_BYTES = 24 * 2**20
"""Upper bound of the temporary memory of coding on a device: noise, and indices of a block."""
CODING_COST: Mapping[StateFormat, float] = {"fp32": 0.0, "bf16": 0.6, "8bit": 3.25}
"""Time to decode and encode a state on the CPU, as a multiple of AdamW's update (``benchmarks/cpu_update.py``)."""
_PERIOD = 65521  # period of the noise: a prime, so that rows of a matrix do not get the noise of the row above
_CACHED_NUMEL = _PERIOD // 8
"""Least number of elements for which noise is cached; for fewer it is made each time."""


def format_of(group: Mapping[str, object]) -> StateFormat:
    """Return the ``state_format`` of a param group.

    Raises:
        ConfigError: It is not a format.
    """
    found = group.get("state_format", "fp32")
    if found not in FORMATS:
        raise ConfigError(
            f"optimizer: expected state_format to be one of {', '.join(FORMATS)} in a param group, but got {found!r}"
        )
    return found


def master_format_of(group: Mapping[str, object]) -> MasterFormat:
    """Return the ``master_format`` of a param group.

    Raises:
        ConfigError: It is not a format.
    """
    found = group.get("master_format", "fp32")
    if found not in MASTER_FORMATS:
        raise ConfigError(
            f"optimizer: expected master_format to be one of {', '.join(MASTER_FORMATS)} in a param group, but got "
            f"{found!r}"
        )
    return found


def is_named(group: Mapping[str, object], dtype: str) -> bool:
    """Return whether a group's format changes how states are stored. Args: dtype: In which gradients are added up.

    Only bf16 weights need the name ``fp32``: see [Note: bf16 weights].
    """
    return format_of(group) != "fp32" or ("state_format" in group and dtype == "bfloat16")


def refuse_other_format(param: ParamSpec, group: Mapping[str, object]) -> None:
    """Refuse a group whose format differs from the one for which its parameter has memory.

    Raises:
        UnsupportedError: The formats differ.
    """
    has_fp32_masters = (param.dtype, param.update_dtype) == ("bfloat16", "float32")
    if (master_format_of(group) if has_fp32_masters else "fp32") != param.master_format:
        raise UnsupportedError(
            f"expected the master_format that the param group of '{param.name}' had at outcore.prepare(), when memory "
            f"was taken, but it is {master_format_of(group)!r} now; set it before prepare"
        )
    chosen, states = format_of(group), param.states or ()
    stored = codes_of(states, param.name)
    if stored is not None:
        is_wide = chosen == "fp32" or (chosen == "8bit" and param.numel < LEAST_8BIT_NUMEL)
        is_same = (WIDE if is_wide else chosen) in stored.formats.values()
    elif is_named(group, param.update_dtype):
        is_same = all(coded(form, param.numel, param.update_dtype, chosen) == (form,) for form in states)
    else:
        is_same = True
    if is_same:
        return
    raise UnsupportedError(
        f"expected the state_format that the param group of '{param.name}' had at outcore.prepare(), when memory was "
        f"taken, but it is {chosen!r} now; set it before prepare"
    )


def coded(form: StateForm, numel: int, dtype: str, chosen: StateFormat) -> tuple[StateForm, ...]:
    """Return the stored forms of a state. States whose shape or dtype differs from the parameter's stay as they are.

    Args:
        form: The state as the update sees it.
        numel: Number of elements of the parameter.
        dtype: Dtype in which the parameter's gradient is added up.
        chosen: The group's ``state_format``; see ``is_named``.
    """
    is_small = chosen == "8bit" and numel < LEAST_8BIT_NUMEL
    if form.shape is not None or form.dtype != dtype:
        return (form,)
    if chosen == "fp32" or is_small:
        return (replace(form, dtype="float32", format=WIDE) if dtype == "bfloat16" else form,)
    if chosen == "bf16":
        return (replace(form, dtype="bfloat16", format=chosen),)
    scales = StateForm(form.name + SCALE, "float32", (-(-numel // SCALED_NUMEL),), SCALED_NUMEL, form.initial)
    return replace(form, dtype="uint8", initial=255.0 if form.initial else 0.0, format=chosen), scales


class Codes(NamedTuple):
    """How the states of a piece are stored."""

    formats: Mapping[str, StoredFormat]
    """Formats by name of the coded state; a compact master is one of them."""
    seed: int
    """Seed of the noise."""
    unsigned: frozenset[str] = frozenset()
    """Names of states that are never negative."""

    @property
    def shared_numel(self) -> int:
        """Number of elements that share a scale or a code. Cuts must be at its multiples."""
        return max(self.elements_of(name) for name in ("", CODES, *(name + SCALE for name in self.formats)))

    def elements_of(self, name: str) -> int:
        """Number of elements of a parameter that share one element (a scale, or a code) of a state."""
        if self.formats.get(name.removesuffix(SCALE)) == "8bit" and name.endswith(SCALE):
            return SCALED_NUMEL
        return ROW_NUMEL if name == CODES and "master" in self.formats else 1


def codes_of(forms: Iterable[StateForm | None], name: str) -> Codes | None:
    """Return how the states of a parameter are stored; None if none is coded.

    Args:
        forms: All states of the parameter.
        name: Name of the parameter.
    """
    stored = [form for form in forms if form is not None and form.format != "fp32"]
    if not stored:
        return None
    formats = {form.name: form.format for form in stored}
    unsigned = frozenset(form.name for form in stored if form.is_unsigned)
    return Codes(formats, zlib.crc32(name.encode()), unsigned)


def updated_in(param: ParamSpec) -> dict[str, str]:
    """Return the dtypes of a parameter ("") and of its decoded states, as its update sees them."""
    codes = codes_of(param.states or (), param.name)
    forms = [form for form in param.states or () if codes is None or codes.elements_of(form.name) == 1]
    states = {form.name: form.dtype if form.format == "fp32" else "float32" for form in forms}
    return {"": param.update_dtype if codes is None else "float32", **states}


def decode(name: str, states: Mapping[str, Tensor], codes: Codes, room: Tensor) -> Tensor:
    """Decode a state into fp32, at the beginning of ``room``; return that part of ``room``."""
    stored = states[name]
    values = room[: stored.numel()]
    if codes.formats[name] != "8bit":
        return values.copy_(stored)
    torch.index_select(_map(name in codes.unsigned, stored.device), 0, stored.int(), out=values)
    numel = align_up(stored.numel(), SCALED_NUMEL)
    room[stored.numel() : numel].zero_()
    room[:numel].view(-1, SCALED_NUMEL).mul_(states[name + SCALE][:, None])
    return values


def encode(name: str, states: Mapping[str, Tensor], codes: Codes, room: Tensor, start: int, step: int) -> None:
    """Store a state that ``decode`` returned and an update changed.

    Args:
        name: Name of the state.
        states: Stored states, to be written.
        codes: How states are stored.
        room: The decoded state, as for ``decode``; overwritten.
        start: Index of the piece's first element in the parameter.
        step: Number of this step of the parameter.
    """
    stored = states[name]
    if codes.formats[name] == WIDE:
        stored.copy_(room[: stored.numel()])
        return
    if codes.formats[name] == "bf16":
        room[: stored.numel()].nan_to_num_(math.nan, math.inf, -math.inf)  # one NaN for all, which noise cannot change
        bits = room[: stored.numel()].view(torch.int32)
        place = (start + codes.seed + sum(name.encode())) % _PERIOD  # so that two states of an element draw differently
        _add_noise(bits, codes.seed, step, place)
        bits.bitwise_and_(-65536)
        stored.copy_(room[: stored.numel()])
        return
    numel = align_up(stored.numel(), SCALED_NUMEL)
    room[stored.numel() : numel].zero_()
    rows = room[:numel].view(-1, SCALED_NUMEL)
    scales = rows.abs().amax(dim=1)
    states[name + SCALE].copy_(scales)
    rows.mul_(scales.masked_fill_(scales == 0, 1.0).reciprocal_()[:, None]).clamp_(-1.0, 1.0)
    values = room[: stored.numel()]
    index = (values.view(torch.int32) >> 16).add_(32768)
    lower, boundary = _nearest(name in codes.unsigned, stored.device)
    torch.add(torch.index_select(lower, 0, index), values > torch.index_select(boundary, 0, index), out=stored)


def _add_noise(bits: Tensor, seed: int, step: int, place: int) -> None:
    """Add noise from 0 to 65535, which repeats with ``_PERIOD``. Args: place: Where in the period the noise begins."""
    numel = bits.numel()
    if numel < _CACHED_NUMEL:
        bits.add_(_hashed(seed, step, range(place, place + numel), bits.device))
        return
    made = _period_on_host(seed, step) if bits.is_cpu else _period(seed, step, bits.device)
    count, period = numel // _PERIOD, made[place : place + _PERIOD]
    bits[: count * _PERIOD].view(count, _PERIOD).add_(period)
    bits[count * _PERIOD :].add_(period[: numel % _PERIOD])


# Blocks of a parameter share the noise. Not cached on a device, where readers would have to wait until it is written.
@lru_cache(maxsize=NOISE_BYTES // (2 * _PERIOD * 4))
def _period_on_host(seed: int, step: int) -> Tensor:
    return _period(seed, step, torch.device("cpu"))


def forget_noise() -> None:
    """Free the cached noise."""
    _period_on_host.cache_clear()


def _period(seed: int, step: int, device: torch.device) -> Tensor:
    """Two periods of noise, so that a whole period can begin at any place."""
    return _hashed(seed, step, range(_PERIOD), device).repeat(2)


def _hashed(seed: int, step: int, places: range, device: torch.device) -> Tensor:
    """A hash of seed, step and place (the finalizer of MurmurHash3, over 32 bits)."""
    key = (seed * 0x9E3779B1 + step * 0x85EBCA77) & 0xFFFFFFFF
    x = torch.arange(places.start, places.stop, dtype=torch.int64, device=device).remainder_(_PERIOD)
    x.mul_(0x27D4EB2F).add_(key).bitwise_and_(0xFFFFFFFF)
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35), (16, 1)):
        x = (x ^ (x >> shift)).mul_(factor).bitwise_and_(0xFFFFFFFF)
    return (x & 0xFFFF).int()


@lru_cache(maxsize=2)
def _dynamic_map(*, is_signed: bool) -> Tensor:
    """256 numbers in ascending order, in seven decades. Each decade has twice as many as the decade below it."""
    found = [0.0, 1.0]
    for i in range(7):
        number = 2**i if is_signed else 2 ** (i + 1)
        bounds = torch.linspace(0.1, 1, number + 1, dtype=torch.float32, device="cpu")
        means = (bounds[:-1] + bounds[1:]) / 2.0
        found += (10 ** (i - 6) * means).tolist()
        found += (-(10 ** (i - 6)) * means).tolist() if is_signed else []
    return torch.tensor(sorted(found), dtype=torch.float32, device="cpu")


@lru_cache(maxsize=8)
def _map(is_unsigned: bool, device: torch.device) -> Tensor:  # noqa: FBT001
    return _settled(_dynamic_map(is_signed=not is_unsigned), device)


def _settled(table: Tensor, device: torch.device) -> Tensor:
    """Copy a table to a device, and wait, so that any stream may read it."""
    made = table.to(device)
    made.cpu()  # waits for the copy
    return made


@lru_cache(maxsize=8)
def _nearest(is_unsigned: bool, device: torch.device) -> tuple[Tensor, Tensor]:  # noqa: FBT001
    """Return two tables by the upper half of a float's bits.

    The first has the code of the least float with this upper half, the second the float above which the next code is
    nearer.
    """
    codes = _dynamic_map(is_signed=not is_unsigned)
    boundaries = (codes[:-1] + codes[1:]) / 2
    for _ in range(4):  # find the last float for which the lower code is at least as near, in float arithmetic
        after = torch.nextafter(boundaries, torch.ones_like(boundaries))
        boundaries = torch.where(codes[1:] - after < after - codes[:-1], boundaries, after)
    for _ in range(8):
        is_above = codes[1:] - boundaries < boundaries - codes[:-1]
        boundaries = torch.where(is_above, torch.nextafter(boundaries, -torch.ones_like(boundaries)), boundaries)
    upper = torch.arange(-32768, 32768, dtype=torch.int32, device="cpu") << 16
    ends = [upper.view(torch.float32), (upper | 0xFFFF).view(torch.float32)]
    found = [torch.bucketize(end.nan_to_num(0.0), boundaries) for end in ends]
    lower = torch.minimum(*found)
    padded = torch.cat([boundaries, torch.full((1,), float("inf"), dtype=torch.float32, device="cpu")])
    return _settled(lower.to(torch.uint8), device), _settled(padded[lower], device)
