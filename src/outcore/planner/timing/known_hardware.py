"""Parts of common machines, to plan for a machine that is not at hand. Every figure has its source.

Figures are published by vendors. Where a measurement tells how much of such a figure is reached in practice, it is
multiplied by that factor. Where measurements differ, a figure also has a slow and a fast end, and so has every time
that is predicted with it. A measured machine (``outcore probe``) is better than any of them.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from outcore.core.errors import ConfigError
from outcore.spec.hardware import BusPart, DevicePart, DiskPart, Hardware, HostPart, LinksPart, NetworkPart

NO_TIMES = "none"
"""Given in place of a machine: plans are made without times, and nothing is measured."""

GB, GIB, TB = 1e9, 2.0**30, 1e12
TERA = 1e12

UPDATE_BYTES = 28
"""Bytes that AdamW moves per parameter. Master weight and two moments are read and written, a bf16 weight is written,
and a bf16 gradient is read."""


class Figure(NamedTuple):
    """A figure, or a factor of one, and where it is from."""

    value: float
    source: str
    slow: float | None = None
    """The figure at the slow end of what is known; None: there is no range."""
    fast: float | None = None

    def of(self, peak: float, said: str) -> Figure:
        """Multiply a published figure by this factor. Args: said: The published figure and its source."""
        slow, fast = (None if factor is None else factor * peak for factor in (self.slow, self.fast))
        return Figure(self.value * peak, f"{said}; {self.source}", slow, fast)


def _figures(**figures: Figure) -> dict[str, Any]:
    """Return the fields of a part."""
    return {
        **{name: figure.value for name, figure in figures.items()},
        "sources": {name: figure.source for name, figure in figures.items()},
        "slow": {name: figure.slow for name, figure in figures.items() if figure.slow is not None},
        "fast": {name: figure.fast for name, figure in figures.items() if figure.fast is not None},
    }


_H100 = "benchmarks/reports/gpu_h100_2026-11-23.md"
_H200 = "benchmarks/reports/gpu_h200_2026-11-26.md"
_KERNEL = Figure(
    15e-6,
    f"9e-6 of a kernel alone, measured on an H100 ({_H100}), and 6e-6 of Python around it, measured on a server's "
    "processor ([Note: launching] in probe.small_block); 8e-6 is the least that was measured of a kernel alone there, "
    f"and 21e-6 the time of one within a block on another machine ({_H200})",
    slow=21e-6,
    fast=8e-6,
)
_AMPERE = {
    "bf16": Figure(
        0.72,
        "0.72 of the peak, what FlashAttention-2 reports for whole training steps on an A100 (arXiv 2307.08691, "
        "abstract: 225 TFLOP/s); 0.63 is its least such step (table 1: 196), and 0.80 what products alone reach on an "
        f"H100 ({_H100})",
        slow=0.63,
        fast=0.80,
    ),
    "fp32": Figure(0.72, "times 0.72, as in bf16 on an A100; not measured"),
    "attention": Figure(
        0.63,
        "0.63 of the peak, what FlashAttention-2 reaches at most in backward on an A100 (arXiv 2307.08691, section "
        "4.1)",
    ),
    "memory": Figure(1.0, "as published"),
    "update": Figure(
        50 * GB * UPDATE_BYTES / (1555 * GB),
        "memory bandwidth over 28 bytes per parameter, times 0.90: Elixir measured 50e9 parameters/s on an A100 with "
        "1,555 GB/s (arXiv 2212.05339, hpcaitech/Elixir, elixir/search/utils.py)",
    ),
}
"""Part of the peak that is reached, of products (in bf16, and in fp32 without TF32), attention, memory and updates."""
_REACHED: Mapping[str, Mapping[str, Figure]] = {
    "ampere": _AMPERE,
    "ada": {
        **_AMPERE,
        "bf16": Figure(
            156 / 165.2,
            "156 TFLOP/s on an RTX 4090: the plateau of LoHan's training steps of 13e9 parameters (RC4ML/LoHan, "
            "evaluation_data.md: 155.8 with batches of 64), and 158 to 160 of products of 8192 channels or more "
            "(https://github.com/zzc0721/torch-performance-test-data/issues/78); at least 115, which ZeRO-3 sustains "
            "with its update exposed (SlideFormer, arXiv 2603.16428, baseline of 8e9 parameters and batches of 32), at "
            "most the peak",
            slow=115 / 165.2,
            fast=1.0,
        ),
        "fp32": Figure(
            53.4 / 82.6,
            "53.4 TFLOP/s of products of 8192 channels on an RTX 4090 "
            "(https://github.com/zzc0721/torch-performance-test-data/issues/78)",
        ),
    },
    "hopper": {
        **_AMPERE,
        "bf16": Figure(
            0.64,
            "0.64 of the peak in whole layers: blocks of a Llama of 3.02e9 parameters took 15.7 ms and 31.8 ms on an "
            f"H200, of which products leave 623 to 635 TFLOP/s ({_H200}). By its steps, an H100 reaches 0.64 to 0.68 "
            f"({_H100}); products alone 0.80. 0.54 is what steps of Qwen3-14B on 8 H200 leave, exchanges of ZeRO-3 "
            "among them (DeepCompile)",
            slow=0.54,
            fast=0.68,
        ),
        "attention": Figure(0.52, f"times 0.52, measured on an H100 SXM ({_H100})"),
        "memory": Figure(0.82, f"times 0.82, measured on an H100 SXM ({_H100})"),
        "update": Figure(
            0.51, f"memory over 28 bytes per parameter, times 0.51, measured on an H100 SXM over one unit ({_H100})"
        ),
    },
    "cdna3": {
        **_AMPERE,
        "bf16": Figure(
            0.58,
            "0.58 of the peak, the middle of what is known: 0.45 is reported of an MI300X "
            "(https://aiweekly.co/alerts/amd-mi300x-hits-only-45-of-peak-flops-in-practice), and 0.72 is the factor of "
            "an A100",
            slow=0.45,
            fast=0.72,
        ),
    },
}


def _device(kind: str, memory_bytes: float, bf16: float, fp32: float, bytes_per_s: float, source: str) -> DevicePart:
    """Make a device. Args: kind: A key of ``_REACHED``. bf16, fp32: Peaks in TFLOP/s."""
    reached, peak = _REACHED[kind], f"{bf16} TFLOP/s dense, {source}"
    return DevicePart(
        **_figures(
            memory_bytes=Figure(memory_bytes, source),
            bf16_flops=reached["bf16"].of(bf16 * TERA, peak),
            fp32_flops=reached["fp32"].of(fp32 * TERA, f"{fp32} TFLOP/s without TF32, {source}"),
            attention_flops=reached["attention"].of(bf16 * TERA, peak),
            bytes_per_s=reached["memory"].of(bytes_per_s, source),
            update_parameters_per_s=reached["update"].of(bytes_per_s / UPDATE_BYTES, source),
            kernel_s=_KERNEL,
        )
    )


_PER_CORE = (0.12 * GB, 0.075 * GB, 0.156 * GB)
"""Parameters that AdamW updates per second and core: in the middle, at the slow end, and at the fast end."""
_OF_BANDWIDTH = (0.52, 0.52, 1 / 1.57)
"""The most that it reaches of memory bandwidth, likewise."""
_HOST_UPDATE_SOURCE = (
    "0.12e9 parameters/s per core: 4 x 0.95e9 on 32 cores with DDR4 and 4 x 2.3e9 on 96 with DDR5 (Deep Optimizer "
    f"States, arXiv 2410.21316, authors' logs), and 1.2e9 to 2.5e9 on 16 cores with DDR5 ({_H100}, {_H200}), which are "
    "the ends of the range. At most memory bandwidth over 28 bytes per parameter, times 0.52 (8 channels of DDR4-3200 "
    f"under those 4 x 0.95e9) to 0.64 (AdamW beside a stream of the same bytes, {_H200})"
)
_VISIT = Figure(
    1.2e-3,
    f"1.09e-3 to 1.29e-3 measured beside an H100 and an H200 ({_H100}, {_H200}), 1.6e-3 at most, and 0.83e-3 where all "
    "rests on the device",
    slow=1.6e-3,
    fast=0.83e-3,
)


def _host(memory_bytes: float, bytes_per_s: float, cores: int, what: str) -> HostPart:
    most = bytes_per_s / UPDATE_BYTES
    update, slow, fast = (min(cores * each, part * most) for each, part in zip(_PER_CORE, _OF_BANDWIDTH, strict=True))
    return HostPart(
        **_figures(
            memory_bytes=Figure(memory_bytes, "a common size; say your own with --host-memory"),
            bytes_per_s=Figure(bytes_per_s, what),
            update_parameters_per_s=Figure(update, f"{cores} cores; {_HOST_UPDATE_SOURCE}", slow, fast),
            visit_s=_VISIT,
            resting_visit_s=Figure(0.83e-3, f"measured beside an H200 ({_H200})"),
        )
    )


_BUS = 55.2 / 63.0
_BUS_SOURCE = (
    "times 0.876: 55.2 GB/s measured of the 63.0 of PCIe 5.0 x16 (Deep Optimizer States, arXiv 2410.21316, authors' "
    "logs on H100 nodes)"
)


def _pcie(gigabytes: float, generation: str) -> BusPart:
    source = (
        f"PCIe {generation} x16 moves {gigabytes} GB/s per direction (PCI-SIG, https://pcisig.com/faq), {_BUS_SOURCE}"
    )
    rate = _BUS * gigabytes * GB
    return BusPart(
        h2d_bytes_per_s=rate,
        d2h_bytes_per_s=rate,
        sources={"h2d_bytes_per_s": source, "d2h_bytes_per_s": source, "both": "full duplex (PCI-SIG, as above)"},
    )


def _disk(size: float, read: float, write: float, endurance: float, source: str) -> DiskPart:
    return DiskPart(
        size_bytes=size,
        read_bytes_per_s=read * GB,
        write_bytes_per_s=write * GB,
        endurance_bytes=endurance,
        sources={
            "size_bytes": source,
            "read_bytes_per_s": f"sequential, {source}",
            "write_bytes_per_s": f"sequential, {source}",
            "endurance_bytes": source,
            "both": "no vendor states it; assumed that the drive does one at a time",
        },
    )


_NVIDIA = "https://www.nvidia.com/en-us/data-center"
_SAMSUNG = "https://semiconductor.samsung.com/consumer-storage/internal-ssd"
DEVICES: Mapping[str, DevicePart] = {
    "rtx-4090": _device(
        "ada",
        24 * GIB,
        165.2,
        82.6,
        1008 * GB,
        "NVIDIA Ada GPU architecture whitepaper, appendix A "
        "(https://images.nvidia.com/aem-dam/Solutions/geforce/ada/nvidia-ada-gpu-architecture.pdf)",
    ),
    "a100-40gb": _device("ampere", 40 * GIB, 312, 19.5, 1555 * GB, f"NVIDIA A100 datasheet ({_NVIDIA}/a100/)"),
    "a100-80gb": _device("ampere", 80 * GIB, 312, 19.5, 2039 * GB, f"NVIDIA A100 datasheet, SXM ({_NVIDIA}/a100/)"),
    "h100": _device("hopper", 80 * GIB, 989.4, 66.9, 3350 * GB, f"NVIDIA H100 datasheet, SXM ({_NVIDIA}/h100/)"),
    "h200": _device("hopper", 141 * GB, 989.4, 66.9, 4800 * GB, f"NVIDIA H200 datasheet, SXM ({_NVIDIA}/h200/)"),
    "gh200": _device(
        "hopper", 96 * GB, 989.4, 66.9, 4000 * GB, f"NVIDIA GH200 datasheet, HBM3 ({_NVIDIA}/grace-hopper-superchip/)"
    ),
    "mi300x": _device(
        "cdna3",
        192 * GB,
        1307.4,
        163.4,
        5300 * GB,
        "AMD Instinct MI300X data sheet (https://www.amd.com/en/products/accelerators/instinct/mi300/mi300x.html)",
    ),
}
BUSES: Mapping[str, BusPart] = {
    "pcie3": _pcie(15.75, "3.0"),
    "pcie4": _pcie(31.5, "4.0"),
    "pcie5": _pcie(63.0, "5.0"),
    "nvlink-c2c": BusPart(
        h2d_bytes_per_s=450 * GB,
        d2h_bytes_per_s=450 * GB,
        sources=dict.fromkeys(
            ("h2d_bytes_per_s", "d2h_bytes_per_s", "both"),
            f"900 GB/s both ways together, NVIDIA GH200 datasheet ({_NVIDIA}/grace-hopper-superchip/)",
        ),
    ),
}
_JEDEC = "8 bytes per transfer and channel (JEDEC JESD79-4, JESD79-5)"
HOSTS: Mapping[str, HostPart] = {
    "desktop-ddr4": _host(64 * GIB, 51.2 * GB, 8, f"2 channels of DDR4-3200, {_JEDEC}"),
    "desktop-ddr5": _host(96 * GIB, 89.6 * GB, 16, f"2 channels of DDR5-5600, {_JEDEC}"),
    "server-ddr4": _host(512 * GIB, 204.8 * GB, 32, f"8 channels of DDR4-3200, {_JEDEC}"),
    "server-ddr4-2s": _host(768 * GIB, 409.6 * GB, 52, f"16 channels of DDR4-3200 in two sockets, {_JEDEC}"),
    "server-ddr5": _host(1024 * GIB, 460.8 * GB, 16, f"12 channels of DDR5-4800, {_JEDEC}"),
    "server-ddr5-2s": _host(2048 * GIB, 614.4 * GB, 96, f"16 channels of DDR5-4800 in two sockets, {_JEDEC}"),
    "grace": _host(480 * GB, 512 * GB, 72, f"LPDDR5X, NVIDIA GH200 datasheet ({_NVIDIA}/grace-hopper-superchip/)"),
}
DISKS: Mapping[str, DiskPart] = {
    "laptop-nvme": _disk(1 * TB, 3.5, 3.3, 600 * TB, f"Samsung 970 EVO Plus 1 TB ({_SAMSUNG}/970evoplus/)"),
    "desktop-nvme": _disk(2 * TB, 7.45, 6.9, 1200 * TB, f"Samsung 990 PRO 2 TB ({_SAMSUNG}/990-pro/)"),
    "server-nvme": _disk(
        3.84 * TB,
        6.5,
        3.4,
        3.84 * TB * 365 * 5,
        "Intel (Solidigm) D7-P5510 3.84 TB, one drive write per day for five years "
        "(https://www.solidigm.com/products/data-center/d7/p5510.html)",
    ),
}
DISKS = {
    **DISKS,
    "server-nvme-x8": dataclasses.replace(
        DISKS["server-nvme"],
        **{
            field: 8 * getattr(DISKS["server-nvme"], field)
            for field in ("size_bytes", "read_bytes_per_s", "write_bytes_per_s", "endurance_bytes")
        },
    ),
}
_NCCL_TESTS = "https://github.com/NVIDIA/nccl-tests/issues"
_GLOO_SOURCE = (
    "gloo over TCP, one rank: 20 Gbit/s of algorithm bandwidth between two processes on one machine "
    "(https://github.com/meta-pytorch/torchft/pull/199)"
)


def _links(
    bytes_per_s: float, source: str, *, per_port: int = 1, over_bus: bool = False, direct: bool = True
) -> LinksPart:
    ports = f"{per_port} devices behind each switch, which has one way to the host"
    where = "bytes pass the bus" + ("" if direct else ", and host memory")
    return LinksPart(
        bytes_per_s=bytes_per_s,
        on_bus=float(over_bus),
        through_host=float(not direct),
        devices_per_port=per_port,
        sources={
            "bytes_per_s": source,
            "on_bus": where,
            "through_host": where,
            "devices_per_port": ports,
            "host_bytes_per_s": _GLOO_SOURCE,
        },
    )


def _network(adapters: int, gigabits: float) -> NetworkPart:
    per_adapter = _NETWORK * gigabits / 8 * GB
    return NetworkPart(
        bytes_per_s=adapters * per_adapter,
        sources={"bytes_per_s": f"{adapters} x {gigabits:g} Gbit/s, {_NETWORK_SOURCE}"},
    )


_NETWORK = 48 / 50
_NETWORK_SOURCE = f"times 0.96: 48 GB/s of a ConnectX-7 with 400 Gbit/s, as its makers say ({_NCCL_TESTS}/267)"
_NO_P2P = (
    "what NCCL takes for paths between GPUs of two sockets when it looks for rings: 10 GB/s, of RTX 4090s, which do "
    f"not reach one another's memory (log in {_NCCL_TESTS}/307)"
)
LINKS: Mapping[str, LinksPart] = {
    "nvlink3": _links(
        230 * GB, f"230 GB/s of the 300 of an A100, as NCCL's makers say ({_NCCL_TESTS}/149)", per_port=2
    ),
    "nvlink4": _links(370 * GB, f"370 GB/s of the 450 of an H100, as NCCL's makers say ({_NCCL_TESTS}/212)"),
    "p2p-pcie4": _links(
        20.5 * GB,
        "41 GB/s both ways at once between A100s with PCIe 4.0, P2P on, over the slowest pair of eight "
        "(p2pBandwidthLatencyTest in https://github.com/NVIDIA/nccl/issues/841)",
        over_bus=True,
    ),
    "switch-pcie4": _links(
        24 * GB,
        f"what NCCL takes for PCIe 4.0 x16 when it looks for rings: 24 GB/s (log in {_NCCL_TESTS}/307)",
        per_port=4,
        over_bus=True,
    ),
    "no-p2p": _links(10 * GB, _NO_P2P, over_bus=True, direct=False),
}
NETWORKS: Mapping[str, NetworkPart] = {
    "8x400g": _network(8, 400),
    "8x200g": _network(8, 200),
    "400g": _network(1, 400),
    "200g": _network(1, 200),
    "100g": _network(1, 100),
}
_USUAL = {
    "rtx-4090": ("pcie4", "desktop-ddr5", "desktop-nvme", "no-p2p", "100g"),
    "a100-40gb": ("pcie4", "server-ddr4", "server-nvme", "nvlink3", "8x200g"),
    "a100-80gb": ("pcie4", "server-ddr4", "server-nvme", "nvlink3", "8x200g"),
    "h100": ("pcie5", "server-ddr5", "server-nvme", "nvlink4", "8x400g"),
    "h200": ("pcie5", "server-ddr5", "server-nvme", "nvlink4", "8x400g"),
    "gh200": ("nvlink-c2c", "grace", "server-nvme", None, "400g"),
    "mi300x": ("pcie5", "server-ddr5", "server-nvme", None, "8x400g"),
}


def known_hardware(name: str) -> Hardware:
    """Return a machine by the names of its parts: ``rtx-4090``, ``rtx-4090+pcie3+desktop-ddr4+laptop-nvme``.

    Args:
        name: A device, and parts that are not usual beside it, joined by ``+``. ``no-disk`` leaves the disk out.

    Raises:
        ConfigError: A part is unknown, two are of one kind, or there is no device.
    """
    kinds: Mapping[str, Mapping[str, Any]] = {
        "device": DEVICES,
        "bus": BUSES,
        "host": HOSTS,
        "disk": {**DISKS, "no-disk": None},
        "links": LINKS,
        "network": NETWORKS,
    }
    found: dict[str, str] = {}
    for part in name.lower().split("+"):
        kind = next((kind for kind, parts in kinds.items() if part in parts), None)
        if kind is None:
            known = [part for parts in kinds.values() for part in parts]
            near = difflib.get_close_matches(part, known, n=1)
            hint = f"; the nearest is '{near[0]}'" if near else ""
            raise ConfigError(
                f"--hardware: expected a JSON file, or parts of {', '.join(known)}, but got '{part}'{hint}"
            )
        if kind in found:
            raise ConfigError(f"--hardware '{name}': expected one {kind}, but got '{found[kind]}' and '{part}'")
        found[kind] = part
    if "device" not in found:
        raise ConfigError(f"--hardware '{name}': expected a device among the parts, one of {', '.join(DEVICES)}")
    usual: dict[str, str | None] = dict(
        zip(("bus", "host", "disk", "links", "network"), _USUAL[found["device"]], strict=True)
    )
    named: dict[str, Any] = {kind: found.get(kind) or usual[kind] for kind in kinds}
    chosen: dict[str, Any] = {kind: named[kind] and parts[named[kind]] for kind, parts in kinds.items()}
    return Hardware(name=name, **chosen)


def named_hardware(named: str | Path) -> Hardware:
    """Return a machine by its file or by the names of its parts.

    Raises:
        ConfigError: There is no such machine.
    """
    is_file = isinstance(named, Path) or named.endswith(".json") or Path(named).is_file()
    try:
        return Hardware.load(named) if is_file else known_hardware(str(named))
    except ConfigError as error:
        if Path(named).is_dir():  # a folder may also have the name of a part
            raise ConfigError(
                f"hardware: expected a JSON file, or names of parts, but '{named}' is a folder; name its file"
            ) from error
        advice = "; correct the file, or measure the machine again with outcore probe" if is_file else ""
        raise ConfigError(f"{error}{advice}") from error
