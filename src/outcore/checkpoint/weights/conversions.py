"""How names and tensors of a Hugging Face checkpoint correspond to those of a model, in both directions.

``places`` has every place of a model's parameters and buffers, by the name that ``state_dict`` gives it.

[Note: weight conversions] Transformers may store a model in another form than it runs in: under other names, or with
experts one by one instead of fused. Its rules are applied to groups of tensors that belong together. They are applied
first on the meta device, which gives every name and shape before a byte is read, then group by group on real tensors.
The rules are the library's own, and tensors are grouped as its own loading and saving groups them.
"""

from __future__ import annotations

import copy
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn

from outcore.core.errors import UnsupportedError

Read = Callable[[str], torch.Tensor]
"""Name -> tensor, of the checkpoint or of the model."""


@dataclass(frozen=True, eq=False)
class Group:
    """Tensors that are converted together. Most groups are one tensor under one name."""

    target: str
    """Name of the result; of the first one if there are several."""
    sources: list[tuple[str, str]] = field(default_factory=list)
    """Of each source: the pattern of the rule that matched, and its name."""
    converter: Any = None
    """The library's rule; None if only the name differs."""
    model: nn.Module | None = None
    rename: Callable[[str], str] = str

    def convert(self, read: Read) -> dict[str, torch.Tensor]:
        """Make the results from the sources.

        Args:
            read: Returns a source by name; called once for each. Meta tensors give meta results.

        Memory: host, sources and results of this group.
        """
        if self.converter is None:
            return {self.target: read(self.sources[0][1])}
        converter = copy.deepcopy(self.converter)
        for pattern, source in self.sources:
            converter.add_tensor(self.target, source, pattern, read(source))
        config = getattr(self.model, "config", None)
        made = converter.convert(self.target, model=self.model, config=config)
        return {self.rename(name): value[0] if isinstance(value, list) else value for name, value in made.items()}


@dataclass(frozen=True)
class Rules:
    """The library's rules for one direction, which also know whether they matched a name."""

    renamings: list[Any]
    converters: list[Any]

    @property
    def used(self) -> list[Any]:
        """Rules that matched a name; ``save_pretrained`` must revert them later."""
        return [rule for rule in (*self.renamings, *self.converters) if rule.was_used()]


def is_pretrained_model(module: nn.Module) -> bool:
    """Whether a module is a Transformers model. Imports nothing: none exists before the library is imported."""
    library = sys.modules.get("transformers.modeling_utils")
    return library is not None and isinstance(module, library.PreTrainedModel)


def is_adapter_model(module: nn.Module) -> bool:
    """Whether a module is a model wrapped by peft. Imports nothing."""
    library = sys.modules.get("peft.peft_model")
    return library is not None and isinstance(module, library.PeftModel)


def refuse_prefixes(model: nn.Module) -> None:
    """Refuse adapters that pass trained tensors to blocks as a key-value cache.

    Raises:
        UnsupportedError: There is one; the error names it.
    """
    configs: Mapping[str, Any] = model.peft_config if is_adapter_model(model) else {}  # type: ignore[assignment]
    for name, config in configs.items():
        kind = getattr(config.peft_type, "value", config.peft_type)
        if kind in ("PREFIX_TUNING", "CARTRIDGE"):
            raise UnsupportedError(
                f"prepare: expected adapters inside of blocks or prompts before them, but adapter '{name}' is {kind}: "
                "what it trains reaches blocks as a key-value cache, to which recompute would append a second time; "
                "use LoraConfig, PromptTuningConfig or PromptEncoderConfig"
            )


def loading_groups(model: nn.Module, names: Iterable[str], state: Mapping[str, Any]) -> tuple[list[Group], Rules]:
    """Group a checkpoint's tensors by what they become in a model.

    Args:
        model: Its rules apply. A model that is not of Transformers takes names as they are.
        names: Names in the checkpoint.
        state: Names in the model.

    Returns:
        The groups, whether or not the model knows their targets; and the rules, for ``Rules.used``.
    """
    if not is_pretrained_model(model):
        return [Group(name, [("", name)]) for name in names], Rules([], [])
    from transformers import conversion_mapping
    from transformers import core_model_loading as library

    rules = _rules(conversion_mapping.get_model_conversion_mapping(model))
    prefix = model.base_model_prefix

    def target_of(name: str) -> tuple[str, str | None]:
        target, pattern = library.rename_source_key(name, rules.renamings, rules.converters, prefix, state)
        if target not in state and name in state:
            target, pattern = library.rename_source_key(name, [], [], prefix, state)
        return target, pattern

    return _grouped(model, sorted(names, key=library.dot_natural_key), target_of, rules.converters, str), rules


def saving_groups(model: nn.Module, names: Iterable[str]) -> list[Group]:
    """Group a model's tensors by what they become in a checkpoint; the reverse of ``loading_groups``.

    The checkpoint that the model was loaded from decides the form, as in ``model.save_pretrained``.
    """
    if not is_pretrained_model(model):
        return [Group(name, [("", name)]) for name in names]
    from transformers import conversion_mapping
    from transformers import core_model_loading as library

    forward = getattr(model, "_weight_conversions", None)
    if forward is None:
        # Rules for prefixes say how a checkpoint was loaded, but this model was not loaded from one.
        known = conversion_mapping.get_model_conversion_mapping(model, add_legacy=False)
        forward = [rule for rule in known if not isinstance(rule, library.PrefixChange)]
    rules = _rules([rule.reverse_transform() for rule in reversed(forward)])

    def rename(name: str) -> str:
        return library.rename_source_key(name, rules.renamings, [])[0]

    def target_of(name: str) -> tuple[str, str | None]:
        target, pattern = library.rename_source_key(name, [], rules.converters)
        return (rename(name), None) if pattern is None else (target, pattern)

    return _grouped(model, sorted(names, key=library.dot_natural_key), target_of, rules.converters, rename)


def remember_used(model: nn.Module, rules: Rules) -> None:
    """Leave the rules that were used where ``from_pretrained`` leaves them, so that saving reverts them."""
    if is_pretrained_model(model):
        model.__dict__["_weight_conversions"] = rules.used


def tied_targets(model: nn.Module) -> frozenset[str]:
    """Names that Transformers ties to another parameter, which is neither initialised nor saved under them."""
    found: set[str] = set()
    for prefix, module in model.named_modules():
        if is_pretrained_model(module):
            found |= {f"{prefix}.{name}" if prefix else name for name in getattr(module, "all_tied_weights_keys", {})}
    return frozenset(found)


def is_ignored(model: nn.Module, name: str, *, when: str) -> bool:
    """Whether Transformers accepts a checkpoint although ``name`` is "missing" in it or "unexpected".

    Args:
        model: Any module.
        name: A name in the model's terms.
        when: "missing" or "unexpected".
    """
    patterns = set(getattr(model, f"_keys_to_ignore_on_load_{when}", None) or ())
    if when == "unexpected" and is_pretrained_model(model):
        ends = {end for end in _COMPUTED for buffer, _ in model.named_buffers() if buffer.endswith(end)}
        patterns |= {_COMPUTED[end] for end in ends}
    return any(re.search(pattern, name) for pattern in patterns)


# Buffers that are computed now, but that checkpoints of older versions hold.
_COMPUTED = {"rotary_emb.inv_freq": r"rotary_emb\.inv_freq", "position_ids": r"(^|\.)position_ids$"}


def _rules(transforms: Iterable[Any]) -> Rules:
    from transformers import core_model_loading as library

    transforms = list(transforms)
    converters = [rule for rule in transforms if isinstance(rule, library.WeightConverter)]
    return Rules([rule for rule in transforms if isinstance(rule, library.WeightRenaming)], converters)


def _grouped(
    model: nn.Module,
    names: Iterable[str],
    target_of: Callable[[str], tuple[str, str | None]],
    converters: Iterable[Any],
    rename: Callable[[str], str],
) -> list[Group]:
    by_pattern = {pattern: rule for rule in converters for pattern in rule.source_patterns}
    groups: dict[tuple[str, bool], Group] = {}
    for name in names:
        target, pattern = target_of(name)
        key = target, pattern is None
        if key not in groups:
            groups[key] = (
                Group(target, [], by_pattern[pattern], model, rename) if pattern is not None else Group(target)
            )
        groups[key].sources.append((pattern or "", name))
    return list(groups.values())


class StatePlace(NamedTuple):
    """One place of a tensor; a tied tensor has several."""

    name: str
    module: nn.Module
    key: str
    tensor: torch.Tensor
    is_buffer: bool
    is_persistent: bool


def places(model: nn.Module) -> Iterator[StatePlace]:
    """Yield all places in the order of ``state_dict``; non-persistent buffers stand among the others."""
    for prefix, module in model.named_modules(remove_duplicate=False):
        dot = f"{prefix}." if prefix else ""
        for key, param in module._parameters.items():
            if param is not None:
                yield StatePlace(dot + key, module, key, param, is_buffer=False, is_persistent=True)
        hidden = module._non_persistent_buffers_set
        for key, buffer in module._buffers.items():
            if buffer is not None:
                yield StatePlace(dot + key, module, key, buffer, is_buffer=True, is_persistent=key not in hidden)
