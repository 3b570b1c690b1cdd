"""The machine, the device and the loop that a plan is made for: named by the user, or measured here."""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

import torch

from outcore.core.errors import ConfigError, DiskError, MemoryBudgetError
from outcore.planner.timing.known_hardware import NO_TIMES, named_hardware
from outcore.probe.measured_machines import Machine
from outcore.spec.hardware import Hardware

NamedHardware = Hardware | str | Path
"""A machine, a file that describes one, or the names of common parts."""


class Loop(NamedTuple):
    """What the loop does in every step, as far as known."""

    micro_batches: int = 1
    clips: bool = True
    is_promised: bool = False
    """Whether the number of micro-batches is promised. If so, and without clipping, updates may run inside backward."""
    makes_logits: bool = True
    """Whether the logits of the whole micro-batch exist at once. If not, the loss is computed in tiles."""


class DeviceFacts(Protocol):
    """Facts about a device on which plans depend besides rates. The device may be here or elsewhere."""

    @property
    def torch_device(self) -> torch.device:
        """Device with whose kernels shapes are followed."""

    @property
    def has_host_memory(self) -> bool:
        """Whether the device uses the host's memory."""

    @property
    def activation_share(self) -> float:
        """Part of its budget to leave to activations of unknown size; 0 if the budget does not include them."""


def token_batch(rows: int, length: int) -> dict[str, torch.Tensor]:
    """Return a micro-batch of token IDs. Args: rows: Number of sequences. length: Tokens of each."""
    ids = torch.zeros(rows, length, dtype=torch.long, device="cpu")
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}


def hardware_for(
    named: NamedHardware | None, device: DeviceFacts, paths: Sequence[str] | None, *, may_measure: bool
) -> Hardware | None:
    """Return the named machine, or this one: from a kept measurement, else measured quickly, with a warning.

    Args:
        named: The user's choice; None: that of ``OUTCORE_HARDWARE`` in the environment.
        device: The device that will compute.
        paths: Folders of the disk tier; None: the latest measurement with any drives, else one without.
        may_measure: Measure this machine now if there is no kept measurement.

    Returns:
        The machine. None, with a warning, if this machine cannot be measured; None if it may not be, or if times are
        not wanted.

    Raises:
        ConfigError: The name is no machine, or the machine has no disk although there is a disk tier.
    """
    found = asked_hardware(named)
    if found == NO_TIMES:
        return None
    if isinstance(found, Hardware):
        if paths and found.disk is None:
            raise ConfigError(
                f"hardware: expected a machine with a disk, since there is a disk tier, but '{found.name}' has none; "
                "measure it with outcore probe --disk-dir, or leave the disk out of the budget"
            )
        return found
    machine = Machine(device.torch_device, tuple(map(Path, paths or ())))
    with_a_disk = machine.kept_with_a_disk() if paths is None else None
    if with_a_disk is not None:
        return with_a_disk.hardware
    return _at_hand(machine, may_measure=may_measure)


def asked_hardware(named: NamedHardware | None) -> Hardware | str | None:
    """Return the machine that is named here or in the environment, NO_TIMES, or None for this one. Nothing is measured.

    Raises:
        ConfigError: The name is no machine.
    """
    named = os.environ.get("OUTCORE_HARDWARE") or None if named is None else named
    if named is None or isinstance(named, Hardware) or named == NO_TIMES:
        return named
    if not isinstance(named, str | Path):
        raise ConfigError(
            f"hardware: expected a JSON file, names of parts, 'none', or None for this machine, but got {named!r}"
        )
    return named_hardware(named)


def _at_hand(machine: Machine, *, may_measure: bool) -> Hardware | None:
    if not may_measure:
        kept = machine.kept()
        return None if kept is None else kept.hardware
    try:
        return machine.at_hand()
    except (DiskError, MemoryBudgetError) as error:
        warnings.warn(
            f"the plan was made without predicted times, since this machine cannot be measured: {error}", stacklevel=2
        )
        return None
