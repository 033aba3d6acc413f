"""`argosy serve`: its flags, what it refuses before it loads a model, and its life as a process."""

import asyncio
import contextlib
import json
import os
import shutil
import signal
import socket
import ssl
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest
from helpers import shared
from serve.conftest import SIZES, listening, serving

from argosy.cli import main
from argosy.cli.flags import ANSWERS, OBJECTS, RUN_BATCH, SERVE, SETTINGS, SWITCHES, Flags, translate_flags
from argosy.core.errors import ArgosyError, BadInput, SettingsError
from argosy.core.settings import Choice, read_settings, words_layer
from argosy.data.chat.published import PUBLISHED
from argosy.data.tokenizers.byte import ByteTokenizer
from argosy.infer.lm import LM
from argosy.infer.settings import SPECULATIVE, EngineSettings, NGram
from argosy.jobs.api import draft_of
from argosy.serve import run
from argosy.serve.sampling import default_sampling
from argosy.serve.settings import ServeSettings
from argosy.web.process import bound_socket

SPECULATION = Choice(SPECULATIVE, tag="method")


def test_flags_of_vllm_are_settings():
    words = "port=1 --host ::1 --max-model-len=64 --enable-prefix-caching --max_num_seqs 3 --enable-chunked-prefill"
    expected = ["port=1", "host=::1", "engine.context=64", "engine.reuse=true", "engine.slots=3"]
    assert translate_flags(words.split()) == expected
    assert translate_flags(["--kv-cache-memory-bytes", "2000000"]) == ["engine.memory=2000000"]
    assert translate_flags(["--data-parallel-size", "2", "-tp=4"]) == ["copies=2", "tensor=4"]
    assert translate_flags(["-dp", "2", "--tensor_parallel_size", "4"]) == ["copies=2", "tensor=4"]
    with pytest.raises(BadInput, match="data-parallel-size") as error:
        translate_flags(["--data-parallel-size=2"], RUN_BATCH)
    assert "copies=N" in (error.value.hint or "")


def test_the_reasoning_parser_has_the_flag_and_names_of_vllm(lm: LM):
    settings = read_settings(ServeSettings, words_layer(translate_flags(["--reasoning-parser", "deepseek_r1"]))).value
    assert settings.reasoning_parser == "deepseek_r1"
    with pytest.raises(ArgosyError, match="glm45"):
        read_settings(ServeSettings, words_layer(["reasoning_parser=glm45"]))
    settings = settings.model_copy(update={"stored_responses": 2, "engine": SIZES, "warm_up": False})
    service = run.build_service(lm, "tiny", settings, None)
    service.front.close()
    assert (service.reasoning, service.store is not None and service.store.most) == ("deepseek_r1", 2)


@pytest.mark.parametrize("flags", [SERVE, RUN_BATCH])
def test_the_type_of_the_cache_has_the_flag_of_vllm(flags: Flags):
    def read(*words: str) -> str | None:
        return read_settings(ServeSettings, words_layer(translate_flags(list(words), flags))).value.engine.cache_dtype

    values = {"auto": None, "int8": "int8", "fp8": "fp8_e4m3", "fp8_e4m3": "fp8_e4m3", "fp8_e5m2": "fp8_e5m2"}
    assert {value: read(f"--kv-cache-dtype={value}") for value in values} == values
    assert read("--kv-cache-dtype", "fp8") == "fp8_e4m3"
    with pytest.raises(BadInput, match="fp8_inc is not supported"):
        read("--kv-cache-dtype", "fp8_inc")
    with pytest.raises(BadInput, match="--calculate-kv-scales") as error:
        read("--calculate-kv-scales")
    assert "its own scale" in str(error.value)
    with pytest.raises(SettingsError, match=r"engine\.cache_dtype"):
        read_settings(ServeSettings, words_layer(["kv_cache_dtype=fp8"]))


def test_the_flags_of_adapters():
    words = ["--enable-lora", "--max-loras", "2", "--lora-modules", "sql=/a b", '{"name": "my.one", "path": "/c"}', "port=1"]
    settings = read_settings(ServeSettings, words_layer(translate_flags(words))).value
    assert settings.lora_modules == {"sql": "/a b", "my.one": "/c"}
    assert (settings.engine.lora.enabled, settings.engine.lora.adapters, settings.port) == (True, 2, 1)
    with pytest.raises(BadInput, match="--lora-modules") as error:
        translate_flags(["--lora-modules", '{"name": "x"}'])
    assert "NAME=FOLDER" in str(error.value)
    with pytest.raises(SettingsError, match="adapters: no effect without `enabled`"):
        read_settings(ServeSettings, words_layer(["engine.lora.adapters=2"]))


# The options of vLLM's engine arguments and server that its documentation, recipes and deployments use most, and one value of each.
USED = """
model=m host=h port=1 served-model-name=m api-key=k dtype=bfloat16 max-model-len=64 gpu-memory-utilization=0.9 tensor-parallel-size=1
pipeline-parallel-size=1 data-parallel-size=1 max-num-seqs=8 max-num-batched-tokens=64 quantization=w8 kv-cache-dtype=fp8
trust-remote-code enforce-eager enable-prefix-caching enable-chunked-prefill chat-template=chatml enable-auto-tool-choice
tool-call-parser=hermes reasoning-parser=qwen3 enable-lora max-lora-rank=8 seed=1 tokenizer=t download-dir=d swap-space=4
load-format=auto revision=main disable-log-requests disable-log-stats limit-mm-per-prompt={} distributed-executor-backend=mp
hf-overrides={} generation-config=auto cpu-offload-gb=4 enable-expert-parallel task=embed block-size=16 allowed-origins=[]
uvicorn-log-level=info rope-scaling={} device=cpu compilation-config=3
"""


@pytest.mark.parametrize("option", USED.split())
def test_the_options_of_vllm_are_taken_or_answered(option: str):
    """As a flag each is a setting, or is answered with what to do; as a setting it is one of ours too, or is answered."""
    name, equals, value = option.partition("=")
    try:
        words = translate_flags([f"--{name}", value] if equals else [f"--{name}"])
        read_settings(ServeSettings, words_layer(["engine.lora.enabled=true", *words]))
    except BadInput as error:
        assert error.hint == ANSWERS[f"--{name}"]  # noqa: PT017
    key = name.replace("-", "_")
    if key in ServeSettings.model_fields:
        return
    with pytest.raises(SettingsError, match=f"unknown setting `{key}`") as refused:
        read_settings(ServeSettings, words_layer([f"{key}={value or 'true'}"]))
    hint = str(refused.value).rpartition("hint: ")[2]
    assert hint.startswith("did you mean `") or hint in ANSWERS.values() or hint == "leave it out: it is always so here"


def test_a_name_that_is_nearly_one_of_vllms_is_answered_and_others_are_listed_by_likeness():
    with pytest.raises(SettingsError) as near:
        read_settings(ServeSettings, words_layer(["max_lora_rnk=3"]))
    assert "did you mean `engine.lora.rank`?" in str(near.value)
    with pytest.raises(SettingsError) as far:
        read_settings(ServeSettings, words_layer(["log_level=x"]))
    listed = str(far.value).rpartition("known names are ")[2]
    assert listed.startswith("log_requests, lora_modules, ")
    assert listed.endswith("more; `--help` lists all")


def test_a_server_imports_nothing_of_training():
    """Settings of runs import every objective, reward and environment: 40 files that a start would read for nothing."""
    code = (
        "import sys, argosy.jobs.api, argosy.serve.run\n"
        "print([name for name in sys.modules if name.startswith(('argosy.run', 'argosy.rl', 'argosy.train'))])"
    )
    completed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert completed.stdout.strip() == "[]"


def test_a_chat_template_is_set_by_name(lm: LM, tmp_path: Path):
    def served(name: str) -> LM:
        fresh = LM(lm.config, lm.module, ByteTokenizer())
        run.set_chat_template(fresh, name)
        return fresh

    (tmp_path / "own.jinja").write_text("{{ messages[0].content }}!")
    for name, text in (("zephyr", PUBLISHED["zephyr"]), (str(tmp_path / "own.jinja"), "{{ messages[0].content }}!")):
        with serving(served(name)) as service:
            assert service.template(None, None) == text
    with pytest.raises(BadInput, match="no chat template `chatlm`") as error:
        served("chatlm")
    assert error.value.hint == "did you mean `chatml`?"


def test_every_flag_names_a_setting():
    switches = [word.partition("=")[0] for words in SWITCHES.values() for word in words]
    for name in [*SETTINGS.values(), *switches]:
        kind = ServeSettings
        for part in name.split("."):
            assert part in kind.model_fields, name
            kind = kind.model_fields[part].annotation  # pyright: ignore[reportAssignmentType]
    assert not set(SETTINGS) & set(ANSWERS)


@pytest.mark.parametrize(
    "config, expected",
    [
        ({"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4}, {"method": "ngram", "tokens": 3, "lookup_max": 4}),
        ({"num_speculative_tokens": 2, "method": "mtp"}, {"method": "mtp", "tokens": 2}),
        ({"model": "runs/a b", "num_speculative_tokens": 2}, {"method": "draft_model", "model": "runs/a b", "tokens": 2}),
    ],
    ids=["ngram", "mtp", "draft model without a method"],
)
def test_vllms_speculative_config_is_a_group_of_settings(config: dict, expected: dict):
    for flags in (SERVE, RUN_BATCH):
        words = translate_flags(["--speculative-config", json.dumps(config)], flags)
        speculative = read_settings(ServeSettings, words_layer(words)).value.engine.speculative
        assert {"method": SPECULATION.name_of(speculative)} | speculative.model_dump(include=set(expected)) == expected
    assert set(OBJECTS["--speculative-config"][1].values()) == {"method", *(n for c in SPECULATIVE.values() for n in c.model_fields)}


@pytest.mark.parametrize(
    "words, problem, hint",
    [
        (["--speculative-config"], "needs a value", "engine.speculative=VALUE"),
        (["--speculative-config=ngram"], "is no JSON object", "num_speculative_tokens"),
        (["--speculative-config", '{"num_speculative_token": 3}'], "`num_speculative_token` is not", "num_speculative_tokens"),
        (["--port"], "--port needs a value", "port=VALUE"),
        (["--port", "--host", "x"], "--port needs a value", "port=VALUE"),
        (["--trust-remote-code"], "no such option: --trust-remote-code", "no code of a model is ever run"),
        (["--warp=9"], "no such option: --warp", "`argosy serve --help` lists the settings"),
        (["--log-level=9"], "no such option: --log-level", "did you mean `--uvicorn-log-level`?"),
        (["--max-modl-len", "9"], "no such option: --max-modl-len", "did you mean `--max-model-len`?"),
        (["--web=false"], "no such option: --web", "settings have no dashes: `web=false`"),
        (["--engine.slots", "3"], "no such option: --engine.slots", "settings have no dashes: `engine.slots=VALUE`"),
    ],
)
def test_other_flags_are_answered(words: list[str], problem: str, hint: str):
    with pytest.raises(BadInput, match=problem) as error:
        translate_flags(words)
    assert hint in (error.value.hint or "")


def test_strangers_cannot_use_a_server_by_accident(tmp_path: Path):
    for host in ("127.0.0.1", "::1", "localhost"):
        run.check_server(ServeSettings(host=host))
    for host in ("0.0.0.0", "::", "192.168.0.3", "example.org", ""):
        with pytest.raises(BadInput, match="everybody on the network"):
            run.check_server(ServeSettings(host=host))
        run.check_server(ServeSettings(host=host, api_key="k"))
        run.check_server(ServeSettings(host=host, open=True))
    with pytest.raises(BadInput, match="both"):
        run.check_server(ServeSettings(tls_key="x"))
    with pytest.raises(BadInput, match="no file"):
        run.check_server(ServeSettings(tls_key=str(tmp_path / "x"), tls_certificate=str(tmp_path / "y")))


def test_an_address_in_use_is_a_mistake():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        with pytest.raises(BadInput, match="cannot listen on 127"):
            bound_socket("127.0.0.1", listener.getsockname()[1])
    with pytest.raises(BadInput, match="cannot listen"):
        bound_socket("no such host", 8000)


def test_answers_do_not_wait_for_acknowledgements():
    """Without TCP_NODELAY, the first token on a connection that is kept comes 40 ms late."""

    async def delays() -> int:
        no_delay = asyncio.get_running_loop().create_future()

        def accepted(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            connection = writer.get_extra_info("socket")
            no_delay.set_result(connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
            writer.close()

        with bound_socket("127.0.0.1", 0) as listener:
            async with await asyncio.start_server(accepted, sock=listener):
                _, writer = await asyncio.open_connection(*listener.getsockname())
                writer.close()
                return await no_delay

    assert asyncio.run(delays()) != 0


def test_defaults_come_from_the_generation_config():
    assert default_sampling({}) == {"temperature": 1.0}
    generation_config = {"temperature": 0.6, "top_p": 0.9, "top_k": None, "max_new_tokens": 3}
    assert default_sampling(generation_config) == {"temperature": 0.6, "top_p": 0.9}
    with pytest.raises(BadInput, match="generation config"):
        default_sampling({"top_p": 3})


def test_mistakes_are_answered(capsys: pytest.CaptureFixture[str]):
    assert main(["serve", "x", "porte=3"]) == 2
    assert "did you mean `port`" in capsys.readouterr().err
    assert main(["serve", "x", "--port", "a"]) == 2
    assert main(["serve", "x", "host=0.0.0.0"]) == 2
    assert "open=true" in capsys.readouterr().err
    assert main(["serve", "x", "max_model_len=3"]) == 2
    assert "engine.context" in capsys.readouterr().err
    assert main(["serve"]) == 2


def test_settings_are_documented():
    text = (Path(__file__).parents[2] / "docs" / "guides" / "serving.md").read_text(encoding="utf-8")
    limits = read_settings(ServeSettings, words_layer([])).value.limits
    assert not [name for name in ServeSettings.model_fields if f"`{name}`" not in text]
    assert not [name for name in type(limits).model_fields if f"`limits.{name}`" not in text]


def test_fields_are_documented():
    from argosy.serve.anthropic.messages import Messages
    from argosy.serve.openai.fields import ChatFields, CompletionFields
    from argosy.serve.openai.responses import Responses
    from argosy.web.fields import IGNORED, NEUTRAL

    text = (Path(__file__).parents[2] / "docs" / "guides" / "serving.md").read_text(encoding="utf-8")
    fields = {*IGNORED, *NEUTRAL, *ChatFields.model_fields, *CompletionFields.model_fields}
    for kind in (Responses, Messages):
        fields |= {*kind.ignored, *kind.neutral, *kind.model_fields}
    assert not sorted(name for name in fields if f"`{name}`" not in text)


def test_metrics_are_documented(lm: LM):
    text = (Path(__file__).parents[2] / "docs" / "guides" / "serving.md").read_text(encoding="utf-8")
    with serving(lm, sizes=EngineSettings(context=64, pages=4, speculative=NGram())) as service:
        names = [metric.name for metric in service.front.metrics.registry.collect()]
    assert not [name for name in names if f"`{name}" not in text]


def test_a_certificate_makes_it_https(lm: LM, tmp_path: Path):
    if shutil.which("openssl") is None:
        pytest.skip("no openssl to make a certificate with")
    key, certificate = tmp_path / "key.pem", tmp_path / "cert.pem"
    words = "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=localhost"
    names = ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(certificate)]
    subprocess.run(["openssl", *words.split(), *names], check=True, capture_output=True)
    with (
        serving(lm) as service,
        listening(service, tls_certificate=str(certificate), tls_key=str(key)) as address,
    ):
        assert address.startswith("https://127.0.0.1:")
        trusted = ssl.create_default_context(cafile=str(certificate))
        assert httpx.get(f"{address}/health", verify=trusted).status_code == 200


@pytest.mark.slow
def test_the_command_says_when_it_is_ready_and_drains_on_sigterm():
    model = str(shared("models/stories260k"))
    words = [sys.executable, "-P", "-m", "argosy", "serve", model, "--port", "0", "name=tales", "warm_up=false"]
    with subprocess.Popen(words, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True) as process:
        try:
            assert process.stderr is not None
            stderr_lines = []
            for line in process.stderr:
                stderr_lines.append(line)
                if line.startswith("ready on "):
                    break
            url = stderr_lines[-1].split()[-1]
            story = httpx.post(f"{url}/v1/completions", json={"prompt": "Once upon a time", "temperature": 0}, timeout=60)
            assert story.json()["choices"][0]["text"].startswith(", there was a little girl")
            body = {"prompt": "Once", "max_tokens": 400, "stream": True, "ignore_eos": True, "model": "tales"}
            with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as answer:
                lines = answer.iter_lines()
                next(lines)
                process.send_signal(signal.SIGTERM)
                rest = list(lines)
            assert rest[-2:] == ["data: [DONE]", ""], "what ran was finished"
            assert process.wait(60) == 143
        finally:
            with contextlib.suppress(OSError):
                process.kill()
    assert any("temperature=1.0" in line for line in stderr_lines)
    assert "cache: 16,384 tokens of 32 sequences of at most 512, 20.0 MiB\n" in stderr_lines


@pytest.mark.slow
def test_a_second_start_of_the_command_compiles_nothing_and_answers_alike(tmp_path: Path):
    words = [sys.executable, "-P", "-m", "argosy", "serve", str(shared("models/stories260k")), "--port", "0"]
    words += ["engine.slots=1", "engine.context=64", "engine.budget=32", "engine.budget_decoding=32"]
    env = {**os.environ, "XDG_CACHE_HOME": str(tmp_path), "JAX_LOG_COMPILES": "1"}
    answers, compiled = [], []
    for _ in range(2):
        with subprocess.Popen(words, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, env=env) as process:
            assert process.stderr is not None
            lines = []
            for line in process.stderr:
                lines.append(line)
                if line.startswith("ready on "):
                    break
            body = {"prompt": "Once upon a time", "temperature": 0}
            story = httpx.post(f"{lines[-1].split()[-1]}/v1/completions", json=body, timeout=60)
            answers.append(story.json()["choices"][0]["text"])
            process.terminate()
            lines += process.stderr.readlines()
        compiled.append([line for line in lines if "Finished XLA compilation" in line])
    assert answers[0] == answers[1] != ""
    assert compiled[0]
    assert not compiled[1], "not while it starts, and not by the first request"


def test_a_draft_model_is_loaded_by_its_name_and_has_the_models_tokenizer(lm: LM, tmp_path: Path):
    lm.save(tmp_path / "draft")
    words = ["engine.context=64", "engine.slots=1", "engine.pages=8", "engine.page=8", "warm_up=false", "engine.speculative.tokens=2"]
    words += ["engine.speculative=draft_model", f"engine.speculative.model={tmp_path / 'draft'}"]
    settings = read_settings(ServeSettings, words_layer(words)).value
    draft = draft_of(settings.engine)
    assert draft is not None
    service = run.build_service(lm, "tiny", settings, None, draft)
    try:
        assert service.front.engine.speculation is not None
    finally:
        service.front.close()
    draft.tokenizer = SimpleNamespace(encode=lambda text: [1, 2])
    with pytest.raises(BadInput, match="another tokenizer"):
        run.build_service(lm, "tiny", settings, None, draft)
    assert draft_of(EngineSettings(speculative=NGram())) is None
