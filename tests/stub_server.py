"""A server that speaks just enough of OpenAI's protocol, and has the faults that servers have."""

import argparse
import json
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Stub(ThreadingHTTPServer):
    """What is asked decides: `busy` is refused with 503 twice, `hang` not answered in time, `nonsense` answered with HTML, `wrong` with
    JSON that is none of OpenAI's, `refuse` with 400, `empty` with nothing, `call` with a tool call, `think` with reasoning, `cut` cut
    short, `broken` ends a stream with an error; all else turned round. After `lasts` answers it is gone."""

    daemon_threads = True

    def __init__(self, lasts: int | None = None, metrics: Any = None, port: int = 0):
        super().__init__(("127.0.0.1", port), Handler)
        self.lasts, self.metrics = lasts, metrics or (lambda answered: "")
        self.asked: list[dict[str, Any]] = []
        self.tries: Counter[str] = Counter()
        self.answered = 0
        self.at_once = self.most_at_once = 0
        self.lock = threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def handle_error(self, *_: Any) -> None:
        """Clients that hang up are expected."""


class Handler(BaseHTTPRequestHandler):
    server: Stub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        """Quiet."""

    def do_GET(self) -> None:
        if self.path == "/metrics":
            self.say(200, self.server.metrics(self.server.answered), "text/plain")
        else:
            self.say(200, {"object": "list", "data": [{"id": "stub", "object": "model", "created": 0, "owned_by": "x"}]})

    def do_POST(self) -> None:
        stub = self.server
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with stub.lock:
            stub.asked.append(asked)
            stub.at_once += 1
            stub.most_at_once = max(stub.most_at_once, stub.at_once)
            text = asked["messages"][-1]["content"]
            stub.tries[text] += 1
            tries = stub.tries[text]
            gone = stub.lasts is not None and stub.answered >= stub.lasts
        try:
            if gone:
                self.close_connection = True
                self.connection.close()
                return
            time.sleep(3 if text == "hang" else 0.01)
            if text == "busy" and tries < 3:
                self.say(503, {"error": {"message": "too much to do"}}, more={"retry-after-ms": "5"})
            elif text == "refuse":
                self.say(400, {"error": {"message": "that is too long"}})
            elif text == "nonsense":
                self.say(200, "<html>a proxy's page</html>", "text/html")
            elif text == "wrong":
                self.say(200, {"choices": []})
            elif asked.get("stream"):
                self.stream(text)
            else:
                self.say(200, completion(text))
            stub.answered += 1
        finally:
            with stub.lock:
                stub.at_once -= 1

    def stream(self, text: str) -> None:
        chunk = {"id": "x", "object": "chat.completion.chunk", "created": 0, "model": "stub"}
        pieces = [{**chunk, "choices": [{"index": 0, "delta": {"content": c}, "finish_reason": None}]} for c in text[::-1]]
        usage = {"prompt_tokens": 1, "completion_tokens": len(text), "total_tokens": 1 + len(text)}
        lines = [f"data: {json.dumps(p)}\n\n" for p in (*pieces, {**chunk, "choices": [], "usage": usage})]
        end = f"data: {json.dumps({'error': {'message': 'out of room'}})}\n\n" if text == "broken" else "data: [DONE]\n\n"
        self.say(200, "".join([*lines, end]), "text/event-stream")

    def say(self, status: int, body: Any, kind: str = "application/json", more: dict[str, str] | None = None) -> None:
        data = (body if isinstance(body, str) else json.dumps(body)).encode()
        self.send_response(status)
        for name, value in {"Content-Type": kind, "Content-Length": str(len(data)), **(more or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)


def completion(text: str) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": "" if text in ("empty", "call") else text[::-1]}
    finish = "length" if text == "cut" else "stop"
    if text == "think":
        message["reasoning_content"] = "let me see"
    if text == "call":
        message["tool_calls"] = [{"id": "c1", "type": "function", "function": {"name": "look_up", "arguments": '{"a": 1}'}}]
        finish = "tool_calls"
    choice = {"index": 0, "message": message, "finish_reason": finish}
    return {"id": "x", "object": "chat.completion", "created": 0, "model": "stub", "choices": [choice]}


@contextmanager
def serving(**settings: Any) -> Iterator[Stub]:
    """A stub that runs."""
    stub = Stub(**settings)
    thread = threading.Thread(target=stub.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield stub
    finally:
        stub.shutdown()
        stub.server_close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int)
    parser.add_argument("--counters", default="", help="of drafts, their tokens accepted, and so at each position, after each answer")
    parser.add_argument("--says", default="")
    given, _ = parser.parse_known_args()
    print(given.says, flush=True)
    Stub(metrics=lambda n: given.counters.replace("@", str(n)), port=given.port).serve_forever()
