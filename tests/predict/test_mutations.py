"""A small share of `tests/campaign_mutations.py`: mutated requests are refused or answered rightly, and good ones go on."""

import asyncio
import os
from pathlib import Path

import pytest
from predict_servers import grpc_address, serving

if os.environ.get("CI") != "true":
    pytest.importorskip("grpc", reason="gRPC is an extra: pip install 'argosy[grpc]'")

from campaign_mutations import campaign, write_models


def test_mutated_requests_are_refused_or_answered_rightly(tmp_path: Path):
    write_models(tmp_path)
    with serving(tmp_path, "grpc=0", "limits.upload_seconds=2") as (url, log):
        outcome = asyncio.run(campaign(url, grpc_address(log), log.pid, n=400, seed=1))
    assert outcome.findings == []
    assert not [line for line in log if "Traceback" in line]
    # It would find nothing if every request were refused, or none.
    assert outcome.statuses["200"] > 20
    assert outcome.statuses["400"] > 50
    assert outcome.statuses["gRPC OK"] > 20
    assert outcome.statuses["gRPC INVALID_ARGUMENT"] > 50
