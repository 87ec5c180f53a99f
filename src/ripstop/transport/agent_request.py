"""The HTTP request with which an agent connects: its path, its headers, and the responses to it.  Pure."""

import hashlib
import posixpath
import re
from base64 import b64encode
from urllib.parse import unquote

from ripstop.protocol.codec import encode
from ripstop.protocol.messages import Rejected
from ripstop.transport.websocket_frames import close_frame, text_frame

END_OF_HEAD = b"\r\n\r\n"
BAD_REQUEST = b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"
GUID = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"  # RFC 6455, section 1.3
WEBSOCKET_KEY = re.compile(r"[A-Za-z0-9+/]{22}==")  # 16 bytes in base64


def agent_request_path(line: bytes) -> str:
    """The path of a request line; every form that HTTP maps to a path gives that path here, too."""
    _, _, rest = line.decode("latin-1").partition(" ")
    target = rest.strip().partition(" ")[0].partition("?")[0].partition("#")[0]
    if "://" in target:
        target = f"/{target.partition('://')[2].partition('/')[2]}"
    return posixpath.normpath(f"/{unquote(target).lstrip('/')}")


def request_header(head: bytes, name: str) -> str | None:
    """A header of a request, or None."""
    at = head.lower().find(f"\r\n{name.lower()}:".encode())
    if at < 0:
        return None
    line = head[at + 2 :].partition(b"\r\n")[0]
    return line.partition(b":")[2].strip().decode("latin-1")


def agent_request_websocket_key(head: bytes) -> str | None:
    """The key of a request that asks for a WebSocket; None if it does not, or if the key is invalid."""
    key = request_header(head, "Sec-WebSocket-Key") or ""
    is_upgrade = (
        head.startswith(b"GET ")
        and (request_header(head, "Upgrade") or "").lower() == "websocket"
        and "upgrade" in (request_header(head, "Connection") or "").lower()
        and request_header(head, "Sec-WebSocket-Version") == "13"
    )
    return key if is_upgrade and WEBSOCKET_KEY.fullmatch(key) else None


def agent_request_upgrade_response(key: str) -> bytes:
    """The answer to a request with this `Sec-WebSocket-Key`."""
    accept = b64encode(hashlib.sha1(key.encode("latin-1") + GUID, usedforsecurity=False).digest())
    upgrade = b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    return b"%sSec-WebSocket-Accept: %s\r\n\r\n" % (upgrade, accept)


def agent_request_rejection(head: bytes, rejected: Rejected) -> bytes:
    """The whole response to a request: a WebSocket with one message, and its end."""
    key = request_header(head, "Sec-WebSocket-Key")
    if not key:
        return BAD_REQUEST
    return agent_request_upgrade_response(key) + text_frame(encode(rejected)) + close_frame()
