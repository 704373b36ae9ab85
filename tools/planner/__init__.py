"""What a run asks of a machine that is not there; `tools.plan` is the command."""
