"""A strict emulator of Google Cloud Storage, in memory, for tests without a network.

    python -m tools.bucket_emulator --port=0 --port_file=/tmp/port --bucket=runs --faults=hard
    STORAGE_EMULATOR_HOST=http://127.0.0.1:PORT python -m uirl_jax.main --workdir=gs://runs/r1 ...

It speaks the JSON API (gcsfs, tensorstore), the XML API (obstore) and as much of S3's as obstore's
S3 client uses. It refuses what the service refuses, injects faults from a seed, and counts requests
by price class: `GET /_emulator/counters`.

`objects` holds contents, generations and preconditions; `json_api` and `xml_api` translate;
`faults` decides what goes wrong; `server` serves and counts; `running` starts it in a thread.
"""

from tools.bucket_emulator.faults import HARD, Faults
from tools.bucket_emulator.running import Emulator, emulator

__all__ = ["HARD", "Emulator", "Faults", "emulator"]
