"""Reads and writes diffusers' scheduler_config.json, by tables of its classes and keys.

A key that would change results but is not supported is an error that names it. Keys that a class does not read are ignored.
"""

from collections.abc import Mapping
from typing import Any

from argosy.core.errors import BadInput, nearest
from argosy.infer.denoise.settings import SamplerSettings
from argosy.models.diffusion.noise import STEPS, EDMNoise, FlowNoise

FLOW_EULER = "FlowMatchEulerDiscreteScheduler"
CLASSES = {
    FLOW_EULER: "euler",
    "FlowMatchHeunDiscreteScheduler": "heun",
    "EulerDiscreteScheduler": "euler",
    "EulerAncestralDiscreteScheduler": "euler_ancestral",
    "DDIMScheduler": "ddim",
    "DDPMScheduler": "ddpm",
    "LCMScheduler": "lcm",
    "PNDMScheduler": "pndm",
    "DPMSolverMultistepScheduler": "dpmpp_2m",
    "UniPCMultistepScheduler": "unipc",
    "EDMEulerScheduler": "euler",
    "EDMDPMSolverMultistepScheduler": "dpmpp_2m",
}
"""The sampler of each class of diffusers, by `SamplerSettings.name`."""

DPM = ("DPMSolverMultistepScheduler", "EDMDPMSolverMultistepScheduler")
PREDICTIONS = {
    "epsilon": "epsilon",
    "v_prediction": "v",
    "sample": "sample",
    "flow_prediction": "velocity",
}
# The same for classes with EDM's noise.
EDM_PREDICTIONS = {"epsilon": "edm", "v_prediction": "v"}
# Default values of keys by class, if they differ from the defaults of `SamplerSettings`.
UNSAID: dict[str, dict[str, Any]] = {
    "EulerDiscreteScheduler": {"timestep_spacing": "linspace"},
    "EulerAncestralDiscreteScheduler": {"timestep_spacing": "linspace"},
    "DPMSolverMultistepScheduler": {"timestep_spacing": "linspace"},
    "UniPCMultistepScheduler": {"timestep_spacing": "linspace"},
    "DDIMScheduler": {"clip_sample": True},
    "DDPMScheduler": {"clip_sample": True},
    "LCMScheduler": {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear"},
    "PNDMScheduler": {"set_alpha_to_one": False},
}
# Keys for which only these values are built.
ONLY: dict[str, tuple[Any, ...]] = {
    "num_train_timesteps": (STEPS,),
    "thresholding": (False,),
    "invert_sigmas": (False,),
    "use_beta_sigmas": (False,),
    "use_lu_lambdas": (False,),
    "interpolation_type": ("linear",),
    "timestep_type": ("discrete",),
    "algorithm_type": ("dpmsolver++", "sde-dpmsolver++"),
    "solver_type": ("midpoint", "bh2"),
    "solver_p": (None,),
    "predict_x0": (True,),
    "disable_corrector": ([],),
    "variance_type": (None, "fixed_small", "fixed_large", "learned", "learned_range"),
}
# The same, for classes without EDM's noise.
ONLY_OTHERS: dict[str, tuple[Any, ...]] = {"sigma_min": (None,), "sigma_max": (None,)}


def sampler_of(config: Mapping[str, Any]) -> SamplerSettings:
    """Converts the contents of a scheduler_config.json to settings.

    Raises:
        BadInput: the class, or the value of a key, is not built.
    """
    name = str(config.get("_class_name"))
    if name not in CLASSES:
        raise BadInput(f"scheduler_config.json: the class {name} is not built", hint=nearest(name, CLASSES))
    is_edm = name.startswith("EDM")
    for key, values in (ONLY if is_edm else ONLY | ONLY_OTHERS).items():
        if key in config and config[key] not in values:
            raise BadInput(f"scheduler_config.json: {key} = {config[key]!r} is not built for {name}")
    if name == "PNDMScheduler" and not config.get("skip_prk_steps", False):
        raise BadInput("scheduler_config.json: skip_prk_steps = false of PNDMScheduler is not built")
    settings = UNSAID.get(name, {}) | dict(config)
    is_flow = name.startswith("FlowMatch") or settings.get("use_flow_sigmas", False)
    shared: dict[str, Any] = {"name": CLASSES[name], "levels": _levels(settings)}
    shared["final"] = "first" if _ends_with_noise(name, settings) else "zero"
    shared["stochastic"] = settings.get("stochastic_sampling", False) or settings.get("algorithm_type") == "sde-dpmsolver++"
    for key, ours in (("solver_order", "order"), ("lower_order_final",) * 2, ("euler_at_final",) * 2):
        shared |= {ours: settings[key]} if key in settings else {}
    if is_flow:
        spacing = "linspace" if name.startswith("FlowMatch") else "trailing"
        flow: dict[str, Any] = {"noise": FlowNoise(), "prediction": "velocity", "shift": _shift(settings), "spacing": spacing}
        return SamplerSettings(**shared, **flow)
    kind, predictions = settings.get("prediction_type", "epsilon"), EDM_PREDICTIONS if is_edm else PREDICTIONS
    if kind not in predictions:
        raise BadInput(f"scheduler_config.json: prediction_type = {kind!r} is not built for {name}")
    if is_edm:
        noise = {"kind": "edm"} | {key: settings[key] for key in EDMNoise.model_fields if key in settings}
        edm = {"noise": noise, "prediction": predictions[kind], "levels": settings.get("sigma_schedule", "karras")}
        return _build(name, shared | edm)
    noise = {
        "kind": "betas",
        "start": settings.get("beta_start", 0.0001),
        "end": settings.get("beta_end", 0.02),
        "curve": settings.get("beta_schedule", "linear"),
        "zero_snr": settings.get("rescale_betas_zero_snr", False),
        "betas": settings.get("trained_betas"),
    }
    shared |= {"spacing": settings.get("timestep_spacing", "leading"), "offset": settings.get("steps_offset", 0)}
    shared["clip"] = settings.get("clip_sample_range", 1.0) if settings.get("clip_sample", False) else None
    shared["variance"] = "large" if settings.get("variance_type") == "fixed_large" else "small"
    shared |= {key: settings[key] for key in ("timestep_scaling",) if key in settings}
    shared |= {"original_steps": settings["original_inference_steps"]} if "original_inference_steps" in settings else {}
    return _build(name, shared | {"noise": noise, "prediction": PREDICTIONS[kind]})


def _build(name: str, fields: Mapping[str, Any]) -> SamplerSettings:
    try:
        return SamplerSettings(**fields)
    except ValueError as error:
        raise BadInput(f"scheduler_config.json of {name}: {error}") from None


def _levels(scheduler: Mapping[str, Any]) -> str:
    if scheduler.get("use_karras_sigmas"):
        return "karras"
    return "exponential" if scheduler.get("use_exponential_sigmas") else "timesteps"


def _ends_with_noise(name: str, scheduler: Mapping[str, Any]) -> bool:
    if name in ("DDIMScheduler", "PNDMScheduler", "LCMScheduler"):
        return not scheduler.get("set_alpha_to_one", True)
    return scheduler.get("final_sigmas_type") == "sigma_min"


def _shift(scheduler: Mapping[str, Any]) -> dict[str, Any]:
    keys = {
        "factor": scheduler.get("shift", scheduler.get("flow_shift", 1.0)),
        "dynamic": scheduler.get("use_dynamic_shifting", False),
        "low": scheduler.get("base_shift"),
        "high": scheduler.get("max_shift"),
        "low_length": scheduler.get("base_image_seq_len"),
        "high_length": scheduler.get("max_image_seq_len"),
        "kind": scheduler.get("time_shift_type"),
        "terminal": scheduler.get("shift_terminal"),
    }
    return {key: value for key, value in keys.items() if value is not None}


def _kind_of(name: str) -> str:
    """The prefix `FlowMatch` or `EDM` of the name of a class that is for these models only; empty for others."""
    return next((kind for kind in ("FlowMatch", "EDM") if name.startswith(kind)), "")


def scheduler_config(settings: SamplerSettings) -> dict[str, Any]:
    """Converts settings to the contents of a scheduler_config.json.

    Raises:
        BadInput: no class of diffusers samples with these settings.
    """
    is_flow, is_edm = isinstance(settings.noise, FlowNoise), isinstance(settings.noise, EDMNoise)
    config: dict[str, Any] = {"_diffusers_version": "0.42.1", "num_train_timesteps": STEPS}
    kind = "FlowMatch" if is_flow else "EDM" if is_edm else ""
    names = [name for name, method in CLASSES.items() if method == settings.name and _kind_of(name) == kind]
    if not names and is_flow:
        names = [name for name, method in CLASSES.items() if method == settings.name and not _kind_of(name)]
        config |= {"use_flow_sigmas": True, "flow_shift": settings.shift.factor, "prediction_type": "flow_prediction"}
    if not names:
        raise BadInput(f"no scheduler of diffusers draws by {settings.name} with {kind}'s noise")
    name = names[0]
    if name.startswith("FlowMatch"):
        config |= {"shift": settings.shift.factor}
    if name == FLOW_EULER:
        config |= {"stochastic_sampling": settings.stochastic, "shift_terminal": settings.shift.terminal}
        config |= {"use_dynamic_shifting": settings.shift.dynamic, "time_shift_type": settings.shift.kind}
        config |= {"base_shift": settings.shift.low, "max_shift": settings.shift.high}
        config |= {"base_image_seq_len": settings.shift.low_length, "max_image_seq_len": settings.shift.high_length}
    if is_edm:
        theirs = {ours: kind for kind, ours in EDM_PREDICTIONS.items()}
        config |= {"prediction_type": theirs[settings.prediction], "sigma_schedule": settings.levels}
        config |= settings.noise.model_dump(include=set(EDMNoise.model_fields))
    elif not is_flow:
        noise = settings.noise
        theirs = {ours: kind for kind, ours in PREDICTIONS.items()}
        config |= {"prediction_type": theirs[settings.prediction], "beta_start": noise.start, "beta_end": noise.end}
        config |= {"beta_schedule": noise.curve, "trained_betas": noise.betas and list(noise.betas)}
        config |= {"timestep_spacing": settings.spacing, "steps_offset": settings.offset}
        config |= {"rescale_betas_zero_snr": noise.zero_snr} if name != "PNDMScheduler" else {}
    if name in ("DDIMScheduler", "PNDMScheduler", "LCMScheduler"):
        config["set_alpha_to_one"] = settings.final == "zero"
    elif name not in (FLOW_EULER, "FlowMatchHeunDiscreteScheduler", "DDPMScheduler", "EulerAncestralDiscreteScheduler"):
        config["final_sigmas_type"] = "zero" if settings.final == "zero" else "sigma_min"
    if name in ("DDIMScheduler", "DDPMScheduler", "LCMScheduler"):
        config |= {"clip_sample": settings.clip is not None, "clip_sample_range": settings.clip or 1.0}
    if name in (FLOW_EULER, "EulerDiscreteScheduler", "DPMSolverMultistepScheduler", "UniPCMultistepScheduler"):
        config |= {"use_karras_sigmas": settings.levels == "karras", "use_exponential_sigmas": settings.levels == "exponential"}
    if name in (*DPM, "UniPCMultistepScheduler"):
        config |= {"solver_order": settings.order, "lower_order_final": settings.lower_order_final}
    if name in DPM:
        sde = "sde-dpmsolver++" if settings.stochastic else "dpmsolver++"
        config |= {"algorithm_type": sde, "euler_at_final": settings.euler_at_final}
    if name == "PNDMScheduler":
        config["skip_prk_steps"] = True
    if name == "DDPMScheduler":
        config["variance_type"] = f"fixed_{settings.variance}"
    if name == "LCMScheduler":
        config |= {"original_inference_steps": settings.original_steps, "timestep_scaling": settings.timestep_scaling}
    config = {"_class_name": name} | config
    again = sampler_of(config)
    if lost := [key for key in type(settings).model_fields if getattr(again, key) != getattr(settings, key)]:
        raise BadInput(f"{name} of diffusers has no key for {', '.join(f'sampler.{key}' for key in lost)}")
    return config
