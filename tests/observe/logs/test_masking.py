"""Secrets do not pass; what only looks like one does."""

from __future__ import annotations

import urllib.parse

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.observe.logs.masking import MASKED, SecretMask

SECRET = "wJalrXUtnFEMI/K7MDENG+bPxRfiCYEXAMPLEKEY"


@pytest.mark.parametrize(
    "text",
    [
        "open s3://AKIAIOSFODNN7EXAMPLE:{}@bucket/key",
        "GET https://user:{}@proxy.example.com:8080/path failed",
        "redis://:{}@cache:6379",
        "https://{}@github.com/them/it.git",
        "AWS_SECRET_ACCESS_KEY={}",
        '{{"aws_secret_access_key": "{}"}}',
        "password: {}",
        "Authorization: Bearer {}",
        "headers={{'Authorization': 'Basic {}'}}",
        "sent bearer {}",
        "https://b.s3.amazonaws.com/k?X-Amz-Algorithm=A&X-Amz-Signature={}&x=1",
        "https://a.blob.core.windows.net/c?sv=1&sig={}",
        "token={}",
        "phalanx train run.toml --password {}",
        "curl --api-key '{}' https://example.com",
        "-----BEGIN RSA PRIVATE KEY-----\n{}\n-----END RSA PRIVATE KEY-----",
    ],
)
def test_a_credential_is_masked_where_it_stands(text: str) -> None:
    value = SECRET.replace("/", "x").replace("+", "y")
    masked = SecretMask()(text.format(value))
    assert value not in masked
    assert MASKED in masked


@pytest.mark.parametrize(
    "token",
    [
        "AKIAIOSFODNN7EXAMPLE",
        "ghp_" + "a1" * 18,
        "hf_" + "aB3" * 11,
        "sk-" + "abcd1234" * 4,
        "xoxb-1234567890-abcdef",
        "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0NTY3ODkwIn0.dozjgNryP4J3jVmNHl0w5N",
    ],
)
def test_a_token_with_the_prefix_of_its_service_is_masked_without_being_known(token: str) -> None:
    assert SecretMask()(f"using {token} now") == f"using {MASKED} now"


@pytest.mark.parametrize(
    "text",
    [
        "step 12 of 340: loss 3.1, 12,345 tokens/s, tokens=1048576, tokens_per_s=3620.5",
        "tokenizer: runs/a/tokenizer, token: 12345678",
        "weights sha256 4ea969bda538970511d43c6def8c263db9d2245ee158f2110164d14f10ae11fb",
        "connects to tcp://127.0.0.1:29500/ and http://host:80/path",
        "key: value of a table; the keyboard; ssh://git@host/repository",
        "basic training of the monkey",
    ],
)
def test_what_is_no_credential_stays(text: str) -> None:
    assert SecretMask()(text) == text


def test_the_values_of_secret_variables_are_masked_everywhere() -> None:
    mask = SecretMask.of_environment(
        {
            "MY_SERVICE_TOKEN": SECRET,
            "DB_PASSWORD": "correct horse",
            "HOME": "/root",
            "KEY_FILE_TOKEN": "/run/key",
            "API_KEY": "true",
            "GIT_AUTHOR_NAME": "Ada Lovelace",
            "HTTP_AUTHORIZATION": "a basic word",
        }
    )
    assert mask(f"it said {SECRET}!") == f"it said {MASKED}!"
    assert mask(urllib.parse.quote(SECRET, safe="")) == MASKED
    assert mask("a correct horse") == f"a {MASKED}"
    assert mask("a basic word by Ada Lovelace") == f"{MASKED} by Ada Lovelace"
    assert mask("/run/key is true in /root") == "/run/key is true in /root"


@given(
    st.text(
        alphabet=st.characters(exclude_characters="*", exclude_categories=["Cs"]), min_size=8, max_size=40
    ),
    st.text(max_size=60),
    st.text(max_size=60),
)
def test_a_known_secret_passes_nowhere(secret: str, before: str, after: str) -> None:
    mask = SecretMask([secret])
    if mask(secret) == MASKED:  # else it is a common word or a number
        assert secret not in mask(before + secret + after)


@pytest.mark.parametrize(
    "text",
    [
        "a" * 32_768,
        "://" * 10_000,
        "token" * 6_000,
        "secret=" * 4_000,
        "key" + " " * 30_000,
        "-----BEGIN " * 3_000,
    ],
)
def test_no_text_makes_a_pattern_backtrack(text: str) -> None:
    SecretMask()(text)  # with a pattern that backtracks it would not end before the time limit of every test
