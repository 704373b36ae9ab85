"""Whatever a caller sends, the bundled server answers: soon, never with a 500, and nothing happens
outside of the sessions that the call names. The hermetic desktop; `test_browser_fuzz` has browsers.
"""

import json
import socket
from urllib.parse import quote

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schemathesis import checks

from tests.chromium import REASON
from tests.running_server import BOUND_S, running_server
from uirl_jax.verifiers import wire
from uirl_jax.verifiers.server import calls

TEXT_TASK, SHEET = "desktop/enter_text", "desktop/data_entry"
FUZZ = settings(
    derandomize=True,
    database=None,
    deadline=None,
    max_examples=60,
    suppress_health_check=list(HealthCheck),
)
RIGHT, WRONG = schemathesis.GenerationMode
# A schema cannot say that a click lies on the screen: what it lets through may still be a 422.
CHECKS = [
    checks.not_a_server_error,
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_schema_conformance,
    checks.response_headers_conformance,
    checks.negative_data_rejection,
    checks.unsupported_method,
]


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with running_server(tmp_path_factory.mktemp("server")) as running:
        yield running


@pytest.fixture
def bystander(server):
    """A session that no call names; the server is whole and the session untouched afterwards."""
    session_id = server.create(SHEET)
    before = server.seen_of(session_id)
    yield session_id
    assert server.seen_of(session_id) == before
    server.check_whole()
    server.delete_all_but("")


# ---------------------------------------------------------------------------- by its own page


def operations(server, mode):
    """Those of the page that can be called right, or wrong: that takes a parameter."""
    schema = schemathesis.openapi.from_url(f"{server.base}{calls.PAGE_PATH}")
    found = [result.ok() for result in schema.get_all_operations()]
    return [one for one in found if mode is RIGHT or len(one.query) or len(one.body)]


def fuzz_operation(server, operation, mode, session_id):
    fixed = {"id": session_id} if "{id}" in operation.path and session_id else None

    @settings(FUZZ, max_examples=15)
    @given(operation.as_strategy(generation_mode=mode, path_parameters=fixed))
    def fuzz(case):
        response = case.call(timeout=BOUND_S, session=server.http)
        case.validate_response(response, checks=CHECKS)
        if operation.path == "/session" and response.status_code == 200:
            for opened in response.json()["session_ids"]:
                server.call("DELETE", f"/session/{opened}")

    fuzz()


@pytest.mark.parametrize("mode", [RIGHT, WRONG])
def test_every_call_of_the_page_keeps_to_it(server, bystander, mode):
    for operation in operations(server, mode):
        fuzz_operation(server, operation, mode, server.create(TEXT_TASK))
        server.delete_all_but(bystander)


def test_every_call_of_the_page_keeps_to_it_with_sessions_that_are_not_there(server, bystander):
    for operation in operations(server, RIGHT):
        if "{id}" in operation.path:
            fuzz_operation(server, operation, RIGHT, None)


@pytest.mark.parametrize("mode", [RIGHT, WRONG])
def test_every_call_of_a_single_session_keeps_to_its_page(tmp_path, mode):
    single = f"TaskSpec({SHEET!r}, 1, 'rows=2')"
    with running_server(tmp_path, single) as server:
        for operation in operations(server, mode):
            fuzz_operation(server, operation, mode, None)
        server.check_whole()


def test_page_names_what_every_handler_takes(server):
    """A handler says itself which parameters it knows, when it is given one that it does not."""
    for operation in operations(server, RIGHT):
        for session_id in (server.create(TEXT_TASK), server.create(SHEET)):
            path = operation.path.replace("{id}", session_id)
            answer = server.call(operation.method, path, params={"nobody": "1"})
            if operation.body:
                answer = server.call(operation.method, path, json={"nobody": 1})
            assert answer.status_code == 422, operation.label
            known = answer.json()["detail"].partition("known: ")[2]
            named = {parameter.name for parameter in operation.query}
            if operation.body:
                (body,) = operation.body
                named = set(body.definition["schema"]["properties"])
            assert set(known.split(", ")) - {"none"} == named, operation.label
        server.delete_all_but("")


# ---------------------------------------------------------------------------- beside the page

HOSTILE_TEXTS = (
    *("", "..", "../../etc/passwd", "..%2f..%2fetc%2fpasswd", "/etc/passwd", "\\..\\x", "~", "."),
    *("own/../x", "own/", "miniwob/../click-test", "miniwob/", "simple_data_entry/..", "desktop/"),
    *("rows=1,rows=2", "rows=", "=", ",", "rows=9" * 500, "a=b=c", "rows=\u0663", "popup=-0"),
    *("\x00", "a\r\nX-Injected: 1", "\u202egnp", "\ufeff", "\U0001f600" * 40, "e\u0301", "${HOME}"),
    *("`id`", "$(id)", "'; DROP TABLE", "<script>", "{{7*7}}", "%s%n", "nan", "-0", "1e400"),
    *("9" * 400, "-1", "0x10", "1_0", "\u0661", "NaN", "Infinity", "null", "true"),
)
TEXTS = st.sampled_from(HOSTILE_TEXTS) | st.text(max_size=60)
NUMBERS = (
    st.integers()
    | st.floats()
    | st.sampled_from([2**31, 2**63, 2**64, -(2**63) - 1, 10**19, 1e308, 5e-324, -0.0])
)
JSON = st.recursive(
    st.none() | st.booleans() | NUMBERS | TEXTS | st.just("\ud800"),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=4),
    max_leaves=12,
)
# Fields of an act, most of them such as it takes.
FIELDS = st.fixed_dictionaries(
    {"action_type": st.sampled_from(wire.ACTION_TYPES) | JSON},
    optional={
        **{axis: st.integers(-1, 230) | JSON for axis in ("x", "y", "x2", "y2", "amount")},
        **{name: st.floats(0, 2) | JSON for name in ("seconds", "delay")},
        **{name: TEXTS | JSON for name in ("text", "keys", "direction", "format", "request_id")},
        "surplus": JSON,
    },
)


def fuzzed(strategy, check, examples=FUZZ.max_examples):
    """Runs `check` on values of a strategy."""

    @settings(FUZZ, max_examples=examples)
    @given(strategy)
    def run(value):
        check(value)

    run()


def test_act_by_json_takes_its_fields_or_says_which_is_wrong(server, bystander):
    path = f"/session/{server.create(TEXT_TASK)}/act"

    def check(fields):
        body = json.dumps(fields)  # NaN, Infinity and \ud800 as Python writes them
        answer = server.call("POST", path, data=body)
        assert answer.status_code in (200, 413, 422), answer.text
        if answer.status_code == 200:
            assert answer.headers["Content-Type"] in wire.IMAGE_FORMATS.values()
        else:
            assert answer.json()["detail"].isprintable()

    fuzzed(FIELDS, check, 150)
    fuzzed(JSON, check)


def test_act_by_query_takes_its_fields_or_says_which_is_wrong(server, bystander):
    session = server.create(SHEET)
    flat = FIELDS.map(lambda fields: [(k, str(v)) for k, v in fields.items() if v is not None])
    doubled = flat | flat.map(lambda pairs: pairs + pairs[:1])

    def check(pairs):
        pairs = [(k, v.encode("utf-8", "surrogatepass")) for k, v in pairs]
        for path in (f"/session/{session}/act", f"/proxy/{session}/act"):
            answer = server.call("GET", path, params=pairs)
            assert answer.status_code in (200, 422), answer.text
            if len(dict(pairs)) < len(pairs):
                assert answer.status_code == 422

    fuzzed(doubled, check)


def test_body_of_any_bytes_and_any_content_type_is_refused(server, bystander):
    path = f"/session/{server.create(TEXT_TASK)}/act"
    deep = st.integers(1, 30_000).map(lambda depth: b'{"text":' * depth)
    bodies = st.binary(max_size=200) | deep | st.integers(17, 6000).map(lambda n: b"[" * n)
    kinds = ["application/json", "text/plain", "multipart/form-data; boundary=x", "x", ";;=", "a/b"]
    codings = [None, "gzip", "deflate", "br", "identity", "x", "gzip, gzip"]

    def check(drawn):
        body, kind, coding = drawn
        headers = {"Content-Type": kind} | ({"Content-Encoding": coding} if coding else {})
        answer = server.call("POST", path, data=body, headers=headers)
        assert answer.status_code in (400, 413, 415, 422), (answer.status_code, answer.text)

    fuzzed(st.tuples(bodies, st.sampled_from(kinds), st.sampled_from(codings)), check, 100)


def test_session_of_any_type_variant_seed_and_n_is_refused(server, bystander):
    queries = st.fixed_dictionaries(
        {"type": st.sampled_from([TEXT_TASK, SHEET, "simple_data_entry"]) | TEXTS, "variant": TEXTS}
    ) | st.fixed_dictionaries(
        {"type": st.just(TEXT_TASK)},
        optional={"n": NUMBERS | TEXTS, "seed": NUMBERS | TEXTS, "surplus": TEXTS},
    )

    def check(query):
        answer = server.call("POST", "/session", params=query)
        missing = query["type"] == "simple_data_entry" and REASON
        expected = (200, 422, 429, *([503] if missing else []))  # 503: what to install
        assert answer.status_code in expected, answer.text
        if answer.status_code == 200:
            assert query["type"] == TEXT_TASK or query["variant"].strip(", ") == ""
            server.delete_all_but(bystander)
        else:
            assert answer.json()["detail"].isprintable()

    fuzzed(queries, check, 100)


def test_session_of_any_id_is_not_there(server, bystander):
    ids = st.sampled_from(HOSTILE_TEXTS) | st.text(min_size=1, max_size=30)

    def check(session_id):
        quoted = quote(session_id.encode("utf-8", "replace"), safe="./%")
        for method, path in [
            ("GET", "/session/{}"),
            ("GET", "/session/{}/screenshot"),
            ("DELETE", "/session/{}"),
            ("GET", "/proxy/{}/progress"),
            ("GET", f"/proxy/{bystander}/{{}}"),
        ]:
            got, _ = spoken(server, method, path.format(quoted))
            assert got in (400, 404) or (got, path) == (200, f"/proxy/{bystander}/{{}}")

    fuzzed(ids, check, 40)


def spoken(server, method, target, headers=(), body=b""):
    """(status, answer) of a request written as it is; status 0 where the server closes."""
    host, port = server.base.removeprefix("http://").split(":")
    lines = [f"{method} {target} HTTP/1.1", "Host: localhost", "Connection: close", *headers]
    with socket.create_connection((host, int(port)), timeout=BOUND_S) as connection:
        connection.sendall("\r\n".join([*lines, "", ""]).encode("utf-8", "surrogateescape") + body)
        pieces = []
        try:
            while piece := connection.recv(65536):
                pieces.append(piece)
        except ConnectionResetError:  # it has closed while we were still writing
            pass
    answer = b"".join(pieces)
    return int(answer.split(b" ", 2)[1]) if answer else 0, answer


@pytest.mark.parametrize(
    "method",
    ["HEAD", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "CONNECT", "PROPFIND", "FOO", "get", ""],
)
def test_method_that_a_call_does_not_have_is_refused(server, bystander, method):
    for path in ("/", "/status", "/session", f"/session/{bystander}/act", "/openapi.json"):
        status, answer = spoken(server, method, path)
        assert status in (400, 403, 404, 405), (method, path, answer)
        assert status != 405 or b"\r\nAllow: " in answer


def test_request_of_any_shape_is_answered_and_leaves_nothing(server, bystander):
    word = st.text(st.characters(min_codepoint=1, max_codepoint=255), max_size=30)
    targets = st.sampled_from(
        ["*", "//evil/", "http://evil/", "http://[::1/", "/#x", "/%", "/%ff", "/?%ff=%ed%a0%80"]
    ) | word.map(lambda text: "/" + text)
    headers = st.sampled_from(
        [
            *("Content-Length: -1", "Content-Length: 99999999999999999999", "Host: x"),
            *("Transfer-Encoding: chunked", "Transfer-Encoding: x", "Expect: x", "Upgrade: x"),
            *("Expect: 100-continue", "X: " + "a" * 9000, "Authorization: \udcff", "Origin: null"),
            *("Content-Encoding: gzip", "Cookie: " + "a=b;" * 500, "Range: bytes=0-", ": x", "x"),
            *("Content-Type: multipart/form-data", "If-Match: *", "X-HTTP-Method-Override: DELETE"),
        ]
    ) | st.tuples(word, word).map(": ".join)
    bodies = st.binary(max_size=40) | st.sampled_from([b"0\r\n\r\n", b"5\r\nhello", b"zz\r\n"])

    def check(drawn):
        target, lines, body = drawn
        lines = [line for line in lines if not line.lower().startswith("content-length: 9")]
        lines.append(f"Content-Length: {len(body)}")
        status, answer = spoken(server, "GET", target, lines, body)
        assert status < 500, answer

    fuzzed(st.tuples(targets, st.lists(headers, max_size=4), bodies), check, 120)
