"""``optimizer.state`` that a loop clears, writes before the first step, or takes away and puts back."""

from __future__ import annotations

import pytest
import torch

import outcore

from .rig import agrees, tower_on, train


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


@agrees("host", optimizer=lambda model: torch.optim.Adagrad(model.parameters(), lr=0.05))
def test_clearing_lets_all_begin_anew(model, optimizer):
    losses = train(model, optimizer)
    optimizer.state.clear()
    for p in model.parameters():
        if p.requires_grad and "sum" not in optimizer.state[p]:  # torch's Adagrad makes it in its constructor only
            optimizer.state[p].update(step=torch.tensor(0.0), sum=torch.zeros(p.shape))
    return losses + train(model, optimizer)


@agrees("plain", "host", "disk", optimizer=sgd)
def test_momentum_that_is_written_before_the_first_step(model, optimizer):
    for p in model.parameters():
        if p.requires_grad:
            optimizer.state[p]["momentum_buffer"] = torch.full(p.shape, 0.1)
    return train(model, optimizer)


@agrees("host")
def test_states_that_are_popped_and_put_back(model, optimizer):
    losses, weight = train(model, optimizer), model.blocks[0].up.weight
    states = optimizer.state.pop(weight)
    assert weight not in optimizer.state
    assert optimizer.state.pop(weight, None) is None
    with pytest.raises(KeyError):
        optimizer.state.pop(weight)
    optimizer.state[weight] = states
    return losses + train(model, optimizer)


def test_a_view_of_states_is_not_put_elsewhere(tmp_path):
    with tower_on("host", tmp_path) as (model, optimizer):
        train(model, optimizer)
        a, b = model.blocks[0].up.weight, model.blocks[1].up.weight
        before, states, old = optimizer.state_dict()["state"], optimizer.state, optimizer.state[b]
        states[b] = old  # nothing to do
        with pytest.raises(outcore.UnsupportedError, match="expected values.*blocks.0.up.weight.*clone"):
            states[a], states[b] = states[b], states[a]
        assert all(
            torch.equal(was[n], now[n])
            for was, now in zip(before.values(), optimizer.state_dict()["state"].values(), strict=True)
            for n in was
        )
        del states[b]
        with pytest.raises(outcore.UnsupportedError, match="expected values.*blocks.1.up.weight.*clone"):
            states[b] = old
        train(model, optimizer)
        with pytest.raises(outcore.UnsupportedError, match="expected values"):
            states[b] = old
