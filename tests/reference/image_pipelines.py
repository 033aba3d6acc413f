"""Small pipelines of diffusers with all that they are made of, and an image of each: `./run reference images` writes them too.

Weights are drawn as those of the small models; tokenizers have vocabularies of 90 entries, CLIP's in its old files (vocab.json and
merges.txt) for Flux, and as tokenizer.json for Stable Diffusion 3.
"""

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from image_models import (
    CLIP,
    CONTROLNET,
    FLUX,
    FLUX2,
    FLUX2_VAE,
    FLUX_CONTROLNET,
    SD,
    SD3,
    SD3_CONTROLNET,
    SD35_CONTROLNET,
    T5,
    UNET,
    VAE,
    WAN,
    WAN_VAE,
    XL,
    Z_IMAGE,
)  # fmt: skip
from image_models import without_up as down_of
from safetensors.torch import save_file
from transformers import CLIPTokenizer, Qwen2Tokenizer, T5Tokenizer

PROMPTS = ["a red fox in the snow", "nothing"]
# A learned token, and prompts with it: also where no blank is beside it.
LEARNED = "<snow-fox>"
LEARNED_PROMPTS = ["a <snow-fox> in the snow", "fox,<snow-fox>!"]
LATENTS = (2, 4, 12, 8)
# Of the first-block cache.
THRESHOLD = 0.9
# Those of Flux.2.
PACKED = (2, 16, 12, 8)
# Those of Wan: two frames of latents, of five frames.
FRAMES = (2, 4, 2, 4, 2)
WORDS = "a red fox in the snow nothing of it is here to be seen".split()  # noqa: SIM905


def clip_vocabulary() -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Letters, letters that end a word, and merges of the words above up to 88 entries; the two special tokens last."""
    letters = [chr(c) for c in range(ord("a"), ord("z") + 1)]
    entries, merges = [*letters, *(f"{c}</w>" for c in letters)], []
    for word in WORDS:
        parts = [*word[:-1], f"{word[-1]}</w>"]
        while len(parts) > 1 and len(entries) < 88:
            pair = (parts[-2], parts[-1])
            if "".join(pair) not in entries:
                merges.append(pair)
                entries.append("".join(pair))
            parts[-2:] = ["".join(pair)]
    entries = [*entries, *(f"{c}{c}" for c in letters)][:88]
    entries += ["<|startoftext|>", "<|endoftext|>"]
    return {entry: i for i, entry in enumerate(entries)}, merges


def clip_tokenizer(**more: Any) -> CLIPTokenizer:
    vocab, merges = clip_vocabulary()
    return CLIPTokenizer(vocab=vocab, merges=merges, model_max_length=21, **more)


def t5_tokenizer() -> T5Tokenizer:
    letters = [chr(c) for c in range(ord("a"), ord("z") + 1)]
    words = list(dict.fromkeys(WORDS))
    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", -2.0), ("▁", -3.0)]
    pieces += [(f"▁{w}", -4.0 - len(w) / 10) for w in words if len(w) > 1] + [(c, -6.0 - i / 50) for i, c in enumerate(letters)]
    return T5Tokenizer(vocab=pieces[:90], extra_ids=0, model_max_length=512)


def qwen_tokenizer() -> Qwen2Tokenizer:
    """All bytes and merges of some words; the conversation says whether its answer may think."""
    from tokenizers.pre_tokenizers import ByteLevel

    entries, merges = [*sorted(ByteLevel.alphabet())], []
    for word in ["Ġfox", "Ġsnow", "ing", "red"]:
        at = word[0]
        for letter in word[1:]:
            merges.append((at, letter))
            at += letter
            entries.append(at)
    tokenizer = Qwen2Tokenizer(vocab={entry: i for i, entry in enumerate(dict.fromkeys(entries))}, merges=merges, model_max_length=4096)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    tokenizer.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% if not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
    )
    return tokenizer


def mistral_tokenizer() -> Any:
    """All bytes, padded on the left; the conversation has a system message, and contents in parts. Published folders have a processor
    around it, which needs torchvision and makes the same tokens of texts."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE(vocab={entry: i for i, entry in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, merges=[]))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    marks = ["[INST]", "[/INST]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[IMG]", "[IMG_BREAK]", "[IMG_END]"]
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", pad_token="<pad>", additional_special_tokens=marks,
        padding_side="left", model_max_length=4096,
    )  # fmt: skip
    template = (
        "{{ bos_token }}{% for m in messages %}{% set name = 'SYSTEM_PROMPT' if m.role == 'system' else 'INST' %}[{{ name }}]"
        "{% for part in m.content %}{{ part.text }}{% endfor %}[/{{ name }}]{% endfor %}"
    )
    tokenizer.chat_template = template
    return tokenizer


def old_files(tokenizer: CLIPTokenizer, folder: Path) -> None:
    """A tokenizer's folder as those that were published: a vocabulary and its merges."""
    vocab, merges = clip_vocabulary()
    tokenizer.save_pretrained(folder)
    (folder / "tokenizer.json").unlink()
    (folder / "vocab.json").write_text(json.dumps(vocab), encoding="utf-8")
    (folder / "merges.txt").write_text("#version: 0.2\n" + "".join(f"{a} {b}\n" for a, b in merges), encoding="utf-8")


CLIP_L = CLIP | {"hidden_act": "quick_gelu", "eos_token_id": 2}
CLIP_G = CLIP | {"hidden_act": "gelu", "eos_token_id": 89, "projection_dim": 14, "num_hidden_layers": 2}
PLAIN = {"use_quant_conv": False, "use_post_quant_conv": False, "scaling_factor": 0.3611, "shift_factor": 0.1159}
FLOW = {"shift": 3.0, "use_dynamic_shifting": True, "base_shift": 0.5, "max_shift": 1.15, "base_image_seq_len": 256,
        "max_image_seq_len": 4096}  # fmt: skip

QWEN3 = {"vocab_size": 280, "hidden_size": 28, "intermediate_size": 44, "num_hidden_layers": 3, "num_attention_heads": 4,
         "num_key_value_heads": 2, "head_dim": 10, "max_position_embeddings": 1024, "max_window_layers": 3,
         "tie_word_embeddings": True}  # fmt: skip

BETAS = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear"}

# Of each pipeline: the class, its scheduler's settings, and class and sizes of each model.
PIPELINES: dict[str, tuple[str, dict, dict[str, tuple[str, dict]]]] = {
    "pipeline-flux": (
        "FluxPipeline",
        FLOW,
        {
            "transformer": ("FluxTransformer2DModel", FLUX | {"joint_attention_dim": 30, "pooled_projection_dim": 28,
                                                              "guidance_embeds": True, "num_layers": 1, "num_single_layers": 1}),
            "vae": ("AutoencoderKL", VAE | PLAIN),
            "text_encoder": ("CLIPTextModel", CLIP_L),
            "text_encoder_2": ("T5EncoderModel", T5 | {"num_layers": 2}),
        },
    ),
    "pipeline-sd3": (
        "StableDiffusion3Pipeline",
        {"shift": 3.0},
        {
            "transformer": ("SD3Transformer2DModel", SD3 | {"joint_attention_dim": 60, "pooled_projection_dim": 28, "num_layers": 2,
                                                            "qk_norm": "rms_norm"}),
            "vae": ("AutoencoderKL", VAE | PLAIN),
            "text_encoder": ("CLIPTextModelWithProjection", CLIP_L | {"projection_dim": 14}),
            "text_encoder_2": ("CLIPTextModelWithProjection", CLIP_G),
            "text_encoder_3": ("T5EncoderModel", T5 | {"d_model": 60, "num_layers": 1}),
        },
    ),
    "pipeline-flux2": (
        "Flux2KleinPipeline",
        FLOW,
        {
            "transformer": ("Flux2Transformer2DModel", FLUX2 | {"joint_attention_dim": 36, "guidance_embeds": False, "num_layers": 1,
                                                                "num_single_layers": 1}),
            "vae": ("AutoencoderKLFlux2", FLUX2_VAE),
            # It reads three layers by their numbers.
            "text_encoder": ("Qwen3ForCausalLM", QWEN3 | {"hidden_size": 12, "intermediate_size": 14, "num_attention_heads": 2,
                                                          "num_key_value_heads": 1, "head_dim": 6, "num_hidden_layers": 28,
                                                          "max_window_layers": 28}),
        },
    ),
    "pipeline-flux2-dev": (
        "Flux2Pipeline",
        FLOW,
        {
            "transformer": ("Flux2Transformer2DModel", FLUX2 | {"joint_attention_dim": 36, "num_layers": 1, "num_single_layers": 1}),
            "vae": ("AutoencoderKLFlux2", FLUX2_VAE),
            "text_encoder": ("Mistral3ForConditionalGeneration", {
                "text_config": {"model_type": "mistral", "vocab_size": 270, "hidden_size": 12, "intermediate_size": 14,
                                "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 6, "num_hidden_layers": 31,
                                "max_position_embeddings": 1024, "sliding_window": None},
                "vision_config": {"model_type": "pixtral", "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1,
                                  "num_attention_heads": 1, "head_dim": 8, "image_size": 28, "patch_size": 14}}),
        },
    ),
    "pipeline-z-image": (
        "ZImagePipeline",
        {"shift": 3.0},
        {
            "transformer": ("ZImageTransformer2DModel", Z_IMAGE | {"cap_feat_dim": 28, "n_layers": 1, "n_refiner_layers": 1}),
            "vae": ("AutoencoderKL", VAE | PLAIN),
            "text_encoder": ("Qwen3Model", QWEN3),
        },
    ),
    "pipeline-wan": (
        "WanPipeline",
        {"prediction_type": "flow_prediction", "use_flow_sigmas": True, "flow_shift": 3.0},
        {
            "transformer": ("WanTransformer3DModel", WAN | {"text_dim": 30, "num_layers": 1}),
            "vae": ("AutoencoderKLWan", WAN_VAE),
            "text_encoder": ("UMT5EncoderModel", T5 | {"num_layers": 2}),
        },
    ),
    "pipeline-sd": (
        "StableDiffusionPipeline",
        BETAS | {"skip_prk_steps": True, "set_alpha_to_one": False, "steps_offset": 1},
        {
            "unet": ("UNet2DConditionModel", UNET | SD | {"cross_attention_dim": 28}),
            "vae": ("AutoencoderKL", VAE),
            "text_encoder": ("CLIPTextModel", CLIP_L),
        },
    ),
    "pipeline-sdxl": (
        "StableDiffusionXLPipeline",
        BETAS | {"timestep_spacing": "leading", "steps_offset": 1},
        {
            "unet": ("UNet2DConditionModel", UNET | XL | {"cross_attention_dim": 56}),
            "vae": ("AutoencoderKL", VAE),
            "text_encoder": ("CLIPTextModel", CLIP_L),
            "text_encoder_2": ("CLIPTextModelWithProjection", CLIP_G),
        },
    ),
}  # fmt: skip
for _name, _width, _sizes in (("sd", 28, SD), ("sdxl", 56, XL)):
    _pipeline, _scheduler, _models = PIPELINES[f"pipeline-{_name}"]
    _control = {"controlnet": ("ControlNetModel", CONTROLNET | down_of(_sizes) | {"cross_attention_dim": _width})}
    PIPELINES[f"pipeline-{_name}-controlnet"] = (_pipeline.replace("Pipeline", "ControlNetPipeline"), _scheduler, _models | _control)
# More layers than their ControlNets, so that what these give is spread over them.
for _name, _base, _sizes, (_kind, _net_config) in (
    ("flux", "flux", {"num_layers": 3, "num_single_layers": 2},
     ("FluxControlNetModel", FLUX_CONTROLNET | {"joint_attention_dim": 30, "pooled_projection_dim": 28, "guidance_embeds": True,
                                                "num_mode": 4})),
    ("sd3", "sd3", {"num_layers": 4},
     ("SD3ControlNetModel", SD3_CONTROLNET | {"joint_attention_dim": 60, "pooled_projection_dim": 28, "num_layers": 3})),
    ("sd3.5", "sd3", {"num_layers": 3}, ("SD3ControlNetModel", SD35_CONTROLNET | {"pooled_projection_dim": 28})),
):
    _pipeline, _scheduler, _models = PIPELINES[f"pipeline-{_base}"]
    _denoiser = (_models["transformer"][0], _models["transformer"][1] | _sizes)
    _control = {"transformer": _denoiser, "controlnet": (_kind, _net_config)}
    PIPELINES[f"pipeline-{_name}-controlnet"] = (_pipeline.replace("Pipeline", "ControlNetPipeline"), _scheduler, _models | _control)
SCHEDULERS = {"pipeline-sd": "PNDMScheduler", "pipeline-sdxl": "EulerDiscreteScheduler", "pipeline-wan": "UniPCMultistepScheduler",
              "pipeline-sd-controlnet": "PNDMScheduler", "pipeline-sdxl-controlnet": "EulerDiscreteScheduler"}  # fmt: skip
# Parts that a pipeline is made without.
WITHOUT: dict[str, dict[str, None]] = {
    "pipeline-sd3": {"image_encoder": None, "feature_extractor": None},
    "pipeline-flux-controlnet": {"image_encoder": None, "feature_extractor": None},
    "pipeline-sd3-controlnet": {"image_encoder": None, "feature_extractor": None},
    "pipeline-sd3.5-controlnet": {"image_encoder": None, "feature_extractor": None},
    "pipeline-sd": {"safety_checker": None, "feature_extractor": None},
    "pipeline-sd-controlnet": {"safety_checker": None, "feature_extractor": None},
}


def write_tokenizers(name: str, folder: Path) -> dict[str, Any]:
    """The tokenizers of a pipeline, in its folder."""
    if name in ("pipeline-flux", "pipeline-flux-controlnet", "pipeline-sd", "pipeline-sd-controlnet"):
        first = clip_tokenizer()
        old_files(first, folder / "tokenizer")
        if not name.startswith("pipeline-flux"):
            return {"tokenizer": first}
        tokenizers = {"tokenizer": first, "tokenizer_2": t5_tokenizer()}
        tokenizers["tokenizer_2"].save_pretrained(folder / "tokenizer_2")
        return tokenizers
    if name == "pipeline-wan":
        tokenizers = {"tokenizer": t5_tokenizer()}
        tokenizers["tokenizer"].save_pretrained(folder / "tokenizer")
        return tokenizers
    if name == "pipeline-flux2-dev":
        tokenizers = {"tokenizer": mistral_tokenizer()}
        tokenizers["tokenizer"].save_pretrained(folder / "tokenizer")
        return tokenizers
    if name in ("pipeline-z-image", "pipeline-flux2"):
        tokenizers = {"tokenizer": qwen_tokenizer()}
        tokenizers["tokenizer"].save_pretrained(folder / "tokenizer")
        return tokenizers
    tokenizers = {"tokenizer": clip_tokenizer(), "tokenizer_2": clip_tokenizer(pad_token="a")}
    tokenizers |= {"tokenizer_3": t5_tokenizer()} if name.startswith("pipeline-sd3") else {}
    for part, tokenizer in tokenizers.items():
        tokenizer.save_pretrained(folder / part)
    return tokenizers


def images_of(pipe: Any, name: str) -> dict[str, np.ndarray]:
    """What the pipeline draws from given noise: an image for each prompt."""
    latents = np.random.default_rng(7).standard_normal(LATENTS).astype(np.float32)
    start, size = torch.from_numpy(latents), {"height": LATENTS[2] * 4, "width": LATENTS[3] * 4}
    more: dict[str, Any] = {"num_inference_steps": 3, "output_type": "np", **size}
    pipe.set_progress_bar_config(disable=True)
    with torch.no_grad():
        if name == "pipeline-flux":
            start = pipe._pack_latents(start, *LATENTS)
            free = pipe(PROMPTS, latents=start, guidance_scale=3.5, **more).images
            return {"latents": latents, "out_images": free} | cached_image(pipe, start[:1], more)
        if name.endswith("-controlnet") and name.startswith(("pipeline-flux", "pipeline-sd3")):
            return {"latents": latents} | controlled_transformers(pipe, name, start, more)
        if name.endswith("-controlnet"):
            return {"latents": latents} | controlled_images(pipe, start, more)
        if name == "pipeline-sdxl":
            free, plain = (pipe(PROMPTS, latents=start, guidance_scale=scale, **more).images for scale in (4.0, 1.0))
            return {"latents": latents, "out_images": free, "out_plain": plain}
        if name == "pipeline-flux2-dev":
            start = torch.from_numpy(latents := np.random.default_rng(7).standard_normal(PACKED).astype(np.float32))
            return {"latents": latents, "out_images": pipe(prompt=list(PROMPTS), latents=start, guidance_scale=4.0, **more).images}
        if name == "pipeline-flux2":
            start = torch.from_numpy(latents := np.random.default_rng(7).standard_normal(PACKED).astype(np.float32))
            free, plain = (pipe(prompt=list(PROMPTS), latents=start, guidance_scale=scale, **more).images for scale in (4.0, 1.0))
            return {"latents": latents, "out_images": free, "out_plain": plain}
        if name == "pipeline-z-image":
            # It adds the scale to 1, and leaves guidance out at 0. The time steps of two steps are exact: its vector of a time step, a
            # sum over 1,024 numbers, makes those that diffusers rounds visible.
            more["num_inference_steps"] = 2
            free = pipe(list(PROMPTS), negative_prompt=["snow", "a fox"], latents=start, guidance_scale=3.0, **more).images
            plain = pipe(list(PROMPTS), latents=start, guidance_scale=0.0, **more).images
            return {"latents": latents, "out_images": free, "out_plain": plain}
        negative = ["snow", "a fox"]
        if name == "pipeline-wan":
            start = torch.from_numpy(latents := np.random.default_rng(7).standard_normal(FRAMES).astype(np.float32))
            more |= {"height": FRAMES[3] * 8, "width": FRAMES[4] * 8}
            videos = pipe(PROMPTS, negative_prompt=negative, latents=start, num_frames=5, guidance_scale=4.0, **more).frames
            plain = pipe(PROMPTS, latents=start, num_frames=5, guidance_scale=1.0, **more).frames
            return {"latents": latents, "out_videos": videos, "out_plain": plain}
        guided = pipe(PROMPTS, negative_prompt=negative, latents=start, guidance_scale=4.0, **more).images
        return {"latents": latents, "out_images": guided, "out_plain": pipe(PROMPTS, latents=start, guidance_scale=1.0, **more).images}


def controlled_images(pipe: Any, latents: torch.Tensor, more: dict[str, Any]) -> dict[str, np.ndarray]:
    """Images of a control image each: at a scale, in guess mode, and in some of the steps alone."""
    control = np.random.default_rng(8).random((2, 3, more["height"], more["width"])).astype(np.float32)
    images, arguments = {"control": control}, {"image": torch.from_numpy(control), "latents": latents, "guidance_scale": 4.0}
    for key, changes in (
        ("images", {"negative_prompt": ["snow", "a fox"], "controlnet_conditioning_scale": 0.8}),
        ("guessed", {"guess_mode": True}),
        ("plain", {"guidance_scale": 1.0}),
        ("span", {"control_guidance_start": 0.2, "control_guidance_end": 0.7, "num_inference_steps": 5}),
    ):
        images[f"out_{key}"] = pipe(list(PROMPTS), **more | arguments | changes).images
    return images | several_controls(pipe, control, arguments, more)


def several_controls(pipe: Any, control: np.ndarray, arguments: dict[str, Any], more: dict[str, Any]) -> dict[str, np.ndarray]:
    """Images of two ControlNets: the second has the tensors of the first turned upside down, and the first one's negative."""
    from diffusers import MultiControlNetModel

    second = copy.deepcopy(pipe.controlnet)
    for tensor in second.parameters():
        tensor.data = torch.flip(tensor.data, [0])
    both = type(pipe)(**pipe.components | {"controlnet": MultiControlNetModel([pipe.controlnet, second])})
    both.set_progress_bar_config(disable=True)
    arguments = arguments | {
        "image": [torch.from_numpy(control), torch.from_numpy(1 - control)],
        "controlnet_conditioning_scale": [0.8, 0.5],
    }
    spans = {"control_guidance_start": [0.0, 0.3], "control_guidance_end": [0.7, 1.0], "num_inference_steps": 5}
    images = {"out_several": both(list(PROMPTS), **more | arguments | spans).images}
    return images | {"out_several_guessed": both(list(PROMPTS), **more | arguments | {"guess_mode": True}).images}


def controlled_transformers(pipe: Any, name: str, latents: torch.Tensor, more: dict[str, Any]) -> dict[str, np.ndarray]:
    """The same of models whose ControlNets read latents of control images: their means, since diffusers draws these with torch's random
    numbers."""
    from diffusers import FluxMultiControlNetModel, SD3MultiControlNetModel
    from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution

    DiagonalGaussianDistribution.sample = lambda self, generator=None: self.mode()
    control = np.random.default_rng(8).random((2, 3, more["height"], more["width"])).astype(np.float32)
    of_flux = name == "pipeline-flux-controlnet"
    latents = pipe._pack_latents(latents, *LATENTS) if of_flux else latents
    # Tensors are taken as they are, in -1..1.
    picture, other = (torch.from_numpy(2 * picture_of - 1) for picture_of in (control, 1 - control))
    arguments: dict[str, Any] = {"control_image": picture, "latents": latents, "guidance_scale": 3.5}
    images, scaled = {"control": control}, {"controlnet_conditioning_scale": 0.8}
    scaled |= {"control_mode": 2} if of_flux else {"negative_prompt": ["snow", "a fox"]}
    span: dict[str, Any] = {"control_guidance_start": 0.2, "control_guidance_end": 0.7, "num_inference_steps": 5}
    span |= {"control_mode": 1} if of_flux else {"guidance_scale": 1.0}
    for key, changes in (("images", scaled), ("span", span)):
        images[f"out_{key}"] = pipe(list(PROMPTS), **more | arguments | changes).images
    if name == "pipeline-sd3.5-controlnet":
        return images
    second = copy.deepcopy(pipe.controlnet)
    for tensor in second.parameters():
        tensor.data = torch.flip(tensor.data, [0])
    several = (FluxMultiControlNetModel if of_flux else SD3MultiControlNetModel)([pipe.controlnet, second])
    both = type(pipe)(**pipe.components | {"controlnet": several})
    both.set_progress_bar_config(disable=True)
    arguments |= {"control_image": [picture, other], "controlnet_conditioning_scale": [0.8, 0.5], "num_inference_steps": 5}
    arguments |= {"control_guidance_start": [0.0, 0.3], "control_guidance_end": [0.7, 1.0]} | (
        {"control_mode": [0, 3]} if of_flux else {}
    )
    return images | {"out_several": both(list(PROMPTS), **more | arguments).images}


def cached_image(pipe: Any, latents: torch.Tensor, more: dict[str, Any]) -> dict[str, np.ndarray]:
    """An image in eight steps with diffusers' first-block cache, and in which of them it ran all layers."""
    from diffusers.hooks import FirstBlockCacheConfig, first_block_cache

    head, decided = first_block_cache.FBCHeadBlockHook, []
    plain = head._should_compute_remaining_blocks

    def recorded(self: Any, residual: torch.Tensor) -> bool:
        decided.append(plain(self, residual))
        return decided[-1]

    head._should_compute_remaining_blocks = recorded
    pipe.transformer.enable_cache(FirstBlockCacheConfig(threshold=THRESHOLD))
    image = pipe(PROMPTS[:1], latents=latents, guidance_scale=3.5, **more | {"num_inference_steps": 8}).images
    pipe.transformer.disable_cache()
    head._should_compute_remaining_blocks = plain
    return {"out_cached": image, "computed": np.array(decided, np.float32)}


def learned_images(pipe: Any, folder: Path) -> np.ndarray:
    """Images with a learned token of two vectors (textual inversion), from a file that is kept beside the golden; of XL with rows for
    both encoders, which are loaded one after the other."""
    encoders, draw = [pipe.text_encoder, *filter(None, [getattr(pipe, "text_encoder_2", None)])], np.random.default_rng(12)
    names = [LEARNED] if len(encoders) == 1 else ["clip_l", "clip_g"]
    rows = {name: draw.normal(0, 0.5, (2, encoder.config.hidden_size)).astype(np.float32) for name, encoder in zip(names, encoders)}
    file = folder / "learned_embeds.safetensors"
    save_file({name: torch.from_numpy(row) for name, row in rows.items()}, file, metadata={"token": LEARNED})
    whole = copy.deepcopy(pipe)
    if len(encoders) == 1:
        whole.load_textual_inversion(str(file))
    else:
        for name, end in (("clip_l", ""), ("clip_g", "_2")):
            parts = {"text_encoder": getattr(whole, f"text_encoder{end}"), "tokenizer": getattr(whole, f"tokenizer{end}")}
            whole.load_textual_inversion({LEARNED: torch.from_numpy(rows[name])}, **parts)
    whole.set_progress_bar_config(disable=True)
    start = torch.from_numpy(np.random.default_rng(7).standard_normal(LATENTS).astype(np.float32))
    arguments = {
        "num_inference_steps": 3,
        "output_type": "np",
        "height": LATENTS[2] * 4,
        "width": LATENTS[3] * 4,
        "guidance_scale": 4.0,
    }
    with torch.no_grad():
        return whole(LEARNED_PROMPTS, latents=start, **arguments).images


def lora_file(pipe: Any, name: str, folder: Path) -> Path | None:
    """A file of adapters of rank 2: of Flux with diffusers' names and its metadata, of Stable Diffusion with kohya's."""
    draw = np.random.default_rng(11)

    def factors(module: torch.nn.Linear) -> tuple[torch.Tensor, torch.Tensor]:
        a, b = draw.normal(0, 0.3, (2, module.in_features)), draw.normal(0, 0.3, (module.out_features, 2))
        return torch.from_numpy(a.astype(np.float32)), torch.from_numpy(b.astype(np.float32))

    tensors: dict[str, torch.Tensor] = {}
    if name == "pipeline-flux":
        targets = ["transformer_blocks.0.attn.to_q", "transformer_blocks.0.ff.net.2", "single_transformer_blocks.0.attn.to_v",
                   "single_transformer_blocks.0.proj_out"]  # fmt: skip
        for target in targets:
            a, b = factors(pipe.transformer.get_submodule(target))
            tensors |= {f"transformer.{target}.lora_A.weight": a, f"transformer.{target}.lora_B.weight": b}
        lora_config = {"transformer.r": 2, "transformer.lora_alpha": 3, "transformer.target_modules": targets}
        path = folder / "lora.safetensors"
        save_file(tensors, path, metadata={"format": "pt", "lora_adapter_metadata": json.dumps(lora_config)})
        return path
    if name != "pipeline-sd":
        return None
    block = "down_blocks.0.attentions.0.transformer_blocks.0"
    targets_of_lora = [("lora_unet", pipe.unet, f"{block}.attn1.to_q"), ("lora_unet", pipe.unet, f"{block}.ff.net.2")]
    for start, model, target in targets_of_lora:
        a, b = factors(model.get_submodule(target))
        flat = f"{start}_{target.replace('.', '_')}"
        tensors |= {f"{flat}.lora_down.weight": a, f"{flat}.lora_up.weight": b, f"{flat}.alpha": torch.tensor(1.5)}
    save_file(tensors, folder / "lora.safetensors")
    return folder / "lora.safetensors"
