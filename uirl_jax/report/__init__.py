"""The report of a run: `gather` reads its workdir, `draw` and `charts` write report.html."""

from uirl_jax.report.draw import REPORT_FILE, write_report
from uirl_jax.report.gather import machine_facts

__all__ = ["REPORT_FILE", "machine_facts", "write_report"]
