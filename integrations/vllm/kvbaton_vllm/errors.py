"""What can go wrong between an engine and a registry, by what follows from it."""

from __future__ import annotations


class RegistryError(Exception):
    """An exchange with a registry that did not bring what it should."""


class Unreachable(RegistryError):
    """No answer came, or none in time."""


class TokenUnusable(RegistryError):
    """This engine's own token cannot be read, or no header can carry it."""


class Malformed(RegistryError):
    """Whatever answered does not speak the registry's API."""


class Refused(RegistryError):
    """The registry answered, and says no."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(f"{message} (HTTP {status}, {code})")
        self.status = status
        self.code = code


class Denied(Refused):
    """The registry does not let this engine in: wrong token, or none."""


class Unknown(Refused):
    """The registry does not know that engine or rank."""


class NotReady(Refused):
    """The registry knows the engine, which has not registered completely."""


class NobodyKnows(RegistryError):
    """No registry gave what was looked for within the budget."""
