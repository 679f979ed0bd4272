"""Values that `finetune debug` removes, and those that it leaves."""

from __future__ import annotations

from base64 import b64encode
from typing import Any

import pytest

from finetune_operator.spec.problems import HIDDEN, is_secret_name
from finetune_operator.spec.redaction import Redactor

SECRET_NAMES = (
    "HF_TOKEN",
    "token",
    "WANDB_API_KEY",
    "awsSecretAccessKey",
    "AWS_SECRET_ACCESS_KEY",
    "db-password",
    "DB_PASS",
    "passcode",
    "private_key_id",
    "storageAccountKey",
    "GOOGLE_APPLICATION_CREDENTIALS",
)
OTHER_NAMES = (
    "secretName",
    "secretKeyRef",
    "key",
    "HF_TOKEN_PATH",
    "max_tokens",
    "tokenizer",
    "name",
    "compass",
    "pass",
    "",
)


@pytest.mark.parametrize("name", SECRET_NAMES)
def test_name_of_a_secret_is_recognized(name: str) -> None:
    assert is_secret_name(name)


@pytest.mark.parametrize("name", OTHER_NAMES)
def test_names_that_refer_to_secrets_or_count_tokens_are_not_secret(name: str) -> None:
    assert not is_secret_name(name)


TEXTS: dict[str, tuple[str, str]] = {
    "a token of the Hub": ("401 for hf_AbCdEfGh1234 at once", f"401 for {HIDDEN} at once"),
    "an access key of a cloud": ("key AKIAABCDEFGHIJKLMNOP.", f"key {HIDDEN}."),
    "the user part of a URL": (
        "cloning https://reader:pa55@git.example.com/a",
        f"cloning https://{HIDDEN}@git.example.com/a",
    ),
    "a short name of a password": ("DB_PASS=hunter2 n=3", f"DB_PASS={HIDDEN} n=3"),
    "a password of several words": (
        "password: correct horse battery staple\nnext",
        f"password: {HIDDEN}\nnext",
    ),
    "a token of Databricks": (f"with dapi{'0123456789abcdef' * 2}.", f"with {HIDDEN}."),
    "a token of npm": (f"npm_{'aB3' * 12} is set", f"{HIDDEN} is set"),
    "a key of Stripe": (f"sk_live_{'aB3' * 8}, ok", f"{HIDDEN}, ok"),
    "a key as a program says it": (f"wandb: api key {'0a' * 20} found", f"wandb: api key {HIDDEN} found"),
    "a private key in base64": (
        f"key {b64encode(b'-----BEGIN RSA PRIVATE KEY-----' + bytes(30)).decode()} end",
        f"key {HIDDEN} end",
    ),
    "a certificate in base64 stays": (
        f"ca {b64encode(b'-----BEGIN CERTIFICATE-----' + bytes(30)).decode()} end",
        f"ca {b64encode(b'-----BEGIN CERTIFICATE-----' + bytes(30)).decode()} end",
    ),
    "a pass of a model stays": ("backward pass: 12 ms", "backward pass: 12 ms"),
    "a header": ("Authorization: Bearer abcdef123456", f"Authorization: Bearer {HIDDEN}"),
    "a setting in a line of a log": ("login user=me password=hunter22, ok", f"login user=me password={HIDDEN}, ok"),
    "a setting in JSON": ('{"api_key": "s3cr3t", "n": 1}', f'{{"api_key": {HIDDEN}, "n": 1}}'),
    "a private key": ("x -----BEGIN RSA PRIVATE KEY-----\nMII\n-----END RSA PRIVATE KEY----- y", f"x {HIDDEN} y"),
    "the end of a private key": ("QmFzZTY0\n-----END OPENSSH PRIVATE KEY-----\ny", f"{HIDDEN}\ny"),
    "the beginning of a private key": ("x -----BEGIN PRIVATE KEY-----\nMII", f"x {HIDDEN}"),
    "variables as Python prints them": (
        "environ({'HOME': '/', 'AWS_SECRET_ACCESS_KEY': 'ab/cd+e', 'A_TOKEN': \"it's\"})",
        f"environ({{'HOME': '/', 'AWS_SECRET_ACCESS_KEY': {HIDDEN}, 'A_TOKEN': {HIDDEN}}})",
    ),
    "variables in bytes": ("{b'API_KEY': b'abcdef', b'n': 1}", f"{{b'API_KEY': {HIDDEN}, b'n': 1}}"),
    "a variable that is set": ("os.environ['DB_PASSWORD'] = 'two words'", f"os.environ['DB_PASSWORD'] = {HIDDEN}"),
    "a quote in a quoted text": ('password = "abc\\"def ghi" end', f"password = {HIDDEN} end"),
    "a quoted text without its end": ('password = "abc def', f"password = {HIDDEN}"),
    "JSON in JSON": ('{"body": "{\\"token\\": \\"abc\\"}"}', f'{{"body": "{{\\"token\\": {HIDDEN}}}"}}'),
    "the key of a storage account": ("AccountName=x;AccountKey=abc==;A=b", f"AccountName=x;AccountKey={HIDDEN};A=b"),
    "a header with a key": ("X-Api-Key: abc123", f"X-Api-Key: {HIDDEN}"),
    "an option": ("run --hub-token abc123 --token-file x --n 3", f"run --hub-token {HIDDEN} --token-file x --n 3"),
    "a signed address": (
        "https://a.example/x?sv=1&sig=ab%3D&se=2 https://b.example/y?X-Amz-Signature=dead",
        f"https://a.example/x?sv=1&sig={HIDDEN}&se=2 https://b.example/y?X-Amz-Signature={HIDDEN}",
    ),
    "cookies": ("> Cookie: session=abc; id=7\n> Accept: *", f"> Cookie: {HIDDEN}\n> Accept: *"),
    "a password with an at sign": ("https://me:p@ss@git.example.com/a", f"https://{HIDDEN}@git.example.com/a"),
    "ordinary words": (
        "tokens: 5 pad_token_id: 0 tokenizer='x' the signature: f(x) a secret was not found",
        "tokens: 5 pad_token_id: 0 tokenizer='x' the signature: f(x) a secret was not found",
    ),
    "ordinary figures": (
        "step 40/100 loss 0.31 tokens=5120 padding 4 %",
        "step 40/100 loss 0.31 tokens=5120 padding 4 %",
    ),
    "an address": ("fetched https://example.com/a@main#part", "fetched https://example.com/a@main#part"),
}


@pytest.mark.parametrize("case", TEXTS)
def test_text_that_looks_like_a_secret_is_redacted(case: str) -> None:
    text, expected = TEXTS[case]
    assert Redactor().text(text) == expected


HOSTILE = (
    "a-",
    "token-",
    "password ",
    "bearer  ",
    "-----BEGIN A",
    "://a:",
    "eyJ-",
    "a_token = ",
    "token='",
    'token="',
    "token='\\",
    "--token",
    "--a-token ",
    "&sig",
    "cookie: ",
    "-----END ",
    "b'token'",
)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("part", HOSTILE)
def test_the_time_for_a_log_grows_linearly_with_its_length(part: str) -> None:
    Redactor().text(part * (262_144 // len(part)))


@pytest.mark.parametrize("name", ["--hub-token", "HF_TOKEN", "token-token"])
def test_the_name_of_a_setting_stays_whole(name: str) -> None:
    assert Redactor().text(f"run {name}=abcdef") == f"run {name}={HIDDEN}"


def test_value_of_a_secret_variable_is_redacted_everywhere() -> None:
    pod: dict[str, Any] = {
        "env": [
            {"name": "MY_TOKEN", "value": "canary-7731"},
            {"name": "HF_HOME", "value": "/cache"},
            {"name": "OTHER_TOKEN", "valueFrom": {"secretKeyRef": {"name": "hub", "key": "token"}}},
        ]
    }
    redactor = Redactor()
    redactor.learn(pod)
    assert redactor.value(pod) == {
        "env": [
            {"name": "MY_TOKEN", "value": HIDDEN},
            {"name": "HF_HOME", "value": "/cache"},
            {"name": "OTHER_TOKEN", "valueFrom": {"secretKeyRef": {"name": "hub", "key": "token"}}},
        ]
    }
    assert redactor.text("the program says canary-7731 aloud") == f"the program says {HIDDEN} aloud"
