"""Sampling: contexts and screenshots in, token ids with their log-probabilities out."""
