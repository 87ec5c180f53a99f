"""Serves the files of the page (`page/`), which shows a job in a browser through the API.

The files are the same for every job and contain no secrets, so anyone may read them; the page asks its user for the
API's token.  Rules: (1) the page loads and requests nothing from other origins, and no other page can frame it: the
headers make the browser enforce this; (2) the files are read once, in a thread, at the first request; (3) a connection
serves one file: it has proven nothing, so it is not kept open.
"""

import asyncio
import hashlib
from importlib.resources import files

from aiohttp import web
from msgspec import Struct

FOLDER = files("ripstop.api") / "page"
TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
        "frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",  # a newer coordinator may have another version: the browser asks with the ETag
}


class PageFile(Struct, frozen=True):
    content: bytes
    type: str
    etag: str


class PageFiles:
    def __init__(self) -> None:
        self._reading: asyncio.Task[dict[str, PageFile]] | None = None

    def mount(self, app: web.Application) -> None:
        app.router.add_get("/", self._serve)
        app.router.add_get("/page/{name}", self._serve)

    async def _serve(self, request: web.Request) -> web.Response:
        if self._reading is None:
            self._reading = asyncio.create_task(asyncio.to_thread(read_page_files), name="ripstop-page")
        found = (await asyncio.shield(self._reading)).get(request.match_info.get("name", "index.html"))
        if found is None:
            response = web.Response(status=404, text="not found")
        elif request.headers.get("If-None-Match") == found.etag:
            response = web.Response(status=304, headers=HEADERS | {"ETag": found.etag})
        else:
            response = web.Response(body=found.content, headers=HEADERS | {"ETag": found.etag})
            response.content_type, response.charset = found.type, "utf-8"
        response.force_close()
        return response


def read_page_files() -> dict[str, PageFile]:
    """The files by name; those in `vendor/` too."""
    found = {}
    for path in (*FOLDER.iterdir(), *(FOLDER / "vendor").iterdir()):
        if kind := TYPES.get("." + path.name.rpartition(".")[2]):
            content = path.read_bytes()
            found[path.name] = PageFile(content, kind, f'"{hashlib.sha256(content).hexdigest()[:32]}"')
    return found
