"""Tests, and the worlds that they share."""
