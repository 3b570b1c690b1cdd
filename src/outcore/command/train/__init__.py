"""``outcore train`` and ``outcore dpo``: training from the command line, on TRL's SFTTrainer and DPOTrainer."""
