"""Preferences with TRL's DPOTrainer: the policy and the reference model are both streamed.

``python examples/dpo.py [FOLDER]``
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from datasets import Dataset
from tiny import tiny_llama, tiny_tokenizer
from transformers import AutoModelForCausalLM
from trl import DPOConfig, DPOTrainer

import outcore
from outcore.integrations.transformers import OutcoreMixin


class Trainer(OutcoreMixin, DPOTrainer):
    """DPOTrainer within a budget."""


def main(folder: Path) -> None:
    """Learn to be polite; the model is saved in ``folder/model``."""
    things = ["tea", "coffee", "water", "milk", "bread", "soup", "rice", "fish"]
    rows = [{"prompt": f"Some {it}, please. ", "chosen": f"Here is your {it}.", "rejected": "No."} for it in things]

    # Without an optimizer the model is frozen; its budget is in addition to that of the policy.
    room = outcore.Budget(device="320KiB", host="256KiB", disk=folder)
    reference, _ = outcore.prepare(tiny_llama(), None, budget=room, precision="bf16")
    trainer = Trainer(
        model=tiny_llama(),
        ref_model=reference,
        args=DPOConfig(
            output_dir=str(folder),
            per_device_train_batch_size=4,
            max_length=64,  # tells the plan how much memory activations take on a GPU
            max_steps=10,
            learning_rate=1e-3,
            logging_steps=1,
            save_strategy="no",
            bf16=False,  # no autocast: compute in the model's own dtype
        ),
        train_dataset=Dataset.from_list(rows),
        processing_class=tiny_tokenizer(),
        budget=outcore.Budget(device="3MiB", host="2MiB", disk=folder),
        precision="bf16",  # bf16 weights, fp32 masters
    )
    trainer.train()
    trainer.save_model(str(folder / "model"))
    outcore.close(trainer.model)
    outcore.close(reference)

    first, *_, last = (entry for entry in trainer.state.log_history if "loss" in entry)
    print(f"loss {first['loss']:.3f} -> {last['loss']:.3f}")
    print(f"reward margin {first['rewards/margins']:.3f} -> {last['rewards/margins']:.3f}")
    print(f"the model loads: {type(AutoModelForCausalLM.from_pretrained(folder / 'model')).__name__}")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        main(Path(sys.argv[1] if len(sys.argv) > 1 else temporary))
