"""Trajectories as files: written by the actor, used exactly once by the learner, batched.

`record` is the byte format, built on `framing` and `example`. `writer` writes shards and `reader`
reads them; `queue` gives each record to the learner once, and `journal` keeps the order over
restarts. `batching` makes the arrays of a learner step.
"""
