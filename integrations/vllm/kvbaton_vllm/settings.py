"""The settings: the ``kvbaton`` object of ``kv_connector_extra_config``, then the environment.

The only place that reads the environment. Holds no token, only where to find it.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar
from urllib.parse import urlsplit

_KEYS = {
    "registry": "KVBATON_REGISTRY",
    "base_url": "KVBATON_BASE_URL",
    "token_file": "KVBATON_TOKEN_FILE",
    "ca_file": "KVBATON_CA_FILE",
    "client_cert": "KVBATON_CLIENT_CERT",
    "client_key": "KVBATON_CLIENT_KEY",
    "hand_off": "KVBATON_HAND_OFF",
    "side_channel": "KVBATON_SIDE_CHANNEL",
    "unknown_version": "KVBATON_UNKNOWN_VERSION",
    "ttl": "KVBATON_TTL",
    "budget": "KVBATON_BUDGET",
    "last_will": "KVBATON_LAST_WILL",
}
_TOKEN = "KVBATON_TOKEN"

# vLLM gives up a peer's side channel after 5 s; nobody shall wait longer for a registry.
LONGEST_BUDGET = 4.8


class SettingsError(ValueError):
    """A setting that cannot be used; ``key`` names it as it is written."""

    def __init__(self, key: str, what: str) -> None:
        super().__init__(f"kvbaton setting `{key}`: {what}")
        self.key = key


class HandOffAddress(enum.Enum):
    """What the ``remote_host:remote_port`` of a hand-off is taken for."""

    SIDE_CHANNEL = "side_channel"
    HTTP_REGISTRY = "http"
    HTTPS_REGISTRY = "https"


class SideChannel(enum.Enum):
    """Whether vLLM's own ZMQ socket is used besides the registry."""

    OFF = "off"
    ON = "on"


class LastWillPolicy(enum.Enum):
    """Whether a process of its own takes an engine that was killed out of the registries."""

    OFF = "off"
    ON = "on"


class UnknownVersion(enum.Enum):
    """What happens with a vLLM that this package was not tried with."""

    PLAIN = "plain"
    REFUSE = "refuse"
    TRY = "try"


@dataclass(frozen=True)
class Credentials:
    """How this engine proves who it is, and whom it believes."""

    token: str | None = None
    token_file: str | None = None
    ca_file: str | None = None
    client_cert: str | None = None
    client_key: str | None = None

    def __repr__(self) -> str:
        return "Credentials(..)"


@dataclass(frozen=True)
class Settings:
    """Everything that can be set."""

    registries: tuple[str, ...]
    base_url: str | None
    credentials: Credentials
    hand_off: HandOffAddress
    side_channel: SideChannel
    unknown_version: UnknownVersion
    last_will: LastWillPolicy
    ttl: float
    budget: float

    @classmethod
    def read(cls, extra_config: Mapping[str, Any], environ: Mapping[str, str]) -> Settings:
        """Reads what the engine was started with.

        Raises:
            SettingsError: for the first setting that cannot be used.
        """
        given = _given(extra_config, environ)
        hand_off = _choice("hand_off", given, HandOffAddress.SIDE_CHANNEL)
        registries = _registries(given.get("registry"))
        if not registries and hand_off is HandOffAddress.SIDE_CHANNEL:
            raise SettingsError(
                "registry",
                "is missing: give kvbaton's URL, such as http://10.0.0.2:8000 "
                f"(or set {_KEYS['registry']})",
            )
        if (given.get("client_cert") is None) != (given.get("client_key") is None):
            raise SettingsError("client_cert", "goes together with `client_key`")
        base_url = _text("base_url", given.get("base_url"))
        if base_url is not None:
            base_url = _url("base_url", base_url)
        return cls(
            registries=registries,
            base_url=base_url,
            credentials=Credentials(
                token=environ.get(_TOKEN) or None,
                token_file=_text("token_file", given.get("token_file")),
                ca_file=_text("ca_file", given.get("ca_file")),
                client_cert=_text("client_cert", given.get("client_cert")),
                client_key=_text("client_key", given.get("client_key")),
            ),
            hand_off=hand_off,
            side_channel=_choice("side_channel", given, SideChannel.OFF),
            unknown_version=_choice("unknown_version", given, UnknownVersion.PLAIN),
            last_will=_choice("last_will", given, LastWillPolicy.ON),
            ttl=_seconds("ttl", given.get("ttl", 30.0), 1.0, 86400.0),
            budget=_seconds("budget", given.get("budget", 4.5), 0.1, LONGEST_BUDGET),
        )


def unknown_version(extra_config: Mapping[str, Any], environ: Mapping[str, str]) -> UnknownVersion:
    """Only what is to happen with a vLLM that is not known.

    Raises:
        SettingsError: if that cannot be told.
    """
    return _choice("unknown_version", _given(extra_config, environ), UnknownVersion.PLAIN)


def _given(extra_config: Mapping[str, Any], environ: Mapping[str, str]) -> dict[str, Any]:
    section = extra_config.get("kvbaton") or {}
    if not isinstance(section, Mapping):
        raise SettingsError("kvbaton", "must be an object")
    for key in section:
        if key == "token":
            # vLLM logs its configuration, and everybody on the host sees a command line.
            raise SettingsError(key, f"does not belong here: use `token_file`, or {_TOKEN}")
        if key not in _KEYS:
            raise SettingsError(str(key), f"is not known; there are {', '.join(_KEYS)}")
    given = {key: environ[name] for key, name in _KEYS.items() if environ.get(name)}
    return {**given, **section}


def _registries(value: object) -> tuple[str, ...]:
    if value is None:
        return ()
    texts = value.split(",") if isinstance(value, str) else value
    if not isinstance(texts, list):
        raise SettingsError("registry", "must be a URL or a list of URLs")
    urls = [_url("registry", text.strip() if isinstance(text, str) else text) for text in texts]
    return tuple(dict.fromkeys(urls))


def _url(key: str, value: object) -> str:
    if not isinstance(value, str):
        raise SettingsError(key, "must be a URL, such as http://10.0.0.2:8000")
    try:
        parts = urlsplit(value)
        port_is_usable = parts.port != 0
    except ValueError as error:
        raise SettingsError(key, f"{value!r} is no URL: {error}") from None
    if parts.scheme not in ("http", "https") or not parts.hostname or not port_is_usable:
        raise SettingsError(key, f"{value!r} is no URL, such as http://10.0.0.2:8000")
    if parts.username is not None or parts.query or parts.fragment:
        raise SettingsError(key, "must hold no user, query or fragment")
    return value.rstrip("/")


def _text(key: str, value: object) -> str | None:
    if value is None:
        return None
    if not isinstance(value, str) or not value:
        raise SettingsError(key, "must be a text that is not empty")
    return value


def _seconds(key: str, value: object, least: float, most: float) -> float:
    what = f"must be a number of seconds from {least:g} to {most:g}"
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise SettingsError(key, what)
    try:
        seconds = float(value)
    except ValueError:
        raise SettingsError(key, what) from None
    if not (math.isfinite(seconds) and least <= seconds <= most):
        raise SettingsError(key, what)
    return seconds


_Choice = TypeVar("_Choice", bound=enum.Enum)


def _choice(key: str, given: Mapping[str, Any], default: _Choice) -> _Choice:
    value = given.get(key)
    if value is None:
        return default
    for choice in type(default):
        if choice.value == value:
            return choice
    choices = ", ".join(f'"{choice.value}"' for choice in type(default))
    raise SettingsError(key, f"must be one of {choices}")
