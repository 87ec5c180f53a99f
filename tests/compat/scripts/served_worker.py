"""A worker with torch's server: asks itself everything, prints the answers, and fails."""

import http.client
import json
import os
import socket

from torch._C._distributed_c10d import _register_handler, _Request, _Response

from ripstop.compat.control_plane import worker_main

PATH = os.environ["TORCH_WORKER_SERVER_SOCKET"]


def hello(request: _Request, response: _Response) -> None:
    response.set_content("hello", "text/plain")
    response.set_status(200)


def ask(method: str, path: str) -> str:
    connection = http.client.HTTPConnection("localhost")
    connection.sock = socket.socket(socket.AF_UNIX)
    connection.sock.connect(PATH)
    connection.request(method, path)
    return connection.getresponse().read().decode()


@worker_main()
def main() -> None:
    _register_handler("hello", hello)
    answers = {name: ask("POST", f"/handler/{name}") for name in ("ping", "hello", "dump_traceback", "fr_trace_json")}
    print(json.dumps(answers), flush=True)
    raise RuntimeError("as it was told")


if __name__ == "__main__":
    main()
