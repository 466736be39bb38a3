"""Events of devices for tests that have none."""


class IdentityEvent:
    """A DeviceEvent of which only the identity counts."""

    def query(self) -> bool:
        raise NotImplementedError

    def synchronize(self) -> None:
        raise NotImplementedError


class FixedEvent:
    """A DeviceEvent that has passed, or never passes."""

    def __init__(self, *, has_passed: bool) -> None:
        self._has_passed = has_passed

    def query(self) -> bool:
        return self._has_passed

    def synchronize(self) -> None:
        raise NotImplementedError
