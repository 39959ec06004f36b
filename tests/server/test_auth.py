"""Deny by default: no route answers without a key where there are keys, and the admin's routes are the admin's."""

from __future__ import annotations

import openai
import pytest

from symbiosis.app.http_host import check_http
from symbiosis.errors import AddressInUse, BadAddress, InsecureListen, SymbiosisError
from symbiosis.server.app import Server
from symbiosis.server.auth import OPEN_PATHS, ApiKeys, AuthMiddleware, is_tenants
from symbiosis.server.metrics import Metrics
from symbiosis.server.settings import ADMIN, Settings
from tests.server.conftest import ANN, BOB, CHAT, CHIEF


def routes() -> list[tuple[str, str]]:
    """Every route there is, by walking the app itself."""
    guard = Server(None, None, Settings(base="x")).app()  # type: ignore[arg-type] - nothing is asked
    assert isinstance(guard, AuthMiddleware)
    return [(method, route.path) for route in guard._app.routes for method in route.methods]


def test_no_route_answers_without_a_key_or_with_a_wrong_one(hotel):
    known = routes()
    assert len(known) >= 8
    assert hotel.ask("GET", "/health").json() == {"status": "ok"}  # that somebody is there, and nothing else
    known = [(method, path) for method, path in known if path not in OPEN_PATHS]
    for method, path in [*known, ("GET", "/"), ("GET", "/docs"), ("GET", "/openapi.json"), ("POST", "/v1/anything")]:
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": f"Basic {ANN}"}, {"Authorization": "Bearer"}):
            answer = hotel.ask(method, path, headers=headers)
            assert answer.status_code == 401, (method, path)
            if method != "HEAD":
                assert answer.json()["error"]["code"] == "invalid_api_key"
            assert ANN not in answer.text


def test_the_admins_routes_are_not_the_tenants(hotel):
    for method, path in routes():
        if not is_tenants(path) and path not in OPEN_PATHS:
            assert hotel.ask(method, path, ANN).status_code == 403, path
            assert hotel.ask(method, path, CHIEF).status_code != 403, path
    for key in (ANN, CHIEF):
        assert hotel.ask("GET", "/v1/nothing", key).status_code == 404
    assert hotel.ask("POST", "/v1/embeddings", ANN, json={}).status_code == 400  # refused by name, to everybody


def test_a_tenant_with_its_key_is_served_and_counted_by_name(hotel):
    made = hotel.client(ANN).chat.completions.create(model="tiny", messages=CHAT, max_tokens=3)
    assert made.choices[0].message.content is not None
    with pytest.raises(openai.AuthenticationError):
        hotel.client("nonsense").chat.completions.create(model="tiny", messages=CHAT, max_tokens=3)
    lines = hotel.ask("GET", "/metrics", CHIEF).text
    assert 'symbiosis_tokens_total{kind="prompt",tenant="ann"}' in lines
    assert ANN not in lines


def test_tenants_find_only_their_own_prompts_in_the_cache(hotel):
    ask = {"model": "tiny", "prompt": "what only one of them has said before, at length: " * 2, "max_tokens": 1}
    cached = [
        hotel.client(key).completions.create(**ask).usage.prompt_tokens_details.cached_tokens for key in (ANN, BOB, ANN, BOB)
    ]
    assert cached[:2] == [0, 0]
    assert min(cached[2:]) > 0


def test_keys_that_could_not_be_told_apart_are_refused():
    for keys, admin in (({"ann": ANN, "bob": ANN}, None), ({"ann": ANN}, ANN), ({"ann": ""}, None), ({ADMIN: ANN}, None)):
        with pytest.raises(SymbiosisError) as caught:
            Settings(base="x", keys=keys, admin_key=admin)
        assert ANN not in str(caught.value)


def test_a_key_says_who_asks():
    keys = ApiKeys({"ann": ANN}, None)
    assert not keys.caller(f"Bearer {ANN}").is_admin
    assert keys.caller(f"bearer {ANN}").tenant == "ann"
    both = ApiKeys({"ann": ANN}, CHIEF)
    assert both.caller(f"Bearer {CHIEF}").tenant == ADMIN


def test_without_tenants_keys_the_admins_key_still_guards_what_is_the_admins():
    keys = ApiKeys({}, CHIEF)
    assert not keys.caller(None).is_admin
    assert keys.caller(f"Bearer {CHIEF}").is_admin
    assert ApiKeys({}).caller(None).is_admin


def test_a_web_page_cannot_speak_for_the_user_of_a_server_without_keys(site):
    assert site.ask("GET", "/v1/models", headers={"Host": "evil.example"}).status_code == 403
    assert site.ask("GET", "/v1/models", headers={"Host": "localhost:8000"}).status_code == 200
    for origin in ("http://evil.example", "https://127.0.0.1.evil.example", "null"):
        assert site.ask("OPTIONS", "/v1/completions", headers={"Origin": origin}).status_code == 403
        # a form of any web page can be sent here, though its sender does not see the answer
        form = {"purpose": (None, "fine-tune"), "file": ("x.jsonl", b'{"text": "x y z"}')}
        assert site.ask("POST", "/v1/files", files=form, headers={"Origin": origin}).status_code == 403
    for origin in ("http://localhost:3000", "http://[::1]:3000", "https://127.0.0.1"):
        assert site.ask("GET", "/v1/models", headers={"Origin": origin}).status_code == 200


def test_listening_beyond_this_machine_without_keys_refuses_to_start(site):
    for address in ("0.0.0.0:0", "[::]:0"):
        with pytest.raises(InsecureListen, match="--key"):
            check_http(address, {})
    check_http("0.0.0.0:0", {"ann": ANN})
    for address in ("8000", "nowhere.invalid:80", "127.0.0.1:99999", "127.0.0.1:"):
        with pytest.raises(BadAddress):
            check_http(address, {})
    with pytest.raises(AddressInUse):
        check_http(site.url.removeprefix("http://"), {})


def test_metrics_of_two_servers_do_not_meet():
    one, other = Metrics(), Metrics()
    one.count_prompt("ann", 3)
    assert b'tenant="ann"' in one.written(None)
    assert b'tenant="ann"' not in other.written(None)
