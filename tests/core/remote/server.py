"""A file server over HTTP that knows ranges, ETags and as much of S3 as reading needs, and can be told to be slow, to
fail or to change."""

from __future__ import annotations

import gzip
import hashlib
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, quote, unquote, urlsplit


class Files:
    """What a server has, and what happens to who asks.

    Attributes:
        failures: statuses that the next requests for bytes get; 0 cuts the connection after a few bytes.
        status: what all requests get, where it is set.
        compresses: it sends whole files compressed to who takes that, and knows no parts of them then.
        gets: how often bytes of a path were asked for.
    """

    def __init__(self, files: dict[str, bytes]) -> None:
        self.files, self.failures, self.status = files, list[int](), 0
        self.latency, self.ranges, self.gets = 0.0, True, dict[str, int]()
        self.compresses = False


def listed(bucket: str, prefix: str, files: dict[str, bytes]) -> str:
    """What S3 answers to ListObjectsV2."""
    keys = [name.removeprefix(f"{bucket}/") for name in sorted(files) if name.startswith(f"{bucket}/{prefix}")]
    rows = "".join(
        f"<Contents><Key>{quote(key)}</Key><Size>{len(files[f'{bucket}/{key}'])}</Size>"
        f"<ETag>{tag_of(files, bucket, key)}</ETag><LastModified>2026-01-01T00:00:00.000Z</LastModified></Contents>"
        for key in keys
    )
    return (
        '<?xml version="1.0"?><ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/">'
        f"<Name>{bucket}</Name><Prefix>{prefix}</Prefix><KeyCount>{len(keys)}</KeyCount><IsTruncated>false</IsTruncated>"
        f"<EncodingType>url</EncodingType>{rows}</ListBucketResult>"
    )


def tag_of(files: dict[str, bytes], bucket: str, key: str) -> str:
    """The ETag of an object."""
    return hashlib.sha256(files[f"{bucket}/{key}"]).hexdigest()[:16]


@contextmanager
def serving(files: Files) -> Iterator[str]:
    """Serve `files`; the server's address."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, format: str, *args: object) -> None:
            pass

        def do_HEAD(self) -> None:
            self.answer(body=False)

        def do_GET(self) -> None:
            self.answer(body=True)

        def answer(self, body: bool) -> None:
            time.sleep(files.latency)
            address = urlsplit(self.path)
            path = unquote(address.path).lstrip("/")
            inside = sorted(name for name in files.files if name.startswith(path))
            data, status, cut = files.files.get(path, b""), files.status or 200, False
            if not files.status and path not in files.files:
                if "list-type=2" in address.query:
                    data = listed(path, parse_qs(address.query).get("prefix", [""])[0], files.files).encode()
                elif path.endswith("/") and inside:
                    data = "".join(f'<a href="/{name}">{name}</a>\n' for name in inside).encode()
                else:
                    status = 404
            tag = hashlib.sha256(data).hexdigest()[:16]
            begin, end = 0, len(data)
            asked = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
            if body and path in files.files:
                files.gets[path] = files.gets.get(path, 0) + 1
                if files.failures:
                    failure = files.failures.pop(0)
                    cut, status = failure == 0, failure or status
            packed = files.compresses and "gzip" in self.headers.get("Accept-Encoding", "")
            if asked and files.ranges and status == 200 and not packed:
                begin, end, status = int(asked[1]), min(int(asked[2]) + 1, len(data)), 206
            data = gzip.compress(data) if packed else data[begin:end]
            self.send_response(status)
            if packed:
                self.send_header("Content-Encoding", "gzip")
            self.send_header("Content-Length", str(len(data)))
            self.send_header("ETag", tag)
            self.end_headers()
            if body and cut:
                self.wfile.write(data[:10])
                self.close_connection = True
            elif body:
                self.wfile.write(data)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
