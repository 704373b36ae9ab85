"""Instructions in any language come through; what acts on a terminal or hides does not."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from uirl_jax.untrusted import json as untrusted_json
from uirl_jax.untrusted.text import readable

LANGUAGE = {
    "french": "Ouvrez\u00a0: « Fichier »",
    "persian": "دکمه‌ی ذخیره را می‌خواهم",  # with U+200C
    "hindi": "क्\u200dष दबाएँ",
    "hebrew with marks": "לחץ \u200fOK\u200e עכשיו",
    "thai": "คลิกปุ่มสีแดง",
    "emoji": "Click 👩\u200d💻 then 👍🏽 and ❤\ufe0f",
    "flag of a region": "\U0001f3f4\U000e0067\U000e0062\U000e0065\U000e006e\U000e0067\U000e007f",
    "table": "name\tage\nAda\t36",
    "soft hyphen": "Donau\u00addampf",
    "chinese": "请单击\u3000“保存”。",
}


@pytest.mark.parametrize("text", LANGUAGE.values(), ids=LANGUAGE)
def test_language_is_unchanged(text):
    assert readable(text) == text


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a\x1b[31mb", "a[31mb"),
        ("a\x1b]0;title\x07b", "a]0;titleb"),
        ("a\r\nb\rc\u2028d", "a\nb\nc\nd"),
        ("safe\u202etxt.exe", "safetxt.exe"),
        ("a\u2066b\u2069", "ab"),
        ("visible\U000e0069\U000e0067\U000e006e", "visible"),  # hidden letters
        ("a\x00b\x7f\x9b", "ab"),
        ("a\ud800b", "ab"),
        ("a\ue000b", "ab"),
    ],
)
def test_what_acts_is_removed(text, expected):
    assert readable(text) == expected


@given(st.text())
def test_readable_twice_is_readable_once(text):
    once = readable(text)
    assert readable(once) == once
    assert "\x1b" not in once and "\r" not in once
    once.encode()


def test_json_of_many_small_values_is_refused_before_it_is_parsed(monkeypatch):
    # Of a byte or two each becomes an object of 60.
    with pytest.raises(ValueError, match="holds up to 6000001 values, at most 3000000 are read"):
        untrusted_json.parse(b'{"a":[' + b"{}," * 2_999_999 + b"{}]}")
    monkeypatch.setattr(untrusted_json, "MAX_VALUES", 4)
    assert untrusted_json.parse(b'{"a":[1,2,3]}') == {"a": [1, 2, 3]}
    with pytest.raises(ValueError, match="up to 5 values"):
        untrusted_json.parse(b'{"a":[1,2,3,4]}')
