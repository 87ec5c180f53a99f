"""`ripstop token`: print the access token of a job's API."""

import os
from collections.abc import Sequence

from ripstop.cli.job_client import BASIC_FLAGS, parse_command, print_json
from ripstop.model.errors import UsageError
from ripstop.model.parsers import identifier, job_secret
from ripstop.protocol.secret import api_token

HELP = """\
usage: ripstop token [--job NAME] [--json]

Prints the access token of a job's API, derived from RIPSTOP_TOKEN (or RIPSTOP_TOKEN_FILE) and the job's id:

  curl -H "Authorization: Bearer $(ripstop token --job=job7)" http://head:29400/api/v1/status

  -j, --job NAME              the job's id (none)
  --json                      print JSON
"""
FLAGS = BASIC_FLAGS


def main(argv: Sequence[str]) -> int:
    command = parse_command("token", argv, HELP, FLAGS)
    secret, _ = job_secret(os.environ)
    if not secret:
        raise UsageError("the token is derived from the job's secret; set RIPSTOP_TOKEN or RIPSTOP_TOKEN_FILE")
    token = api_token(secret, identifier("--job", command.args.text("--job", "none")))
    if command.as_json:
        print_json({"token": token})
    else:
        print(token)
    return 0
