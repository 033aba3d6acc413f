"""How long `argosy predict` takes until it is ready, and whether its first request is as fast as the hundredth. On Linux.

    ./run python bench/predict_start.py MODEL [turns=5]

MODEL is exported to a bundle. Cold: nothing is compiled. Warm: programs are on disk. Caches are in a folder of their own. CPU time
stands beside wall time, since machines are shared; resident memory when the server is ready. Requests are sentences of 20 tokens by
one client, each on the same connection.
"""

import http.client
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from predict_http import sentences, v2_request

TICKS = os.sysconf("SC_CLK_TCK")


def started(repository: str, caches: Path) -> tuple[float, ...]:
    """Wall and CPU seconds until ready, MB, and milliseconds of the first request and of the median of the next hundred."""
    start = time.perf_counter()
    command = [sys.executable, "-P", "-m", "argosy", "predict", repository, "port=0"]
    env = {**os.environ, "XDG_CACHE_HOME": str(caches)}
    with subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, env=env) as process:
        assert process.stderr is not None
        log = []
        for line in process.stderr:
            log.append(line)
            if match := re.match(r"ready on http://([\d.]+):(\d+)", line):
                break
        else:
            raise SystemExit("".join(log))
        wall = time.perf_counter() - start
        fields = Path(f"/proc/{process.pid}/stat").read_text().rsplit(")", 1)[1].split()
        status = dict(line.split(":", 1) for line in Path(f"/proc/{process.pid}/status").read_text().splitlines())
        client, times = http.client.HTTPConnection(match[1], int(match[2]), timeout=60), []
        for text in sentences(101):
            begin = time.perf_counter()
            client.request("POST", "/v2/models/model/infer", v2_request(text, False), {"Content-Type": "application/json"})
            answer = client.getresponse()
            assert answer.status == 200, answer.read()
            answer.read()
            times.append(1e3 * (time.perf_counter() - begin))
        client.close()
        process.terminate()
    cpu = (int(fields[11]) + int(fields[12])) / TICKS
    return wall, cpu, int(status["VmRSS"].split()[0]) / 1000, times[0], statistics.median(times[1:])


def main(words: Sequence[str]) -> None:
    turns = int(dict(word.split("=") for word in words if "=" in word).get("turns", 5))
    model = next(word for word in words if "=" not in word)
    print("| start | until ready, s | CPU s | resident, MB | first request, ms | median of 100, ms |")
    print("| --- | --- | --- | --- | --- | --- |")
    with tempfile.TemporaryDirectory() as folder:
        export = [sys.executable, "-P", "-m", "argosy", "export", model, f"{folder}/models/model/1"]
        subprocess.run(export, check=True, capture_output=True)
        caches = Path(folder) / "caches"

        def row(name: str, starts: list[tuple[float, ...]]) -> None:
            wall, cpu, resident, first, rest = (statistics.median(column) for column in zip(*starts))
            least = f" ({min(times[0] for times in starts):.1f} at least)" if len(starts) > 1 else ""
            print(f"| {name} | {wall:.1f}{least} | {cpu:.1f} | {resident:,.0f} | {first:.1f} | {rest:.1f} |", flush=True)

        row("cold", [started(f"{folder}/models", caches)])
        row("warm", [started(f"{folder}/models", caches) for _ in range(turns)])
        shutil.rmtree(caches, ignore_errors=True)


if __name__ == "__main__":
    main(sys.argv[1:])
