"""What a person reads about a run: `diagnosis` says why it learns nothing, the others draw pages.

`gather` and `follow` read the workdir, `episode_index` its episodes. `panels`, `charts` and
`frames` make what both pages show: `draw` writes report.html, `viewer` serves pages of a run that
goes on. Only `diagnosis` needs JAX, and is imported by its name.
"""

from uirl_jax.watch.draw import REPORT_FILE, write_report
from uirl_jax.watch.gather import machine_facts

__all__ = ["REPORT_FILE", "machine_facts", "write_report"]
