"""Predictions over HTTP, so that any scheduler can propose a configuration and get the answer.

`POST /predict` and `POST /recommend` take a JSON object with the arguments of `Model.predict` and `Model.recommend`
and give the figures as JSON. What is wrong with a request is said as `{"error": ...}`: 400 for its content, 404 for
another path, 405 for another method, 411 and 413 for a body without a length or too long, 415 for another type.
Requests are answered by a thread each; a calibration of another machine is given as an object, not as a path.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple

from scalein.errors import BadArgument, ScaleinError, guess, here
from scalein.model.calibration import of_json
from scalein.model.model import Model

MAX_BODY_BYTES = 1 << 20
WAIT_S = 10.0  # for the rest of a request
_SAME = {"rate", "memory", "every", "batch_rows", "keys", "variability", "on"}
ARGUMENTS = {"/predict": _SAME | {"workers", "partitions", "executors", "cores", "read_by", "migration"},
             "/recommend": _SAME | {"p99", "most", "headroom", "partitions", "cores", "read_by"}}


class Answer(NamedTuple):
    status: HTTPStatus
    body: dict[str, Any]


def answer(model: Model, path: str, body: bytes) -> Answer:
    """What a POST of a JSON body to a path gives.

    >>> from scalein.model.costs import Costs
    >>> from scalein.model.calibration import TYPICAL
    >>> model = Model(Costs(1e-5, 2e-5, 0.0, 1e-4, 0.0, 0.0, ((1e6, 1e-8),)), TYPICAL)
    >>> answer(model, "/predict", b'{"workers": 2, "rate": 1000000}').body["saturated"]
    False
    >>> answer(model, "/predict", b'{"worker": 2}').body["error"]
    "predict has no argument 'worker': did you mean 'workers'?"
    """
    known = ARGUMENTS.get(path)
    if known is None:
        return _refused(HTTPStatus.NOT_FOUND, f"no such path: {path}; there are {' and '.join(ARGUMENTS)}")
    name = path[1:]
    try:
        given = json.loads(body.decode("utf-8"), parse_constant=_not_finite)
    except (ValueError, RecursionError) as error:
        return _refused(HTTPStatus.BAD_REQUEST, f"the body is not JSON: {error}")
    if not isinstance(given, Mapping):
        return _refused(HTTPStatus.BAD_REQUEST, f"{name} takes a JSON object with its arguments")
    for each in given:
        if each not in known:
            close = guess(each, sorted(known))
            return _refused(HTTPStatus.BAD_REQUEST, f"{name} has no argument {each!r}" + (f": {close}" if close else
                            f"; it has {', '.join(sorted(known))}"))
    try:
        arguments = {**given}
        if arguments.get("on") is not None:
            arguments["on"] = of_json(arguments["on"], here())
        if name == "recommend" and "rate" not in arguments:
            return _refused(HTTPStatus.BAD_REQUEST, "recommend needs a rate")
        ask: Callable[..., Any] = getattr(model, name)
        return Answer(HTTPStatus.OK, ask(**arguments).to_json())
    except ScaleinError as error:
        found = error.facts.get("found")
        return _refused(HTTPStatus.BAD_REQUEST, error.what + (f": found {found}" if found else "")
                        + (f" ({error.hint})" if error.hint else ""))


def _not_finite(text: str) -> float:
    raise ValueError(f"{text} is no number of JSON")


def _refused(status: HTTPStatus, text: str) -> Answer:
    return Answer(status, {"error": text})


class _Handler(BaseHTTPRequestHandler):
    server: PredictionServer
    timeout = WAIT_S
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        length = self.headers.get("Content-Length", "")
        kind = self.headers.get_content_type()
        if not length.isdigit():
            self._refuse_unread(HTTPStatus.LENGTH_REQUIRED, "the request has no Content-Length")
        elif len(length) > 9 or int(length) > MAX_BODY_BYTES:
            self._refuse_unread(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"a body has at most {MAX_BODY_BYTES} bytes")
        elif kind != "application/json":
            self._refuse_unread(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, f"the body must be application/json, not {kind}")
        else:
            self._send(answer(self.server.model, self.path, self.rfile.read(int(length))))

    def do_GET(self) -> None:
        is_known = self.path in ARGUMENTS
        status = HTTPStatus.METHOD_NOT_ALLOWED if is_known else HTTPStatus.NOT_FOUND
        self._send(_refused(status, "POST a JSON object" if is_known else f"no such path: {self.path}; there are "
                            f"{' and '.join(ARGUMENTS)}"))

    do_PUT = do_DELETE = do_PATCH = do_HEAD = do_GET

    def _refuse_unread(self, status: HTTPStatus, text: str) -> None:
        """Refuse a request whose body is not read: the connection cannot go on."""
        self.close_connection = True
        self._send(_refused(status, text))

    def _send(self, found: Answer) -> None:
        content = json.dumps(found.body).encode()
        self.send_response(found.status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        if found.status is HTTPStatus.METHOD_NOT_ALLOWED:
            self.send_header("Allow", "POST")
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        """Nothing: who serves it logs what it wants."""


class PredictionServer(ThreadingHTTPServer):
    """Answers for a model, on this machine only unless `host` says otherwise; `port` 0 is any that is free.

    `with PredictionServer(model, 8000) as server: server.serve_forever()`
    """

    daemon_threads = True

    def __init__(self, model: Model, port: int = 0, host: str = "127.0.0.1") -> None:
        if isinstance(port, bool) or not isinstance(port, int) or not 0 <= port <= 65_535:
            raise BadArgument("a port is a number from 0 to 65535", at=here(), found=repr(port))
        self.model = model
        try:
            super().__init__((host, port), _Handler)
        except OSError as error:
            raise BadArgument("the address cannot be served at", at=here(), found=f"{host}:{port}: {error}") from error

    @property
    def url(self) -> str:
        host, port = self.server_address[:2]
        return f"http://{host!s}:{port}"
