"""`runs`, `report`, `doctor` and `models`: against published sizes, the Hub's own configs, and runs damaged on purpose."""

import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from helpers import shared

import argosy
from argosy.cli import main
from argosy.core.caches import most_bytes
from argosy.jobs import doctor
from argosy.jobs.history import listing as runs
from argosy.jobs.models import Cached, cache_bytes, describe
from argosy.models.llama import LlamaConfig
from argosy.models.parts.weight import abstract, parameter_count
from argosy.observe import environment
from argosy.run.settings.recipe_files import preset_config, presets
from argosy.weights import manifest

MODEL = {
    "family": "llama",
    "vocab": 258,
    "width": 64,
    "layers": 2,
    "context": 256,
    "ffn": 176,
    "heads": 4,
    "kv_heads": 2,
}


def make_run(folder: Path, steps: int = 20, saved: tuple[int, ...] = (10, 20), **changes: Any) -> Path:
    """A run directory as a run leaves it, with small files for arrays."""
    settings = {
        "dir": str(folder), "seed": 0, "steps": steps, "model": MODEL | {"tied": True},
        "data": {"source": "stdlib", "sequence": 128, "batch": 8}, "optimizer": {"name": "adamw", "learning_rate": 0.003},
    }  # fmt: skip
    folder.mkdir(parents=True)
    text = yaml.safe_dump(settings | changes, sort_keys=False)
    who = {
        "steps": "command line",
        "source": "recipes/tiny.yml",
        "learning_rate": "recipes/tiny.yml",
        "seed": "base.yml",
    }
    rows = [
        f"{row}  # {who.get(row.strip().split(':')[0], 'default')}" if ": " in row else row for row in text.splitlines()
    ]
    (folder / "settings.yml").write_text("\n".join(rows) + "\n")
    last = max(saved, default=0)
    lines = [
        {"step": s, "loss": 5 - s / 10, "tokens": s * 1024, "tokens_per_s": 1e4, "lr": 0.003}
        for s in range(5, last + 1, 5)
    ]
    lines += [{"step": last, "eval_loss": 2.5}, {"step": last, "seconds": {"step": 3.0, "data": 1.0}}] if last else []
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    for step in saved:
        place = folder / "checkpoints" / str(step)
        (place / "weights").mkdir(parents=True)
        (place / "weights" / "data").write_bytes(bytes(range(256)) * 40)
        (place / "meta.json").write_text(json.dumps({"step": step, "eval_loss": 2.5 if step == last else None}))
        manifest.write_manifest(place)
    return folder


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def ask(capsys, *words: str) -> Any:
    assert main([*words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


# ---- runs


def test_a_list_of_runs_has_the_reward_of_those_that_have_one(here, capsys):
    make_run(here / "runs" / "text")
    assert main(["runs"]) == 0
    assert "reward" not in capsys.readouterr().out
    folder = make_run(here / "runs" / "policy")
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 20, "loss": -1e-9, "reward": 0.75}) + "\n")
    assert main(["runs"]) == 0
    head, *rows = capsys.readouterr().out.splitlines()
    policy = next(row for row in rows if "policy" in row)
    assert dict(zip(head.replace("last write", "written").split(), policy.split()[:7]))["reward"] == "0.7500"
    assert "-0.0000" not in policy


def test_runs_are_listed_with_what_became_of_them(here, capsys):
    make_run(here / "runs" / "whole")
    make_run(here / "runs" / "deep" / "half", steps=40)
    make_run(here / "runs" / "none", saved=())
    make_run(here / "runs" / "torn")
    data = here / "runs/torn/checkpoints/20/weights/data"
    data.write_bytes(data.read_bytes()[:-1])
    make_run(here / "runs" / "lost", saved=(10,))
    (here / "runs/lost/checkpoints/10/meta.json").unlink()
    make_run(here / "runs" / "garbled")
    (here / "runs/garbled/settings.yml").write_text("steps: [")
    make_run(here / "runs" / "busy", steps=40)
    holder = {"pid": os.getpid(), "host": socket.gethostname()}
    (here / "runs/busy/.lock").write_text(json.dumps(holder))
    make_run(here / "runs" / "killed", steps=40)
    (here / "runs/killed/.lock").write_text(json.dumps(holder | {"pid": 2**22 + 1}))
    runs = {Path(run["path"]).name: run for run in ask(capsys, "runs")}
    assert {name: run["state"] for name, run in runs.items()} == {
        "whole": "done", "half": "can resume", "none": "can resume", "torn": "damaged", "lost": "damaged",
        "garbled": "damaged", "busy": "running", "killed": "can resume",
    }  # fmt: skip
    assert runs["whole"]["numbers"] == {
        "loss": 3.0,
        "eval_loss": 2.5,
        "tokens": 20480,
        "tokens_per_s": 1e4,
        "lr": 0.003,
    }
    assert runs["torn"]["problem"] == "checkpoint 20: weights/data has 10239 bytes, not 10240"
    assert runs["lost"]["problem"] == "checkpoint 10: meta.json is missing"
    assert (runs["none"]["step"], runs["half"]["step"], runs["half"]["steps"]) == (None, 20, 40)
    assert main(["runs"]) == 0
    out = capsys.readouterr().out
    assert "20/40" in out
    assert "weights/data has 10239 bytes" in out
    assert main(["runs", "show", "runs/garbled"]) == 0
    assert "settings.yml: not YAML" in capsys.readouterr().out


def test_looking_changes_nothing(here, capsys):
    make_run(here / "runs" / "a")
    before = {p: (p.stat().st_mtime_ns, p.is_file() and p.read_bytes()) for p in here.rglob("*")}
    for words in (["runs"], ["runs", "show", "runs/a"], ["runs", "compare", "runs/a", "runs/a"]):
        assert main(words) == 0
    assert {p: (p.stat().st_mtime_ns, p.is_file() and p.read_bytes()) for p in here.rglob("*")} == before


def test_a_flipped_bit_is_found_where_every_byte_is_read(here, capsys):
    run = make_run(here / "a")
    data = run / "checkpoints/10/weights/data"
    flipped = bytearray(data.read_bytes())
    flipped[77] ^= 4
    data.write_bytes(flipped)
    assert ask(capsys, "runs", "show", "a")["state"] == "done"
    checked = ask(capsys, "runs", "show", "a", "--verify")
    assert checked["state"] == "damaged"
    assert "checkpoint 10" in checked["problem"]


def test_show_tells_who_set_what(here, capsys):
    make_run(here / "a")
    settings = ask(capsys, "runs", "show", "a")["settings"]
    assert settings["steps"] == {"value": 20, "set_by": "command line"}
    assert settings["data.source"] == {"value": "stdlib", "set_by": "recipes/tiny.yml"}
    assert settings["model.tied"] == {"value": True, "set_by": "default"}
    assert main(["runs", "show", "a"]) == 0
    out = capsys.readouterr().out
    assert "10 (10.0 KiB), 20 (10.0 KiB)" in out
    assert "model.tied" not in out


def test_compare_tells_what_differs(here, capsys):
    make_run(here / "a")
    make_run(here / "b", steps=40, optimizer={"name": "muon"})
    make_run(here / "c", seed=3)
    document = ask(capsys, "runs", "compare", "a", "b", "c")
    assert document["settings"] == {
        "steps": [20, 40, 20],
        "optimizer.name": ["adamw", "muon", "adamw"],
        "optimizer.learning_rate": [0.003, None, 0.003],
        "seed": [0, 0, 3],
    }
    assert document["numbers"]["state"] == ["done", "can resume", "done"]
    assert document["numbers"]["loss"] == [3.0, 3.0, 3.0]
    assert main(["runs", "compare", "a", "b"]) == 0
    assert "optimizer.name" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["runs"], "no folder runs"),
        (["runs", "show", "nowhere"], "no run at nowhere"),
        (["runs", "show", "empty"], "is not a run directory"),
        (["runs", "compare", "a"], "one run is not a comparison"),
        (["report", "empty"], "is not a run directory"),
        (["models", "show", "llama3.2-1bb"], "unknown model `llama3.2-1bb`"),
        (["models", "show", "stories260k", "context=513"], "longer than the 512 tokens"),
        (["models", "show", "stories260k", "contxt=5"], "unknown setting `contxt`"),
        (["models", "show", "no/folder"], "no model at no/folder"),
    ],
)
def test_mistakes(here, capsys, words, problem):
    (here / "empty").mkdir()
    make_run(here / "a")
    assert main(words) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert problem in err
    assert len(err.splitlines()) <= 5


# ---- report


def test_a_report_is_written_into_the_run(here, capsys):
    run = make_run(here / "a")
    assert ask(capsys, "report", "a") == {"report": "a/report.html"}
    text = (run / "report.html").read_text()
    expected = preset_parameters()
    for part in (
        "done, 20 of 20 steps",
        f"{expected:,}",
        "Time by cause",
        "10.0 KiB",
        "stdlib",
        "argosy train tiny steps=20",
    ):
        assert part in text, part
    assert socket.gethostname() not in text


def preset_parameters() -> int:
    D, F, N, K, H, V, L = 64, 176, 4, 2, 16, 258, 2
    return V * D + D + L * (2 * D + 3 * D * F + 2 * D * N * H + 2 * D * K * H)


def test_a_report_is_made_of_what_is_left(here, capsys):
    run = make_run(here / "a")
    (run / "settings.yml").write_text("steps: [")
    shutil.rmtree(run / "checkpoints/20/weights")
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 25, "lo')
    assert main(["report", "a"]) == 0
    text = (run / "report.html").read_text()
    assert "damaged, 20 steps" in text
    assert "Checkpoints kept" in text
    assert ">Settings<" not in text


# ---- models

PUBLISHED = {  # numbers of parameters, as the released files count
    "llama2-7b": 6_738_415_616,
    "llama2-13b": 13_015_864_320,
    "llama2-70b": 68_976_648_192,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "llama3.1-8b": 8_030_261_248,
    "llama3.1-70b": 70_553_706_496,
    "llama3.1-405b": 405_853_388_800,
    "llama3.2-1b": 1_235_814_400,
    "llama3.2-3b": 3_212_749_824,
    "llama3.3-70b": 70_553_706_496,
    "mistral-7b-v0.1": 7_241_732_096,
    "mistral-7b-v0.3": 7_248_023_552,
    "smollm2-135m": 134_515_008,
    "smollm2-360m": 361_821_120,
    "smollm2-1.7b": 1_711_376_384,
    "tinyllama-1.1b": 1_100_048_384,
    "stories260k": 260_032,
}


def test_presets_have_the_published_parameters():
    assert {name: preset_config(name).parameters() for name in PUBLISHED} == PUBLISHED


# Half a second each; a sixth of them are built by default in tests/models/test_presets.py.
@pytest.mark.slow
@pytest.mark.parametrize("name", presets())
def test_presets_build_what_they_count(name):
    config = preset_config(name)
    assert parameter_count(abstract(config.build())) == config.parameters()


@pytest.mark.parametrize(
    ("name", "folder"), [("stories260k", "models/stories260k"), ("smollm2-135m", "models/smollm2")]
)
def test_presets_equal_the_released_config(name, folder):
    released = LlamaConfig.from_hub(json.loads((shared(folder) / "config.json").read_text()))
    same = {"head_size": preset_config(name).H, "preset": None}
    assert preset_config(name).model_copy(update=same) == released.model_copy(update=same | {"head_size": released.H})


@pytest.mark.slow
def test_a_model_is_described(capsys):
    document = ask(capsys, "models", "show", "llama3-8b", "context=4k")
    assert document["cache_bytes_per_token"] == {"float32": 262_144, "bfloat16": 131_072}  # 2 x 32 layers x 8 heads x 128
    assert document["cache_bytes"]["bfloat16"] == 4000 * 131_072
    assert document["weight_bytes"]["bfloat16"] == 16_060_522_496  # the released safetensors, without their headers
    assert sum(document["parts"].values()) == document["parameters"] == PUBLISHED["llama3-8b"]
    assert document["flops_per_token_at_1"] == pytest.approx(2 * (document["parameters"] - 128_256 * 4096), rel=1e-3)
    assert main(["models", "show", "mistral-7b-v0.1"]) == 0
    out = capsys.readouterr().out
    assert "q 4096x32x128  k 4096x8x128  v 4096x8x128  o 32x128x4096" in out
    assert "window 4,096" in out
    assert "512 MiB and 1.00 GiB at 32,768 tokens" in out
    sides = [line.rstrip()[-1] for line in out.splitlines() if line.startswith(("  ├", "  │ "))]
    widths = {len(line) for line in out.splitlines() if line.startswith(("  ├", "  │ "))}
    assert len(widths) == 1
    assert sides == ["┐", *"│" * (len(sides) - 2), "┘"]


def test_a_model_at_rest_is_described(capsys):
    document = ask(capsys, "models", "show", str(shared("models/stories260k")))
    assert document["parameters"] == 260_032
    assert document["family"] == "llama"


def test_models_are_listed(capsys):
    document = ask(capsys, "models")
    assert "llama" in document["families"]
    assert {p["name"] for p in document["presets"]} >= set(PUBLISHED)
    assert main(["models"]) == 0
    assert "405,853,388,800" in capsys.readouterr().out


def test_a_recipe_that_names_a_preset_is_reported(monkeypatch, tmp_path):
    from argosy.core.settings import yaml_layer
    from argosy.jobs import models

    (tmp_path / "mine.yml").write_text("model: stories260k\n")
    (tmp_path / "other.yml").write_text("model: {preset: llama3-8b}\n")
    monkeypatch.setattr(models, "recipes", lambda: ["mine", "other"])
    monkeypatch.setattr(models, "recipe_layers", lambda name: [yaml_layer(tmp_path / f"{name}.yml")])
    assert describe("stories260k")["recipes"] == ["mine"]


# ---- doctor


def well() -> dict[str, Any]:
    return {
        "versions": {"jax": "0.10.2"},
        "machine": {"memory_free_bytes": 8 << 30, "load": 0.1, "cores": 2},
        "jax": {"backend": "cpu", "devices": [{"kind": "cpu", "platform": "cpu", "memory_bytes": None}]},
        "gpus": [],
        "disk": {"here": {"path": "x", "free_bytes": 100 << 30, "total_bytes": 200 << 30}},
        "cache": {"folder": "x", "programs": 1, "bytes": 10, "writable": True, "most_bytes": most_bytes()},
        "huge_pages": {"system": "madvise", "state": "asked for"},
        "kernels": {"library": "x", "why_not": ""},
        "open_files": 4096,
        "clock_behind_s": 0.0,
        "variables": {},
    }


def findings(**changes: Any) -> list[doctor.Finding]:
    return [finding for check in doctor.CHECKS for finding in check(well() | changes)]


def test_a_machine_that_is_well_has_no_findings():
    assert findings() == []


GPU = {"gpus": ["NVIDIA H200"]}
NO_TPU = {"error": "Unable to initialize backend 'tpu'"}
NO_FLAG = {"error": "Unknown flag in XLA_FLAGS"}


@pytest.mark.parametrize(
    ("changes", "level", "problem", "hint"),
    [
        ({"versions": {"optax": "not installed"}}, "broken", "optax", "pip install"),
        ({"jax": NO_TPU, "variables": {"JAX_PLATFORMS": "tpu"}}, "broken", "tpu", "JAX_PLATFORMS=cpu"),
        ({"jax": NO_FLAG, "variables": {"XLA_FLAGS": "--xla_no"}}, "broken", "XLA_FLAGS", "--xla_no"),
        (GPU, "warning", "only sees the CPU", "--gpu"),
        (GPU | {"variables": {"CUDA_VISIBLE_DEVICES": ""}}, "warning", "only sees the CPU", "CUDA_VISIBLE_DEVICES"),
        (GPU | {"variables": {"JAX_PLATFORMS": "cpu"}}, "note", "unused", "unset"),
        ({"variables": {"JAX_DISABLE_JIT": "1"}}, "warning", "JAX_DISABLE_JIT", "unset"),
        ({"variables": {"XLA_FLAGS": "--xla_force_host_platform_device_count=8"}}, "note", "several devices", "unset"),
        ({"disk": {"here": {"path": "x", "free_bytes": 1 << 20}}}, "broken", "1.00 MiB", "free some space"),
        ({"disk": {"cache": {"path": "x", "free_bytes": 1 << 30}}}, "warning", "1.00 GiB", "free some space"),
        ({"cache": well()["cache"] | {"writable": False}}, "warning", "cannot be kept", "XDG_CACHE_HOME"),
        ({"machine": well()["machine"] | {"memory_free_bytes": 1 << 28}}, "warning", "256 MiB", "kills"),
        ({"machine": well()["machine"] | {"load": 8.0}}, "note", "load 8", "times"),
        ({"open_files": 256}, "warning", "256 open files", "ulimit"),
        ({"clock_behind_s": 1e6}, "warning", "clock", "set the clock"),
        ({"huge_pages": {"system": "never", "state": "off in the system"}}, "note", "10 to 18 %", "madvise"),
        ({"kernels": {"library": "", "why_not": "ARGOSY_NATIVE=0"}}, "note", "twice as long", "unset ARGOSY_NATIVE"),
        ({"kernels": {"library": "", "why_not": "there is no C++ compiler"}}, "note", "twice as long", "g++"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_found(changes, level, problem, hint):
    (finding,) = findings(**changes)
    assert finding.level == level
    assert problem in finding.problem
    assert hint in finding.hint


def test_doctor_exits_with_one_where_nothing_would_run(monkeypatch, capsys):
    monkeypatch.setattr(doctor.environment, "device_facts", lambda: {"error": "no backend"})
    monkeypatch.setattr(doctor.examine, "__defaults__", (doctor.environment.device_facts,))
    assert main(["doctor"]) == 1
    assert "broken: jax has no device: no backend" in capsys.readouterr().out


def test_doctor_in_a_process_of_its_own(tmp_path):
    variables = {**os.environ, "PYTHONPATH": str(Path(argosy.__file__).parents[1]), "XDG_CACHE_HOME": str(tmp_path)}
    # Or it would build the kernels, into a folder that is empty.
    variables |= {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "", "JAX_DEBUG_NANS": "1", "ARGOSY_NATIVE": "0"}
    command = [sys.executable, "-m", "argosy", "doctor", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, env=variables)
    document = json.loads(done.stdout)
    assert done.returncode == 0
    assert document["jax"]["backend"] == "cpu"
    programs = {"programs": 0, "bytes": 0, "writable": True, "most_bytes": most_bytes()}
    assert document["cache"] == {"folder": str(tmp_path / "argosy" / "xla")} | programs
    assert "JAX_DEBUG_NANS" in document["variables"]
    assert any("JAX_DEBUG_NANS" in f["problem"] for f in document["findings"])
    assert document["versions"]["python"] == ".".join(map(str, sys.version_info[:3]))


def test_a_platform_that_is_not_here_is_reported(monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "nowhere")
    facts = environment.device_facts()
    assert "nowhere" in facts["error"]


def test_a_device_that_hangs_does_not_hang_the_doctor(monkeypatch):
    monkeypatch.setattr(environment, "ASK", "import time; time.sleep(100_000)")
    assert "did not answer" in environment.device_facts(timeout_s=0.5)["error"]


LOOKING = ["argosy.jobs.history.listing", "argosy.jobs.doctor", "argosy.cli.verbs.runs", "argosy.cli.verbs.models"]


@pytest.mark.parametrize("module", LOOKING)
def test_looking_needs_no_jax(module):
    code = f"import sys, {module}; sys.exit('jax' in sys.modules)"
    variables = {**os.environ, "PYTHONPATH": str(Path(argosy.__file__).parents[1])}
    assert subprocess.run([sys.executable, "-c", code], env=variables).returncode == 0


def test_size_is_that_of_the_files(here):
    run = make_run(here / "a")
    files = [f for f in (run / "checkpoints/20").rglob("*") if f.is_file() and f.name != "manifest.json"]
    assert runs.size_bytes(run, 20) == sum(f.stat().st_size for f in files)


def test_a_cache_holds_as_many_tokens_as_its_window_and_states_in_float32():
    cached_layers = [Cached(3, 10, 0, None), Cached(2, 10, 0, 4), Cached(1, 0, 5, None)]
    assert cache_bytes(cached_layers, 8, 2) == 3 * 2 * 10 * 8 + 2 * 2 * 10 * 4 + 4 * 5
    assert cache_bytes(cached_layers, 3, 2) == 3 * 2 * 10 * 3 + 2 * 2 * 10 * 3 + 4 * 5
