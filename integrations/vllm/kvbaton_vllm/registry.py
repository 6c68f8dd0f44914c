"""kvbaton's registry as an engine uses it: one method per call of the API.

Owns paths, bodies and the meaning of answers; keeps nothing between calls.
"""

from __future__ import annotations

import base64
import json
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeGuard
from urllib.parse import quote

from kvbaton_vllm.errors import Denied, Malformed, NotReady, Refused, Unknown
from kvbaton_vllm.wire import Answer, Connection, Deadline, Endpoint

Rank = tuple[int, int]
"""(pipeline rank, tensor-parallel rank)."""

_JSON = "application/json"
_MSGPACK = "application/msgpack"
_SHOWN = 200


@dataclass(frozen=True)
class EngineDescription:
    """What an engine says of itself; ``None`` where it does not know."""

    engine_id: str
    base_url: str | None = None
    role: str | None = None
    model: str | None = None
    dp_rank: int = 0
    vllm_version: str | None = None
    more: Mapping[str, Any] = field(default_factory=dict)

    def body(self) -> dict[str, Any]:
        """The registration's fields without ranks, lease and clock."""
        fields = {
            "base_url": self.base_url,
            "role": self.role,
            "model": self.model,
            "dp_rank": self.dp_rank,
            "vllm_version": self.vllm_version,
            **self.more,
        }
        return {key: value for key, value in fields.items() if value is not None}


@dataclass(frozen=True)
class Echo:
    """The router's clock in its last answer, and this engine's clock as that came."""

    router_clock: float
    received: float


@dataclass(frozen=True)
class Receipt:
    """What an engine is told when it registers or gives a sign of life."""

    ttl: float | None
    echo: Echo


@dataclass(frozen=True)
class Place:
    """What of an engine stays the same when it is started anew."""

    base_url: str
    dp_rank: int


@dataclass(frozen=True)
class RankPayload:
    """One rank's payload, and the owner's clock at a moment of this process' ``perf_counter``."""

    payload: bytes
    clock_offset: float | None
    """Owner's clock minus ours, rather too large than too small; ``None`` if it is not known."""


class Registry:
    """One registry; it may be shared by threads."""

    def __init__(self, endpoint: Endpoint, clock: Callable[[], float] = time.perf_counter) -> None:
        self._endpoint = endpoint
        self._clock = clock

    @property
    def url(self) -> str:
        """Where it is."""
        return self._endpoint.url

    def connect(self, deadline: Deadline) -> Connection:
        """A connection for several look-ups.

        Raises:
            Unreachable: if there is none before the deadline.
        """
        return self._endpoint.connect(deadline)

    def register(
        self,
        engine: EngineDescription,
        state: str,
        ranks: Mapping[Rank, bytes],
        ttl: float,
        deadline: Deadline,
    ) -> Receipt:
        """Registers an engine with all its ranks.

        Raises:
            RegistryError: if it does not succeed.
        """
        fields = {
            **engine.body(),
            "state": state,
            "ttl_seconds": ttl,
            "ranks": [
                {"pp_rank": pp, "tp_rank": tp, "payload": base64.b64encode(payload).decode("ascii")}
                for (pp, tp), payload in sorted(ranks.items())
            ],
        }
        # Everything but the clock is written before, so that the clock is no older than it must be.
        head = json.dumps(fields).encode()[:-1]
        with self.connect(deadline) as connection:
            answer = connection.exchange(
                "PUT",
                _engine(engine.engine_id),
                deadline,
                lambda: head + b', "clock": ' + json.dumps(self._clock()).encode() + b"}",
                {"Content-Type": _JSON},
            )
        return self._receipt(answer)

    def heartbeat(
        self, engine_id: str, state: str, echo: Echo | None, deadline: Deadline
    ) -> Receipt:
        """Gives a sign of life, with this engine's state and clock.

        Raises:
            RegistryError: if it does not succeed; ``Unknown`` if it has to register again.
        """
        fields: dict[str, Any] = {"state": state}
        if echo is not None:
            fields["echo"] = {"router_clock": echo.router_clock, "received": echo.received}
        with self.connect(deadline) as connection:
            answer = connection.exchange(
                "POST",
                _engine(engine_id) + "/heartbeat",
                deadline,
                lambda: json.dumps({**fields, "clock": self._clock()}).encode(),
                {"Content-Type": _JSON},
            )
        return self._receipt(answer)

    def deregister(self, engine_id: str, deadline: Deadline) -> None:
        """Leaves; an engine that is not known has left already.

        Raises:
            RegistryError: if it does not succeed.
        """
        with self.connect(deadline) as connection:
            answer = connection.exchange("DELETE", _engine(engine_id), deadline)
        try:
            _check(answer, self.url)
        except Unknown:
            return

    def place(self, connection: Connection, engine_id: str, deadline: Deadline) -> Place | None:
        """Where an engine is, if it told.

        Raises:
            RegistryError: if it does not succeed.
        """
        answer = connection.exchange("GET", _engine(engine_id), deadline, headers={"Accept": _JSON})
        view = _object(answer, self.url)
        base_url, dp_rank = view.get("base_url"), view.get("dp_rank")
        if base_url is None:
            return None
        if not isinstance(base_url, str) or not isinstance(dp_rank, int):
            raise Malformed(f"{self.url} describes an engine in an unknown way")
        return Place(base_url, dp_rank)

    def rank(
        self, connection: Connection, engine_id: str, rank: Rank, wait: float, deadline: Deadline
    ) -> RankPayload:
        """One rank's payload, byte for byte as its engine made it.

        Raises:
            RegistryError: if it does not succeed; ``Unknown`` and ``NotReady`` after ``wait``.
        """
        pp, tp = rank
        path = f"{_engine(engine_id)}/ranks/{pp}/{tp}"
        if wait > 0.0:
            path += f"?wait={wait:.3f}"
        answer = connection.exchange("GET", path, deadline, headers={"Accept": _MSGPACK})
        _check(answer, self.url)
        if answer.headers.get("content-type", "").split(";")[0].strip().lower() != _MSGPACK:
            raise Malformed(f"{self.url} answers a look-up with something else than a payload")
        return RankPayload(answer.body, _clock_offset(answer))

    def _receipt(self, answer: Answer) -> Receipt:
        fields = _object(answer, self.url)
        router_clock, ttl = fields.get("router_clock"), fields.get("ttl_seconds")
        if not _is_number(router_clock) or not (ttl is None or _is_number(ttl)):
            raise Malformed(f"{self.url} acknowledges in an unknown way")
        return Receipt(ttl, Echo(router_clock, answer.received))


def _clock_offset(answer: Answer) -> float | None:
    try:
        clock = float(answer.headers["kv-clock"])
        error = float(answer.headers["kv-clock-error"])
    except (KeyError, ValueError):
        # Without an error it is only a bound from below, from which nothing safe follows.
        return None
    if not math.isfinite(clock) or not math.isfinite(error) or error < 0.0:
        return None
    # A deadline of the owner's must rather pass too early here than too late.
    return clock + error - answer.sent


def _engine(engine_id: str) -> str:
    return f"/registry/v1/engines/{quote(engine_id, safe='')}"


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _check(answer: Answer, url: str) -> None:
    if 200 <= answer.status < 300:
        return
    code, message = _error(answer)
    if answer.status in (401, 403):
        raise Denied(answer.status, code, f"{url} refuses this engine's token: {message}")
    if code in ("unknown_engine", "unknown_rank"):
        raise Unknown(answer.status, code, message)
    if code == "engine_not_ready":
        raise NotReady(answer.status, code, message)
    raise Refused(answer.status, code, f"{url} refuses: {message}")


def _error(answer: Answer) -> tuple[str, str]:
    try:
        error = json.loads(answer.body)["error"]
        code, message = error["code"], error["message"]
    except (ValueError, KeyError, TypeError):
        return "no_code", answer.body[:_SHOWN].decode(
            "utf-8", "replace"
        ).strip() or "no reason given"
    return str(code), str(message)


def _object(answer: Answer, url: str) -> dict[str, Any]:
    _check(answer, url)
    try:
        value = json.loads(answer.body)
    except ValueError as error:
        raise Malformed(f"{url} answers with something else than JSON") from error
    if not isinstance(value, dict):
        raise Malformed(f"{url} answers with something else than an object")
    return value
