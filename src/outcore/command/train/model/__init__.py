"""What a run trains: a model without its weights, its tokenizer, and a frozen reference."""
