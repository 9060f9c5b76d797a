"""What ranks say of a choice of tokens that failed on one of them."""


class SamplingFailedError(Exception):
    """Choosing tokens failed on the first of several ranks, which are at the same place again."""

    def __init__(self, cause: Exception) -> None:
        super().__init__(f"{type(cause).__name__}: {cause}")
        self.cause = cause
