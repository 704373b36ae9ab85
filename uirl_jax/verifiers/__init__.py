"""The UI verifiers: the hermetic desktop, the server that offers it over HTTP, and the client.

`desktop` (with `tasks`, `window` and `drawing` below it) is the environment itself, `server`
speaks the bundled dialect G1+ over it, `client` is what the actor talks through. Nothing in here
knows JAX.
"""
