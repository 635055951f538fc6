"""Access to the page, and the limits of the browsers that show it."""

from __future__ import annotations

import pytest
from starlette.responses import PlainTextResponse
from starlette.testclient import TestClient

from phalanx.run.peers import is_loopback
from phalanx_watch.page.http import Access, Guard, access_for

TOKEN = "a-token-that-nobody-guesses"


def _client(access: Access, host: str = "127.0.0.1:7425") -> TestClient:
    return TestClient(
        Guard(PlainTextResponse("the page"), access), base_url=f"http://{host}", follow_redirects=False
    )


LOCAL = access_for("127.0.0.1", "")


@pytest.mark.parametrize("host", ["127.0.0.1:7425", "localhost:7425", "[::1]:7425", "LOCALHOST"])
def test_the_names_of_this_machine_itself_are_answered(host: str) -> None:
    assert _client(LOCAL).get("/", headers={"host": host}).status_code == 200


@pytest.mark.parametrize(
    "host",
    ["evil.example", "127.0.0.1.evil.example", "localhost.evil.example:7425", "", "127.0.0.2", "[::1].evil"],
)
def test_a_name_that_a_stranger_points_at_this_machine_is_refused(host: str) -> None:
    answer = _client(LOCAL).get("/api/runs", headers={"host": host})
    assert (answer.status_code, answer.text == "the page") == (421, False)


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "BREW"])
def test_nothing_but_reading_is_answered(method: str) -> None:
    assert _client(LOCAL).request(method, "/api/runs").status_code == 405


def test_an_address_that_others_reach_demands_a_token() -> None:
    with pytest.raises(ValueError, match="token"):
        access_for("0.0.0.0", "")
    client = _client(access_for("0.0.0.0", TOKEN), "cluster:7425")
    assert client.get("/").status_code == 401
    assert client.get("/api/runs?token=wrong").status_code == 401
    assert client.get("/", headers={"cookie": "phalanx-00000000=" + TOKEN}).status_code == 401
    assert client.get("/", headers={"authorization": "Bearer wrong"}).status_code == 401
    assert client.get("/", headers={"authorization": f"Bearer {TOKEN}"}).text == "the page"
    for path in ("/api/runs", "/metrics", "/targets"):
        assert client.get(f"{path}?token={TOKEN}").text == "the page"


def test_the_token_of_a_url_becomes_a_cookie_and_leaves_the_url() -> None:
    client = _client(access_for("0.0.0.0", TOKEN), "cluster:7425")
    answer = client.get(f"/?a=b&token={TOKEN}")
    assert (answer.status_code, answer.headers["location"]) == (303, "/?a=b")
    cookie = answer.headers["set-cookie"]
    assert "HttpOnly" in cookie
    assert "SameSite=strict" in cookie
    assert TOKEN not in cookie
    assert client.get("/").text == "the page"


def test_the_way_back_from_a_token_stays_on_this_server() -> None:
    client = _client(access_for("0.0.0.0", TOKEN), "cluster:7425")
    assert (
        client.get(f"http://cluster:7425//evil.example/?token={TOKEN}")
        .headers["location"]
        .startswith("/evil.example")
    )


def test_a_token_is_demanded_on_a_loopback_address_where_one_was_chosen() -> None:
    client = _client(access_for("127.0.0.1", TOKEN))
    assert client.get("/api/runs").status_code == 401
    assert (
        client.get(
            "/api/runs", headers={"host": "evil.example", "authorization": f"Bearer {TOKEN}"}
        ).status_code
        == 421
    )


@pytest.mark.parametrize("token", ["", TOKEN])
def test_every_answer_forbids_foreign_scripts_frames_and_guesses_of_types(token: str) -> None:
    client = _client(access_for("127.0.0.1", token))
    for path in ("/", "/api/runs", f"/?token={token}"):
        headers = client.get(path).headers
        assert "script-src 'self'" in headers["content-security-policy"]
        assert "unsafe" not in headers["content-security-policy"]
        assert "frame-ancestors 'none'" in headers["content-security-policy"]
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["referrer-policy"] == "no-referrer"
        assert headers["cache-control"] == "no-store"


def test_loopback_addresses_are_those_that_only_this_machine_reaches() -> None:
    assert all(map(is_loopback, ("127.0.0.1", "127.8.8.8", "::1", "localhost")))
    assert not any(map(is_loopback, ("0.0.0.0", "::", "10.0.0.1", "cluster", "")))
