"""A small share of `tests/campaign_data.py`: readers that are killed go on with the rows of one that was not."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

CAMPAIGN = Path(__file__).parents[1] / "campaign_data.py"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["rows.parquet", "mds.zstd", "online", "mixture by schedule", "pairs"])
def test_killed_readers_go_on(name):
    """In a process of its own, which forks: threads of this one would not survive that."""
    done = subprocess.run([sys.executable, CAMPAIGN, "n=6", f"only={name}"], capture_output=True, text=True, timeout=300)
    match = re.search(r"(\d+) kills, ([\d,]+) batches in \d+ s: 0 differences", done.stdout)
    assert match, done.stdout + done.stderr
    assert done.returncode == 0
    assert int(match[1]) >= 6
    assert int(match[2].replace(",", "")) > 40
