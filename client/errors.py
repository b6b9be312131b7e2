"""What a caller of the client can do wrong."""


class ClientError(Exception):
    """The client cannot be made or started as asked; the message says what is wrong and what to do."""
