"""The XML API as obstore's clients use it, Google's and S3's: /bucket/name.

S3 signs its requests with AWS4-HMAC-SHA256; that is how they are told apart. Google's writes take
x-goog-if-generation-match, S3's If-Match and If-None-Match.
"""

import urllib.parse
from xml.etree import ElementTree
from xml.sax.saxutils import escape

from tools.bucket_emulator.answers import (
    Answer,
    Call,
    Operation,
    content,
    generation_of,
    http_date,
    rfc3339,
    whole_number,
)
from tools.bucket_emulator.objects import MAX_PAGE, Buckets, Condition, Refused, Stored, Upload

_HEAD = '<?xml version="1.0" encoding="UTF-8"?>'


def operation(call: Call) -> Operation:
    bucket, name = _names(call)
    del bucket
    conditional = any(
        key in call.headers for key in ("x-goog-if-generation-match", "If-Match", "If-None-Match")
    )
    if call.method == "GET" and not name:
        return Operation("list", "A")
    if call.method in ("GET", "HEAD"):
        return Operation("get" if call.method == "GET" else "head", "B", conditional)
    if call.method == "DELETE":
        return Operation("delete", "free", conditional)
    if call.method == "POST" and "delete" in call.query:
        return Operation("delete", "free")
    if "uploads" in call.query:
        return Operation("upload_begin", "A", conditional)
    if "uploadId" in call.query:
        name = "upload_part" if call.method == "PUT" else "upload_end"
        return Operation(name, "A", conditional)
    copies = {"x-goog-copy-source", "x-amz-copy-source"} & {key.lower() for key in call.headers}
    return Operation("copy" if copies else "put", "A", conditional)


def answer(buckets: Buckets, call: Call) -> Answer:
    bucket, name = _names(call)
    kind = operation(call).name
    if kind == "list":
        return _list(buckets, bucket, call)
    if kind in ("get", "head"):
        found = buckets.read(bucket, name, _condition(call))
        return content(found, call.headers, _describe(found))
    if kind == "delete":
        if call.method == "POST":
            return _delete_many(buckets, bucket, call)
        buckets.delete(bucket, name, _condition(call))
        return Answer(204)
    if kind == "copy":
        return _copy(buckets, bucket, name, call)
    if kind == "put":
        if not name:
            raise Refused(400, "InvalidArgument", "no object name")
        written = buckets.write(
            bucket, name, call.body, _write_condition(call), _content_type(call), _metadata(call)
        )
        return Answer(200, b"", _describe(written))
    return _upload(buckets, bucket, name, call, kind)


def refusal(error: Refused) -> Answer:
    text = f"{_HEAD}<Error><Code>{error.code}</Code><Message>{escape(str(error))}</Message></Error>"
    body = b"" if error.status == 304 else text.encode()
    return Answer(error.status, body, {"Content-Type": "application/xml"})


def _names(call: Call) -> tuple[str, str]:
    bucket, _, name = call.path.removeprefix("/").partition("/")
    return urllib.parse.unquote(bucket), urllib.parse.unquote(name)


def _is_s3(call: Call) -> bool:
    return call.headers.get("Authorization", "").startswith("AWS4-HMAC-SHA256")


def _condition(call: Call) -> Condition:
    headers = call.headers
    return Condition(
        generation=generation_of(
            headers.get("x-goog-if-generation-match"), "x-goog-if-generation-match"
        ),
        etag=headers.get("If-Match"),
        not_etag=headers.get("If-None-Match"),
    )


def _write_condition(call: Call) -> Condition:
    condition = _condition(call)
    if not _is_s3(call) and (condition.etag or condition.not_etag):
        raise Refused(400, "NotImplemented", "writes take x-goog-if-generation-match")
    if _is_s3(call) and condition.generation is not None:
        raise Refused(400, "NotImplemented", "writes take If-Match and If-None-Match")
    return condition


def _content_type(call: Call) -> str:
    return call.headers.get("Content-Type", "application/octet-stream")


def _metadata(call: Call) -> dict[str, str]:
    return {
        key.lower()[len(prefix) :]: value
        for key, value in call.headers.items()
        for prefix in ("x-goog-meta-", "x-amz-meta-")
        if key.lower().startswith(prefix)
    }


def _describe(found: Stored) -> dict[str, str]:
    return {
        "ETag": found.etag,
        "Last-Modified": http_date(found.written_unix_s),
        "x-goog-generation": str(found.generation),
        "x-goog-metageneration": "1",
        "x-goog-hash": f"crc32c={found.crc32c_base64}",
        "Content-Type": found.content_type,
        **{f"x-goog-meta-{key}": value for key, value in found.metadata.items()},
        **{f"x-amz-meta-{key}": value for key, value in found.metadata.items()},
    }


def _list(buckets: Buckets, bucket: str, call: Call) -> Answer:
    query = call.query
    if query.get("list-type") != "2":
        raise Refused(400, "InvalidArgument", "this emulator lists with list-type=2 only")
    limit = whole_number(query.get("max-keys", str(MAX_PAGE)), "max-keys")
    page = buckets.page(
        bucket,
        prefix=query.get("prefix", ""),
        delimiter=query.get("delimiter", ""),
        after=query.get("continuation-token") or query.get("start-after", ""),
        limit=limit,
    )
    parts = [f"{_HEAD}<ListBucketResult><Name>{escape(bucket)}</Name>"]
    parts.append(f"<KeyCount>{len(page.found) + len(page.prefixes)}</KeyCount>")
    parts.append(f"<MaxKeys>{limit}</MaxKeys>")
    parts.append(f"<IsTruncated>{str(bool(page.next_token)).lower()}</IsTruncated>")
    if page.next_token:
        parts.append(f"<NextContinuationToken>{escape(page.next_token)}</NextContinuationToken>")
    for found in page.found:
        parts.append(
            f"<Contents><Key>{escape(found.name)}</Key><Generation>{found.generation}</Generation>"
            f"<LastModified>{rfc3339(found.written_unix_s)}</LastModified>"
            f"<ETag>{escape(found.etag)}</ETag><Size>{len(found.content)}</Size></Contents>"
        )
    for prefix in page.prefixes:
        parts.append(f"<CommonPrefixes><Prefix>{escape(prefix)}</Prefix></CommonPrefixes>")
    parts.append("</ListBucketResult>")
    return Answer(200, "".join(parts).encode(), {"Content-Type": "application/xml"})


def _copy(buckets: Buckets, bucket: str, name: str, call: Call) -> Answer:
    source = call.headers.get("x-goog-copy-source") or call.headers["x-amz-copy-source"]
    from_bucket, _, from_name = urllib.parse.unquote(source).removeprefix("/").partition("/")
    found = buckets.read(from_bucket, from_name, Condition())
    copied = buckets.write(bucket, name, found.content, _condition(call), found.content_type)
    text = (
        f"{_HEAD}<CopyObjectResult><ETag>{escape(copied.etag)}</ETag>"
        f"<LastModified>{rfc3339(copied.written_unix_s)}</LastModified></CopyObjectResult>"
    )
    return Answer(200, text.encode(), {**_describe(copied), "Content-Type": "application/xml"})


def _delete_many(buckets: Buckets, bucket: str, call: Call) -> Answer:
    """S3's deletion of up to 1,000 names; names that do not exist count as deleted."""
    names = [
        node.text or "" for node in ElementTree.fromstring(call.body).iter() if _tag(node) == "Key"
    ]
    if len(names) > 1000:
        raise Refused(400, "MalformedXML", "more than 1,000 names")
    parts = [f"{_HEAD}<DeleteResult>"]
    existing = buckets.contents(bucket)
    for name in names:
        if name in existing:
            buckets.delete(bucket, name, Condition())
        parts.append(f"<Deleted><Key>{escape(name)}</Key></Deleted>")
    body = "".join([*parts, "</DeleteResult>"]).encode()
    return Answer(200, body, {"Content-Type": "application/xml"})


def _upload(buckets: Buckets, bucket: str, name: str, call: Call, kind: str) -> Answer:
    xml = {"Content-Type": "application/xml"}
    if kind == "upload_begin":
        upload = Upload(bucket, name, _write_condition(call), _content_type(call), _metadata(call))
        key = buckets.begin(upload)
        text = (
            f"{_HEAD}<InitiateMultipartUploadResult><Bucket>{escape(bucket)}</Bucket>"
            f"<Key>{escape(name)}</Key><UploadId>{key}</UploadId></InitiateMultipartUploadResult>"
        )
        return Answer(200, text.encode(), xml)
    key = call.query["uploadId"]
    upload = buckets.upload(key)
    if kind == "upload_part":
        number = whole_number(call.query.get("partNumber", ""), "partNumber")
        if not 1 <= number <= 10_000:
            raise Refused(400, "InvalidArgument", "partNumber is 1 to 10,000")
        upload.parts[number] = call.body
        return Answer(200, b"", {"ETag": f'"{number}-{len(call.body)}"'})
    numbers = [
        int(node.text or "0")
        for node in ElementTree.fromstring(call.body).iter()
        if _tag(node) == "PartNumber"
    ]
    if numbers != sorted(upload.parts) or not numbers:
        raise Refused(
            400, "InvalidPart", f"named {numbers[:5]}, received {sorted(upload.parts)[:5]}"
        )
    if any(len(upload.parts[number]) < 5 << 20 for number in numbers[:-1]):
        raise Refused(400, "EntityTooSmall", "all parts but the last have at least 5 MiB")
    whole = b"".join(upload.parts[number] for number in numbers)
    condition = _write_condition(call) or upload.condition
    written = buckets.write(bucket, name, whole, condition, upload.content_type, upload.metadata)
    del buckets.uploads[key]
    text = (
        f"{_HEAD}<CompleteMultipartUploadResult><Bucket>{escape(bucket)}</Bucket>"
        f"<Key>{escape(name)}</Key><ETag>{escape(written.etag)}</ETag>"
        "</CompleteMultipartUploadResult>"
    )
    return Answer(200, text.encode(), {**_describe(written), **xml})


def _tag(node: ElementTree.Element) -> str:
    return node.tag.rpartition("}")[2]
