"""Kubernetes timestamps, from and to seconds since the epoch.  Pure."""

from datetime import UTC, datetime


def seconds_to_timestamp(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def timestamp_to_seconds(timestamp: str) -> float:
    return datetime.fromisoformat(timestamp).timestamp()
