"""The UI verifiers: tasks on a screen, the server that offers them, and the actor's client.

`tasks` (the hermetic desktop), `browser` and a user's `own_tasks` are the environments. `server`
offers them over HTTP, `client` plays any verifier, `containers` starts one container per session.
`dialects` and `wire` are what client and server share. `doctor` is a command that examines a
server. Nothing here imports JAX, and the client imports neither a task nor the server.
"""
