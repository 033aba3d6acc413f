"""Sentence vectors over HTTP on a CPU: `argosy predict` beside FastAPI and LitServe with ONNX Runtime, in turn. Linux only.

    python3 -m venv peers
    peers/bin/pip install torch transformers onnx onnxruntime litserve fastapi uvicorn httptools uvloop tokenizers
    ./run python bench/predict_peers.py MINILM peers/bin/python [turns=3] [seconds=8] [clients=1,16]

MINILM is a folder of the sentence encoder. It is exported to ONNX with its pooling, by torch, and to a bundle. Each server takes a text
of 20 tokens and answers with 384 numbers as JSON; each has the machine for itself but for the client (`bench/predict_http.py`). ONNX
Runtime has both cores. FastAPI computes each request alone in a thread; LitServe batches up to 16 for 5 ms. CPU: of the server, for
each request.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from predict_http import measured, sentences, v2_request

PORT, TICK = 8767, os.sysconf("SC_CLK_TCK")
EXPORT = """
import sys, torch
from transformers import BertModel

class Encoder(torch.nn.Module):
    def __init__(self, folder):
        super().__init__()
        self.bert = BertModel.from_pretrained(folder, attn_implementation="eager").eval()

    def forward(self, ids, mask):
        hidden = self.bert(input_ids=ids, attention_mask=mask).last_hidden_state
        m = mask[:, :, None].to(hidden.dtype)
        v = (hidden * m).sum(1) / m.sum(1)
        return v / v.norm(dim=1, keepdim=True)

folder, out = sys.argv[1:]
ids, mask = torch.randint(1000, 2000, (2, 20)), torch.ones(2, 20, dtype=torch.int64)
axes = {"ids": {0: "b", 1: "t"}, "mask": {0: "b", 1: "t"}, "vector": {0: "b"}}
torch.onnx.export(Encoder(folder), (ids, mask), out, input_names=["ids", "mask"], output_names=["vector"], dynamic_axes=axes,
                  dynamo=False, opset_version=17)
"""
COMMON = """
import sys
import numpy as np, onnxruntime
from tokenizers import Tokenizer
folder, model, port = sys.argv[1], sys.argv[2], int(sys.argv[3])
tokenizer = Tokenizer.from_file(folder + "/tokenizer.json")
tokenizer.enable_padding()
tokenizer.enable_truncation(256)
session = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])

def vectors(texts):
    found = tokenizer.encode_batch(texts)
    ids, mask = (np.asarray([getattr(one, name) for one in found], np.int64) for name in ("ids", "attention_mask"))
    return session.run(None, {"ids": ids, "mask": mask})[0]
"""
FASTAPI = COMMON + """
import uvicorn
from fastapi import FastAPI
from pydantic import BaseModel

class Asked(BaseModel):
    text: str

app = FastAPI()

@app.get("/health")
def health():
    return {}

@app.post("/predict")
def predict(asked: Asked):
    return {"embedding": vectors([asked.text])[0].tolist()}

uvicorn.run(app, host="127.0.0.1", port=port, log_level="warning")
"""
LITSERVE = COMMON + """
import litserve

class API(litserve.LitAPI):
    def setup(self, device):
        pass

    def decode_request(self, request):
        return request["text"]

    def predict(self, texts):
        return vectors(list(texts))

    def encode_response(self, output):
        return {"embedding": output.tolist()}

if __name__ == "__main__":
    server = litserve.LitServer(API(max_batch_size=16, batch_timeout=0.005), accelerator="cpu", workers_per_device=1)
    server.run(port=port, host="127.0.0.1", generate_client_file=False, log_level="warning")
"""


@contextmanager
def running(words: Sequence[str], path: str) -> Iterator[int]:
    """The process of a server that answers, while the block runs."""
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
    start = time.perf_counter()
    try:
        while process.poll() is None and time.perf_counter() - start < 300:
            with suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{PORT}{path}", timeout=5):
                yield process.pid
                return
            time.sleep(0.1)
        raise SystemExit(f"{words[0]} did not start")
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, 15)
        process.wait(60)


def cpu_seconds(group: int) -> float:
    """Of all processes of a session."""
    total = 0.0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            fields = stat.read_text(encoding="utf-8").rpartition(")")[2].split()
            if int(fields[3]) == group:
                total += (int(fields[11]) + int(fields[12])) / TICK
    return total


def main(words: Sequence[str]) -> None:
    options = {"turns": "3", "seconds": "8", "clients": "1,16"} | dict(word.split("=", 1) for word in words if "=" in word)
    folder, python = [word for word in words if "=" not in word]
    with tempfile.TemporaryDirectory() as work:
        onnx = f"{work}/model.onnx"
        subprocess.run([python, "-c", EXPORT, folder, onnx], check=True, capture_output=True)
        for name, text in (("fastapi.py", FASTAPI), ("lit.py", LITSERVE)):
            Path(work, f"run_{name}").write_text(text, encoding="utf-8")
        argosy = [sys.executable, "-P", "-m", "argosy"]
        subprocess.run([*argosy, "export", folder, f"{work}/models/minilm/1"], check=True, capture_output=True)
        plain = [json.dumps({"text": text}).encode() for text in sentences(64)]
        peers = {
            "argosy predict": ([*argosy, "predict", f"{work}/models", f"port={PORT}"], "/v2/health/ready", "/v2/models/minilm/infer"),
            "FastAPI, ONNX Runtime": ([python, f"{work}/run_fastapi.py", folder, onnx, str(PORT)], "/health", "/predict"),
            "LitServe, ONNX Runtime": ([python, f"{work}/run_lit.py", folder, onnx, str(PORT)], "/health", "/predict"),
        }
        loads: dict[tuple[str, int], list[tuple[float, ...]]] = {}
        for turn in range(int(options["turns"])):
            for name, (command, health, path) in list(peers.items())[:: 1 if turn % 2 == 0 else -1]:
                bodies = [v2_request(text, False) for text in sentences(64)] if "argosy" in name else plain
                with running(command, health) as group:
                    for clients in map(int, options["clients"].split(",")):
                        before, start = cpu_seconds(group), time.perf_counter()
                        load = measured(f"http://127.0.0.1:{PORT}", path, bodies, clients, float(options["seconds"]))
                        spent = (cpu_seconds(group) - before) / (load["a_second"] * (time.perf_counter() - start))
                        loads.setdefault((name, clients), []).append((load["a_second"], load["p50"], load["p99"], 1e3 * spent))
        print("| server | clients | requests/s | p50 ms | p99 ms | CPU ms a request |\n| --- | --- | --- | --- | --- | --- |")
        for (name, clients), rows in sorted(loads.items(), key=lambda pair: (pair[0][1], pair[0][0])):
            rate, p50, p99, spent = (statistics.median(column) for column in zip(*rows))
            print(f"| {name} | {clients} | {rate:,.0f} | {p50:.1f} | {p99:.1f} | {spent:.1f} |")


if __name__ == "__main__":
    main(sys.argv[1:])
