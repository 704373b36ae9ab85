"""Recorded episodes in formats of other programs; `tools.export_episodes` is the command."""
