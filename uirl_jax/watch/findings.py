"""findings.json: what the diagnosis found, as the pages about a run read it.

Apart from `diagnosis`, whose learner imports JAX: a page is drawn without it.
"""

import json
from pathlib import Path

FINDINGS_FILE = "findings.json"


def read_findings(workdir: Path) -> dict[str, dict[str, object]]:
    """{rule: {"since_step": 5, "text": ...}} of findings.json; {} if there is none."""
    try:
        found = json.loads((workdir / FINDINGS_FILE).read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    if not isinstance(found, dict) or not all(isinstance(v, dict) for v in found.values()):
        return {}
    return found
