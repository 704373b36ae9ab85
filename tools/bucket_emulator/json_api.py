"""The JSON API, as gcsfs, tensorstore and google-cloud-storage use it."""

import base64
import json
import re
import urllib.parse
from typing import Any

from tools.bucket_emulator.answers import (
    Answer,
    Call,
    Operation,
    content,
    generation_of,
    rfc3339,
    whole_number,
)
from tools.bucket_emulator.objects import MAX_PAGE, Buckets, Condition, Refused, Stored, Upload

CHUNK = 256 << 10  # parts of a resumable upload are multiples of it, except the last one
PREFIXES = ("/storage/v1/", "/upload/storage/v1/", "/download/storage/v1/")
_PATH = re.compile(
    r"/(?P<service>upload/|download/)?storage/v1/b(?:/(?P<bucket>[^/]+)(?P<rest>/.*)?)?"
)
_COPY = re.compile(r"(?P<name>[^/]+)/(?:rewriteTo|copyTo)/b/(?P<bucket>[^/]+)/o/(?P<target>[^/]+)")
_CONTENT_RANGE = re.compile(r"bytes (?:(\d+)-(\d+)|\*)/(\d+|\*)")


def operation(call: Call) -> Operation:
    service, _, rest = _parts(call)
    conditional = any(key.startswith("if") and "GenerationMatch" in key for key in call.query)
    if service == "upload/":
        if "upload_id" in call.query:  # one upload is one insert, which its first request is
            return Operation("upload_part", "free")
        name = "upload_begin" if call.query.get("uploadType") == "resumable" else "put"
        return Operation(name, "A", conditional)
    if not rest.startswith("/o"):
        return Operation("bucket", "B" if call.method == "GET" else "A")
    if rest in ("/o", "/o/"):
        return Operation("list", "A")
    if call.method == "DELETE":
        return Operation("delete", "free", conditional)
    if call.method == "POST":
        return Operation("copy", "A", conditional)
    return Operation("get" if _is_media(call) else "head", "B", conditional)


def answer(buckets: Buckets, call: Call) -> Answer:
    service, bucket, rest = _parts(call)
    if service == "upload/":
        return _upload(buckets, bucket, call)
    if not rest.startswith("/o"):
        return _bucket(buckets, bucket, rest, call)
    if rest in ("/o", "/o/"):
        return _list(buckets, bucket, call)
    raw = rest.removeprefix("/o/")
    if match := _COPY.fullmatch(raw):
        found = buckets.read(bucket, urllib.parse.unquote(match["name"]), Condition())
        to_bucket, target = (urllib.parse.unquote(match[key]) for key in ("bucket", "target"))
        copied = buckets.write(
            to_bucket, target, found.content, _condition(call), found.content_type, found.metadata
        )
        if "copyTo" in raw:
            return _json(_describe(to_bucket, copied, call))
        size = str(len(found.content))
        return _json(
            {
                "kind": "storage#rewriteResponse",
                "done": True,
                "totalBytesRewritten": size,
                "objectSize": size,
                "resource": _describe(to_bucket, copied, call),
            }
        )
    name = urllib.parse.unquote(raw)
    if call.method == "DELETE":
        buckets.delete(bucket, name, _condition(call))
        return Answer(204)
    if call.method != "GET":
        raise Refused(501, "notImplemented", f"{call.method} of an object")
    found = buckets.read(bucket, name, _condition(call))
    wanted = generation_of(call.query.get("generation"), "generation")
    if wanted not in (None, found.generation):
        raise Refused(404, "notFound", f"No such object: {bucket}/{name}#{wanted}")
    if _is_media(call):
        headers = {
            "x-goog-generation": str(found.generation),
            "x-goog-hash": f"crc32c={found.crc32c_base64}",
            "ETag": found.etag,
            "Content-Type": found.content_type,
        }
        return content(found, call.headers, headers)
    return _json(_describe(bucket, found, call))


def refusal(error: Refused) -> Answer:
    if error.status == 304:
        return Answer(304)
    reason = {"code": error.status, "message": str(error)}
    reasons = [{"message": str(error), "domain": "global", "reason": error.code}]
    return _json({"error": {**reason, "errors": reasons}}, error.status)


def _parts(call: Call) -> tuple[str, str, str]:
    match = _PATH.fullmatch(call.path)
    if not match:
        raise Refused(404, "notFound", f"no such method: {call.path[:200]}")
    return match["service"] or "", urllib.parse.unquote(match["bucket"] or ""), match["rest"] or ""


def _is_media(call: Call) -> bool:
    return call.query.get("alt") == "media" or call.path.startswith("/download/")


def _condition(call: Call) -> Condition:
    query = call.query
    return Condition(
        generation=generation_of(query.get("ifGenerationMatch"), "ifGenerationMatch"),
        not_generation=generation_of(query.get("ifGenerationNotMatch"), "ifGenerationNotMatch"),
    )


def _json(body: Any, status: int = 200) -> Answer:
    return Answer(status, json.dumps(body).encode(), {"Content-Type": "application/json"})


def _describe(bucket: str, found: Stored, call: Call) -> dict[str, Any]:
    when = rfc3339(found.written_unix_s)
    path = f"b/{bucket}/o/{urllib.parse.quote(found.name, safe='')}"
    return {
        "kind": "storage#object",
        "id": f"{bucket}/{found.name}/{found.generation}",
        "selfLink": f"http://{call.host}/storage/v1/{path}",
        "mediaLink": f"http://{call.host}/download/storage/v1/{path}?alt=media",
        "name": found.name,
        "bucket": bucket,
        "generation": str(found.generation),
        "metageneration": "1",
        "contentType": found.content_type,
        "storageClass": "STANDARD",
        "size": str(len(found.content)),
        "md5Hash": base64.b64encode(found.md5).decode(),
        "crc32c": found.crc32c_base64,
        "etag": base64.b64encode(str(found.generation).encode()).decode(),
        "timeCreated": when,
        "updated": when,
        "metadata": found.metadata,
    }


def _bucket(buckets: Buckets, bucket: str, rest: str, call: Call) -> Answer:
    if call.method == "POST" and not bucket:
        bucket = str(json.loads(call.body)["name"])
        buckets.create(bucket)
    elif call.method != "GET":
        raise Refused(501, "notImplemented", f"{call.method} of a bucket")
    buckets.contents(bucket)
    if rest == "/storageLayout":
        layout = {"bucket": bucket, "location": "US", "locationType": "multi-region"}
        return _json({"kind": "storage#storageLayout", **layout})
    described = {"kind": "storage#bucket", "id": bucket, "name": bucket, "location": "US"}
    return _json({**described, "storageClass": "STANDARD", "locationType": "multi-region"})


def _list(buckets: Buckets, bucket: str, call: Call) -> Answer:
    query = call.query
    token = query.get("pageToken", "")
    try:
        after = base64.urlsafe_b64decode(token).decode()
    except ValueError:
        raise Refused(400, "invalid", f"pageToken {token[:40]!r}") from None
    page = buckets.page(
        bucket,
        prefix=query.get("prefix", ""),
        delimiter=query.get("delimiter", ""),
        after=after,
        start=query.get("startOffset", ""),
        end=query.get("endOffset", ""),
        limit=whole_number(query.get("maxResults", str(MAX_PAGE)), "maxResults"),
    )
    body: dict[str, Any] = {"kind": "storage#objects"}
    if page.found:
        body["items"] = [_describe(bucket, found, call) for found in page.found]
    if page.prefixes:
        body["prefixes"] = page.prefixes
    if page.next_token:
        body["nextPageToken"] = base64.urlsafe_b64encode(page.next_token.encode()).decode()
    return _json(body)


# ---------------------------------------------------------------------------------- uploads


def _upload(buckets: Buckets, bucket: str, call: Call) -> Answer:
    query = call.query
    if "upload_id" in query:
        return _continue(buckets, query["upload_id"], call)
    kind, name = query.get("uploadType"), query.get("name", "")
    if kind == "media":
        content_type = call.headers.get("Content-Type", "application/octet-stream")
        written = buckets.write(bucket, name, call.body, _condition(call), content_type)
        return _json(_describe(bucket, written, call))
    if kind == "multipart":
        described, body, content_type = _related(call)
        content_type = described.get("contentType", content_type)
        written = buckets.write(
            bucket,
            described.get("name", name),
            body,
            _condition(call),
            content_type,
            described.get("metadata"),
        )
        return _json(_describe(bucket, written, call))
    if kind == "resumable":
        described = json.loads(call.body or b"{}")
        content_type = call.headers.get("X-Upload-Content-Type", "application/octet-stream")
        name = described.get("name", name)
        key = buckets.begin(Upload(bucket, name, _condition(call), content_type))
        where = f"http://{call.host}{call.path}?uploadType=resumable&upload_id={key}"
        return Answer(200, b"", {"Location": where, "X-GUploader-UploadID": key})
    raise Refused(400, "invalid", f"uploadType {kind!r}, expected media, multipart or resumable")


def _continue(buckets: Buckets, key: str, call: Call) -> Answer:
    """A part of a resumable upload, the question how far it came, or its end."""
    upload = buckets.upload(key)
    if call.method == "DELETE":
        del buckets.uploads[key]
        return Answer(499)
    if upload.written is not None:  # the answer was lost: the service gives it again
        return _json(_describe(upload.bucket, upload.written, call))
    match = _CONTENT_RANGE.fullmatch(call.headers.get("Content-Range", ""))
    if match is None and "Content-Range" in call.headers:
        raise Refused(400, "invalid", "Content-Range is not valid")
    total = None
    if match is None:  # the whole content at once
        upload.received[:] = call.body
        total = len(call.body)
    else:
        total = None if match[3] == "*" else int(match[3])
        if match[1] is not None:
            start, stop = int(match[1]), int(match[2]) + 1
            if stop - start != len(call.body) or start > len(upload.received):
                raise Refused(400, "invalid", f"bytes {start}-{stop} of {len(call.body)} sent")
            if total is None and len(call.body) % CHUNK:
                raise Refused(400, "invalid", f"{len(call.body)} bytes, no multiple of {CHUNK}")
            upload.received[start:] = call.body
    if total is None or len(upload.received) < total:
        done = len(upload.received)
        return Answer(308, b"", {"Range": f"bytes=0-{done - 1}"} if done else {})
    upload.written = buckets.write(
        upload.bucket, upload.name, bytes(upload.received), upload.condition, upload.content_type
    )
    upload.received.clear()
    return _json(_describe(upload.bucket, upload.written, call))


def _related(call: Call) -> tuple[dict[str, Any], bytes, str]:
    """The JSON, the content and its type of a multipart/related body."""
    match = re.search(r'boundary="?([^";]+)"?', call.headers.get("Content-Type", ""))
    if not match:
        raise Refused(400, "invalid", "multipart without a boundary")
    parts = call.body.split(b"--" + match[1].encode())
    if len(parts) != 4:
        raise Refused(400, "invalid", f"{len(parts) - 2} parts, expected 2")
    found = []
    for part in parts[1:3]:
        head, _, body = part.lstrip(b"\r\n").replace(b"\r\n\r\n", b"\n\n", 1).partition(b"\n\n")
        body = body.removesuffix(b"\n").removesuffix(b"\r")
        found.append((head.decode(), body))
    content_type = re.search(r"(?i)content-type:\s*(\S+)", found[1][0])
    return (
        json.loads(found[0][1]),
        found[1][1],
        content_type[1] if content_type else "application/octet-stream",
    )
