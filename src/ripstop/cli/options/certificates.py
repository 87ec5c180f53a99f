"""The job's certificates in `--rdzv-conf`, which are read and checked, and the warning about a job without a secret."""

from collections.abc import Mapping

from ripstop.model.config import Tls
from ripstop.model.rendezvous_conf import rendezvous_conf_tls


def certificates(name: str, conf: Mapping[str, str], notes: list[str]) -> Tls | None:
    """The job's certificates, checked; `name` is the label of `--rdzv-conf`."""
    found, tls_notes = rendezvous_conf_tls(name, conf)
    notes.extend(tls_notes)
    if found is not None:
        from ripstop.transport.tls import check_tls_certificates  # ssl: only with TLS

        check_tls_certificates(name, found)
    return found


def no_secret_or_certificates_warning(endpoint: object, tls: Tls | None) -> list[str]:
    """A warning that anyone can join the job; none if certificates are required."""
    if tls is not None and tls.ca is not None:
        return []
    return [
        f"no RIPSTOP_TOKEN or RIPSTOP_TOKEN_FILE: anyone who can reach {endpoint} can join this job and end it; "
        "set the same secret on all nodes (openssl rand -hex 32)"
    ]
