"""What ships with the package: models, adapters, prompts and pages, and the configs beside it."""

from pathlib import Path

DIRECTORY = Path(__file__).parent
