"""Compact masters: every bit pattern of fp32 comes back, whatever its neighbours, and updates have the bits of fp32."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outcore.core.errors import ConfigError
from outcore.optim import Lion, compact
from outcore.optim.blocks import update_blocks
from outcore.optim.compact import HAS_NAN, PLAIN, close_masters, masters_of
from outcore.optim.formats import Codes
from outcore.optim.piece import Piece, split
from outcore.optim.rules import rule_for
from outcore.spec.layout import CODES, ROW_NUMEL

from .update_cases import random

LOWER = (0, 1, 2, 0x7FFF, 0x8000, 0x8001, 0x80FE, 0xFF00, 0xFFFF)
TIE_DOWN, TIE_UP = 0x3F808000, 0x3F818000  # the upper half is even, and odd


def stored(bits):
    """Return weights, lower halves and codes of masters (int32, 1D)."""
    weights, lower = torch.empty(len(bits), dtype=torch.bfloat16), torch.empty(len(bits), dtype=torch.int16)
    codes = torch.empty(-(-len(bits) // ROW_NUMEL), dtype=torch.uint8)
    close_masters(bits.view(torch.float32).clone(), weights, lower, codes)
    return weights, lower, codes


def assert_exact(bits):
    weights, lower, codes = stored(bits)
    got = masters_of(weights, lower, codes).view(torch.int32)
    quiet = ((bits & 0x7FFF0000) == 0x7F800000) & ((bits & 0xFFFF) != 0)  # signalling NaNs with infinity's upper half
    assert torch.equal(got, torch.where(quiet, bits | 0x400000, bits))
    value = bits.view(torch.float32)
    assert torch.equal(weights.isnan(), value.isnan())
    numbers = ~value.isnan()
    rounded = value.bfloat16()[numbers].view(torch.int16)
    assert torch.equal(weights.view(torch.int16)[numbers], rounded)
    return codes


def patterns():
    """Return every upper half, with lower halves at and beside all borders."""
    upper = torch.arange(-32768, 32768, dtype=torch.int32) << 16
    return (upper[:, None] | torch.tensor(LOWER, dtype=torch.int32)).view(-1)


def test_all_upper_halves_come_back_in_order_and_mixed():
    bits = patterns()
    assert_exact(bits)
    assert_exact(bits[torch.randperm(len(bits), generator=torch.Generator().manual_seed(0))])
    every = torch.randint(-(2**31), 2**31, (2**20,), generator=torch.Generator().manual_seed(1)).int()
    assert_exact(every)


def test_numbers_as_they_occur_come_back():
    generator = torch.Generator().manual_seed(2)
    codes = assert_exact(torch.randn(2**21, generator=generator).mul_(0.02).view(torch.int32))
    assert 4 <= int((codes != PLAIN).sum()) <= 64  # one number in 131,072 is a tie that was rounded down


@pytest.mark.parametrize("numel", [1, 64, 127, 128, 129, 1000])
def test_a_row_may_have_any_number_of_ties(numel):
    for tie in (TIE_DOWN, TIE_UP, TIE_DOWN - 2**31):
        codes = assert_exact(torch.full((numel,), tie, dtype=torch.int32))
        assert bool((codes < HAS_NAN).all()) == (tie != TIE_UP)
    others = torch.arange(numel, dtype=torch.int32)  # as many different lower halves as possible
    for offset in (0, 0x7F80, 0xFFFF0000 - 2**32):
        bits = torch.where(others % 128 == 5, TIE_DOWN, 0x3F800000 + offset + others)
        assert_exact(bits.int())


@pytest.mark.parametrize("bits", [0x7FC00000, 0x7FFFFFFF, 0x7F800001, 0x7FA0FFFF, -1, -0x400000])
def test_nans_beside_ties_come_back(bits):
    row = torch.full((300,), bits, dtype=torch.int32)
    assert bool((assert_exact(row) == HAS_NAN).all())
    row[::3] = TIE_DOWN
    row[1::3] = 0x3F800000
    assert bool((assert_exact(row) < HAS_NAN).all())


def test_zeros_infinities_and_subnormals_are_plain():
    bits = torch.tensor([0, -(2**31), 0x7F800000, -0x800000, 1, 0x7FFF, 0x8001, 0x7F7FFFFF, 0x7F7F8000, 0x007FFFFF])
    assert bool((assert_exact(bits.int()) == PLAIN).all())


@settings(max_examples=30, deadline=None, derandomize=True)
@given(st.lists(st.sampled_from([TIE_DOWN, TIE_UP, 0, 1, 254, 255, 0x7FC01234, -1, 0x3F80FFFF]), max_size=300))
def test_any_row_comes_back(row):
    if row:
        assert_exact(torch.tensor(row, dtype=torch.int64).int())


@pytest.mark.parametrize("rounds", [False, True])
def test_no_row_need_be_left_out(rounds, monkeypatch):
    """Coding every row changes nothing: a device does not wait to learn which rows need it."""
    bits = torch.cat([patterns()[::7], torch.full((77,), TIE_DOWN, dtype=torch.int32)])
    want = stored(bits)
    choose = compact._chosen
    monkeypatch.setattr(compact, "_chosen", lambda wanted: choose(torch.ones_like(wanted)))
    monkeypatch.setattr(compact, "_rounds_bits", lambda: rounds)
    got = stored(bits)
    assert all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(want, got, strict=True))
    assert torch.equal(masters_of(*got).view(torch.int32), masters_of(*want).view(torch.int32))


def test_weights_that_a_cast_made_zero_are_rounded():
    bits = torch.arange(1, 2**23, 1001, dtype=torch.int32)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compact, "_rounds_bits", lambda: False)
        patch.setattr(torch.Tensor, "copy_", _flushing(torch.Tensor.copy_))
        weights, lower, codes = stored(bits)
    assert torch.equal(masters_of(weights, lower, codes).view(torch.int32), bits)


def _flushing(copy):
    def flushing(self, source, *args):
        is_cast = source.dtype == torch.float32 and self.dtype == torch.bfloat16
        return copy(self, torch.zeros_like(source) if is_cast else source, *args)

    return flushing


MAKES = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.1),
    "dyadic": lambda p: torch.optim.SGD(p, lr=2.0**-6),  # masters with few digits, and so many ties
    "lion": lambda p: Lion(p, lr=2.0**-9),
    "muon": lambda p: torch.optim.Muon(p, lr=1e-2),
    "adamw:8bit": lambda p: torch.optim.AdamW([{"params": p, "state_format": "8bit"}], lr=1e-2),
    "adamw:bf16": lambda p: torch.optim.AdamW([{"params": p, "state_format": "bf16"}], lr=1e-2),
}


class Run:
    """A parameter that is updated with an fp32 master, or with a compact one."""

    def __init__(self, name, shape, *, is_compact):
        master = random(math.prod(shape), 0).bfloat16().float()
        param = torch.nn.Parameter(master.view(shape).clone())
        optimizer = MAKES[name]([param])
        rule, groups = rule_for(optimizer), optimizer.param_groups
        kept = rule.kept(groups)(param, "float32")
        self.hyper, self.weights = rule.hyper(groups[0]), master.bfloat16()
        self.states = {
            form.name: torch.full((math.prod(shape if form.shape is None else form.shape),), form.initial).to(
                getattr(torch, form.dtype)
            )
            for form in kept.states
        }
        formats = {form.name: form.format for form in kept.states if form.format != "fp32"}
        self.master, self.like = master, torch.empty(shape, device="meta")
        if is_compact:
            lower = torch.empty(master.numel(), dtype=torch.int16)
            codes = torch.empty(-(-master.numel() // ROW_NUMEL), dtype=torch.uint8)
            close_masters(master, self.weights, lower, codes)
            self.states |= {"master": lower, CODES: codes}
            formats = {"master": "compact"} | formats
        self.codes = Codes(formats, 7) if formats else None
        self.is_compact = is_compact

    def step(self, number, grad, workers=1, scratch_bytes=2**20):
        piece = Piece(
            target=self.weights if self.is_compact else self.master,
            weights=None if self.is_compact else self.weights,
            grad=grad,
            states=self.states,
            step=number,
            hyper=self.hyper,
            codes=self.codes,
            likes={"": self.like},
            factors=(torch.tensor(0.5),) if number == 2 else (),
        )
        scratch = torch.full((scratch_bytes,), 0xFF, dtype=torch.uint8)
        for share in [[piece]] if piece.is_whole else split([piece], [1] * workers):
            update_blocks(share, scratch)

    def seen(self):
        """Return master, weights and moments, as bytes."""
        master = self.master
        if self.is_compact:
            master = masters_of(self.weights, self.states["master"], self.states[CODES])
        moments = [t for name, t in self.states.items() if name not in ("master", CODES)]
        return [t.view(torch.uint8) for t in (master, self.weights, *moments)]


@pytest.mark.parametrize("name", MAKES)
def test_an_update_has_the_bits_of_fp32_masters(name):
    shape = (72, 73)
    plain, whole, cut = (Run(name, shape, is_compact=is_compact) for is_compact in (False, True, True))
    had_ties = False
    for number in (1, 2, 3, 4):
        grad = random(72 * 73, number)
        grad = grad.bfloat16() if number % 2 else grad
        plain.step(number, grad)
        whole.step(number, grad)
        cut.step(number, grad, workers=3, scratch_bytes=30_000)
        for run in (whole, cut):
            for want, got in zip(plain.seen(), run.seen(), strict=True):
                assert torch.equal(want, got)
        had_ties |= bool((whole.states[CODES] < HAS_NAN).any())
    assert had_ties or name != "dyadic"


@pytest.mark.parametrize("chosen", ["bf16", None, 8])
def test_other_names_of_formats(chosen):
    param = torch.nn.Parameter(torch.zeros(5))
    optimizer = torch.optim.AdamW([{"params": [param], "master_format": chosen}])
    with pytest.raises(
        ConfigError, match=f"master_format to be one of fp32, compact in a param group, but got {chosen!r}"
    ):
        rule_for(optimizer).kept(optimizer.param_groups)(param, "float32")
