"""Writes docs/config/: every key of a config with its type, default, range and meaning.

    python -m tools.config_reference           # writes the pages
    python -m tools.config_reference --check   # fails where they are not what the code says

All of it is read from the dataclasses of the schema; the meaning is the comment above or behind a
field. So the code is the only place where a key is described.
"""

import argparse
import ast
import dataclasses
import enum
import functools
import inspect
import io
import sys
import textwrap
import tokenize
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from uirl_jax.config.schema import RunConfig

DIRECTORY = Path(__file__).parents[1] / "docs" / "config"
_TOP = "run"  # the page of keys that belong to no section


class Key(NamedTuple):
    """One key of a config."""

    path: str  # "learner.batch.rows"
    type: str
    default: str
    range: str
    meaning: str


class _Section(NamedTuple):
    path: str
    cls: type


def all_keys(cls: type = RunConfig, path: str = "") -> Iterator[Key]:
    """All keys below a dataclass of the schema, in the order of the code."""
    hints, meanings = typing.get_type_hints(cls), comments(cls)
    for field in dataclasses.fields(cls):
        hint, name = hints[field.name], f"{path}{field.name}"
        if dataclasses.is_dataclass(hint):
            yield from all_keys(typing.cast(type, hint), f"{name}.")
            continue
        yield Key(name, _type(hint), _default(field), _range(field), meanings[field.name])
        for inner in typing.get_args(hint):
            if dataclasses.is_dataclass(inner):
                yield from all_keys(typing.cast(type, inner), f"{name}[].")


@functools.cache
def comments(cls: type) -> dict[str, str]:
    """Field -> the comment lines right above it and those within its definition, as one text."""
    source = textwrap.dedent(inspect.getsource(cls))
    at = {
        token.start[0]: token.string.lstrip("# ").rstrip()
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type == tokenize.COMMENT
    }
    alone = {number for number, line in enumerate(source.splitlines(), 1) if _is_comment(line)}
    found = {}
    for node in typing.cast(ast.ClassDef, ast.parse(source).body[0]).body:
        if not isinstance(node, ast.AnnAssign) or not isinstance(node.target, ast.Name):
            continue
        first = node.lineno
        while first - 1 in alone:
            first -= 1
        last = node.end_lineno or node.lineno
        found[node.target.id] = " ".join(at[n] for n in range(first, last + 1) if n in at)
    return found


def _is_comment(line: str) -> bool:
    return line.lstrip().startswith("#")


def _type(hint: Any) -> str:
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Literal:
        return " or ".join(map(repr, inner))
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_type(one) for one in inner)
    if origin is tuple:
        return f"list of {_type(inner[0])}"
    if origin is dict:
        return f"{_type(inner[0])} -> {_type(inner[1])}"
    if hint is type(None):
        return "None"
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return " or ".join(repr(str(member.value)) for member in hint)
    return "keys below" if dataclasses.is_dataclass(hint) else hint.__name__


def _default(field: dataclasses.Field[Any]) -> str:
    if field.default is not dataclasses.MISSING:
        return repr(field.default)
    if field.default_factory is not dataclasses.MISSING:
        return repr(field.default_factory())
    return "must be given"


def _range(field: dataclasses.Field[Any]) -> str:
    """In words: `1 to 1,000`, `above 0, at most 60`."""
    words = {"above": "above", "min": "at least", "below": "below", "max": "at most"}
    bounds = {name: _number(field.metadata[name]) for name in words if name in field.metadata}
    if set(bounds) == {"min", "max"}:
        return f"{bounds['min']} to {bounds['max']}"
    return ", ".join(f"{words[name]} {value}" for name, value in bounds.items())


def _number(value: int | float) -> str:
    return f"{int(value):,}" if value == int(value) else f"{value:g}"


def pages() -> dict[str, str]:
    """File name -> text."""
    sections: dict[str, list[Key]] = {}
    for key in all_keys():
        head, dot, _ = key.path.partition(".")
        sections.setdefault(head.removesuffix("[]") if dot else _TOP, []).append(key)
    # A tuple of sections has a key of its own among the top ones.
    for name in list(sections):
        sections[name] += [key for key in sections[_TOP] if key.path == name]
        if name != _TOP:
            sections[_TOP] = [key for key in sections[_TOP] if key.path != name]
    texts = {f"{name}.md": _page(name, found) for name, found in sections.items()}
    return {"README.md": _index(sections), **texts}


def _index(sections: dict[str, list[Key]]) -> str:
    rows = [f"| [{name}]({name}.md) | {len(found)} |" for name, found in sections.items()]
    return _lines(
        "# Config keys",
        "",
        "Every key of a config, by section. The pages are written from the code by",
        "`python -m tools.config_reference`. A key is set in the config file, or by a flag:",
        "",
        "    --config.learner.optimizer.lr=1e-4",
        "",
        "| section | keys |",
        "|---|---|",
        *rows,
    )


def _page(name: str, found: list[Key]) -> str:
    rows = [
        f"| `{key.path}` | {_cell(key.type)} | `{_cell(key.default)}` | {key.range} | "
        f"{_cell(key.meaning)} |"
        for key in found
    ]
    title = "Keys without a section" if name == _TOP else f"Config section `{name}`"
    return _lines(
        f"# {title}",
        "",
        "| key | type | default | range | meaning |",
        "|---|---|---|---|---|",
        *rows,
    )


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def _lines(*lines: str) -> str:
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.config_reference", description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare, and write nothing")
    args = parser.parse_args()
    expected = pages()
    found = {path.name: path.read_text(encoding="utf-8") for path in DIRECTORY.glob("*.md")}
    if args.check:
        differ = sorted(n for n in {*found, *expected} if found.get(n) != expected.get(n))
        if differ:
            print(f"{DIRECTORY}: {', '.join(differ)} differ; run python -m tools.config_reference")
        return bool(differ)
    DIRECTORY.mkdir(exist_ok=True)
    for name in found.keys() - expected.keys():
        (DIRECTORY / name).unlink()
    for name, text in expected.items():
        (DIRECTORY / name).write_text(text, encoding="utf-8")
    print(f"{len(expected)} pages in {DIRECTORY}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
