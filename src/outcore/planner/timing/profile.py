"""How much a model computes, from shapes alone: no weights, no forward.

A unit's matrix products take two operations per parameter and token. Of the experts, only those count that a token is
sent to. Attention takes four operations per pair of tokens and channel. It is taken to be causal, which leaves half of
the pairs. Backward of attention computes the scores again (T. Dao, arXiv 2307.08691, section 3.1: 2.5 times its
forward). Backward of a product takes two products. This is for models that cannot be followed; others are counted
kernel by kernel (``timing.counted``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from outcore.core.errors import ConfigError
from outcore.planner.forward.footprint import Footprint
from outcore.planner.timing.known_parts import UPDATE_BYTES
from outcore.planner.timing.rank_layout import ALONE, Ranks, between, share_of
from outcore.planner.timing.rates import LINKS, Link, Rates, Shared
from outcore.spec.hardware import DevicePart, Hardware, HostPart
from outcore.spec.model import ModelSpec

if TYPE_CHECKING:
    from torch import nn

_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
_IN_HOST_MEMORY = ("h2d", "d2h", "disk_read", "disk_write")


class UnitTimes(NamedTuple):
    """Seconds of a unit over one micro-batch, measured on this machine's device."""

    forward_s: float
    backward_s: float
    launch_s: float
    """Seconds that the submitting thread takes to launch the kernels of forward."""

    @property
    def seconds(self) -> float:
        """Seconds of forward and backward."""
        return self.forward_s + self.backward_s

    def times(self, factor: float) -> UnitTimes:
        """Return the times for ``factor`` times as much work in the same number of kernels."""
        return UnitTimes(factor * self.forward_s, factor * self.backward_s, self.launch_s)

    @property
    def is_launching(self) -> bool:
        """Whether an accelerator may have waited for launches. Then time grows less than in proportion to the work."""
        return 2 * self.launch_s > self.forward_s


@dataclass(frozen=True, kw_only=True)
class UnitWork:
    """What the forward of a unit computes over one micro-batch."""

    product_flops: float
    """FLOP of matrix products."""
    attention_flops: float
    frozen_flops: float = 0.0
    """FLOP of products that backward need not do, because operands require no gradient."""
    moved_bytes: float = 0.0
    """Bytes that all other kernels read and write."""
    unpacked_bytes: float = 0.0
    """Bytes that unpacking quantised weights reads and writes. Backward unpacks each once more; under the policy
    ``select`` nothing else does, since products are saved."""
    kernels: float = 0.0
    """Number of kernels."""
    measured: UnitTimes | None = None
    """Measured seconds. None: they follow from the other fields and the machine's rates."""


class Profile(NamedTuple):
    """What one micro-batch computes, and how much memory is in use when."""

    work: Mapping[str, UnitWork]
    """Work by unit name."""
    footprint: Footprint | None
    """Memory over time. None if the model cannot be followed."""


def unit_work(model: nn.Module, spec: ModelSpec, *, batch_size: int, seq_len: int) -> dict[str, UnitWork]:
    """Estimate the work of every unit, by name.

    Args:
        model: The model, perhaps on the meta device. Attention and experts are only known from a Transformers config.
        spec: The units that it was cut into.
        batch_size: Sequences of a micro-batch.
        seq_len: Tokens of each.
    """
    from torch import nn  # here: rates and unit times need no torch

    from outcore.model.unit_modules import output_embeddings

    heads = {id(p) for head in output_embeddings(model) for p in head.parameters()}
    owners = {name: (p, owner) for name, p, owner in _parameters(model)}
    config, tokens = getattr(model, "config", None), batch_size * seq_len
    text = config.get_text_config() if config is not None and hasattr(config, "get_text_config") else config
    modules, found = dict(model.named_modules()), {}
    for unit in spec.units:
        numel = 0.0
        for param in unit.params:
            if not param.parameters:  # part of a quantised weight
                continue
            parameter, owner = owners.get(param.name) or owners[param.name.rpartition(".")[0]]  # a wrapped parameter
            is_table = isinstance(owner, nn.Embedding) and id(parameter) not in heads
            if parameter.ndim > 1 and not is_table:
                numel += param.parameters * _active(param.name, text)
        pairs = batch_size * seq_len * seq_len / 2 * (_attentions(modules[unit.name]) if unit.name else 0)
        found[unit.name] = UnitWork(product_flops=2 * numel * tokens, attention_flops=4 * pairs * _channels(text))
    return found


def _parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter, nn.Module]]:
    for prefix, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            yield f"{prefix}.{name}" if prefix else name, parameter, module


def _active(name: str, config: Any) -> float:
    """Return the part of a parameter that one token uses."""
    if "experts" not in name.split(".") or "shared" in name:
        return 1.0
    experts = next((getattr(config, key) for key in _EXPERTS if getattr(config, key, None)), None)
    chosen = getattr(config, "num_experts_per_tok", None)
    return chosen / experts if experts and chosen else 1.0


def _attentions(unit: nn.Module) -> int:
    return sum(type(module).__name__.endswith("Attention") for module in unit.modules())


def _channels(config: Any) -> int:
    hidden, heads = getattr(config, "hidden_size", 0), getattr(config, "num_attention_heads", 1)
    size = getattr(config, "head_dim", None) or hidden // heads
    return int(heads * size)


def rates_for(
    hardware: Hardware,
    spec: ModelSpec,
    work: Mapping[str, UnitWork],
    *,
    in_bf16: bool = False,
    ranks: Ranks = ALONE,
) -> Rates:
    """Return the rates of a machine with a model, or one rank's share of them.

    Args:
        hardware: The machine.
        spec: The model's units.
        work: Work of each unit.
        in_bf16: Compute in bf16 whatever the dtype of the weights, as under autocast.
        ranks: Ranks that train together, on this machine and others like it.
    """
    others, alone, hardware = between(hardware, ranks), hardware, share_of(hardware, ranks)
    device, bus, host, disk = hardware.device, hardware.bus, hardware.host, hardware.disk
    computing = _Computing(device, alone.device, spec.precision, under_autocast=in_bf16)
    bytes_per_s = {"h2d": bus.h2d_bytes_per_s, "d2h": bus.d2h_bytes_per_s, **others.bytes_per_s}
    if disk is not None:
        bytes_per_s |= {"disk_read": disk.read_bytes_per_s, "disk_write": disk.write_bytes_per_s}
    updates = device.update_parameters_per_s
    shared = [Shared(name="host memory", parts={**_parts_of(host, bytes_per_s), **others.host_parts}), *others.shared]
    shared.append(Shared(name="bus", parts=dict.fromkeys(("h2d", "d2h"), 1 / bus.both)))
    latency = {**dict.fromkeys(("h2d", "d2h"), bus.latency_s), **others.latency_s}
    if disk is not None:
        shared.append(Shared(name="disk", parts=dict.fromkeys(("disk_read", "disk_write"), 1 / disk.both)))
        latency |= dict.fromkeys(("disk_read", "disk_write"), disk.latency_s)
    copies = device.bytes_per_s / 2
    return Rates(
        forward_s={n: computing.forward_s(w) for n, w in work.items()},
        backward_s={n: computing.backward_s(w) for n, w in work.items()},
        selected_forward_s={n: computing.selected_s(w) for n, w in work.items()},
        # A copy on the device reads and writes. Where the host computes, it copies in host memory, beyond its caches.
        # Accumulating in host memory moves 10 bytes for every 4 that it writes.
        bytes_per_s={
            **bytes_per_s,
            **others.bytes_per_s,
            "compute": copies if device.runs_ahead else min(copies, bus.d2h_bytes_per_s),
            "update": host.bytes_per_s / 2.5,
        },
        parameters_per_s={
            "update": host.update_parameters_per_s,
            "device_update": updates,
            "compute": updates,
            "plain": min(device.plain_update_parameters_per_s or updates, updates),  # or the bound would not hold
        },
        product_flops_per_s=device.bf16_flops,
        latency_s=latency,
        shared=tuple(shared),
        beside_compute={
            link: (host.compute_left[link], host.left_beside_compute[link])
            for link in LINKS
            if link in host.compute_left.keys() & host.left_beside_compute.keys()
        },
        visit_s=host.visit_s,
        resting_visit_s=host.resting_visit_s or None,
        launch_s={n: computing.launch_s(w) for n, w in work.items()} if device.runs_ahead else {},
        host_runs_ahead=bool(device.runs_ahead),
    )


class _Computing:
    """Seconds that a device takes for a unit: measured ones, else computed from its rates."""

    def __init__(self, device: DevicePart, alone: DevicePart, precision: str, *, under_autocast: bool) -> None:
        """Args: alone: The device as measured, before ranks share it. Raises: ConfigError: It has no such precision."""
        if precision in ("bf16", "pure_bf16") and not device.computes_bf16:
            raise ConfigError(
                f"precision: expected fp16 or fp32, since this device does not compute in bf16, but got '{precision}'"
            )
        self._device, self._slower = device, alone.fp32_flops / device.fp32_flops
        in_fp32 = precision == "fp32" and not under_autocast
        self._flops = device.fp32_flops if in_fp32 else device.bf16_flops
        self._attention_flops = min(device.attention_flops, self._flops)

    def forward_s(self, work: UnitWork) -> float:
        if work.measured is not None:
            return self._slower * work.measured.forward_s
        return self._seconds(work, work.product_flops, work.attention_flops, work.moved_bytes + work.unpacked_bytes)

    def backward_s(self, work: UnitWork) -> float:
        if work.measured is not None:
            return self._slower * work.measured.backward_s
        products, moved_bytes = 2 * work.product_flops - work.frozen_flops, 2 * work.moved_bytes + work.unpacked_bytes
        return self._seconds(work, products, 2.5 * work.attention_flops, moved_bytes)

    def selected_s(self, work: UnitWork) -> float:
        """Return the seconds of a forward without its products and attention."""
        if work.measured is not None:
            return max(self.forward_s(work) - self._dear_s(work.product_flops, work.attention_flops), 0.0)
        return self._seconds(work, 0, 0, work.moved_bytes)

    def launch_s(self, work: UnitWork) -> float:
        """Seconds to launch a forward. Backward takes as long: see [Note: launching] in probe.small_block."""
        return work.kernels * self._device.kernel_s if work.measured is None else work.measured.launch_s

    def _seconds(self, work: UnitWork, products: float, attentions: float, moved_bytes: float) -> float:
        computing = self._dear_s(products, attentions) + moved_bytes / self._device.bytes_per_s
        launching = self.launch_s(work)
        return max(computing, launching) if self._device.runs_ahead else computing + launching

    def _dear_s(self, products: float, attentions: float) -> float:
        return products / self._flops + attentions / self._attention_flops


def _parts_of(host: HostPart, bytes_per_s: Mapping[str, float]) -> dict[Link, float]:
    """Return the parts of host memory that links take: measured ones, else computed from the bytes that they move."""
    parts: dict[str, float] = dict(host.parts)
    if not parts:
        parts = {link: bytes_per_s[link] / host.bytes_per_s for link in _IN_HOST_MEMORY if link in bytes_per_s}
        parts["update"] = host.update_parameters_per_s * UPDATE_BYTES / host.bytes_per_s
    return {link: parts[link] for link in LINKS if link in parts}
