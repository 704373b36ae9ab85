"""Recorded screens and steps as tasks, `recorded/<set>`: a row is an episode, judged by rules."""
