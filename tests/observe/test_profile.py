"""Captures of steps: the seconds of overlapping operations by hand, planted faults, an independent clock, the cost of no capture."""

import json
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import argosy
from argosy.cli import main
from argosy.core.errors import BadInput
from argosy.observe.goodput import Clock
from argosy.observe.hlo.module import HloModule
from argosy.observe.profile.capture import Capture, Requests, Window, captures, read_window
from argosy.observe.profile.table import DATA, HOST, OTHERS, layer_of, profile_of
from argosy.observe.profile.text import findings, merged_layers, profile_text
from argosy.observe.profile.trace import Span, Trace, read_trace, shared_seconds
from argosy.run.hooks.profiling import Profiling
from argosy.run.settings.profile import ProfileSettings

NS = 1_000_000_000


def test_every_second_of_a_step_has_a_cause():
    """Two steps in 10 s: 4 s of operations, 1 s of other programs, 2 s of waiting for data; the rest is the host's."""
    window = Window(first=3, last=4, wall_s=10.0, seconds={"data": 2.0, "step": 8.0}, devices=1, kind="x", platform="tpu")
    trace = Trace({"fusion.1": 3.0, "copy.2": 1.0}, {"fusion.1": 4, "copy.2": 2}, 4.0, 9.0, 1, "step", {"other": 1.0})
    profile = profile_of(window, trace, None)
    ops = {row.name: row for row in profile.ops}
    assert {name: row.seconds for name, row in ops.items()} == {"fusion.1": 1.5, HOST: 1.5, DATA: 1.0, "copy.2": 0.5, OTHERS: 0.5}
    assert [row.name for row in profile.ops] == sorted(ops, key=lambda name: -ops[name].seconds)
    assert (ops["fusion.1"].share, ops[HOST].share) == (0.3, 0.3)
    for rows in (profile.layers, profile.kinds, profile.ops):
        assert sum(row.seconds for row in rows) == pytest.approx(profile.step_s) == 5.0
    # Data that were waited for while the device computed cost nothing.
    busy = profile_of(window, Trace({"fusion.1": 9.5}, {"fusion.1": 4}, 9.5, 9.5, 1, "step"), None)
    assert {row.name: row.seconds for row in busy.ops} == {"fusion.1": 4.75, DATA: 0.25}


def test_operations_share_an_instant_and_loops_have_what_is_left():
    spans = [
        Span("while.1", 0, 10 * NS),       # a loop: its own share is where nothing inside it runs
        Span("dot.1", 1 * NS, 5 * NS),
        Span("dot.2", 3 * NS, 7 * NS),     # two seconds beside the other
        Span("copy.1", 12 * NS, 13 * NS),
    ]
    seconds, counts, busy = shared_seconds(spans)
    assert seconds == pytest.approx({"while.1": 4.0, "dot.1": 3.0, "dot.2": 3.0, "copy.1": 1.0})
    assert busy == pytest.approx(11.0)
    assert sum(seconds.values()) == pytest.approx(busy)
    assert counts == {"while.1": 1, "dot.1": 1, "dot.2": 1, "copy.1": 1}


@pytest.mark.parametrize(
    "op_name, layer",
    [
        ("jit(step)/jvp(loss)/layers.3/attn/dot_general", "layers.3/attn"),
        ("jit(step)/transpose(jvp(loss))/layers/while/body/closed_call/mlp/dot_general", "layers/mlp backward"),
        ("jit(step)/transpose(jvp(loss/layers.0/attn))/mul", "layers.0/attn backward"),
        ("jit(step)/optimizer/mul", "optimizer"),
        ("jit(step)/jvp(loss)/head/dot_general", "head"),
        ("jit(step)/loss/reduce_sum", "loss"),
        ("jit(step)/broadcast_in_dim", "rest of the step"),
        ("", "rest of the step"),
    ],
)
def test_the_path_of_an_operation_reads_like_the_model(op_name: str, layer: str):
    assert layer_of(op_name) == layer


@pytest.mark.parametrize("steps", ["0", "5-3", "a", "1-2-3", -1])
def test_a_wrong_window_is_a_mistake(steps):
    with pytest.raises(ValueError, match=r"profile\.steps"):
        ProfileSettings(steps=steps)


def test_a_request_is_answered_with_steps_that_every_process_can_reach(tmp_path: Path):
    now = [0.0]
    leader, other = (Requests(tmp_path, i, 2, lambda: now[0]) for i in (0, 1))
    (tmp_path / "profile").mkdir()
    request = tmp_path / "profile" / "request.json"
    request.write_text(json.dumps({"id": "a", "steps": 3}))
    now[0] = 0.5
    assert leader.window(5) is None          # once a second
    now[0] = 2.0
    assert other.window(20) is None          # only the leader chooses
    window = leader.window(20)                # ten steps a second: 100 steps are ten seconds
    assert window == (20 + 101, 20 + 103, "a")
    now[0] = 4.0
    assert other.window(40) == window
    other.done()
    assert request.exists()
    leader.done()
    assert not request.exists()


def test_a_step_without_a_capture_costs_microseconds(tmp_path: Path):
    profiling = Profiling(ProfileSettings(), tmp_path, Clock(), None, print)
    before, after = profiling.hooks(lambda do: do)
    start = time.thread_time()
    for step in range(2000):
        before.due(step, False)
        after.due(step, False)
    # Of a step of 1 ms, 1 % would be 10 us.
    assert (time.thread_time() - start) / 2000 < 1e-5


# ---------------------------------------------------------------- real captures


def layers(x, weights):
    for i, w in enumerate(weights):
        with jax.named_scope(f"layers.{i}"), jax.named_scope("mlp"):
            x = jnp.tanh(x @ w) @ w.T
    with jax.named_scope("loss"):
        return jnp.sum(x * x)


def capture_calls(folder: Path, program, *arguments, stall_s: float = 0.0, steps: int = 3):
    """A capture of some calls, each after a wait that counts as the data's."""
    clock = Clock()
    jax.block_until_ready(program(*arguments))
    capture = Capture(folder, 0, clock)
    capture.start()
    for _ in range(steps):
        with clock("data"):
            time.sleep(stall_s)
        with clock("step"):
            jax.block_until_ready(program(*arguments))
    window = capture.stop(1, steps)
    return profile_of(window, read_trace(folder / "process-0"), HloModule.read(program.as_text()))


@pytest.mark.slow
def test_a_planted_slow_layer_and_a_planted_stall_are_found(tmp_path: Path):
    x = jnp.ones((256, 128))
    widths = [256, 256, 2048, 256]
    weights = [jnp.full((128, width), 0.01) for width in widths]
    program = jax.jit(jax.value_and_grad(layers, argnums=1)).lower(x, weights).compile()
    profile = capture_calls(tmp_path / "slow", program, x, weights)
    assert any("layers.2/mlp" in text and "times as long" in text for text in findings(profile))
    by_layer = {row.name: row.seconds for row in profile.layers}
    forward = [by_layer[f"layers.{i}/mlp"] for i in range(4)]
    assert forward[2] > 3 * max(forward[0], forward[1], forward[3])
    products = next(row for row in profile.kinds if row.name == "matrix products")
    assert products.seconds == max(row.seconds for row in profile.kinds if row.flops)
    # Forward, and the gradients of both products of a layer except those of the first input.
    pair = [2 * 256 * 128 * width for width in widths]
    assert sum(row.flops or 0 for row in profile.kinds) == 6 * sum(pair) - pair[0]
    stalled = capture_calls(tmp_path / "stall", program, x, weights, stall_s=0.1)
    assert not any("waits for data" in text for text in findings(profile))
    assert any("waits for data" in text for text in findings(stalled))
    assert next(row for row in stalled.kinds if row.name == DATA).seconds == pytest.approx(0.1, rel=0.05)
    for profile_of_run in (profile, stalled):
        for rows in (profile_of_run.layers, profile_of_run.kinds, profile_of_run.ops, merged_layers(profile_of_run.layers)):
            assert sum(row.seconds for row in rows) == pytest.approx(profile_of_run.step_s, rel=0.03)
            assert sum(row.share for row in rows) == pytest.approx(1.0, abs=0.03)


@pytest.mark.slow
def test_a_run_is_captured_as_its_metrics_say(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    from argosy.jobs.train import Quiet

    run = tmp_path / "run"
    words = ["data.sequence=256", "data.batch=16", "log.every=1", "profile.steps=4-8", "profile.program=true", "eval.every=100"]
    argosy.fit("tiny", *words, steps=10, dir=str(run), view=Quiet())
    [folder] = captures(run)
    window = read_window(folder)
    assert (window.first, window.last) == (4, 8)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    # The clock of the log: tokens over the time since the step before.
    logged = {line["step"]: 16 * 256 / line["tokens_per_s"] for line in lines if "tokens_per_s" in line}
    # Both clocks are read one after the other, and a busy machine may put something in between. A step takes twice this time.
    assert window.wall_s == pytest.approx(sum(logged[step] for step in range(4, 9)), rel=0.03, abs=0.1)
    capsys.readouterr()
    assert main(["profile", str(run), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert sum(row["seconds"] for row in document["layers"]) == pytest.approx(window.wall_s / 5, rel=0.03)
    names = {row["name"] for row in document["layers"]}
    assert {"layers.0/attn", "layers.1/mlp backward", "optimizer", "embed"} <= names
    assert document["busy_seconds"] > 0.5 * document["step_seconds"]
    assert (run / "program.hlo.txt").read_text().startswith("HloModule")
    assert "Time of a step" in (run / "report.html").read_text()
    assert main(["profile", str(run)]) == 0
    assert "matrix products" in capsys.readouterr().out


def test_what_was_not_captured_says_how(tmp_path: Path):
    from argosy.jobs.profile import profile

    (tmp_path / "settings.yml").write_text("steps: 1\n")
    (tmp_path / "metrics.jsonl").write_text("")
    with pytest.raises(BadInput, match="has no capture") as error:
        profile(str(tmp_path))
    assert "profile.steps=10-12" in str(error.value.hint)
    with pytest.raises(BadInput, match="is not running"):
        profile(str(tmp_path), 3)


@pytest.mark.slow
def test_a_running_job_is_asked_for_a_capture(tmp_path: Path):
    import subprocess
    import sys

    from argosy.jobs.profile import profile

    run = tmp_path / "run"
    command = [sys.executable, "-m", "argosy", "train", "tiny", "steps=100000", f"dir={run}"]
    child = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        until = time.monotonic() + 120
        while time.monotonic() < until and not (run / "metrics.jsonl").is_file():
            time.sleep(0.2)
        capture = profile(str(run), 4, timeout=120)
        assert capture.window.steps == 4
        assert "by kind" in profile_text(capture)
        assert not (run / "profile" / "request.json").exists()
    finally:
        child.terminate()
        child.wait()
