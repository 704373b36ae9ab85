"""The command line: `python -m tools.bench COMMAND [flags] [--json PATH]`.

A command is a module with three functions:

    add_flags(parser)            its flags; --json is added here
    run(args) -> result          measures; the result is a dict that JSON can hold
    format_table(result) -> str  what is printed

The exit code is 1 if result["wrong"] lists checks that failed. Only the module of the given command
is imported: JAX, a browser's driver or a server would be measured with the others.
"""

import argparse
import importlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from tools import command_line


class Command(NamedTuple):
    name: str
    module: str
    help: str


COMMANDS = (
    Command("train", "tools.bench.train", "a training step, beside its peers"),
    Command("sample", "tools.bench.sample", "sampled tokens a second, beside its peer"),
    Command("load", "tools.bench.load", "a model directory of full size, beside its disk"),
    Command("overhead", "tools.bench.overhead", "what a step costs beside the model's passes"),
    Command("algorithms", "tools.bench.algorithms", "what each algorithm reaches, seed by seed"),
    Command("host", "tools.bench.host", "an actor host with many episodes at once"),
    Command("hosts", "tools.bench.hosts", "a learner of 1, 2 and 4 processes on the same records"),
    Command("client", "tools.bench.client", "a turn's cost in the verifier's client"),
    Command("verifiers", "tools.bench.verifiers", "sessions in a real browser"),
    Command("playing", "tools.bench.playing", "episodes a minute of MiniWoB++, and their costs"),
    Command("recorded", "tools.bench.recorded", "recorded steps, beside HTTP and a live page"),
    Command("viewer", "tools.bench.viewer", "the viewer's list of 50,000 episodes, in Chromium"),
    Command("faults", "tools.bench.faults.command", "what verifiers' faults do to the actor"),
)


@command_line.one_line_errors()
def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.bench", allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    chosen = None
    for command in COMMANDS:
        flags = commands.add_parser(command.name, help=command.help, allow_abbrev=False)
        if argv and argv[0] == command.name:
            chosen = importlib.import_module(command.module)
            chosen.add_flags(flags)
            flags.add_argument("--json", type=Path, help="write the numbers here too")
    args = parser.parse_args(argv)
    assert chosen is not None  # else parse_args has ended the process
    command_line.check_file("--json", args.json)
    result = chosen.run(args)
    print(chosen.format_table(result))
    if args.json:
        command_line.write_json(args.json, result)
    return 1 if result.get("wrong") else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
