"""The store's one exception."""


class StoreError(Exception):
    """A model cannot be had; the message is for the user: what is wrong, the numbers, the way on."""
