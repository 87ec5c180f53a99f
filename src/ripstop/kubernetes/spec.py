"""The fields of an ElasticJob, once for the schema, the operator and the documentation.  Pure.

`FIELDS` is the table of plain fields.  `read_spec` parses a `Spec` or lists the problems.  The schema catches most
errors when an object is written.  Old clusters do not check rules between two fields, so `read_spec` checks everything
again.
"""

import re
from collections.abc import Mapping
from typing import Any

from msgspec import Struct, convert, field

GROUP, VERSION, KIND, PLURAL = "ripstop.dev", "v1alpha1", "ElasticJob", "elasticjobs"
MAX_REPLICAS = 10_000
MAX_NAME_CHARS = 52  # a pod name adds a dash and up to ten digits, and a host name has at most 63 characters
PORT, PROBE_PORT = 29400, 29490
TYPE_NAMES = {int: "a whole number", bool: "true or false", str: "a text"}

Json = Mapping[str, Any]


class Field(Struct, frozen=True):
    """A plain field of the spec.  `fixed`: immutable while the job exists."""

    name: str
    type: type
    default: Any
    text: str
    least: int | None = None
    most: int | None = None
    fixed: bool = False


FIELDS = (
    Field("minReplicas", int, 1, "Minimum number of pods that train.", 1, MAX_REPLICAS, fixed=True),
    Field("maxReplicas", int, None, "Maximum number of pods that train.", 1, MAX_REPLICAS, fixed=True),
    Field(
        "replicas",
        int,
        None,
        "Number of pods that train; `kubectl scale` sets it.  Default: maxReplicas.",
        1,
        MAX_REPLICAS,
    ),
    Field("spares", int, 0, "Additional pods, which wait to replace a lost pod.", 0, 1000),
    Field("nprocPerNode", str, "auto", "Workers in each pod: a number, `auto`, `gpu` or `cpu`.", fixed=True),
    Field("maxRestarts", int, 3, "How often the job may restart after a failed worker.", 0, 1_000_000, fixed=True),
    Field(
        "restartWindow",
        str,
        "",
        "The job may restart maxRestarts times in any period of this length, for example `1h`.  If it is empty, the "
        "period is the whole run.",
        fixed=True,
    ),
    Field("standby", str, "off", "Standby workers in each pod: a number, `auto` or `off`.", fixed=True),
    Field(
        "standbyUntil",
        str,
        "script",
        "Where standbys wait: before the script (`script`), or before its function with @train.elastic (`elastic`).",
        fixed=True,
    ),
    Field("shutdownTimeout", int, 30, "Seconds between SIGTERM and SIGKILL for workers.", 0, 86_400, fixed=True),
    Field(
        "secretName",
        str,
        "",
        "Name of a Secret with the key `token`.  If it is empty, the operator creates a Secret.",
        fixed=True,
    ),
    Field(
        "suspend",
        bool,
        False,
        "If true, the operator deletes all pods.  If it is false again, the job continues from its checkpoint.",
    ),
    Field("activeDeadlineSeconds", int, None, "The job fails if it runs longer than this.", 1, 2**31 - 1),
    Field("ttlSecondsAfterFinished", int, None, "The job is deleted this many seconds after its end.", 0, 2**31 - 1),
    Field(
        "disruptionBudget",
        bool,
        False,
        "If true, a PodDisruptionBudget keeps minReplicas pods when nodes of the cluster are drained.",
        fixed=True,
    ),
)


class SpecProblem(Struct, frozen=True):
    """An invalid field: its path, and the rule, value and remedy."""

    where: str
    text: str


class Rendezvous(Struct, frozen=True):
    """Where the coordinator runs: in the pod of slot 0, or on the node that etcd elects."""

    backend: str = "embedded"
    endpoints: tuple[str, ...] = ()
    conf: str = ""  # additional --rdzv-conf


class Spec(Struct, frozen=True, rename="camel"):
    """A valid spec.  `FIELDS` has the defaults."""

    min_replicas: int
    max_replicas: int
    replicas: int
    spares: int
    nproc_per_node: str
    max_restarts: int
    restart_window: str
    standby: str
    standby_until: str
    shutdown_timeout: int
    secret_name: str
    suspend: bool
    active_deadline: int | None = field(name="activeDeadlineSeconds")
    ttl: int | None = field(name="ttlSecondsAfterFinished")
    disruption_budget: bool
    rendezvous: Rendezvous
    template: Json

    @property
    def pods(self) -> int:
        """The number of pods."""
        return 0 if self.suspend else self.replicas + self.spares

    @property
    def target(self) -> int | None:
        """The number of nodes that train; None if the operator does not have the job's secret."""
        return None if self.secret_name else self.replicas


def read_spec(name: str, spec: Json) -> Spec | list[SpecProblem]:
    """The spec, or all its problems."""
    problems: list[SpecProblem] = []
    values = {field.name: _spec_value(field, spec, problems) for field in FIELDS}
    values["rendezvous"] = _rendezvous_of_spec(spec.get("rendezvous") or {}, problems)
    values["template"] = spec.get("template")
    unknown = sorted(spec.keys() - values.keys())
    problems += [SpecProblem(f"spec.{key}", "is not a field; remove it, or correct its spelling") for key in unknown]
    problems += [*_spec_template_problems(values["template"]), *_spec_name_problems(name)]
    problems += _spec_standby_problems(values["standby"], values["nprocPerNode"])
    if values["standbyUntil"] not in (None, "script", "elastic"):
        problems.append(SpecProblem("spec.standbyUntil", f"is script or elastic, not {values['standbyUntil']!r}"))
    if not problems:
        if values["replicas"] is None:
            values["replicas"] = values["maxReplicas"]
        problems = _spec_size_problems(values["minReplicas"], values["replicas"], values["maxReplicas"])
    return problems or convert(values, Spec)


def changed_spec_fields(before: Json, after: Json) -> list[SpecProblem]:
    """The immutable fields that were changed."""
    fixed = {field.name: field.default for field in FIELDS if field.fixed} | {"rendezvous": None, "template": None}
    return [
        SpecProblem(f"spec.{name}", "cannot be changed while the job exists; delete the job and create a new one")
        for name, default in fixed.items()
        if before.get(name, default) != after.get(name, default)
    ]


def _spec_value(field: Field, spec: Json, problems: list[SpecProblem]) -> Any:
    value: Any = spec.get(field.name, field.default)
    where = f"spec.{field.name}"
    if value is None:
        if field.name == "maxReplicas":
            problems.append(SpecProblem(where, "is required: the maximum number of nodes"))
        return None
    if field.type is str and type(value) is int:
        value = str(value)  # nprocPerNode: 8, standby: 8
    if type(value) is not field.type:
        problems.append(SpecProblem(where, f"is {TYPE_NAMES[field.type]}, not {value!r}"))
        return None
    if isinstance(value, int) and not (field.least or 0) <= value <= (field.most or value):
        problems.append(SpecProblem(where, f"is from {field.least} to {field.most}, not {value}"))
    return value


def _spec_name_problems(name: str) -> list[SpecProblem]:
    where = "metadata.name"
    if len(name) > MAX_NAME_CHARS:
        text = f"has {len(name)} characters; its pods' host names allow {MAX_NAME_CHARS}; shorten it"
        return [SpecProblem(where, text)]
    if not re.fullmatch("[a-z]([-a-z0-9]*[a-z0-9])?", name):
        return [SpecProblem(where, f"must be a service name: a-z first, then a-z, 0-9 and dashes, not {name!r}")]
    return []


def _spec_size_problems(least: int, now: int, most: int) -> list[SpecProblem]:
    if least > most:
        return [SpecProblem("spec.minReplicas", f"({least}) is above maxReplicas ({most}); swap them")]
    if not least <= now <= most:
        return [SpecProblem("spec.replicas", f"({now}) must be from minReplicas ({least}) to maxReplicas ({most})")]
    return []


def _spec_standby_problems(standby: str | None, workers: str | None) -> list[SpecProblem]:
    if standby in (None, "auto", "off"):
        return []
    assert standby is not None
    if not (standby.isascii() and standby.isdigit()):
        return [SpecProblem("spec.standby", f"is a number, `auto` or `off`, not {standby!r}")]
    if workers and workers.isdigit() and int(standby) > int(workers):
        return [SpecProblem("spec.standby", f"({standby}) is above nprocPerNode ({workers}); write auto for all")]
    return []


def _rendezvous_of_spec(value: Any, problems: list[SpecProblem]) -> Rendezvous:
    where = "spec.rendezvous"
    if not isinstance(value, Mapping) or value.keys() - {"backend", "endpoints", "conf"}:
        problems.append(SpecProblem(where, "has only the fields backend, endpoints and conf"))
        return Rendezvous()
    backend, endpoints = value.get("backend", "embedded"), tuple(value.get("endpoints") or ())
    if backend not in ("embedded", "etcd"):
        problems.append(SpecProblem(f"{where}.backend", f"is embedded or etcd, not {backend!r}"))
    if (backend == "etcd") != bool(endpoints):
        problems.append(SpecProblem(f"{where}.endpoints", "are required with etcd, and only with etcd"))
    return Rendezvous(backend, endpoints, value.get("conf") or "")


def _spec_template_problems(template: Any) -> list[SpecProblem]:
    containers = template.get("spec", {}).get("containers") if isinstance(template, Mapping) else None
    if not containers:
        return [SpecProblem("spec.template.spec.containers", "needs a container that runs `ripstop run`")]
    return []
