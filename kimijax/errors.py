"""The errors a user can cause. Each message names the field, what was found, what was expected and what to do."""


class ConfigError(ValueError):
    """A configuration file or setting that cannot be honoured."""

    def __init__(self, field: str, found: object, expected: str, fix: str = "") -> None:
        self.field = field
        super().__init__(f"{field}: found {found!r}, expected {expected}" + (f"; {fix}" if fix else ""))


class CheckpointError(ValueError):
    """Weights that do not fit the declaration of the model; the message lists every mismatch."""


class TokenizerError(ValueError):
    """Tokenizer files that are missing, malformed or do not fit the model."""


class TemplateError(ValueError):
    """A chat template that is missing, does not render, or would let message text become control tokens."""


class RequestError(ValueError):
    """A request that cannot be served as asked; an HTTP server answers 400 and names the field."""

    def __init__(self, field: str, message: str) -> None:
        self.field = field
        self.message = message
        super().__init__(f"{field}: {message}")
