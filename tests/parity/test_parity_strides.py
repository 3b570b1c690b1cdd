"""Parameters that are not row-major: strides choose the kernels, so they must stay as they are."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import outcore
from outcore.core.errors import UnsupportedError

from . import zoo
from .cases import KINDS, PRECISIONS, Case, run, run_checked
from .loops import Setting, assert_equal, plain_loop

STEPS = 3


class Piece(nn.Module):
    """Convolutions of every kind: dense, grouped, 1x1 (whose strides are ambiguous), transposed."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(width, 2 * width, 3, padding=1)
        self.norm = nn.BatchNorm2d(2 * width)
        self.grouped = nn.Conv2d(2 * width, 2 * width, 3, padding=1, groups=2 * width, bias=False)
        self.point = nn.Conv2d(2 * width, width, 1)
        self.up = nn.ConvTranspose2d(width, width, (3, 1), padding=(1, 0))
        self.frozen = nn.Conv2d(width, width, 3, padding=1).requires_grad_(requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = nn.functional.gelu(self.norm(self.first(x)))
        return x + self.frozen(self.up(self.point(self.grouped(y))))


class Images(nn.Module):
    def __init__(self, width: int = 12) -> None:
        super().__init__()
        self.embed = nn.Embedding(zoo.VOCAB, width)
        self.stem = nn.Conv2d(width, width, 3, padding=1)
        self.pieces = nn.ModuleList(Piece(width) for _ in range(3))
        self.head = nn.Linear(width, zoo.VOCAB)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> SimpleNamespace:
        x = self.embed(input_ids).permute(0, 2, 1)[..., None].expand(-1, -1, -1, 3)
        x = self.stem(x.contiguous(memory_format=torch.channels_last))
        for piece in self.pieces:
            x = piece(x)
        logits = self.head(x.mean(3).permute(0, 2, 1))
        return SimpleNamespace(loss=nn.functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten()))


def transpose(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.weight.data = module.weight.data.t().contiguous().t()


@pytest.fixture(autouse=True)
def images(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(zoo._BUILDERS, "images", lambda dtype: Images().to(dtype, memory_format=torch.channels_last))


def same_strides(name: str, setting: Setting, streamed: Any, edit: Any = None) -> None:
    plain = plain_loop(name, setting, edit=edit)
    assert_equal(plain, streamed)
    for kind in ("tensors", "state_dict", "moments"):
        want, got = ({n: strides_of(t) for n, t in getattr(r, kind).items()} for r in (plain, streamed))
        assert want == {n: got[n] for n in want}
    assert any(n != "embed.weight" and not t.is_contiguous() for n, t in plain.tensors.items())


def strides_of(value: Any) -> Any:
    return value.stride() if isinstance(value, torch.Tensor) else {n: t.stride() for n, t in value.items()}


@pytest.mark.parametrize(
    ("kind", "precision"), [*((k, PRECISIONS[i % 3]) for i, k in enumerate(KINDS)), ("mixed", "bf16")]
)
def test_convolutions_in_channels_last(kind: str, precision: str, tmp_path: Path) -> None:
    case = Case("images", kind, Setting(steps=STEPS, precision=precision, micro_batches=2), policy="mixed", offset=3)
    same_strides(case.name, case.setting, run_checked(case, tmp_path, poison=True))


@pytest.mark.parametrize(("kind", "precision"), [(k, PRECISIONS[i % 2]) for i, k in enumerate(KINDS)])
def test_transposed_weights(kind: str, precision: str, tmp_path: Path) -> None:
    case = Case("patchwork", kind, Setting(steps=STEPS, precision=precision, clipping="always"), policy="mixed")
    same_strides(case.name, case.setting, run(case, tmp_path, edit=transpose), edit=transpose)


@pytest.mark.parametrize(("kind", "optimizer"), [("host", "nesterov"), ("disk", "adamw"), ("mixed", "nesterov")])
def test_early_and_staged_updates(kind: str, optimizer: str, tmp_path: Path) -> None:
    setting = Setting(steps=STEPS, precision="bf16", micro_batches=2, clipping="off", optimizer=optimizer)
    case = Case("images", kind, setting, promised=True, early=kind != "mixed", share=0.5 * (kind == "mixed"), offset=5)
    same_strides(case.name, case.setting, run_checked(case, tmp_path, poison=True))


def test_gradients_on_demand(tmp_path: Path) -> None:
    def grads_of(model: nn.Module) -> list[torch.Tensor]:
        zoo.loss(model, zoo.batches("images")[0]).backward()
        norms = [
            p.grad.norm(3) if p.grad is not None else torch.zeros((), device=zoo.DEVICE) for p in model.parameters()
        ]
        clipped = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        grads[3][0] *= 3.0
        return [*norms, clipped, *(grad.clone() for grad in grads)]

    want = grads_of(zoo.make("images").to(zoo.DEVICE))
    model = zoo.make("images")
    strides = {n: p.stride() for n, p in model.named_parameters()}
    optimizer = torch.optim.AdamW(model.parameters())
    plan = Case("images", "disk").plan(model, optimizer)
    with outcore.prepare(model, optimizer, plan=plan, budget=outcore.Budget(disk=tmp_path)) as (model, _):
        got = grads_of(model)
        assert all(map(torch.equal, want, got))
        assert [t.stride() for t in got] == [t.stride() for t in want]
        assert all(p.grad.stride() == strides[n] for n, p in model.named_parameters() if p.grad is not None)
        with outcore.gathered(model):
            assert {n: p.stride() for n, p in model.named_parameters()} == strides


def prepared(model: nn.Module, folder: Path, **options: Any) -> Any:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    plan = Case("images", "disk").plan(model, optimizer)
    return outcore.prepare(model, optimizer, plan=plan, budget=outcore.Budget(disk=folder), **options)


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    zoo.loss(model, zoo.batches("images")[0]).backward()
    optimizer.step()
    optimizer.zero_grad()


def test_saving_and_loading(tmp_path: Path) -> None:
    with prepared(zoo.make("images"), tmp_path) as (model, optimizer):
        step(model, optimizer)
        weights, states = {n: t.clone() for n, t in model.state_dict().items()}, optimizer.state_dict()
        outcore.save_pretrained(model, tmp_path / "saved")
        step(model, optimizer)
        want = model.state_dict()
    with torch.device("meta"):
        empty = zoo._BUILDERS["images"](torch.float32).train()
    for made, options in ((zoo.make("images", seed=3), {}), (empty, {"weights": tmp_path / "saved"})):
        with prepared(made, tmp_path, **options) as (model, optimizer):
            if not options:
                model.load_state_dict(weights)
            for name, value in model.state_dict().items():
                assert torch.equal(value, weights[name])
                assert value.stride() == weights[name].stride()
            optimizer.load_state_dict(states)
            step(model, optimizer)
            assert all(torch.equal(value, want[name]) for name, value in model.state_dict().items())


def test_an_edit_of_a_gathered_parameter(tmp_path: Path) -> None:
    with prepared(zoo.make("images"), tmp_path) as (model, _):
        weight = model.pieces[1].first.weight
        value = torch.randn(weight.shape)
        with outcore.gathered(weight, write=True), torch.no_grad():
            weight.copy_(value)
        assert torch.equal(dict(outcore.named_tensors(model))["pieces.1.first.weight"], value)
        with (
            pytest.raises(UnsupportedError, match=r"keep strides .* copy the values in"),
            outcore.gathered(weight, write=True),
        ):
            weight.data = value


def test_another_memory_format_is_refused_once_prepared(tmp_path: Path) -> None:
    with prepared(zoo.make("images"), tmp_path) as (model, _):
        model.to(memory_format=torch.channels_last)  # as it is
        with pytest.raises(UnsupportedError, match="in another memory format"):
            model.to(memory_format=torch.contiguous_format)


def test_data_in_another_order_is_refused(tmp_path: Path) -> None:
    with prepared(zoo.make("images"), tmp_path) as (model, optimizer):
        zoo.loss(model, zoo.batches("images")[0]).backward()
        model.stem.weight.data = torch.randn(model.stem.weight.shape)
        with pytest.raises(UnsupportedError, match=r"'stem.weight' to keep strides"):
            optimizer.step()


@pytest.mark.parametrize("trained", [True, False])
@pytest.mark.parametrize("value", [torch.randn(1, 12).expand(61, 12), torch.randn(61, 24)[:, ::2]], ids=["one", "gaps"])
def test_gaps_and_overlap_are_refused(value: torch.Tensor, *, trained: bool) -> None:
    model = Images()
    model.head.weight = nn.Parameter(value, requires_grad=trained)
    with pytest.raises(UnsupportedError, match=r"'head.weight' of shape \(61, 12\) has strides .*clone\("):
        outcore.prepare(model, torch.optim.AdamW(model.parameters()))
