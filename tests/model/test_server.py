"""Predictions over HTTP: what a request gives, and what is wrong with one."""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Iterator
from dataclasses import asdict, replace

import pytest

from scalein.errors import ScaleinError
from scalein.model.calibration import FORMAT, TYPICAL
from scalein.model.costs import Costs
from scalein.model.model import Model
from scalein.model.server import MAX_BODY_BYTES, PredictionServer, answer

MODEL = Model(Costs(1e-5, 2e-5, 1e-9, 1e-4, 0.0, 0.0, ((1e6, 1e-8),)), replace(TYPICAL, cores=4))
MACHINE = {"format": FORMAT, **asdict(TYPICAL)}


@pytest.fixture
def connection() -> Iterator[http.client.HTTPConnection]:
    with PredictionServer(MODEL) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        host, port = server.server_address[:2]
        found = http.client.HTTPConnection(str(host), port)
        try:
            yield found
        finally:
            found.close()
            server.shutdown()
            thread.join()


def test_a_scheduler_asks(connection: http.client.HTTPConnection) -> None:
    assert connection.host == "127.0.0.1"
    for path, given in (("/predict", {"workers": 2, "rate": 1e6}), ("/recommend", {"rate": 1e8, "p99": "100ms"})):
        connection.request("POST", path, json.dumps(given), {"Content-Type": "application/json; charset=utf-8"})
        response = connection.getresponse()
        found = json.loads(response.read())
        assert response.status == 200
        assert response.headers["Content-Type"] == "application/json"
        if path == "/predict":
            assert found == json.loads(json.dumps(MODEL.predict(workers=2, rate=1e6).to_json()))
        else:
            assert found["workers"] == MODEL.recommend(rate=1e8, p99="100ms").workers


def test_requests_that_are_refused(connection: http.client.HTTPConnection) -> None:
    kind = {"Content-Type": "application/json"}
    for method, path, body, headers, status in (
            ("GET", "/predict", None, {}, 405), ("GET", "/", None, {}, 404), ("POST", "/plan", "{}", kind, 404),
            ("POST", "/predict", "{}", {"Content-Type": "text/plain"}, 415), ("PUT", "/predict", "", kind, 405),
            ("POST", "/predict", "[1]", kind, 400), ("POST", "/predict", "{}", {**kind, "Content-Length": "-1"}, 411),
            ("POST", "/predict", "", {**kind, "Content-Length": str(MAX_BODY_BYTES + 1)}, 413)):  # fmt: skip
        connection.close()
        connection.request(method, path, body, headers)
        response = connection.getresponse()
        found = json.loads(response.read())
        assert (response.status, list(found)) == (status, ["error"]), (method, path, found)


@pytest.mark.parametrize(("path", "body", "text"), [
    ("/predict", b"{", "not JSON"), ("/predict", b"\xff", "not JSON"), ("/predict", b'{"rate": NaN}', "not JSON"),
    ("/predict", b"3", "JSON object"), ("/predict", b"[" * 100_000, "not JSON"),
    ("/predict", b'{"worker": 1}', "did you mean 'workers'"), ("/predict", b'{"p99": "1s"}', "has no argument 'p99'"),
    ("/predict", b'{"workers": "two"}', "workers must be a whole number, at least 1: found 'two'"),
    ("/predict", b'{"workers": {"a": [1]}}', "workers must be"), ("/predict", b'{"on": "/etc/passwd"}', "calibration"),
    ("/predict", b'{"rate": 1e400}', "rate must be"), ("/predict", b'{"every": [1]}', "every"),
    ("/predict", b'{"partitions": 2}', "no figures of Spark"), ("/predict", b'{"memory": "a lot"}', "memory="),
    ("/recommend", b"{}", "needs a rate"), ("/recommend", b'{"rate": 1, "workers": 2}', "has no argument"),
    ("/recommend", b'{"rate": 1, "most": 1e9}', "most must be"),
    ("/recommend", b'{"rate": 1, "most": 1000000000}', "most must be"),
    *(("/predict", json.dumps({name: 10 ** 400}).encode(), f"{name} must be")
      for name in ("workers", "rate", "memory", "every", "batch_rows", "keys", "variability")),
])  # fmt: skip
def test_bad_bodies(path: str, body: bytes, text: str) -> None:
    found = answer(MODEL, path, body)
    assert found.status == 400
    assert text in found.body["error"]


def test_another_machine_is_an_object() -> None:
    body = json.dumps({"on": {**MACHINE, "operations": TYPICAL.operations / 2}}).encode()
    found = answer(MODEL, "/predict", body)
    assert found.status == 200
    assert found.body["max_rate"] == pytest.approx(MODEL.predict().max_rate / 2, rel=0.05)


def test_a_bad_address() -> None:
    with pytest.raises(ScaleinError, match="port"):
        PredictionServer(MODEL, 70_000)
    with PredictionServer(MODEL) as server, pytest.raises(ScaleinError, match="cannot be served"):
        PredictionServer(MODEL, server.server_address[1])
