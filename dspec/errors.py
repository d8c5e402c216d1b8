"""The one exception meant for users."""


class UserError(Exception):
    """What is wrong and how to fix it, in one line; the entry points print it and exit with code 2."""
