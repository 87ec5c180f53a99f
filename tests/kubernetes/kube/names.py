"""A name service for a cluster that has none: the addresses of pods with a host name and a subdomain, from the API.

names.py NAMESPACE: in a pod, with the rights to list that namespace's pods.
"""

import json
import os
import socket
import ssl
import struct
import sys
import urllib.request
from pathlib import Path

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
API = "https://{KUBERNETES_SERVICE_HOST}:{KUBERNETES_SERVICE_PORT}".format_map(os.environ)
PODS = f"{API}/api/v1/namespaces/{sys.argv[1]}/pods"
ADDRESS, FOUND, UNKNOWN = 1, 0x8580, 0x8583  # a question's kind; an answer's flags


def address(host: str, subdomain: str) -> str | None:
    """Of the pod of that name that is not on its way out."""
    headers = {"Authorization": f"Bearer {(ACCOUNT / 'token').read_text()}"}
    with urllib.request.urlopen(urllib.request.Request(PODS, headers=headers), context=trusted) as answer:
        pods = json.load(answer)["items"]
    for pod in pods:
        mine = (pod["spec"].get("hostname"), pod["spec"].get("subdomain")) == (host, subdomain)
        if mine and "deletionTimestamp" not in pod["metadata"] and pod["status"].get("podIP"):
            return str(pod["status"]["podIP"])
    return None


def reply(question: bytes) -> bytes:
    labels, at = [], 12
    while length := question[at]:
        labels.append(question[at + 1 : at + 1 + length].decode())
        at += length + 1
    kind = struct.unpack(">H", question[at + 1 : at + 3])[0]
    found = address(*labels[:2]) if len(labels) > 1 else None
    records = [found] if found is not None and kind == ADDRESS else []
    head = question[:2] + struct.pack(">5H", FOUND if found else UNKNOWN, 1, len(records), 0, 0)
    body = b"".join(b"\xc0\x0c" + struct.pack(">HHIH", 1, 1, 0, 4) + socket.inet_aton(ip) for ip in records)
    return head + question[12 : at + 5] + body


trusted = ssl.create_default_context(cafile=str(ACCOUNT / "ca.crt"))
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as server:
    server.bind(("0.0.0.0", 53))
    while True:
        asked, peer = server.recvfrom(512)
        server.sendto(reply(asked), peer)
