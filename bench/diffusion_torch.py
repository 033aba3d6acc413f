"""A small Flux and a small UNet beside diffusers on torch (eager): drawing and a training step, in turn. Linux.

    ./run python bench/diffusion_torch.py .reference/bin/python [turns=3] [steps=8]

Both compute in float32 on all cores. Drawing: two images of `steps` evaluations, without text encoders and autoencoder. Training: the
squared error of a batch of two, its gradient, AdamW. Each process warms up and then takes the median of its runs; the table has the
median over turns, and CPU milliseconds. `./run reference` builds .reference.
"""

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RUNS = 5
SIDE, TEXT, ROWS = 32, 64, 2
FLUX = {"heads": 6, "head": 32, "axes": (8, 12, 12), "layers": 3, "single": 6, "channels": 16, "text": 256, "pooled": 128}
UNET = {"channels": 4, "widths": (64, 128), "layers": 2, "heads": 4, "text": 128}

TORCH = """
import json, sys, time
import torch
sys.path.insert(0, sys.argv[2])
from diffusion_torch import FLUX, RUNS, ROWS, SIDE, TEXT, UNET, timed

kind, steps = sys.argv[1], int(sys.argv[3])
torch.manual_seed(0)
if kind == "flux":
    from diffusers import FluxTransformer2DModel
    f = FLUX
    model = FluxTransformer2DModel(in_channels=4 * f["channels"], num_layers=f["layers"], num_single_layers=f["single"],
        attention_head_dim=f["head"], num_attention_heads=f["heads"], joint_attention_dim=f["text"],
        pooled_projection_dim=f["pooled"], guidance_embeds=False, axes_dims_rope=f["axes"])
    side = SIDE // 2
    x = torch.randn(ROWS, side * side, 4 * f["channels"])
    text, pooled = torch.randn(ROWS, TEXT, f["text"]), torch.randn(ROWS, f["pooled"])
    rows, columns = torch.meshgrid(torch.arange(side), torch.arange(side), indexing="ij")
    ids = torch.stack([torch.zeros(side, side), rows, columns], -1).reshape(-1, 3)
    more = dict(encoder_hidden_states=text, pooled_projections=pooled, img_ids=ids, return_dict=False)
    more["txt_ids"] = torch.zeros(TEXT, 3)
    run = lambda x, t: model(hidden_states=x, timestep=t.expand(ROWS), **more)[0]
else:
    from diffusers import UNet2DConditionModel
    u = UNET
    model = UNet2DConditionModel(sample_size=SIDE, in_channels=u["channels"], out_channels=u["channels"],
        block_out_channels=u["widths"], norm_num_groups=32, layers_per_block=u["layers"],
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"), attention_head_dim=u["heads"], cross_attention_dim=u["text"])
    x, text = torch.randn(ROWS, u["channels"], SIDE, SIDE), torch.randn(ROWS, TEXT, u["text"])
    run = lambda x, t: model(x, 1000 * t, text, return_dict=False)[0]
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
target = torch.randn_like(x)

def draw():
    with torch.no_grad():
        y = x
        for i in range(steps):
            y = y - run(y, torch.tensor(1 - i / steps)) / steps

def train():
    optimizer.zero_grad()
    ((run(x, torch.tensor(0.5)) - target) ** 2).mean().backward()
    optimizer.step()

print(json.dumps({"parameters": sum(p.numel() for p in model.parameters()), "draw": timed(draw), "train": timed(train)}))
"""


def timed(work: Callable[[], Any]) -> tuple[float, float]:
    """Median wall seconds and mean CPU seconds of RUNS calls, after two."""
    work()
    work()
    walls, begin = [], time.process_time()
    for _ in range(RUNS):
        start = time.perf_counter()
        work()
        walls.append(time.perf_counter() - start)
    return statistics.median(walls), (time.process_time() - begin) / RUNS


def ours(kind: str, steps: int) -> dict[str, Any]:
    """The figures of this package, in this process."""
    import jax
    import jax.numpy as jnp
    import optax

    from argosy.infer.denoise.plan import initial_state, pad_plan, sample
    from argosy.infer.denoise.samplers.euler import euler
    from argosy.infer.denoise.settings import SamplerSettings
    from argosy.models.diffusion.base import Conditions
    from argosy.models.diffusion.flux import FluxConfig
    from argosy.models.diffusion.unet import UNetConfig
    from argosy.models.parts.stack import Unroll
    from argosy.models.parts.stack.addresses import layer_addresses
    from argosy.models.parts.weight import fill, merge, parameter_count, split

    if kind == "flux":
        f = FLUX
        config: Any = FluxConfig(
            channels=f["channels"], layers=f["layers"], single_layers=f["single"], heads=f["heads"], head_size=f["head"],
            axes=f["axes"], text_width=f["text"], pooled_width=f["pooled"], text_tokens=TEXT,
        )  # fmt: skip
    else:
        config = unet_config(UNetConfig)
    model = config.build(Unroll())
    fill(model, jax.random.key(0), addresses=layer_addresses(model))
    graph, leaves = split(model)
    draws = jax.random.normal
    x = draws(jax.random.key(1), (ROWS, SIDE, SIDE, config.channels))
    target = draws(jax.random.key(2), x.shape)
    width = FLUX["text"] if kind == "flux" else UNET["text"]
    text = draws(jax.random.key(3), (ROWS, TEXT, width))
    pooled = draws(jax.random.key(4), (ROWS, FLUX["pooled"])) if kind == "flux" else None
    conditions = Conditions(text=text, pooled=pooled)
    plan = euler(SamplerSettings(spacing="trailing"), steps)

    def predict(leaves: Any, x: Any, t: Any) -> Any:
        return merge(graph, leaves)(x, jnp.full(ROWS, t, jnp.float32), conditions)

    @jax.jit
    def draw(leaves: Any, x: Any) -> Any:
        return sample(lambda x, t, _: predict(leaves, x, t), pad_plan(plan), initial_state(plan, x), evaluations=steps)

    optimizer = optax.adamw(1e-4)

    @jax.jit
    def train(leaves: Any, state: Any) -> Any:
        gradient = jax.grad(lambda w: jnp.mean((predict(w, x, 500.0) - target) ** 2))(leaves)
        updates, state = optimizer.update(gradient, state, leaves)
        return optax.apply_updates(leaves, updates), state

    carry = [leaves, optimizer.init(leaves)]

    def step() -> None:
        carry[:] = jax.block_until_ready(train(*carry))

    return {
        "parameters": parameter_count(leaves),
        "draw": timed(lambda: jax.block_until_ready(draw(leaves, x))),
        "train": timed(step),
    }


def unet_config(kind: Any) -> Any:
    """The UNet of the comparison, read from diffusers' own settings."""
    u = UNET
    return kind.from_hub(
        {
            "_class_name": "UNet2DConditionModel", "sample_size": SIDE, "in_channels": u["channels"], "out_channels": u["channels"],
            "block_out_channels": list(u["widths"]), "layers_per_block": u["layers"],
            "down_block_types": ["CrossAttnDownBlock2D", "DownBlock2D"], "up_block_types": ["UpBlock2D", "CrossAttnUpBlock2D"],
            "attention_head_dim": u["heads"], "cross_attention_dim": u["text"], "norm_num_groups": 32,
        }
    )


def main() -> None:
    python = sys.argv[1]
    options = dict(word.split("=") for word in sys.argv[2:])
    turns, steps = int(options.get("turns", 3)), int(options.get("steps", 8))
    print("| model | work | argosy ms | torch eager ms | ratio | CPU ms | CPU ms of torch |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for kind in ("flux", "unet"):
        results: dict[str, list[Any]] = {"argosy": [], "torch": []}
        for _ in range(turns):
            for name, command in (
                ("torch", [python, "-c", TORCH, kind, str(Path(__file__).parent), str(steps)]),
                ("argosy", [sys.executable, __file__, "ours", kind, str(steps)]),
            ):
                done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=os.environ | {"HF_HUB_OFFLINE": "1"})
                if done.returncode:
                    raise SystemExit(done.stderr[-3000:])
                results[name].append(json.loads(done.stdout.splitlines()[-1]))
        assert results["argosy"][0]["parameters"] == results["torch"][0]["parameters"], results
        millions = results["argosy"][0]["parameters"] / 1e6
        for work in ("draw", "train"):
            wall, cpu = ({n: 1e3 * statistics.median(result[work][i] for result in results[n]) for n in results} for i in range(2))
            times = f"{wall['argosy']:.0f} | {wall['torch']:.0f} | {wall['torch'] / wall['argosy']:.2f}"
            print(f"| {kind}, {millions:.1f}M | {work} | {times} | {cpu['argosy']:.0f} | {cpu['torch']:.0f} |")


if __name__ == "__main__":
    if sys.argv[1:2] == ["ours"]:
        print(json.dumps(ours(sys.argv[2], int(sys.argv[3]))))
    else:
        main()
