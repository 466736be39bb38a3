"""The error of a build of the native kernels."""


class BuildError(Exception):
    """The native kernels cannot be built; `output` has the last lines of the compiler."""

    def __init__(self, reason: str, output: str = "") -> None:
        super().__init__(reason)
        self.reason = reason
        self.output = output
