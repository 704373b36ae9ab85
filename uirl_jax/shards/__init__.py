"""Trajectories as files: written by the actor, read exactly once by the learner, made to batches.

`record` is the byte format, over `framing` and `example`; `writer` and `reader` are the ends of the
directory, `journal` is the reader's memory; `batching` makes the arrays of a learner step.
"""
