"""Parts of common machines, to plan for a machine that is not at hand. Every figure has its source.

Figures are published by vendors. Where a measurement tells how much of such a figure is reached in practice, it is
multiplied by that factor. The engine's time per visit is left out. A measured machine (``outcore probe``) is better
than any of them.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping
from typing import Any

from outcore.core.errors import ConfigError
from outcore.spec.hardware import BusPart, DevicePart, DiskPart, Hardware, HostPart, LinksPart, NetworkPart

GB, GIB, TB = 1e9, 2.0**30, 1e12
TERA = 1e12

UPDATE_BYTES = 28
"""Bytes that AdamW moves per parameter. Master weight and two moments are read and written, a bf16 weight is written,
and a bf16 gradient is read."""
_MFU = 0.72
_MFU_SOURCE = (
    "0.72 of the peak, what FlashAttention-2 reports for whole training steps on an A100 (arXiv 2307.08691, abstract: "
    "225 TFLOP/s)"
)
_ATTENTION = 0.63
_ATTENTION_SOURCE = (
    "0.63 of the peak, what FlashAttention-2 reaches at most in backward on an A100 (arXiv 2307.08691, section 4.1)"
)
_DEVICE_UPDATE = 50 * GB * UPDATE_BYTES / (1555 * GB)
_DEVICE_UPDATE_SOURCE = (
    "memory bandwidth over 28 bytes per parameter, times 0.90: Elixir measured 50e9 parameters/s on an A100 with 1,555 "
    "GB/s (arXiv 2212.05339, hpcaitech/Elixir, elixir/search/utils.py)"
)
_HOST_UPDATE = 4 * 0.95 * GB * UPDATE_BYTES / (204.8 * GB)
_HOST_UPDATE_SOURCE = (
    "memory bandwidth over 28 bytes per parameter, times 0.52: 4 ranks with 0.95e9 parameters/s each on 8 channels of "
    "DDR4-3200 (Deep Optimizer States, arXiv 2410.21316, authors' logs on Polaris)"
)
_HOPPER_ATTENTION, _HOPPER_MEMORY, _HOPPER_UPDATE = 0.52, 0.82, 0.51
_HOPPER_KERNEL_S = 15e-6
_HOPPER_KERNEL_SOURCE = (
    "9e-6 of a kernel alone, measured on an H100 SXM (benchmarks/reports/gpu_h100_2026-11-23.md), and 6e-6 of Python "
    "around it, measured on a server's processor ([Note: launching] in probe.small_block)"
)
_HOPPER_SOURCE = "measured on an H100 SXM (benchmarks/reports/gpu_h100_2026-11-23.md)"
_BUS = 55.2 / 63.0
_BUS_SOURCE = (
    "times 0.876: 55.2 GB/s measured of the 63.0 of PCIe 5.0 x16 (Deep Optimizer States, arXiv 2410.21316, authors' "
    "logs on H100 nodes)"
)


def _device(memory_bytes: float, bf16: float, fp32: float, bytes_per_s: float, source: str) -> DevicePart:
    return DevicePart(
        memory_bytes=memory_bytes,
        bf16_flops=_MFU * bf16 * TERA,
        fp32_flops=_MFU * fp32 * TERA,
        attention_flops=_ATTENTION * bf16 * TERA,
        bytes_per_s=bytes_per_s,
        update_parameters_per_s=_DEVICE_UPDATE * bytes_per_s / UPDATE_BYTES,
        sources={
            "memory_bytes": source,
            "bf16_flops": f"{bf16} TFLOP/s dense, {source}; {_MFU_SOURCE}",
            "fp32_flops": f"{fp32} TFLOP/s without TF32, {source}; {_MFU_SOURCE}",
            "attention_flops": f"{bf16} TFLOP/s dense, {source}; {_ATTENTION_SOURCE}",
            "bytes_per_s": source,
            "update_parameters_per_s": _DEVICE_UPDATE_SOURCE,
        },
    )


def _hopper(memory_bytes: float, bytes_per_s: float, source: str) -> DevicePart:
    """Make a device with the factors of attention, memory and updates that were measured on one H100."""
    found = _device(memory_bytes, 989.4, 66.9, bytes_per_s, source)
    return dataclasses.replace(
        found,
        attention_flops=_HOPPER_ATTENTION * 989.4 * TERA,
        bytes_per_s=_HOPPER_MEMORY * bytes_per_s,
        update_parameters_per_s=_HOPPER_UPDATE * bytes_per_s / UPDATE_BYTES,
        kernel_s=_HOPPER_KERNEL_S,
        sources={
            **found.sources,
            "kernel_s": _HOPPER_KERNEL_SOURCE,
            "attention_flops": f"989.4 TFLOP/s dense, {source}; times {_HOPPER_ATTENTION}, {_HOPPER_SOURCE}",
            "bytes_per_s": f"{source}; times {_HOPPER_MEMORY}, {_HOPPER_SOURCE}",
            "update_parameters_per_s": f"memory over 28 bytes per parameter, times {_HOPPER_UPDATE}, {_HOPPER_SOURCE}",
        },
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


def _host(memory_bytes: float, bytes_per_s: float, what: str) -> HostPart:
    return HostPart(
        memory_bytes=memory_bytes,
        bytes_per_s=bytes_per_s,
        update_parameters_per_s=_HOST_UPDATE * bytes_per_s / UPDATE_BYTES,
        sources={
            "memory_bytes": "a common size; say your own with --host-memory",
            "bytes_per_s": what,
            "update_parameters_per_s": _HOST_UPDATE_SOURCE,
        },
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
        24 * GIB,
        165.2,
        82.6,
        1008 * GB,
        "NVIDIA Ada GPU architecture whitepaper, appendix A "
        "(https://images.nvidia.com/aem-dam/Solutions/geforce/ada/nvidia-ada-gpu-architecture.pdf)",
    ),
    "a100-40gb": _device(40 * GIB, 312, 19.5, 1555 * GB, f"NVIDIA A100 datasheet ({_NVIDIA}/a100/)"),
    "a100-80gb": _device(80 * GIB, 312, 19.5, 2039 * GB, f"NVIDIA A100 datasheet, SXM ({_NVIDIA}/a100/)"),
    "h100": _hopper(80 * GIB, 3350 * GB, f"NVIDIA H100 datasheet, SXM ({_NVIDIA}/h100/)"),
    "h200": _hopper(141 * GB, 4800 * GB, f"NVIDIA H200 datasheet, SXM ({_NVIDIA}/h200/)"),
    "gh200": _hopper(96 * GB, 4000 * GB, f"NVIDIA GH200 datasheet, HBM3 ({_NVIDIA}/grace-hopper-superchip/)"),
    "mi300x": _device(
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
    "desktop-ddr4": _host(64 * GIB, 51.2 * GB, f"2 channels of DDR4-3200, {_JEDEC}"),
    "desktop-ddr5": _host(96 * GIB, 89.6 * GB, f"2 channels of DDR5-5600, {_JEDEC}"),
    "server-ddr4": _host(512 * GIB, 204.8 * GB, f"8 channels of DDR4-3200, {_JEDEC}"),
    "server-ddr4-2s": _host(768 * GIB, 409.6 * GB, f"16 channels of DDR4-3200 in two sockets, {_JEDEC}"),
    "server-ddr5": _host(1024 * GIB, 460.8 * GB, f"12 channels of DDR5-4800, {_JEDEC}"),
    "server-ddr5-2s": _host(2048 * GIB, 614.4 * GB, f"16 channels of DDR5-4800 in two sockets, {_JEDEC}"),
    "grace": _host(480 * GB, 512 * GB, f"LPDDR5X, NVIDIA GH200 datasheet ({_NVIDIA}/grace-hopper-superchip/)"),
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
