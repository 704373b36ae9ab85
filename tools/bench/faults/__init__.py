"""What verifiers' faults do to the actor: `command` measures, `checks` says what must hold.

`proxy` is a misbehaving verifier in a process of its own and writes what `inputs` lists; `actor`
plays against it, `plays` and `dialects` say what.
"""
