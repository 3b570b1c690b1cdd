"""Nested arguments: taken apart, filled again, and compared with what a block was given."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from outcore.core.errors import UnsupportedError
from outcore.engine.recompute.structure import take_apart

Pair = namedtuple("Pair", "left right")
A, B, C = torch.zeros(1), torch.ones(2), torch.full((3,), 2.0)


@dataclass
class Output:
    logits: torch.Tensor
    parts: list[torch.Tensor]
    name: str = "x"


class Box:
    def __init__(self, content: Any) -> None:
        self.content = content


NESTS = {
    "tensor": A,
    "plain": (None, 1, 2.5, "s", torch.float32, A),
    "tuple": ((A, (B,)), (), C),
    "list": ([A, [B, []]], C),
    "dict": {"a": A, 3: {"b": (B, None)}, "empty": {}},
    "ordered": OrderedDict(b=A, a=B),
    "named tuple": Pair(A, [B]),
    "dataclass": Output(A, [B, C]),
    "object": (Box(3), A),
    "shared": (A, [A, B], {"again": A}),
}


def equal(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor) or isinstance(a, Box):
        return a is b
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return list(a) == list(b) and all(equal(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(equal, a, b))
    return equal(vars(a), vars(b)) if isinstance(a, Output) else a == b


@pytest.mark.parametrize("name", NESTS)
def test_what_is_taken_apart_can_be_filled_again(name):
    nest = NESTS[name]
    tensors, structure = take_apart(nest, "here")
    assert len({id(t) for t in tensors}) == len(tensors)
    filled = structure.fill(tensors)
    assert equal(filled, nest)
    assert structure.still_holds(filled, tensors, "here")
    others = [t + 1 for t in tensors]
    assert [id(t) for t in take_apart(structure.fill(others), "here")[0]] == [id(t) for t in others]


def test_a_structure_holds_no_tensors():
    for nest in NESTS.values():
        tensors, structure = take_apart((nest,), "here")
        assert not tensors or "tensor(" not in repr(structure.content)


CHANGES = {
    "appended": ([A], lambda nest: nest.append(B)),
    "taken out": ([A, B], lambda nest: nest.pop()),
    "replaced": ([A, B], lambda nest: nest.__setitem__(0, C)),
    "exchanged": ([A, B], lambda nest: nest.reverse()),
    "plain value": ([A, 1], lambda nest: nest.__setitem__(1, 2)),
    "key": ({"a": A}, lambda nest: nest.update(b=None)),
    "key renamed": ({"a": A}, lambda nest: nest.update(b=nest.pop("a"))),
    "below a tuple": ((A, ({"a": [B]},)), lambda nest: nest[1][0]["a"].append(1)),
    "ordered": (OrderedDict(a=A), lambda nest: nest.update(a=B)),
    "field": (Output(A, []), lambda nest: nest.parts.append(B)),
    "field replaced": ((Output(A, []),), lambda nest: setattr(nest[0], "name", "y")),
    "in a named tuple": (Pair(A, []), lambda nest: nest.right.append(B)),
}


@pytest.mark.parametrize("name", CHANGES)
def test_changes_are_seen(name):
    nest, change = CHANGES[name]
    tensors, structure = take_apart(nest, "here")
    filled = structure.fill(tensors)
    change(filled)
    assert not structure.still_holds(filled, tensors, "here")
    assert structure.still_holds(structure.fill(tensors), tensors, "here")  # each fill makes new containers


def test_a_hidden_tensor_with_gradient_is_refused():
    take_apart(Box(A), "here")
    with pytest.raises(UnsupportedError, match="here.*inside a Box"):
        take_apart(Box([torch.zeros(1, requires_grad=True)]), "here")


def test_plain_values_are_alike_by_value():
    def form(rows: int) -> Any:
        values = 0.5 * rows, 1000 * rows, A.new_empty(rows).shape, f"{rows} rows", float("nan")
        return take_apart((A, *values), "here")[1]

    assert form(3).is_like(form(3))
    assert not form(3).is_like(form(4))
    assert not take_apart((1,), "here")[1].is_like(take_apart((1.0,), "here")[1])
