"""The exception for mistakes and shortages that the user can correct."""


class UserError(Exception):
    """A mistake or a shortage that the user can correct.

    The message is one line: the observed value first, then the remedy. The command line prints it and exits with
    code 2; a notebook shows it as any other exception.
    """
