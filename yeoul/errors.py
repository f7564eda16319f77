"""The exception tree. Owns what an error says and which HTTP status it has; knows nothing of who raises or renders it.

    YeoulError                     500
    ├── ConfigError                400   an option out of range, unknown, or in conflict with another
    ├── ModelError                 500   a model that cannot be loaded
    │   ├── ModelFileError         500   missing, truncated, hostile or malformed file
    │   └── UnsupportedModelError  500   a well-formed file that asks for something Yeoul does not have
    ├── DownloadError              500   `pull` could not get a model; nothing half-written is left
    ├── RequestError               400   a request that is refused; `param` names the field
    │   ├── ContextLengthError     400   prompt, or prompt and output, over the context or over the KV pool
    │   └── ModelNotServedError    404   another model than the one that is served
    ├── CapacityError              429   too much work waiting; try again after `retry_after` seconds
    ├── ShuttingDownError          503   the server drains; no new work
    └── EngineError                500   a step failed; the request ends, the engine goes on
        └── EngineDeadError        503   the engine's loop is gone

Every error is one clear line and, where there is one, a hint: what the user can change.
"""

from __future__ import annotations


class YeoulError(Exception):
    """Base of all errors raised on purpose. `str(error)` is one line for the user; `hint` says what to do about it."""

    status: int = 500
    type: str = "server_error"
    code: str | None = None

    def __init__(self, message: str, *, hint: str | None = None, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.param = param


class ConfigError(YeoulError):
    """An option out of range, unknown, or in conflict with another."""

    status = 400
    type = "invalid_request_error"


class ModelError(YeoulError):
    """A model that cannot be loaded."""


class ModelFileError(ModelError):
    """A missing, truncated, hostile or malformed file."""


class UnsupportedModelError(ModelError):
    """A well-formed file that asks for something Yeoul does not have."""


class DownloadError(YeoulError):
    """`pull` could not get a model; nothing half-written is left."""


class RequestError(YeoulError):
    """A request that is refused; `param` names the field."""

    status = 400
    type = "invalid_request_error"


class ContextLengthError(RequestError):
    """Prompt, or prompt and output, over the context or over the KV pool."""

    code = "context_length_exceeded"


class ModelNotServedError(RequestError):
    """Another model than the one that is served."""

    status = 404
    code = "model_not_found"


class CapacityError(YeoulError):
    """Too much work is waiting; try again after `retry_after` seconds."""

    status = 429
    type = "rate_limit_error"
    code = "queue_full"
    retry_after = 1


class ShuttingDownError(YeoulError):
    """The server drains: no new work."""

    status = 503
    code = "shutting_down"
    retry_after = 5


class EngineError(YeoulError):
    """A step failed: its requests end, the engine goes on."""

    code = "engine_error"


class EngineDeadError(EngineError):
    """The engine's loop is gone."""

    status = 503
    code = "engine_dead"
