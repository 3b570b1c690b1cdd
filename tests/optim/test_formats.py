"""States in bf16 and in 8 bits: what is stored, and that it does not depend on how parameters are cut."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outcore.core.errors import ConfigError
from outcore.optim import Lion, Rule, State, formats
from outcore.optim.blocks import update_blocks
from outcore.optim.formats import Codes, codes_of, decode, encode
from outcore.optim.piece import Piece, split
from outcore.optim.rules import rule_for
from outcore.spec.layout import NOISE_BYTES

from .update_cases import assert_same_bits, random

MAKES = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.1),
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-2, centered=True),
    "nadam": lambda p: torch.optim.NAdam(p, lr=1e-2),
    "lion": lambda p: Lion(p, lr=1e-2),
}


class Run:
    """One parameter whose states are stored in a format, updated with any cuts."""

    def __init__(self, name, chosen, numel):
        param = torch.nn.Parameter(random(numel, 0))
        optimizer = MAKES[name]([param])
        optimizer.param_groups[0]["state_format"] = chosen
        self.rule, group = rule_for(optimizer), optimizer.param_groups[0]
        kept = self.rule.kept(optimizer.param_groups)(param, "float32")
        self.codes, self.hyper = codes_of(kept.states, "w"), self.rule.hyper(group)
        self.target, self.numel = param.detach().clone(), numel
        self.states, self.numbers = {}, {}
        for form in kept.states:
            shape = numel if form.shape is None else form.shape or (1,)
            self.states[form.name] = torch.full((shape,) if isinstance(shape, int) else shape, form.initial)
            self.states[form.name] = self.states[form.name].to(getattr(torch, form.dtype))
            if form.shape == ():
                self.numbers[form.name] = form.initial

    def step(self, number, grad, workers=1, scratch_bytes=2**20):
        given = {"target": self.target, "states": self.states, "hyper": self.hyper, "codes": self.codes}
        piece = Piece(grad=grad, weights=None, step=number, numbers=self.numbers, **given)
        scratch = torch.full((scratch_bytes,), 0xFF, dtype=torch.uint8)
        for share in split([piece], [1] * workers):
            update_blocks(share, scratch)

    def bits(self):
        return [t.view(torch.uint8) for t in (self.target, *self.states.values())]


@pytest.mark.parametrize("chosen", ["bf16", "8bit"])
@pytest.mark.parametrize("name", MAKES)
def test_cuts_do_not_change_what_is_stored(name, chosen):
    numel = 4096 + 1000
    whole, cut = Run(name, chosen, numel), Run(name, chosen, numel)
    for number in (1, 2, 3):
        grad = random(numel, number)
        whole.step(number, grad)
        cut.step(number, grad, workers=3, scratch_bytes=24_000)
    for a, b in zip(cut.bits(), whole.bits(), strict=True):
        assert torch.equal(a, b)
    assert not any(t.isnan().any() for t in whole.states.values())


@settings(max_examples=15, deadline=None, derandomize=True)
@given(
    numel=st.integers(4096, 9000),
    room=st.integers(12_000, 200_000),
    workers=st.integers(1, 5),
    chosen=st.sampled_from(["bf16", "8bit"]),
)
def test_any_cut_gives_the_same_bits(numel, room, workers, chosen):
    whole, cut = Run("adamw", chosen, numel), Run("adamw", chosen, numel)
    grad = random(numel, 1)
    whole.step(1, grad, scratch_bytes=2**22)
    cut.step(1, grad, workers, room)
    for a, b in zip(cut.bits(), whole.bits(), strict=True):
        assert torch.equal(a, b)


def test_a_step_is_the_fp32_step_of_what_was_stored():
    """Only the rounding of states lies between two steps."""
    run, numel = Run("adamw", "bf16", 5000), 5000
    param = torch.nn.Parameter(run.target.clone())
    plain = torch.optim.AdamW([param], lr=1e-2, weight_decay=0.1, fused=True)
    for number in (1, 2, 3):
        if number > 1:
            for name in ("exp_avg", "exp_avg_sq"):
                plain.state[param][name].copy_(run.states[name])
        param.grad = random(numel, number)
        plain.step()
        run.step(number, param.grad)
        assert_same_bits([run.target], [param.detach()])
        for name in ("exp_avg", "exp_avg_sq"):  # each value is rounded to one of its two neighbours
            exact, stored = plain.state[param][name], run.states[name].float()
            assert bool(((stored - exact).abs() <= exact.abs() * 2**-7).all())


def test_rounding_is_right_on_average_and_differs_from_step_to_step():
    codes, value, states = Codes({"m": "bf16"}, 7), 1.0 + 2**-10, {"m": torch.zeros(2**16, dtype=torch.bfloat16)}
    seen = []
    for step in range(1, 17):
        encode("m", states, codes, torch.full((2**16,), value), 0, step)
        seen.append(states["m"].float())
    assert set(torch.cat(seen).unique().tolist()) == {1.0, 1.0 + 2**-7}
    mean = torch.stack(seen).double().mean()
    assert abs(float(mean) - value) < 5 * 2**-7 * 0.34 / 1024  # five standard deviations of the mean of 2**20 draws
    assert float((seen[0] == seen[1]).float().mean()) < 0.9
    up = torch.stack([s > 1 for s in seen]).double()
    assert abs(float((up[:, 1:] * up[:, :-1]).mean()) - 1 / 64) < 1e-3  # neighbours are independent


@pytest.mark.parametrize("value", [float("inf"), -float("inf"), 0.0, -0.0, 1.5])
def test_what_bf16_has_stays_as_it_is(value):
    states = {"m": torch.zeros(300, dtype=torch.bfloat16)}
    encode("m", states, Codes({"m": "bf16"}, 7), torch.full((300,), value), 0, 1)
    assert torch.equal(states["m"].view(torch.int16), torch.full((300,), value, dtype=torch.bfloat16).view(torch.int16))
    for bits in (-1, 0x7FFFFFFF, 0x7F800001, 0x7FC00000):  # NaNs, which noise could turn into numbers
        encode(
            "m", states, Codes({"m": "bf16"}, 7), torch.full((300,), bits, dtype=torch.int32).view(torch.float32), 0, 1
        )
        assert bool(states["m"].isnan().all())


def test_noise_is_the_same_in_small_pieces():
    codes, value, step = Codes({"m": "bf16"}, 65521 - 100), 1.0 + 2**-10, 3
    whole = {"m": torch.zeros(2**16, dtype=torch.bfloat16)}
    encode("m", whole, codes, torch.full((2**16,), value), 0, step)
    for start, stop in ((0, 64), (64, 8000), (65000, 65536)):
        part = {"m": torch.zeros(stop - start, dtype=torch.bfloat16)}
        encode("m", part, codes, torch.full((stop - start,), value), start, step)
        assert torch.equal(part["m"], whole["m"][start:stop])


def test_noise_of_small_parameters_is_not_kept():
    formats.forget_noise()
    states = {"m": torch.zeros(64, dtype=torch.bfloat16)}
    encode("m", states, Codes({"m": "bf16"}, 7), torch.ones(64), 0, 1)
    assert formats._period_on_host.cache_info().currsize == 0
    large = {"m": torch.zeros(2**16, dtype=torch.bfloat16)}
    encode("m", large, Codes({"m": "bf16"}, 7), torch.ones(2**16), 0, 1)
    info, kept = formats._period_on_host.cache_info(), formats._period_on_host(7, 1)
    assert info.currsize == 1
    assert 8 <= info.maxsize <= NOISE_BYTES // kept.nbytes  # plans count this many bytes


class Signed(Rule):
    """One of its states has a name that torch uses for a state that is never negative."""

    def states(self, shape, settings):
        return {"sum": State(), "squares": State(is_unsigned=True), "own": State(dtype=torch.bfloat16)}

    def update(self, weight, grad, states, step, settings):
        states["sum"].add_(grad)
        states["squares"].addcmul_(grad, grad)


def test_a_rule_says_which_states_are_never_negative():
    MAKES["signed"] = lambda p: Signed(p, {"lr": 1e-2})
    run, grad = Run("signed", "8bit", 5000), random(5000, 1)
    assert run.codes == Codes({"sum": "8bit", "squares": "8bit"}, run.codes.seed, frozenset({"squares"}))
    run.step(1, grad)
    got = {name: decode(name, run.states, run.codes, torch.empty(5120)) for name in ("sum", "squares")}
    assert float((got["sum"] - grad).abs().max()) < 0.1
    table = dynamic_map(is_signed=False)[run.states["squares"].long()]
    assert torch.equal(got["squares"], table * run.states["squares_absmax"].repeat_interleave(256)[:5000])


@pytest.mark.parametrize("name", ["exp_avg", "exp_avg_sq"])
def test_8_bits_are_those_of_others(name):
    """They follow bitsandbytes: maps, the scale of 256 elements, and the nearest code (``argmin`` in its reference
    kernel). They equal torchao's, too.
    """
    x = random(2**14 + 77, 1) * random(2**14 + 77, 2).exp() ** 4
    x = x.square() if name == "exp_avg_sq" else x
    x[:256] = 0
    numel = -(-len(x) // 256)
    states = {name: torch.zeros(len(x), dtype=torch.uint8), f"{name}_absmax": torch.zeros(numel)}
    room, codes = torch.full((numel * 256,), torch.nan), Codes({name: "8bit"}, 0, frozenset({"exp_avg_sq"}))
    room[: len(x)] = x
    encode(name, states, codes, room, 0, 1)
    padded = torch.nn.functional.pad(x, (0, numel * 256 - len(x))).view(-1, 256)
    scale = padded.abs().amax(1)
    table = dynamic_map(is_signed=name == "exp_avg")
    normed = (padded * (1 / scale)[:, None]).clamp(-1, 1).view(-1)[256 : len(x)]
    assert torch.equal(states[f"{name}_absmax"], scale)
    assert torch.equal(states[name][256:].long(), (normed[:, None] - table).abs().argmin(1))
    got = decode(name, states, codes, room)
    assert torch.equal(got[256:], (table[states[name].long()][256:] * scale.repeat_interleave(256)[256 : len(x)]))
    assert not got[:256].any()
    ao = pytest.importorskip("torchao.optim.quant_utils")
    table = torch.tensor(ao.create_dynamic_map(signed=name == "exp_avg"))
    normed, scale = ao.scale_tensor(padded[1:].reshape(-1), 256)
    assert torch.equal(states[name][256:], ao.quantize_8bit_with_qmap(normed, table)[: len(x) - 256])
    assert torch.equal(states[f"{name}_absmax"][1:], scale)


def dynamic_map(*, is_signed):
    """Build ``bitsandbytes.functional.create_dynamic_map``, for 7 exponent bits and 8 bits in all."""
    data = [0.0, 1.0]
    for i in range(7):
        bounds = torch.linspace(0.1, 1, (2**i if is_signed else 2 ** (i + 1)) + 1)
        data += (10.0 ** (i - 6) * ((bounds[:-1] + bounds[1:]) / 2)).tolist()
        data += (-(10.0 ** (i - 6)) * ((bounds[:-1] + bounds[1:]) / 2)).tolist() if is_signed else []
    return torch.tensor(sorted(data))


@pytest.mark.parametrize(
    ("make", "dtype", "chosen", "message"),
    [
        (
            torch.optim.AdamW,
            "float32",
            "int4",
            "one of fp32, bf16, 8bit in a param group, but got 'int4'",
        ),
        (torch.optim.AdamW, "float64", "8bit", "AdamW, whose parameters are updated in float64, but got '8bit'"),
        (torch.optim.Adafactor, "float32", "bf16", "Adafactor, which updates whole parameters, but got 'bf16'"),
    ],
)
def test_formats_that_do_not_fit(make, dtype, chosen, message):
    param = torch.nn.Parameter(torch.zeros(5000))
    optimizer = make([{"params": [param], "state_format": chosen}])
    with pytest.raises(ConfigError, match=message):
        rule_for(optimizer).kept(optimizer.param_groups)(param, dtype)


def test_what_is_slower_is_said_to_be():
    """The planner reads this cost."""
    cost = {}
    for name, chosen in (("adamw", "fp32"), ("adamw", "bf16"), ("adamw", "8bit"), ("lion", "fp32")):
        make = MAKES[name]
        param = torch.nn.Parameter(torch.zeros(5000))
        groups = make([param]).param_groups
        groups[0]["state_format"] = chosen
        cost[len(cost)] = rule_for(make([param])).kept(groups)(param, "float32").cost
    assert cost[0] == 1.0 < cost[3] < cost[1] < cost[2]
