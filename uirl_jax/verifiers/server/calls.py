"""The calls of the bundled server as data: how their parameters are read, and the OpenAPI page.

A handler gets only the parameters that its call declares (`route`), and `/openapi.json` is written
from the same declarations (`page`), so that the two cannot differ. What a call does is in
`sessions` and `field_calls`, the fields of an action are in `wire`.
"""

import asyncio
import dataclasses
import urllib.parse
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from aiohttp import web

from uirl_jax import actions
from uirl_jax.untrusted import json as untrusted_json
from uirl_jax.verifiers import wire
from uirl_jax.verifiers.server.open_session import ServerLimits, refusal

Schema = Mapping[str, Any]
Handler = Callable[[web.Request, dict[str, str]], Awaitable[web.Response]]

PAGE_PATH = "/openapi.json"
_BODY_S = 10.0  # for the whole body of a call: 64 KB

_JSON, _TEXT = "application/json", "text/plain"
_ERROR: Schema = {
    "type": "object",
    "properties": {
        "detail": {"type": "string"},
        "capacity": {"type": "integer", "minimum": 1},  # of a full server: sessions that fit
    },
    "required": ["detail"],
    "additionalProperties": False,
}
_STATUSES = {
    400: "no request that can be read",
    401: "the bearer token is missing or wrong",
    403: "another host in the Host header, or a browser",
    404: "no such session",
    408: f"the body was not there within {_BODY_S:g} s",
    413: "the body is too long",
    415: "the body is compressed",
    422: "what is wrong with the parameters; or a task's code failed, and would again",
    429: "too many sessions, or too many actions a second; nothing was done",
    500: "the browser of the session is lost, and the session has ended; or a task's code failed",
    503: "no browser can be had",
}
_EVERYWHERE = (400, 401, 403, 415, 422)
ON_SESSION = (404,)
ON_SCREEN = (404, 500)


@dataclasses.dataclass(frozen=True)
class Call:
    """One call: what it takes, and what it answers."""

    method: str
    path: str
    summary: str
    query: tuple[str, ...] = ()
    required: tuple[str, ...] = ()  # of them
    has_body: bool = False  # a JSON object with the fields of an action
    body: Schema | None = None  # of another JSON object; without required fields it may be left out
    statuses: tuple[int, ...] = ()  # beside 200 and those that every call may have
    answers: Schema | None = None  # of the JSON; None: text
    is_image: bool = False
    narrower: Mapping[str, Schema] = dataclasses.field(default_factory=dict)  # of its parameters
    plain_errors: Collection[int] = ()  # told as text


def route(call: Call, handler: Handler) -> web.RouteDef:
    """The handler is called with the request and the parameters of its query, all of them known."""

    async def handle(request: web.Request) -> web.Response:
        return await handler(request, read_query(request, call.query))

    options = {"allow_head": False} if call.method == "GET" else {}
    return web.route(call.method, call.path, handle, **options)


def read_query(request: web.Request, known: Sequence[str]) -> dict[str, str]:
    """The query as a dict.

    Raises:
      ValueError: a parameter that is not known or given twice, or bytes that are not text.
    """
    try:
        urllib.parse.unquote_to_bytes(request.rel_url.raw_query_string).decode()
    except UnicodeDecodeError as error:
        raise ValueError("the query is not UTF-8") from error
    query = request.query
    for name in query:
        shown = untrusted_json.printable(name)
        if name not in known:
            raise ValueError(f"unknown parameter {shown!r}, known: {', '.join(known) or 'none'}")
        if len(query.getall(name)) > 1:
            raise ValueError(f"{shown!r} is given twice")
    return dict(query)


async def read_body(request: web.Request) -> dict[str, Any]:
    """The JSON object that a request carries.

    Raises:
      ValueError: it carries none.
      web.HTTPException: it does not come.
    """
    try:
        async with asyncio.timeout(_BODY_S):
            body = await request.read()
    except TimeoutError:
        raise refusal(web.HTTPRequestTimeout, _STATUSES[408]) from None
    except ConnectionError as error:  # nobody will read the answer
        raise refusal(web.HTTPBadRequest, "the connection was lost") from error
    return untrusted_json.parse(body)


# ---------------------------------------------------------------------------------- the page


def page(title: str, calls: Iterable[Call], limits: ServerLimits) -> dict[str, Any]:
    """The OpenAPI document of these calls."""
    paths: dict[str, dict[str, Any]] = {}
    for call in calls:
        paths.setdefault(call.path, {})[call.method.lower()] = _operation(call, limits)
    return {
        "openapi": "3.1.0",
        "info": {"title": title, "version": "1"},
        "paths": paths,
        "components": {"securitySchemes": {"token": {"type": "http", "scheme": "bearer"}}},
        "security": [{}, {"token": []}],  # where the server was started with one
    }


def _operation(call: Call, limits: ServerLimits) -> dict[str, Any]:
    parameters = [
        {
            "name": name,
            "in": "query",
            "required": name in call.required,
            "schema": {**_schema(name, limits), **call.narrower.get(name, {})},
        }
        for name in call.query
    ]
    if "{id}" in call.path:
        schema = {"type": "string"}
        parameters.append({"name": "id", "in": "path", "required": True, "schema": schema})
    operation: dict[str, Any] = {
        "summary": call.summary,
        "parameters": parameters,
        "responses": _responses(call),
    }
    if call.body is not None:
        content = {_JSON: {"schema": call.body}}
        operation["requestBody"] = {"required": bool(call.body["required"]), "content": content}
    if call.has_body:
        operation["requestBody"] = {
            "required": True,
            "content": {_JSON: {"schema": action_schema(limits)}},
        }
    return operation


def action_schema(limits: ServerLimits, names: Collection[str] = wire.FIELD_TYPES) -> Schema:
    """Of an action's fields, or of those that are named."""
    fields = {name: _or_null(_schema(name, limits)) for name in names}
    fields["action_type"] = _schema("action_type", limits)
    return {
        "type": "object",
        "properties": fields,
        "required": ["action_type"],
        "additionalProperties": False,
    }


def _responses(call: Call) -> dict[str, Any]:
    image = {"type": "string", "contentEncoding": "binary"}
    if call.is_image:
        content = {kind: {"schema": image} for kind in wire.IMAGE_FORMATS.values()}
    elif call.answers is not None:
        content = {_JSON: {"schema": call.answers}}
    else:
        content = {_TEXT: {"schema": {"type": "string"}}}
    responses: dict[str, Any] = {"200": {"description": call.summary, "content": content}}
    for status in sorted({*_EVERYWHERE, *call.statuses}):
        told = {_JSON: {"schema": _ERROR}}
        if status == 400 or status in call.plain_errors:
            told[_TEXT] = {"schema": {"type": "string"}}
        responses[str(status)] = {"description": _STATUSES[status], "content": told}
    return responses


def _schema(name: str, limits: ServerLimits) -> dict[str, Any]:
    """Of a parameter, with the bounds that the handlers keep."""
    types = {str: "string", int: "integer", float: "number"}
    bounds: dict[str, Schema] = {
        "type": {"type": "string"},
        "variant": {"type": "string"},
        "seed": {"type": "integer", "minimum": -wire.MAX_WHOLE, "maximum": wire.MAX_WHOLE},
        "n": {"type": "integer", "minimum": 1, "maximum": limits.max_sessions, "default": 1},
        "action_type": {"enum": list(wire.ACTION_TYPES)},
        "format": {"enum": list(wire.IMAGE_FORMATS), "default": "png"},
        "direction": {"enum": list(actions.DIRECTIONS)},
        "text": {"maxLength": actions.MAX_TEXT_CHARS},
        "request_id": {"pattern": f"^({wire.SESSION_ID.pattern})?$"},
        "amount": {"minimum": 1, "maximum": actions.MAX_SCROLL_PX},
        "seconds": {"minimum": 0, "maximum": actions.MAX_SECONDS},
        "delay": {"minimum": 0, "maximum": limits.max_delay_s},
        **{axis: {"minimum": 0} for axis in ("x", "y", "x2", "y2")},
    }
    kind = wire.FIELD_TYPES.get(name)
    return {**({} if kind is None else {"type": types[kind[-1]]}), **bounds.get(name, {})}


def _or_null(schema: dict[str, Any]) -> dict[str, Any]:
    """null means that a field was not given."""
    wider = schema | {"type": [schema["type"], "null"]}
    return wider | {"enum": [*schema["enum"], None]} if "enum" in schema else wider


def whole(**properties: Schema) -> Schema:
    """An object that has all of these and no others."""
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }
