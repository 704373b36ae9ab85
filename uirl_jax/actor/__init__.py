"""Plays episodes: one (`rollout`), and many in groups with retries after faults (`host`)."""
