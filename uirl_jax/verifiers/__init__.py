"""The UI verifiers: the hermetic desktop, real browsers, the server that offers them, the client.

`desktop` (with `tasks`, `window` and `drawing` below it) and `browser` are the environments,
with `own_tasks` for what people write themselves; `session_types` is their common face. `server`
speaks the bundled dialect G1+ over it (`sessions`), G2 and G3 too (`field_calls`); `client` is what
the actor talks through. Nothing in here knows JAX.
"""
