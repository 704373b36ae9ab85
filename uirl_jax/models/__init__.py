"""Model families in Flax NNX: layers, LoRA, sharding; a module and its weights per family."""
