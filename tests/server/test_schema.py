"""schemathesis against a real engine on a tiny model: what OpenAPI describes is what the server does.

Generated requests, well-formed and not, on every documented route: no server error, and status, content type and body
as described.
"""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings
from server_kit import Kit, engine_server

schemathesis = pytest.importorskip("schemathesis")

from schemathesis.checks import not_a_server_error  # noqa: E402
from schemathesis.config import SchemathesisConfig  # noqa: E402
from schemathesis.specs.openapi.checks import (  # noqa: E402
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

pytestmark = pytest.mark.filterwarnings("default")
CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]


DESCRIPTION = Kit().app.openapi()
quick_config = SchemathesisConfig.from_dict({"phases": {"coverage": {"enabled": False}}})
quick = schemathesis.openapi.from_dict(DESCRIPTION, config=quick_config)
whole = schemathesis.openapi.from_dict(DESCRIPTION)
health = list(HealthCheck)


@pytest.fixture(scope="module")
def url(tiny_llama):
    with engine_server(str(tiny_llama), max_num_seqs=4, max_model_len=64) as url:
        yield url


@quick.parametrize()
@settings(max_examples=10, deadline=None, derandomize=True, suppress_health_check=health)
def test_every_route_does_what_is_described(case, url):
    case.call_and_validate(base_url=url, checks=CHECKS)


@pytest.mark.models  # minutes: every border of every field too
@whole.parametrize()
@settings(max_examples=50, deadline=None, suppress_health_check=health)
def test_every_route_does_what_is_described_at_length(case, url):
    case.call_and_validate(base_url=url, checks=CHECKS)
