"""Write the table of ``hardware.md``: four models over three sizes of device memory, as ``outcore plan`` predicts them.

    python docs/make_hardware.py

Takes some minutes. Shapes are those of the models' published ``config.json``.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from outcore.command.plan.answer import Answer, Question, answer
from outcore.core.errors import PlanInfeasibleError
from outcore.core.quantities import format_bytes
from outcore.spec.budget import tier_bytes

PAGE = Path(__file__).resolve().parent / "hardware.md"
BEGIN, END = "<!-- made by make_hardware.py -->", "<!-- end of what is made -->"
LLAMA = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 128256}
QWEN = {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "vocab_size": 152064}
ROUND = {"max_position_embeddings": 32768, "tie_word_embeddings": False, "num_key_value_heads": 8}


def shape(base: dict[str, Any], hidden: int, inner: int, layers: int, heads: int) -> dict[str, Any]:
    """A configuration."""
    sizes = {"hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers}
    return {**base, **ROUND, **sizes, "num_attention_heads": heads}


MODELS = {
    "8B (Llama 3.1)": shape(LLAMA, 4096, 14336, 32, 32),
    "14B (Qwen 2.5)": shape(QWEN, 5120, 13824, 48, 40),
    "32B (Qwen 2.5)": shape(QWEN, 5120, 27648, 64, 40),
    "70B (Llama 3.1)": shape(LLAMA, 8192, 28672, 80, 64),
}
MACHINES = {
    "24 GB": "rtx-4090+pcie4+server-ddr4+server-nvme",
    "48 GB": "a100-80gb+pcie4+server-ddr4+server-nvme",
    "80 GB": "a100-80gb+pcie4+server-ddr4+server-nvme",
}
DEVICE_MEMORY = {"24 GB": None, "48 GB": "43GiB", "80 GB": None}


def ask(folder: Path, model: str, memory: str) -> Answer | PlanInfeasibleError:
    """What ``outcore plan`` finds."""
    path = folder / "config.json"
    path.write_text(json.dumps(MODELS[model]))
    try:
        return answer(
            Question(
                model=str(path),
                hardware=MACHINES[memory],
                batch_size=2,
                seq_len=2048,
                grad_accum=4,
                precision="bf16",
                clipping=True,
                device_memory=DEVICE_MEMORY[memory],
                host_memory=None,
                disk_size="10TB",
            )
        )
    except PlanInfeasibleError as error:
        return error


def cells(found: Answer | PlanInfeasibleError) -> tuple[str, ...]:
    """Of a row, behind model and memory."""
    if isinstance(found, PlanInfeasibleError):
        return "does not fit", "", "", "", "", "", ""
    binding, plan = found.found.simulation.binding, found.found.plan
    taken = tier_bytes(found.spec, plan)
    binds = max(binding, key=binding.__getitem__, default="compute").replace("_", " ")
    device = format_bytes(taken["device"] + plan.kept_bytes)
    rest = tuple(format_bytes(taken[tier]) if taken[tier] else "-" for tier in ("host", "disk"))
    ways = found.policies.most_common()
    counts = [f" ({count})" if len(ways) > 1 else "" for _, count in ways]
    saved = ", ".join(f"{policy} on {tier}{count}" for ((policy, tier), _), count in zip(ways, counts, strict=True))
    return f"{found.found.simulation.step_s:.1f} s", f"{found.tokens_per_s:,.0f}", binds, saved, device, *rest


def tables() -> str:
    """All rows."""
    heads = ("model", "device memory", "step", "tokens/s", "binds", "activations", "device", "host", "disk")
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    with tempfile.TemporaryDirectory() as folder:
        for model in MODELS:
            for memory in MACHINES:
                row = (model, memory, *cells(ask(Path(folder), model, memory)))
                lines.append("| " + " | ".join(row) + " |")
    return "\n".join(lines)


def main() -> None:
    """Replace what is made."""
    before, _, rest = PAGE.read_text().partition(BEGIN)
    after = rest.partition(END)[2]
    PAGE.write_text(f"{before}{BEGIN}\n\n{tables()}\n\n{END}{after}")


if __name__ == "__main__":
    main()
