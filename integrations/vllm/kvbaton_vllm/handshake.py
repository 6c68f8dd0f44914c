"""A peer's payloads from a registry, in the shape of the side channel that vLLM asks.

vLLM checks what comes back by itself; nothing here looks into a payload.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Callable, Sequence
from types import TracebackType

from kvbaton_vllm.errors import NobodyKnows, NotReady, RegistryError, Unknown, Unreachable
from kvbaton_vllm.registry import Place, Rank, RankPayload, Registry
from kvbaton_vllm.wire import Connection, Deadline

_ATTEMPT = 2.0
_WAIT = 1.0
_PAUSE = 0.1


class Lookup:
    """Looks one engine's ranks up, at whichever registry has them, within one budget for all.

    One that is patient gives an engine that is not there time to register within the budget.
    """

    def __init__(
        self, registries: Sequence[Registry], engine_id: str, budget: float, patient: bool = True
    ) -> None:
        self.engine_id = engine_id
        self.place: Place | None = None
        self.found = False
        self._patient = patient
        self._registries = list(registries)
        self._budget = budget
        self._deadline = Deadline(budget)
        self._connection: Connection | None = None

    def close(self) -> None:
        """Gives the connection back."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def rank(self, rank: Rank) -> RankPayload:
        """One rank's payload.

        Raises:
            NobodyKnows: if no registry gave it in time.
        """
        wait = 0.0
        while True:
            problems: list[RegistryError] = []
            # The list begins with the registry that answered last, so the connection is its.
            for registry in list(self._registries):
                try:
                    payload = self._ask(registry, rank, wait)
                except RegistryError as error:
                    self.close()
                    problems.append(error)
                else:
                    self._registries.remove(registry)
                    self._registries.insert(0, registry)
                    return payload
                if self._deadline.left() == 0.0:
                    break
            may_come = any(isinstance(e, (Unknown, NotReady, Unreachable)) for e in problems)
            if not (self._patient and may_come) or self._deadline.left() <= _PAUSE:
                raise NobodyKnows(self._summary(rank, problems))
            if not any(isinstance(error, (Unknown, NotReady)) for error in problems):
                time.sleep(_PAUSE)
            # Nobody had it at once: from now on the registries may hold the question for a while.
            wait = min(_WAIT, self._deadline.left() / 2.0)

    def _ask(self, registry: Registry, rank: Rank, wait: float) -> RankPayload:
        deadline = self._deadline.within(_ATTEMPT)
        connection = self._connection
        if connection is None:
            connection = self._connection = registry.connect(deadline)
        payload = registry.rank(connection, self.engine_id, rank, wait, deadline)
        if wait > 0.0:
            # Once more without waiting, since the longer an exchange, the less its clock says.
            payload = registry.rank(connection, self.engine_id, rank, 0.0, deadline)
        if not self.found:
            self.place = registry.place(connection, self.engine_id, deadline)
            self.found = True
        return payload

    def _summary(self, rank: Rank, problems: list[RegistryError]) -> str:
        why = "; ".join(str(problem) for problem in problems) or "no time was left"
        return (
            f"rank {rank[0]}/{rank[1]} of engine {self.engine_id} was not found at a registry "
            f"within {self._budget:g} s: {why}"
        )


class RegistrySocket:
    """Stands where vLLM has the socket to a peer's side channel: a question in, two frames out.

    ``decode`` reads the question ``(tag, pp_rank, tp_rank)``.
    """

    def __init__(
        self,
        lookup: Lookup,
        decode: Callable[[bytes], tuple[bytes, int, int]],
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._lookup = lookup
        self._decode = decode
        self._clock = clock
        self._asked: tuple[Rank, float] | None = None

    def __enter__(self) -> RegistrySocket:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._lookup.close()

    def setsockopt(self, option: int, value: int) -> None:
        """Takes the timeout that vLLM sets; the look-up has its own, which is shorter."""

    def send(self, question: bytes) -> None:
        """Takes the question; it is answered by ``recv_multipart``."""
        _tag, pp_rank, tp_rank = self._decode(question)
        self._asked = ((pp_rank, tp_rank), self._clock())

    def recv_multipart(self) -> list[bytes]:
        """The payload, and the owner's clock.

        Raises:
            RegistryError: if nobody has the payload.
        """
        if self._asked is None:
            raise NobodyKnows("nothing was asked")
        rank, asked = self._asked
        self._asked = None
        found = self._lookup.rank(rank)
        # vLLM takes the clock for the one at half time between its question and this answer.
        half_time = (asked + self._clock()) / 2.0
        # Not known: every deadline of the owner's has passed, which is the safe side.
        offset = float("inf") if found.clock_offset is None else found.clock_offset
        return [found.payload, encode_float(half_time + offset)]


def encode_float(value: float) -> bytes:
    """A msgpack float64."""
    return struct.pack(">Bd", 0xCB, value)
