"""``outcore plan`` for architectures of Transformers by configuration alone, and ``prepare`` beside it.

    python -m planning.architectures          (in the folder research)

Prints a row for each architecture, of the sizes that its configuration class has by itself: what is predicted on an
H100 with 32 GiB of its memory, and the bytes of the plan. For small ones, a second table compares the bytes of the plan
with those that ``prepare`` works out again from a model with weights.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers

import outcore
from outcore.command.plan.answer import answer
from outcore.command.plan.question import Question
from outcore.core.errors import OutcoreError
from outcore.core.quantities import format_bytes, format_rate
from outcore.planner.timing.known_hardware import known_hardware

MACHINE = "h100+pcie5+server-ddr5+server-nvme"
FEW_LAYERS = {"num_hidden_layers": 4}  # of models whose step takes long to follow, or that have hundreds of layers
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": {},
    "Qwen3MoeForCausalLM": {},
    "GptOssForCausalLM": {"quantization_config": {"quant_method": "mxfp4"}},
    "DeepseekV3ForCausalLM": {**FEW_LAYERS, "n_routed_experts": 32, "quantization_config": {"quant_method": "fp8"}},
    "Mamba2ForCausalLM": FEW_LAYERS,
    "MambaForCausalLM": FEW_LAYERS,
    "Qwen3NextForCausalLM": FEW_LAYERS,
    "RwkvForCausalLM": FEW_LAYERS,
    "Gemma3ForConditionalGeneration": {"vision_config": {"image_size": 896}},
    "LlavaForConditionalGeneration": {},
    "Qwen2_5_VLForConditionalGeneration": {},
    "InternVLForConditionalGeneration": {},
    "PaliGemmaForConditionalGeneration": {},
    "T5ForConditionalGeneration": {},
    "BartForConditionalGeneration": {},
    "MBartForConditionalGeneration": {},
    "PegasusForConditionalGeneration": {},
    "BertForMaskedLM": {},
    "RobertaForMaskedLM": {},
    "ModernBertForMaskedLM": {},
    "DebertaV2ForMaskedLM": {},
    "DistilBertForSequenceClassification": {},
    "ViTForImageClassification": {},
    "SwinForImageClassification": {},
    "ConvNextForImageClassification": {},
    "ResNetForImageClassification": {},
    "Dinov2ForImageClassification": {},
    "BeitForImageClassification": {},
    "SegformerForSemanticSegmentation": {},
    "ViTMAEForPreTraining": {},
    "CLIPModel": {},
    "VideoMAEForVideoClassification": {},
    "WhisperForConditionalGeneration": {},
    "Speech2TextForConditionalGeneration": {},
    "Wav2Vec2ForCTC": {},
    "ASTForAudioClassification": {},
    "PatchTSTForPrediction": {},
}
GIVEN = {"PatchTSTForPrediction": ["past_values=4x32x1:bfloat16"]}
LENGTHS = {"MambaForCausalLM": 64, "RwkvForCausalLM": 64, "CLIPModel": 77}  # a loop over tokens; a table of positions

_TEXT = {"vocab_size": 99, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4}
_IMAGE = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4}
_IMAGE |= {"image_size": 32, "patch_size": 8}
_BOTH = {"d_model": 64, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 96, "decoder_ffn_dim": 96}
_BOTH |= {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "vocab_size": 99}
_BOTH |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
SMALL: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": _TEXT,
    "Qwen3MoeForCausalLM": {**_TEXT, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    "BertForMaskedLM": _TEXT,
    "RobertaForMaskedLM": _TEXT,
    "T5ForConditionalGeneration": {"vocab_size": 99, "d_model": 64, "num_layers": 2, "d_ff": 96, "num_heads": 4},
    "BartForConditionalGeneration": _BOTH,
    "WhisperForConditionalGeneration": {**_BOTH, "max_source_positions": 50, "num_mel_bins": 8},
    "ViTForImageClassification": _IMAGE,
    "Dinov2ForImageClassification": _IMAGE,
    "ResNetForImageClassification": {"embedding_size": 16, "hidden_sizes": [64, 64], "depths": [3, 3]},
    "LlavaForConditionalGeneration": {
        "text_config": {**_TEXT, "model_type": "llama"},
        "vision_config": {**_IMAGE, "model_type": "clip_vision_model"},
        "image_token_index": 98,
    },
}


def config_in(folder: Path, name: str, changes: Mapping[str, Any]) -> Path:
    """Write the configuration of an architecture. Args: changes: Fields that differ from what its class has."""
    kind = getattr(transformers, name).config_class
    path = folder / f"{name}.json"
    path.write_text(json.dumps({**changes, "model_type": kind.model_type, "architectures": [name]}))
    return path


def question(path: Path, hardware: str, *, length: int, inputs: list[str] | None = None, **more: Any) -> Question:
    """Ask for four samples."""
    sizes: dict[str, Any] = {"device_memory": "32GiB", "host_memory": None, "disk_size": None, **more}
    return Question(
        model=str(path),
        hardware=hardware,
        batch_size=4,
        seq_len=length,
        grad_accum=1,
        precision="bf16",
        clipping=True,
        inputs=inputs,
        **sizes,
    )


def planned(folder: Path, name: str) -> tuple[str, ...]:
    """Plan for an architecture. Returns a row."""
    path, start = config_in(folder, name, ARCHITECTURES[name]), time.process_time()
    try:
        length = LENGTHS.get(name, 512)
        found = answer(question(path, MACHINE, length=length, inputs=GIVEN.get(name)))
    except OutcoreError as error:
        return name, "refused: " + " ".join(str(error).split())[:200]
    numel = sum(param.parameters for unit in found.spec.units for param in unit.params)
    rate = f"{format_rate(found.tokens_per_s)} {found.question.counted}/s"
    sizes = (format_bytes(nbytes) for nbytes in found.found.plan.tier_bytes.values())
    said = "; ".join([*(["not followed"] if found.guess else []), *(note.split(":")[0][:60] for note in found.notes)])
    seconds = f"{time.process_time() - start:.0f} s"
    return name, f"{numel / 1e6:,.0f}e6", str(len(found.spec.units) - 1), rate, *sizes, seconds, said


def compared(folder: Path, name: str) -> tuple[str, ...]:
    """Compare the bytes of a plan with those of ``prepare``. Returns a row."""
    machine = known_hardware("rtx-4090+no-disk")
    here = dataclasses.replace(machine, device=dataclasses.replace(machine.device, runs_ahead=0))
    here.save(folder / "hardware.json")
    path, size = config_in(folder, name, SMALL[name]), 2 * 2**20
    sizes = {"device_memory": str(size), "host_memory": "32MiB"}
    found = answer(question(path, str(folder / "hardware.json"), length=16, **sizes))
    kind = getattr(transformers, name)
    model = kind(transformers.AutoConfig.from_pretrained(path)).to(torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters())
    budget = outcore.Budget(device=size, host="32MiB")
    plan = found.found.plan
    with outcore.prepare(model, optimizer, precision="bf16", plan=plan, budget=budget, device="cpu") as (_, streamed):
        own = streamed.plan.tier_bytes
    texts = (f"{format_bytes(plan.tier_bytes[tier])} / {format_bytes(own[tier])}" for tier in ("device", "host"))
    return name, *texts, "equal" if own == plan.tier_bytes else "DIFFERENT"


def table(heads: tuple[str, ...], rows: Iterator[tuple[str, ...]]) -> None:
    """Print a table row by row."""
    print(f"| {' | '.join(heads)} |\n|{'---|' * len(heads)}")
    for row in rows:
        print(f"| {' | '.join(row)} |", flush=True)


def main() -> None:
    """Print both tables. Arguments of the command line: architectures; by default all."""
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    wanted = sys.argv[1:]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        heads = ("architecture", "parameters", "units", "predicted", "device", "host", "disk", "planned in", "notes")
        table(heads, (planned(folder, each) for each in ARCHITECTURES if not wanted or each in wanted))
        print()
        heads = ("architecture", "device: plan / prepare", "host: plan / prepare", "bytes")
        table(heads, (compared(folder, each) for each in SMALL if not wanted or each in wanted))


if __name__ == "__main__":
    main()
