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


def check_integer(field: str, value: object, least: int, most: int | None) -> None:
    """Raises RequestError for a field of another type, or out of range; None: no upper bound."""
    wanted = f"an integer >= {least}" if most is None else f"an integer in {least} ... {most}"
    if type(value) is not int or value < least or (most is not None and value > most):
        raise RequestError(field, f"found {value!r}, expected {wanted}")


def check_number(field: str, value: object, least: float, most: float) -> None:
    """Raises RequestError for a field of another type, or out of range."""
    if type(value) not in (int, float) or not least <= value <= most:  # type: ignore[operator]  # NaN is refused too
        raise RequestError(field, f"found {value!r}, expected a number in {least} ... {most}")
