"""Small files in their authors' own names, read by diffusers' converters: `./run reference images` writes their goldens too.

The names here are written by hand; diffusers' converters turn them into its own, and its models take exactly those.
"""

import inspect
import re
from typing import Any

import numpy as np
import torch
from diffusers.loaders import single_file_utils as theirs
from image_models import CLIP, SD, UNET, VAE, XL, array, clip, flux, noise, unet

FLUX = {"patch_size": 1, "in_channels": 16, "num_layers": 2, "num_single_layers": 1, "attention_head_dim": 128,
        "num_attention_heads": 1, "joint_attention_dim": 30, "pooled_projection_dim": 28, "axes_dims_rope": (16, 56, 56),
        "guidance_embeds": True}  # fmt: skip
LDM = UNET | {"norm_num_groups": 32}
SINGLE_FILES: dict[str, tuple[str, dict[str, Any]]] = {
    "single-flux": ("FluxTransformer2DModel", FLUX),
    "single-sd": ("UNet2DConditionModel", LDM | SD | {
        "layers_per_block": 2, "block_out_channels": (32, 64), "cross_attention_dim": 768, "attention_head_dim": 8}),
    "single-xl": ("UNet2DConditionModel", LDM | XL | {
        "block_out_channels": (64, 128), "cross_attention_dim": 2048, "attention_head_dim": (1, 2), "addition_time_embed_dim": 256,
        "projection_class_embeddings_input_dim": 14 + 6 * 256}),
    "single-openclip": ("CLIPTextModelWithProjection", CLIP | {
        "hidden_size": 64, "num_attention_heads": 1, "hidden_act": "gelu", "eos_token_id": 89, "projection_dim": 14}),
}  # fmt: skip
AUTOENCODER = VAE | {"block_out_channels": (32, 32), "down_block_types": ("DownEncoderBlock2D",) * 2, "norm_num_groups": 32,
                     "up_block_types": ("UpDecoderBlock2D",) * 2}  # fmt: skip


def flux_shapes(c: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Black Forest Labs' names and shapes."""
    d, f = c["num_attention_heads"] * c["attention_head_dim"], 4 * c["num_attention_heads"] * c["attention_head_dim"]
    head = c["attention_head_dim"]
    linear = {"img_in": (d, c["in_channels"]), "txt_in": (d, c["joint_attention_dim"]), "final_layer.linear": (c["in_channels"], d)}
    linear["final_layer.adaLN_modulation.1"] = (2 * d, d)
    for name, width in (("time_in", 256), ("vector_in", c["pooled_projection_dim"]), ("guidance_in", 256)):
        linear |= {f"{name}.in_layer": (d, width), f"{name}.out_layer": (d, d)}
    norms = []
    for i in range(c["num_layers"]):
        for side in ("img", "txt"):
            at = f"double_blocks.{i}.{side}"
            linear |= {f"{at}_mod.lin": (6 * d, d), f"{at}_attn.qkv": (3 * d, d), f"{at}_attn.proj": (d, d)}
            linear |= {f"{at}_mlp.0": (f, d), f"{at}_mlp.2": (d, f)}
            norms += [f"{at}_attn.norm.query_norm.scale", f"{at}_attn.norm.key_norm.scale"]
    for i in range(c["num_single_layers"]):
        at = f"single_blocks.{i}"
        linear |= {f"{at}.linear1": (3 * d + f, d), f"{at}.linear2": (d, d + f), f"{at}.modulation.lin": (3 * d, d)}
        norms += [f"{at}.norm.query_norm.scale", f"{at}.norm.key_norm.scale"]
    shapes: dict[str, tuple[int, ...]] = dict.fromkeys(norms, (head,))
    for name, shape in linear.items():
        shapes |= {f"{name}.weight": shape, f"{name}.bias": shape[:1]}
    return shapes


def openclip_shapes(c: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """OpenCLIP's names and shapes in a file of Stable Diffusion XL."""
    d, f, start = c["hidden_size"], c["intermediate_size"], "conditioner.embedders.1.model."
    shapes: dict[str, tuple[int, ...]] = {"token_embedding.weight": (c["vocab_size"], d), "text_projection": (d, c["projection_dim"])}
    shapes |= {"positional_embedding": (c["max_position_embeddings"], d), "ln_final.weight": (d,), "ln_final.bias": (d,)}
    for i in range(c["num_hidden_layers"]):
        at = f"transformer.resblocks.{i}"
        shapes |= {f"{at}.attn.in_proj_weight": (3 * d, d), f"{at}.attn.in_proj_bias": (3 * d,)}
        for name, rows, columns in (("attn.out_proj", d, d), ("mlp.c_fc", f, d), ("mlp.c_proj", d, f)):
            shapes |= {f"{at}.{name}.weight": (rows, columns), f"{at}.{name}.bias": (rows,)}
        for name in ("ln_1", "ln_2"):
            shapes |= {f"{at}.{name}.weight": (d,), f"{at}.{name}.bias": (d,)}
    return {start + name: shape for name, shape in shapes.items()}


def ldm_unet_name(name: str, c: dict[str, Any]) -> str:
    """The name in CompVis' UNet of a tensor of diffusers: blocks are counted through, and a level ends with its down- or upsampling."""
    each = c["layers_per_block"] + 1
    inner = {"norm1": "in_layers.0", "conv1": "in_layers.2", "norm2": "out_layers.0", "conv2": "out_layers.3",
             "time_emb_proj": "emb_layers.1", "conv_shortcut": "skip_connection"}  # fmt: skip
    parts = name.split(".")
    if parts[0] in ("down_blocks", "up_blocks"):
        level, kind, i = int(parts[1]), parts[2], int(parts[3])
        if kind == "downsamplers":
            return f"input_blocks.{each * (level + 1)}.0.op.{parts[-1]}"
        if kind == "upsamplers":
            crosses = c["up_block_types"][level].startswith("Cross")
            return f"output_blocks.{each * (level + 1) - 1}.{2 if crosses else 1}.conv.{parts[-1]}"
        block = f"input_blocks.{1 + each * level + i}" if parts[0] == "down_blocks" else f"output_blocks.{each * level + i}"
        if kind == "attentions":
            return ".".join([block, "1", *parts[4:]])
        return ".".join([block, "0", inner[parts[4]], parts[5]])
    if parts[0] == "mid_block":
        place = {"resnets.0": "0", "attentions.0": "1", "resnets.1": "2"}[".".join(parts[1:3])]
        rest = [inner[parts[3]], parts[4]] if parts[1] == "resnets" else parts[3:]
        return ".".join(["middle_block", place, *rest])
    ends = {"conv_in": "input_blocks.0.0", "conv_norm_out": "out.0", "conv_out": "out.2", "time_embedding.linear_1": "time_embed.0",
            "time_embedding.linear_2": "time_embed.2", "add_embedding.linear_1": "label_emb.0.0",
            "add_embedding.linear_2": "label_emb.0.2"}  # fmt: skip
    return f"{ends['.'.join(parts[:-1])]}.{parts[-1]}"


def ldm_vae_name(name: str, levels: int) -> str:
    """The name in CompVis' autoencoder: its decoder counts levels from the image."""
    name = re.sub(r"decoder\.up_blocks\.(\d+)", lambda m: f"decoder.up.{levels - 1 - int(m[1])}", name)
    for a, b in (("down_blocks.", "down."), (".resnets.", ".block."), ("downsamplers.0", "downsample"), ("upsamplers.0", "upsample"),
                 ("mid_block.block.0", "mid.block_1"), ("mid_block.block.1", "mid.block_2"), ("mid_block.attentions.0", "mid.attn_1"),
                 ("attn_1.group_norm", "attn_1.norm"), ("attn_1.to_out.0", "attn_1.proj_out"), ("attn_1.to_", "attn_1."),
                 ("conv_shortcut", "nin_shortcut"), ("conv_norm_out", "norm_out")):  # fmt: skip
        name = name.replace(a, b)
    return name


def author_shapes(name: str, fresh: Any) -> dict[str, tuple[int, ...]]:
    """The names and shapes of a file."""
    kind, config = SINGLE_FILES[name]
    if name == "single-flux":
        return flux_shapes(config)
    if name == "single-openclip":
        return openclip_shapes(config)
    state = fresh(kind, config).state_dict()
    shapes = {f"model.diffusion_model.{ldm_unet_name(key, config)}": tuple(value.shape) for key, value in state.items()}
    for key, value in fresh("AutoencoderKL", AUTOENCODER).state_dict().items():
        inner = ldm_vae_name(key, len(AUTOENCODER["block_out_channels"]))
        is_matrix = "attn_1" in inner and value.ndim == 2
        shapes[f"first_stage_model.{inner}"] = (*value.shape, 1, 1) if is_matrix else tuple(value.shape)
    return shapes


def author_golden(name: str, weights: dict[str, np.ndarray], fresh: Any, draw: np.random.Generator) -> tuple[dict, dict]:
    """Inputs and outputs of diffusers' models with what its converters make of a file."""
    kind, config = SINGLE_FILES[name]
    state_dict, model = {key: torch.from_numpy(value) for key, value in weights.items()}, fresh(kind, config)
    if name == "single-flux":
        # The converter knows one width.
        source = inspect.getsource(theirs.convert_flux_transformer_checkpoint_to_diffusers)
        source = source.replace("inner_dim = 3072", "inner_dim = 128")
        scope: dict[str, Any] = dict(vars(theirs))
        exec(source, scope)
        state = scope["convert_flux_transformer_checkpoint_to_diffusers"](dict(state_dict))
        model.load_state_dict(state, strict=True)
        with torch.no_grad():
            return flux(model, draw)
    if name == "single-openclip":
        state = theirs.convert_open_clip_checkpoint(model, state_dict, prefix="conditioner.embedders.1.model.")
        model.load_state_dict(state, strict=True)
        with torch.no_grad():
            return clip(model, draw)
    model.load_state_dict(theirs.convert_ldm_unet_checkpoint(dict(state_dict), dict(model.config)), strict=True)
    vae = fresh("AutoencoderKL", AUTOENCODER)
    vae.load_state_dict(theirs.convert_ldm_vae_checkpoint(dict(state_dict), dict(vae.config)), strict=True)
    with torch.no_grad():
        inputs, outputs = unet(model, draw)
        latents = noise(draw, 1, 4, 6, 4)
        return inputs | {"coded": latents}, outputs | {"images": array(vae.decode(torch.from_numpy(latents)).sample)}
