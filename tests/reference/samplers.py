"""What diffusers' schedulers draw, as goldens: `./run reference samplers`.

A closed formula stands for the network, and given noise for the random one, so that only the sampler is compared.
"""

import json
from pathlib import Path

import diffusers
import numpy as np
import torch

HERE = Path(__file__).parent.parent / "goldens" / "samplers.json"
SHAPE = (2, 3, 4, 4)


def network(x: np.ndarray, t: float) -> np.ndarray:
    return 0.6 * np.sin(2 * x + t / 300) + 0.3 * x * np.cos(t / 500)


def noises(count: int) -> np.ndarray:
    return np.random.default_rng(7).normal(size=(count, *SHAPE)).astype(np.float32)


SD = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear"}
BETAS = [SD, {"beta_schedule": "linear"}, {"beta_schedule": "squaredcos_cap_v2"}]
SPACED = [{"timestep_spacing": s} | ({"steps_offset": 1} if s == "leading" else {}) for s in ("leading", "linspace", "trailing")]
KINDS = [{"prediction_type": k} for k in ("epsilon", "v_prediction", "sample")]


def cases() -> list[tuple[str, dict, int, dict]]:
    """Class, config, steps, and what a pipeline passes to `set_timesteps`."""
    samplers: list[tuple[str, dict, int, dict]] = []
    flow = "FlowMatchEulerDiscreteScheduler"
    for steps in (1, 4, 7):
        samplers += [(flow, {"shift": 3.0}, steps, {}), (flow, {}, steps, {})]
        samplers.append(("FlowMatchHeunDiscreteScheduler", {"shift": 3.0}, steps, {}))
        samplers.append((flow, {"use_dynamic_shifting": True}, steps, {"positions": 1024}))
    switches = ("use_karras_sigmas", "use_exponential_sigmas", "stochastic_sampling")
    samplers += [(flow, {"shift": 2.0, key: True}, 6, {}) for key in switches]
    samplers.append(
        (flow, {"shift_terminal": 0.1, "use_dynamic_shifting": True, "time_shift_type": "linear"}, 5, {"positions": 300})
    )
    for name in ("DDIMScheduler", "DDPMScheduler", "EulerDiscreteScheduler", "DPMSolverMultistepScheduler", "UniPCMultistepScheduler"):
        clip = {"clip_sample": False} if name.startswith("DD") else {}
        samplers += [(name, SD | clip | spaced | KINDS[0], 6, {}) for spaced in SPACED]
        samplers += [(name, betas | clip | kind, 5, {}) for betas in BETAS for kind in KINDS]
        samplers += [(name, SD | clip, steps, {}) for steps in (1, 2, 20)]
    samplers += [(name, SD | {"clip_sample": True, "clip_sample_range": 1.5}, 6, {}) for name in ("DDIMScheduler", "DDPMScheduler")]
    samplers += [
        ("DDIMScheduler", SD | {"set_alpha_to_one": False, "clip_sample": False}, 6, {"eta": eta}) for eta in (0.0, 0.7, 1.0)
    ]
    samplers.append(("DDPMScheduler", SD | {"variance_type": "fixed_large", "clip_sample": False}, 6, {}))
    zero = {"rescale_betas_zero_snr": True, "timestep_spacing": "trailing", "prediction_type": "v_prediction"}
    samplers.append(("DDIMScheduler", SD | zero | {"clip_sample": False}, 6, {}))
    samplers.append(("EulerDiscreteScheduler", SD | zero, 6, {}))
    for key in ("use_karras_sigmas", "use_exponential_sigmas"):
        samplers += [(name, SD | {key: True}, 6, {}) for name in ("EulerDiscreteScheduler", "DPMSolverMultistepScheduler")]
        ends = {"final_sigmas_type": "sigma_min", "timestep_spacing": "leading"}
        samplers.append(("EulerDiscreteScheduler", SD | ends | {key: True}, 6, {}))
    samplers += [("EulerAncestralDiscreteScheduler", SD | spaced | kind, 6, {}) for spaced in SPACED for kind in KINDS[:2]]
    samplers += [
        ("LCMScheduler", {"prediction_type": kind}, steps, {}) for kind in ("epsilon", "v_prediction") for steps in (1, 4, 8)
    ]
    for steps in (1, 2, 3, 4, 5, 12):
        samplers.append(("PNDMScheduler", SD | {"skip_prk_steps": True, "steps_offset": 1}, steps, {}))
    samplers.append(
        ("PNDMScheduler", SD | {"skip_prk_steps": True, "prediction_type": "v_prediction", "set_alpha_to_one": True}, 7, {})
    )
    for steps in (3, 16):
        multi = "DPMSolverMultistepScheduler"
        samplers.append((multi, SD | {"algorithm_type": "sde-dpmsolver++"}, steps, {}))
        samplers.append((multi, SD | {"final_sigmas_type": "sigma_min", "euler_at_final": True}, steps, {}))
        samplers.append((multi, SD | {"final_sigmas_type": "sigma_min"}, steps, {}))
        samplers.append((multi, {"use_flow_sigmas": True, "flow_shift": 3.0, "prediction_type": "flow_prediction"}, steps, {}))
        samplers += [("UniPCMultistepScheduler", SD | {"solver_order": order}, steps, {}) for order in (1, 3)]
        for shift in (1.0, 5.0):
            flow_keys = {"use_flow_sigmas": True, "flow_shift": shift, "prediction_type": "flow_prediction"}
            samplers.append(("UniPCMultistepScheduler", flow_keys, steps, {}))
    for steps in (3, 16):
        edm, multi = "EDMEulerScheduler", "EDMDPMSolverMultistepScheduler"
        samplers += [(name, {}, steps, {}) for name in (edm, multi)]
        samplers.append((edm, {"prediction_type": "v_prediction", "sigma_data": 1.0, "sigma_schedule": "exponential"}, steps, {}))
        samplers.append((multi, {"sigma_schedule": "exponential", "final_sigmas_type": "sigma_min", "rho": 5.0}, steps, {}))
        samplers.append((edm, {"final_sigmas_type": "sigma_min", "sigma_max": 20.0, "sigma_min": 0.01}, steps, {}))
        samplers.append((multi, {"algorithm_type": "sde-dpmsolver++", "rho": 5.0, "sigma_max": 20.0, "sigma_min": 0.01}, steps, {}))
        samplers += [(multi, {"prediction_type": "v_prediction", "solver_order": 1}, steps, {})]
        samplers.append((multi, {"final_sigmas_type": "sigma_min", "euler_at_final": True, "lower_order_final": False}, steps, {}))
    return samplers


def draw(name: str, config: dict, steps: int, more: dict) -> dict:
    scheduler = getattr(diffusers, name)(**config)
    noise = list(noises(2 * steps + 2))
    module = __import__(type(scheduler).__module__, fromlist=["x"])
    draws = iter(noise[1:])
    module.randn_tensor = lambda shape, **_: torch.from_numpy(next(draws))
    passed = {}
    if "positions" in more:
        # What Flux's pipeline passes.
        low, high = scheduler.config.base_shift, scheduler.config.max_shift
        slope = (high - low) / (scheduler.config.max_image_seq_len - scheduler.config.base_image_seq_len)
        mu = more["positions"] * slope + low - slope * scheduler.config.base_image_seq_len
        passed = {"sigmas": np.linspace(1.0, 1 / steps, steps), "mu": mu}
    scheduler.set_timesteps(**(passed or {"num_inference_steps": steps}))
    x = torch.from_numpy(noise[0]) * getattr(scheduler, "init_noise_sigma", 1.0)
    for t in scheduler.timesteps:
        scaled = scheduler.scale_model_input(x, t) if hasattr(scheduler, "scale_model_input") else x
        out = torch.from_numpy(network(scaled.numpy().astype(np.float64), float(t)).astype(np.float32))
        keys = {"eta": more["eta"]} if "eta" in more else {}
        x = scheduler.step(out, t, x, return_dict=False, **keys)[0]
    differences = dict(scheduler.config) | {"_class_name": name}
    differences = {k: v for k, v in differences.items() if k in config or k == "_class_name"}
    result = x.numpy().astype(np.float64)
    timesteps = [float(t) for t in scheduler.timesteps]
    return {"config": differences, "steps": steps, **more, "timesteps": timesteps, "sample": result.ravel()[::7].tolist()}


if __name__ == "__main__":
    HERE.write_text("[\n" + ",\n".join(json.dumps(draw(*case)) for case in cases()) + "\n]\n", encoding="utf-8")
    print(f"{HERE.name}: {len(cases())} cases")
