"""What the Qwen-VL families share: images, positions, chat. Not a family, so not in the table."""
