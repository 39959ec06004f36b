"""The engines of a cluster: they join, the director connects to each, and keeps it until that link is lost."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any

from symbiosis.errors import BadMessage, EngineLost, ModelChanged
from symbiosis.server.engines.engine_client import EngineClient
from symbiosis.serving.engine_messages import text_field
from symbiosis.transport.engine_ipc import Body, ClusterKey, EngineAddress, IpcClient

_CONNECT_S = 10.0
_SILENCE_S = 3.0
_MAX_NAME = 200
_log = logging.getLogger("symbiosis")


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineFacts:
    """What an engine says of itself when it joins."""

    slots: int
    """Most resident adapters."""
    kv_tokens: int
    max_running: int
    max_model_len: int
    max_training_len: int | None
    training_error: str | None
    """Why it does not train."""
    default_sampling: dict[str, float]
    tokenizer: str | None
    """Its folder."""

    @staticmethod
    def from_json(body: object) -> EngineFacts:
        """Raises `BadMessage`."""
        names = {each.name for each in fields(EngineFacts)}
        if not isinstance(body, dict) or body.keys() != names:
            raise BadMessage(f"facts: expected an object with {', '.join(sorted(names))}")
        for name in ("slots", "kv_tokens", "max_running", "max_model_len"):
            if type(body[name]) is not int or body[name] < 1:
                raise BadMessage(f"facts: {name} is {body[name]!r:.40}, expected a whole number above zero")
        return EngineFacts(**body)


@dataclass(slots=True, eq=False)
class Member:
    """One engine."""

    name: str
    address: EngineAddress
    facts: EngineFacts
    client: EngineClient
    number: int = -1
    """Of the policy."""
    loaded: dict[str, int] = field(default_factory=dict)
    """Versions of the adapters it has, by name."""
    jobs: int = 0
    """Fine-tuning jobs that run there."""
    stats: dict[str, Any] = field(default_factory=dict)
    """Its last statistics."""


class Members:
    """The first engine defines the model of the cluster; engines with another one are refused."""

    def __init__(self, key: ClusterKey, model: dict[str, Any] | None, changed: Callable[[], None]) -> None:
        """`model`: as an engine describes it when it joins; None: that of the first. `changed` follows each change."""
        self._key, self._changed = key, changed
        self.model = model
        self.by_name: dict[str, Member] = {}
        self.by_number: dict[int, Member] = {}
        self.on_joined: Callable[[Member], None] = lambda member: None
        self.on_lost: Callable[[Member], None] = lambda member: None
        self._watchers: set[asyncio.Task[None]] = set()
        self._joining: dict[str, asyncio.Lock] = {}

    def __len__(self) -> int:
        return len(self.by_name)

    async def join(self, id: str, body: Body) -> Body:
        """Raises `ModelChanged` if the engine serves another model, `EngineLost` if it cannot be reached."""
        name, address = text_field(body, "name", _MAX_NAME), EngineAddress.from_json(body.get("address"))
        model, facts = _parse_model(body.get("model")), EngineFacts.from_json(body.get("facts"))
        if self.model is not None and model["fingerprint"] != self.model["fingerprint"]:
            raise ModelChanged(
                f"the engine {name} serves {model['name']} ({model['fingerprint'][:12]}), this cluster serves "
                f"{self.model['name']} ({self.model['fingerprint'][:12]}): start it with the same model, revision and dtype"
            )
        async with self._joining.setdefault(name, asyncio.Lock()):
            there = self.by_name.get(name)
            if there is not None and there.address == address and there.client.is_alive():
                return {}
            if there is not None:
                self._leave(there)
            client = EngineClient(IpcClient(address, self._key, timeout_s=_SILENCE_S))
            try:
                async with asyncio.timeout(_CONNECT_S):
                    await client.start()
            except (EngineLost, TimeoutError):
                await client.close()
                raise EngineLost(f"the director cannot reach the engine {name} at {address.messages}") from None
            member = Member(name, address, facts, client)
            self.model = self.model or model
            self.by_name[name] = member
            self.on_joined(member)
            self.by_number[member.number] = member
            watcher = asyncio.create_task(self._watch(member))
            self._watchers.add(watcher)
            watcher.add_done_callback(self._watchers.discard)
        _log.warning("engine %s has joined", name)
        self._changed()
        return {}

    async def _watch(self, member: Member) -> None:
        try:
            await member.client.lost.wait()
            if self.by_name.get(member.name) is member:
                _log.warning("engine %s is lost", member.name)
                self._leave(member)
                self._changed()
        finally:
            await member.client.close()

    def _leave(self, member: Member) -> None:
        del self.by_name[member.name]
        if self.by_number.get(member.number) is member:
            del self.by_number[member.number]
        else:  # the policy has released it, and has given its number to another
            member.number = -1
        self.on_lost(member)

    async def close(self) -> None:
        for task in list(self._watchers):
            task.cancel()
        await asyncio.gather(*self._watchers, return_exceptions=True)


def _parse_model(value: object) -> dict[str, Any]:
    if not isinstance(value, dict) or not all(isinstance(value.get(name), str) for name in ("name", "fingerprint")):
        raise BadMessage("model: expected an object with name, hub_id and fingerprint")
    return value
