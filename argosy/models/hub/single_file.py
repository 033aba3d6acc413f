"""Single files of one model or of a whole pipeline, as their authors published them. Such a file has no config.json, so settings are
derived from the shapes of tensors.

    Flux.1                        by Black Forest Labs: `double_blocks.0.img_attn.qkv.weight`, with queries, keys and values in one
    Stable Diffusion 1, 2, XL     by CompVis and Stability AI: `model.diffusion_model.input_blocks.1.0.in_layers.0.weight`. The file
                                  also has the autoencoder (`first_stage_model.`) and the text encoders. The text encoder of 2
                                  and the second one of XL have OpenCLIP's names: `transformer.resblocks.0.attn.in_proj_weight`
"""

import re
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from argosy.core.errors import BadInput
from argosy.core.keymap import KeyRow
from argosy.models.hub.flux import modulation_rows
from argosy.models.hub.mmdit import linear_rows, mmdit_sizes

Shapes = Mapping[str, tuple[int, ...]]
# By head size, the number of features that each axis of positions rotates. They cannot be derived from tensors.
FLUX_AXES = {128: (16, 56, 56)}
# By width of the text states: the number of heads of a level, from the level's width, and the scale of the autoencoder's latents.
STABLE_DIFFUSION = {
    768: (lambda width: 8, 0.18215),
    1024: (lambda width: width // 64, 0.18215),
    2048: (lambda width: width // 64, 0.13025),
}
SIZE_WAVES = 256
RESNET = {
    "norm1": "in_layers.0", "conv1": "in_layers.2", "time_emb_proj": "emb_layers.1", "norm2": "out_layers.0",
    "conv2": "out_layers.3", "conv_shortcut": "skip_connection",
}  # fmt: skip
UNET_ENDS = {
    "conv_in": "input_blocks.0.0", "conv_norm_out": "out.0", "conv_out": "out.2", "time_embedding.linear_1": "time_embed.0",
    "time_embedding.linear_2": "time_embed.2", "add_embedding.linear_1": "label_emb.0.0", "add_embedding.linear_2": "label_emb.0.2",
    "mid_block.resnets.0": "middle_block.0", "mid_block.attentions.0": "middle_block.1", "mid_block.resnets.1": "middle_block.2",
}  # fmt: skip
VAE_ENDS = {
    "mid_block.resnets.0": "mid.block_1", "mid_block.resnets.1": "mid.block_2", "mid_block.attentions.0": "mid.attn_1",
    "conv_norm_out": "norm_out",
}  # fmt: skip
VAE_ATTENTION = {"group_norm": "norm", "to_q": "q", "to_k": "k", "to_v": "v", "to_out.0": "proj_out"}


def flux_settings(shapes: Shapes) -> dict[str, Any]:
    """Derives the settings of a Flux.1 from the shapes of its tensors.

    Raises:
        BadInput: the model reads an image besides the noise, or its head size is not 128.
    """
    width, packed = shapes["img_in.weight"]
    if (out := shapes["final_layer.linear.weight"][0]) != packed:
        problem = f"a Flux that reads {packed} numbers of a patch and gives {out}, which is not built"
        raise BadInput(problem, hint="models that fill, or follow depth or edges, read an image beside the noise")
    (head,) = shapes["double_blocks.0.img_attn.norm.query_norm.scale"]
    if head not in FLUX_AXES:
        raise BadInput(f"a Flux with heads of {head} features: how they turn is known for {', '.join(map(str, FLUX_AXES))} alone")
    return {
        "channels": packed // 4,
        "layers": part_count(shapes, "double_blocks"),
        "single_layers": part_count(shapes, "single_blocks"),
        "heads": width // head,
        "head_size": head,
        "axes": FLUX_AXES[head],
        "text_width": shapes["txt_in.weight"][1],
        "pooled_width": shapes["vector_in.in_layer.weight"][1],
        "waves": shapes["time_in.in_layer.weight"][1],
        "guided": "guidance_in.in_layer.weight" in shapes,
    }


def flux_rows(config: Any) -> tuple[list[KeyRow], dict[str, int]]:
    """Returns the rows for Black Forest Labs' tensor names, and the size of each axis in the rows."""
    double, single = range(config.layers), range(config.single_layers)
    rows = [KeyRow("img_in.weight", "patch.w", "D (C p q) -> (p q C) D"), KeyRow("img_in.bias", "patch.b", "D -> D")]
    rows += linear_rows("txt_in", "text_embed", "D", "text")
    embedders = {"time_in": ("time", "waves"), "vector_in": ("pooled", "pooled"), "guidance_in": ("guidance", "waves")}
    for theirs, (ours, inputs) in embedders.items():
        if theirs != "guidance_in" or config.guided:
            rows += linear_rows(f"{theirs}.in_layer", f"vector.{ours}.up", "embedder", inputs)
            rows += linear_rows(f"{theirs}.out_layer", f"vector.{ours}.down", "D", "embedder")
    for ours, short in (("image", "img"), ("text", "txt")):
        theirs, to = f"double_blocks.{{l}}.{short}", f"layers.{{l}}.{ours}"
        rows += modulation_rows(f"{theirs}_mod.lin", f"{to}.modulation", 6, double)
        qkv = [f"{to}.attn.{x}" for x in "qkv"]
        weights, biases = tuple(f"{path}.w" for path in qkv), tuple(f"{path}.b" for path in qkv)
        rows.append(KeyRow(f"{theirs}_attn.qkv.weight", weights, "((N|K|K) H) D -> D N H, D K H, D K H", double))
        rows.append(KeyRow(f"{theirs}_attn.qkv.bias", biases, "((N|K|K) H) -> N H, K H, K H", double))
        for x, name in (("q", "query"), ("k", "key")):
            rows.append(KeyRow(f"{theirs}_attn.norm.{name}_norm.scale", f"{to}.attn.{x}_norm.scale", "H -> H", double))
        rows += linear_rows(f"{theirs}_attn.proj", f"{to}.attn.o", "D", "N H", double)
        rows += linear_rows(f"{theirs}_mlp.0", f"{to}.mlp.up", "F", "D", double)
        rows += linear_rows(f"{theirs}_mlp.2", f"{to}.mlp.down", "D", "F", double)
    theirs, to = "single_blocks.{l}", "single_layers.{l}"
    rows += modulation_rows(f"{theirs}.modulation.lin", f"{to}.modulation", 3, single)
    inner = [*(f"{to}.attn.{x}" for x in "qkv"), f"{to}.up"]
    weights, biases = tuple(f"{path}.w" for path in inner), tuple(f"{path}.b" for path in inner)
    rows.append(KeyRow(f"{theirs}.linear1.weight", weights, "(N H|K H|K H|F) D -> D N H, D K H, D K H, D F", single))
    rows.append(KeyRow(f"{theirs}.linear1.bias", biases, "(N H|K H|K H|F) -> N H, K H, K H, F", single))
    for x, name in (("q", "query"), ("k", "key")):
        rows.append(KeyRow(f"{theirs}.norm.{name}_norm.scale", f"{to}.attn.{x}_norm.scale", "H -> H", single))
    rows.append(KeyRow(f"{theirs}.linear2.weight", (f"{to}.attn.o.w", f"{to}.down.w"), "D (N H|F) -> N H D, F D", single))
    rows.append(KeyRow(f"{theirs}.linear2.bias", f"{to}.attn.o.b", "D -> D", single))
    # The shift comes first in this file. In diffusers' files, the scale comes first.
    last, ends = "final_layer.adaLN_modulation.1", ("final.shift", "final.scale")
    rows.append(KeyRow(f"{last}.weight", (f"{ends[0]}.w", f"{ends[1]}.w"), "((1|1) modulated) D -> D modulated, D modulated"))
    rows.append(KeyRow(f"{last}.bias", (f"{ends[0]}.b", f"{ends[1]}.b"), "((1|1) modulated) -> modulated, modulated"))
    rows.append(KeyRow("final_layer.linear.weight", "final.out.w", "(C p q) D -> D (p q C)"))
    rows.append(KeyRow("final_layer.linear.bias", "final.out.b", "(C p q) -> (p q C)"))
    return rows, mmdit_sizes(config.dims, config.patch, config.channels) | {"modulation3": 3, "modulation6": 6}


def unet_settings(shapes: Shapes) -> dict[str, Any]:
    """Derives the settings of a UNet from the shapes of its tensors. Whether it predicts noise or v cannot be derived.

    Raises:
        BadInput: the UNet reads an image besides the noise, or it is not one of Stable Diffusion 1, 2 and XL.
    """
    channels, out = shapes["input_blocks.0.0.weight"][1], shapes["out.2.weight"][0]
    if channels != out:
        problem = f"a UNet that reads {channels} channels and gives {out}, which is not built"
        raise BadInput(problem, hint="models that fill or edit images read one beside the noise")
    text = next((shape[1] for name, shape in shapes.items() if name.endswith("attn2.to_k.weight")), None)
    if text not in STABLE_DIFFUSION:
        text_widths = ", ".join(map(str, STABLE_DIFFUSION))
        raise BadInput(f"a UNet that reads text states of {text} numbers: {text_widths} are those of Stable Diffusion 1, 2 and XL")
    blocks = part_count(shapes, "input_blocks")
    halves = [i for i in range(blocks) if f"input_blocks.{i}.0.op.weight" in shapes]
    layers = (halves[0] if halves else blocks) - 1
    starts = [1, *(i + 1 for i in halves)]
    widths = tuple(shapes[f"input_blocks.{i}.0.out_layers.3.weight"][0] for i in starts)
    depth = [part_count(shapes, f"input_blocks.{i}.1.transformer_blocks") for i in starts]
    pooled = shapes.get("label_emb.0.0.weight")
    return {
        "channels": channels,
        "widths": widths,
        "transformers": tuple(depth),
        "middle_transformer": part_count(shapes, "middle_block.1.transformer_blocks"),
        "heads": tuple(STABLE_DIFFUSION[text][0](width) for width in widths),
        "layers": layers,
        "text_width": text,
        "linear": len(shapes["middle_block.1.proj_in.weight"]) == 2,
        "pooled_width": None if pooled is None else pooled[1] - 6 * SIZE_WAVES,
        "size": 128 if text == 2048 else 64,
    }


def vae_settings(shapes: Shapes, text_width: int) -> dict[str, Any]:
    """Derives the settings of an autoencoder from the shapes of its tensors.

    Args:
        text_width: the width of the text states that the UNet in the same file reads.
    """
    levels = part_count(shapes, "encoder.down")
    return {
        "widths": tuple(shapes[f"encoder.down.{i}.block.0.conv1.weight"][0] for i in range(levels)),
        "layers": part_count(shapes, "encoder.down.0.block"),
        "latent_channels": shapes["decoder.conv_in.weight"][1],
        "attention": "encoder.mid.attn_1.q.weight" in shapes,
        "moments_conv": "quant_conv.weight" in shapes,
        "latents_conv": "post_quant_conv.weight" in shapes,
        "scale": STABLE_DIFFUSION[text_width][1],
    }


def clip_settings(shapes: Shapes) -> dict[str, Any]:
    """Derives the settings of OpenAI's CLIP text encoder from the shapes of its tensors. The head size is 64."""
    layers = part_count(shapes, "text_model.encoder.layers")
    vocab, width = shapes["text_model.embeddings.token_embedding.weight"]
    return {
        "vocab": vocab,
        "width": width,
        "layers": layers,
        "heads": width // 64,
        "ffn": shapes["text_model.encoder.layers.0.mlp.fc1.weight"][0],
        "context": shapes["text_model.embeddings.position_embedding.weight"][0],
        "eos": 2,
    }


def openclip_settings(shapes: Shapes, projects: bool) -> dict[str, Any]:
    """Derives the settings of OpenCLIP's text encoder from the shapes of its tensors. The head size is 64.

    Args:
        projects: whether the encoder has a projection of the pooled vector, as in Stable Diffusion XL. Stable Diffusion 2 reads only
            the states of tokens.
    """
    vocab, width = shapes["token_embedding.weight"]
    return {
        "vocab": vocab,
        "width": width,
        "layers": part_count(shapes, "transformer.resblocks"),
        "heads": width // 64,
        "ffn": shapes["transformer.resblocks.0.mlp.c_fc.weight"][0],
        "context": shapes["positional_embedding"][0],
        "activation": "gelu",
        "projection": shapes["text_projection"][1] if projects else None,
    }


def openclip_rows(config: Any) -> tuple[list[KeyRow], dict[str, int]]:
    """Returns the rows for OpenCLIP's tensor names of its text encoder, and the size of each axis in the rows."""
    layers, at = range(config.layers), "transformer.resblocks.{l}"
    rows = [
        KeyRow("token_embedding.weight", "embed.w", "V D -> V D"),
        KeyRow("positional_embedding", "positions.w", "A D -> A D"),
        KeyRow("ln_final.weight", "norm.scale", "D -> D"),
        KeyRow("ln_final.bias", "norm.b", "D -> D"),
    ]
    qkv = [f"layers.{{l}}.attn.{x}" for x in "qkv"]
    weights, biases = tuple(f"{path}.w" for path in qkv), tuple(f"{path}.b" for path in qkv)
    rows.append(KeyRow(f"{at}.attn.in_proj_weight", weights, "((N|K|K) H) D -> D N H, D K H, D K H", layers))
    rows.append(KeyRow(f"{at}.attn.in_proj_bias", biases, "((N|K|K) H) -> N H, K H, K H", layers))
    for theirs, ours, weight, bias in (
        ("attn.out_proj", "attn.o", "D (N H) -> N H D", "D -> D"),
        ("mlp.c_fc", "mlp.up", "F D -> D F", "F -> F"),
        ("mlp.c_proj", "mlp.down", "D F -> F D", "D -> D"),
    ):
        rows.append(KeyRow(f"{at}.{theirs}.weight", f"layers.{{l}}.{ours}.w", weight, layers))
        rows.append(KeyRow(f"{at}.{theirs}.bias", f"layers.{{l}}.{ours}.b", bias, layers))
    for theirs, ours in (("ln_1", "attn_norm"), ("ln_2", "mlp_norm")):
        rows.append(KeyRow(f"{at}.{theirs}.weight", f"layers.{{l}}.{ours}.scale", "D -> D", layers))
        rows.append(KeyRow(f"{at}.{theirs}.bias", f"layers.{{l}}.{ours}.b", "D -> D", layers))
    return rows + ([KeyRow("text_projection", "pooler.w", "D O -> D O")] if config.projection else []), config.dims


def unet_rows(config: Any) -> tuple[list[KeyRow], dict[str, int]]:
    """Returns the rows for Stability AI's tensor names of a UNet, and the size of each axis in the rows."""
    rows, sizes = config.hub_rows()
    return [replace(row, names=_unet_name(row.names, config)) for row in rows], sizes


def vae_rows(config: Any) -> tuple[list[KeyRow], dict[str, int]]:
    """Returns the rows for Stability AI's tensor names of an autoencoder, and the size of each axis in the rows. In these files, the
    projections of attention are 1 x 1 convolutions."""
    rows, sizes = config.hub_rows()
    last = len(config.widths) - 1
    renamed = []
    for row in rows:
        is_matrix = "attentions" in row.names and row.names.endswith(".weight") and "group_norm" not in row.names
        reading = row.reading.replace(" ->", " 1 1 ->") if is_matrix else row.reading
        renamed.append(replace(row, names=_vae_name(row.names, last), reading=reading))
    return renamed, sizes


def part_count(shapes: Collection[str], path: str) -> int:
    """Counts the numbers that follow a path in tensor names, such as the number of layers."""
    start = f"{path}."
    numbers = {name.removeprefix(start).partition(".")[0] for name in shapes if name.startswith(start)}
    return len([number for number in numbers if number.isdigit()])


def _unet_name(name: Any, config: Any) -> str:
    path, _, end = name.rpartition(".")
    each, last = config.layers + 1, len(config.widths) - 1
    if (at := re.fullmatch(r"(down|up)_blocks\.(\d+)\.(resnets|attentions)\.(\d+)\.(.*)", path)) is not None:
        side, level, kind, i, rest = at.groups()
        start = f"input_blocks.{1 + int(level) * each + int(i)}" if side == "down" else f"output_blocks.{int(level) * each + int(i)}"
        return f"{start}.0.{RESNET[rest]}.{end}" if kind == "resnets" else f"{start}.1.{rest}.{end}"
    if (at := re.fullmatch(r"down_blocks\.(\d+)\.downsamplers\.0\.conv", path)) is not None:
        return f"input_blocks.{(int(at[1]) + 1) * each}.0.op.{end}"
    if (at := re.fullmatch(r"up_blocks\.(\d+)\.upsamplers\.0\.conv", path)) is not None:
        place = 2 if config.transformers[last - int(at[1])] else 1
        return f"output_blocks.{(int(at[1]) + 1) * each - 1}.{place}.conv.{end}"
    for theirs, ours in UNET_ENDS.items():
        if path == theirs or path.startswith(f"{theirs}."):
            rest = path.removeprefix(theirs).removeprefix(".")
            return ".".join(part for part in (ours, RESNET.get(rest, rest), end) if part)
    raise ValueError(f"{name} has no name in Stability AI's files")


def _vae_name(name: Any, last: int) -> str:
    path, _, end = name.rpartition(".")
    side, _, rest = path.partition(".")
    if side not in ("encoder", "decoder"):
        return name
    rest = rest.replace("conv_shortcut", "nin_shortcut")
    rest = re.sub(r"^down_blocks\.(\d+)\.resnets", r"down.\1.block", rest)
    rest = re.sub(r"^down_blocks\.(\d+)\.downsamplers\.0", r"down.\1.downsample", rest)
    rest = re.sub(r"^up_blocks\.(\d+)\.resnets", lambda at: f"up.{last - int(at[1])}.block", rest)
    rest = re.sub(r"^up_blocks\.(\d+)\.upsamplers\.0", lambda at: f"up.{last - int(at[1])}.upsample", rest)
    for theirs, ours in VAE_ENDS.items():
        if rest == theirs or rest.startswith(f"{theirs}."):
            inner = rest.removeprefix(theirs).removeprefix(".")
            rest = ".".join(part for part in (ours, VAE_ATTENTION.get(inner, inner)) if part)
    return f"{side}.{rest}.{end}"
