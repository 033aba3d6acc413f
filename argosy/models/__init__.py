"""Model families, one file each: config, module, names on the Hub. A family registers with one line here, or from outside the
package."""

from argosy.core.registry import Registry

FAMILIES = Registry("model family")
FAMILIES.add("llama", "argosy.models.llama:LlamaConfig")
FAMILIES.add("llama4", "argosy.models.llama4:Llama4Config")
FAMILIES.add("qwen", "argosy.models.qwen:QwenConfig")
FAMILIES.add("mixtral", "argosy.models.mixtral:MixtralConfig")
FAMILIES.add("gemma", "argosy.models.gemma:GemmaConfig")
FAMILIES.add("olmo", "argosy.models.olmo:OlmoConfig")
FAMILIES.add("phi", "argosy.models.phi:PhiConfig")
FAMILIES.add("gpt_oss", "argosy.models.gpt_oss:GptOssConfig")
FAMILIES.add("deepseek", "argosy.models.deepseek:DeepSeekConfig")
FAMILIES.add("qwen3_next", "argosy.models.qwen3_next:Qwen3NextConfig")
FAMILIES.add("gpt2", "argosy.models.gpt2:GPT2Config")
FAMILIES.add("bert", "argosy.models.bert:BertConfig")
FAMILIES.add("clip_text", "argosy.models.clip:ClipTextConfig")
FAMILIES.add("t5", "argosy.models.t5:T5Config")
FAMILIES.add("autoencoder_kl", "argosy.models.autoencoders.autoencoder_kl:AutoencoderKLConfig")
FAMILIES.add("autoencoder_tiny", "argosy.models.autoencoders.autoencoder_tiny:AutoencoderTinyConfig")
FAMILIES.add("flux", "argosy.models.diffusion.flux:FluxConfig")
FAMILIES.add("sd3", "argosy.models.diffusion.sd3:SD3Config")
FAMILIES.add("unet", "argosy.models.diffusion.unet:UNetConfig")
FAMILIES.add("ranker", "argosy.models.ranker:RankerConfig")
FAMILIES.add("two_tower", "argosy.models.two_tower:TwoTowerConfig")
FAMILIES.add("dit", "argosy.models.diffusion.dit:DiTConfig")
FAMILIES.add_installed("argosy.families")
