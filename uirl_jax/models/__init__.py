"""What model families share: layers, the decoder, LoRA, sharding, scoring, weight files, PEFT."""
