"""The log of rejected peers: one line per address and kind, so that a peer cannot fill the log.

aiohttp's own log goes here too: a peer that sends invalid HTTP is a rejection, any other error is a defect of ours.
"""

import logging

from aiohttp import web
from aiohttp.http import HttpProcessingError

log = logging.getLogger("ripstop.coordinator")

MAX_LINES = 1024  # in the life of a job
TLS_MARKERS = ("HTTPS", "\\x16\\x03")  # in aiohttp's error about a TLS client; depends on its version


class RejectionLog(logging.Handler):
    """Also the handler of aiohttp's logger."""

    def __init__(self) -> None:
        super().__init__()
        self._logged: set[tuple[str, str]] = set()

    def log(self, host: str, why: str, *, kind: str) -> None:
        """A peer was rejected."""
        if self._is_new(host, kind):
            log.warning("rejected peer=%s why=%r (logged once)", host, why)

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        host = str(record.args[0]) if isinstance(record.args, tuple) and record.args else "unknown"
        match error:
            case HttpProcessingError() if any(marker in error.message for marker in TLS_MARKERS):
                why = (
                    "it uses TLS; give this coordinator tls_cert and tls_key, "
                    "or remove tls_… from the node's --rdzv-conf"
                )
                self.log(host, why, kind="http")
            case HttpProcessingError():
                self.log(host, f"not HTTP: {error.message[:200]}", kind="http")
            case web.RequestPayloadError():
                self.log(host, f"not HTTP: {str(error)[:200]}", kind="http")
            case ConnectionError():
                pass  # the peer disconnected during a request
            case _ if record.levelno >= logging.ERROR:
                # one line per place in the code, because a peer may be able to cause the error again
                if self._is_new(_rejection_log_key(error), "defect"):
                    log.error("%s (logged once)", record.getMessage(), exc_info=error)

    def _is_new(self, what: str, kind: str) -> bool:
        if (what, kind) in self._logged or len(self._logged) >= MAX_LINES:
            return False
        self._logged.add((what, kind))
        return True


def _rejection_log_key(error: BaseException | None) -> str:
    """Where an error was raised."""
    trace = error.__traceback__ if error else None
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return f"{type(error).__name__} {trace.tb_frame.f_code.co_filename}:{trace.tb_lineno}" if trace else "nowhere"
