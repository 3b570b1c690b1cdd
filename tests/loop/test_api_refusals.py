"""What cannot work is refused in one sentence, and the existing run goes on."""

from __future__ import annotations

import functools
import threading

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import outcore
from outcore.device import opening as device_open
from outcore.device.cpu import CpuDevice
from outcore.device.cuda import CudaDevice

from .rig import DEVICE, Block, Tower, adamw, batch, make, prepared, train

POLICY = pytest.mark.parametrize("policy", ["keep", "recompute"])


class Checkpointed(Block):
    reentrant = True

    def forward(self, x):
        return checkpoint(super().forward, x, use_reentrant=self.reentrant)


@POLICY
def test_a_reentrant_checkpoint_inside_of_a_unit(policy, tmp_path):
    model = make(lambda: Tower(Checkpointed))
    with prepared(model, adamw(model), "host", tmp_path, policy=policy) as (model, optimizer):
        with pytest.raises(outcore.UnsupportedError, match="pass use_reentrant=False, or leave the checkpoint out"):
            model.loss(batch()).backward()
        optimizer.zero_grad()
        Checkpointed.reentrant = False
        try:
            train(model, optimizer)
        finally:
            Checkpointed.reentrant = True


class Calling(Block):
    other = None

    def forward(self, x):
        return super().forward(x) + (0 if self.other is None else self.other[0](x))


def calling():
    tower = Tower(Calling)
    tower.blocks[0].other = (tower.blocks[1],)  # not a submodule of it
    return tower


@POLICY
@pytest.mark.parametrize(("kind", "depth"), [("device", 0), ("host", 0), ("host", 1)])
def test_a_unit_that_calls_another(policy, kind, depth, tmp_path):
    model = make(calling)
    with prepared(model, adamw(model), kind, tmp_path, policy=policy, depth=depth) as (model, optimizer):
        for _ in range(2):
            with pytest.raises(outcore.UnsupportedError, match=r"unit 'blocks.1': .*another unit's forward calls it"):
                model.loss(batch())
        model.blocks[0].other = None
        train(model, optimizer)
    with prepared(make(calling), None, "host", tmp_path, depth=1) as (model, _), torch.no_grad():
        assert torch.equal(model.eval()(batch()), make(calling).eval()(batch()))


class Waiting(Block):
    gate = None

    def forward(self, x):
        gate = self.gate
        if gate is not None:
            gate.wait(5)
            gate.wait(5)
        return super().forward(x)


def test_two_threads_in_forward(tmp_path):
    model = make(lambda: Tower(Waiting))
    with prepared(model, adamw(model), "host", tmp_path) as (model, optimizer):
        train(model, optimizer)
        Waiting.gate = threading.Barrier(2)
        other = threading.Thread(target=lambda: model.blocks[0](model.embed(batch())))
        other.start()
        Waiting.gate.wait(5)  # it is inside of its block
        gate, Waiting.gate = Waiting.gate, None
        with pytest.raises(outcore.UnsupportedError, match="one thread at a time.*let one thread run the model"):
            model.loss(batch())
        gate.wait(5)
        other.join()
        train(model, optimizer)


@pytest.mark.parametrize(
    ("cuda", "reason"),
    [
        (None, r"was built without CUDA and ROCm; install one"),
        ("12.8", r"built for CUDA 12.8\) sees none; look at nvidia"),
    ],
)
def test_no_gpu(cuda, reason, monkeypatch):
    monkeypatch.setattr(device_open.torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(device_open.torch.version, "cuda", cuda)
    model = make()
    with pytest.raises(outcore.UnsupportedError, match=f"expected a GPU for 'cuda', but this torch .*{reason}"):
        outcore.prepare(model, adamw(model), device="cuda")


def test_out_of_device_memory_in_prepare(tmp_path, monkeypatch):
    def fail(self, nbytes, **_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    model = make()
    before = {n: t.clone() for n, t in model.state_dict().items()}
    with monkeypatch.context() as patch:
        patch.setattr(CpuDevice if DEVICE == "cpu" else CudaDevice, "allocate", fail)
        with (
            pytest.raises(outcore.MemoryBudgetError, match=r"expected [\d.]+ .*, but [\d.]+ .* are free.*as it was"),
            prepared(model, adamw(model), "disk", tmp_path),
        ):
            pass
    assert list(tmp_path.iterdir()) == []
    assert all(torch.equal(t, before[n]) for n, t in model.state_dict().items())
    with prepared(model, adamw(model), "disk", tmp_path) as (model, optimizer):
        train(model, optimizer)


@pytest.mark.parametrize(
    "options", [{"units": ["nosuch"]}, {"budget": outcore.Budget(device=100, host=100)}], ids=["units", "budget"]
)
def test_a_refused_prepare_leaves_parameters_trainable(options):
    model = make()
    want = [p.requires_grad for p in model.parameters()]
    with pytest.raises(outcore.OutcoreError):
        outcore.prepare(model, None, device=DEVICE, **options)
    assert [p.requires_grad for p in model.parameters()] == want


@pytest.mark.skipif(not hasattr(torch.Tensor, "grad_dtype"), reason="this torch has no grad_dtype")
def test_a_refused_prepare_leaves_the_dtypes_of_gradients(tmp_path):
    model = make(dtype=torch.bfloat16)
    optimizer, first = adamw(model), next(model.parameters())
    first.grad_dtype = torch.float32
    optimizer.state[first] = {"exp_avg": torch.zeros(3)}
    want = [p.grad_dtype for p in model.parameters()]
    with pytest.raises(outcore.ConfigError) as refusal:
        outcore.prepare(model, optimizer, device=DEVICE, precision="bf16", budget=outcore.Budget(disk=str(tmp_path)))
    assert "those that had values keep them" in refusal.value.__notes__[0]
    assert [p.grad_dtype for p in model.parameters()] == want


@pytest.mark.filterwarnings("error:outcore recomputes units itself")
def test_a_warning_that_is_an_error_comes_when_all_is_done():
    model = make()
    model.gradient_checkpointing = True
    before = {n: t.clone() for n, t in model.state_dict().items()}
    with pytest.raises(UserWarning, match="activation checkpointing was switched off"):
        outcore.prepare(model, adamw(model), device=DEVICE)
    outcore.close(model)
    assert all(torch.equal(t, before[n]) for n, t in model.state_dict().items())


@pytest.mark.parametrize("sample", [(1,), torch.zeros(2, 3), "batch"], ids=["tuple", "tensor", "text"])
def test_a_sample_is_keyword_arguments(sample, tmp_path):
    model = make()
    with pytest.raises(outcore.ConfigError, match="expected sample to be keyword arguments"):
        outcore.prepare(model, adamw(model), budget=outcore.Budget(disk=str(tmp_path)), sample=sample)


@pytest.mark.parametrize(
    ("argument", "value", "says"),
    [
        ("budget", "8GiB", "expected an outcore.Budget or None as budget, but got '8GiB'; build one"),
        ("plan", "plan.json", "expected an outcore.Plan .* but got 'plan.json'; read one .* outcore.Plan.load"),
        ("clipping", None, "expected True or False as clipping, but got None"),
        ("units", 3, "expected a list of classes or names of modules, or None as units, but got 3"),
        ("weights", 3, "expected a folder or None as weights, but got 3"),
        ("checkpoint", 3, "expected a folder or None as checkpoint, but got 3"),
        ("hardware", 3, "expected a JSON file, names of parts, 'none', or None for this machine, but got 3"),
        ("hardware", "nope-gpu", "expected a JSON file, or names of parts .* but got 'nope-gpu'"),
        ("sample", {"idz": batch()}, r"keyword arguments of Tower.forward\(ids: .*, but got 'idz': missing .* 'ids'"),
        ("sample", {"ids": 3}, "expected a sample with tensors, .* but got {'ids': 3}"),
    ],
)
def test_wrong_arguments_are_refused_where_everything_fits_too(argument, value, says):
    model = make()
    with pytest.raises(outcore.ConfigError, match=says):
        outcore.prepare(model, adamw(model), device=DEVICE, **{argument: value})
    train(model, adamw(model))


class Renamed(Tower):
    def __call__(self, **arguments):
        return super().__call__(arguments["other"])


@functools.wraps(Tower.forward)
def taking_anything(self, *args, **kwargs):
    return Tower.forward(self, *args, *kwargs.values())


class Wrapped(Tower):
    forward = taking_anything


def with_hook():
    model = Tower()
    model.register_forward_pre_hook(lambda _, args, kwargs: ((kwargs["other"],), {}), with_kwargs=True)
    return model


@pytest.mark.parametrize("build", [Renamed, Wrapped, with_hook])
def test_what_changes_the_arguments_of_forward_may_take_others(build):
    model = make(build)
    model, _ = outcore.prepare(model, adamw(model), device=DEVICE, sample={"other": batch()})
    outcore.close(model)


def test_arguments_of_other_types(tmp_path):
    model = Tower()
    with pytest.raises(outcore.ConfigError, match="expected a torch.nn.Module as model, but got a dict"):
        outcore.prepare({}, adamw(model), device=DEVICE)
    with pytest.raises(outcore.ConfigError, match="Optimizer or None as optimizer, but got a LambdaLR"):
        scheduler = torch.optim.lr_scheduler.LambdaLR(adamw(model), lambda _: 1.0)
        outcore.prepare(model, scheduler, device=DEVICE)
    with pytest.raises(outcore.ConfigError, match="expected an optimizer beside checkpoint=, but got none"):
        outcore.prepare(model, None, checkpoint=tmp_path, device=DEVICE)
    with pytest.raises(outcore.ConfigError, match="expected sample to be keyword arguments .* but got a Tensor"):
        outcore.prepare(model, adamw(model), sample=batch(), device=DEVICE)
    with pytest.raises(outcore.ConfigError, match="expected reduction to be one of .*, but got 'sum'"):
        outcore.prepare(model, adamw(model), reduction="sum", device=DEVICE)
    with pytest.raises(outcore.ConfigError, match="expected a model that outcore.prepare.. returned, but got a Tower"):
        outcore.close(model)
    train(model, adamw(model))
