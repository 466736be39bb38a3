"""Events of devices for tests that have none."""


class IdentityEvent:
    """A DeviceEvent of which only the identity counts."""

    def query(self) -> bool:
        raise NotImplementedError

    def synchronize(self) -> None:
        raise NotImplementedError
