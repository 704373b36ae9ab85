"""What a person reads about a run: `diagnosis` says why it learns nothing, the others draw a page.

`gather` reads the workdir, `draw` and `charts` write report.html.
"""

from uirl_jax.watch.diagnosis import Watcher
from uirl_jax.watch.draw import REPORT_FILE, write_report
from uirl_jax.watch.gather import machine_facts

__all__ = ["REPORT_FILE", "Watcher", "machine_facts", "write_report"]
