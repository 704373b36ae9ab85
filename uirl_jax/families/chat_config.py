"""What the policy is told and how it answers: the config's `chat`, and the same beside a model.

A model understands only the prompt and the action format that it was trained with, so every export
has them in the file `uirl_chat.json`. A config that leaves a value out takes the model's. `chat`
turns these values into token ids.
"""

import dataclasses
import json
import re
from pathlib import Path
from typing import Self

from uirl_jax.actions import ActionFormat, Prompt, find_format
from uirl_jax.errors import ConfigError, ModelError
from uirl_jax.families.border import ChatLayout
from uirl_jax.models.directory import CHAT_FILE, read_json
from uirl_jax.untrusted import json as untrusted_json

DEFAULT_FORMAT = "text"
_TRAVELS = ("action_format", "coordinates", "system_prompt", "prompt_template")
_OF_A_TURN = re.compile(r"\{(instruction|task_description|history|width|height)\}")
_MAX_BYTES = 1_000_000


@dataclasses.dataclass(frozen=True)
class ChatConfig:
    """What the policy is told, how it answers, and how much of the episode it sees.

    Of more than max_screenshots the oldest are dropped, drop_screenshots at once: a context that
    loses one image a turn would begin anew every turn, and cost the learner a sequence each time.
    """

    # One of actions.FORMATS: brings prompt and coordinate space. Empty: the model's own, else text.
    action_format: str = ""
    coordinates: str = ""  # empty: the format's own; for a model that was taught another space
    system_prompt: str | None = None  # None: the format's own; empty: no system block
    prompt_template: str | None = None  # None: the format's own; placeholders as in actions.Prompt
    # Of a context; beyond it the oldest are left out.
    max_screenshots: int = dataclasses.field(default=10, metadata={"min": 1, "max": 1000})
    # So many at once: the context's start then stays the same for some turns, and is reused.
    drop_screenshots: int = dataclasses.field(default=5, metadata={"min": 1, "max": 1000})
    # Earlier turns in a context; older ones are left out, with their actions. None: all.
    history_turns: int | None = dataclasses.field(default=None, metadata={"min": 0, "max": 10_000})

    def __post_init__(self) -> None:
        if not {"{instruction}", "{task_description}"} & set(
            re.findall(r"\{\w+\}", self.prompt.template)
        ):
            raise ConfigError(
                f"chat.prompt_template={self.prompt_template!r} lacks {{instruction}}"
            )
        if not 1 <= self.drop_screenshots <= self.max_screenshots:
            raise ConfigError(
                f"chat.drop_screenshots={self.drop_screenshots}, expected 1 to "
                f"chat.max_screenshots={self.max_screenshots}: the newest screenshot always stays"
            )

    @property
    def most_screenshots(self) -> int:
        """That a context may hold."""
        if self.prompt.has_history:
            return 1
        earlier = self.max_screenshots if self.history_turns is None else self.history_turns
        return min(self.max_screenshots, 1 + earlier)

    @property
    def format(self) -> ActionFormat:
        try:
            return find_format(self.action_format or DEFAULT_FORMAT, self.coordinates)
        except ConfigError as error:
            raise ConfigError(f"chat.{error}") from error

    @property
    def prompt(self) -> Prompt:
        own = self.format.prompt(self.format.coordinates)
        return dataclasses.replace(
            own,
            system=own.system if self.system_prompt is None else self.system_prompt,
            template=own.template if self.prompt_template is None else self.prompt_template,
        )

    def completed(self, *directories: str | Path) -> Self:
        """This config; what it leaves out is taken from the first uirl_chat.json that is found.

        A config that names another action format than that file takes nothing from it: the file's
        prompts are about its own format.

        Args:
          directories: of the adapter and the model; empty strings are skipped.
        Raises: ModelError: a file that is not valid.
        """
        own = next((found for d in directories if d and (found := read(d)) is not None), None)
        if own is None or self.action_format not in ("", own["action_format"]):
            return self
        left_out = ChatConfig()
        values = {n: own[n] for n in _TRAVELS if getattr(self, n) == getattr(left_out, n)}
        return dataclasses.replace(self, **values)


def read(directory: str | Path) -> dict[str, str] | None:
    """The values of a directory's uirl_chat.json; None if it has no such file.

    Raises: ModelError: the file is not valid.
    """
    path = Path(directory) / CHAT_FILE
    if not path.is_file():
        return None
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise ValueError(f"has more than {_MAX_BYTES} bytes")
        values = untrusted_json.parse(path.read_bytes())
        if set(values) != set(_TRAVELS) or not all(isinstance(v, str) for v in values.values()):
            raise ValueError(f"expected the texts {', '.join(_TRAVELS)} and nothing else")
        ChatConfig(**values)
    except (OSError, ValueError, ConfigError) as error:
        raise ModelError(f"{path}: {error}; repair or remove the file") from error
    return values


def write(directory: str | Path, cfg: ChatConfig, layout: ChatLayout) -> None:
    """Writes uirl_chat.json, and a chat template whose default system prompt is this one.

    The file has the prompts in full: a later version of the action format changes nothing. A system
    prompt with placeholders is no default: a template does not know the screen or the task, and the
    directory's own template stays.
    """
    directory = Path(directory)
    values = {
        "action_format": cfg.format.name,
        "coordinates": cfg.format.coordinates,
        "system_prompt": cfg.prompt.system,
        "prompt_template": cfg.prompt.template,
    }
    text = json.dumps(values, indent=2, ensure_ascii=False) + "\n"
    (directory / CHAT_FILE).write_text(text, encoding="utf-8", newline="\n")
    if _OF_A_TURN.search(cfg.prompt.system):
        return
    template = layout.template(cfg.prompt.system)
    (directory / "chat_template.jinja").write_text(template, encoding="utf-8", newline="\n")
    # Two older places of the template: some readers prefer them.
    (directory / "chat_template.json").unlink(missing_ok=True)
    tokenizer = directory / "tokenizer_config.json"
    if tokenizer.is_file():
        content = read_json(tokenizer)
        if "chat_template" in content:
            content["chat_template"] = template
            text = json.dumps(content, indent=2, ensure_ascii=False) + "\n"
            tokenizer.write_text(text, encoding="utf-8", newline="\n")
