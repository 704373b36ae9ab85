"""Trajectories as files: written by the actor, read exactly once by the learner, made to batches.

`record` is the byte format, over `framing` and `example`. `writer` writes shard files and `reader`
reads them; `queue` gives the learner each record once, and `journal` keeps its order over restarts.
`batching` makes the arrays of a learner step.
"""
