"""Trains through a storm of faults, and shows that nothing was lost and nothing trained twice.

    python -m tools.chaos --minutes=30 --seed=0 --json=chaos.json

On this machine, each a real process: a learner of two processes, four actors, and a verifier behind
a proxy that fails one call in twenty. The run is in an emulated bucket whose requests fail too.
Every minute a SIGKILL ends one process, every ten minutes a SIGTERM the learner; what has ended is
started again with the same command. A quiet run with the same config follows for comparison.

`__main__` is the command and its table; `processes` starts, kills and starts again; `account` finds
out from the bucket what became of every record and every step.
"""
