"""A tenant above its limits gets a 429 with the time to retry; other tenants are served."""

from __future__ import annotations

import threading

import openai
import pytest

from symbiosis.errors import SymbiosisError, TooManyRequests
from symbiosis.server.rate_limits import RateLimiter, RequestLimits
from tests.server.conftest import ANN, BOB

LONG = {"model": "tiny", "prompt": "x", "max_tokens": 250, "stream": True, "extra_body": {"ignore_eos": True}}


@pytest.fixture(scope="module")
def small(world, start):
    """Two concurrent requests and ten a minute per tenant, a KV cache of 1 MB, ten queued sequences."""
    return start(
        world.folder,
        keys={"ann": ANN, "bob": BOB},
        requests=RequestLimits(at_once=2, per_minute=10),
        cache_bytes=1 << 20,
        max_queued=10,
        tenant_queued=8,
    )


def test_requests_above_the_limits_are_429_in_openais_format(small):
    ann, bob = small.client(ANN), small.client(BOB)
    held = [ann.completions.create(**LONG, n=4) for _ in range(2)]
    with pytest.raises(openai.RateLimitError, match="at once") as caught:
        ann.completions.create(model="tiny", prompt="x", max_tokens=1)
    assert caught.value.code == "rate_limit_exceeded"
    assert caught.value.response.headers["retry-after"] == "1"
    assert bob.completions.create(model="tiny", prompt="x", max_tokens=1).choices  # other tenants are not limited
    for stream in held:
        assert len(list(stream)) > 100
    for _ in range(8):
        assert ann.completions.create(model="tiny", prompt="x", max_tokens=1).choices
    more = (ann.completions.create(model="tiny", prompt="x", max_tokens=1) for _ in range(20))  # time refills the bucket
    with pytest.raises(openai.RateLimitError, match="in a minute") as caught:
        list(more)
    assert 1 <= int(caught.value.response.headers["retry-after"]) <= 6
    for path, body in (("/tokenize", {"prompt": "x"}), ("/detokenize", {"tokens": [5]})):
        assert 429 in [small.ask("POST", path, ANN, json=body).status_code for _ in range(20)]
    assert bob.completions.create(model="tiny", prompt="x", max_tokens=1).choices


def test_engine_options_take_effect(small):
    block_bytes = 2 * 2 * 2 * 16 * 16 * 4  # layers, keys and values, heads, width, tokens, bytes
    core = small.hosting._engine.service.engine_loop._core
    assert core.scheduler.block_manager.num_blocks == (1 << 20) // block_bytes
    with pytest.raises(openai.RateLimitError, match="> 8 allowed"):
        small.client(BOB).completions.create(model="tiny", prompt="x", n=9, max_tokens=1)


def test_the_bucket_refills_and_a_released_place_is_free():
    now = [0.0]
    limiter = RateLimiter(RequestLimits(at_once=1, per_minute=2), lambda: now[0])
    limiter.acquire("ann")
    with pytest.raises(TooManyRequests, match="at once"):
        limiter.acquire("ann")
    limiter.acquire("bob")
    limiter.release("ann")
    limiter.acquire("ann")
    limiter.release("ann")
    with pytest.raises(TooManyRequests) as caught:
        limiter.acquire("ann")
    assert caught.value.retry_s == pytest.approx(30)
    now[0] += 30.1
    limiter.acquire("ann")
    limiter.release("ann")
    now[0] += 1e6  # the bucket is bounded
    for _ in range(2):
        limiter.acquire("ann")
        limiter.release("ann")
    with pytest.raises(TooManyRequests):
        limiter.acquire("ann")
    with pytest.raises(SymbiosisError):
        RequestLimits(at_once=0)


def test_limits_hold_for_concurrent_requests(small):
    client, codes = small.client(BOB), []

    def ask() -> None:
        try:
            client.completions.create(model="tiny", prompt="x", max_tokens=100, extra_body={"ignore_eos": True})
            codes.append(200)
        except openai.RateLimitError:
            codes.append(429)

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(codes) == 8
    assert codes.count(429) >= 1
    assert codes.count(200) >= 1
