"""A short campaign of `fuzz.py`: some hundred inputs of every kind, and proof that its process notices what it should."""

import subprocess
import sys
from pathlib import Path

import pytest
from fuzz import campaign, table
from fuzz_inputs import KINDS, SHARES
from helpers import shared

EACH = 60


def test_shares_are_of_every_kind_and_a_hundred():
    assert set(SHARES) == set(KINDS)
    assert sum(SHARES.values()) == 100


def test_some_hundred_inputs_of_every_kind():
    shared("models/stories260k/tokenizer.model")
    shared("chat_templates/golden.json")
    results = campaign([(kind, 7, 0, EACH) for kind in KINDS])
    findings = {kind: result.findings for kind, result in results.items() if result.findings}
    assert not findings, f"{table(results)}\n{findings}"
    for kind, result in results.items():
        assert sum(result.outcomes.values()) == EACH
        assert result.outcomes["read"] >= EACH / 50, kind  # not everything is refused at the door
        assert sum(result.outcomes.values()) - result.outcomes["read"] >= EACH / 4, kind


HARM = {
    "program": ("import os; os.system('true')", 99),
    "process": ("import subprocess; subprocess.Popen(['true'])", 99),
    "file": ("open('harm', 'w')", 99),
    "pickle": ("import pickle; pickle.loads(b'cos\\nsystem\\n.')", 99),
    "memory": ("fuzz.allow(50 << 20); b'x' * (100 << 20)", 1),
}


@pytest.mark.parametrize("name", HARM)
def test_harm_is_noticed(name):
    code, status = HARM[name]
    program = f"import fuzz, pickle, subprocess; from pathlib import Path; fuzz.watch(Path('/nowhere')); {code}"
    done = subprocess.run([sys.executable, "-c", program], cwd=Path(__file__).parent, capture_output=True, check=False)
    assert done.returncode == status, done.stderr
    assert (b"forbidden" if status == 99 else b"MemoryError") in done.stderr
