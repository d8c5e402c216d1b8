"""The one exception that is meant for the user's eyes."""


class UserError(Exception):
    """What is wrong and how to mend it, in one line; the entry points print it and exit with code 2."""
