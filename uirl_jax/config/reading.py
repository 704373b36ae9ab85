"""Builds frozen dataclasses from the ml_collections ConfigDict of a config file.

`main` parses its flags with `parse_flags`, builds one dataclass from the ConfigDict with
`from_config` and passes its parts on; no other module sees a flag or a ConfigDict. The dataclass is
the schema: field names are the known keys, with their type hints, defaults and metadata:

    steps: int = dataclasses.field(default=60, metadata={"min": 1, "max": 1000})

    min, max      inclusive bounds of a number, or of every number in a tuple
    above, below  exclusive bounds

The meaning of a key and the reason for its default are the comment above the field, or behind it;
`tools.config_reference` publishes it.

A dataclass may check fields against each other in `__post_init__`, raising ConfigError or
ValueError. All faults of a config are reported together, each with its full dotted path.

This module defines no keys; `schema` and the packages' own dataclasses do.
"""

import dataclasses
import difflib
import enum
import hashlib
import json
import math
import os
import re
import runpy
import sys
import traceback
import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from absl import flags
from ml_collections import config_dict, config_flags

from uirl_jax import assets
from uirl_jax.errors import ConfigError, one_line
from uirl_jax.store import bucket, mirror

T = TypeVar("T")

_FLAG = "config"
_INDEX = re.compile(r"\[(\d+)\]")  # tasks[0].max_turns is max_turns of an element of tasks
_HELP_FLAGS = frozenset({"help", "h", "?", "helpfull", "helpshort", "helpxml"})


def from_config(cls: type[T], cfg: Any, path: str = "config") -> T:
    """Build a frozen dataclass, nested ones included, from a ConfigDict or a dict.

    Args:
        cls: a dataclass with fields of int, float, bool, str, tuples, Literal, enums (by value),
            `X | None`, dict[str, X] and other dataclasses.
        cfg: its keys are the field names; a field with a default may be missing. An int is accepted
            for a float, and a list for a tuple; nothing else is converted.
        path: of cfg, for error messages.

    Raises:
        ConfigError: one error with every fault: unknown keys (with the nearest known key), missing
            keys, wrong types, values out of bounds.
    """
    faults: list[str] = []
    built = _build(cls, cfg, path, faults)
    if faults:
        count = "" if len(faults) == 1 else f"{len(faults)} faults in the config: "
        raise ConfigError(count + "; ".join(faults))
    return built


def define_config_file(schema: type, help: str = "") -> Any:
    """Defines the flag `--config=FILE`, with `--config.x.y=` for every key of the schema.

    This includes keys that the file does not set; ml_collections alone accepts only those it sets.

    Args:
        schema: the dataclass that `from_config` will build.

    Returns:
        The flag's holder; its value is the ConfigDict.
    """
    holder = config_flags.DEFINE_config_file(
        _FLAG, None, help, lock_config=False, accept_new_attributes=True
    )
    flags.FLAGS[_FLAG].parser = _ConfigFile(schema)
    return holder


class _ConfigFile(flags.ArgumentParser):
    """Parses a config file; adds an empty section for each section that the file leaves out."""

    def __init__(self, schema: type) -> None:
        self.schema = schema

    def parse(self, argument: str) -> config_dict.ConfigDict:
        config = _load_config_file(argument)
        with config.unlocked():
            _add_sections(config, self.schema)
        return config

    def flag_type(self) -> str:
        return "config file"


def _add_sections(config: config_dict.ConfigDict, schema: type) -> None:
    hints = typing.get_type_hints(schema)
    for field in dataclasses.fields(schema):
        if dataclasses.is_dataclass(hints[field.name]):
            if field.name not in config:
                config[field.name] = config_dict.ConfigDict()
            section = config[field.name]
            if isinstance(section, config_dict.ConfigDict):
                _add_sections(section, hints[field.name])


def parse_flags(argv: Sequence[str]) -> list[str]:
    """For app.run(main, flags_parser=parse_flags): prints a user error in one line, exit code 1.

    absl and ml_collections alone print a traceback for an unknown `--config.x.y` or a missing
    config file, two lines for an unknown flag, and accept stray arguments.

    Args:
        argv: as sys.argv.

    Returns:
        Only argv[0]: positional arguments are refused.
    """
    try:
        file = _config_of_argv(argv)
        if file is not None:
            parser: Any = flags.FLAGS[_FLAG].parser
            check_overrides(argv, parser.parse(file), parser.schema)
        try:
            rest = flags.FLAGS(list(argv))
        except SystemExit:
            if any(argument.lstrip("-") in _HELP_FLAGS for argument in argv[1:]):
                sys.exit(0)  # absl ends --help with code 1
            raise
        except (flags.Error, ValueError, TypeError, LookupError) as error:
            raise ConfigError(f"{one_line(error)}; --help lists the flags") from error
        if len(rest) > 1:
            raise ConfigError(f"{rest[1]!r}: not a flag; write --flag=value")
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    return rest


def workdir_of(value: str, local_dir: str = "") -> Path:
    """The directory of --workdir; of a run in a bucket its local one, linked to the address.

    Args:
        local_dir: for a bucket; "": a directory of the user's state, named after the address.
    Raises: ConfigError: there is none, an invalid address, or a local_dir without a bucket.
    """
    if not value.strip():
        raise ConfigError("--workdir is empty; give a directory, e.g. --workdir=runs/quickstart")
    if "://" not in value:
        if local_dir:
            raise ConfigError(f"--local_dir={local_dir}: --workdir is not in a bucket")
        return Path(value)
    try:
        bucket.check_address(value)
    except OSError as error:
        raise ConfigError(f"--workdir={value}: {error.strerror}") from None
    if not value.startswith("gs://"):
        raise ConfigError(
            f"--workdir={value}: runs are in a directory or in gs://; checkpoints cannot be "
            "written to s3://"
        )
    address = value.rstrip("/")
    directory = Path(local_dir) if local_dir else _state_directory(address)
    mirror.link(directory, address)
    return directory


def _state_directory(address: str) -> Path:
    home = os.environ.get("XDG_STATE_HOME", "")
    states = Path(home) if home else Path.home() / ".local" / "state"
    digest = hashlib.blake2b(address.encode(), digest_size=8).hexdigest()
    return states / "uirl_jax" / digest


def check_overrides(argv: Sequence[str], config: config_dict.ConfigDict, schema: type) -> None:
    """Refuse every `--config.x.y` whose key is in neither the config file nor the schema.

    Args:
        argv: as sys.argv; other flags are ignored.
        config: the ConfigDict of the config file.
        schema: the dataclass that will be built.

    Raises:
        ConfigError: all unknown keys, each with the nearest known one.
    """
    paths = dict.fromkeys([*_paths_of_config(config), *_paths_of_dataclass(schema)])
    known = [f"{_FLAG}.{path}" for path in paths]
    faults = [
        f"{key}: unknown key; {_did_you_mean(key, known)}"
        for key in _overrides(argv)
        if _INDEX.sub("[0]", key) not in known
    ]
    for key in _overrides(argv):
        for match in _INDEX.finditer(key):
            part = key[len(_FLAG) + 1 : match.start()]
            elements = _found(config, part)
            if elements is None:
                faults.append(f"{key}: the config file has no {part}, whose elements flags change")
            elif isinstance(elements, list | tuple) and int(match[1]) >= len(elements):
                faults.append(f"{key}: {part} has {len(elements)} elements, counted from 0")
    if faults:
        raise ConfigError("; ".join(faults))


def _found(config: Any, path: str) -> Any:
    """What a file's config has at a path such as tasks[0].name; None: nothing."""
    for part in _INDEX.sub(r".\1", path).split("."):
        if isinstance(config, list | tuple):
            config = config[int(part)] if part.isdecimal() and int(part) < len(config) else None
        else:
            config = config.get(part) if isinstance(config, config_dict.ConfigDict) else None
    return config


def resolved_config_json(cfg: Any) -> str:
    """The config as JSON text with sorted keys: equal configs give equal bytes (config.json).

    Args:
        cfg: a ConfigDict, dataclass or dict of plain values; tuples become lists, enums their
            values.

    Raises:
        ConfigError: a value that JSON cannot represent (NaN, infinity, an object).
    """
    try:
        return json.dumps(_to_plain(cfg), sort_keys=True, indent=2, allow_nan=False) + "\n"
    except (TypeError, ValueError) as error:
        raise ConfigError(f"the config cannot be saved as JSON: {one_line(error)}") from error


def _build(cls: type, cfg: Any, path: str, faults: list[str]) -> Any:
    """An instance of the dataclass; None, with entries added to faults, if cfg is invalid."""
    if not isinstance(cfg, config_dict.ConfigDict | Mapping):
        faults.append(f"{path}: got {_shown(cfg)}, expected keys of {cls.__name__}")
        return None
    fields = {field.name: field for field in dataclasses.fields(cls) if field.init}
    hints = typing.get_type_hints(cls)
    count_before = len(faults)
    values = {}
    for key in cfg:
        if key not in fields:
            known = [f"{path}.{key}" for key in _paths_of_dataclass(cls)]
            faults.append(f"{path}.{key}: unknown key; {_did_you_mean(f'{path}.{key}', known)}")
            continue
        try:
            value = cfg[key]
        except config_dict.RequiredValueError:
            faults.append(f"{path}.{key}: has no value; set it in the config file or with a flag")
            continue
        values[key] = _convert(hints[key], value, f"{path}.{key}", faults)
        _check_bounds(fields[key].metadata, values[key], f"{path}.{key}", faults)
    for name, field in fields.items():
        required = (field.default, field.default_factory) == (dataclasses.MISSING,) * 2
        if required and name not in cfg:
            faults.append(f"{path}.{name}: missing, expected {_type_name(hints[name])}")
    if len(faults) > count_before:
        return None
    try:
        return cls(**values)
    except (ConfigError, ValueError) as error:
        faults.append(f"{path}: {one_line(error)}")
        return None


def _convert(hint: Any, value: Any, path: str, faults: list[str]) -> Any:
    """The value converted to the hint's type; None, with an entry added to faults, if invalid."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        return value if isinstance(value, hint) else _build(hint, value, path, faults)
    if origin in (typing.Union, types.UnionType):
        if value is None and type(None) in args:
            return None
        options = [option for option in args if option is not type(None)]
        attempt: list[str] = []
        for option in options:
            attempt = []
            converted = _convert(option, value, path, attempt)
            if not attempt:
                return converted
        # With one option, report the fault inside it; with several, list the options.
        faults.extend(attempt if len(options) == 1 else [_mismatch(path, value, hint)])
        return None
    if origin is typing.Literal:
        for allowed in args:
            if type(value) is type(allowed) and value == allowed:
                return value
        faults.append(_mismatch(path, value, hint))
        return None
    if origin is tuple or hint is tuple:
        return _convert_tuple(hint, args, value, path, faults)
    if origin in (dict, Mapping) and isinstance(value, config_dict.ConfigDict | Mapping):
        return {key: _convert(args[1], value[key], f"{path}.{key}", faults) for key in value}
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        for member in hint:
            if value is member or (type(value) in (str, int) and value == member.value):
                return member
    elif hint is Any:
        return value
    elif hint is float:
        if type(value) in (int, float):
            if math.isfinite(value):
                return float(value)
            faults.append(f"{path}: got {value}, expected a finite number")
            return None
    elif type(value) is hint:  # not isinstance, which would accept True as an int
        return value
    faults.append(_mismatch(path, value, hint))
    return None


def _convert_tuple(hint: Any, args: tuple, value: Any, path: str, faults: list[str]) -> Any:
    if not isinstance(value, list | tuple):
        faults.append(_mismatch(path, value, hint))
        return None
    if not args:
        return tuple(value)
    if len(args) == 2 and args[1] is Ellipsis:
        args = (args[0],) * len(value)
    if len(args) != len(value):
        faults.append(_mismatch(path, value, hint))
        return None
    return tuple(
        _convert(arg, element, f"{path}[{idx}]", faults)
        for idx, (arg, element) in enumerate(zip(args, value, strict=True))
    )


def _check_bounds(metadata: Mapping[str, Any], value: Any, path: str, faults: list[str]) -> None:
    if isinstance(value, dict):
        for key, element in value.items():
            _check_bounds(metadata, element, f"{path}.{key}", faults)
        return
    numbers = value if isinstance(value, tuple) else (value,)
    for number in numbers:
        if type(number) not in (int, float):
            continue
        low, high = metadata.get("min", -math.inf), metadata.get("max", math.inf)
        above, below = metadata.get("above", -math.inf), metadata.get("below", math.inf)
        if not (low <= number <= high and above < number < below):
            faults.append(f"{path}: got {number}, expected {_range(metadata)}")


def _range(metadata: Mapping[str, Any]) -> str:
    """ "1 to 4096", "more than 0 and at most 1"; for messages."""
    if "min" in metadata and "max" in metadata:
        return f"{_short(metadata['min'])} to {_short(metadata['max'])}"
    words = {"min": "at least", "above": "more than", "max": "at most", "below": "less than"}
    parts = [f"{word} {_short(metadata[key])}" for key, word in words.items() if key in metadata]
    return " and ".join(parts)


def _short(number: float) -> str:
    return f"{number:,}" if isinstance(number, int) else f"{number:g}"


def _config_of_argv(argv: Sequence[str]) -> str | None:
    """The file of `--config=file` or `--config file`; None if neither is given."""
    pattern = re.compile(rf"--?{_FLAG}(=(?P<file>.*))?$")
    for idx, argument in enumerate(argv[1:], start=1):
        match = pattern.match(argument)
        if not match:
            continue
        if match["file"] is not None:
            return match["file"]
        return argv[idx + 1] if idx + 1 < len(argv) else ""
    if _overrides(argv):
        raise ConfigError(
            f"--{_FLAG}.* overrides a config file, but none is given; add --{_FLAG}=FILE"
        )
    return None


def _load_config_file(argument: str) -> config_dict.ConfigDict:
    """The result of get_config() in "file.py" or "file.py:string", where file.py may also be the
    name of a shipped config. Raises ConfigError."""
    file, config_strings = _split_argument(argument)
    if not Path(file).is_file():
        shipped = ", ".join(sorted(path.stem for path in assets.CONFIGS.glob("*.py")))
        raise ConfigError(f"--config={argument}: no such file; shipped configs: {shipped}")
    try:
        get_config = runpy.run_path(file).get("get_config")
        config = get_config(*config_strings) if get_config else None
    except Exception as error:  # a config file is Python and can raise anything
        frames = traceback.extract_tb(error.__traceback__)
        lines = [frame.lineno for frame in frames if frame.filename == file]
        where = f"{file}, line {lines[-1]}" if lines else file
        raise ConfigError(f"{where}: {type(error).__name__}: {one_line(error)}") from error
    if not isinstance(config, config_dict.ConfigDict):
        raise ConfigError(f"{file}: has no get_config() that returns a ConfigDict")
    return config


def _split_argument(argument: str) -> tuple[str, list[str]]:
    """("file.py", ["string"]) of "file.py:string"; the file's own path may have colons."""
    colons = [len(argument), *(match.start() for match in re.finditer(":", argument))]
    for end in sorted(colons, reverse=True):
        file = assets.find_config(argument[:end])
        if file.is_file():
            return str(file), [argument[end + 1 :]] if end < len(argument) else []
    return argument, []


def _overrides(argv: Sequence[str]) -> list[str]:
    """["config.learner.step"] for ["main.py", "--config.learner.step=5", "--workdir=runs/1"]."""
    pattern = re.compile(rf"--?(?:no)?({_FLAG}\.[^=]*)")
    matches = [pattern.match(argument) for argument in argv[1:]]
    return [match[1] for match in matches if match]


def _did_you_mean(path: str, known: Sequence[str]) -> str:
    """ "did you mean <path>?": a similar sibling, the same name elsewhere or a similar path.

    Without any of these, the list of known keys.
    """
    parent, _, last = path.rpartition(".")
    siblings = {key.rpartition(".")[2]: key for key in known if key.rpartition(".")[0] == parent}
    namesakes = [key for key in known if key.rpartition(".")[2] == last]
    nearest = (
        [siblings[name] for name in difflib.get_close_matches(last, siblings, n=1)]
        or namesakes
        or difflib.get_close_matches(path, known, n=1, cutoff=0.75)
    )
    if nearest:
        return f"did you mean {nearest[0]}?"
    while parent and not siblings:  # the known keys of the deepest existing section
        parent = parent.rpartition(".")[0]
        siblings = {key: key for key in known if key.rpartition(".")[0] == parent}
    return f"known are {', '.join(siblings.values()) or 'none'}"


def _paths_of_config(config: config_dict.ConfigDict) -> list[str]:
    """ "learner", "learner.steps", ... of a ConfigDict."""
    paths = []
    for key in config:
        paths.append(key)
        try:
            value = config[key]
        except config_dict.RequiredValueError:  # a placeholder without a value yet
            continue
        if isinstance(value, config_dict.ConfigDict):
            paths += [f"{key}.{below}" for below in _paths_of_config(value)]
    return paths


def _paths_of_dataclass(cls: type) -> list[str]:
    paths = []
    hints = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        paths.append(field.name)
        hint = hints[field.name]
        section = f"{field.name}[0]" if typing.get_origin(hint) is tuple else field.name
        for option in (hint, *typing.get_args(hint)):
            if isinstance(option, type) and dataclasses.is_dataclass(option):
                paths += [f"{section}.{below}" for below in _paths_of_dataclass(option)]
    return paths


def _to_plain(value: Any) -> Any:
    if isinstance(value, config_dict.ConfigDict):
        return {str(key): _to_plain(value[key]) for key in value}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: _to_plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): _to_plain(element) for key, element in value.items()}
    if isinstance(value, list | tuple):
        return [_to_plain(element) for element in value]
    if isinstance(value, enum.Enum):
        return value.value
    return value


def _mismatch(path: str, value: Any, hint: Any) -> str:
    return f"{path}: got {_shown(value)}, expected {_type_name(hint)}"


def _shown(value: Any) -> str:
    if isinstance(value, config_dict.ConfigDict | Mapping):
        return f"keys {', '.join(sorted(map(str, value)))[:80]}"
    return f"{type(value).__name__} {repr(value)[:80]}"


def _type_name(hint: Any) -> str:
    """ "int", "float or None", "'adamw' or 'sgd'", "tuple[int, ...]"."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if hint is type(None):
        return "None"
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_type_name(option) for option in args)
    if origin is typing.Literal:
        return " or ".join(repr(option) for option in args)
    if args:
        inner = ("..." if option is Ellipsis else _type_name(option) for option in args)
        return f"{origin.__name__}[{', '.join(inner)}]"
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return " or ".join(repr(member.value) for member in hint)
    return hint.__name__ if isinstance(hint, type) else str(hint)
