"""What an engine may be told, and what it is told about mistakes."""

from __future__ import annotations

from typing import Any

import pytest

from kvbaton_vllm.settings import (
    Credentials,
    HandOffAddress,
    LastWillPolicy,
    Settings,
    SettingsError,
    SideChannel,
    UnknownVersion,
    unknown_version,
)

URL = "http://10.0.0.2:8000"


def read(section: dict[str, Any], environ: dict[str, str] | None = None) -> Settings:
    return Settings.read({"kvbaton": section, "kv_lease_duration": 30}, environ or {})


def test_a_url_is_enough() -> None:
    assert read({"registry": URL}) == Settings(
        registries=(URL,),
        base_url=None,
        credentials=Credentials(),
        hand_off=HandOffAddress.SIDE_CHANNEL,
        side_channel=SideChannel.OFF,
        unknown_version=UnknownVersion.PLAIN,
        last_will=LastWillPolicy.ON,
        ttl=30.0,
        budget=4.5,
    )


def test_the_environment_stands_behind_the_configuration() -> None:
    environ = {
        "KVBATON_REGISTRY": "http://a:1, http://b:2/",
        "KVBATON_BASE_URL": "http://10.0.0.5:8100",
        "KVBATON_TOKEN": "secret",
        "KVBATON_TTL": "60",
    }
    settings = read({"ttl": 6}, environ)
    assert settings.registries == ("http://a:1", "http://b:2")
    assert settings.base_url == "http://10.0.0.5:8100"
    assert settings.credentials.token == "secret"
    assert settings.ttl == 6.0


def test_several_registries_each_once() -> None:
    assert read({"registry": [URL, "http://b:2", URL]}).registries == (URL, "http://b:2")


def test_the_hand_off_alone_may_name_the_registry() -> None:
    settings = read({"hand_off": "https"})
    assert settings.registries == ()
    assert settings.hand_off is HandOffAddress.HTTPS_REGISTRY


@pytest.mark.parametrize(
    ("section", "key"),
    [
        ({}, "registry"),
        ({"registry": "10.0.0.2:8000"}, "registry"),
        ({"registry": "ftp://10.0.0.2"}, "registry"),
        ({"registry": "http://"}, "registry"),
        ({"registry": "http://u:p@10.0.0.2"}, "registry"),
        ({"registry": "http://10.0.0.2:port"}, "registry"),
        ({"registry": "http://10.0.0.2:0"}, "registry"),
        ({"registry": 7}, "registry"),
        ({"registry": [7]}, "registry"),
        ({"registry": URL, "base_url": "10.0.0.5"}, "base_url"),
        ({"registry": URL, "token": "secret"}, "token"),
        ({"registry": URL, "token_file": ""}, "token_file"),
        ({"registry": URL, "client_cert": "c.pem"}, "client_cert"),
        ({"registry": URL, "regstry": URL}, "regstry"),
        ({"registry": URL, "ttl": 0}, "ttl"),
        ({"registry": URL, "ttl": float("nan")}, "ttl"),
        ({"registry": URL, "ttl": True}, "ttl"),
        ({"registry": URL, "ttl": "soon"}, "ttl"),
        ({"registry": URL, "budget": 5}, "budget"),
        ({"registry": URL, "side_channel": "maybe"}, "side_channel"),
        ({"registry": URL, "unknown_version": "hope"}, "unknown_version"),
        ({"registry": URL, "hand_off": True}, "hand_off"),
        ({"registry": URL, "last_will": "no"}, "last_will"),
    ],
)
def test_a_wrong_setting_is_named(section: dict[str, Any], key: str) -> None:
    with pytest.raises(SettingsError, match=f"kvbaton setting `{key}`") as caught:
        read(section)
    assert caught.value.key == key
    assert "secret" not in str(caught.value)


def test_the_section_must_be_an_object() -> None:
    with pytest.raises(SettingsError, match="must be an object"):
        Settings.read({"kvbaton": "http://10.0.0.2:8000"}, {})


def test_a_token_is_not_shown() -> None:
    assert "secret" not in repr(read({"registry": URL}, {"KVBATON_TOKEN": "secret"}))


def test_what_happens_with_an_unknown_vllm_needs_no_other_setting() -> None:
    assert unknown_version({"kvbaton": {"unknown_version": "refuse"}}, {}) is UnknownVersion.REFUSE
    assert unknown_version({}, {}) is UnknownVersion.PLAIN
