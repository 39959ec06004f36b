"""CURVE keys of an encrypted channel, derived from a tenant's auth token.

CURVE encrypts each channel with fresh keys. The tenant's long-term key is derived from its auth token, so the executor
identifies a tenant by the key alone, never by what a message says. The executor's long-term key is public and proves
nothing. Instead the executor replies to the tenant's nonce with a MAC under the token. A man in the middle has neither the
token nor the tenant's key: it can neither compute that MAC nor obtain it from the executor.
"""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import dataclass

import zmq
from zmq.utils import z85


@dataclass(frozen=True, slots=True)
class KeyPair:
    public: bytes
    secret: bytes


def _key_pair(raw: bytes) -> KeyPair:
    secret = z85.encode(raw)
    return KeyPair(zmq.curve_public(secret), secret)


def executor_keys() -> KeyPair:
    """The same for every executor, and not secret: see the module's docstring."""
    return _key_pair(hashlib.sha256(b"symbiosis executor, protocol 1: a public key pair").digest())


def tenant_keys(token: str) -> KeyPair:
    return _key_pair(_derive(token, b"symbiosis tenant key"))


def proof_key(token: str) -> bytes:
    return _derive(token, b"symbiosis executor proof")


def prove(key: bytes, nonce: str) -> str:
    """The executor's MAC of the tenant's nonce."""
    return hmac.new(key, nonce.encode(), hashlib.sha256).hexdigest()


def _derive(token: str, salt: bytes) -> bytes:
    # slow on purpose: guessing tokens from an observed key costs memory and time
    return hashlib.scrypt(token.encode(), salt=salt, n=2**14, r=8, p=1, dklen=32)
