"""Measurements of this project's parts, most beside a peer: `python -m tools.bench COMMAND`.

`work` holds the sizes, models and prompts that contenders share, `peers` the same work in torch,
`processes` and `loopback` the processes in which contenders and servers run. Every other module is
a command (see `__main__`).
"""
