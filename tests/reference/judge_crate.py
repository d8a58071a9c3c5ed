"""Judges an RO-Crate with rocrate-validator, in a Python that has it: python judge_crate.py FOLDER CONTEXT_1_1 CONTEXT_WFRUN.

The two contexts are files, so that nothing is fetched. Prints a line for each issue, then ``checked N``.
"""

import io
import sys

import requests
from rocrate_validator import models, services

folder, *contexts = sys.argv[1:]
ADDRESSES = ("https://w3id.org/ro/crate/1.1/context", "https://w3id.org/ro/terms/workflow-run/context")
TEXTS = {}
for address, path in zip(ADDRESSES, contexts, strict=True):
    with open(path, "rb") as file:  # noqa: PTH123
        TEXTS[address] = file.read()


def send(self, request, **_):
    """Answer from the files; all else is not found."""
    content = TEXTS.get(request.url)
    response = requests.Response()
    response.status_code = 404 if content is None else 200
    response.raw = io.BytesIO(content or b"")
    response.headers["content-type"] = "application/ld+json"
    response.url, response.request = request.url, request
    return response


requests.adapters.HTTPAdapter.send = send
settings = services.ValidationSettings(
    rocrate_uri=folder,
    profile_identifier="process-run-crate-0.5",
    requirement_severity=models.Severity.RECOMMENDED,
    no_cache=True,
)
result = services.validate(settings)
for issue in result.get_issues(models.Severity.RECOMMENDED):
    print(issue.severity.name, issue.check.identifier, " ".join(str(issue.message).split()))
print("checked", len(result.executed_checks))
