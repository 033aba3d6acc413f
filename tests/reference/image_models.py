"""The small models of `images.py`: class, sizes, and a call that gives inputs and outputs. Sizes are odd on purpose."""

from typing import Any

import numpy as np
import torch


def noise(draw: np.random.Generator, *shape: int) -> np.ndarray:
    return draw.standard_normal(shape).astype(np.float32)


def tensors(inputs: dict[str, np.ndarray]) -> dict[str, torch.Tensor]:
    return {name: torch.from_numpy(value) for name, value in inputs.items()}


def array(value: torch.Tensor) -> np.ndarray:
    return value.detach().numpy()


# ---------------------------------------------------------------- text encoders


def clip_ids(draw: np.random.Generator) -> np.ndarray:
    """Rows end in their end-of-text token; what follows is padding. The end-of-text token is the largest id, as in every vocabulary."""
    ids = draw.integers(3, 88, (3, 21))
    ids[:, 0] = 88
    for row, length in enumerate((21, 9, 14)):
        ids[row, length - 1 :] = 89
    return ids


def clip(model: Any, draw: np.random.Generator) -> Any:
    ids = clip_ids(draw)
    output = model(torch.from_numpy(ids), output_hidden_states=True)
    outputs = {"hidden": output.last_hidden_state, "penultimate": output.hidden_states[-2]}
    outputs["pooled"] = output.text_embeds if hasattr(output, "text_embeds") else output.pooler_output
    return {"tokens": ids}, {name: array(value) for name, value in outputs.items()}


PICTURES = ((20, 31), (45, 17), (15, 15))


def clip_towers(model: Any, draw: np.random.Generator) -> Any:
    """Both towers, from images as the processor prepares them: of several sizes, resized and cropped."""
    from transformers import CLIPImageProcessor

    size = model.config.vision_config.image_size
    prepare = CLIPImageProcessor(size={"shortest_edge": size}, crop_size={"height": size, "width": size})
    pictures = [draw.integers(0, 256, (*sides, 3)).astype(np.uint8) for sides in PICTURES]
    # Noise alone looks alike everywhere.
    pictures = [np.uint8(0.5 * picture + np.linspace(0, 127, picture.shape[1])[None, :, None]) for picture in pictures]
    pixels = prepare(pictures, return_tensors="pt")["pixel_values"].float()
    ids = clip_ids(draw)
    output = model(input_ids=torch.from_numpy(ids), pixel_values=pixels)
    vision = model.vision_model(pixels)
    outputs = {"pixels": pixels, "texts": model.text_projection(model.text_model(torch.from_numpy(ids)).pooler_output)}
    outputs |= {"images": model.visual_projection(vision.pooler_output), "hidden": vision.last_hidden_state}
    outputs |= {"scores": output.logits_per_image}
    named_pictures = {f"picture_{i}": picture for i, picture in enumerate(pictures)}
    return named_pictures | {"tokens": ids}, {name: array(value) for name, value in outputs.items()}


def t5(model: Any, draw: np.random.Generator) -> Any:
    ids = draw.integers(2, 90, (2, 23))
    mask = np.ones_like(ids)
    mask[1, 15:] = 0
    output = model(torch.from_numpy(ids), attention_mask=torch.from_numpy(mask))
    whole = model(torch.from_numpy(ids[1:]))
    return {"tokens": ids, "mask": mask}, {"hidden": array(output.last_hidden_state), "unmasked": array(whole.last_hidden_state)}


CLIP = {"vocab_size": 90, "hidden_size": 28, "intermediate_size": 52, "num_hidden_layers": 3, "num_attention_heads": 4,
        "max_position_embeddings": 21, "bos_token_id": 88}  # fmt: skip
CLIP_VISION = {"hidden_size": 36, "intermediate_size": 50, "num_hidden_layers": 2, "num_attention_heads": 3, "image_size": 15,
               "patch_size": 5}  # fmt: skip
T5 = {"vocab_size": 90, "d_model": 30, "d_kv": 6, "d_ff": 44, "num_layers": 3, "num_heads": 4, "relative_attention_num_buckets": 8,
      "relative_attention_max_distance": 20, "feed_forward_proj": "gated-gelu"}  # fmt: skip


# ---------------------------------------------------------------- autoencoders


def vae(model: Any, draw: np.random.Generator) -> Any:
    images = noise(draw, 2, 3, 24, 20)
    moments = model.encode(torch.from_numpy(images)).latent_dist
    factor = 2 ** (len(model.config.block_out_channels) - 1)
    latents = noise(draw, 2, model.config.latent_channels, 24 // factor, 20 // factor)
    outputs = {"mean": moments.mean, "logvar": moments.logvar, "images": model.decode(torch.from_numpy(latents)).sample}
    return {"images": images, "latents": latents}, {name: array(value) for name, value in outputs.items()}


def flux2_vae(model: Any, draw: np.random.Generator) -> Any:
    """Also latents as denoisers read them: packed and normalized by the pipeline."""
    from diffusers import Flux2KleinPipeline as Klein

    inputs, outputs = vae(model, draw)
    spread = (model.bn.running_var + model.config.batch_norm_eps).sqrt()
    mean, deviation = (a.view(1, -1, 1, 1) for a in (model.bn.running_mean, spread))
    packed = (Klein._patchify_latents(torch.from_numpy(outputs["mean"])) - mean) / deviation
    scaled = torch.from_numpy(noise(draw, *packed.shape))
    images = model.decode(Klein._unpatchify_latents(scaled * deviation + mean)).sample
    return inputs | {"packed": array(scaled)}, outputs | {"packed": array(packed), "unpacked": array(images)}


def tiny_vae(model: Any, draw: np.random.Generator) -> Any:
    images, latents = noise(draw, 2, 3, 24, 40), noise(draw, 2, model.config.latent_channels, 3, 5)
    outputs = {"latents": model.encode(torch.from_numpy(images)).latents, "images": model.decode(torch.from_numpy(latents)).sample}
    return {"images": images, "latents": latents}, {name: array(value) for name, value in outputs.items()}


def wan_vae(model: Any, draw: np.random.Generator) -> Any:
    """An image, and a video of 9 frames. Latents are small, so that few pixels are clipped."""
    image, video = noise(draw, 1, 3, 1, 24, 16), noise(draw, 1, 3, 9, 24, 16)
    latents = 0.5 * noise(draw, 1, model.config.z_dim, 4, 3, 2)
    outputs = {"images": model.decode(torch.from_numpy(latents[:, :, :1])).sample}
    outputs["videos"] = model.decode(torch.from_numpy(latents)).sample
    for name, frames in (("image", image), ("video", video)):
        moments = model.encode(torch.from_numpy(frames)).latent_dist
        outputs |= {f"{name}_mean": moments.mean, f"{name}_logvar": moments.logvar}
    return {"image": image, "video": video, "latents": latents}, {name: array(value) for name, value in outputs.items()}


VAE = {"in_channels": 3, "out_channels": 3, "down_block_types": ("DownEncoderBlock2D",) * 3,
       "up_block_types": ("UpDecoderBlock2D",) * 3, "block_out_channels": (8, 16, 16),
       "layers_per_block": 1, "latent_channels": 4, "norm_num_groups": 4}  # fmt: skip


FLUX2_VAE = VAE | {"down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2,
                   "block_out_channels": (8, 16), "batch_norm_eps": 1e-3}  # fmt: skip

WAN_VAE = {"base_dim": 6, "z_dim": 4, "num_res_blocks": 1, "latents_mean": [-0.3, 0.2, 0.1, -0.6], "latents_std": [1.5, 0.8, 2.2, 1.1]}

# ---------------------------------------------------------------- denoisers


def flux(model: Any, draw: np.random.Generator) -> Any:
    from diffusers import FluxPipeline

    rows, columns, channels = 6, 10, model.config.in_channels // 4
    latents = noise(draw, 2, channels, rows, columns)
    arrays = {"latents": latents, "text": noise(draw, 2, 7, model.config.joint_attention_dim)}
    arrays |= {"pooled": noise(draw, 2, model.config.pooled_projection_dim), "timestep": np.asarray([731.5, 20.25], np.float32)}
    arrays |= {"guidance": np.asarray([3.5, 1.25], np.float32)} if model.config.guidance_embeds else {}
    torch_inputs = tensors(arrays)
    packed = FluxPipeline._pack_latents(torch_inputs["latents"], 2, channels, rows, columns)
    output = model(
        hidden_states=packed,
        encoder_hidden_states=torch_inputs["text"],
        pooled_projections=torch_inputs["pooled"],
        timestep=torch_inputs["timestep"] / 1000,
        guidance=torch_inputs.get("guidance"),
        txt_ids=torch.zeros(7, 3),
        img_ids=FluxPipeline._prepare_latent_image_ids(2, rows // 2, columns // 2, "cpu", torch.float32),
    ).sample
    out = FluxPipeline._unpack_latents(output, rows * 8, columns * 8, 8)
    return arrays, {"velocity": array(out)}


def flux2(model: Any, draw: np.random.Generator) -> Any:
    from diffusers import Flux2KleinPipeline as Klein

    arrays = {"latents": noise(draw, 2, model.config.in_channels, 3, 5), "text": noise(draw, 2, 7, model.config.joint_attention_dim)}
    arrays |= {"timestep": np.asarray([731.5, 20.25], np.float32)}
    # Small ones: of thousands, sines see how torch rounds its frequencies.
    arrays |= {"guidance": np.asarray([0.5, 0.125], np.float32)} if model.config.guidance_embeds else {}
    torch_inputs = tensors(arrays)
    output = model(
        hidden_states=Klein._pack_latents(torch_inputs["latents"]),
        encoder_hidden_states=torch_inputs["text"],
        timestep=torch_inputs["timestep"] / 1000,
        guidance=torch_inputs.get("guidance"),
        txt_ids=Klein._prepare_text_ids(torch_inputs["text"]),
        img_ids=Klein._prepare_latent_ids(torch_inputs["latents"]),
    ).sample
    return arrays, {"velocity": array(output.permute(0, 2, 1).reshape(torch_inputs["latents"].shape))}


def sd3(model: Any, draw: np.random.Generator) -> Any:
    arrays = {"latents": noise(draw, 2, model.config.in_channels, 6, 10), "text": noise(draw, 2, 7, model.config.joint_attention_dim)}
    arrays |= {"pooled": noise(draw, 2, model.config.pooled_projection_dim), "timestep": np.asarray([731.5, 20.25], np.float32)}
    torch_inputs = tensors(arrays)
    output = model(
        hidden_states=torch_inputs["latents"],
        encoder_hidden_states=torch_inputs["text"],
        pooled_projections=torch_inputs["pooled"],
        timestep=torch_inputs["timestep"],
    ).sample
    return arrays, {"velocity": array(output)}


def dit(model: Any, draw: np.random.Generator) -> Any:
    """At another size than the trained one; diffusers takes squares only. The learned variance is left out."""
    channels = model.config.in_channels
    arrays = {"latents": noise(draw, 2, channels, 12, 12), "labels": np.asarray([3, 7])}
    arrays |= {"timestep": np.asarray([731.0, 20.0], np.float32)}
    torch_inputs = tensors(arrays)
    output = model(torch_inputs["latents"], timestep=torch_inputs["timestep"], class_labels=torch_inputs["labels"]).sample
    return arrays, {"prediction": array(output[:, :channels])}


def unet_inputs(model: Any, draw: np.random.Generator) -> Any:
    arrays = {"latents": noise(draw, 2, model.config.in_channels, 12, 8), "text": noise(draw, 2, 7, model.config.cross_attention_dim)}
    arrays |= {"timestep": np.asarray([731.0, 20.0], np.float32)}
    more = None
    if model.config.addition_embed_type == "text_time":
        arrays |= {"pooled": noise(draw, 2, 14), "sizes": np.asarray([[96, 64, 0, 0, 96, 64], [80, 64, 3, 5, 96, 64]], np.float32)}
        more = {"text_embeds": torch.from_numpy(arrays["pooled"]), "time_ids": torch.from_numpy(arrays["sizes"])}
    return arrays, more


def unet(model: Any, draw: np.random.Generator) -> Any:
    arrays, more = unet_inputs(model, draw)
    torch_inputs = tensors(arrays)
    output = model(torch_inputs["latents"], torch_inputs["timestep"], torch_inputs["text"], added_cond_kwargs=more).sample
    return arrays, {"prediction": array(output)}


def controlnet(model: Any, draw: np.random.Generator) -> Any:
    """What it gives for each skip, flat and in order, at a scale of its own, and in guess mode."""
    inputs, more = unet_inputs(model, draw)
    factor = 2 ** (len(model.config.conditioning_embedding_out_channels) - 1)
    inputs["control"] = draw.random((2, 3, 12 * factor, 8 * factor)).astype(np.float32)
    torch_inputs, outputs = tensors(inputs), {}
    for name, scale, guesses in (("residuals", 1.0, False), ("guessed", 0.75, True)):
        skips, middle = model(torch_inputs["latents"], torch_inputs["timestep"], torch_inputs["text"], torch_inputs["control"], 
                              conditioning_scale=scale, guess_mode=guesses, added_cond_kwargs=more, return_dict=False)  # fmt: skip
        outputs[name] = torch.cat([residual.flatten(1) for residual in [*skips, middle]], 1)
    return inputs, {name: array(value) for name, value in outputs.items()}


def flux_controlnet(model: Any, draw: np.random.Generator) -> Any:
    """What it gives for each layer of either kind [R B T D]; a union of several kinds of control is told which."""
    from diffusers import FluxPipeline

    rows, columns, channels = 6, 10, model.config.in_channels // 4
    arrays = {"latents": noise(draw, 2, channels, rows, columns), "control": noise(draw, 2, channels, rows, columns)}
    arrays |= {
        "text": noise(draw, 2, 7, model.config.joint_attention_dim),
        "pooled": noise(draw, 2, model.config.pooled_projection_dim),
    }
    arrays |= {"timestep": np.asarray([731.5, 20.25], np.float32)}
    arrays |= {"guidance": np.asarray([3.5, 1.25], np.float32)} if model.config.guidance_embeds else {}
    arrays |= {"mode": np.asarray([2, 0])} if model.config.num_mode else {}
    torch_inputs = tensors(arrays)
    latents, control = (FluxPipeline._pack_latents(torch_inputs[name], 2, channels, rows, columns) for name in ("latents", "control"))
    output = model(
        hidden_states=latents,
        controlnet_cond=control,
        controlnet_mode=torch_inputs["mode"][:, None] if "mode" in torch_inputs else None,
        encoder_hidden_states=torch_inputs["text"],
        pooled_projections=torch_inputs["pooled"],
        timestep=torch_inputs["timestep"] / 1000,
        guidance=torch_inputs.get("guidance"),
        txt_ids=torch.zeros(7, 3),
        img_ids=FluxPipeline._prepare_latent_image_ids(2, rows // 2, columns // 2, "cpu", torch.float32),
        return_dict=False,
    )
    return arrays, {
        name: array(torch.stack(layers)) for name, layers in zip(("layers", "single_layers"), output, strict=True) if layers
    }


def sd3_controlnet(model: Any, draw: np.random.Generator) -> Any:
    """What it gives for each layer [R B T D]. One without positions reads tokens that the steered model made of latents; one without
    text, no text."""
    config, inner = model.config, model.inner_dim
    arrays = {name: noise(draw, 2, config.in_channels, 6, 10) for name in ("latents", "control")}
    arrays |= {"pooled": noise(draw, 2, config.pooled_projection_dim), "timestep": np.asarray([731.5, 20.25], np.float32)}
    arrays |= {} if config.joint_attention_dim is None else {"text": noise(draw, 2, 7, config.joint_attention_dim)}
    arrays |= {} if config.use_pos_embed else {"tokens": noise(draw, 2, 15, inner)}
    torch_inputs = tensors(arrays)
    # Its pipeline leaves the pooled text out where the settings say so.
    pooled = torch.zeros_like(torch_inputs["pooled"]) if config.force_zeros_for_pooled_projection else torch_inputs["pooled"]
    (output,) = model(
        hidden_states=torch_inputs.get("tokens", torch_inputs["latents"]),
        controlnet_cond=torch_inputs["control"],
        encoder_hidden_states=torch_inputs.get("text"),
        pooled_projections=pooled,
        timestep=torch_inputs["timestep"],
        return_dict=False,
    )
    return arrays, {"layers": array(torch.stack(output))}


def z_image(model: Any, draw: np.random.Generator) -> Any:
    """Texts of different lengths, one of more than 32 tokens. Its own output is image - noise, at times from 0 (noise) to 1. These
    times are exact in thousandths. Later ones see that torch rounds two of 128 frequencies otherwise: 1e-5 of an angle at 984."""
    arrays = {"latents": noise(draw, 2, model.config.in_channels, 6, 10), "text": noise(draw, 2, 39, model.config.cap_feat_dim)}
    arrays |= {"timestep": np.asarray([734.375, 890.625], np.float32), "text_mask": np.arange(39) < np.asarray([[39], [7]])}
    torch_inputs = tensors(arrays)
    texts = [row[mask] for row, mask in zip(torch_inputs["text"], torch_inputs["text_mask"], strict=True)]
    output = model(list(torch_inputs["latents"].unsqueeze(2)), (1000 - torch_inputs["timestep"]) / 1000, texts).sample
    return arrays | {"text_mask": arrays["text_mask"].astype(np.int32)}, {"velocity": -array(torch.stack(output).squeeze(2))}


def wan(model: Any, draw: np.random.Generator) -> Any:
    arrays = {"latents": noise(draw, 2, model.config.in_channels, 3, 6, 4), "text": noise(draw, 2, 7, model.config.text_dim)}
    arrays |= {"timestep": np.asarray([731.0, 20.0], np.float32)}
    torch_inputs = tensors(arrays)
    output = model(torch_inputs["latents"], torch_inputs["timestep"], torch_inputs["text"]).sample
    return arrays, {"velocity": array(output)}


FLUX = {"patch_size": 1, "in_channels": 16, "num_layers": 2, "num_single_layers": 3, "attention_head_dim": 14, "num_attention_heads": 3,
        "joint_attention_dim": 26, "pooled_projection_dim": 18, "axes_dims_rope": (4, 4, 6)}  # fmt: skip
FLUX2 = {"in_channels": 16, "num_layers": 2, "num_single_layers": 2, "attention_head_dim": 14, "num_attention_heads": 3,
         "joint_attention_dim": 26, "axes_dims_rope": (2, 4, 6, 2), "timestep_guidance_channels": 64}  # fmt: skip
SD3 = {"sample_size": 16, "patch_size": 2, "in_channels": 4, "num_layers": 3, "attention_head_dim": 12, "num_attention_heads": 3,
       "joint_attention_dim": 26, "caption_projection_dim": 36, "pooled_projection_dim": 18, "out_channels": 4,
       "pos_embed_max_size": 9}  # fmt: skip
UNET = {"sample_size": 12, "in_channels": 4, "out_channels": 4, "layers_per_block": 1, "norm_num_groups": 4, "cross_attention_dim": 26}
Z_IMAGE = {"in_channels": 4, "dim": 32, "n_layers": 2, "n_refiner_layers": 2, "n_heads": 2, "n_kv_heads": 2, "cap_feat_dim": 26,
           "axes_dims": [4, 6, 6], "axes_lens": [600, 32, 32]}  # fmt: skip
WAN = {"patch_size": (1, 2, 2), "num_attention_heads": 2, "attention_head_dim": 12, "in_channels": 4, "out_channels": 4, "text_dim": 26,
       "freq_dim": 16, "ffn_dim": 40, "num_layers": 2, "cross_attn_norm": True, "qk_norm": "rms_norm_across_heads",
       "rope_max_seq_len": 32}  # fmt: skip

SD = {"block_out_channels": (8, 12), "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
      "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"), "attention_head_dim": 4}  # fmt: skip
XL = {"block_out_channels": (8, 12), "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
      "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"), "attention_head_dim": (2, 3), "use_linear_projection": True,
      "addition_embed_type": "text_time", "addition_time_embed_dim": 6, "transformer_layers_per_block": (1, 2),
      "projection_class_embeddings_input_dim": 14 + 6 * 6}  # fmt: skip

CONTROLNET = {key: UNET[key] for key in UNET if key not in ("sample_size", "out_channels")} | {
    "conditioning_embedding_out_channels": (5, 6, 7)}  # fmt: skip

FLUX_CONTROLNET = {key: value for key, value in FLUX.items() if not key.endswith("_layers")} | {"num_layers": 2, "num_single_layers": 1}
SD3_CONTROLNET = SD3 | {"num_layers": 2, "qk_norm": "rms_norm", "dual_attention_layers": (0,)}
# As those of Stability AI for 3.5 large.
SD35_CONTROLNET = SD3 | {"num_layers": 2, "joint_attention_dim": None, "use_pos_embed": False, "pos_embed_type": None,
                         "force_zeros_for_pooled_projection": False}  # fmt: skip


def without_up(sizes: dict) -> dict:
    return {key: value for key, value in sizes.items() if key != "up_block_types"}


MODELS: dict[str, tuple[str, dict, Any]] = {
    "clip-l": ("CLIPTextModel", CLIP | {"hidden_act": "quick_gelu", "eos_token_id": 2}, clip),
    "clip-g": ("CLIPTextModelWithProjection", CLIP | {"hidden_act": "gelu", "eos_token_id": 89, "projection_dim": 14}, clip),
    "clip": ("CLIPModel", {"text_config": CLIP | {"hidden_act": "quick_gelu", "eos_token_id": 89}, "vision_config": CLIP_VISION,
                           "projection_dim": 14}, clip_towers),
    "t5": ("T5EncoderModel", T5, t5),
    "t5-plain": ("T5EncoderModel", T5 | {"feed_forward_proj": "relu"}, t5),
    "umt5": ("UMT5EncoderModel", T5, t5),
    "vae-sd": ("AutoencoderKL", VAE | {"layers_per_block": 2}, vae),
    "vae-flux": ("AutoencoderKL", VAE | {"use_quant_conv": False, "use_post_quant_conv": False, "latent_channels": 6,
                                         "scaling_factor": 0.3611, "shift_factor": 0.1159}, vae),
    "vae-flux2": ("AutoencoderKLFlux2", FLUX2_VAE, flux2_vae),
    "vae-wan": ("AutoencoderKLWan", WAN_VAE, wan_vae),
    "vae-tiny": ("AutoencoderTiny", {"encoder_block_out_channels": (8,) * 4, "decoder_block_out_channels": (8,) * 4,
                                     "num_encoder_blocks": (1, 2, 1, 1), "num_decoder_blocks": (1, 1, 2, 1)}, tiny_vae),
    "flux-dev": ("FluxTransformer2DModel", FLUX | {"guidance_embeds": True}, flux),
    "flux-schnell": ("FluxTransformer2DModel", FLUX, flux),
    "flux2-dev": ("Flux2Transformer2DModel", FLUX2, flux2),
    "flux2-klein": ("Flux2Transformer2DModel", FLUX2 | {"guidance_embeds": False, "mlp_ratio": 2.0}, flux2),
    "sd3": ("SD3Transformer2DModel", SD3, sd3),
    "sd3.5": ("SD3Transformer2DModel", SD3 | {"qk_norm": "rms_norm", "dual_attention_layers": (0, 1)}, sd3),
    "dit": ("DiTTransformer2DModel", {
        "num_attention_heads": 3, "attention_head_dim": 8, "in_channels": 3, "out_channels": 6, "num_layers": 3, "sample_size": 8,
        "patch_size": 2, "num_embeds_ada_norm": 7, "norm_eps": 1e-3}, dit),
    "unet-sd": ("UNet2DConditionModel", UNET | SD, unet),
    "unet-xl": ("UNet2DConditionModel", UNET | XL, unet),
    "controlnet-sd": ("ControlNetModel", CONTROLNET | without_up(SD), controlnet),
    "controlnet-xl": ("ControlNetModel", CONTROLNET | without_up(XL) | {"controlnet_conditioning_channel_order": "bgr"}, controlnet),
    "controlnet-flux": ("FluxControlNetModel", FLUX_CONTROLNET | {"guidance_embeds": True}, flux_controlnet),
    "controlnet-flux-union": ("FluxControlNetModel", FLUX_CONTROLNET | {"num_mode": 5, "num_single_layers": 0}, flux_controlnet),
    "controlnet-sd3": ("SD3ControlNetModel", SD3_CONTROLNET, sd3_controlnet),
    "controlnet-sd3.5": ("SD3ControlNetModel", SD35_CONTROLNET, sd3_controlnet),
    "z-image": ("ZImageTransformer2DModel", Z_IMAGE, z_image),
    "wan": ("WanTransformer3DModel", WAN, wan),
}  # fmt: skip
