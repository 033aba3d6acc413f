"""Requests a second and latency of a server of bundles, closed loop: each client sends its next request when it has its answer.

    ./run python bench/predict_http.py URL PATH [clients=1,16] [seconds=8] [rows=FILE.json] [binary=false]

PATH is that of a v2 inference (`/v2/models/NAME/infer`) or of any server that takes a POST of JSON. Requests are the lines of `rows`,
by default sentences of 20 tokens for a model of texts. `binary=true` asks for outputs as bytes. The client is a loop over sockets
that parses nothing but the status and the length, so that on a shared machine the server has the processor.
"""

import json
import selectors
import socket
import sys
import time
from collections.abc import Sequence
from urllib.parse import urlsplit

TEXT = "the old boat lay under a pale sky while seven quiet people walked along an empty road toward the small harbor below"
WORDS = TEXT.split()


def sentences(count: int, words: int = 18) -> list[str]:
    """Different sentences of so many words."""
    return [" ".join(WORDS[(i * 7 + j * (1 + i % 5)) % len(WORDS)] for j in range(words)) for i in range(count)]


def v2_request(text: str, binary: bool) -> bytes:
    body: dict[str, object] = {"inputs": [{"name": "text", "datatype": "BYTES", "shape": [1], "data": [text]}]}
    if binary:
        body["parameters"] = {"binary_data_output": True}
    return json.dumps(body).encode()


class Connection:
    """A client: one socket, one request at a time."""

    def __init__(self, host: str, port: int):
        self.socket = socket.create_connection((host, port))
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.sent, self.data, self.need = 0.0, b"", -1

    def send(self, message: bytes) -> None:
        self.data, self.need, self.sent = b"", -1, time.perf_counter()
        self.socket.sendall(message)

    def read(self) -> bool:
        """Whether the answer is complete. Raises: RuntimeError: it is an error."""
        part = self.socket.recv(1 << 16)
        if not part:
            raise RuntimeError("the server closed the connection")
        self.data += part
        if self.need < 0 and (end := self.data.find(b"\r\n\r\n")) >= 0:
            head = self.data[:end].lower()
            if b" 200 " not in head.split(b"\r\n", 1)[0]:
                raise RuntimeError(self.data[:500].decode("utf-8", "replace"))
            length = next(line for line in head.split(b"\r\n") if line.startswith(b"content-length:"))
            self.need = end + 4 + int(length.split(b":")[1])
        return 0 <= self.need <= len(self.data)


def measured(url: str, path: str, bodies: Sequence[bytes], clients: int, seconds: float) -> dict[str, float]:
    """Requests a second, and milliseconds of the median and of the 99th percentile."""
    at = urlsplit(url)
    host, port = at.hostname or "127.0.0.1", at.port or 80
    head = f"POST {path} HTTP/1.1\r\nHost: {host}:{port}\r\nContent-Type: application/json\r\nContent-Length: "
    messages = [f"{head}{len(body)}\r\n\r\n".encode() + body for body in bodies]
    selector, times, number = selectors.DefaultSelector(), [], 0
    some = [Connection(host, port) for _ in range(clients)]
    for connection in some:
        selector.register(connection.socket, selectors.EVENT_READ, connection)
        connection.send(messages[number % len(messages)])
        number += 1
    begin = time.perf_counter()
    warm = begin + min(1.0, seconds / 4)
    while (now := time.perf_counter()) < begin + seconds:
        for key, _ in selector.select(1.0):
            connection = key.data
            if connection.read():
                now = time.perf_counter()
                if connection.sent > warm:
                    times.append(now - connection.sent)
                connection.send(messages[number % len(messages)])
                number += 1
    for connection in some:
        connection.socket.close()
    if not times:
        raise SystemExit("no request was answered in time")
    times.sort()
    return {
        "a_second": len(times) / (now - warm),
        "p50": 1e3 * times[len(times) // 2],
        "p99": 1e3 * times[int(0.99 * (len(times) - 1))],
    }


def main(words: Sequence[str]) -> None:
    options = {"clients": "1,16", "seconds": "8", "rows": "", "binary": "false"}
    options |= dict(word.split("=", 1) for word in words if "=" in word and not word.startswith("http"))
    url, path = [word for word in words if "=" not in word][:2]
    if options["rows"]:
        with open(options["rows"], "rb") as file:
            bodies = [line for line in file.read().splitlines() if line]
    else:
        bodies = [v2_request(text, options["binary"] == "true") for text in sentences(64)]
    print("| clients | requests/s | p50 ms | p99 ms |\n| --- | --- | --- | --- |")
    for clients in map(int, options["clients"].split(",")):
        load = measured(url, path, bodies, clients, float(options["seconds"]))
        print(f"| {clients} | {load['a_second']:,.0f} | {load['p50']:.1f} | {load['p99']:.1f} |", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
