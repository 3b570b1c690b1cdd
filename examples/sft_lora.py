"""LoRA with TRL's SFTTrainer: the base model is frozen and streamed, the adapters are trained.

``python examples/sft_lora.py [FOLDER]``
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from datasets import Dataset
from peft import AutoPeftModelForCausalLM, LoraConfig
from tiny import tiny_llama, tiny_tokenizer
from trl import SFTConfig, SFTTrainer

import outcore
from outcore.integrations.transformers import OutcoreMixin


class Trainer(OutcoreMixin, SFTTrainer):
    """SFTTrainer within a budget."""


def main(folder: Path) -> None:
    """Learn to add; the adapter is saved in ``folder/adapter``."""
    tiny_llama().save_pretrained(folder / "base")  # in your script the base model exists already
    rows = [{"prompt": f"{a} + {b} = ", "completion": str(a + b)} for a in range(8) for b in range(8)]

    trainer = Trainer(
        model=str(folder / "base"),
        args=SFTConfig(
            output_dir=str(folder),
            per_device_train_batch_size=8,
            max_length=16,  # tells the plan how much memory activations take on a GPU
            max_steps=20,
            learning_rate=1e-2,
            logging_steps=1,
            save_strategy="no",
            bf16=False,  # no autocast: compute in the model's own dtype
        ),
        train_dataset=Dataset.from_list(rows),
        processing_class=tiny_tokenizer(),
        peft_config=LoraConfig(r=8, target_modules="all-linear"),
        budget=outcore.Budget(device="1536KiB", host="1MiB", disk=folder),
    )
    trainer.train()
    trainer.save_model(str(folder / "adapter"))
    outcore.close(trainer.model)

    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    print(f"loss {losses[0]:.2f} -> {losses[-1]:.2f}")
    adapted = AutoPeftModelForCausalLM.from_pretrained(folder / "adapter")
    print(f"the adapter loads: {type(adapted).__name__}, rank {adapted.peft_config['default'].r}")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        main(Path(sys.argv[1] if len(sys.argv) > 1 else temporary))
