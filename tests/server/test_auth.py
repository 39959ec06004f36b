"""Deny by default: with keys, every route needs one, and the admin's routes need the admin key."""

from __future__ import annotations

import openai
import pytest

from symbiosis.app.front_door import check_http
from symbiosis.errors import AddressInUse, BadAddress, InsecureListen, SymbiosisError
from symbiosis.server.app import Server
from symbiosis.server.auth import OPEN_PATHS, ApiKeys, AuthMiddleware, is_tenant_path
from symbiosis.server.settings import ADMIN, Settings
from tests.server.conftest import ANN, BOB, CHAT, CHIEF

FOLDERS = {"base": "x", "uploads": "/nowhere", "jobs": "/nowhere"}


def routes() -> list[tuple[str, str]]:
    """Every route of the app."""
    guard = Server(None, None, Settings(**FOLDERS)).app()  # type: ignore[arg-type] - no request is made
    assert isinstance(guard, AuthMiddleware)
    return [(method, route.path) for route in guard._app.routes for method in route.methods]


def test_every_route_rejects_a_missing_or_wrong_key(keyed_server):
    known = routes()
    assert len(known) >= 8
    for path in OPEN_PATHS:
        assert keyed_server.ask("GET", path).json() == {"status": "ok"}
    known = [(method, path) for method, path in known if path not in OPEN_PATHS]
    for method, path in [*known, ("GET", "/"), ("GET", "/docs"), ("POST", "/v1/anything")]:
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": f"Basic {ANN}"}, {"Authorization": "Bearer"}):
            answer = keyed_server.ask(method, path, headers=headers)
            assert answer.status_code == 401, (method, path)
            if method != "HEAD":
                assert answer.json()["error"]["code"] == "invalid_api_key"
            assert ANN not in answer.text


def test_admin_routes_reject_tenants(keyed_server):
    for method, path in routes():
        if not is_tenant_path(path) and path not in OPEN_PATHS:
            assert keyed_server.ask(method, path, ANN).status_code == 403, path
            assert keyed_server.ask(method, path, CHIEF).status_code != 403, path
    for key in (ANN, CHIEF):
        assert keyed_server.ask("GET", "/v1/nothing", key).status_code == 404
    assert keyed_server.ask("POST", "/v1/embeddings", ANN, json={}).status_code == 400  # rejected for all callers


def test_a_tenant_is_served_and_counted_by_name(keyed_server):
    made = keyed_server.client(ANN).chat.completions.create(model="tiny", messages=CHAT, max_tokens=3)
    assert made.choices[0].message.content is not None
    with pytest.raises(openai.AuthenticationError):
        keyed_server.client("nonsense").chat.completions.create(model="tiny", messages=CHAT, max_tokens=3)
    lines = keyed_server.ask("GET", "/metrics", CHIEF).text
    assert 'symbiosis_tokens_total{kind="prompt",tenant="ann"}' in lines
    assert ANN not in lines


def test_the_prefix_cache_is_per_tenant(keyed_server):
    ask = {"model": "tiny", "prompt": "what only one of them has said before, at length: " * 2, "max_tokens": 1}
    cached = [
        keyed_server.client(key).completions.create(**ask).usage.prompt_tokens_details.cached_tokens
        for key in (ANN, BOB, ANN, BOB)
    ]
    assert cached[:2] == [0, 0]
    assert min(cached[2:]) > 0


def test_ambiguous_keys_are_rejected():
    for keys, admin in (({"ann": ANN, "bob": ANN}, None), ({"ann": ANN}, ANN), ({"ann": ""}, None), ({ADMIN: ANN}, None)):
        with pytest.raises(SymbiosisError) as caught:
            Settings(**FOLDERS, keys=keys, admin_key=admin)
        assert ANN not in str(caught.value)


def test_a_key_identifies_its_tenant():
    keys = ApiKeys({"ann": ANN}, None)
    assert not keys.authenticate(f"Bearer {ANN}").is_admin
    assert keys.authenticate(f"bearer {ANN}").tenant == "ann"
    both = ApiKeys({"ann": ANN}, CHIEF)
    assert both.authenticate(f"Bearer {CHIEF}").tenant == ADMIN


def test_an_admin_key_alone_protects_the_admin_routes():
    keys = ApiKeys({}, CHIEF)
    assert not keys.authenticate(None).is_admin
    assert keys.authenticate(f"Bearer {CHIEF}").is_admin
    assert ApiKeys({}).authenticate(None).is_admin


def test_a_server_without_keys_rejects_other_web_pages(server):
    assert server.ask("GET", "/v1/models", headers={"Host": "evil.example"}).status_code == 403
    assert server.ask("GET", "/v1/models", headers={"Host": "localhost:8000"}).status_code == 200
    for origin in ("http://evil.example", "https://127.0.0.1.evil.example", "null"):
        assert server.ask("OPTIONS", "/v1/completions", headers={"Origin": origin}).status_code == 403
        # browsers send cross-origin forms without a preflight
        form = {"purpose": (None, "fine-tune"), "file": ("x.jsonl", b'{"text": "x y z"}')}
        assert server.ask("POST", "/v1/files", files=form, headers={"Origin": origin}).status_code == 403
    for origin in ("http://localhost:3000", "http://[::1]:3000", "https://127.0.0.1"):
        assert server.ask("GET", "/v1/models", headers={"Origin": origin}).status_code == 200


def preflight(server, origin: str, path: str = "/v1/chat/completions", **headers: str):
    asked = {"Origin": origin, "Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization,x-y"}
    return server.ask("OPTIONS", path, headers={**asked, **headers})


def test_web_pages_of_a_named_origin_are_allowed(world, start):
    for keys in ({}, {"ann": ANN}):
        here = start(world.folder, keys=keys, cors_origins=("https://app.example", "http://localhost:3000"))
        key = ANN if keys else None
        for origin in ("https://app.example", "http://localhost:3000"):
            answer = preflight(here, origin)  # without a key
            assert answer.status_code == 200
            assert answer.headers["access-control-allow-origin"] == origin
            assert "authorization" in answer.headers["access-control-allow-headers"]
            assert "access-control-allow-credentials" not in answer.headers
            answer = here.ask("GET", "/v1/models", key, headers={"Origin": origin})
            assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (200, origin)
            body = {"model": "tiny", "prompt": "x", "max_tokens": 2, "stream": True}
            answer = here.ask("POST", "/v1/completions", key, json=body, headers={"Origin": origin})
            assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (200, origin)
        for origin in ("https://evil.example", "https://app.example.evil.example", "http://app.example", "null"):
            assert "access-control-allow-origin" not in preflight(here, origin).headers
            answer = here.ask("GET", "/v1/models", key, headers={"Origin": origin})
            assert "access-control-allow-origin" not in answer.headers
            assert answer.status_code == (200 if keys else 403)  # with keys, only the browser hides the response
        if keys:
            answer = here.ask("GET", "/v1/models", headers={"Origin": "https://app.example"})
            assert answer.status_code == 401  # readable by the page
            assert answer.headers["access-control-allow-origin"] == "https://app.example"
        else:  # DNS rebinding: the Host is still checked
            answer = here.ask("GET", "/v1/models", headers={"Origin": "https://app.example", "Host": "app.example"})
            assert answer.status_code == 403
        here.hosting.close()


def test_cors_is_off_by_default(server, keyed_server):
    for here in (server, keyed_server):
        assert "access-control-allow-origin" not in preflight(here, "https://app.example").headers
    assert preflight(keyed_server, "https://app.example").status_code == 401


def test_every_origin_needs_keys():
    with pytest.raises(SymbiosisError, match="set keys"):
        Settings(**FOLDERS, cors_origins=("*",))
    Settings(**FOLDERS, cors_origins=("*",), keys={"ann": ANN})
    for origin in ("app.example", "https://app.example/", "https://a b", "null", "https://App.example", "", "ftp://x"):
        with pytest.raises(SymbiosisError, match="--cors-origin"):
            Settings(**FOLDERS, cors_origins=(origin,), keys={"ann": ANN})


def test_listening_on_a_public_address_needs_keys(server):
    for address in ("0.0.0.0:0", "[::]:0"):
        with pytest.raises(InsecureListen, match="--key"):
            check_http(address, {})
    check_http("0.0.0.0:0", {"ann": ANN})
    for address in ("8000", "nowhere.invalid:80", "127.0.0.1:99999", "127.0.0.1:"):
        with pytest.raises(BadAddress):
            check_http(address, {})
    with pytest.raises(AddressInUse):
        check_http(server.url.removeprefix("http://"), {})
