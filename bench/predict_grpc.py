"""REST in JSON and gRPC side by side, on a model that costs nothing: what the protocols themselves cost.

    ./run python bench/predict_grpc.py [clients=1,16] [seconds=4] [columns=256] [rounds=2]

Starts a server with a model that doubles a row of so many float32, and asks it in turn over each protocol, closed loop. The clients
run on the same machine; that of gRPC is `grpc.aio`, which takes more of it than the bare sockets of REST's.
"""

import asyncio
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import grpc.aio
import jax.numpy as jnp
import numpy as np
from predict_http import measured

import argosy
from argosy.predict.grpc.messages import inference_proto


async def measured_grpc(address: str, message: bytes, clients: int, seconds: float) -> dict[str, float]:
    """As `predict_http.measured`."""
    times: list[float] = []
    begin = time.perf_counter()
    warm, end = begin + min(1.0, seconds / 4), begin + seconds

    async def client(call: grpc.aio.UnaryUnaryMultiCallable) -> None:
        while (start := time.perf_counter()) < end:
            await call(message, timeout=30)
            if start > warm:
                times.append(time.perf_counter() - start)

    async with grpc.aio.insecure_channel(address) as channel:
        call = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
        await asyncio.gather(*(client(call) for _ in range(clients)))
    times.sort()
    middle, last = times[len(times) // 2], times[int(0.99 * (len(times) - 1))]
    return {"a_second": len(times) / (end - warm), "p50": 1e3 * middle, "p99": 1e3 * last}


def requests(columns: int) -> tuple[bytes, bytes]:
    """The same row as JSON and as a message."""
    row = np.linspace(-1, 1, columns, dtype=np.float32)
    tensor = {"name": "x", "shape": [1, columns], "datatype": "FP32", "data": row.tolist()}
    message = inference_proto().messages["ModelInferRequest"](model_name="double", raw_input_contents=[row.tobytes()])
    message.inputs.add(name="x", shape=[1, columns], datatype="FP32")
    return json.dumps({"inputs": [tensor]}).encode(), message.SerializeToString()


def main(words: Sequence[str]) -> None:
    options = {"clients": "1,16", "seconds": "4", "columns": "256", "rounds": "2"} | dict(word.split("=", 1) for word in words)
    columns, seconds = int(options["columns"]), float(options["seconds"])
    text, message = requests(columns)
    with tempfile.TemporaryDirectory() as name:
        example = (jnp.zeros((1, columns)),)
        argosy.export(lambda x: {"y": 2 * x}, example, Path(name) / "double" / "1", platforms=["cpu"], batch="symbolic")
        command = [sys.executable, "-P", "-m", "argosy", "predict", name, "port=0", "grpc=0"]
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
            assert process.stderr is not None
            line = next(line for line in process.stderr if line.startswith("ready on "))
            url, address = line.split()[2], line.rpartition("://")[2].strip()
            path = "/v2/models/double/infer"
            print(f"a row of {columns} float32\n\n| protocol | clients | requests/s | p50 ms | p99 ms |")
            print("| --- | --- | --- | --- | --- |")
            for clients in map(int, options["clients"].split(",")):
                for _ in range(int(options["rounds"])):
                    for kind in ("REST, JSON", "gRPC, bytes"):
                        if kind.startswith("REST"):
                            load = measured(url, path, [text], clients, seconds)
                        else:
                            load = asyncio.run(measured_grpc(address, message, clients, seconds))
                        figures = f"{load['a_second']:,.0f} | {load['p50']:.1f} | {load['p99']:.1f}"
                        print(f"| {kind} | {clients} | {figures} |", flush=True)
            process.terminate()


if __name__ == "__main__":
    main(sys.argv[1:])
