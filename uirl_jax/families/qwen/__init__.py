"""What the Qwen-VL families share: images, positions, chat. Not a family: the table has no entry."""
