"""What two ranks see beyond the plain loop. Run as a program on both."""

from __future__ import annotations

import os

import pytest
import torch
from torch import distributed, nn

import outcore
from outcore.ranks.world import World

RANK = int(os.environ["RANK"])


def build(width: int = 40) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(1)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(3)])
    return model, torch.optim.AdamW(model.parameters(), fused=True)


def backward(model: nn.Module) -> None:
    torch.manual_seed(RANK)
    model(torch.randn(4, 40)).square().sum().backward()


def mean() -> list[torch.Tensor]:
    """Gradients of a plain model, averaged over the batches of both ranks."""
    model, _ = build()
    for rank in range(2):
        torch.manual_seed(rank)
        model(torch.randn(4, 40)).square().sum().backward()
    return [p.grad / 2 for p in model.parameters()]


def refuses(match: str, **options: object) -> None:
    with pytest.raises(outcore.OutcoreError, match=match):
        outcore.prepare(*build(), device="cpu", **options)


def test_refusals() -> None:
    refuses("expected one rank with micro_batches_in_unit", micro_batches_in_unit=2)
    refuses("clipping= of rank 1 differs from rank 0's", clipping=not RANK)
    with pytest.raises(outcore.ConfigError, match="unit '0' of rank 1 differs from rank 0's"):
        outcore.prepare(*build(40 + RANK), device="cpu")
    for what in ("settings", "parameters"):
        model, optimizer = build()
        group = optimizer.param_groups[0]
        group |= {"lr": 0.1 + RANK} if what == "settings" else {"params": list(model.parameters())[RANK:]}
        with pytest.raises(outcore.ConfigError, match="param group 0 of rank 1 differs from rank 0's"):
            outcore.prepare(model, optimizer, device="cpu")
    with pytest.raises(outcore.OutcoreError) as refusal:
        outcore.prepare(*build(), device="cpu", budget=outcore.Budget(device="4KB", host="4KB"))
    assert "rank 0 said: " in str(refusal.value) if RANK else isinstance(refusal.value, outcore.PlanInfeasibleError)


def test_gradients() -> None:
    with outcore.prepare(*build(), device="cpu") as (model, optimizer):
        backward(model)
        wanted = mean()
        assert all(torch.equal(p.grad.clone(), g) for p, g in zip(model.parameters(), wanted, strict=True))
        first = next(model.parameters())
        assert torch.equal(first.grad.abs().sum(), wanted[0].abs().sum())
        infinite = torch.linalg.vector_norm(first.grad, float("inf"))
        assert torch.equal(infinite, torch.linalg.vector_norm(wanted[0], float("inf")))
        first.grad.clamp_(-0.1, 0.1)
        assert torch.equal(first.grad.clone(), wanted[0].clamp(-0.1, 0.1))
        first.grad.copy_(wanted[1].new_ones(40, 40))
        assert torch.equal(first.grad.clone(), torch.ones(40, 40))
        norm = nn.utils.clip_grad_norm_([first], 1e9)
        assert float(norm) == 40.0
        with pytest.raises(outcore.UnsupportedError, match="change gradients after the last backward"):
            backward(model)


def test_nodes_of_different_sizes() -> None:
    """Each rank knows only the size of its own node, but all must share memory in the same way."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("LOCAL_WORLD_SIZE", str(2 - RANK))
        with outcore.prepare(*build(), device="cpu") as (model, optimizer):
            assert optimizer.engine.access.world.local_size == 2
            backward(model)
            assert all(torch.equal(p.grad.clone(), g) for p, g in zip(model.parameters(), mean(), strict=True))
            optimizer.step()


def test_one_rank_alone() -> None:
    """A rank's loss may reach nothing of a unit; states are cut, and whole when they are read."""
    with outcore.prepare(*build(), device="cpu") as (model, optimizer):
        states = [unit.ledger.states.nbytes for unit in optimizer.engine.units]
        alone = [2 * 4 * (40 * 40 + 64) for _ in states]
        assert all(mine <= 0.5 * whole + 2 * 8192 for mine, whole in zip(states[1:], alone[1:], strict=True))
        backward(model)
        assert all(p.grad is not None for p in model.parameters())
        optimizer.step()
        assert optimizer.state_dict()["state"][0]["exp_avg"].shape == (40, 40)
        state = optimizer.state[next(model.parameters())]
        state["exp_avg"].fill_(2.0)
        assert bool((state["exp_avg"] == 2).all())
        saved = optimizer.state_dict()
        optimizer.load_state_dict(saved)
        assert torch.equal(optimizer.state_dict()["state"][0]["exp_avg"], torch.full((40, 40), 2.0))


def test_nothing_is_trained() -> None:
    """A backward through a model without an optimizer gives its input's gradient, and exchanges nothing."""
    torch.manual_seed(RANK)
    x = torch.randn(4, 40, requires_grad=True)
    build()[0](x).square().sum().backward()
    wanted, x.grad = x.grad, None
    with outcore.prepare(build()[0], None, device="cpu", budget=outcore.Budget(device="60KB")) as (model, _):
        model(x).square().sum().backward()
    assert torch.equal(x.grad, wanted)


def test_budget_is_a_nodes() -> None:
    budget = outcore.Budget(device="60KB", host="1MB")
    with outcore.prepare(*build(), device="cpu", budget=budget) as (_, optimizer):
        assert 0 < optimizer.plan.tier_bytes["host"] <= 500_000
        assert all(unit.states != "disk" for unit in optimizer.plan.units)
        assert not optimizer.plan.plain


def test_scaler() -> None:
    with outcore.prepare(*build(), device="cpu") as (model, optimizer):
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        torch.manual_seed(RANK)
        loss = model(torch.randn(4, 40)).square().sum() * (float("inf") if RANK else 1.0)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() == 2.0  # both ranks know of the infinity on one
        optimizer.zero_grad()
        torch.manual_seed(RANK)
        scaler.scale(model(torch.randn(4, 40)).square().sum()).backward()
        scaler.unscale_(optimizer)
        assert all(torch.equal(p.grad.clone(), g) for p, g in zip(model.parameters(), mean(), strict=True))
        scaler.step(optimizer)


def test_fast() -> None:
    """One exchange per step; the result is equal up to rounding."""
    found = {}
    for how in ("exact", "fast"):
        options = {"accumulation_steps": 3, "reduction": how, "budget": outcore.Budget(device="200KB")}
        with outcore.prepare(*build(), device="cpu", **options) as (model, optimizer):
            exchanges = []
            exchange = World.exchange
            World.exchange = lambda *args: exchanges.append(args[4]) or exchange(*args)  # type: ignore[method-assign]
            for step in range(2):
                for _ in range(3):
                    if how == "fast":
                        assert all(p.grad is None for p in model.parameters())
                    torch.manual_seed(10 * step + RANK)
                    model(torch.randn(4, 40)).square().sum().backward()
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            World.exchange = exchange  # type: ignore[method-assign]
            assert len(exchanges) == len(set(exchanges)) * 2 * (1 if how == "fast" else 3), exchanges
            found[how] = [p.clone() for p in model.state_dict().values()]
    assert all(torch.allclose(a, b, rtol=1e-5, atol=1e-6) for a, b in zip(*found.values(), strict=True))
    refuses("expected accumulation_steps with reduction='fast'", reduction="fast")
    with outcore.prepare(*build(), device="cpu", accumulation_steps=2, reduction="fast") as (model, optimizer):
        backward(model)
        with pytest.raises(outcore.UnsupportedError, match="expected 2 backward passes before optimizer.step"):
            optimizer.step()
        optimizer.zero_grad()
        for _ in range(2):
            backward(model)
        assert all(torch.equal(p.grad.clone(), 2 * g) for p, g in zip(model.parameters(), mean(), strict=True))


def main() -> None:
    for name, test in list(globals().items()):
        if name.startswith("test_"):
            test()
            print(name, flush=True)
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
