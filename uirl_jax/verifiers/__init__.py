"""The UI verifiers: the hermetic desktop, real browsers, the server that offers them, the client.

`desktop` (with `tasks`, `window` and `drawing` below it) and `browser` are the environments,
`session_types` their common face, `server` speaks the bundled dialect G1+ over it, `client` is what
the actor talks through. Nothing in here knows JAX.
"""
