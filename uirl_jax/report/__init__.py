"""The page of a run: what its workdir holds (`gather`), drawn as report.html (`draw`, `charts`)."""

from uirl_jax.report.draw import REPORT_FILE, write_report
from uirl_jax.report.gather import machine_facts

__all__ = ["REPORT_FILE", "machine_facts", "write_report"]
