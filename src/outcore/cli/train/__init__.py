"""``outcore train``: fine-tuning and pre-training from the command line, on TRL's SFTTrainer."""
