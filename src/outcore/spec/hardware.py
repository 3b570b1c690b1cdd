"""A machine as plans see it: memory and speed of its parts. Plain data with a JSON form.

Each figure may name its source.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Self

from outcore.core.errors import ConfigError
from outcore.spec.text_file import Described, fields_of

HARDWARE_VERSION = 2
_MOST = 1e19
"""Largest rate or size that is accepted."""


@dataclass(frozen=True, kw_only=True)
class DevicePart:
    """The device that computes."""

    memory_bytes: float
    bf16_flops: float
    """FLOP per second of matrix products in bf16; of a device that computes none in bf16, in fp16."""
    fp32_flops: float
    attention_flops: float
    """FLOP per second of the attention kernel in bf16."""
    bytes_per_s: float
    """Bandwidth of its memory."""
    update_parameters_per_s: float
    """Speed of AdamW with states in its memory."""
    plain_update_parameters_per_s: float = 0
    """Speed of the update in a plain plan: ``torch.optim`` after clipping by the norm; 0: as fast as AdamW above."""
    kernel_s: float = 0
    """Time that every kernel of a forward takes in addition, with the Python code around it: time of compute, or on an
    accelerator time of the thread that launches kernels."""
    runs_ahead: float = 1
    """1: an accelerator, which is given its work in advance; 0: the thread that submits also computes."""
    computes_bf16: float = 1
    """1: it computes in bf16; 0: in fp16 and fp32 only."""
    sources: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Field -> source of its figure."""
    slow: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """Field -> its figure at the slow end of what is known; left out: there is no range."""
    fast: Mapping[str, float] = dataclasses.field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class BusPart:
    """The connection between the device and host memory."""

    h2d_bytes_per_s: float
    d2h_bytes_per_s: float
    both: float = 2
    """Speed of both directions used at once, in multiples of one direction: 2 if neither slows the other down."""
    latency_s: float = 0
    """Time that every copy takes in addition."""
    sources: Mapping[str, str] = dataclasses.field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class HostPart:
    """Processor and memory."""

    memory_bytes: float
    bytes_per_s: float
    """Bandwidth of its memory, reading and writing together."""
    update_parameters_per_s: float
    """Speed of AdamW on all its cores, with fp32 masters and bf16 weights and gradients."""
    visit_s: float = 0
    """Time that the engine takes for every visit of a unit."""
    resting_visit_s: float = 0
    """The same for a unit whose data all rests on the device; 0: ``visit_s``."""
    parts: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """Link -> the part of host memory and cores that it takes at full speed. If none were measured, they are computed
    from ``bytes_per_s``."""
    compute_left: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """Link -> the part of its speed that compute keeps while the link is busy, where the host computes."""
    left_beside_compute: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """Link -> the part of its own speed that it keeps meanwhile."""
    sources: Mapping[str, str] = dataclasses.field(default_factory=dict)
    slow: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """As in ``DevicePart``."""
    fast: Mapping[str, float] = dataclasses.field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class DiskPart:
    """One drive, or several that are striped."""

    size_bytes: float
    read_bytes_per_s: float
    write_bytes_per_s: float
    both: float = 1
    """Speed of reading and writing at once, in multiples of a drive that does only one of them."""
    latency_s: float = 0
    """Time that every read or write takes in addition."""
    endurance_bytes: float = 0
    """Bytes that may be written during the drive's life; 0: not known."""
    sources: Mapping[str, str] = dataclasses.field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class LinksPart:
    """The connection between the devices of a node, with its speed while all of them send and receive at once."""

    bytes_per_s: float
    """Speed into one device, and out of it at the same time."""
    on_bus: float = 0
    """1: they use the bus, together with copies from and to host memory; 0: links of their own, such as NVLink."""
    through_host: float = 0
    """1: they also pass through host memory, since devices cannot reach each other's memory."""
    devices_per_port: float = 1
    """Number of devices behind one switch, which share its connection to host memory."""
    host_bytes_per_s: float = 2.4e9
    """Speed into one process from the host memory of another."""
    latency_s: float = 0
    """Time that every exchange takes in addition."""
    sources: Mapping[str, str] = dataclasses.field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class NetworkPart:
    """The connection between nodes, with its speed while all of them send and receive at once."""

    bytes_per_s: float
    """Speed into one node over all of its adapters, and out of it at the same time."""
    latency_s: float = 0
    """Time that every exchange takes in addition."""
    sources: Mapping[str, str] = dataclasses.field(default_factory=dict)


_ZERO_IS_FINE = {"latency_s", "visit_s", "kernel_s", "endurance_bytes", "runs_ahead", "on_bus", "through_host"}
_ZERO_IS_FINE |= {"plain_update_parameters_per_s", "resting_visit_s", "computes_bf16"}
_AT_MOST = {"both": 2.0, "runs_ahead": 1.0, "latency_s": 10.0, "visit_s": 10.0, "kernel_s": 10.0}
_AT_MOST |= {
    "resting_visit_s": 10.0,
    "computes_bf16": 1.0,
    "on_bus": 1.0,
    "through_host": 1.0,
    "devices_per_port": 64.0,
}
_AT_LEAST = {"both": 0.5, "devices_per_port": 1.0}
_SHARING = ("h2d", "d2h", "update", "disk_read", "disk_write")
_PARTS = ("parts", "compute_left", "left_beside_compute")
_ENDS = ("slow", "fast")
_UNUSED = "blocks_per_s"
"""A figure of files that earlier versions wrote, which nothing uses."""


@dataclass(frozen=True, kw_only=True)
class Hardware(Described):
    """A machine."""

    what: ClassVar[str] = "hardware"

    name: str
    device: DevicePart
    bus: BusPart
    host: HostPart
    disk: DiskPart | None = None
    """None: no disk tier."""
    links: LinksPart | None = None
    """Links between the devices; None: not known, see ``planner.timing.rank_layout``."""
    network: NetworkPart | None = None
    """Network between nodes of this kind; None: not known, see ``planner.timing.rank_layout``."""
    version: int = HARDWARE_VERSION

    @property
    def has_range(self) -> bool:
        """Whether some figure is known as a range only."""
        return any(part.slow or part.fast for part in (self.device, self.host))

    def at(self, end: Literal["slow", "fast"]) -> Self:
        """Return the machine at one end of what is known of it."""
        device, host = self.device, self.host
        device = dataclasses.replace(device, **getattr(device, end), slow={}, fast={})
        host = dataclasses.replace(host, **getattr(host, end), slow={}, fast={})
        return dataclasses.replace(self, device=device, host=host)

    @classmethod
    def from_json(cls, text: str, *, where: str = "hardware") -> Self:
        """Read a machine from JSON text.

        Raises:
            ConfigError: The text is not JSON, a key is missing or unknown, or a rate is one that no machine has.
        """
        data = cls._fields_in(text, where)
        if data.get("version", HARDWARE_VERSION) != HARDWARE_VERSION:
            raise ConfigError(
                f"{where}: expected version {HARDWARE_VERSION}, but got {data['version']!r}; it was measured by "
                "another version of outcore"
            )
        if not isinstance(data["name"], str):
            raise ConfigError(f"{where}: name: expected a string, but got {data['name']!r:.80}")
        kinds = {"device": DevicePart, "bus": BusPart, "host": HostPart, **_MAY_BE_MISSING}
        parts = {name: _part(kind, data.get(name), f"{where}: {name}") for name, kind in kinds.items()}
        return cls(name=data["name"], **parts)  # type: ignore[arg-type]


_MAY_BE_MISSING: dict[str, type] = {"disk": DiskPart, "links": LinksPart, "network": NetworkPart}


def _part(kind: type, data: object, where: str) -> object:
    if data is None and kind in _MAY_BE_MISSING.values():
        return None
    known = {name: value for name, value in data.items() if name != _UNUSED} if isinstance(data, dict) else data
    fields = fields_of(kind, known, where)
    _refuse_numbers(fields, where)
    return kind(**fields)


def _refuse_numbers(data: Mapping[str, Any], where: str) -> None:
    """Refuse figures that no machine has."""
    for name, value in data.items():
        if name == "sources":
            if not isinstance(value, Mapping) or not all(isinstance(s, str) for pair in value.items() for s in pair):
                raise ConfigError(f"{where}: sources: expected names of fields with sentences, but got {value!r:.80}")
            continue
        if name in _ENDS:
            _refuse_ends(value, data, f"{where}: {name}")
            continue
        if name in _PARTS:
            _refuse_parts(value, f"{where}: {name}")
            continue
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        most, least = _AT_MOST.get(name, _MOST), _AT_LEAST.get(name, 0.0 if name in _ZERO_IS_FINE else 1.0)
        if not is_number or not least <= value <= most:  # written so that NaN is refused, too
            raise ConfigError(f"{where}: {name}: expected a number from {least:g} to {most:g}, but got {value!r:.80}")


def _refuse_ends(value: object, data: Mapping[str, Any], where: str) -> None:
    """Refuse figures of fields that are not there, and those that no machine has."""
    if not isinstance(value, Mapping) or any(isinstance(data.get(name, {}), Mapping) for name in value):
        raise ConfigError(f"{where}: expected figures under names of fields that are given, but got {value!r:.80}")
    _refuse_numbers(value, where)


def _refuse_parts(parts: object, where: str) -> None:
    """Refuse unknown names, and values that are not numbers from 0 to 1."""
    if not isinstance(parts, Mapping) or not all(name in _SHARING and _is_part(part) for name, part in parts.items()):
        raise ConfigError(
            f"{where}: expected numbers from 0 to 1 under names of {', '.join(_SHARING)}, but got {parts!r:.80}"
        )


def _is_part(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= 1
