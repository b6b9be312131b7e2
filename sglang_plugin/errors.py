"""What a user of the plugin can do wrong."""


class PluginError(Exception):
    """The plugin cannot run as asked; the message says what is wrong, where, and what to do."""
