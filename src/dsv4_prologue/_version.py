"""The one place the version is written down."""

__version__ = "0.1.0"
