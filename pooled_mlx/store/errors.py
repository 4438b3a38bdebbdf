"""The store's one exception."""


class StoreError(Exception):
    """A model cannot be had; the message is for the user: what is wrong, the numbers, the way on.

    `temporary` is True where the same may work later without a change, such as without a network.
    """

    def __init__(self, message: str, *, temporary: bool = False) -> None:
        super().__init__(message)
        self.temporary = temporary
