"""70B and 1T on 8 to 512 GPUs of known nodes, as ``outcore plan`` predicts them, beside ZeRO-3 offload by formulas.

    python -m planning.scale          (in the folder research)

Nothing here is measured. The step of ZeRO-3 offload is computed from what its authors and those who measured it
report; see ``zero3_offload``.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outcore.command.plan.answer import Answer, answer_for
from outcore.command.plan.question import Question
from outcore.command.train.model.source import find_model
from outcore.core.errors import PlanInfeasibleError
from outcore.core.quantities import format_bytes
from outcore.planner.timing.known_hardware import known_hardware
from outcore.planner.timing.rank_layout import Ranks, links_of, network_of, share_of
from outcore.spec.hardware import Hardware

GIGA, GIB = 1e9, 2**30
LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128256,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": False,
}


def shape(hidden: int, inner: int, layers: int, heads: int, kv_heads: int) -> dict[str, Any]:
    """A model configuration."""
    sizes = {"hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers}
    return {**LLAMA, **sizes, "num_attention_heads": heads, "num_key_value_heads": kv_heads}


MODELS = {
    "70B": shape(8192, 28672, 80, 64, 8),  # Llama 3.1
    "1T, 138B active": {  # 200 layers of 4.9 billion parameters, with 2 of 16 experts for each token
        **shape(6144, 16384, 200, 48, 8),
        **{"model_type": "mixtral", "architectures": ["MixtralForCausalLM"]},
        **{"num_local_experts": 16, "num_experts_per_tok": 2, "vocab_size": 32000},
    },
}
NODES = {
    "8 x RTX 4090, PCIe 4.0 without P2P": "rtx-4090+server-ddr4-2s+server-nvme-x8+no-p2p+200g",
    "8 x A100 80 GB, PCIe 4.0 switches": "a100-80gb+server-ddr4-2s+server-nvme-x8+switch-pcie4+8x200g",
    "8 x H100, NVLink": "h100+server-ddr5-2s+server-nvme-x8",
}
HOST_BYTES = {node: 1024 * GIB for node in NODES if "PCIe" in node}
PER_NODE, SEQ_LEN, MICRO_BATCHES = 8, 4096, 4
GPUS = (8, 64, 512)
MEASURED = {"h100": (1.65 * GIGA * 4, 15.33 / 4 / (4.460 - 0.971)), "others": (0.75 * GIGA * 4, 11.3 / 4 / 1.545)}
"""Device -> rates from the logs of Deep Optimizer States (arXiv 2410.21316: 4 x H100 with 20B, 4 x A100 with 13B).
The first is parameters per second that the processors of a node of four ranks update with DeepSpeed's CPU Adam. The
second is billions of parameters per second and rank whose gradients its blocking copy takes to host memory."""


@dataclass(frozen=True)
class Zero3:
    """ZeRO-3 with parameters and optimizer in host memory."""

    host_bytes: float
    """Host memory of a node, in bytes."""
    step_s: float
    received_bytes: float
    """Bytes that one rank receives per step."""


def zero3_offload(
    numel: float, hardware: Hardware, ranks: Ranks, compute_s: float, micro_batches: int, measured: tuple[float, float]
) -> Zero3:
    """Predict a step of ZeRO-3 offload by the formulas of others.

    * Host memory: 18 bytes per parameter over all nodes, times 1.5 for buffers (DeepSpeed,
      ``estimate_zero3_model_states_mem_needs``).
    * Between ranks: parameters are gathered for forward and for backward, gradients reduced once, 2 bytes each
        (ZeRO, arXiv 1910.02054, section 7.2.2: three times the parameters). Reduction is a ring: what passes the
      network does so once per node.
    * A rank copies its part of the parameters over its bus for each gather. All of this runs beside compute (ZeRO-
      Infinity, arXiv 2104.07857, section 6.2), so a micro-batch takes the longest of the three.
    * Its part of the gradients goes home by a blocking copy at a measured rate, in each micro-batch.
    * After all micro-batches the processors update at a measured rate, and bf16 weights are written meanwhile.

    Args:
            numel: Number of parameters.
            hardware: A node.
            ranks: Number of ranks that train.
            compute_s: Seconds of one micro-batch: forward, forward again, backward.
            micro_batches: Micro-batches of a step.
        measured: See ``MEASURED``.
    """
    updated, flushed = measured[0], measured[1] * GIGA
    part = numel / ranks.size
    others = (ranks.size - 1) / ranks.size
    outside = (ranks.size - ranks.per_node) / max(ranks.size - 1, 1)
    link_s = max(1 / links_of(hardware).bytes_per_s, outside / network_of(hardware).bytes_per_s)
    communicated = 3 * 2 * numel * others
    fetched_s = 2 * 2 * part / share_of(hardware, ranks).bus.h2d_bytes_per_s
    beside_s = max(compute_s, communicated * link_s, fetched_s)
    update_s = part * ranks.per_node / updated
    return Zero3(
        host_bytes=18 * 1.5 * numel / ranks.nodes,
        step_s=micro_batches * (beside_s + part / flushed) + update_s,
        received_bytes=micro_batches * communicated,
    )


def ask(model: str, node: str, gpus: int, folder: Path) -> Answer | PlanInfeasibleError:
    """Return what ``outcore plan`` finds."""
    path = folder / model
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(MODELS[model]))
    question = Question(
        model=model,
        hardware=NODES[node],
        batch_size=1,
        seq_len=SEQ_LEN,
        grad_accum=MICRO_BATCHES,
        precision="bf16",
        clipping=True,
        device_memory=None,
        host_memory=str(int(0.8 * HOST_BYTES.get(node, 2048 * GIB))),
        disk_size=None,
        nodes=gpus // PER_NODE,
        gpus_per_node=PER_NODE,
    )
    try:
        return answer_for(question, find_model(str(path / "config.json")), known_hardware(NODES[node]))
    except PlanInfeasibleError as error:
        return error


def rows(models: list[str]) -> Iterator[tuple[str, ...]]:
    """Yield the rows of the table."""
    with tempfile.TemporaryDirectory() as folder:
        for model in models:
            for node in NODES:
                for gpus in GPUS:
                    start_s = time.monotonic()
                    found = ask(model, node, gpus, Path(folder))
                    print(f"{model}, {node}, {gpus}: {time.monotonic() - start_s:.0f} s", file=sys.stderr, flush=True)
                    yield (model, node, str(gpus), *cells(found, node))


def cells(found: Answer | PlanInfeasibleError, node: str) -> tuple[str, ...]:
    """Return the cells after model, node and number of GPUs."""
    if isinstance(found, PlanInfeasibleError):
        needs = ", ".join(
            f"{nbytes / 2**30:,.0f} GiB of {tier}" for tier, nbytes in found.required_bytes.items() if nbytes
        )
        return (f"does not fit: the least is {needs}", *[""] * 8)
    setting, simulation = found.setting, found.found.simulation
    compute_s = sum(
        2 * setting.rates.forward_s[unit.name] + setting.rates.backward_s[unit.name] for unit in setting.model.units
    )
    numel = sum(param.parameters for unit in setting.model.units for param in unit.params)
    measured = MEASURED["h100" if "h100" in found.hardware.name else "others"]
    zero3 = zero3_offload(numel, found.hardware, setting.ranks, compute_s, MICRO_BATCHES, measured)
    fits = zero3.host_bytes <= HOST_BYTES.get(node, 2048 * GIB)
    binds = max(simulation.binding, key=simulation.binding.__getitem__, default="compute")
    node_bytes, last = found.of_node(found.peak_bytes()), found.found.plan.units[-1]
    how = "one copy a node" if last.gather == "host" else WEIGHTS[last.partition]
    return (
        f"{simulation.step_s:.1f} s",
        f"{found.tokens_per_s:,.0f}",
        binds.replace("_", " "),
        f"{how}; {last.weights}, {last.gradients}, {last.states}",
        f"{node_bytes['host'] / 2**30:,.0f} + {node_bytes['disk'] / 2**30:,.0f} GiB",
        format_bytes(int(sum(found.received_bytes().values()))),
        f"{zero3.step_s:.1f} s" if fits else f"needs {zero3.host_bytes / 2**30:,.0f} GiB",
        f"{zero3.step_s / simulation.step_s:.1f}" if fits else "",
        format_bytes(int(zero3.received_bytes)),
    )


WEIGHTS = {"replicate": "whole on each rank", "node": "cut over a node", "world": "cut over all"}
HEADS = (
    *(
        "model",
        "nodes",
        "GPUs",
        "step",
        "tokens/s",
        "binds",
        "weights; homes of the last layer: weights, gradients, states",
    ),
    *("host + disk of a node", "received by a rank", "ZeRO-3 offload", "times outcore's", "received by a rank there"),
)


def main() -> None:
    print("| " + " | ".join(HEADS) + " |\n|" + "---|" * len(HEADS))
    for row in rows(sys.argv[1:] or list(MODELS)):
        print("| " + " | ".join(row) + " |", flush=True)


if __name__ == "__main__":
    main()
