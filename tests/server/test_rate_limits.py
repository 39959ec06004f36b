"""A tenant that asks for too much is told so, and when to come again; others are served meanwhile."""

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
    """Two requests of a tenant at once, ten in a minute, a cache of 1 MB, ten answers that wait."""
    return start(
        world.folder,
        keys={"ann": ANN, "bob": BOB},
        requests=RequestLimits(at_once=2, per_minute=10),
        cache_bytes=1 << 20,
        max_queued=10,
        tenant_queued=8,
    )


def test_more_at_once_or_in_a_minute_is_429_in_openais_shape(small):
    ann, bob = small.client(ANN), small.client(BOB)
    held = [ann.completions.create(**LONG, n=4) for _ in range(2)]
    with pytest.raises(openai.RateLimitError, match="at once") as caught:
        ann.completions.create(model="tiny", prompt="x", max_tokens=1)
    assert caught.value.code == "rate_limit_exceeded"
    assert caught.value.response.headers["retry-after"] == "1"
    assert bob.completions.create(model="tiny", prompt="x", max_tokens=1).choices  # others are not in her way
    for stream in held:
        assert len(list(stream)) > 100
    for _ in range(8):
        assert ann.completions.create(model="tiny", prompt="x", max_tokens=1).choices
    more = (ann.completions.create(model="tiny", prompt="x", max_tokens=1) for _ in range(20))  # slow machines earn some
    with pytest.raises(openai.RateLimitError, match="in a minute") as caught:
        list(more)
    assert 1 <= int(caught.value.response.headers["retry-after"]) <= 6
    for path, body in (("/tokenize", {"prompt": "x"}), ("/detokenize", {"tokens": [5]})):
        assert 429 in [small.ask("POST", path, ANN, json=body).status_code for _ in range(20)]
    assert bob.completions.create(model="tiny", prompt="x", max_tokens=1).choices


def test_the_engines_settings_act(small):
    page = 2 * 2 * 2 * 16 * 16 * 4  # layers, keys and values, heads, width, tokens, bytes
    core = small.hosting._window.engine_loop._core
    assert core.scheduler.block_manager.num_blocks == (1 << 20) // page
    with pytest.raises(openai.RateLimitError, match="> 8 allowed"):
        small.client(BOB).completions.create(model="tiny", prompt="x", n=9, max_tokens=1)


def test_an_allowance_comes_back_with_time_and_ends_with_its_request():
    now = [0.0]
    allowances = RateLimiter(RequestLimits(at_once=1, per_minute=2), lambda: now[0])
    with allowances.request("ann"):
        with pytest.raises(TooManyRequests, match="at once"), allowances.request("ann"):
            pass
        with allowances.request("bob"):
            pass
    with pytest.raises(KeyError), allowances.request("ann"):
        raise KeyError  # ends it too
    with pytest.raises(TooManyRequests) as caught, allowances.request("ann"):
        pass
    assert caught.value.retry_s == pytest.approx(30)
    now[0] += 30.1
    with allowances.request("ann"):
        pass
    now[0] += 1e6  # nobody saves up
    for _ in range(2):
        with allowances.request("ann"):
            pass
    with pytest.raises(TooManyRequests), allowances.request("ann"):
        pass
    with pytest.raises(SymbiosisError):
        RequestLimits(at_once=0)


def test_limits_hold_for_many_threads_of_one_tenant(small):
    """However many come at once, no more than allowed get in."""
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
