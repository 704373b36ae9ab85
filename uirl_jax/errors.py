"""The one exception tree: everything a user can get wrong, or a boundary can do to us.

A message says what was got, what was expected, where, and what to do. `main` prints such an error
as one line and exits with its `exit_code`; anything else that escapes is a defect and keeps its
traceback.
"""


class UirlError(Exception):
    """Root of every error that is told to the user in one line."""

    exit_code = 1


class ConfigError(UirlError):
    """A config key or value that is missing, unknown or impossible."""


class LeaseHeldError(UirlError):
    """A lease that another process holds; the message is the holder's name."""


class ModelError(UirlError):
    """A directory that is no model, or weights that do not fit its config."""


class ImageError(UirlError):
    """Bytes that are not an acceptable screenshot."""


class ActionError(UirlError):
    """Model text that is no action in the format that was asked for: the turn's `format_error`."""


class RecordError(UirlError):
    """A record whose bytes or whose contents break the schema."""


class ShardError(UirlError):
    """A shard file that is broken as a whole: truncated, no footer, wrong schema or run."""


class CheckpointError(UirlError):
    """No checkpoint can be restored, or one cannot be written."""


class PolicyError(UirlError):
    """A published policy that does not match its manifest or this run."""


class VerifierError(UirlError):
    """A verifier that cannot be reached or answers with something it must not (an `env_error`)."""


class RequestRefusedError(VerifierError):
    """A request that the verifier has not carried out, and said so or was not reached."""


class ActUncertainError(VerifierError):
    """An act that may have been applied: it is not sent again; the next screenshot tells."""


class EngineError(UirlError):
    """A sampling server that cannot be reached or answers with something it must not."""

    exit_code = 75  # as of RestartError: a server that is back is all that it needs


class ContextError(UirlError):
    """A context that a sampling server would not read as it is meant (an `env_error`)."""


class TrainingError(UirlError):
    """A step that must not be taken: NaN or infinity in a loss or a gradient norm."""


class RestartError(UirlError):
    """A fault that a supervisor cures by starting the process again."""

    exit_code = 75
