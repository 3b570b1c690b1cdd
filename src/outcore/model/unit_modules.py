"""Which modules of a model become units. Only structure counts, so it works on the meta device.

Repeated blocks and large input embeddings are found automatically; a user who knows better names the units. See
docs/explanation/units.md, "How units are found".
"""

from __future__ import annotations

import difflib
import fnmatch
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from torch import nn

from outcore.core.errors import ConfigError

LARGE_EMBEDDING_NUMEL = 2**20  # moving a smaller embedding would cost more in bookkeeping than it saves

_CONTAINERS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)


def find_units(model: nn.Module) -> dict[str, nn.Module]:
    """Find the repeated blocks and the large input embeddings of a model.

    Returns:
        The first name of each module -> the module, in module order; no unit lies inside another.
    """
    found: dict[int, nn.Module] = {}
    _walk_blocks(model, _no_split_classes(model), found, set())
    found |= {id(m): m for m in _large_embeddings(model, found)}
    return _in_module_order(model, found)


def select_units(model: nn.Module, chosen: Sequence[str | type]) -> dict[str, nn.Module]:
    """Take exactly the units that the user named.

    Args:
        model: The model whose modules are searched.
        chosen: Classes, names of classes, names of modules; names of modules may hold the wildcards of ``fnmatch``
            in each part between dots (``"model.layers.*"``).

    Raises:
        ConfigError: A name matches nothing, a module has no forward, or a unit lies inside another.
    """
    if isinstance(chosen, str | type):
        raise ConfigError(f"units: expected a list of classes or names, but got {chosen!r}; write units=[...]")
    modules = [(name, m) for name, m in model.named_modules() if name]
    found: dict[int, nn.Module] = {}
    for item in chosen:
        matches = [m for name, m in modules if _matches(item, name, m)]
        if not matches:
            raise ConfigError(_no_match(item, modules))
        found |= {id(m): m for m in matches}
    units = _in_module_order(model, found)
    for name, module in units.items():
        if not has_forward(module):
            raise ConfigError(
                f"units: expected modules that are called, but '{name}' ({type(module).__name__}) has no forward; "
                f"name its children, such as '{name}.*'"
            )
        inner = next((n for n, m in module.named_modules() if m is not module and id(m) in found), None)
        if inner is not None:
            raise ConfigError(
                f"units: expected units that do not nest, but '{name}.{inner}' lies inside '{name}'; keep one of them"
            )
    return units


def output_embeddings(model: nn.Module) -> Iterator[nn.Module]:
    """Yield output embeddings, also those of models inside wrappers. Losses read their weights outside of any call."""
    for module in model.modules():
        getter = getattr(module, "get_output_embeddings", None)
        if not callable(getter):
            continue
        try:
            head = getter()
        except (NotImplementedError, AttributeError):  # base classes declare it for models that have none
            continue
        for item in head if isinstance(head, list | tuple) else [head]:
            if isinstance(item, nn.Module):
                yield item


def _in_module_order(model: nn.Module, found: dict[int, nn.Module]) -> dict[str, nn.Module]:
    """Name the found modules and drop those that another one contains."""
    inside = {id(m) for unit in found.values() for m in unit.modules() if m is not unit}
    return {name: m for name, m in model.named_modules() if id(m) in found and id(m) not in inside}


def _no_split_classes(model: nn.Module) -> frozenset[str]:
    """Return names of classes that a Transformers model, also inside a wrapper, lists as indivisible.

    Classes with a single module are left out, since it is no block: BERT lists its embeddings.
    """
    names: set[str] = set()
    count = Counter(type(m).__name__ for m in model.modules())
    for module in model.modules():
        listed = getattr(module, "_no_split_modules", None)
        if isinstance(listed, Iterable):
            names.update(n for n in listed if isinstance(n, str))
    return frozenset(n for n in names if count[n] > 1)


def _walk_blocks(module: nn.Module, no_split: frozenset[str], found: dict[int, nn.Module], seen: set[int]) -> None:
    """Collect the outermost blocks below a module."""
    if id(module) in seen:
        return
    seen.add(id(module))
    repeated = _repeated_children(module)
    for child in module.children():
        is_named = type(child).__name__ in no_split and has_forward(child) and _has_parameters(child)
        is_block = id(child) in repeated and not _holds_blocks(module, child, no_split)
        if is_named or is_block:
            found[id(child)] = child
        else:
            _walk_blocks(child, no_split, found, seen)


def _repeated_children(module: nn.Module) -> set[int]:
    """Return ids of children like blocks: composite, and one of several of a class or in a list of composites only."""
    blocks = [c for c in module.children() if _is_composite(c) and has_forward(c)]
    with_parameters = [c for c in module.children() if _has_parameters(c)]
    if isinstance(module, nn.ModuleList) and len(blocks) == len(with_parameters):
        return {id(b) for b in blocks}
    count = Counter(type(b) for b in blocks)
    return {id(b) for b in blocks if count[type(b)] > 1}


def _holds_blocks(parent: nn.Module, candidate: nn.Module, no_split: frozenset[str]) -> bool:
    """Return whether a candidate is a stack of blocks (an encoder beside a decoder, a stage), not a block itself."""
    inner = [m for m in candidate.modules() if m is not candidate]
    if any(type(m).__name__ in no_split for m in inner):
        return True
    if isinstance(candidate, _CONTAINERS):
        return bool(_repeated_children(candidate))
    if isinstance(parent, _CONTAINERS):
        return False
    return any(isinstance(m, _CONTAINERS) and _repeated_children(m) for m in inner)


def _large_embeddings(model: nn.Module, blocks: dict[int, nn.Module]) -> Iterator[nn.Module]:
    inside = {id(m) for block in blocks.values() for m in block.modules()}
    heads = {id(p) for head in output_embeddings(model) for p in head.parameters()}
    uses = Counter(id(p) for m in model.modules() for p in m.parameters(recurse=False))
    for module in model.modules():
        if isinstance(module, nn.Embedding) and id(module) not in inside and has_forward(module):
            weight = module.weight
            if weight.numel() >= LARGE_EMBEDDING_NUMEL and uses[id(weight)] == 1 and id(weight) not in heads:
                yield module


def _has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def _is_composite(module: nn.Module) -> bool:
    return any(_has_parameters(child) for child in module.children())


def has_forward(module: nn.Module) -> bool:
    """Return whether a module can be called."""
    return type(module).forward is not nn.Module.forward and not isinstance(module, nn.ModuleList | nn.ModuleDict)


def _matches(item: str | type, name: str, module: nn.Module) -> bool:
    if isinstance(item, type):
        return isinstance(module, item)
    if not isinstance(item, str):
        raise ConfigError(f"units: expected classes, names of classes or names of modules, but got {item!r}")
    if type(module).__name__ == item:
        return True
    parts, pattern = name.split("."), item.split(".")
    return len(parts) == len(pattern) and all(map(fnmatch.fnmatchcase, parts, pattern))


def _no_match(item: str | type, modules: Sequence[tuple[str, nn.Module]]) -> str:
    known = list(dict.fromkeys([type(m).__name__ for _, m in modules] + [name for name, _ in modules]))
    wanted = item.__name__ if isinstance(item, type) else item
    nearest = difflib.get_close_matches(wanted, known, n=3, cutoff=0.5)
    hint = f"; nearest: {', '.join(repr(n) for n in nearest)}" if nearest else ""
    return f"units: expected a class or module of the model, but {wanted!r} matches nothing inside the model{hint}"
