"""The exceptions of the package: user errors and faults of files, servers and devices.

A message says what was got, what was expected, where, and what to do. `main` prints such an error
in one line and exits with its `exit_code`; any other exception is a bug and keeps its traceback.
`one_line` puts what an exception of a library says into one of these.
"""

import contextlib
from collections.abc import Iterator


def one_line(error: Exception | str, max_chars: int | None = None) -> str:
    """What an exception of others says, for one of ours: its line breaks become spaces.

    Args:
      error: an exception without a message is named by its type.
      max_chars: of a longer text, its beginning and its end are kept; None: it is not cut.
    """
    text = " ".join(str(error).split())
    if not text and isinstance(error, Exception):
        text = type(error).__name__
    if max_chars is None or len(text) <= max_chars:
        return text
    return f"{text[: max_chars - 100]} ... {text[-95:]}"


class UirlError(Exception):
    """Base class of all errors that are shown to the user in one line."""

    exit_code = 1


class ConfigError(UirlError):
    """A config key or value that is missing, unknown or invalid."""


class LeaseHeldError(UirlError):
    """Another process holds the lease; the message is the holder's name."""


class ModelError(UirlError):
    """A directory without a model, or weights that do not fit its config."""


class ModelUnavailableError(ModelError):
    """A hub that is away or busy, where the cache has no copy of the model."""

    exit_code = 75  # as for RestartError: a preempted host comes back with an empty cache


class ImageError(UirlError):
    """Bytes that are not a valid screenshot."""


class ActionError(UirlError):
    """Model text that is not a valid action in the action format (`format_error`)."""


class RecordError(UirlError):
    """A record whose bytes or contents violate the schema."""


class ShardError(UirlError):
    """A shard that cannot be used: truncated, no footer, wrong schema or run; or not written."""


class CheckpointError(UirlError):
    """A checkpoint cannot be written, or none can be restored."""


class CheckpointUnavailableError(CheckpointError):
    """A checkpoint that a storage does not take or give at present."""

    exit_code = 75  # as for RestartError


class PolicyError(UirlError):
    """A published policy that does not match its manifest or this run."""


class VerifierError(UirlError):
    """A verifier that cannot be reached or whose answer is invalid (`env_error`)."""


class PageError(VerifierError):
    """JavaScript that threw in a page; the page is as good as before."""


class RequestRefusedError(VerifierError):
    """A request that the verifier did not carry out: it refused, or was not reached."""


class InvalidRequestError(RequestRefusedError):
    """A request that the verifier will refuse again: a 4xx that no waiting changes."""


class NotFoundError(InvalidRequestError):
    """HTTP 404 or 405: the server has no such call, or no such session."""


class VerifierFullError(RequestRefusedError):
    """The verifier has no room for another session at present.

    Attributes:
        capacity: sessions that it runs at a time, as it says; 0: it does not say.
        wait_s: when it asks to come back; 0: it does not say.
    """

    def __init__(self, message: str, capacity: int = 0, wait_s: float = 0.0) -> None:
        super().__init__(message)
        self.capacity, self.wait_s = capacity, wait_s


class ActUncertainError(VerifierError):
    """An act that may or may not have been applied; it is not sent again."""


class EngineError(UirlError):
    """A sampling server that cannot be reached or whose answer is invalid."""

    exit_code = 75  # as for RestartError: a restart helps once the server is back


class ContextError(UirlError):
    """A context that is longer than the model takes, or that a sampling server would tokenize
    differently (`env_error`)."""


class UserCodeError(UirlError):
    """A function of the user's own raised, or returned what it must not (see `user_code`)."""


class TrainingError(UirlError):
    """A step that cannot be trained on, such as NaN or infinity in a loss or a gradient norm."""


class RestartError(UirlError):
    """The process stopped early; a supervisor should start it again."""

    exit_code = 75


class StoppedError(RestartError):
    """The process was told to stop, by a signal, and has saved what it had."""


@contextlib.contextmanager
def without_panics(what: str) -> Iterator[None]:
    """Makes a panic of a library in Rust, a BaseException of no public class, a ModelError.

    Args:
      what: was done, for the message.
    """
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise ModelError(f"{what} failed: {one_line(str(error), 300)}") from error
